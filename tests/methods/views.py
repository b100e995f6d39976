"""Random views of one layer, and the full attention behind them, for slow references."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from conduit_kv.layout import Grid, Layout
from conduit_kv.methods.cover import cover_ranks
from conduit_kv.methods.evict import PROTECTED, EvictMethod, Scores
from conduit_kv.methods.evict.select import ranking
from conduit_kv.view import LayerView

Parts = Sequence[int | tuple[int, int]]
"""A prompt: a number is that many text tokens, a pair an image of that many rows and columns."""


def make_layout(parts: Parts) -> Layout:
    visual, grids = [], []
    for part in parts:
        if isinstance(part, int):
            visual += [False] * part
        else:
            visual += [True] * (part[0] * part[1])
            grids.append(Grid(1, *part))
    return Layout.of(torch.tensor(visual, dtype=torch.bool), grids)


def make_view(
    parts: Parts,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    width: int = 8,
    rows: int | None = None,
    held: Sequence[int] | None = None,
    seed: int = 0,
    layer: int = 0,
    n_layers: int = 4,
    carried: Tensor | None = None,
    features: Tensor | None = None,
    sharp: float = 2.0,
) -> LayerView:
    """A view of a random layer.

    Parameters
    ----------
    parts : sequence
        The prompt, see :data:`Parts`.
    rows : int or None
        How many of the last tokens have queries: a later turn; None for all, a first prefill.
    held : sequence of int or None
        Which of the tokens before those are still there; None for all.
    sharp : float
        Scale of the queries: larger makes attention less even.
    """
    layout = make_layout(parts)
    length = len(layout)
    rows = length if rows is None else rows
    before = range(length - rows) if held is None else held
    index = torch.tensor([*before, *range(length - rows, length)], dtype=torch.long)
    # Drawn one after the other, so that a view of fewer rows shares the numbers of the whole one.
    random = torch.Generator().manual_seed(seed * 1000 + layer)
    keys = torch.randn(kv_heads, length, width, generator=random)
    values = torch.randn(kv_heads, length, width, generator=random)
    queries = torch.randn(heads, length, width, generator=random) * sharp
    ranks = {"grid": cover_ranks(layout)}
    if features is not None:
        ranks["features"] = cover_ranks(layout, features)
    return LayerView(
        layer=layer,
        n_layers=n_layers,
        index=index,
        layout=layout.select(index),
        keys=keys[:, index],
        values=values[:, index],
        step_queries=queries[:, length - rows :],
        scaling=width**-0.5,
        carried=carried,
        cover_rank=lambda by: ranks[by][index],
    )


def dense(view: LayerView) -> Tensor:
    """``[H, S, S]`` float64: all attention, row by row; 0 in the rows without queries."""
    size, heads = view.size, view.heads
    full = torch.zeros(heads, size, size, dtype=torch.float64)
    for head in range(heads):
        keys = view.keys[head * view.kv_heads // heads].double()
        for row in view.rows.tolist():
            query = view.step_queries[head, row - size].double()
            logits = torch.tensor([float(query @ keys[j]) for j in range(row + 1)])
            full[head, row, : row + 1] = (logits.double() * view.scaling).softmax(0)
    return full


def head_groups(view: LayerView) -> list[list[int]]:
    """Query heads of each KV head."""
    group = view.heads // view.kv_heads
    return [list(range(g * group, (g + 1) * group)) for g in range(view.kv_heads)]


def clear(scores: Tensor, gap: float = 1e-5) -> bool:
    """Whether all scores ``[..., S]`` lie further apart than rounding could swap."""
    if scores.shape[-1] < 2:
        return True
    return bool((scores.double().sort(-1).values.diff(dim=-1) > gap).all())


def decode(
    method: EvictMethod, views: Callable[[Tensor, Tensor], LayerView], start: LayerView, steps: int
) -> list[tuple[int, int, Tensor]]:
    """Prefill, then ``steps`` decoded tokens, as a request does for one layer with equal heads.

    Returns
    -------
    list of (int, int, Tensor)
        Per step: tokens held before eviction, the target, and the tokens held after it.
    """
    scores = method.score(start)
    total = method.budget.total([start.size], 1.0)
    (budget,) = method.layer_budgets(total, [[scores]], [start.size])
    ((kept,),) = method.select([(start, scores)], budget)
    held = start.index[kept]
    carry = torch.zeros(int(start.index[-1]) + 1 + steps)
    if scores.carry is not None:
        carry[start.index[kept]] = scores.carry[0][kept]
    then, granted, trace = int(start.index[-1]) + 1, len(held), []
    for step in range(steps):
        now = then + step + 1
        held = torch.cat([held, torch.tensor([now - 1])])
        before, target = len(held), method.budget.target(granted, then, now)
        if method.step_waits(before - target, remembers=scores.carry is not None):
            trace.append((before, target, held))
            continue
        view = views(held, carry[held][None])
        found = method.score_step(view)
        if found.carry is not None:
            carry[held] = found.carry[0]
        tier = found.tier if found.tier is not None else torch.zeros(before, dtype=torch.int8)
        token = found.token if found.token.dim() == 1 else found.token.mean(0)
        free = int((tier != PROTECTED).sum())
        count = min(method.step_drops(max(before - target, 0)), free)
        order = ranking(token, tier)
        held = held[torch.sort(order[: before - count]).values]
        trace.append((before, target, held))
    return trace


def step_views(parts: Parts, steps: int, **options: object) -> Callable[..., LayerView]:
    """For :func:`decode`: views of the tokens held, the newest of them with a query."""
    whole = make_view([*parts, steps], **options)  # type: ignore[arg-type]

    def view(held: Tensor, carried: Tensor) -> LayerView:
        length = int(held[-1]) + 1
        return LayerView(
            layer=whole.layer,
            n_layers=whole.n_layers,
            index=held,
            layout=whole.layout.select(held),
            keys=whole.keys[:, held],
            values=whole.values[:, held],
            step_queries=whole.step_queries[:, length - 1 : length],
            scaling=whole.scaling,
            carried=carried.expand(whole.kv_heads, -1),
            cover_rank=None,
        )

    return view


@st.composite
def prompts(draw: st.DrawFn, images: int = 3) -> list[int | tuple[int, int]]:
    """Prompts of 1 to about 40 tokens: text before, between and after up to three images."""
    parts: list[int | tuple[int, int]] = [draw(st.integers(0, 5))]
    for _ in range(draw(st.integers(0, images))):
        parts.append((draw(st.integers(1, 3)), draw(st.integers(1, 4))))
        parts.append(draw(st.integers(0, 3)))
    parts.append(draw(st.integers(0, 5)))
    length = sum(p if isinstance(p, int) else p[0] * p[1] for p in parts)
    return parts if length else [1]


@st.composite
def rich_prompts(draw: st.DrawFn) -> list[int | tuple[int, int]]:
    """Prompts with text before and after one or two images: the usual case."""
    parts: list[int | tuple[int, int]] = [draw(st.integers(1, 6))]
    for _ in range(draw(st.integers(1, 2))):
        parts += [(draw(st.integers(1, 3)), draw(st.integers(2, 4))), draw(st.integers(0, 3))]
    parts[-1] = draw(st.integers(2, 7))
    return parts


@st.composite
def any_view(draw: st.DrawFn, layer: int = 0) -> LayerView:
    """First prefills and later turns, with and without grouped heads and images."""
    usual = draw(st.booleans())
    parts = draw(rich_prompts() if usual else prompts())
    length = len(make_layout(parts))
    rows, held = None, None
    if length > 1 and draw(st.integers(0, 2)) == 0:
        # A later turn: queries for the last tokens alone, and some of those before are gone.
        rows = draw(st.integers(1, min(6, length - 1) if usual else length - 1))
        held = sorted(draw(st.sets(st.integers(0, length - rows - 1), min_size=usual)))
    kv_heads = draw(st.integers(1, 2))
    return make_view(
        parts,
        heads=kv_heads * draw(st.integers(1, 2)),
        kv_heads=kv_heads,
        rows=rows,
        held=held,
        seed=draw(st.integers(0, 200)),
        layer=layer,
    )


def same_view(view: LayerView, **changes: object) -> LayerView:
    """A copy of ``view`` with some fields changed."""
    fields = {name: getattr(view, name) for name in view.__dataclass_fields__}
    return LayerView(**(fields | changes))


def kept_by(method: EvictMethod, view: LayerView, budget: int) -> list[list[int]]:
    """Per KV head the candidates kept under a layer budget."""
    scores = method.score(view)
    ((*heads,),) = method.select([(view, scores)], budget)
    return [head.tolist() for head in heads]


def best(scores: Sequence[float], candidates: Sequence[int], count: int) -> list[int]:
    """``count`` of ``candidates``, highest score first, ties to the lower index."""
    return sorted(candidates, key=lambda j: (-scores[j], j))[: max(count, 0)]


def no_scores(view: LayerView) -> Scores:
    """Scores without any preference."""
    return Scores(torch.zeros(view.size))
