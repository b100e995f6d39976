"""Intervals against known values, and what is called above, below or a tie."""

import math

import numpy as np
import pytest

from conduit_kv.bench.stats import agreement, compare, same_answer, wilson


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [
        (0, 10, 0.0, 0.2775328),
        (5, 10, 0.2365931, 0.7634069),
        (8, 10, 0.4901625, 0.9433178),
        (10, 10, 0.7224672, 1.0),
    ],
)
def test_wilson_known_values(right: int, n: int, low: float, high: float) -> None:
    assert wilson(right / n, n) == pytest.approx((low, high), abs=1e-6)


@pytest.mark.parametrize(("mean", "n"), [(0.95, 300), (0.03, 60), (0.5, 7)])
def test_wilson_solves_its_equation(mean: float, n: int) -> None:
    """A bound is the proportion from which the mean is 1.96 of its standard errors away."""
    for bound in wilson(mean, n):
        assert abs(mean - bound) == pytest.approx(1.959964 * math.sqrt(bound * (1 - bound) / n))


def test_wilson_of_nothing() -> None:
    assert wilson(0.0, 0) == (0.0, 1.0)


def test_bootstrap_is_near_the_normal_interval() -> None:
    rng = np.random.default_rng(1)
    ours = (rng.random(400) < 0.8).astype(float)
    theirs = (rng.random(400) < 0.5).astype(float)
    found = compare(ours, theirs)
    paired = ours - theirs
    half = 1.96 * paired.std() / math.sqrt(len(paired))
    assert found.mean == pytest.approx(paired.mean())
    assert found.low == pytest.approx(paired.mean() - half, abs=0.005)
    assert found.high == pytest.approx(paired.mean() + half, abs=0.005)
    assert found.verdict == "above"
    assert compare(theirs, ours).verdict == "below"


def test_bootstrap_of_list_scores() -> None:
    rng = np.random.default_rng(2)
    ours, theirs = rng.random(50), rng.random(50)
    found = compare(ours, theirs)
    assert found.low < found.mean < found.high
    assert found == compare(ours, theirs)


def test_verdicts() -> None:
    right, wrong = [1.0] * 60, [0.0] * 60
    assert compare(right, right, right).verdict == "tie"
    assert compare(right, wrong, right).verdict == "above"
    few = [1.0, 0.0, 1.0, 1.0]
    assert compare(few, [0.0, 1.0, 1.0, 1.0], [1.0] * 4).verdict == "not separated"
    # Each is within a point of the full cache, though the interval of their difference is tiny.
    almost = [*right[:-1], 1 - 0.5]
    assert compare(almost, right, right).verdict == "tie"
    assert compare([], []).verdict == "not separated"


def test_agreement() -> None:
    assert same_answer(" Red Bus", "red bus ")
    assert not same_answer("red bus", "red bus.")
    assert agreement(["a", "B"], ["A", "c"]) == 0.5
    assert agreement([], []) is None
