"""Boards: coloured pictures on a 4 x 4 grid, drawn from a seed.

A scene is data first (:class:`Board`, a tuple of :class:`Picture`), pixels second (:func:`draw`).
Pictures are Font Awesome solid icons, drawn with Pillow from the font that the ``fontawesomefree``
package carries. Everything follows from an explicit ``random.Random``; nothing else is random.

Which (kind, colour, cell) combinations are held out is decided by a hash, so training and test
never have to be stored: training boards contain none of them, test questions ask about them only.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from PIL import Image, ImageDraw, ImageFont

from conduit_kv.errors import InputError

__all__ = [
    "COLOURS",
    "GRID",
    "KINDS",
    "SIZE",
    "Board",
    "Picture",
    "draw",
    "held_out",
    "make_board",
    "picture_boxes",
    "plural",
]

Split = Literal["train", "test"]
Style = Literal["dense", "sparse"]

GRID = 4
SIZE = 224
CELL = SIZE // GRID

# Names that are one token (with a leading space) in SmolLM2's tokenizer, so that a picture is one
# word and a mistake is a mistake of sight. The code points are Font Awesome's own (icons.json).
KINDS: dict[str, int] = {
    "anchor": 0xF13D, "bed": 0xF236, "bell": 0xF0F3, "bicycle": 0xF206, "bomb": 0xF1E2,
    "book": 0xF02D, "brain": 0xF5DC, "bus": 0xF207, "camera": 0xF030, "car": 0xF1B9,
    "cat": 0xF6BE, "chair": 0xF6C0, "cloud": 0xF0C2, "cow": 0xF6C8, "crown": 0xF521,
    "cube": 0xF1B2, "dog": 0xF6D3, "dragon": 0xF6D5, "eye": 0xF06E, "feather": 0xF52D,
    "fire": 0xF06D, "fish": 0xF578, "flag": 0xF024, "frog": 0xF52E, "gear": 0xF013,
    "ghost": 0xF6E2, "gift": 0xF06B, "guitar": 0xF7A6, "hammer": 0xF6E3, "heart": 0xF004,
    "helicopter": 0xF533, "horse": 0xF6F0, "house": 0xF015, "key": 0xF084, "leaf": 0xF06C,
    "lock": 0xF023, "moon": 0xF186, "pen": 0xF304, "phone": 0xF095, "plane": 0xF072,
    "rocket": 0xF135, "skull": 0xF54C, "spider": 0xF717, "star": 0xF005, "sun": 0xF185,
    "tooth": 0xF5C9, "tree": 0xF1BB, "umbrella": 0xF0E9,
}  # fmt: skip

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (214, 32, 36),
    "green": (24, 150, 56),
    "blue": (30, 80, 220),
    "yellow": (236, 196, 16),
    "purple": (140, 44, 176),
    "orange": (246, 128, 20),
    "black": (24, 24, 28),
    "brown": (122, 76, 40),
}

_PLURALS = {"bus": "buses", "fish": "fish", "leaf": "leaves", "tooth": "teeth"}
_HELD_OUT_SHARE = 1 / 8


def plural(kind: str) -> str:
    """English plural of a kind's name."""
    return _PLURALS.get(kind, kind + "s")


@dataclass(frozen=True, order=True)
class Picture:
    """One coloured picture in a cell; ``row`` and ``column`` count from 1, as the questions do."""

    row: int
    column: int
    colour: str
    kind: str

    @property
    def name(self) -> str:
        """What answers call it, e.g. ``"red bus"``."""
        return f"{self.colour} {self.kind}"

    @property
    def place(self) -> str:
        """Where it is, as answers say it, e.g. ``"row 2, column 3"``."""
        return f"row {self.row}, column {self.column}"


@dataclass(frozen=True)
class Board:
    """A scene: pictures in row-major order, with no (colour, kind) pair twice.

    Attributes
    ----------
    pictures : tuple of Picture
    style : {"dense", "sparse"}
    seed : int
        Decides background tint, sizes and offsets when the board is drawn.
    """

    pictures: tuple[Picture, ...]
    style: Style
    seed: int

    def at(self, row: int, column: int) -> Picture | None:
        """The picture in a cell, or None."""
        for picture in self.pictures:
            if (picture.row, picture.column) == (row, column):
                return picture
        return None

    def image(self) -> Image.Image:
        """The board as a 224 x 224 RGB image; the same board is always the same pixels."""
        return draw(self)


@functools.cache
def held_out(colour: str, kind: str, row: int, column: int) -> bool:
    """Whether training boards avoid this combination (one in eight, by SHA-256)."""
    digest = hashlib.sha256(f"{colour} {kind} {row} {column}".encode()).digest()
    return int.from_bytes(digest[:4], "big") < _HELD_OUT_SHARE * 2**32


def _cells(rng: random.Random, count: int, neighbour: float) -> list[tuple[int, int]]:
    """`count` different cells; with probability `neighbour` the next lies right of one drawn."""
    cells: list[tuple[int, int]] = []
    while len(cells) < count:
        row, column = rng.randint(1, GRID), rng.randint(1, GRID)
        if cells and rng.random() < neighbour:
            row, column = rng.choice(cells)
            column += 1
        if column <= GRID and (row, column) not in cells:
            cells.append((row, column))
    rng.shuffle(cells)
    return cells


def make_board(
    rng: random.Random,
    style: Style = "dense",
    split: Split = "train",
    count: tuple[int, int] | None = None,
    palette: tuple[int, int] | None = None,
) -> Board:
    """Draw a board's content.

    Parameters
    ----------
    rng : random.Random
        The only source of chance; it is advanced.
    style : {"dense", "sparse"}
        Dense: 3 to 9 pictures that nearly fill their cells. Sparse: 2 or 3 of half that size.
    split : {"train", "test"}
        Training boards hold no held-out combination; test boards hold about half of them, and at
        least one.
    count : (int, int), optional
        Other limits for the number of pictures.
    palette : (int, int), optional
        Draw from only this many colours and kinds, so that many things repeat.

    Returns
    -------
    Board
    """
    low, high = count or ((3, 9) if style == "dense" else (2, 3))
    total = rng.randint(low, high)
    cells = _cells(rng, total, 0.5 if style == "dense" else 0.4)
    # Counting is only a question where things repeat: one group shares a kind, one a colour.
    same_kind = rng.choice((1, 1, 2, 3, 4))
    same_colour = rng.choice((1, 2, 3, 4))
    colours, kinds = list(COLOURS), list(KINDS)
    if palette:
        colours, kinds = rng.sample(colours, palette[0]), rng.sample(kinds, palette[1])
    group_kind, group_colour = rng.choice(kinds), rng.choice(colours)
    taken: set[tuple[str, str]] = set()
    pictures: list[Picture] = []
    for number, (row, column) in enumerate(cells):
        wanted = split == "test" and (number == 0 or rng.random() < 0.5)
        colour, kind = "", ""
        for attempt in range(400):
            colour, kind = rng.choice(colours), rng.choice(kinds)
            if attempt < 200 and number < same_kind:
                kind = group_kind
            elif attempt < 200 and number < same_kind + same_colour:
                colour = group_colour
            if (colour, kind) in taken:
                continue
            if held_out(colour, kind, row, column) == wanted:
                break
        taken.add((colour, kind))
        pictures.append(Picture(row, column, colour, kind))
    return Board(tuple(sorted(pictures)), style, rng.getrandbits(32))


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    spec = importlib.util.find_spec("fontawesomefree")
    if spec is None or spec.origin is None:
        raise InputError(
            "the board tasks draw with the icons of the package `fontawesomefree`, which is not "
            "installed; run `conduit-kv setup embedded` (or `pip install fontawesomefree==6.6.0`)"
        )
    path = Path(spec.origin).parent / "static/fontawesomefree/webfonts/fa-solid-900.ttf"
    return ImageFont.truetype(str(path), size)


@functools.lru_cache(maxsize=2048)
def _glyph(kind: str, size: int) -> Image.Image:
    """An 8-bit mask of one icon, scaled to fit `size` x `size`, without margins."""
    # Drawn at twice the size and reduced, which smooths edges alike at every size.
    font = _font(size * 2)
    text = chr(KINDS[kind])
    left, top, right, bottom = font.getbbox(text)
    mask = Image.new("L", (max(1, int(right - left)), max(1, int(bottom - top))), 0)
    ImageDraw.Draw(mask).text((-left, -top), text, font=font, fill=255)
    scale = size / max(mask.size)
    width, height = (max(1, round(side * scale)) for side in mask.size)
    return mask.resize((width, height), Image.Resampling.LANCZOS)


def _placements(board: Board) -> tuple[tuple[int, int, int], list[tuple[int, int, int]]]:
    """Background colour, and size, left, top of each picture."""
    rng = random.Random(board.seed)
    shade = rng.randint(228, 252)
    background = tuple(max(0, min(255, shade + rng.randint(-6, 6))) for _ in range(3))
    low, high = (42, 50) if board.style == "dense" else (25, 29)
    places = []
    for picture in board.pictures:
        size = rng.randint(low, high)
        width, height = _glyph(picture.kind, size).size
        jitter = 2 if board.style == "dense" else 5
        left = (picture.column - 1) * CELL + (CELL - width) // 2 + rng.randint(-jitter, jitter)
        top = (picture.row - 1) * CELL + (CELL - height) // 2 + rng.randint(-jitter, jitter)
        places.append((size, left, top))
    return (background[0], background[1], background[2]), places


def picture_boxes(board: Board) -> list[tuple[int, int, int, int]]:
    """Left, top, right, bottom in pixels of each picture of a drawn board."""
    boxes = []
    for picture, (size, left, top) in zip(board.pictures, _placements(board)[1], strict=True):
        width, height = _glyph(picture.kind, size).size
        boxes.append((left, top, left + width, top + height))
    return boxes


def draw(board: Board) -> Image.Image:
    """Draw a board as a 224 x 224 RGB image."""
    background, places = _placements(board)
    image = Image.new("RGB", (SIZE, SIZE), background)
    tint = random.Random(board.seed ^ 0x5EED)
    for picture, (size, left, top) in zip(board.pictures, places, strict=True):
        colour = tuple(
            max(0, min(255, part + tint.randint(-10, 10))) for part in COLOURS[picture.colour]
        )
        image.paste(colour, (left, top), _glyph(picture.kind, size))
    return image
