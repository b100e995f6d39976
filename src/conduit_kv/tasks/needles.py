"""Items whose answer lies in one or two of many images: needles among boards, and films.

No question names an image by its number: what it asks about is found by looking. ``gold`` of each
item says in which images the answer lies, so that retrieval can be scored beside the answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from conduit_kv.errors import InputError
from conduit_kv.tasks import questions as ask
from conduit_kv.tasks.items import Item
from conduit_kv.tasks.questions import QA
from conduit_kv.tasks.scenes import COLOURS, GRID, KINDS, Board, Picture, Split, held_out

__all__ = ["LEAST_FRAMES", "film_item", "multi_needle_item", "needle_item"]

LEAST_FRAMES = 4
"""Fewest frames in which something can come, go and come again."""
_LENGTH = 24
_DISTRACTED = 1 / 4
"""Share of the other boards that show the kind asked about, in other colours."""
_TRIES = 400
_ROUNDS = 2000
"""Needles tried before a pool is found to have too few boards around them."""


def _asked_about(picture: Picture, split: Split) -> bool:
    return split == "train" or held_out(picture.colour, picture.kind, picture.row, picture.column)


def _shows(board: Board, kind: str) -> bool:
    return any(picture.kind == kind for picture in board.pictures)


def _haystack(
    rng: random.Random,
    pool: Sequence[Board],
    needles: Sequence[Board],
    kinds: Sequence[str],
    names: Sequence[str],
    images: int,
    distractors: bool,
) -> list[Board] | None:
    """``images`` boards with ``needles`` at random places; None if the pool has too few.

    No other board shows a picture of ``names``. With distractors a quarter of the others show one
    of ``kinds``, else none does.
    """  # fmt: skip
    others = [
        board
        for board in pool
        if board not in needles and not any(p.name in names for p in board.pictures)
    ]
    near = [board for board in others if any(_shows(board, kind) for kind in kinds)]
    far = [board for board in others if not any(_shows(board, kind) for kind in kinds)]
    missing = images - len(needles)
    wanted = min(missing, max(1, round(_DISTRACTED * missing))) if distractors else 0
    if len(near) < wanted or len(far) < missing - wanted:
        return None
    boards = [*needles, *rng.sample(near, wanted), *rng.sample(far, missing - wanted)]
    rng.shuffle(boards)
    return boards


def _too_few(pool: Sequence[Board], images: int) -> InputError:
    return InputError(
        f"{images} images cannot be drawn from {len(pool)} boards around a needle: take fewer"
    )


def needle_item(
    rng: random.Random,
    label: str,
    pool: Sequence[Board],
    images: int,
    split: Split,
    kind: str,
    *,
    distractors: bool,
) -> Item:
    """One of ``images`` boards shows what is asked about.

    Parameters
    ----------
    kind : {"which-image", "where", "left-of"}
    distractors : bool
        Whether other boards show the same kind in another colour; without, none does.
    """  # fmt: skip
    for _ in range(_ROUNDS):
        board = rng.choice(pool)
        pictures = [picture for picture in board.pictures if _asked_about(picture, split)]
        if not pictures:
            continue
        picture = rng.choice(pictures)
        left = ask.left_of(picture, board)
        # An empty neighbour is a good guess: rarely asked, as on single boards.
        if kind == "left-of" and left.answer == ask.NOTHING and rng.random() < 0.85:
            continue
        boards = _haystack(rng, pool, [board], [picture.kind], [picture.name], images, distractors)
        if boards is None:
            continue
        if kind == "which-image":
            qa = ask.which_image(picture, boards)
        else:
            qa = ask.where(picture) if kind == "where" else left
        gold = (boards.index(board),)
        return Item(label, kind, tuple(boards), qa.question, qa.answer, None, _LENGTH, gold)
    raise _too_few(pool, images)


def multi_needle_item(
    rng: random.Random, label: str, pool: Sequence[Board], images: int, split: Split, kind: str
) -> Item:
    """Two boards show what is asked about, one picture each.

    Parameters
    ----------
    kind : {"which-images", "where-both"}
    """
    for _ in range(_ROUNDS):
        needles = rng.sample(pool, 2)
        asked: list[Picture] = []
        for board in needles:
            fitting = [p for p in board.pictures if _asked_about(p, split)]
            if fitting:
                asked.append(rng.choice(fitting))
        names = [picture.name for picture in asked]
        shown = [p.name for board in needles for p in board.pictures]
        if len(asked) < 2 or any(shown.count(name) > 1 for name in names):
            continue
        kinds = [picture.kind for picture in asked]
        boards = _haystack(rng, pool, needles, kinds, names, images, distractors=False)
        if boards is None:
            continue
        gold = tuple(boards.index(board) for board in needles)
        qa = ask.which_images(asked, gold) if kind == "which-images" else ask.where_both(asked)
        return Item(label, kind, tuple(boards), qa.question, qa.answer, None, _LENGTH, gold)
    raise _too_few(pool, images)


# -- films -----------------------------------------------------------------------------------------

Cell = tuple[int, int]


@dataclass(frozen=True)
class _Actor:
    """A picture with the cell in which it is at each frame; None while it is away."""

    colour: str
    kind: str
    cells: tuple[Cell | None, ...]

    def at(self, frame: int) -> Picture | None:
        cell = self.cells[frame]
        return None if cell is None else Picture(cell[0], cell[1], self.colour, self.kind)


def _walk(rng: random.Random, taken: list[set[Cell]], there: Sequence[bool]) -> list[Cell | None]:
    """A way over free cells that stands still for a while, then steps to a neighbour."""
    cells: list[Cell | None] = []
    here: Cell | None = None
    for frame, present in enumerate(there):
        if not present:
            here = None
        else:
            free = [
                (row, column)
                for row in range(1, GRID + 1)
                for column in range(1, GRID + 1)
                if (row, column) not in taken[frame]
            ]
            near = [c for c in free if here and abs(c[0] - here[0]) + abs(c[1] - here[1]) == 1]
            moves = here is not None and rng.random() < 0.3 and bool(near)
            if here not in free or moves:
                here = rng.choice(near or free)
        if here is not None:
            taken[frame].add(here)
        cells.append(here)
    return cells


def _presence(rng: random.Random, frames: int, kind: str) -> tuple[list[bool], str]:
    """When the picture that is asked about is there, and for ``how-often`` the answer."""
    there = [False] * frames
    if kind == "when":
        there[rng.randrange(frames)] = True
    elif kind == "before":
        first = rng.randrange(1, frames)
        for frame in range(first, min(frames, first + rng.randint(1, 3))):
            there[frame] = True
    else:
        times = rng.randint(1, min(4, frames // 2))
        # Appearances with at least one empty frame between: places among what is left.
        for number, place in enumerate(sorted(rng.sample(range(frames - times + 1), times))):
            there[place + number] = True
        return there, str(times)
    return there, ""


def film_item(rng: random.Random, label: str, frames: int, split: Split, kind: str) -> Item:
    """A scene that moves, frame by frame, and a question about one moment of it.

    The frames are numbered like images. A few pictures come, walk from cell to cell and go.

    Parameters
    ----------
    kind : {"when", "before", "how-often"}
        In which frame something is, where it is in a single one; what was in a cell just before
        something came; how many times something came.
    """
    while True:
        made = _film(rng, frames, split, kind)
        if made is not None:
            boards, qa, gold = made
            return Item(label, kind, boards, qa.question, qa.answer, None, _LENGTH, gold)


def _film(
    rng: random.Random, frames: int, split: Split, kind: str
) -> tuple[tuple[Board, ...], QA, tuple[int, ...]] | None:
    there, times = _presence(rng, frames, kind)
    taken: list[set[Cell]] = [set() for _ in range(frames)]
    names: set[tuple[str, str]] = set()

    def cast(present: Sequence[bool], wanted: Callable[[_Actor], bool]) -> _Actor | None:
        cells = tuple(_walk(rng, taken, present))
        for _ in range(_TRIES):
            name = rng.choice(list(COLOURS)), rng.choice(list(KINDS))
            actor = _Actor(*name, cells)
            if name not in names and wanted(actor):
                names.add(name)
                return actor
        return None

    def fits(actor: _Actor) -> bool:
        """Training films show no held-out combination; tests ask about one."""
        held = [held_out(p.colour, p.kind, p.row, p.column) for p in map(actor.at, range(frames))
                if p is not None]  # fmt: skip
        return held[0] if split == "test" else not any(held)

    def extra(actor: _Actor) -> bool:
        return split == "test" or fits(actor)

    star = cast(there, fits)
    others = []
    for _ in range(rng.randint(3, 5)):
        start = rng.randrange(max(1, frames // 2))
        stay = rng.randint(max(2, frames // 4), frames)
        others.append(cast([start <= f < start + stay for f in range(frames)], extra))
    if star is None:
        return None
    actors = [star, *(actor for actor in others if actor is not None)]
    seed = rng.getrandbits(32)  # one background for all frames
    shown = [
        tuple(sorted(p for p in (actor.at(f) for actor in actors) if p is not None))
        for f in range(frames)
    ]
    boards = tuple(Board(pictures, "dense", seed) for pictures in shown)
    name = f"{star.colour} {star.kind}"
    visible = tuple(frame for frame in range(frames) if there[frame])
    if kind == "when":
        return boards, replace(ask.which_frame(name, visible[0] + 1), kind=kind), visible
    if kind == "how-often":
        return boards, ask.how_often(name, times), visible
    before = visible[0] - 1
    # The cell must have changed by the next frame, or any moment would do.
    changed = [
        p for p in boards[before].pictures if boards[before + 1].at(p.row, p.column) != p
    ]  # fmt: skip
    if not changed:
        return None
    picture = rng.choice(changed)
    return boards, ask.just_before(name, picture), (before,)
