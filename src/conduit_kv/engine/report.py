"""What was really done to a request: never what was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from conduit_kv.engine.cost import Work
from conduit_kv.stages.hold import average_bits, learned_bytes
from conduit_kv.stages.reuse import Usage

if TYPE_CHECKING:
    from conduit_kv.engine.request import RequestCache


@dataclass(frozen=True)
class LayerReport:
    """What one layer holds of one sequence.

    Attributes
    ----------
    layer : int
    kind : str
        ``"full"``, or ``"sliding"`` for a layer that methods leave alone.
    held : float
        Tokens held per KV head, mean over the heads.
    text : float
        Text tokens among them.
    images : tuple of float
        Visual tokens among them, per image.
    slots : int
        Slots attended: tokens held and, in a batch, the padding beside them.
    active : int
        Visual tokens that ran in the layer, whether they are held or not.
    """

    layer: int
    kind: str
    held: float
    text: float
    images: tuple[float, ...]
    slots: int
    active: int


@dataclass(frozen=True)
class SequenceReport:
    """What is held of one sequence of the batch.

    Attributes
    ----------
    tokens : int
        Tokens seen: the logical length.
    text : int
        Text tokens among them.
    images : tuple of int
        Visual tokens among them, per image.
    layers : tuple of LayerReport
    """

    tokens: int
    text: int
    images: tuple[int, ...]
    layers: tuple[LayerReport, ...]

    @property
    def kept(self) -> float:
        """Tokens held, mean over layers."""
        return sum(layer.held for layer in self.layers) / max(len(self.layers), 1)

    @property
    def kept_visual(self) -> float:
        """Visual tokens held, mean over layers."""
        return sum(sum(layer.images) for layer in self.layers) / max(len(self.layers), 1)

    @property
    def active_visual(self) -> float:
        """Visual tokens that ran, mean over layers: the sum over layers divided by their number."""
        return sum(layer.active for layer in self.layers) / max(len(self.layers), 1)


@dataclass(frozen=True)
class Report:
    """What was really done to a request.

    Attributes
    ----------
    plan : str
    sequences : tuple of SequenceReport
        One per sequence of the batch.
    kv_bytes : int
        Bytes of K and V that hold tokens, scales and zeros of quantised ones included.
    kv_allocated_bytes : int
        Bytes of the storages: with slack, indices and padding.
    bytes_by_kind : dict
        The allocated bytes by kind.
    full_bytes : int
        Bytes of K and V if every token seen were held.
    visual_bits : float or None
        Payload bits of a number of the visual tokens held, without scales; None if none is packed.
    learned_bytes : int
        Bytes of learned parts that the cache is read with: process memory, shared by all requests.
    seconds : dict
        Wall-clock seconds by phase: ``encode``, ``first_token`` (from processed inputs),
        ``per_token``.
    notes : tuple of str
        What was not applied, and why.
    work : Work or None
        FLOPs of the newest prefill or turn and of a decoded token, beside those without a plan.
    flows : tuple of str
        Per reduce or route method and sequence, how many visual tokens ran where.
    reuse : Usage or None
        What came from the store and what was computed again; None without a reuse stage.
    store_bytes : dict
        Bytes that the store holds now, per tier.
    """

    plan: str
    sequences: tuple[SequenceReport, ...]
    kv_bytes: int
    kv_allocated_bytes: int
    bytes_by_kind: dict[str, int]
    full_bytes: int
    visual_bits: float | None = None
    learned_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    work: Work | None = None
    flows: tuple[str, ...] = ()
    reuse: Usage | None = None
    store_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def usage(self) -> dict[str, int]:
        """Tokens as servers report them, over the batch; ``cached_tokens`` of images and text."""
        images = sum(sum(sequence.images) for sequence in self.sequences)
        used = self.reuse or Usage()
        return {
            "prompt_tokens": sum(sequence.tokens for sequence in self.sequences),
            "image_tokens": images,
            "cached_tokens": used.cached_image_tokens + used.cached_text_tokens,
            "cached_text_tokens": used.cached_text_tokens,
            "refreshed_tokens": used.refreshed_tokens,
            "kept_tokens": round(sum(sequence.kept for sequence in self.sequences)),
        }

    @staticmethod
    def of(cache: RequestCache, seconds: dict[str, float] | None = None) -> Report:
        """Read a cache."""
        used, allocated = cache.bytes_in_use(), cache.bytes_allocated()
        kv = sum(used.get(kind, 0) for kind in ("keys", "values", "scales"))
        sequences = tuple(_sequence(cache, row) for row in range(cache.progress.batch))
        per_token = sum(layer.bytes_per_token for layer in cache)
        notes = [note for stage in cache.stages for note in stage.notes]
        left_alone = [layer for layer in range(len(cache)) if cache.layers[layer].kind != "full"]
        if left_alone and cache.eviction.active:
            notes.append(f"layers {left_alone} have sliding windows and were left alone")
        for flow in cache.flows:
            if cache.progress.seen and not flow.schedules:
                notes.append(f"{flow.method} was not applied: no image has been prefilled")
        if cache.eviction.active and not cache.eviction.budgets:
            notes.append(f"{cache.plan} was not applied: no prompt has been prefilled")
        return Report(
            plan=str(cache.plan),
            sequences=sequences,
            kv_bytes=kv,
            kv_allocated_bytes=sum(allocated.values()),
            bytes_by_kind=allocated,
            full_bytes=per_token * sum(s.tokens for s in sequences),
            visual_bits=average_bits(cache),
            learned_bytes=learned_bytes(cache),
            seconds=dict(seconds or {}),
            notes=tuple(notes),
            work=Work.of(cache, cache.cost) if cache.cost is not None else None,
            flows=tuple(_flows(cache)),
            reuse=None if cache.reuse is None else cache.reuse.usage,
            store_bytes={} if cache.reuse is None else cache.reuse.shelf.store.nbytes_by_tier(),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**asdict(self), "usage": self.usage}

    def __str__(self) -> str:
        console = Console(width=100, no_color=True)
        with console.capture() as capture:
            console.print(self)
        return capture.get()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(title=f"plan {self.plan}", title_justify="left")
        table.add_column("sequence")
        table.add_column("tokens", justify="right")
        table.add_column("kept (mean over layers)", justify="right")
        table.add_column("visual kept", justify="right")
        table.add_column("visual tokens held, layer by layer", no_wrap=True)
        for number, sequence in enumerate(self.sequences):
            visual = sum(sequence.images)
            table.add_row(
                str(number),
                str(sequence.tokens),
                f"{sequence.kept:.1f} ({_percent(sequence.kept, sequence.tokens)})",
                f"{sequence.kept_visual:.1f} of {visual} "
                f"({_percent(sequence.kept_visual, visual)})",
                _bars([sum(layer.images) / max(visual, 1) for layer in sequence.layers]),
            )
        yield table
        yield from self.flows
        if self.reuse is not None:
            yield _reuse(self.reuse, self.store_bytes)
        if self.work is not None and self.work.full_prefill.total:
            yield _work(self.work)
        saved = _percent(self.kv_bytes, self.full_bytes)
        yield (
            f"K/V held {_size(self.kv_bytes)} ({saved} of {_size(self.full_bytes)}), "
            f"allocated {_size(self.kv_allocated_bytes)} with slack and indices"
        )
        if self.visual_bits is not None:
            yield f"visual tokens held at {self.visual_bits:.2f} bits on average, without scales"
        if self.learned_bytes:
            yield f"learned parts {_size(self.learned_bytes)}, shared by all requests"
        if self.seconds:
            yield ", ".join(f"{name} {value:.3f} s" for name, value in self.seconds.items())
        for note in self.notes:
            yield f"note: {note}"


def _sequence(cache: RequestCache, row: int) -> SequenceReport:
    layout = cache.progress.layouts[row]
    text = int(layout.text.sum())
    layers = []
    for number, layer in enumerate(cache):
        heads = [0] if layer.heads_agree(row) else list(range(layer.kv_heads))
        held = [layer.held(row, head) for head in heads]
        counts = [layout.counts(tokens) for tokens in held]
        images = tuple(
            sum(count[image] for count in counts) / len(heads) for image in range(len(layout.grids))
        )
        total = sum(len(tokens) for tokens in held) / max(len(heads), 1)
        slots = sum(segment.slots for segment in layer.segments)
        active = layer.reached(row) - text  # text runs everywhere
        layers.append(
            LayerReport(number, layer.kind, total, total - sum(images), images, slots, active)
        )
    visual = layout.counts()
    return SequenceReport(len(layout), len(layout) - sum(visual), tuple(visual), tuple(layers))


def _flows(cache: RequestCache) -> Iterator[str]:
    for flow in cache.flows:
        for row, schedule in enumerate(flow.schedules):
            if schedule is not None:
                name = f" (sequence {row})" if len(flow.schedules) > 1 else ""
                yield (
                    f"{flow.method.stage}{name}: visual tokens active, mean over layers: "
                    f"{schedule.formula()}"
                )


def _reuse(usage: Usage, store_bytes: dict[str, int]) -> str:
    parts = [f"images: {usage.cached_image_tokens} of {usage.image_tokens} tokens from the store"]
    if usage.computed_tokens:
        parts.append(f"{usage.computed_tokens} prefilled alone in {usage.fill_seconds:.3f} s")
    parts.append(f"{usage.refreshed_tokens} computed again in this prompt")
    if usage.cached_text_tokens:
        parts.append(f"text: {usage.cached_text_tokens} of {usage.text_tokens} from the store")
    for tier, (entries, size, seconds) in usage.stored.items():
        name = "entry" if entries == 1 else "entries"
        parts.append(f"{entries} {name}, {_size(size)}, from {tier} in {seconds:.3f} s")
    if usage.stored:
        parts.append(f"about {usage.saved_seconds:.3f} s of computing them saved")
    held = ", ".join(f"{tier} {_size(size)}" for tier, size in store_bytes.items())
    return "; ".join(parts) + f"; the store holds {held}"


def _work(work: Work) -> str:
    prefill, full = work.prefill, work.full_prefill
    ranking = f", and {_flops(prefill.ranking)} to rank" if prefill.ranking else ""
    return (
        f"prefill {_flops(prefill.attention + prefill.mlp)} ({_flops(prefill.attention)} attention,"
        f" {_flops(prefill.mlp)} MLP){ranking}: {_percent(prefill.total, full.total)} of "
        f"{_flops(full.total)}; a decoded token {_flops(work.step.total)} "
        f"({_percent(work.step.total, work.full_step.total)})"
    )


def _flops(count: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if count < 1000 or unit == "T":
            return f"{count:.3g} {unit}FLOPs"
        count /= 1000
    return ""


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _bars(shares: list[float]) -> str:
    ramp = " ▁▂▃▄▅▆▇█"
    return "".join(ramp[min(8, round(8 * share)) if share else 0] for share in shares)


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return ""
