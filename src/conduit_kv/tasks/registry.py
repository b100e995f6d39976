"""The tasks by name."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from conduit_kv.errors import InputError
from conduit_kv.tasks import needles
from conduit_kv.tasks import questions as ask
from conduit_kv.tasks.items import Item, exact_match, list_f1
from conduit_kv.tasks.questions import QA
from conduit_kv.tasks.scenes import GRID, Board, Picture, Split, Style, held_out, make_board

__all__ = ["POOL_SIZE", "Protocol", "Task", "get_task", "task_names", "training_boards"]

Protocol = Literal["short", "late", "follow-up", "list"]
Base = Literal["board", "haystack", "needle", "multi-needle", "video", "easy-vqa"]

POOL_SIZE = 400
_KINDS = ("what", "where", "how-many", "left-of")
_NEEDLE_KINDS = {
    "needle": ("which-image", "where", "left-of"),
    "multi-needle": ("which-images", "where-both"),
    "video": ("when", "before", "how-often"),
}
_MANY = 256
"""Most images of a needle or frames of a film: the pool has enough boards without a kind."""
_SHORT, _LONG = 16, 128
# Bare guessing must not pay: an empty neighbour is the answer to one left-of question in seven.
_NOTHING_SHARE = 0.15


def _asked_about(picture: Picture, split: Split) -> bool:
    """Whether questions of this split may be about a picture."""
    return split == "train" or held_out(picture.colour, picture.kind, picture.row, picture.column)


def _board_question(
    rng: random.Random, style: Style, split: Split, kind: str
) -> tuple[Board, QA, tuple[str, ...]]:
    """A board, a question about it, and the names of the pictures that the question is about."""
    wanted = rng.randint(1, 4 if style == "dense" else 3)
    nothing = rng.random() < _NOTHING_SHARE
    while True:
        board = make_board(rng, style, split)
        pictures = [picture for picture in board.pictures if _asked_about(picture, split)]
        rng.shuffle(pictures)
        for picture in pictures:
            names = (picture.name,)
            if kind == "what":
                return board, ask.what(picture.row, picture.column, board), names
            if kind == "where":
                return board, ask.where(picture), names
            if kind == "how-many":
                both = [
                    ask.how_many_kind(picture.kind, board),
                    ask.how_many_colour(picture.colour, board),
                ]
                fitting = [qa for qa in both if ask.number_of(qa.answer) == wanted]
                if fitting:
                    return board, rng.choice(fitting), ()
            elif kind == "left-of":
                qa = ask.left_of(picture, board)
                if (qa.answer == ask.NOTHING) == nothing:
                    return board, qa, (*names, qa.answer)
            else:
                return board, ask.list_all(board), ()


def _names(text: str, name: str) -> bool:
    """Whether a text gives a picture's colour and kind, together or apart."""
    return name != ask.NOTHING and all(word in text for word in name.split())


def _question_before(
    rng: random.Random, board: Board, asked: QA, names: Sequence[str]
) -> tuple[str, str]:
    """A first question whose words and answer give nothing of the second away."""
    candidates: list[QA] = []
    for picture in board.pictures:
        candidates += [
            ask.what(picture.row, picture.column, board),
            ask.where(picture),
            ask.how_many_kind(picture.kind, board),
            ask.how_many_colour(picture.colour, board),
            ask.left_of(picture, board),
        ]
    fitting = [
        qa
        for qa in candidates
        if qa.question != asked.question
        and not any(_names(f"{qa.question} {qa.answer}", name) for name in names)
    ]
    if not fitting:
        lines = range(1, GRID + 1)
        empty = [(r, c) for r, c in itertools.product(lines, lines) if board.at(r, c) is None]
        fitting = [ask.what(row, column, board) for row, column in empty]
    # Every kind of first question equally often, where the board allows it.
    kind = rng.choice(sorted({qa.kind for qa in fitting}))
    chosen = rng.choice([qa for qa in fitting if qa.kind == kind])
    return chosen.question, chosen.answer


@functools.cache
def _pool(split: Split) -> tuple[Board, ...]:
    """The boards of which every haystack is made; fixed, so that stored entries can be reused."""
    return tuple(
        make_board(random.Random(f"haystack {split} {number}"), "dense", split, (3, 6))
        for number in range(POOL_SIZE)
    )


def training_boards(count: int) -> tuple[Board, ...]:
    """The first boards of which training haystacks are made.

    Raises
    ------
    InputError
        If there are fewer.
    """
    if not 1 <= count <= POOL_SIZE:
        raise InputError(f"there are {POOL_SIZE} training boards, not {count}")
    return _pool("train")[:count]


def _image_question(
    rng: random.Random, boards: Sequence[Board], place: int, kind: str, split: Split
) -> QA | None:
    """A question about the image at `place`, or None if it has none of this kind."""
    names = [picture.name for board in boards for picture in board.pictures]
    pictures = [p for p in boards[place].pictures if _asked_about(p, split)]
    if kind == "which-image":
        pictures = [picture for picture in pictures if names.count(picture.name) == 1]
    if not pictures:
        return None
    picture = rng.choice(pictures)
    if kind == "which-image":
        return ask.which_image(picture, boards)
    if kind == "image-what":
        return ask.image_what(place + 1, picture.row, picture.column, boards[place])
    return ask.image_where(place + 1, picture)


@functools.cache
def _easy_vqa(split: Split) -> tuple[Path, list[tuple[str, str, int]]]:
    spec = importlib.util.find_spec("easy_vqa")
    if spec is None or spec.origin is None:
        raise InputError(
            "the task easy-vqa reads the package `easy-vqa`, which is not installed; run "
            "`conduit-kv setup embedded` (or `pip install easy-vqa==1.0`)"
        )
    folder = Path(spec.origin).parent / "data" / split
    rows = json.loads((folder / "questions.json").read_text(encoding="utf-8"))
    # Its yes/no questions can be answered without the image.
    return folder, [(q, a, n) for q, a, n in rows if a not in ("yes", "no")]


@dataclass(frozen=True)
class Task:
    """A named set of items with the way they are asked and scored.

    Attributes
    ----------
    name : str
    protocol : {"short", "late", "follow-up", "list"}
        short: ask and answer. late: what is evicted or held is decided before the assistant's turn
        begins, so that the answer comes from what was kept. follow-up: the item has a question
        before, and what is evicted is decided after that. list: a long answer.
    base : {"board", "haystack", "needle", "multi-needle", "video", "easy-vqa"}
        needle: like haystack, but found by its content alone; multi-needle: in two images. video:
        the frames of a film.
    style : {"dense", "sparse"}
        Of boards.
    images : int
        Images per item.
    distractors : bool
        Whether other images of a needle task show the same kind of thing.
    """

    name: str
    protocol: Protocol
    base: Base
    style: Style = "dense"
    images: int = 1
    distractors: bool = False

    def items(self, n: int, seed: int = 0, split: Split = "test") -> list[Item]:
        """The first `n` items of a seed.

        A larger `n` begins with the items of a smaller one, and a task's late and follow-up forms
        ask the same last questions about the same images.

        Parameters
        ----------
        n : int
        seed : int
        split : {"test", "train"}
            Test questions are about held-out combinations of colour, kind and cell (easy-vqa: its
            own test images).

        Returns
        -------
        list of Item

        Raises
        ------
        InputError
            If `n` is negative or more than there are (easy-vqa), or the split is unknown.
        """
        if split not in ("train", "test"):
            raise InputError(f"split is 'test' or 'train', not {split!r}")
        if n < 0:
            raise InputError(f"the number of items cannot be negative, and is {n}")
        if self.base == "easy-vqa":
            return self._easy_vqa_items(n, seed, split)
        makers = {"board": self._board_item, "haystack": self._haystack_item}
        make = makers.get(self.base, self._needle_item)
        return [make(number, seed, split) for number in range(n)]

    def score(self, answer_text: str, item: Item) -> float:
        """How right an answer is, 0 to 1.

        Lists: F1 over occupied cells (:func:`.items.list_f1`). Counting: 1 if the answer ends in
        the right number. Everything else: 1 if the answer equals the right one after strip, case
        folding and dropping trailing periods, else 0.
        """
        if item.kind == "list":
            return list_f1(answer_text, item.answer)
        if item.kind == "how-many":
            return float(ask.number_of(answer_text) == ask.number_of(item.answer))
        return exact_match(answer_text, item.answer)

    def _board_item(self, number: int, seed: int, split: Split) -> Item:
        kind = "list" if self.protocol == "list" else _KINDS[number % len(_KINDS)]
        rng = random.Random(f"board {self.style} {split} {seed} {number} {kind}")
        board, qa, names = _board_question(rng, self.style, split, kind)
        first = _question_before(rng, board, qa, names) if self.protocol == "follow-up" else None
        length = _LONG if kind == "list" else _SHORT
        label = f"board-{self.style}-{split}-{seed}-{number}"
        return Item(label, qa.kind, (board,), qa.question, qa.answer, first, length)

    def _haystack_item(self, number: int, seed: int, split: Split) -> Item:
        rng = random.Random(f"haystack {self.images} {split} {seed} {number}")
        kinds = ("which-image", "image-what", "which-image", "image-where")
        qa: QA | None = None
        while qa is None:
            boards = rng.sample(_pool(split), self.images)
            place = rng.randrange(self.images)
            qa = _image_question(rng, boards, place, kinds[number % len(kinds)], split)
        first = None
        if self.protocol == "follow-up":
            other = rng.choice([p for p in range(self.images) if p != place])
            # Nothing is evicted for having been asked about before if the board is any board, so
            # the first question may be about any picture, held out or not.
            before = _image_question(
                rng, boards, other, rng.choice(("image-what", "image-where")), "train"
            )
            if before is not None:
                first = (before.question, before.answer)
        label = f"haystack-{self.images}-{split}-{seed}-{number}"
        return Item(
            label, qa.kind, tuple(boards), qa.question, qa.answer, first, _SHORT, (place,)
        )  # fmt: skip

    def _needle_item(self, number: int, seed: int, split: Split) -> Item:
        label = f"{self.name}-{split}-{seed}-{number}"
        kinds = _NEEDLE_KINDS[self.base]
        kind, rng = kinds[number % len(kinds)], random.Random(label)
        if self.base == "video":
            return needles.film_item(rng, label, self.images, split, kind)
        pool = _pool(split)
        if self.base == "multi-needle":
            return needles.multi_needle_item(rng, label, pool, self.images, split, kind)
        return needles.needle_item(
            rng, label, pool, self.images, split, kind, distractors=self.distractors
        )

    def _easy_vqa_items(self, n: int, seed: int, split: Split) -> list[Item]:
        folder, rows = _easy_vqa(split)
        if n > len(rows):
            raise InputError(f"easy-vqa has {len(rows)} open {split} questions; {n} were asked for")
        order = list(range(len(rows)))
        random.Random(f"easy-vqa {split} {seed}").shuffle(order)
        items = []
        for index in order[:n]:
            question, answer, image = rows[index]
            path = folder / "images" / f"{image}.png"
            label = f"easy-vqa-{split}-{index}"
            items.append(Item(label, "easy-vqa", (path,), question, answer, None, _SHORT))
        return items


_FIXED: dict[str, Task] = {
    task.name: task
    for style, base in (("dense", "board"), ("sparse", "board-sparse"))
    for task in (
        Task(base, "short", "board", "dense" if style == "dense" else "sparse"),
        Task(f"{base}-late", "late", "board", "dense" if style == "dense" else "sparse"),
        Task(f"{base}-follow-up", "follow-up", "board", "dense" if style == "dense" else "sparse"),
        Task(f"{base}-list", "list", "board", "dense" if style == "dense" else "sparse"),
    )
}
_FIXED["easy-vqa"] = Task("easy-vqa", "short", "easy-vqa")
# Haystacks under a name of their own: their boards come from one pool, so that the images of an
# item have been in the prompts of others, in another order and with other text.
_FIXED["reuse"] = Task("reuse", "short", "haystack", images=4)


_FORMS: dict[str, tuple[Base, Protocol, bool, int, int]] = {
    "haystack-N": ("haystack", "short", False, 1, POOL_SIZE),
    "haystack-N-late": ("haystack", "late", False, 1, POOL_SIZE),
    "haystack-N-follow-up": ("haystack", "follow-up", False, 2, POOL_SIZE),
    "needle-N": ("needle", "short", False, 1, _MANY),
    "needle-N-distractors": ("needle", "short", True, 2, _MANY),
    "multi-needle-N": ("multi-needle", "short", False, 2, _MANY),
    "video-N": ("video", "short", False, needles.LEAST_FRAMES, _MANY),
}
"""Tasks of any number of images: base, protocol, distractors, fewest and most images."""


def task_names() -> list[str]:
    """Names that :func:`get_task` knows; N stands for a number of images."""
    return [*_FIXED, *_FORMS]


def get_task(name: str) -> Task:
    """Look a task up.

    Parameters
    ----------
    name : str
        One of :func:`task_names`, with a number for N.

    Returns
    -------
    Task

    Raises
    ------
    InputError
        If the name is unknown, or the number of images cannot be had.
    """
    if name in _FIXED:
        return _FIXED[name]
    number = re.search(r"-(\d+)(?=-|$)", name)
    form = name if number is None else name.replace(number.group(), "-N", 1)
    if number is None or form not in _FORMS:
        raise InputError(f"unknown task {name!r}; known are {', '.join(task_names())}")
    base, protocol, distractors, least, most = _FORMS[form]
    images = int(number.group(1))
    if not least <= images <= most:
        raise InputError(
            f"{name}: the number of images is {least} to {most} (the boards of the pool)"
        )
    return Task(name, protocol, base, "dense", images, distractors)
