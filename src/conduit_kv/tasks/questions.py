"""Questions about boards, and their answers.

Every function here is a pure function of a board (or several) and the picture asked about, so that
training, tests and tasks phrase the same question the same way.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from conduit_kv.tasks.scenes import GRID, Board, Picture, plural

__all__ = [
    "LIST_QUESTION",
    "NOTHING",
    "QA",
    "how_many_colour",
    "how_many_kind",
    "how_often",
    "image_how_many",
    "image_what",
    "image_where",
    "is_there",
    "just_before",
    "left_of",
    "list_all",
    "number_of",
    "parse_list",
    "places_all",
    "what",
    "where",
    "where_both",
    "which_frame",
    "which_image",
    "which_images",
]

NOTHING = "nothing"
LIST_QUESTION = "List everything, row by row."


@dataclass(frozen=True)
class QA:
    """A question with its one right answer, and the kind of question it is."""

    kind: str
    question: str
    answer: str


def what(row: int, column: int, board: Board) -> QA:
    """What is in a cell."""
    picture = board.at(row, column)
    answer = NOTHING if picture is None else picture.name
    return QA("what", f"What is in row {row}, column {column}?", answer)


def where(picture: Picture) -> QA:
    """In which cell a picture is."""
    return QA("where", f"Where is the {picture.name}?", picture.place)


def how_many_kind(kind: str, board: Board) -> QA:
    """How many pictures of one kind there are, whatever their colour."""
    colours = [picture.colour for picture in board.pictures if picture.kind == kind]
    return QA("how-many", f"How many {plural(kind)} are there?", _counted(colours))


def how_many_colour(colour: str, board: Board) -> QA:
    """How many pictures of one colour there are, whatever they show."""
    kinds = [picture.kind for picture in board.pictures if picture.colour == colour]
    return QA("how-many", f"How many {colour} pictures are there?", _counted(kinds))


def _counted(names: Sequence[str]) -> str:
    """Name what is counted, then count it: ``red, blue: 2``.

    A small model counts what it has written better than what it sees at a glance; no name comes
    twice, because no board has a picture twice.
    """
    return f"{', '.join(names) or NOTHING}: {len(names)}"


def number_of(answer: str) -> int | None:
    """The number that a counting answer ends in, or None if it ends in none."""
    match = re.search(r"(\d+)\W*$", answer)
    return int(match.group(1)) if match else None


def left_of(picture: Picture, board: Board) -> QA:
    """What is in the cell directly left of a picture; an empty cell or the edge is nothing."""
    left = board.at(picture.row, picture.column - 1)
    answer = NOTHING if left is None else left.name
    return QA("left-of", f"What is directly left of the {picture.name}?", answer)


def is_there(colour: str, kind: str, board: Board) -> QA:
    """Whether a picture is on the board (training only: it can be guessed)."""
    found = any((p.colour, p.kind) == (colour, kind) for p in board.pictures)
    return QA("is-there", f"Is there a {colour} {kind}?", "yes" if found else "no")


def list_all(board: Board) -> QA:
    """Every cell, row by row."""
    rows = []
    for row in range(1, GRID + 1):
        cells = [board.at(row, column) for column in range(1, GRID + 1)]
        names = ", ".join(NOTHING if cell is None else cell.name for cell in cells)
        rows.append(f"row {row}: {names}")
    return QA("list", LIST_QUESTION, "; ".join(rows))


def places_all(board: Board) -> QA:
    """Every picture with its cell (training only: a label per picture and cell in few tokens)."""
    answer = "; ".join(f"{picture.name}: {picture.place}" for picture in board.pictures)
    return QA("places", "Where is everything?", answer)


def parse_list(text: str) -> dict[tuple[int, int], str]:
    """Cells that a list answer names, empty ones left out.

    Anything that is not of the form ``row 1: a, b, c, d; row 2: ...`` is skipped.

    Returns
    -------
    dict
        (row, column) to name, both counted from 1.
    """
    cells: dict[tuple[int, int], str] = {}
    for part in text.casefold().strip().rstrip(".").split(";"):
        match = re.match(r"\s*row\s+(\d+)\s*:\s*(.*)", part, re.DOTALL)
        if match is None:
            continue
        for column, name in enumerate(match.group(2).split(","), start=1):
            name = " ".join(name.split())
            if name and name != NOTHING:
                cells.setdefault((int(match.group(1)), column), name)
    return cells


def which_image(picture: Picture, boards: Sequence[Board], first: int = 1) -> QA:
    """In which of several images a picture is; images are numbered from `first`."""
    places = [
        number
        for number, board in enumerate(boards, start=first)
        if any((p.colour, p.kind) == (picture.colour, picture.kind) for p in board.pictures)
    ]
    answer = " and ".join(f"image {place}" for place in places)
    return QA("which-image", f"In which image is the {picture.name}?", answer)


def image_what(number: int, row: int, column: int, board: Board) -> QA:
    """What is in a cell of one of several images."""
    answer = what(row, column, board).answer
    return QA("image-what", f"In image {number}, what is in row {row}, column {column}?", answer)


def image_where(number: int, picture: Picture) -> QA:
    """In which cell of one of several images a picture is."""
    return QA("image-where", f"In image {number}, where is the {picture.name}?", picture.place)


def image_how_many(number: int, colour: str, board: Board) -> QA:
    """How many pictures of a colour one of several images has (training only)."""
    answer = how_many_colour(colour, board).answer
    question = f"In image {number}, how many {colour} pictures are there?"
    return QA("image-how-many", question, answer)


def which_images(pictures: Sequence[Picture], places: Sequence[int]) -> QA:
    """In which images each of several pictures is; `places` count from 0, in the same order."""
    names = " and the ".join(picture.name for picture in pictures)
    answer = " and ".join(f"image {place + 1}" for place in places)
    return QA("which-images", f"In which images are the {names}?", answer)


def where_both(pictures: Sequence[Picture]) -> QA:
    """In which cells several pictures of different images are."""
    names = " and the ".join(picture.name for picture in pictures)
    return QA("where-both", f"Where are the {names}?", "; ".join(p.place for p in pictures))


def which_frame(name: str, number: int) -> QA:
    """In which frame of a film a picture is that is in one only; frames count from 1."""
    return QA("when", f"In which image is the {name}?", f"image {number}")


def just_before(name: str, picture: Picture) -> QA:
    """What was in a cell in the frame before something came."""
    place = f"row {picture.row}, column {picture.column}"
    question = f"In the image before the {name} appears, what is in {place}?"
    return QA("before", question, picture.name)


def how_often(name: str, times: str) -> QA:
    """How many times something came."""
    return QA("how-often", f"How many times does the {name} appear?", times)
