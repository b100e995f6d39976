"""Intervals and comparisons: how sure a figure is, and whether two differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

__all__ = ["Difference", "agreement", "compare", "same_answer", "wilson"]

_Z = 1.959963984540054
"""Half width of a 95 % interval of the normal distribution."""
_RESAMPLES = 10_000
_TIE = 0.01
"""Two plans that are both within so much of the full cache are as good as each other."""

Verdict = Literal["above", "below", "tie", "not separated"]


def wilson(mean: float, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a proportion.

    For scores between 0 and 1 (a list's F1) it is wider than need be, since nothing that lies in
    [0, 1] varies more than right and wrong with the same mean.

    Parameters
    ----------
    mean : float
        Share of right answers, or mean score.
    n : int
        Answers; with none the interval is [0, 1].
    """
    if n == 0:
        return 0.0, 1.0
    scale = 1 + _Z**2 / n
    centre = (mean + _Z**2 / (2 * n)) / scale
    half = _Z / scale * math.sqrt(mean * (1 - mean) / n + _Z**2 / (4 * n**2))
    return max(0.0, centre - half), min(1.0, centre + half)


@dataclass(frozen=True)
class Difference:
    """How much better one plan is than another on the same items.

    Attributes
    ----------
    mean, low, high : float
        Mean paired difference of the scores and its 95 % bootstrap interval.
    verdict : {"above", "below", "tie", "not separated"}
        ``"tie"``: both plans are within a point of the full cache. ``"above"``, ``"below"``: the
        interval excludes 0.
    """

    mean: float
    low: float
    high: float
    verdict: Verdict


def compare(
    ours: Sequence[float],
    theirs: Sequence[float],
    full: Sequence[float] | None = None,
    seed: int = 0,
) -> Difference:
    """Compare two plans item by item, by a paired bootstrap over the items.

    Parameters
    ----------
    ours, theirs : sequence of float
        Scores of the same items in the same order.
    full : sequence of float, optional
        The full cache's scores, by which a tie is told; ``theirs`` if not given.
    seed : int
        Of the resampling.
    """
    paired = np.asarray(ours, dtype=float) - np.asarray(theirs, dtype=float)
    if not len(paired):
        return Difference(0.0, 0.0, 0.0, "not separated")
    low, high = _bootstrap(paired, seed)
    mean = float(paired.mean())
    reference = float(np.mean(theirs if full is None else full))
    verdict: Verdict = "not separated"
    if all(abs(float(np.mean(each)) - reference) <= _TIE + 1e-12 for each in (ours, theirs)):
        verdict = "tie"
    elif low > 0:
        verdict = "above"
    elif high < 0:
        verdict = "below"
    return Difference(mean, low, high, verdict)


def _bootstrap(paired: np.ndarray, seed: int) -> tuple[float, float]:
    # Differences of right and wrong take three values: resampling their counts is resampling them.
    values, counts = np.unique(paired, return_counts=True)
    rng = np.random.default_rng(seed)
    drawn = rng.multinomial(len(paired), counts / len(paired), size=_RESAMPLES)
    means = drawn @ values / len(paired)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def same_answer(one: str, other: str) -> bool:
    """Equal after strip and casefold."""
    return one.strip().casefold() == other.strip().casefold()


def agreement(answers: Sequence[str], reference: Sequence[str]) -> float | None:
    """Share of answers that equal those of a reference; None if there are none."""
    if not answers:
        return None
    equal = sum(same_answer(a, b) for a, b in zip(answers, reference, strict=True))
    return equal / len(answers)
