r"""Decode attention over packed keys and values on a CPU, compiled when it is first used.

One pass reads the codes where they lie and never writes them out as numbers:

.. math::
    q \cdot k_t = \sum_c (q_c s_c)\, K_{tc} + \sum_c q_c z_c, \qquad
    o_c = \sum_t (p_t s_t)\, V_{tc} + \sum_t p_t z_t

so that a scale is multiplied in once for 32 numbers. The softmax is taken block by block, with the
running maximum of flash attention. The machine code is built by LLVM (through llvmlite, the
``kernels`` extra) for the processor at hand, one function per shape: explicit vectors of 16, all
query heads of a KV head in registers. No compiler has to be installed. Where llvmlite is missing
the PyTorch reference runs.

Threads are those of PyTorch's own OpenMP pool where it can be found, so that the two never compete;
else one thread runs.
"""

from __future__ import annotations

import ctypes
import math
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conduit_kv.cache.codec import GROUP, LANES, planes

_BLOCK = 8
"""Groups of tokens per softmax block: their scores stay in the first-level cache."""
_HIDDEN = -1e30
"""The score of a slot that holds no token."""
_LOG2E = math.log2(math.e)
_EXP2 = (1.0, 0.69314718056, 0.24022650695, 0.05550410866, 0.00961812911, 0.00133335581, 0.000154)
"""Taylor coefficients of 2^x around 0, for x in [-0.5, 0.5]: relative error 2e-7."""
_MOST_HEADS = 8
"""Query heads per KV head that fit into registers."""


def available() -> bool:
    """Whether the kernel can be built here."""
    return _llvm() is not None


def supports(group: int, widths: tuple[int, int]) -> bool:
    """Whether there is a kernel for ``group`` query heads per KV head of these sizes."""
    return (
        group <= _MOST_HEADS
        and all(width % LANES == 0 and width <= 256 for width in widths)
        and available()
    )


def decode(
    query: Tensor,
    keys: Tensor,
    key_scales: Tensor,
    values: Tensor,
    value_scales: Tensor,
    index: Tensor,
    bits: int,
    width: int,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """Attention of one row over packed K (per channel) and V (per token).

    Parameters
    ----------
    query : Tensor
        ``[H, d]``, RoPE applied.
    keys, key_scales, values, value_scales : Tensor
        Of ``P`` KV heads: see :mod:`conduit_kv.cache.codec`.
    index : Tensor
        ``[S]`` int32, each slot's token; -1 for a hole.
    width : int
        Head size of V.

    Returns
    -------
    output : Tensor
        ``[H, width]`` in the type of ``query``.
    lse : Tensor
        ``[H]`` fp32, natural logarithm.
    """
    pairs, groups = key_scales.shape[0], key_scales.shape[1]
    heads, depth = query.shape
    group = heads // pairs
    run, combine = _functions(bits, depth, width, group)
    threads = torch.get_num_threads()
    blocks = -(-groups // _BLOCK)
    splits = min(blocks, max(1, -(-2 * threads // pairs))) if threads > 1 else 1
    per_split = -(-blocks // splits) * _BLOCK
    splits = -(-groups // per_split)
    q = query.float() * (scaling * _LOG2E)
    short = groups * GROUP - len(index)
    hidden = torch.zeros(groups * GROUP)
    hidden[: len(index)].masked_fill_(index < 0, _HIDDEN)
    if short:
        hidden[-short:] = _HIDDEN
    partial = torch.empty((splits, heads, width))
    sums = torch.empty((splits, heads, 2))
    output = torch.empty((heads, width))
    lse = torch.empty(heads)
    held = (q, keys, key_scales, values, value_scales, hidden, partial, sums, output, lse)
    numbers = (0, pairs * splits, splits, groups, per_split, heads)
    parameters = (ctypes.c_int64 * (len(numbers) + len(held)))(
        *numbers, *(tensor.data_ptr() for tensor in held)
    )
    _parallel(run, parameters, min(threads, pairs * splits))
    combine(parameters)
    return output.to(query.dtype), lse


# -- threads -------------------------------------------------------------------------------------


@cache
def _pool() -> Any:
    """``GOMP_parallel`` of the OpenMP library that PyTorch has loaded; None if there is none."""
    if platform.system() != "Linux":
        return None
    found = sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*"))
    found += sorted(Path(torch.__file__).parent.parent.glob("torch.libs/libgomp*.so*"))
    for path in found:
        try:
            return ctypes.CDLL(str(path)).GOMP_parallel
        except (OSError, AttributeError):
            continue
    return None


def _parallel(run: Any, parameters: Any, threads: int) -> None:
    pool = _pool() if threads > 1 else None
    if pool is None:
        run(parameters)
    else:
        pool(run, parameters, ctypes.c_uint(threads), ctypes.c_uint(0))


# -- machine code --------------------------------------------------------------------------------


@cache
def _llvm() -> Any:
    """llvmlite, set up for this processor: (ir, binding, engine, machine); None without it."""
    try:
        from llvmlite import binding, ir
    except ImportError:
        return None
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    features = binding.get_host_cpu_features()
    if platform.machine() in ("x86_64", "AMD64") and not (features.get("fma") and
                                                          features.get("f16c")):  # fmt: skip
        return None
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=features.flatten(), opt=3
    )
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    return ir, binding, engine, machine


@cache
def _functions(bits: int, depth: int, width: int, group: int) -> tuple[Any, Any]:
    """The compiled ``run`` and ``combine`` for one shape."""
    ir, binding, engine, machine = _llvm()
    name = f"b{bits}_d{depth}_v{width}_g{group}"
    module = ir.Module(name)
    _Attend(ir, module, f"run_{name}", bits, depth, width, group).build()
    _Combine(ir, module, f"combine_{name}", width).build()
    compiled = binding.parse_assembly(str(module))
    compiled.verify()
    options = binding.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
    passes = binding.create_pass_builder(machine, options)
    passes.getModulePassManager().run(compiled, passes)
    engine.add_module(compiled)
    engine.finalize_object()
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    run, combine = (
        kind(engine.get_function_address(f"{what}_{name}")) for what in ("run", "combine")
    )
    return run, combine


class _Code:
    """What both functions share: types, loops and a few vector operations."""

    def __init__(self, ir: Any, module: Any, name: str) -> None:
        self.ir = ir
        self.f32, self.f16 = ir.FloatType(), ir.HalfType()
        self.i32, self.i64 = ir.IntType(32), ir.IntType(64)
        self.vector = ir.VectorType(self.f32, LANES)
        self.halves = ir.VectorType(self.f16, LANES)
        self.words = ir.VectorType(self.i32, LANES)
        kind = ir.FunctionType(ir.VoidType(), [self.i64.as_pointer()])
        self.function = ir.Function(module, kind, name)
        self.entry = self.function.append_basic_block("entry")
        self.b = ir.IRBuilder(self.entry)

    def count(self, value: int) -> Any:
        return self.ir.Constant(self.i64, value)

    def number(self, value: float) -> Any:
        return self.ir.Constant(self.vector, [self.ir.Constant(self.f32, value)] * LANES)

    def parameter(self, place: int) -> Any:
        return self.b.load(self.b.gep(self.function.args[0], [self.count(place)]))

    def pointer(self, place: int, kind: Any) -> Any:
        return self.b.inttoptr(self.parameter(place), kind.as_pointer())

    def at(self, pointer: Any, *offset: Any) -> Any:
        total = offset[0]
        for more in offset[1:]:
            total = self.b.add(total, more)
        return self.b.gep(pointer, [total])

    def load(self, pointer: Any, kind: Any) -> Any:
        """A vector from a pointer to its elements."""
        return self.b.load(self.b.bitcast(pointer, kind.as_pointer()), align=2)

    def store(self, value: Any, pointer: Any) -> None:
        self.b.store(value, self.b.bitcast(pointer, value.type.as_pointer()), align=4)

    def splat(self, scalar: Any) -> Any:
        kind = self.ir.VectorType(scalar.type, LANES)
        undefined = self.ir.Constant(kind, self.ir.Undefined)
        one = self.b.insert_element(undefined, scalar, self.ir.Constant(self.i32, 0))
        zeros = self.ir.Constant(self.ir.VectorType(self.i32, LANES), [0] * LANES)
        return self.b.shuffle_vector(one, undefined, zeros)

    def scratch(self, kind: Any, count: int) -> Any:
        with self.b.goto_entry_block():
            return self.b.alloca(kind, size=count)

    def intrinsic(self, name: str, result: Any, *arguments: Any) -> Any:
        kind = self.ir.FunctionType(result, [argument.type for argument in arguments])
        module = self.function.module
        known = module.globals.get(name)
        return self.b.call(known or self.ir.Function(module, kind, name), arguments)

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        return self.intrinsic("llvm.fma.v16f32", self.vector, x, y, z)

    def sum(self, x: Any) -> Any:
        zero = self.ir.Constant(self.f32, 0.0)
        name = "llvm.vector.reduce.fadd.v16f32"
        kind = self.ir.FunctionType(self.f32, [self.f32, self.vector])
        known = self.function.module.globals.get(name)
        found = known or self.ir.Function(self.function.module, kind, name)
        return self.b.call(found, [zero, x], fastmath=("reassoc",))

    def highest(self, x: Any) -> Any:
        return self.intrinsic("llvm.vector.reduce.fmax.v16f32", self.f32, x)

    def larger(self, x: Any, y: Any) -> Any:
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def exp2(self, x: Any) -> Any:
        """2^x of a vector of numbers that are not positive."""
        b = self.b
        x = self.larger(x, self.number(-126.0))
        nearest = self.intrinsic("llvm.rint.v16f32", self.vector, x)
        rest = b.fsub(x, nearest)
        value = self.number(_EXP2[-1])
        for coefficient in reversed(_EXP2[:-1]):
            value = self.fma(value, rest, self.number(coefficient))
        bias = self.ir.Constant(self.words, [127] * LANES)
        places = self.ir.Constant(self.words, [23] * LANES)
        power = b.shl(b.add(b.fptosi(nearest, self.words), bias), places)
        return b.fmul(value, b.bitcast(power, self.vector))

    @contextmanager
    def loop(self, start: Any, stop: Any) -> Iterator[Any]:
        """Code inside runs for each number from ``start`` to before ``stop``."""
        b = self.b
        before = b.block
        head, body, after = (self.function.append_basic_block() for _ in range(3))
        b.branch(head)
        b.position_at_end(head)
        counter = b.phi(self.i64)
        counter.add_incoming(start, before)
        b.cbranch(b.icmp_signed("<", counter, stop), body, after)
        b.position_at_end(body)
        yield counter
        counter.add_incoming(b.add(counter, self.count(1)), b.block)
        b.branch(head)
        b.position_at_end(after)


class _Attend(_Code):
    """``run``: takes tasks, one KV head and one range of tokens each, until there are no more."""

    def __init__(
        self, ir: Any, module: Any, name: str, bits: int, depth: int, width: int, group: int
    ) -> None:
        super().__init__(ir, module, name)
        self.bits, self.depth, self.width, self.group = bits, depth, width, group

    def build(self) -> None:
        b = self.b
        (self.tasks, self.splits, self.groups, self.per_split, heads) = (
            self.parameter(n) for n in range(1, 6)
        )
        self.q, self.keys, self.key_scales = (
            self.pointer(6, self.f32), self.pointer(7, self.i32), self.pointer(8, self.f16)
        )  # fmt: skip
        self.values, self.value_scales = self.pointer(9, self.i32), self.pointer(10, self.f16)
        self.hidden, self.partial = self.pointer(11, self.f32), self.pointer(12, self.f32)
        self.sums = self.pointer(13, self.f32)
        self.scaled = self.scratch(self.f32, self.group * self.depth)
        self.weights = self.scratch(self.f32, self.group * _BLOCK * GROUP)
        self.share = self.scratch(self.f32, self.group * GROUP)
        take, work, done = (self.function.append_basic_block() for _ in range(3))
        b.branch(take)
        b.position_at_end(take)
        task = b.atomic_rmw("add", self.function.args[0], self.count(1), "monotonic")
        b.cbranch(b.icmp_signed("<", task, self.tasks), work, done)
        b.position_at_end(work)
        pair, split = b.sdiv(task, self.splits), b.srem(task, self.splits)
        row = b.add(b.mul(split, heads), b.mul(pair, self.count(self.group)))
        self.out = self.at(self.partial, b.mul(row, self.count(self.width)))
        self.state = self.at(self.sums, b.mul(row, self.count(2)))
        self._task(pair, split)
        b.branch(take)
        b.position_at_end(done)
        b.ret_void()

    def _task(self, pair: Any, split: Any) -> None:
        b = self.b
        for head in range(self.group):
            for start in range(0, self.width, LANES):
                place = self.at(self.out, self.count(head * self.width + start))
                self.store(self.number(0.0), place)
            self.b.store(self.ir.Constant(self.f32, _HIDDEN), self._state(head, 0))
            self.b.store(self.ir.Constant(self.f32, 0.0), self._state(head, 1))
        self.query = self.at(self.q, b.mul(pair, self.count(self.group * self.depth)))
        first = b.mul(split, self.per_split)
        last = b.add(first, self.per_split)
        last = b.select(b.icmp_signed("<", last, self.groups), last, self.groups)
        size = b.sub(last, first)
        blocks = b.sdiv(b.add(size, self.count(_BLOCK - 1)), self.count(_BLOCK))
        base = b.mul(pair, self.groups)
        with self.loop(self.count(0), blocks) as block:
            start = b.add(first, b.mul(block, self.count(_BLOCK)))
            left = b.sub(last, start)
            count = b.select(b.icmp_signed("<", left, self.count(_BLOCK)), left, self.count(_BLOCK))
            with self.loop(self.count(0), count) as number:
                self._scores(b.add(base, b.add(start, number)), b.add(start, number), number)
            self._softmax(count)
            self._outputs(b.add(base, start), count)

    def _state(self, head: int, which: int) -> Any:
        return self.at(self.state, self.count(2 * head + which))

    def _weights(self, head: int, offset: Any) -> Any:
        return self.at(self.weights, self.count(head * _BLOCK * GROUP), offset)

    def _codes(self, load: Callable[[int, int], Any], count: int) -> Iterator[tuple[int, Any]]:
        """``count`` codes of each lane, as numbers; ``load(p, w)`` gives word ``w`` of plane p."""
        b = self.b
        loaded: dict[tuple[int, int], Any] = {}
        for place in range(count):
            code, shift = None, 0
            for number, plane in enumerate(planes(self.bits)):
                per = 32 // plane
                word = (number, place // per)
                if word not in loaded:
                    loaded[word] = load(*word)
                at = place % per * plane
                part = loaded[word]
                if at:
                    part = b.lshr(part, self.ir.Constant(self.words, [at] * LANES))
                if at + plane < 32:
                    mask = (1 << plane) - 1
                    part = b.and_(part, self.ir.Constant(self.words, [mask] * LANES))
                if shift:
                    part = b.shl(part, self.ir.Constant(self.words, [shift] * LANES))
                code = part if code is None else b.or_(code, part)
                shift += plane
            yield place, b.sitofp(code, self.vector)

    def _scores(self, here: Any, slot: Any, number: Any) -> None:
        """Scores of the 32 tokens of group ``here`` (of all pairs), into the block's weights."""
        b = self.b
        scales = self.at(self.key_scales, b.mul(here, self.count(2 * self.depth)))
        sums = [self.number(0.0)] * self.group
        for start in range(0, self.depth, LANES):
            scale, zero = (
                b.fpext(self.load(self.at(scales, self.count(start + offset)), self.halves),
                        self.vector)
                for offset in (0, self.depth)
            )  # fmt: skip
            for head in range(self.group):
                place = self.count(head * self.depth + start)
                query = self.load(self.at(self.query, place), self.vector)
                self.store(b.fmul(query, scale), self.at(self.scaled, place))
                sums[head] = self.fma(query, zero, sums[head])
        constant = [self.splat(self.sum(x)) for x in sums]
        starts = [0]
        for plane in planes(self.bits):
            starts.append(starts[-1] + -(-self.depth * plane // 32))
        # As few channels a turn as fill whole words of every plane: short code compiles fast.
        unit = 32 // min(planes(self.bits))
        unit = unit if self.depth % unit == 0 else self.depth
        with self.loop(self.count(0), self.count(GROUP // LANES)) as half:
            block = b.add(b.mul(here, self.count(GROUP // LANES)), half)
            words = self.at(self.keys, b.mul(block, self.count(starts[-1] * LANES)))
            found = [self.scratch(self.vector, 1) for _ in constant]
            for place, value in zip(found, constant, strict=True):
                b.store(value, place)
            with self.loop(self.count(0), self.count(self.depth // unit)) as turn:

                def load(number: int, word: int, turn: Any = turn, words: Any = words) -> Any:
                    per_turn = -(-unit * planes(self.bits)[number] // 32)
                    here = self.count((starts[number] + word) * LANES)
                    moved = b.mul(turn, self.count(per_turn * LANES))
                    return self.load(self.at(words, here, moved), self.words)

                sums = [b.load(place) for place in found]
                first = b.mul(turn, self.count(unit))
                for channel, code in self._codes(load, unit):
                    for head in range(self.group):
                        place = self.at(self.scaled, self.count(head * self.depth + channel), first)
                        sums[head] = self.fma(self.splat(b.load(place)), code, sums[head])
                for place, value in zip(found, sums, strict=True):
                    b.store(value, place)
            first = b.mul(half, self.count(LANES))
            tokens = b.add(b.mul(slot, self.count(GROUP)), first)
            hidden = self.load(self.at(self.hidden, tokens), self.vector)
            offset = b.add(b.mul(number, self.count(GROUP)), first)
            for head in range(self.group):
                self.store(b.fadd(b.load(found[head]), hidden), self._weights(head, offset))

    def _softmax(self, count: Any) -> None:
        """Scores of a block to weights; what came before is scaled to the new maximum."""
        b = self.b
        size = b.mul(count, self.count(GROUP // LANES))
        for head in range(self.group):
            most, total = self.scratch(self.vector, 1), self.scratch(self.vector, 1)
            old = b.load(self._state(head, 0))
            b.store(self.splat(old), most)
            b.store(self.number(0.0), total)
            with self.loop(self.count(0), size) as place:
                score = self.load(self._weights(head, b.mul(place, self.count(LANES))), self.vector)
                b.store(self.larger(score, b.load(most)), most)
            highest = self.splat(self.highest(b.load(most)))
            with self.loop(self.count(0), size) as place:
                where = self._weights(head, b.mul(place, self.count(LANES)))
                weight = self.exp2(b.fsub(self.load(where, self.vector), highest))
                self.store(weight, where)
                b.store(b.fadd(b.load(total), weight), total)
            fade = self.exp2(b.fsub(self.splat(old), highest))
            zero = self.ir.Constant(self.i32, 0)
            b.store(b.extract_element(highest, zero), self._state(head, 0))
            before = b.fmul(b.load(self._state(head, 1)), b.extract_element(fade, zero))
            b.store(b.fadd(before, self.sum(b.load(total))), self._state(head, 1))
            for start in range(0, self.width, LANES):
                place = self.at(self.out, self.count(head * self.width + start))
                self.store(b.fmul(self.load(place, self.vector), fade), place)

    def _outputs(self, base: Any, count: Any) -> None:
        """Add a block's weighted values, 32 channels at a time."""
        blocks, parts = -(-self.width // LANES), -(-self.width // GROUP)
        full = self.width // GROUP
        if full:
            with self.loop(self.count(0), self.count(full)) as part:
                self._channels(base, count, part, 2, blocks, parts)
        if full < parts:
            self._channels(base, count, self.count(full), 1, blocks, parts)

    def _channels(
        self, base: Any, count: Any, part: Any, lanes: int, blocks: int, parts: int
    ) -> None:
        b = self.b
        heads = range(self.group)
        first = b.mul(part, self.count(GROUP))
        sums = {(h, n): self.scratch(self.vector, 1) for h in heads for n in range(lanes)}
        zeros = [self.scratch(self.vector, 1) for _ in heads]
        where = {
            (h, n): self.at(self.out, self.count(h * self.width + n * LANES), first)
            for h, n in sums
        }
        for key, place in sums.items():
            b.store(self.load(where[key], self.vector), place)
        for place in zeros:
            b.store(self.number(0.0), place)
        starts = [0]
        for plane in planes(self.bits):
            starts.append(starts[-1] + plane)
        with self.loop(self.count(0), count) as number:
            here = b.add(base, number)
            pair = b.add(b.mul(here, self.count(parts)), part)
            scales = self.at(self.value_scales, b.mul(pair, self.count(2 * GROUP)))
            for start in range(0, GROUP, LANES):
                scale, zero = (
                    b.fpext(self.load(self.at(scales, self.count(start + offset)), self.halves),
                            self.vector)
                    for offset in (0, GROUP)
                )  # fmt: skip
                offset = b.add(b.mul(number, self.count(GROUP)), self.count(start))
                for head in heads:
                    weight = self.load(self._weights(head, offset), self.vector)
                    place = self.at(self.share, self.count(head * GROUP + start))
                    self.store(b.fmul(weight, scale), place)
                    b.store(self.fma(weight, zero, b.load(zeros[head])), zeros[head])
            for lane in range(lanes):
                row = b.add(b.mul(here, self.count(blocks)), b.mul(part, self.count(2)))
                row = b.add(row, self.count(lane))
                words = self.at(self.values, b.mul(row, self.count(self.bits * LANES)))

                def load(number: int, word: int, words: Any = words) -> Any:
                    at = self.count((starts[number] + word) * LANES)
                    return self.load(self.at(words, at), self.words)

                found = [b.load(sums[head, lane]) for head in heads]
                for token, code in self._codes(load, GROUP):
                    for head in heads:
                        place = self.at(self.share, self.count(head * GROUP + token))
                        found[head] = self.fma(self.splat(b.load(place)), code, found[head])
                for head in heads:
                    b.store(found[head], sums[head, lane])
        constant = [self.splat(self.sum(b.load(place))) for place in zeros]
        for (head, lane), place in sums.items():
            self.store(b.fadd(b.load(place), constant[head]), where[head, lane])


class _Combine(_Code):
    """``combine``: the splits' outputs to one, and the log-sum-exp."""

    def __init__(self, ir: Any, module: Any, name: str, width: int) -> None:
        super().__init__(ir, module, name)
        self.width = width

    def build(self) -> None:
        b = self.b
        splits, heads = self.parameter(2), self.parameter(5)
        partial, sums = self.pointer(12, self.f32), self.pointer(13, self.f32)
        output, lse = self.pointer(14, self.f32), self.pointer(15, self.f32)
        most, total = self.scratch(self.f32, 1), self.scratch(self.f32, 1)
        lanes = range(0, self.width, LANES)
        found = {start: self.scratch(self.vector, 1) for start in lanes}
        zero = self.ir.Constant(self.i32, 0)
        with self.loop(self.count(0), heads) as head:
            b.store(self.ir.Constant(self.f32, _HIDDEN), most)
            b.store(self.ir.Constant(self.f32, 0.0), total)
            for place in found.values():
                b.store(self.number(0.0), place)
            with self.loop(self.count(0), splits) as split:
                row = b.add(b.mul(split, heads), head)
                highest = b.load(self.at(sums, b.mul(row, self.count(2))))
                b.store(self.larger(highest, b.load(most)), most)
            with self.loop(self.count(0), splits) as split:
                row = b.add(b.mul(split, heads), head)
                place = b.mul(row, self.count(2))
                highest = b.load(self.at(sums, place))
                share = self.exp2(self.splat(b.fsub(highest, b.load(most))))
                weight = b.fmul(
                    b.extract_element(share, zero), b.load(self.at(sums, place, self.count(1)))
                )
                b.store(b.fadd(b.load(total), weight), total)
                for start, sum_ in found.items():
                    at = self.at(partial, b.mul(row, self.count(self.width)), self.count(start))
                    b.store(self.fma(share, self.load(at, self.vector), b.load(sum_)), sum_)
            whole = self.splat(b.load(total))
            for start, sum_ in found.items():
                at = self.at(output, b.mul(head, self.count(self.width)), self.count(start))
                self.store(b.fdiv(b.load(sum_), whole), at)
            log = self.intrinsic("llvm.log.f32", self.f32, b.load(total))
            natural = b.fmul(b.load(most), self.ir.Constant(self.f32, math.log(2.0)))
            b.store(b.fadd(natural, log), self.at(lse, head))
        b.ret_void()
