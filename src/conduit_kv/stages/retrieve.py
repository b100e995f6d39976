"""The retrieve stage of one request: every question chooses anew what it sees of the images.

Images are prefilled alone, one after another, and kept as entries. The visual tokens of a prompt
never run in it. When a question comes, its method ranks the entries' tokens; the chosen ones get
their places, and then all text runs over them, from the first token on, as a plain model's forward
over a cache built by hand would. So a question answers as if it had been the first one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from conduit_kv.cache import VisualCache
from conduit_kv.cache.cache import borrowed
from conduit_kv.cache.gathered import GatheredSegment, PagedSegment
from conduit_kv.cache.segments import Segment
from conduit_kv.errors import InputError, PlanError
from conduit_kv.families import Family
from conduit_kv.families.piece import Piece
from conduit_kv.layout import Layout
from conduit_kv.methods.hold import HoldMethod
from conduit_kv.methods.retrieve import RetrieveMethod
from conduit_kv.methods.retrieve.base import Ranking
from conduit_kv.methods.retrieve.quest import Quest
from conduit_kv.methods.retrieve.rekv import ReKv
from conduit_kv.retrieve.bank import Bank, contiguous_positions
from conduit_kv.retrieve.question import Question
from conduit_kv.reuse.entry import Entry
from conduit_kv.reuse.fill import check_layers
from conduit_kv.reuse.held import FULL, Held
from conduit_kv.reuse.rotate import columns_of, rotary_of, rotate, unrotate
from conduit_kv.reuse.shelf import Shelf

if TYPE_CHECKING:
    from conduit_kv.engine.compress import Run

Stack = Callable[..., Any]

_ROOM = 64
"""Positions left for an answer where a prompt is scaled into the model's."""


@dataclass(frozen=True)
class Choice:
    """What a question chose.

    Attributes
    ----------
    order : tuple of int
        Units, best first.
    tokens : Tensor
        ``[n]`` int64 ascending, candidates that are seen (by the first layer, if layers differ).
    seconds : float
        What choosing took, gathering and rotating included.
    ranking : Ranking
        The scores behind it (the first layer's, if layers differ).
    """

    order: tuple[int, ...]
    tokens: Tensor
    seconds: float
    ranking: Ranking


@dataclass
class Retrieval:
    """The retrieve stage of one request.

    Attributes
    ----------
    method : RetrieveMethod
    cache : VisualCache
    shelf : Shelf
        Where entries come from.
    hold : HoldMethod
        How they are kept between questions.
    bank : Bank
        The images so far.
    ids : Tensor
        ``[T]`` int64, all tokens so far.
    choice : Choice or None
        Of the newest question.
    fill_seconds : float
        What prefilling the images alone took.
    positions : Tensor
        ``[axes, T]`` int64, those of the whole prompt, whatever is seen of it.
    """

    method: RetrieveMethod
    cache: VisualCache
    shelf: Shelf
    hold: HoldMethod = FULL
    bank: Bank = field(default_factory=Bank)
    ids: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    choice: Choice | None = None
    fill_seconds: float = 0.0
    positions: Tensor = field(default_factory=lambda: torch.empty((1, 0), dtype=torch.long))
    _model: tuple[Family, nn.Module] | None = None

    def __post_init__(self) -> None:
        self.cache = borrowed(self.cache)

    def fork(self, cache: VisualCache) -> Retrieval:
        """This stage's state for a fork of its cache."""
        return replace(self, cache=cache, bank=self.bank.copy())

    # -- what comes in -----------------------------------------------------------------------

    def take(
        self, run: Run, ids: Tensor, visual: Mapping[str, Any], layout: Layout, relative: Tensor
    ) -> None:
        """Remember a step's tokens, and prefill its images alone, one after another.

        Parameters
        ----------
        ids : Tensor
            ``[n]`` int64, of the step.
        visual : mapping
            What the processor gave for them.
        layout : Layout
            Of the step's tokens.
        relative : Tensor
            ``[axes, n]`` int64, their positions counted from 0.
        """
        text_model = run.family.text_model(run.model)
        self._model = run.family, text_model
        start = len(self.ids)
        if len(ids) > 1:
            check_layers(run.family, run.model, "retrieve")
            self.method.check_model(text_model)
        if layout.grids:
            began = time.perf_counter()
            base = self.bank.images[-1] + 1 if self.bank.images else 0
            pieces = run.family.pieces(run.model, ids, visual, layout)
            found = self.shelf.take(run, pieces, self.method.context)
            reads = self.method.reads(len(run.family.layers(text_model)), text_model)
            elsewhere = self.shelf.store.disk is not None or self.shelf.store.redis is not None
            for piece, taken in zip(pieces, found, strict=True):
                held = Held.of(taken.entry, self.hold)
                stays = elsewhere and reads is not None
                source = partial(self._fetch, run, piece) if stays else held
                self.bank.add(
                    held.entry(), piece.tokens + start, piece.image + base, source, reads or ()
                )
            self.fill_seconds += time.perf_counter() - began
        self.ids = torch.cat([self.ids, ids.cpu()])
        after = int(self.positions.max()) + 1 if self.positions.numel() else 0
        if not self.positions.numel():
            self.positions = relative[:, :0]
        self.positions = torch.cat([self.positions, relative + after], dim=1)

    def _fetch(self, run: Run, piece: Piece) -> Entry:
        """An entry that is not held: from the store, or computed again if it is gone."""
        (taken,) = self.shelf.take(run, [piece], self.method.context)
        return Held.of(taken.entry, self.hold).entry()

    # -- a step ------------------------------------------------------------------------------

    def run(
        self, stack: Stack, embeddings: Tensor, position_ids: Tensor, features: Mapping[str, Any]
    ) -> Any:
        """Run a step: a question over what it chooses, or a decoded token over what was chosen.

        Gives what the text model returns, with NaN for the visual tokens, which never run.
        """
        progress = self.cache.progress
        columns = embeddings.shape[1]
        if columns == 1 and progress.seen > 1:
            return stack(embeddings, position_ids, features)
        layout = progress.layouts[0]
        step = torch.arange(len(layout) - columns, len(layout))
        mine = layout.text[step]
        if not bool(mine[-1]):
            raise InputError(
                "the prompt ends with an image: with a retrieve plan a question has to follow it"
            )
        whole = progress.step_tokens
        try:
            output = self._ask(stack, layout, step)
        finally:
            progress.step_tokens = whole
        count = int(mine.sum())

        def spread(states: Tensor) -> Tensor:
            out = states.new_full((1, columns, states.shape[-1]), torch.nan)
            out[:, mine.to(out.device)] = states[:, -count:]
            return out

        output.last_hidden_state = spread(output.last_hidden_state)
        if output.hidden_states is not None:
            output.hidden_states = tuple(spread(states) for states in output.hidden_states)
        return output

    def _ask(self, stack: Stack, layout: Layout, step: Tensor) -> Any:
        family, text_model = self._known()
        progress = self.cache.progress
        text = torch.nonzero(layout.text).flatten()
        seen_images = torch.nonzero(layout.visual[step]).flatten()
        after = int(seen_images[-1]) + 1 if len(seen_images) else 0
        span = step[after:]
        embed: Any = text_model.get_input_embeddings()  # type: ignore[operator]
        device = embed.weight.device
        rows = embed(self.ids[text].to(device))[None]
        positions = self.positions
        if len(self.bank):
            began = time.perf_counter()
            prefix = torch.tensor(self.shelf.context(self.method.context), dtype=torch.long)
            question = Question(
                family, text_model, self.bank, layout,
                embed(prefix.to(device)), embed(self.ids[span].to(device)),
            )  # fmt: skip
            places, segments, ranking, tokens = self._choose(question, positions, text, span)
            spent = time.perf_counter() - began
            self.choice = Choice(tuple(ranking.order), tokens, spent, ranking)
        else:
            places, segments = positions[:, text], [None] * len(self.cache.layers)
        for layer, segment in zip(self.cache.layers, segments, strict=True):
            layer.reset()
            layer.frozen = [segment] if segment is not None else []
        progress.step_tokens = text[None].int().to(rows.device)
        progress.next_position = [math.floor(float(places.max())) + 1]
        ids = places[:, None] if family.position_axes > 1 else places
        return stack(rows, ids.to(rows.device), {})

    def _known(self) -> tuple[Family, nn.Module]:
        if self._model is None:
            raise RuntimeError("no tokens have been taken for this step")
        return self._model

    def _choose(
        self, question: Question, positions: Tensor, text: Tensor, span: Tensor
    ) -> tuple[Tensor, list[Segment | None], Ranking, Tensor]:
        """Places of the text ``[axes, t]``, a segment per layer, the ranking, the tokens."""
        method, bank = self.method, self.bank
        count = method.count(bank.size, bank.bytes_per_token)
        if isinstance(method, ReKv) and count < bank.size:
            return self._by_layer(method, question, count, text, span)
        everything = torch.arange(bank.size)
        ranking = method.rank(question)
        paged = isinstance(method, Quest)
        chosen = everything if paged else method.choose(question, ranking, count)
        places, keys, values = self._placed(question, positions, text, chosen)
        tokens = bank.places[chosen]
        segments: list[Segment | None] = []
        for layer in range(question.n_layers):
            pair = keys[layer][None], values[layer][None]
            if isinstance(method, Quest):
                whole = count == bank.size
                pages = -(-count // method.page) if whole else max(1, count // method.page)
                segments.append(PagedSegment(*pair, tokens, method.page, pages, span))
            else:
                segments.append(GatheredSegment(*pair, tokens))
        return places, segments, ranking, chosen

    def _placed(
        self, question: Question, positions: Tensor, text: Tensor, chosen: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Places of the text, and the chosen tokens' K at their places and V: ``[L, G, n, d]``."""
        family, text_model = question.family, question.text_model
        tokens = self.bank.places[chosen]
        visible = torch.cat([text, tokens]).sort().values
        if self.method.positions == "contiguous":
            places = contiguous_positions(question.layout, positions, visible)
        else:
            places = positions[:, visible]
        limit = getattr(text_model.config, "max_position_embeddings", None)
        if self.method.long == "scale" and limit is not None and int(places.max()) >= limit - _ROOM:
            places = places.double() * ((limit - _ROOM - 1) / float(places.max()))
        rotary = rotary_of(text_model, places)
        keys, values = self.bank.gather(chosen)
        mine = torch.searchsorted(visible, tokens)
        turned = rotate(family, text_model, keys, columns_of(rotary, mine))
        return places[:, torch.searchsorted(visible, text)], turned, values

    def _by_layer(
        self, method: ReKv, question: Question, count: int, text: Tensor, span: Tensor
    ) -> tuple[Tensor, list[Segment | None], Ranking, Tensor]:
        """Every layer chooses when the text reaches it; the chosen stand before the question."""
        before = int((text < span[0]).sum())
        places = torch.arange(len(text))
        places[before:] += count
        axes = question.family.position_axes
        rotary = rotary_of(question.text_model, places.expand(axes, -1))
        turned = columns_of(rotary, torch.arange(before, len(text)))
        asking = _Asking(method, question, before, turned, span)
        segments: list[Segment | None] = [
            _ChoosingSegment(asking, layer, count) for layer in range(question.n_layers)
        ]
        ranking = method.rank(question)
        chosen = method.choose(question, ranking, count)
        return places.expand(axes, -1), segments, ranking, chosen

    # -- beams, and taking tokens back -------------------------------------------------------

    @property
    def decided_at(self) -> int:
        """Columns seen when the newest question chose; nothing is taken back behind it."""
        return self.cache.progress.seen

    def select_rows(self, rows: Sequence[int]) -> None:
        """Raise PlanError: a request has one sequence."""
        if list(rows) != [0]:
            raise PlanError(f"{self.method} takes one prompt at a time: leave beams out")

    # -- what is held ------------------------------------------------------------------------

    @property
    def notes(self) -> list[str]:
        """What the newest question saw, and how what it chose from is kept."""
        if self.choice is None:
            return []
        return [*self._seen(self.choice), *self._kept()]

    def _kept(self) -> list[str]:
        if self.hold.is_identity:
            return []
        held = sum(tensor.numel() * tensor.element_size() for _, tensor in self.bank.tensors())
        whole = self.bank.size * self.bank.bytes_per_token
        return [
            f"{self.hold}: what questions choose from takes {held / 1e6:.1f} MB; its K and V alone "
            f"would take {whole / 1e6:.1f} MB in the model's own type"
        ]

    def _seen(self, choice: Choice) -> list[str]:
        bank, chosen = self.bank, choice.tokens
        counts = torch.bincount(bank.unit[chosen], minlength=len(bank))
        seen = [unit for unit in choice.order if counts[unit]]
        shown = ", ".join(str(unit + 1) for unit in seen[:8]) + (" ..." if len(seen) > 8 else "")
        if self.method.per_step:
            return [f"{self.method}: each step reads pages of all {bank.size} visual tokens"]
        return [
            f"{self.method}: the question saw {len(chosen)} of {bank.size} visual tokens, of "
            f"{len(seen)} of {len(bank)} images (best first: {shown}), chosen in "
            f"{choice.seconds:.3f} s"
        ]

    def tensors(self) -> Iterator[tuple[str, Tensor, int]]:
        """Every tensor held: its kind, itself, and its bytes."""
        own = [("positions", self.ids), ("positions", self.positions)]
        if self.choice is not None:
            ranking = self.choice.ranking
            own += [("scores", x) for x in (ranking.token, ranking.unit, self.choice.tokens)]
        for kind, tensor in (*self.bank.tensors(), *own):
            yield kind, tensor, tensor.numel() * tensor.element_size()


@dataclass(frozen=True)
class _Asking:
    """What a layer chooses by, until it has chosen.

    Attributes
    ----------
    method, question
    start : int
        Position of the first chosen token: where the text before the question ends.
    turned : (Tensor, Tensor)
        Cosines and sines of the question's tokens.
    span : Tensor
        ``[Q]`` int64, the question's tokens.
    """

    method: ReKv
    question: Question
    start: int
    turned: tuple[Tensor, Tensor]
    span: Tensor


class _ChoosingSegment(Segment):
    """A layer's own choice, made by the queries that come to it first, and kept for the answer."""

    def __init__(self, asking: _Asking, layer: int, count: int) -> None:
        self._asking: _Asking | None = asking
        self._layer, self._count = layer, count
        self._chosen: GatheredSegment | None = None

    def attend(
        self, query: Tensor, scaling: float, rows: Tensor, window: int | None, *, with_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        if self._asking is not None:
            self._chosen = self._choose(self._asking, query, rows)
            self._asking = None
        return self._made.attend(query, scaling, rows, window, with_lse=with_lse)

    def _choose(self, asking: _Asking, query: Tensor, rows: Tensor) -> GatheredSegment:
        question, span = asking.question, asking.span
        family, text_model = question.family, question.text_model
        mine = torch.isin(rows[0].cpu().long(), span).to(query.device)
        free = unrotate(family, text_model, query[0][:, mine], asking.turned)
        ranking = asking.method.rank_layer(question, self._layer, free)
        chosen = asking.method.choose(question, ranking, self._count)
        keys, values = question.bank.gather(chosen, self._layer)
        places = self._places(question, chosen, asking.start)
        turned = rotate(family, text_model, keys, rotary_of(text_model, places))
        # They stand directly before the question, whatever image they are of.
        return _Block(turned[None], values[None], question.bank.places[chosen], span)

    @staticmethod
    def _places(question: Question, chosen: Tensor, start: int) -> Tensor:
        """``[axes, n]``: one after another from where the text before the question ends."""
        bank = question.bank
        if question.family.position_axes == 1:
            return torch.arange(len(chosen))[None] + start
        found, cursor = [], start
        for unit, mine in bank.parts(chosen):
            old = bank.positions[unit]
            part = old[:, mine] - old.amin(1, keepdim=True) + cursor
            found.append(part)
            cursor = int(part.max()) + 1
        return torch.cat(found, dim=1)

    @property
    def slots(self) -> int:
        return self._count

    def held(self, row: int, head: int) -> Tensor:
        return self._made.held(row, head)

    def read(self, row: int, head: int) -> tuple[Tensor, Tensor]:
        return self._made.read(row, head)

    @property
    def _made(self) -> GatheredSegment:
        if self._chosen is None:
            raise RuntimeError("no question has come to this layer yet")
        return self._chosen

    def tensors(self) -> Iterator[tuple[str, Tensor, int]]:
        if self._chosen is not None:
            yield from self._chosen.tensors()

    def select_rows(self, rows: Tensor) -> Segment:
        return self._made.select_rows(rows)


class _Block(GatheredSegment):
    """Gathered tokens that stand before a question: the text before it does not see them."""

    def __init__(self, keys: Tensor, values: Tensor, tokens: Tensor, span: Tensor) -> None:
        super().__init__(keys, values, tokens)
        self._span_start = int(span[0])

    def attend(
        self, query: Tensor, scaling: float, rows: Tensor, window: int | None, *, with_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        # Rows before the question become rows before everything.
        shifted = torch.where(rows < self._span_start, -1, rows)
        return super().attend(query, scaling, shifted, window, with_lse=with_lse)
