"""Runs an evict method: scores while the layers run, keeps when they have run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn import functional as F

from conduit_kv.budget import Budget
from conduit_kv.cache import VisualCache, VisualLayer
from conduit_kv.cache.cache import borrowed
from conduit_kv.methods.cover import cover_ranks
from conduit_kv.methods.evict.base import EvictMethod, Scores
from conduit_kv.methods.evict.select import weakest
from conduit_kv.view import LayerView

Groups = list[tuple[LayerView, Scores]]
"""Per group of KV heads that hold the same tokens: its view, without tensors, and its scores."""


@dataclass
class Eviction:
    """The evict stage of one request.

    Attributes
    ----------
    method : EvictMethod
    cache : VisualCache
    unrotate : callable or None
        Takes RoPE off keys; given to the views.
    budgets : dict
        Per layer, per sequence: what the method granted, and out of how many tokens, when the
        budget was last solved.
    notes : list of str
        What could not be done, and why.
    decided_at : int
        Columns seen when tokens were last chosen; the tokens before cannot be taken back.
    """

    method: EvictMethod
    cache: VisualCache
    unrotate: Callable[[Tensor, Tensor], Tensor] | None = None
    budgets: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    decided_at: int = 0
    _scored: dict[int, list[Groups]] = field(default_factory=dict)
    _carried: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    _features: list[Tensor] = field(default_factory=list)
    _covers: dict[tuple[int, str], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cache = borrowed(self.cache)

    @property
    def active(self) -> bool:
        """Whether anything is to be scored at all."""
        return not self.method.is_identity

    def take_in(self, embeddings: Tensor) -> None:
        """Input embeddings ``[B, n, hidden]`` of a step that may bring images."""
        if not self.method.cover or self.method.cover_by != "features":
            return
        progress = self.cache.progress
        fresh = []
        for row, layout in enumerate(progress.layouts):
            real = progress.step_tokens[row] >= 0
            new = layout.visual[len(layout) - int(real.sum()) :].to(embeddings.device)
            fresh.append(embeddings[row][real.to(embeddings.device)][new])
        old = self._features or [part[:0] for part in fresh]
        self._features = [torch.cat(pair) for pair in zip(old, fresh, strict=True)]

    def begin(self) -> None:
        """Before the first layer of a prefill or turn."""
        self._scored, self._covers = {}, {}

    def observe(self, layer: int, queries: Tensor, scaling: float) -> None:
        """Score one layer that has just run the step's tokens.

        Parameters
        ----------
        queries : Tensor
            ``[B, H, n, d]`` of the step's columns, RoPE applied.
        scaling : float
            The layer's factor of the attention logits.
        """
        if self.cache.layers[layer].kind != "full":
            return
        scored = []
        for row in range(self.cache.progress.batch):
            groups = []
            for view in self._views(layer, row, queries, scaling):
                scores = self.method.score(view)
                groups.append((_without_tensors(view), scores))
            scored.append(groups)
        self._scored[layer] = scored

    @cached_property
    def kind(self) -> EvictMethod:
        """The method without its budget, on which no score depends."""
        return self.method.replace(budget=Budget(1.0))

    def take_scores(self, other: Eviction, layer: int) -> None:
        """Take over what another eviction of the same cache and kind has just scored."""
        if layer in other._scored:
            self._scored[layer] = other._scored[layer]

    def finish(self) -> None:
        """After the last layer: share the budget, and keep."""
        layers = sorted(self._scored)
        if not layers:
            self.notes.append("nothing evicted: no layer has causal full attention")
            return
        granted: dict[int, list[list[Tensor]]] = {layer: [] for layer in layers}
        changed: dict[int, dict[int, tuple[Tensor, Tensor]]] = {layer: {} for layer in layers}
        for layer in layers:
            self.budgets[layer] = []
        for row in range(self.cache.progress.batch):
            self._finish_row(row, layers, granted, changed)
        for layer in layers:
            self.cache.layers[layer].keep(granted[layer], changed[layer] or None)
        self._scored, self._covers = {}, {}
        self.decided_at = self.cache.progress.seen

    def _finish_row(
        self,
        row: int,
        layers: Sequence[int],
        granted: dict[int, list[list[Tensor]]],
        changed: dict[int, dict[int, tuple[Tensor, Tensor]]],
    ) -> None:
        layout = self.cache.progress.layouts[row]
        of_visual = self.method.of == "visual"
        reached = [self.cache.layers[layer].reached(row) for layer in layers]
        if of_visual:  # all text reaches every layer
            reached = [count - int(layout.text.sum()) for count in reached]
        most = [
            int(view.layout.visual.sum()) if of_visual else view.size
            for view in (self._scored[layer][row][0][0] for layer in layers)
        ]
        total = self.method.budget.total(reached, self._bytes_per_token)
        scores = [[s for _, s in self._scored[layer][row]] for layer in layers]
        budgets = self.method.layer_budgets(total, scores, most)
        if sum(budgets) > total:
            self.notes.append(
                f"kept {sum(budgets)} tokens over all layers instead of {total}: "
                "the floor of sinks and last token is higher than the budget"
            )
        for layer, budget in zip(layers, budgets, strict=True):
            groups = self._scored[layer][row]
            chosen = self.method.select(groups, budget)
            heads = [
                (view.index[kept], scores, view)
                for (view, scores), per_head in zip(groups, chosen, strict=True)
                for kept in per_head
            ]
            granted[layer].append([tokens for tokens, _, _ in heads])
            granted_here = max(len(tokens) for tokens, _, _ in heads)
            self.budgets[layer].append((granted_here, self.cache.layers[layer].reached(row)))
            self._merge(layer, row, groups, chosen, changed[layer])
            self._carry(layer, row, groups, chosen)

    def _merge(
        self,
        layer: int,
        row: int,
        groups: Groups,
        chosen: Sequence[Sequence[Tensor]],
        changed: dict[int, tuple[Tensor, Tensor]],
    ) -> None:
        if type(self.method).merge is EvictMethod.merge:
            return
        views = self._views(layer, row, None, 1.0)
        pairs = [
            self.method.merge(view, kept) or (view.keys, view.values)
            for view, kept in zip(views, chosen, strict=True)
        ]
        changed[row] = (torch.cat([k for k, _ in pairs]), torch.cat([v for _, v in pairs]))

    def _carry(
        self, layer: int, row: int, groups: Groups, chosen: Sequence[Sequence[Tensor]]
    ) -> None:
        carried = []
        for (view, scores), per_head in zip(groups, chosen, strict=True):
            if scores.carry is not None:
                for head, carry in enumerate(scores.carry):
                    kept = per_head[0 if len(per_head) == 1 else head]
                    carried.append((view.index[kept], carry[kept]))
        if carried:
            self._carried[layer, row] = carried

    def step(self, layer: int, query: Tensor, scaling: float) -> None:
        """After one decoded token in one layer: evict if the layer holds more than its share."""
        if layer not in self.budgets:
            return
        held_layer: VisualLayer = self.cache.layers[layer]
        drops: list[Tensor] = []
        for row in range(self.cache.progress.batch):
            drops.append(self._step_row(layer, row, query, scaling))
        if any(len(drop) for drop in drops):
            held_layer.drop(drops)

    def _step_row(self, layer: int, row: int, query: Tensor, scaling: float) -> Tensor:
        none = torch.empty(0, dtype=torch.long)
        if not self.cache.layers[layer].heads_agree(row):
            # Heads that hold different tokens decode without eviction; the methods say so.
            return none
        granted, then = self.budgets[layer][row]
        now = self.cache.layers[layer].reached(row)
        target = self.method.budget.target(
            granted, then, now, len(self.budgets), self._bytes_per_token
        )
        beyond = self.cache.layers[layer].slots - target
        if self.method.step_waits(beyond, remembers=(layer, row) in self._carried):
            return none
        (view,) = self._views(layer, row, query, scaling)
        scores = self.method.score_step(view)
        self.decided_at = self.cache.progress.seen
        excess = view.size - target
        if excess <= 0:
            self._remember(layer, row, view.index, scores)
            return none
        tier = scores.tier if scores.tier is not None else torch.zeros(view.size, dtype=torch.int8)
        token = scores.token if scores.token.dim() == 1 else scores.token.mean(0)
        kept = torch.ones(view.size, dtype=torch.bool)
        kept[weakest(token, tier, self.method.step_drops(excess))] = False
        if bool(kept.all()):
            note = "the cache grows: every token that is left is protected"
            if note not in self.notes:
                self.notes.append(note)
        self._remember(layer, row, view.index, scores, kept)
        return view.index[~kept]

    def _remember(
        self, layer: int, row: int, index: Tensor, scores: Scores, kept: Tensor | None = None
    ) -> None:
        if scores.carry is None:
            return
        carry = scores.carry
        if kept is not None:
            index, carry = index[kept], carry[:, kept]
        self._carried[layer, row] = [(index, head) for head in carry]

    def tensors(self) -> Iterator[tuple[str, Tensor, int]]:
        """Every tensor held for later: its kind, itself, and its bytes."""
        carried = (pair for pairs in self._carried.values() for pair in pairs)
        for kind, held in (
            ("scores", [tensor for pair in carried for tensor in pair]),
            ("features", self._features),
        ):
            for tensor in held:
                yield kind, tensor, tensor.numel() * tensor.element_size()

    def fork(self, cache: VisualCache) -> Eviction:
        """This stage's state for a fork of its cache."""
        return replace(
            self,
            cache=cache,
            budgets={layer: list(granted) for layer, granted in self.budgets.items()},
            notes=list(self.notes),
            _carried=dict(self._carried),
            _features=list(self._features),
            _scored={},
            _covers={},
        )

    def select_rows(self, rows: Sequence[int]) -> None:
        """Follow the cache when beams are reordered or sequences repeated."""
        for layer, granted in self.budgets.items():
            self.budgets[layer] = [granted[row] for row in rows]
        self._carried = {
            (layer, new): self._carried[layer, old]
            for layer in self.budgets
            for new, old in enumerate(rows)
            if (layer, old) in self._carried
        }
        if self._features:
            self._features = [self._features[row] for row in rows]

    @cached_property
    def _bytes_per_token(self) -> float:
        return next(layer.bytes_per_token for layer in self.cache if layer.kind == "full")

    def _views(
        self, layer: int, row: int, queries: Tensor | None, scaling: float
    ) -> list[LayerView]:
        held = self.cache.layers[layer]
        kv_heads = held.kv_heads
        groups = [range(kv_heads)] if held.heads_agree(row) else [[h] for h in range(kv_heads)]
        layout = self.cache.progress.layouts[row]
        views = []
        for number, heads in enumerate(groups):
            tokens, keys, values = held.read(row, list(heads))
            if queries is None:
                mine = keys.new_empty((len(heads), 0, keys.shape[-1]))
            else:
                mine = self._queries(queries, row, heads, kv_heads)
            carried = None
            if (layer, row) in self._carried:
                old = self._carried[layer, row]
                carried = _aligned(old[number : number + 1] if len(groups) > 1 else old, tokens)
            views.append(
                LayerView(
                    layer=layer,
                    n_layers=len(self.cache.layers),
                    index=tokens,
                    layout=layout.select(tokens),
                    keys=keys,
                    values=values,
                    step_queries=mine,
                    scaling=scaling,
                    carried=carried,
                    cover_rank=partial(self._cover, row, tokens),
                    unrotate=self.unrotate,
                    ran=self._ran(row, tokens) if queries is not None else None,
                )
            )
        return views

    def _ran(self, row: int, tokens: Tensor) -> Tensor | None:
        """The candidates that ran; None if they are the last ones, as in a plain prefill."""
        ran = self.cache.progress.step_tokens[row].cpu()
        if len(ran) == 1:
            return None
        ran = ran[ran >= 0]
        if not len(ran) or int(ran[-1]) - int(ran[0]) + 1 == len(ran):
            return None
        return torch.searchsorted(tokens, ran.long())

    def _queries(self, queries: Tensor, row: int, heads: Sequence[int], kv_heads: int) -> Tensor:
        group = queries.shape[1] // kv_heads
        mine = queries[row, heads[0] * group : (heads[-1] + 1) * group]
        if self.cache.progress.step_padded:
            mine = mine[:, (self.cache.progress.step_tokens[row] >= 0).to(mine.device)]
        return mine

    def _cover(self, row: int, tokens: Tensor, by: str) -> Tensor:
        if (row, by) not in self._covers:
            layout = self.cache.progress.layouts[row]
            features = None
            if by == "features":
                visual = self._features[row]
                features = visual.new_zeros((len(layout), visual.shape[1]))
                features[layout.visual.to(visual.device)] = visual
            self._covers[row, by] = cover_ranks(layout, features)
        return self._covers[row, by][tokens]


def _without_tensors(view: LayerView) -> LayerView:
    """The view without K, V and queries, so that none outlive their layer."""
    heads, _, width = view.keys.shape
    hollow = view.keys.new_empty(0).expand(heads, view.size, 0) if view.size else view.keys
    return replace(
        view,
        keys=hollow,
        values=hollow,
        ran=None,
        step_queries=view.step_queries.new_empty((view.heads, 0, width)),
    )


def _aligned(old: list[tuple[Tensor, Tensor]], tokens: Tensor) -> Tensor:
    """Carried scores ``[G, S]`` of ``tokens``; 0 for those that are new."""
    rows = []
    newer = len(tokens) - len(old[0][0])
    if all(len(index) + newer == len(tokens) for index, _ in old) and torch.equal(
        old[0][0], tokens[: len(tokens) - newer]
    ):
        return F.pad(torch.stack([carry for _, carry in old]), (0, newer))
    for index, carry in old:
        row = torch.zeros(len(tokens))
        at = torch.searchsorted(index, tokens).clamp(max=max(len(index) - 1, 0))
        known = index[at] == tokens if len(index) else torch.zeros(len(tokens), dtype=torch.bool)
        row[known] = carry[at[known]].float().cpu()
        rows.append(row)
    return torch.stack(rows)
