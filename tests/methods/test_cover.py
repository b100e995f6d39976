"""Covering orders, against the greedy rule in loops."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from conduit_kv.layout import Grid, Layout
from conduit_kv.methods import cover
from conduit_kv.methods.cover import cover_ranks, farthest_first
from tests.methods.views import make_layout, prompts


def slow_order(points):
    """Nearest to the mean, then always the farthest from all taken."""
    count = len(points)
    mean = [sum(axis) / count for axis in zip(*points, strict=True)]

    def apart(a, b):
        return sum((x - y) ** 2 for x, y in zip(a, b, strict=True))

    order = [min(range(count), key=lambda i: (round(apart(points[i], mean), 9), i))]
    while len(order) < count:
        left = [i for i in range(count) if i not in order]
        order.append(max(left, key=lambda i: (min(apart(points[i], points[j]) for j in order), -i)))
    return order


def slow_ranks(points, groups):
    due = []
    for group in sorted(set(groups)):
        mine = [i for i, g in enumerate(groups) if g == group]
        for turn, i in enumerate(slow_order([points[i] for i in mine])):
            due.append(((turn + 0.5) / len(mine), group, turn, mine[i]))
    ranks = [0] * len(points)
    for rank, (_, _, _, i) in enumerate(sorted(due)):
        ranks[i] = rank
    return ranks


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=24
    )
)
def test_farthest_first_is_the_greedy_order(cells):
    """Whole numbers, so that ties are common and exact."""
    points = [(float(a), float(b)) for a, b, _ in cells]
    groups = [g for _, _, g in cells]
    found = farthest_first(torch.tensor(points, dtype=torch.float64), torch.tensor(groups))
    assert found.tolist() == slow_ranks(points, groups)


@given(st.integers(1, 8), st.integers(1, 8))
def test_every_prefix_of_a_grid_covers_it(rows, columns):
    """The greedy order is at most twice as far from any cell as the best choice of as many."""
    layout = make_layout([(rows, columns)])
    cells = torch.stack([layout.row, layout.column], 1).double()
    rank = cover_ranks(layout)
    apart = torch.cdist(cells, cells)
    for count in (1, 2, 4, 9):
        if count > len(cells):
            break
        taken = rank < count
        radius = float(apart[:, taken].min(1).values.max())
        chosen = torch.nonzero(taken).flatten()
        # Of count + 1 points that lie apart, any count centres leave one at half that distance.
        if count < len(cells):
            following = torch.nonzero(rank == count).flatten()
            spread = apart[torch.cat([chosen, following])][:, torch.cat([chosen, following])]
            least = float((spread + 1e9 * torch.eye(count + 1)).min())
            assert radius <= least + 1e-9


@given(prompts())
def test_ranks_of_a_sequence(parts):
    layout = make_layout(parts)
    rank = cover_ranks(layout)
    assert sorted(rank.tolist()) == list(range(len(layout)))
    visual = layout.visual
    assert not visual.any() or rank[visual].max() == int(visual.sum()) - 1
    cells = torch.stack([layout.frame, layout.row, layout.column], 1)[visual].double()
    assert rank[visual].tolist() == farthest_first(cells, layout.image[visual]).tolist()


def test_images_take_turns_in_proportion():
    layout = make_layout([2, (4, 4), 1, (2, 4), 2, (4, 4)])
    order = torch.sort(cover_ranks(layout)).indices
    owner = layout.image[order[:40]]
    for count in (5, 10, 20, 30):
        shares = torch.bincount(owner[:count], minlength=3).double()
        assert (shares - count * torch.tensor([0.4, 0.2, 0.4])).abs().max() <= 1


def test_tiles_and_frames_have_places():
    grid = Grid(2, 2, 3)
    layout = Layout.of(torch.ones(12, dtype=torch.bool), [grid])
    first = torch.sort(cover_ranks(layout)).indices[:4]
    assert set(layout.frame[first].tolist()) == {0, 1}


def test_features_are_compared_by_direction():
    layout = make_layout([1, (1, 4), 1])
    angles = torch.tensor([0.0, 0.1, 1.0, 1.7])
    features = torch.zeros(6, 2)
    features[1:5] = torch.stack([angles.cos(), angles.sin()], 1)
    # The mean lies at 0.7: first 1.0, then the farthest from it, then the farthest from both.
    assert cover_ranks(layout, features).tolist() == [4, 1, 3, 0, 2, 5]
    longer = features * torch.tensor([1, 8, 0.25, 2, 64, 1])[:, None]
    assert torch.equal(cover_ranks(layout, features), cover_ranks(layout, longer))


def test_the_table_changes_nothing(monkeypatch):
    points = torch.randint(0, 9, (60, 3), generator=torch.Generator().manual_seed(0)).double()
    groups = torch.arange(60) % 2
    whole = farthest_first(points, groups)
    monkeypatch.setattr(cover, "_TABLE", 0)
    assert torch.equal(farthest_first(points, groups), whole)
