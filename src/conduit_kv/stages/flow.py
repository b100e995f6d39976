"""Runs a reduce or route method: before some layers it decides which visual tokens run on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from conduit_kv.cache import VisualCache
from conduit_kv.cache.cache import borrowed
from conduit_kv.families.encoder import Looked
from conduit_kv.layout import Layout
from conduit_kv.methods.flow import Chosen, Flops, FlowMethod
from conduit_kv.methods.schedule import Schedule
from conduit_kv.view import LayerView, StepView

if TYPE_CHECKING:
    from conduit_kv.stack import Stream


@dataclass(frozen=True)
class Decision:
    """What was decided before one layer of one turn.

    Attributes
    ----------
    layer : int
    first, stop : list of int
        Per sequence, its first token of the turn, and the one after its last.
    active : list of Tensor
        Per sequence ``[n]`` int64 ascending: the visual tokens of the turn that run on.
    """

    layer: int
    first: list[int]
    stop: list[int]
    active: list[Tensor]

    def select_rows(self, rows: Sequence[int]) -> Decision:
        """The decision for the batch's sequences ``rows``, which may repeat."""
        first, stop = [self.first[row] for row in rows], [self.stop[row] for row in rows]
        return Decision(self.layer, first, stop, [self.active[row] for row in rows])


@dataclass
class Flow:
    """The reduce or the route stage of one request.

    Attributes
    ----------
    method : FlowMethod
    cache : VisualCache
    schedules : list of Schedule or None
        Of the newest turn with images, per sequence; None where all tokens run.
    decisions : list of Decision
        Of all turns.
    ranked : list of (int, int)
        Of the newest turn: the layers asked for queries and keys, and for how many columns.
    notes : list of str
        What could not be done, and why.
    decided_at : int
        Columns seen when tokens were last chosen; the tokens before cannot be taken back.
    contiguous : bool
        Whether a layer's tokens have positions without gaps.
    looked_at : list of Looked
        Per sequence, of the turn's visual tokens; until the first decision, and empty where it
        cannot be told.
    """

    method: FlowMethod
    cache: VisualCache
    schedules: list[Schedule | None] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    ranked: list[tuple[int, int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    decided_at: int = 0
    contiguous: bool = False
    looked_at: list[Looked] = field(default_factory=list)
    _due: bool = False
    _heard: dict[int, tuple[list[Tensor], float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cache = borrowed(self.cache)

    def begin(self, stream: Stream, costs: Sequence[Flops]) -> None:
        """Before the first layer of a prefill or turn: make the schedules.

        Parameters
        ----------
        costs : sequence of callable
            Per sequence, FLOPs of the prefill from its visual tokens per layer.
        """
        self._due, self._heard = False, {}
        progress = self.cache.progress
        self.contiguous = self.method.contiguous(progress.position_ids(0).shape[0])
        turn = [
            layout.select(stream.tokens(row)[stream.running(row)].long())
            for row, layout in enumerate(progress.layouts)
        ]
        if not any(bool(layout.visual.any()) for layout in turn):
            return
        self.ranked = []
        self.schedules = [
            self.method.schedule(len(self.cache.layers), layout, cost)
            for layout, cost in zip(turn, costs, strict=True)
        ]
        self._due = any(self.schedules)
        if self._due:
            self.decided_at = progress.seen
        else:
            self._note(f"{self.method} asks for all visual tokens: all of them ran everywhere")

    def acts(self, layer: int) -> bool:
        """Whether something is decided before this layer."""
        return self._due and any(s and layer in s.layers for s in self.schedules)

    def act(self, layer: int, stream: Stream) -> None:
        """Decide before a layer, and let what was chosen run on."""
        batch = self.cache.progress.batch
        pool = [stream.candidates(row) for row in range(batch)]
        if any(len(pool[row]) != len(stream.running(row)) for row in range(batch)):
            stream.activate(pool)
        asked = _Asked(self, layer, stream)
        layouts = self.cache.progress.layouts
        chosen: list[Tensor] = []
        active: list[Tensor] = []
        first = []
        for row in range(batch):
            tokens = stream.tokens(row)[pool[row]].long()
            layout = layouts[row].select(tokens)
            schedule = self.schedules[row]
            visual = torch.nonzero(layout.visual).flatten()
            if schedule is not None and layer in schedule.layers:
                stage = schedule.layers.index(layer)
                count = schedule.counts[stage]
                view = StepView(
                    layer,
                    len(self.cache.layers),
                    stage,
                    tokens,
                    layout,
                    stream.states(row),
                    lambda row=row: asked.views(row),  # type: ignore[misc]
                    self._looked(row, layout),
                )
                visual = self._choose(view, count, row, stream)
                if len(visual) != count:  # what merges depends on the states
                    counts = list(schedule.counts)
                    counts[stage] = len(visual)
                    self.schedules[row] = replace(schedule, counts=tuple(counts))
            places = torch.cat([torch.nonzero(layout.text).flatten(), visual])
            chosen.append(pool[row][torch.sort(places).values])
            active.append(tokens[visual])
            first.append(int(stream.tokens(row)[stream.tokens(row) >= 0][0]))
        if not self.method.waits:
            stream.drop(
                [mine[~torch.isin(mine, kept)] for mine, kept in zip(pool, chosen, strict=True)]
            )
        stream.activate(chosen)
        stream.contiguous = self.contiguous
        stop = list(self.cache.progress.counts)
        self.decisions.append(Decision(layer, first, stop, active))
        self._heard, self.looked_at = {}, []  # what was heard served this decision

    def _looked(self, row: int, layout: Layout) -> Looked | None:
        """What the encoder looked at, for tokens ``layout`` of a sequence."""
        if not self.looked_at or len(self.looked_at[row].scores) != int(layout.visual.sum()):
            return None
        scores = torch.zeros(len(layout))
        scores[layout.visual] = self.looked_at[row].scores
        return replace(self.looked_at[row], scores=scores)

    def _choose(self, view: StepView, count: int, row: int, stream: Stream) -> Tensor:
        chosen: Chosen = self.method.choose(view, count)
        if chosen.note:
            self._note(chosen.note)
        if chosen.hidden is not None:
            stream.put(row, chosen.active, chosen.hidden)
        newest = len(view.index) - 1
        if view.layout.visual[-1] and newest not in chosen.active:
            return torch.cat([chosen.active, torch.tensor([newest])])  # the answer begins there
        return chosen.active

    def listens(self, layer: int) -> bool:
        """Whether the newest queries of a layer that is about to run are needed."""
        return self._due and any(
            schedule and self.method.listens_before(layer + 1, schedule)
            for schedule in self.schedules
        )

    def listen(self, layer: int, queries: Tensor, scaling: float, stream: Stream) -> None:
        """Remember queries, of ``[B, H, m, d]`` of a layer that has just run."""
        heard = [mine[:, stream.place(row)] for row, mine in enumerate(queries)]
        if self.method.listens_to == "newest":
            heard = [mine[:, -1:] for mine in heard]
        self._heard = {layer + 1: (heard, scaling)}

    def heard(self, layer: int) -> tuple[list[Tensor], float] | None:
        """Per sequence the queries ``[H, r, d]`` of the layer before, if they were wanted."""
        return self._heard.get(layer)

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def fork(self, cache: VisualCache) -> Flow:
        """This stage's state for a fork of its cache."""
        return replace(
            self,
            cache=cache,
            schedules=list(self.schedules),
            decisions=list(self.decisions),
            ranked=list(self.ranked),
            looked_at=[],
            notes=list(self.notes),
            _heard={},
        )

    def select_rows(self, rows: Sequence[int]) -> None:
        """Follow the cache when beams are reordered or sequences repeated."""
        self.schedules = [self.schedules[row] for row in rows] if self.schedules else []
        self.decisions = [decision.select_rows(rows) for decision in self.decisions]

    def tensors(self) -> Iterator[tuple[str, Tensor, int]]:
        """Every tensor held for later: its kind, itself, and its bytes."""
        for decision in self.decisions:
            for tensor in decision.active:
                yield "decisions", tensor, tensor.numel() * tensor.element_size()


GONE, WAITS, RUNS = 0, 1, 2
"""What a token does in a layer of the prefill."""


def activity(flows: Sequence[Flow], n_layers: int, layout: Layout, row: int) -> Tensor:
    """``[layers, T]`` int8: what each token of a sequence does in each layer.

    A token that merged into another is gone.
    """
    state = torch.full((n_layers, len(layout)), RUNS, dtype=torch.int8)
    places = torch.arange(len(layout))
    made = [
        (decision.first[row], decision.layer, number, decision)
        for number, flow in enumerate(flows)
        for decision in flow.decisions
    ]
    for _, layer, number, decision in sorted(made, key=lambda each: each[:3]):
        mine = layout.visual & (places >= decision.first[row]) & (places < decision.stop[row])
        mine &= state[layer] != GONE
        others = mine.clone()
        others[decision.active[row]] = False
        state[layer:, mine] = RUNS
        state[layer:, others] = WAITS if flows[number].method.waits else GONE
    return state


class _Asked:
    """The attention of the layer that comes next, computed if a method looks at it."""

    def __init__(self, flow: Flow, layer: int, stream: Stream) -> None:
        self.flow, self.layer, self.stream = flow, layer, stream
        self._answer: tuple[Tensor, Tensor, float] | None = None

    def views(self, row: int) -> list[LayerView]:
        """Views of a sequence, one per group of KV heads that hold the same earlier tokens."""
        heard = self.flow.heard(self.layer)
        if heard is not None:
            queries, scaling = heard
            return self._joined(row, self.layer - 1, queries[row], None, scaling)
        if self._answer is None:
            answer = self.stream.ask(self.layer)
            self._answer = answer.queries, answer.keys, answer.scaling
            self.flow.ranked.append((self.layer, answer.keys.shape[0] * answer.keys.shape[2]))
        asked, keys, scaling = self._answer
        place = self.stream.place(row)
        return self._joined(row, self.layer, asked[row][:, place], keys[row][:, place], scaling)

    def _joined(
        self, row: int, layer: int, queries: Tensor, own: Tensor | None, scaling: float
    ) -> list[LayerView]:
        """What a layer holds of a sequence, and behind it its ``own`` keys ``[G, R, d]``."""
        held, progress = self.flow.cache.layers[layer], self.flow.cache.progress
        tokens = self.stream.tokens(row)[self.stream.running(row)].long()
        if not held.slots and own is not None:
            groups = [(tokens, own, queries)]
        else:
            groups = []
            for heads in held.head_groups(row):
                index, keys, _ = held.read(row, heads)
                if own is not None:
                    index, keys = torch.cat([index, tokens]), torch.cat([keys, own[heads]], dim=1)
                each = len(queries) // held.kv_heads
                mine = queries[heads[0] * each : (heads[-1] + 1) * each]
                groups.append((index, keys, mine))
        return [
            LayerView(
                layer=self.layer,
                n_layers=len(self.flow.cache.layers),
                index=index,
                layout=progress.layouts[row].select(index),
                keys=keys,
                values=keys[..., :0],
                step_queries=mine,
                scaling=scaling,
            )
            for index, keys, mine in groups
        ]
