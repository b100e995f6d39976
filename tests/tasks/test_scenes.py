"""Boards: the same seed is the same board, and what is held out stays held out."""

import hashlib
import random

import pytest

from conduit_kv.tasks.scenes import (
    COLOURS,
    GRID,
    KINDS,
    SIZE,
    draw,
    held_out,
    make_board,
    picture_boxes,
)


def boards(style: str, split: str, number: int = 200):
    rng = random.Random(f"{style} {split}")
    return [make_board(rng, style, split) for _ in range(number)]


@pytest.mark.parametrize("style", ["dense", "sparse"])
def test_same_seed_same_pixels(style: str) -> None:
    one, two = (make_board(random.Random(5), style) for _ in range(2))
    assert one == two
    assert one.image().tobytes() == draw(two).tobytes()
    assert one.image().size == (SIZE, SIZE)
    assert make_board(random.Random(6), style) != one


def test_drawing_is_pinned() -> None:
    """A change of the drawing changes every figure that was measured: it must be deliberate."""
    digest = hashlib.sha256()
    for board in boards("dense", "test", 3) + boards("sparse", "test", 3):
        digest.update(repr(board).encode())
    assert digest.hexdigest()[:16] == "92227ec301cc8885"


@pytest.mark.parametrize("style", ["dense", "sparse"])
def test_training_boards_hold_nothing_held_out(style: str) -> None:
    for board in boards(style, "train"):
        assert not any(held_out(p.colour, p.kind, p.row, p.column) for p in board.pictures)


@pytest.mark.parametrize("style", ["dense", "sparse"])
def test_test_boards_hold_something_held_out(style: str) -> None:
    for board in boards(style, "test"):
        assert any(held_out(p.colour, p.kind, p.row, p.column) for p in board.pictures)


def test_held_out_share() -> None:
    cells = [(row, column) for row in range(1, GRID + 1) for column in range(1, GRID + 1)]
    flags = [held_out(c, k, *cell) for c in COLOURS for k in KINDS for cell in cells]
    assert 0.11 < sum(flags) / len(flags) < 0.14


@pytest.mark.parametrize(("style", "low", "high"), [("dense", 3, 9), ("sparse", 2, 3)])
def test_boards_are_what_they_say(style: str, low: int, high: int) -> None:
    counts = set()
    for board in boards(style, "train") + boards(style, "test"):
        counts.add(len(board.pictures))
        assert len({(p.row, p.column) for p in board.pictures}) == len(board.pictures)
        assert len({p.name for p in board.pictures}) == len(board.pictures)
        assert list(board.pictures) == sorted(board.pictures)
    assert counts == set(range(low, high + 1))


@pytest.mark.parametrize("style", ["dense", "sparse"])
def test_pictures_lie_in_their_cells(style: str) -> None:
    cell = SIZE // GRID
    for board in boards(style, "test", 50):
        for picture, (left, top, right, bottom) in zip(
            board.pictures, picture_boxes(board), strict=True
        ):
            across, down = (left + right) / 2 / cell, (top + bottom) / 2 / cell
            assert (int(down) + 1, int(across) + 1) == (picture.row, picture.column)
            assert left >= 0 and top >= 0 and right <= SIZE and bottom <= SIZE


def test_every_kind_has_a_glyph_of_its_own() -> None:
    from conduit_kv.tasks.scenes import _glyph

    masks = {_glyph(kind, 48).tobytes() for kind in KINDS}
    assert len(masks) == len(KINDS)
