"""``compress``: run a plan under a user's own, unchanged Transformers code."""

from __future__ import annotations

import functools
import inspect
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from conduit_kv.compat import cache_name, take_cache
from conduit_kv.engine.cost import Cost
from conduit_kv.engine.report import Report
from conduit_kv.engine.request import JoinedCache, RequestCache
from conduit_kv.errors import InputError, PlanError
from conduit_kv.families import Family, family_of
from conduit_kv.families.encoder import has_class_token, looking_layer, received
from conduit_kv.layout import Layout
from conduit_kv.methods.base import Method
from conduit_kv.plan import Plan
from conduit_kv.reuse.fill import check_layers
from conduit_kv.reuse.rotate import angles
from conduit_kv.reuse.shelf import Shelf
from conduit_kv.reuse.store import Store
from conduit_kv.stack import run_stack

_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_ENCODERS = ("get_image_features", "get_video_features")
_ENCODED = "_conduit_encoded"
"""Attribute of an encoder's output that says what it was computed from."""
_LENGTH = "conduit_encoded_length"
_LOOKED = "conduit_looked_at"
_OF_IMAGES = ("pixel_", "image_", "video_", "second_per_grid", "batch_num_images", "mm_encoder")
"""How the names of a call's arguments begin that say what its images are."""
_NOT_INPUTS = {"input_ids", "attention_mask", "position_ids", "inputs_embeds", "labels"}


def lock_of(model: nn.Module) -> threading.RLock:
    """The lock under which a model runs one forward at a time."""
    return _locks.setdefault(model, threading.RLock())


def unwrap(model: Any) -> PreTrainedModel:
    """The Transformers model inside a PEFT wrapper; a compiled one is refused."""
    _refuse_compiled(model)
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    return model


def _refuse_compiled(model: nn.Module) -> None:
    for name, module in [("", model), *model.named_modules()]:
        if "vis" in name:
            continue  # an image encoder may be compiled
        compiled = (
            hasattr(module, "_orig_mod")
            or getattr(module, "_compiled_call_impl", None) is not None
            or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
        )
        if compiled:
            raise PlanError(
                f"{name or 'the model'} is compiled (torch.compile): pass the model itself; "
                "Conduit's decoder loop changes shape between layers, which a compiled graph cannot"
            )


@dataclass
class Run:
    """What :func:`compress` hands out.

    Attributes
    ----------
    model : PreTrainedModel
    plan : Plan
    cache : RequestCache or None
        Of the newest request.
    """

    model: PreTrainedModel
    family: Family
    plan: Plan
    chunk: int | None = None
    evict: bool = True
    shelf: Shelf | None = None
    cache: RequestCache | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    _received: list[Tensor] = field(default_factory=list)
    _looked: Tensor | None = None
    _looked_by: str = ""
    _copies: int = 1

    @property
    def report(self) -> Report:
        """What was really done to the newest request.

        Raises
        ------
        InputError
            If the model has not run yet.
        """
        if self.cache is None:
            raise InputError("nothing has run yet: call the model inside the with block first")
        return Report.of(self.cache)

    def alone(self) -> Run:
        """A run under no plan on the same model, inside this one's ``wrapped`` block."""
        return Run(self.model, self.family, Plan(), self.chunk)

    def new_cache(self) -> RequestCache:
        """An empty cache under this run's plan."""
        text_model = self.family.text_model(self.model)
        layers = len(self.family.layers(text_model))
        kinds = [str(self.family.layer_kind(text_model, layer)) for layer in range(layers)]
        if self.plan.hold is not None:
            self.plan.hold.check_model(text_model)
        cache = RequestCache(kinds, self.plan, Cost.of(self.family, text_model), self.shelf)
        cache.rotary = functools.partial(angles, self.family, text_model)
        return cache

    # -- the two wrapped forwards ------------------------------------------------------------

    def model_forward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """The top-level forward: reads ids and images, then runs the model's own."""
        if args:
            kwargs["input_ids"] = args[0]
            if len(args) > 1:
                raise PlanError("pass the model's inputs by name under compress()")
        self._refuse(kwargs)
        given = take_cache(kwargs)
        cache = self._cache_for(given)
        ids: Tensor = kwargs["input_ids"]
        mask = kwargs.get("attention_mask")
        members = cache.members if isinstance(cache, JoinedCache) else [cache]
        before = [member.snapshot() for member in members]
        inner = getattr(self.model, "model", self.model)
        # Transformers writes M-RoPE's state on the model; a request's positions are its cache's.
        deltas = getattr(inner, "rope_deltas", None)
        self.seconds = {}
        try:
            if isinstance(cache, JoinedCache):
                kwargs.pop("attention_mask", None)
                steps = [
                    self._take_in(member, ids[row : row + 1], None, {})
                    for row, member in enumerate(members)
                ]
                position_ids = torch.cat(steps, dim=-2)
            else:
                visual = {k: v for k, v in kwargs.items() if k not in _NOT_INPUTS and v is not None}
                given_positions = kwargs.pop("position_ids", None)
                position_ids = self._take_in(cache, ids, mask, visual, given_positions)
                if cache.took_images:
                    # The images come from their entries: the model is not to encode them.
                    for name in {*visual, "mm_encoder_outputs"}:
                        if name.startswith(_OF_IMAGES):
                            kwargs.pop(name, None)
            kwargs[cache_name(type(self.model))] = cache
            kwargs["position_ids"] = position_ids.to(ids.device)
            kwargs["use_cache"] = True
            self.seconds["start"] = time.perf_counter()
            output = original(**kwargs)
        except BaseException:
            for member, state in zip(members, before, strict=True):
                member.roll_back(state)
            raise
        finally:
            if hasattr(inner, "rope_deltas"):
                inner.rope_deltas = deltas
        if isinstance(cache, RequestCache):
            self.cache = cache
        return output

    def _take_in(
        self,
        cache: RequestCache,
        ids: Tensor,
        mask: Tensor | None,
        visual: Mapping[str, Any],
        given_positions: Tensor | None = None,
    ) -> Tensor:
        """Tell a cache the step's tokens; gives their position ids ``[(3,) B, n]``."""
        cache.check_usable()
        valid = self._valid(cache, ids, mask)
        rows = [row[keep].cpu() for row, keep in zip(ids, valid, strict=True)]
        if ids.shape[1] == 1 and cache.progress.seen:
            layouts = [Layout.text_only(1) for _ in rows]
            relative = [torch.zeros(1, dtype=torch.long)] * len(rows)
        else:
            visual, copies = _encoder_inputs(visual)
            self._looked, self._copies = visual.get(_LOOKED), copies
            self._check_pixels(rows, visual)
            # Beams repeat each sequence with its images: one of each is laid out.
            layouts = self.family.layouts(self.model, rows[::copies], visual)
            relative = self.family.relative_positions(self.model, rows[::copies], visual)
            layouts = [layout for layout in layouts for _ in range(copies)]
            relative = [part for part in relative for _ in range(copies)]
        starts = cache.progress.next_position or [0] * len(rows)
        positions = [
            (part if part.dim() == 2 else part.expand(self.family.position_axes, -1)) + start
            for part, start in zip(relative, starts, strict=True)
        ]
        position_ids = self._pad_positions(positions, valid)
        self._check_positions(cache, given_positions, position_ids, valid)
        taking = cache.retrieval or cache.reuse
        brought = cache.retrieval is not None or any(layout.grids for layout in layouts)
        if taking is not None and brought and len(rows) > 1:
            raise PlanError(
                f"{taking.method} takes one prompt at a time, not {len(rows)} (beams are prompts "
                "too): run them one by one without beams; VLM.decode_together() answers several "
                "as one batch"
            )
        if cache.retrieval is not None:
            relative_ids = positions[0] - int(starts[0])
            cache.retrieval.take(self, rows[0], visual, layouts[0], relative_ids)
            self.seconds["fill"] = cache.retrieval.fill_seconds
        elif cache.reuse is not None and layouts[0].grids:
            pieces = self.family.pieces(self.model, rows[0], visual, layouts[0])
            cache.reuse.take(self, rows[0], pieces, positions[0])
        cache.progress.advance(valid, layouts, positions)
        if ids.shape[1] > 1:
            cache.check_turn()
        return position_ids

    def listen(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """The encoders: ``generate`` calls them first and forgets the images' sizes and grids."""
        self._received = []
        output = original(*args, **kwargs)
        names = list(inspect.signature(original).parameters)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        self._looked = None
        if self._received:
            self._looked = self.family.looked_at(self.model, torch.cat(self._received), given)
        if getattr(output, "pooler_output", None) is not None:
            images = len(output.pooler_output)
            vars(output)[_ENCODED] = {**given, _LENGTH: images, _LOOKED: self._looked}
        return output

    @property
    def looks(self) -> bool:
        """Whether the plan wants to know what the image encoder looked at."""
        return any(method.looks for method in self.plan.flows)

    def look(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Before the encoder's layer runs whose states the language model gets."""
        hidden = args[0] if args else kwargs["hidden_states"]
        by_class_token = has_class_token(cast("nn.Module", self.family.tower(self.model)))
        self._received.append(received(module, hidden, by_class_token=by_class_token))
        self._looked_by = (
            "attention of the class token" if by_class_token else "mean attention received"
        )

    def text_forward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """The text stack's forward: Conduit's decoder loop."""
        names = dict(kwargs)
        cache = take_cache(names)
        if not isinstance(cache, RequestCache | JoinedCache):
            return original(*args, **kwargs)
        # Until here the call was embedding and image encoder.
        self.seconds["encode"] = time.perf_counter() - self.seconds.pop("start", 0.0)
        if self._looked is not None and isinstance(cache, RequestCache):
            cache.look(self._looked, self._looked_by, self._copies)
            self._looked = None
        text_model = self.family.text_model(self.model)
        by_default = getattr(text_model.config, "output_hidden_states", False)
        stack = functools.partial(
            run_stack,
            self.family,
            text_model,
            cache,
            chunk=self.chunk,
            evict=self.evict,
            output_hidden_states=bool(names.get("output_hidden_states", by_default)),
        )
        return cache.run(stack, names["inputs_embeds"], names["position_ids"], names)

    # -- what a call may ask for -------------------------------------------------------------

    def _refuse(self, kwargs: Mapping[str, Any]) -> None:
        if kwargs.get("input_ids") is None:
            raise PlanError("pass input_ids: from embeddings alone nobody can tell text from image")
        if kwargs.get("use_cache") is False:
            raise PlanError("use_cache=False leaves no cache to work on: drop it, or the plan")
        if kwargs.get("output_attentions"):
            raise PlanError("output_attentions=True needs T x T weights, which are never made")
        if isinstance(kwargs.get("output_hidden_states"), list | tuple | set):
            raise PlanError("output_hidden_states=True gives all layers under a plan: take some")
        layers = self.family.layers(self.family.text_model(self.model))
        if any(getattr(x, "gradient_checkpointing", False) and x.training for x in layers):
            raise PlanError(
                "gradient checkpointing runs layers without a cache: call "
                "model.gradient_checkpointing_disable(), or train without a plan"
            )
        flows = [method.name for method in self.plan.flows]
        if flows and (kwargs.get("labels") is not None or self.model.training):
            raise PlanError(
                f"{' and '.join(flows)} leave tokens out, so that there is no loss over all of "
                "them: leave out labels and call model.eval(), or train without these stages"
            )
        if self.plan.reuse is not None and not self.plan.reuse.is_identity:
            check_layers(self.family, self.model, "reuse")
            if kwargs.get("labels") is not None or kwargs.get("output_hidden_states"):
                raise PlanError(
                    f"under {self.plan.reuse} most visual tokens do not run, nor does stored text: "
                    "there are neither hidden states nor a loss of all tokens; leave out labels "
                    "and output_hidden_states"
                )
        mask = kwargs.get("attention_mask")
        if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
            raise PlanError("pass a 2-d attention_mask (1 for tokens, 0 for padding)")

    def _cache_for(self, given: Any) -> RequestCache | JoinedCache:
        if isinstance(given, JoinedCache):
            return given
        if isinstance(given, RequestCache):
            if given.plan != self.plan:
                raise PlanError(
                    f"this cache was made under {given.plan}, and is continued under {self.plan}: "
                    "continue it under its own plan"
                )
            return given
        plain = type(given) is DynamicCache and not given.offloading
        if given is None or (plain and given.get_seq_length() == 0):
            return self.new_cache()
        raise PlanError(
            f"a {type(given).__name__} of the caller's cannot be used under compress(): leave the "
            "cache out, or continue from one that a compressed generate returned"
        )

    def _valid(self, cache: RequestCache, ids: Tensor, mask: Tensor | None) -> Tensor:
        batch, columns = ids.shape
        if cache.progress.batch not in (0, batch):
            raise InputError(
                f"the cache holds {cache.progress.batch} sequences and the call brings {batch}"
            )
        if mask is None:
            return torch.ones((batch, columns), dtype=torch.bool)
        expected = cache.progress.seen + columns
        if mask.shape[1] not in (columns, expected):
            raise InputError(
                f"attention_mask has {mask.shape[1]} columns; cache and call have {expected}"
            )
        valid = mask[:, -columns:].bool().cpu()
        if not bool(valid.any(1).all()):
            raise InputError("a sequence of the batch has no token at all: drop it")
        starts = valid[:, 0].int() + (valid[:, 1:] & ~valid[:, :-1]).sum(1)
        if bool((starts > 1).any()):
            raise InputError(
                "attention_mask hides tokens between others: pad at the sides, and leave out of "
                "the prompt what is not to be seen"
            )
        return valid

    def _check_pixels(self, rows: list[Tensor], visual: Mapping[str, Any]) -> None:
        if any(name.startswith("pixel_values") for name in visual):
            return
        count = sum(int(self.family.visual_mask(self.model, row).sum()) for row in rows)
        if count:
            raise InputError(
                f"the prompt has {count} visual placeholder tokens, but no pixel_values came with "
                "it: pass what the processor gave"
            )

    def _pad_positions(self, positions: list[Tensor], valid: Tensor) -> Tensor:
        axes = positions[0].shape[0]
        padded = torch.ones((axes, *valid.shape), dtype=torch.long)
        for row, part in enumerate(positions):
            padded[:, row, valid[row]] = part
        return padded if self.family.position_axes > 1 else padded[0]

    def _check_positions(
        self, cache: RequestCache, given: Tensor | None, ours: Tensor, valid: Tensor
    ) -> None:
        renumbered = self.family.position_axes > 1 or cache.retrieval is not None
        if given is None or (renumbered and cache.progress.seen):
            return
        given = given.cpu()
        if given.dim() == 3 and ours.dim() == 3:
            given = given[-ours.shape[0] :]
        elif ours.dim() == 3:
            return
        fits = given.shape[-1] == ours.shape[-1] and given.dim() == ours.dim()
        if not fits or not torch.equal(given.expand_as(ours)[..., valid], ours[..., valid]):
            raise PlanError("custom position_ids are not supported under a plan: leave them out")


@contextmanager
def compress(
    model: PreTrainedModel,
    plan: Plan | Method | str | None,
    *,
    prefill_chunk: int | None = None,
    store: Store | None = None,
    processor: Any = None,
) -> Iterator[Run]:
    """Run ``plan`` on everything that ``model`` does inside the ``with`` block.

    Parameters
    ----------
    model : PreTrainedModel
        A vision-language model of a known family, also wrapped by PEFT or dispatched over several
        devices. Two of its bound methods are wrapped; both are put back on any exit.
    plan : Plan, Method or str
        For example ``"tgv-kv:0.2"``.
    prefill_chunk : int or None
        Run a prefill so many tokens at a time within each layer. The result is the same.
    store : Store or None
        Where a reuse stage keeps images and text; by default in memory, as long as the block runs.
        An error under a plan that reuses nothing.
    processor : ProcessorMixin, optional
        The model's processor: a reuse stage prefills images inside its chat template.

    Yields
    ------
    Run
        ``run.report`` says what was really done to the newest request.

    Raises
    ------
    PlanError
        If the plan cannot be carried out on this model, or compress() is nested on it.
    """
    target = unwrap(model)
    family = family_of(target)
    plan = Plan.of(plan)
    plan.check_store(store)
    shelf = Shelf.of(store or Store(), family, target, processor)
    run = Run(target, family, plan, prefill_chunk, shelf=shelf)
    with wrapped(run):
        yield run


@contextmanager
def wrapped(run: Run) -> Iterator[None]:
    """Wrap the two forwards of a run's model, and listen at its encoders, until any exit."""
    target, text_model = run.model, run.family.text_model(run.model)
    inner = getattr(target, "model", target)
    lock = lock_of(target)
    with lock:
        if hasattr(target.forward, "__conduit__"):
            raise PlanError("compress() is active on this model already: end that block first")
        methods = [
            (target, "forward", run.model_forward),
            (text_model, "forward", run.text_forward),
        ]
        methods += [(inner, name, run.listen) for name in _ENCODERS if hasattr(inner, name)]
        before = [(module, name, module.__dict__.get(name)) for module, name, _ in methods]
        deltas = getattr(inner, "rope_deltas", None)
        for module, name, replacement in methods:
            module.__dict__[name] = _wrap(getattr(module, name), replacement, lock)
        looking = looking_layer(target, run.family.tower(target)) if run.looks else None
        hook = None
        if looking is not None:
            hook = looking.register_forward_pre_hook(run.look, with_kwargs=True)
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()
        for module, name, own in before:
            if own is None:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = own
        if hasattr(inner, "rope_deltas"):
            inner.rope_deltas = deltas


def _encoder_inputs(visual: Mapping[str, Any]) -> tuple[Mapping[str, Any], int]:
    """What the images were encoded from, and how often beams repeat each sequence."""
    outputs = visual.get("mm_encoder_outputs") or {}
    copies = 1
    for output in outputs.values():
        origin = vars(output).get(_ENCODED)
        if origin is None:
            raise PlanError("pass the images' pixels under a plan, not mm_encoder_outputs")
        visual = {**visual, **{name: value for name, value in origin.items() if value is not None}}
        copies = max(copies, len(output.pooler_output) // origin[_LENGTH])
    return visual, copies


def _wrap(original: Any, replacement: Any, lock: threading.RLock) -> Any:
    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return replacement(original, *args, **kwargs)

    forward.__conduit__ = True  # type: ignore[attr-defined]
    return forward
