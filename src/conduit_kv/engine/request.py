"""A request's cache with its plan, and several requests decoded as one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Cache

from conduit_kv.cache import VisualCache
from conduit_kv.cache.layer import crop_count
from conduit_kv.engine.cost import Cost
from conduit_kv.errors import InputError, PlanError
from conduit_kv.families.encoder import Looked
from conduit_kv.methods.evict.base import EvictMethod
from conduit_kv.methods.evict.full import Full
from conduit_kv.methods.retrieve import RetrieveMethod
from conduit_kv.plan import Plan
from conduit_kv.reuse.fill import Recorder
from conduit_kv.reuse.held import FULL
from conduit_kv.reuse.shelf import Shelf
from conduit_kv.stages.evict import Eviction
from conduit_kv.stages.flow import Flow
from conduit_kv.stages.hold import Holding
from conduit_kv.stages.retrieve import Retrieval
from conduit_kv.stages.reuse import Reuse

if TYPE_CHECKING:
    from conduit_kv.stack import Stream


@dataclass
class Ending:
    """What acts on a request when a prefill or turn ends: the evict stage, then the hold stage."""

    eviction: Eviction
    holding: Holding

    @staticmethod
    def of(plan: Plan, cache: VisualCache) -> Ending:
        """The stages of ``plan`` for a request's cache."""
        hold = None if plan.retrieves else plan.hold  # then it is entries that are packed
        return Ending(Eviction(plan.evict or Full(), cache), Holding(hold, cache))

    @property
    def stages(self) -> list[Eviction | Holding]:
        """Those that do anything, in order."""
        return [stage for stage in (self.eviction, self.holding) if stage.active]

    def take_over(self, cache: VisualCache) -> None:
        """Act on ``cache``, a fork of the one that was observed, from now on."""
        self.eviction.cache = self.holding.cache = cache

    def fork(self, cache: VisualCache) -> Ending:
        """Their state for a fork of their cache."""
        return Ending(self.eviction.fork(cache), self.holding.fork(cache))

    def finish(self) -> None:
        """After the last layer of a prefill or turn."""
        for stage in self.stages:
            stage.finish()


Stack = Callable[[Tensor, Tensor, Mapping[str, Any]], Any]
"""A step's embeddings, positions and further arguments to what the text model returns."""


class RequestCache(VisualCache):
    """A cache that carries its plan: what ``generate`` returns, and can be continued from.

    Parameters
    ----------
    kinds : sequence of str
        ``"full"`` or ``"sliding"``, per decoder layer.
    plan : Plan
    cost : Cost or None
        What the model's layers cost; None where nobody asks.
    shelf : Shelf or None
        Where the reuse stage finds images; None under a plan without one.

    Attributes
    ----------
    flows : list of Flow
        The reduce and route stages of this request, those that do something.
    reuse : Reuse or None
        The reuse stage of this request, if it does something.
    ending : Ending
        The evict and hold stages of this request.
    watchers : list of Ending
        Those of other plans, which observe this request's prefill and act on forks of it.
    recorder : Recorder or None
        Takes an entry from this prefill.
    retrieval : Retrieval or None
        The retrieve stage of this request, if its plan has one that does something.
    """

    def __init__(
        self,
        kinds: Sequence[str],
        plan: Plan,
        cost: Cost | None = None,
        shelf: Shelf | None = None,
    ) -> None:
        super().__init__(kinds)
        self.plan = plan
        self.cost, self.shelf = cost, shelf
        self.reuse = self._new_reuse()
        self.flows = self._new_flows()
        self.ending = Ending.of(plan, self)
        self.watchers: list[Ending] = []
        self.recorder: Recorder | None = None
        self.retrieval = self._new_retrieval()
        self._moved = False
        self._broken = False

    @property
    def eviction(self) -> Eviction:
        """The evict stage of this request."""
        return self.ending.eviction

    @property
    def holding(self) -> Holding:
        """The hold stage of this request."""
        return self.ending.holding

    @property
    def _endings(self) -> list[Ending]:
        return [self.ending, *self.watchers]

    @property
    def kinds(self) -> list[str]:
        """``"full"`` or ``"sliding"``, per layer."""
        return [layer.kind for layer in self]

    def _new_flows(self) -> list[Flow]:
        others = [number for number, kind in enumerate(self.kinds) if kind != "full"]
        for method in self.plan.flows:
            if others:
                raise PlanError(
                    f"{method.name} needs causal full attention in every layer, and layers "
                    f"{others} have another: take an evict method, which leaves such layers alone"
                )
            method.check(len(self.kinds))
        return [Flow(method, self) for method in self.plan.flows]

    def check_turn(self) -> None:
        """Raise PlanError if the tokens just taken in cannot be routed as the plan says."""
        for row, layout in enumerate(self.progress.layouts if self.flows else []):
            new = int((self.progress.step_tokens[row] >= 0).sum())
            turn = layout.select(torch.arange(len(layout) - new, len(layout)))
            for flow in self.flows:
                schedule = flow.method.schedule(len(self.layers), turn, self._flops(row))
                if schedule is not None:
                    turn = turn.first_of(schedule.per_layer[0])

    @property
    def stages(self) -> list[Reuse | Flow | Eviction | Holding | Retrieval]:
        """The stages of this request, in order."""
        first: list[Reuse] = [] if self.reuse is None else [self.reuse]
        last: list[Retrieval] = [] if self.retrieval is None else [self.retrieval]
        return [*first, *self.flows, self.eviction, self.holding, *last]

    def _new_reuse(self) -> Reuse | None:
        method = self.plan.reuse
        if method is None or method.is_identity:
            return None
        return Reuse(method, self, self.shelf or Shelf())

    def _new_retrieval(self) -> Retrieval | None:
        method = self.plan.retrieve
        if not isinstance(method, RetrieveMethod) or method.is_identity:
            return None
        return Retrieval(method, self, self.shelf or Shelf(), self.plan.hold or FULL)

    @property
    def took_images(self) -> bool:
        """Whether the step's images come from entries, so that the model need not encode them."""
        return self.retrieval is not None or (self.reuse is not None and self.reuse.waiting)

    # -- what the decoder loop calls ---------------------------------------------------------

    def run(
        self, stack: Stack, embeddings: Tensor, position_ids: Tensor, features: Mapping[str, Any]
    ) -> Any:
        """Run a step's tokens: once through the stack, unless the plan wants it otherwise.

        Parameters
        ----------
        stack : callable
            :func:`conduit_kv.stack.run_stack` of this cache, without its last three arguments.
        """
        if self.recorder is not None:
            self.recorder.begin(embeddings, features)
        if self.retrieval is not None:
            return self.retrieval.run(stack, embeddings, position_ids, features)
        if self.reuse is not None and self.reuse.waiting:
            return self.reuse.run(stack, embeddings, position_ids, features)
        return stack(embeddings, position_ids, features)

    def look(self, scores: Tensor, by: str, copies: int) -> None:
        """What the step's images were looked at by their encoder.

        Parameters
        ----------
        scores : Tensor
            ``[N]``, of the visual tokens of all sequences, one after another.
        copies : int
            How often each sequence is repeated, for beams.
        """
        sizes = []
        for layout, tokens in zip(self.progress.layouts, self.progress.step_tokens, strict=True):
            new = int((tokens >= 0).sum())
            sizes.append(int(layout.visual[len(layout) - new :].sum()))
        if sum(sizes[::copies]) != len(scores):
            return
        parts = [Looked(part, by) for part in scores.split(sizes[::copies]) for _ in range(copies)]
        for flow in self.flows:
            if flow.method.looks:
                flow.looked_at = parts

    def enter(self, layer: nn.Module, hidden: Tensor) -> None:
        """Before a layer: hidden states ``[B, n, D]`` of the step's tokens."""
        if self.recorder is not None:
            self.recorder.enter(layer, hidden)

    @property
    def routes_turns(self) -> bool:
        """Whether tokens of a prefill or turn may be left out of some layers."""
        return bool(self.flows) or (self.reuse is not None and self.reuse.steering)

    def flow(self, layer: int, stream: Stream) -> None:
        """Before a layer of a prefill or turn."""
        if self.reuse is not None and self.reuse.steering:
            self.reuse.steer(layer, stream)
        for flow in self.flows:
            if layer == 0:
                flow.begin(stream, [self._flops(row) for row in range(self.progress.batch)])
            if flow.acts(layer):
                flow.act(layer, stream)

    def shifts(self, layer: int) -> list[int]:
        """Per sequence, how far a layer's positions lie below the tokens' own; none: not at all."""
        if any(flow.contiguous for flow in self.flows):
            return list(self.layers[layer].skipped)
        return []

    def listens(self, layer: int) -> bool:
        """Whether a decision after ``layer`` needs the newest query in it."""
        return any(flow.listens(layer) for flow in self.flows)

    def listen(self, layer: int, queries: Tensor, scaling: float, stream: Stream) -> None:
        """After a layer that :meth:`listens`: ``[B, H, m, d]``."""
        for flow in self.flows:
            if flow.listens(layer):
                flow.listen(layer, queries, scaling, stream)

    def _flops(self, row: int) -> Callable[[Sequence[int]], float]:
        """FLOPs of the turn of one sequence, from its visual tokens per layer."""
        layout = self.progress.layouts[row]
        new = int((self.progress.step_tokens[row] >= 0).sum())
        text = int(layout.text[len(layout) - new :].sum())

        def flops(visual: Sequence[int]) -> float:
            if self.cost is None:
                raise PlanError("a target in FLOPs needs a model: make the cache by new_cache()")
            return self.cost.prefill([text + count for count in visual], len(layout) - new).total

        return flops

    @property
    def in_passes(self) -> bool:
        """Whether what runs is a pass of a turn, however few its columns."""
        return self.reuse is not None and self.reuse.running

    @property
    def scores_turns(self) -> bool:
        """Whether the end of a prefill or turn is to be scored."""
        return self._reuse_listens or bool(self.ending.stages or self.watchers)

    @property
    def _reuse_listens(self) -> bool:
        return self.reuse is not None and self.reuse.listening

    @property
    def scores_steps(self) -> bool:
        """Whether decoded tokens are to be scored."""
        eviction = self.eviction
        return eviction.method.scores_steps and eviction.active and bool(eviction.budgets)

    def take_in(self, embeddings: Tensor) -> None:
        """Before the first layer of a step that may bring images: ``[B, n, hidden]``."""
        if self.in_passes:
            return  # it has been told of the whole step
        for ending in self._endings:
            for stage in ending.stages:
                stage.take_in(embeddings)

    def begin(self) -> None:
        """Before the first layer of a prefill or turn."""
        if self._reuse_listens:
            return
        for ending in self._endings:
            for stage in ending.stages:
                stage.begin()

    def observe(self, layer: int, queries: Tensor, scaling: float) -> None:
        """After a layer of a prefill or turn: ``[B, H, n, d]``."""
        if self.reuse is not None and self.reuse.listening:
            self.reuse.observe(layer, queries, scaling)
            return
        scored: dict[EvictMethod, Eviction] = {}
        for ending in self._endings:
            eviction, holding = ending.eviction, ending.holding
            if holding.active:
                alone = not (eviction.active or self.watchers or self.flows)
                holding.observe(layer, queries, scaling, at_once=alone)
            if not eviction.active:
                continue
            # Plans that differ in their budget alone score alike.
            alike = scored.setdefault(eviction.kind, eviction)
            if alike is eviction:
                eviction.observe(layer, queries, scaling)
            else:
                eviction.take_scores(alike, layer)

    def finish(self) -> None:
        """After the last layer of a prefill or turn. Watchers are finished on their forks."""
        if not self._reuse_listens:
            self.ending.finish()

    def step(self, layer: int, query: Tensor, scaling: float) -> None:
        """After a layer of a decoding step: ``[B, H, 1, d]``."""
        self._moved = True
        self.eviction.step(layer, query, scaling)

    def tensors(self) -> Iterator[tuple[str, Tensor, int]]:
        yield from super().tensors()
        stages = [stage for ending in self.watchers for stage in (ending.eviction, ending.holding)]
        for stage in [*self.stages, *stages]:
            yield from stage.tensors()

    # -- forks, and coming back from an error ------------------------------------------------

    def fork(self, plan: Plan | None = None, ending: Ending | None = None) -> RequestCache:
        """A cache that goes its own way from here; nothing that is written is shared.

        Parameters
        ----------
        plan : Plan or None
            Of the fork; this cache's own by default.
        ending : Ending or None
            A watcher of this cache: it is finished on the fork.
        """
        self.check_usable()
        other = RequestCache(self.kinds, plan or self.plan, self.cost, self.shelf)
        if self.progress.seen and other.plan.flows != self.plan.flows:
            raise PlanError(
                f"the prompt was prefilled under {self.plan}: {other.plan} would have run other "
                "tokens in it. Start from a new prefill"
            )
        other.flows = [flow.fork(other) for flow in self.flows]
        if self.progress.seen and other.plan.reuse != self.plan.reuse:
            raise PlanError(
                f"the prompt was prefilled under {self.plan}: {other.plan} reuses its images in "
                "another way. Start from a new prefill"
            )
        other.reuse = None if self.reuse is None else self.reuse.fork(other)
        other.progress = self.progress.copy()
        other.rotary = self.rotary
        for mine, its in zip(self.layers, other.layers, strict=True):
            its.progress = other.progress
            # What an eviction keeps is copied by it; layers that it leaves alone are not.
            evicted = ending is not None and ending.eviction.active and mine.kind == "full"
            its.share(mine, copy_tail=not evicted)
        if ending is not None:
            other.ending = ending
            ending.take_over(other)
            ending.finish()
        elif plan is None:
            other.ending = self.ending.fork(other)
        if self.retrieval is not None and other.plan.retrieve == self.plan.retrieve:
            other.retrieval = self.retrieval.fork(other)
        return other

    def snapshot(self) -> Any:
        """What :meth:`roll_back` needs to undo a step that fails."""
        self._moved = False
        endings = [stage for each in self.watchers for stage in (each.eviction, each.holding)]
        stages = [(stage, stage.fork(self)) for stage in [*self.stages, *endings]]
        return self.progress.copy(), [layer.snapshot() for layer in self], stages

    def roll_back(self, before: Any) -> None:
        """Undo a failed step."""
        progress, layers, stages = before
        self.progress.__dict__.update(progress.__dict__)
        for layer, state in zip(self.layers, layers, strict=True):
            layer.restore(state)
        for stage, old in stages:
            stage.__dict__.update(old.__dict__)
        # A decoding step under eviction moves slots in place, which cannot be undone.
        self._broken = self._broken or self._moved

    def check_usable(self) -> None:
        """Raise InputError if an error has left the cache undefined."""
        if self._broken:
            raise InputError("a decoding step failed on this cache: start from a new prefill")

    @property
    def only_adds(self) -> bool:
        """Whether later turns leave what is held as it is."""
        acting = self.eviction.active or self.holding.active or self.flows
        return not acting and self.retrieval is None

    def go_back(self, seen: int) -> None:
        """Take later turns back, to the end of one: nothing of them has touched what was held."""
        super().crop(seen - self.progress.seen)
        if self.reuse is not None:
            self.reuse.decided_at = min(self.reuse.decided_at, seen)

    @property
    def is_croppable(self) -> bool:
        """Assisted decoding takes guessed tokens back; a stage would have listened to them."""
        return not self.eviction.active and self.retrieval is None

    def crop(self, tokens_to_remove: int) -> None:
        if self.retrieval is not None and tokens_to_remove:
            raise PlanError(f"cannot take back tokens under {self.plan}: ask the question anew")
        left = self.progress.seen - crop_count(tokens_to_remove)
        decided_at = max(stage.decided_at for stage in self.stages)
        if left < min(decided_at, self.progress.seen):
            raise PlanError(
                f"cannot take back {-tokens_to_remove} tokens: {self.plan} decided by them what "
                "to keep. Take back fewer; assisted decoding needs a plan that evicts nothing"
            )
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        super().reset()
        self.reuse = self._new_reuse()
        self.ending = Ending.of(self.plan, self)
        self.flows = self._new_flows()
        self.watchers = []
        self.retrieval = self._new_retrieval()
        self._moved = self._broken = False

    def _select(self, rows: Tensor) -> None:
        super()._select(rows)
        for stage in self.stages:
            stage.select_rows(rows.tolist())


class JoinedCache(Cache):  # type: ignore[misc]
    """Several caches of one sequence each, extended and decoded as one batch.

    Projections and MLPs run over the batch; attention and eviction go to each member. Members may
    have different plans and lengths; no padding arises.

    Parameters
    ----------
    members : sequence of RequestCache
        Of one sequence each.
    """

    def __init__(self, members: Sequence[RequestCache]) -> None:
        if not members or any(member.progress.batch != 1 for member in members):
            raise PlanError("join caches of one sequence each, at least one")
        if len({id(member) for member in members}) < len(members):
            raise PlanError("a request is named twice: fork() its cache to decode it in two ways")
        self.members = list(members)
        super().__init__(
            layers=[
                JoinedLayer([member.layers[layer] for member in members])
                for layer in range(len(members[0].layers))
            ]
        )
        self.progress = _JoinedProgress(self.members)

    def run(
        self, stack: Stack, embeddings: Tensor, position_ids: Tensor, features: Mapping[str, Any]
    ) -> Any:
        """Run the members' tokens through the stack."""
        return stack(embeddings, position_ids, features)

    def enter(self, layer: nn.Module, hidden: Tensor) -> None:
        """Before a layer: members listen to nothing here."""

    @property
    def routes_turns(self) -> bool:
        """Steps of several requests bring text alone, all of which runs everywhere."""
        return False

    def flow(self, layer: int, stream: Stream) -> None:
        """Before a layer: nothing to decide."""

    def shifts(self, layer: int) -> list[int]:
        """Of the members: see :meth:`RequestCache.shifts`."""
        found = [member.shifts(layer) for member in self.members]
        return [(mine or [0])[0] for mine in found] if any(found) else []

    def listens(self, layer: int) -> bool:
        """Whether a decision needs a layer's queries: there is none."""
        return False

    def listen(self, layer: int, queries: Tensor, scaling: float, stream: Stream) -> None:
        """After a layer that :meth:`listens`."""

    @property
    def in_passes(self) -> bool:
        """Whether what runs is a pass of a turn: its members bring text alone, which runs once."""
        return False

    @property
    def scores_turns(self) -> bool:
        """Whether some member scores the end of a turn."""
        return any(member.scores_turns for member in self.members)

    @property
    def scores_steps(self) -> bool:
        """Whether some member scores decoded tokens."""
        return any(member.scores_steps for member in self.members)

    def take_in(self, embeddings: Tensor) -> None:
        """Before the first layer of a step of several tokens: ``[P, n, hidden]``."""
        for row, member in enumerate(self.members):
            member.take_in(embeddings[row : row + 1])

    def begin(self) -> None:
        """Before the first layer of a turn."""
        for member in self.members:
            if member.scores_turns:
                member.begin()

    def observe(self, layer: int, queries: Tensor, scaling: float) -> None:
        """After a layer of a turn: ``[P, H, n, d]``, a row per member."""
        for row, member in enumerate(self.members):
            if member.scores_turns:
                member.observe(layer, queries[row : row + 1], scaling)

    def finish(self) -> None:
        """After the last layer of a turn."""
        for member in self.members:
            if member.scores_turns:
                member.finish()

    def step(self, layer: int, query: Tensor, scaling: float) -> None:
        """After a layer of a decoding step: ``[P, H, 1, d]``, a row per member."""
        for row, member in enumerate(self.members):
            if member.scores_steps:
                member.step(layer, query[row : row + 1], scaling)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(member.progress.seen for member in self.members)


class _JoinedProgress:
    """The members' steps as one: what the decoder loop asks of a cache's progress."""

    def __init__(self, members: Sequence[RequestCache]) -> None:
        self._members = members

    @property
    def step_tokens(self) -> Tensor:
        return torch.cat([member.progress.step_tokens for member in self._members])

    @step_tokens.setter
    def step_tokens(self, tokens: Tensor) -> None:
        for row, member in enumerate(self._members):
            member.progress.step_tokens = tokens[row : row + 1]


class JoinedLayer:
    """One layer of a :class:`JoinedCache`."""

    is_compileable = False
    is_sliding = False

    def __init__(self, members: Sequence[Any]) -> None:
        self.members = members

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        for row, member in enumerate(self.members):
            member.update(keys[row : row + 1], values[row : row + 1])
        return keys, values

    def attend(self, query: Tensor, scaling: float, window: int | None) -> Tensor:
        return torch.cat(
            [
                member.attend(query[row : row + 1], scaling, window)
                for row, member in enumerate(self.members)
            ]
        )
