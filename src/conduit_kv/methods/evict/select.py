"""From scores to kept tokens: one ranking for every evict method."""

from __future__ import annotations

import torch
from torch import Tensor

from conduit_kv.budget import largest_remainder
from conduit_kv.layout import Layout
from conduit_kv.ranks import highest

PROTECTED = 127
"""Tier of tokens that are never evicted."""

SINKS = 4
"""First tokens of a sequence, which attention leans on whatever they say."""


def at_least(tier: Tensor, where: Tensor, level: int) -> Tensor:
    """``tier`` ``[S]`` int8, raised to ``level`` at ``where`` (a mask or an index)."""
    raised = tier.clone()
    raised[where] = raised[where].clamp(min=level)
    return raised


def ranking(score: Tensor, tier: Tensor) -> Tensor:
    """``[S]`` int64: candidates from first to last kept; ties go to the lower index.

    Parameters
    ----------
    score : Tensor
        ``[S]`` fp32; not-a-number ranks last.
    tier : Tensor
        ``[S]`` int8.
    """
    score = torch.nan_to_num(score.float().cpu(), nan=float("-inf"))
    by_score = highest(score, len(score))
    by_tier = torch.sort(tier.cpu()[by_score], descending=True, stable=True).indices
    return by_score[by_tier]


def weakest(score: Tensor, tier: Tensor, count: int) -> Tensor:
    """The last ``count`` of :func:`ranking`, or as many as are not protected.

    One alone, as in most decoding steps, is found without sorting.
    """
    tier = tier.cpu()
    if count == 1 and len(tier):
        lowest = int(tier.min())
        if lowest == PROTECTED:
            return torch.empty(0, dtype=torch.long)
        score = torch.nan_to_num(score.float().cpu(), nan=float("-inf"))
        score = score.masked_fill_(tier != lowest, float("inf"))
        return len(score) - 1 - score.flip(0).argmin().view(1)  # of equals the newest
    count = min(count, int((tier != PROTECTED).sum()))
    order = ranking(score, tier)
    return order[len(order) - count :]


def keep_best(
    score: Tensor,
    tier: Tensor,
    budget: int,
    layout: Layout,
    *,
    by_image: bool = False,
    cover: float = 0.0,
    cover_rank: Tensor | None = None,
) -> Tensor:
    """The candidates kept, ascending.

    Parameters
    ----------
    score, tier : Tensor
        ``[S]``, see :class:`conduit_kv.methods.evict.base.Scores`.
    budget : int
        How many are kept; protected ones are kept even beyond it.
    layout : Layout
        Of the ``S`` candidates.
    by_image : bool
        Share the visual tokens kept over the images in proportion to what each has left.
    cover : float
        Share of the visual tokens kept (of each image, with ``by_image``) that goes in the order
        of ``cover_rank`` instead of the score. Visual tokens that a method keeps for their place,
        in a tier above 0 (a window, the newest), are not among those.
    cover_rank : Tensor or None
        ``[S]`` int64, lower first.
    """
    order = ranking(score, tier)
    protected = int((tier == PROTECTED).sum())
    kept = order[: max(budget, protected)]
    if by_image or (cover and cover_rank is not None):
        contested = layout.visual & (tier.cpu() <= 0)
        free = contested[kept]
        others, number = kept[~free], int(free.sum())
        pool = order[contested[order]]
        if by_image:
            owner = layout.image[pool]
            sizes = torch.bincount(owner, minlength=len(layout.grids))
            shares = (sizes.double() * number / max(int(sizes.sum()), 1)).tolist()
            pools = [
                (pool[owner == image], count)
                for image, count in enumerate(largest_remainder(shares, number))
            ]
        else:
            pools = [(pool, number)]
        chosen = [_cover_then_score(ranked, count, cover, cover_rank) for ranked, count in pools]
        kept = torch.cat([others, *chosen])
    return torch.sort(kept).values


def _cover_then_score(
    ranked: Tensor, count: int, cover: float, cover_rank: Tensor | None
) -> Tensor:
    """``count`` of ``ranked``: the first by cover, the others in the order given."""
    if not cover or cover_rank is None:
        return ranked[:count]
    n_cover = round(cover * count)
    covering = ranked[torch.sort(cover_rank[ranked], stable=True).indices][:n_cover]
    rest = ranked[~torch.isin(ranked, covering)]
    return torch.cat([covering, rest[: count - n_cover]])
