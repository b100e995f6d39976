"""Training conversations of the embedded model.

One sample is one conversation: images, then many short questions as chat turns, and at last (it
would give everything away) the whole board row by row. Text tokens cost no more than visual ones,
and every answer is a label, so an image of 196 tokens is asked a dozen questions.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

from PIL import Image

from conduit_kv.embedded.parts import easy_vqa_folder
from conduit_kv.tasks import questions as ask
from conduit_kv.tasks.questions import QA
from conduit_kv.tasks.scenes import COLOURS, GRID, KINDS, Board, Split, Style, make_board

__all__ = ["DATA_VERSION", "Sample", "Turn", "draw_sample", "single_question"]

DATA_VERSION = 3

# The list, in which every cell is a label, is what teaches the model to look: it must not weigh
# less than the rest. Counting is learned slowest, and only once the model sees; more of it before
# is noise that holds the rest up (tried: at weight 2 from the start every other question was still
# at chance after 120 steps).
_EARLY = 0.45


@dataclass(frozen=True)
class Turn:
    """A question, its answer, and what each answer token weighs in the loss."""

    question: str
    answer: str
    weight: float = 1.0


@dataclass(frozen=True)
class Sample:
    """A conversation. `first` is the number of the first image where images are numbered."""

    images: tuple[Image.Image, ...]
    turns: tuple[Turn, ...]
    first: int | None = None
    boards: tuple[Board, ...] = field(default=(), repr=False)


def _turns(questions: Sequence[QA], progress: float = 0.0) -> tuple[Turn, ...]:
    more = (
        {"how-many": 1.5, "left-of": 1.5, "list": 0.7, "places": 0.7} if progress >= _EARLY else {}
    )
    return tuple(Turn(q.question, q.answer, more.get(q.kind, 1.0)) for q in questions)


def _counts(rng: random.Random, board: Board, number: int) -> list[QA]:
    kinds = sorted({picture.kind for picture in board.pictures})
    colours = sorted({picture.colour for picture in board.pictures})
    pool = [ask.how_many_kind(kind, board) for kind in kinds]
    pool += [ask.how_many_colour(colour, board) for colour in colours]
    rng.shuffle(pool)
    # Ones are the most frequent count by far; prefer the others, or "1" is a good guess.
    pool.sort(key=lambda q: ask.number_of(q.answer) == 1 and rng.random() < 0.75)
    pool = pool[:number]
    if rng.random() < 0.15:
        absent = [colour for colour in COLOURS if colour not in colours]
        if absent:
            pool.append(ask.how_many_colour(rng.choice(absent), board))
    return pool


def _board_questions(rng: random.Random, board: Board, progress: float) -> list[QA]:
    """Short questions about a board in random order, none answered by another."""
    pictures = list(board.pictures)
    rng.shuffle(pictures)
    dense = board.style == "dense"
    # What and where of one picture give each other away, so each picture is asked for one.
    half = (len(pictures) + rng.randint(0, 1)) // 2
    early = progress < _EARLY
    most = 2 if early else 3
    questions = [ask.what(p.row, p.column, board) for p in pictures[:half][:most]]
    questions += [ask.where(p) for p in pictures[half:][:most]]
    questions += _counts(rng, board, 2 if early or not dense else 4)
    beside = [q for q in (ask.left_of(p, board) for p in pictures) if q.answer != ask.NOTHING]
    alone = [q for q in (ask.left_of(p, board) for p in pictures) if q.answer == ask.NOTHING]
    questions += beside[: 2 if early else 3] + alone[: 1 if rng.random() < 0.5 else 0]
    if rng.random() < 0.2:
        row, column = rng.randint(1, GRID), rng.randint(1, GRID)
        if board.at(row, column) is None:
            questions.append(ask.what(row, column, board))
    if rng.random() < 0.3:
        there = rng.choice(pictures)
        if rng.random() < 0.5:
            questions.append(ask.is_there(there.colour, there.kind, board))
        else:
            colour = rng.choice([c for c in COLOURS if c != there.colour])
            questions.append(ask.is_there(colour, there.kind, board))
    rng.shuffle(questions)
    return questions


def _board_sample(rng: random.Random, style: str, progress: float) -> Sample:
    board = make_board(rng, "dense" if style == "dense" else "sparse")
    questions = _board_questions(rng, board, progress)
    # Answers that name all there is: many labels in few tokens.
    if rng.random() < 0.5:
        questions.append(ask.places_all(board))
    elif style == "dense" or rng.random() < 0.6:
        questions.append(ask.list_all(board))
    return Sample((board.image(),), _turns(questions, progress), boards=(board,))


def _counting_sample(rng: random.Random) -> Sample:
    """A board on which most things repeat, asked for numbers only, each number about as often."""
    palette = (rng.randint(2, 4), rng.randint(2, 4)) if rng.random() < 0.6 else None
    most = min(9, palette[0] * palette[1]) if palette else 9
    style: Style = rng.choice(("dense", "dense", "sparse"))
    board = make_board(rng, style, count=(3, most), palette=palette)
    pool = _counts(rng, board, 99)
    by_number: dict[int | None, list[QA]] = {}
    for question in pool:
        by_number.setdefault(ask.number_of(question.answer), []).append(question)
    chosen = [q for same in by_number.values() for q in same[:3]]
    rng.shuffle(chosen)
    turns = tuple(Turn(q.question, q.answer) for q in chosen)
    return Sample((board.image(),), turns, boards=(board,))


def _several_sample(rng: random.Random, number: int) -> Sample:
    boards: list[Board] = []
    for _ in range(number):
        style = "sparse" if rng.random() < 0.2 else "dense"
        count = (3, 6) if style == "dense" else None
        boards.append(make_board(rng, "sparse" if style == "sparse" else "dense", count=count))
    # Numbering from elsewhere than 1 lets "Image 14:" be learned without 14 images.
    first = 1 if number >= 12 or rng.random() < 0.5 else rng.randint(2, 17 - number)
    names = [p.name for board in boards for p in board.pictures]
    questions: list[QA] = []
    pictures = [(place, p) for place, board in enumerate(boards) for p in board.pictures]
    rng.shuffle(pictures)
    wanted = 10 if number <= 4 else 16 if number <= 8 else 24
    for place, picture in pictures:
        if len(questions) >= wanted:
            break
        board = boards[place]
        draw = rng.random()
        if draw < 0.5:
            if names.count(picture.name) == 1:
                questions.append(ask.which_image(picture, boards, first))
        elif draw < 0.72:
            questions.append(ask.image_what(first + place, picture.row, picture.column, board))
        elif draw < 0.94:
            questions.append(ask.image_where(first + place, picture))
        else:
            questions.append(ask.image_how_many(first + place, picture.colour, board))
    return Sample(tuple(b.image() for b in boards), _turns(questions), first, tuple(boards))


@cache
def _easy_vqa(split: Split) -> dict[int, list[tuple[str, str]]]:
    path = easy_vqa_folder() / split / "questions.json"
    by_image: dict[int, list[tuple[str, str]]] = {}
    for question, answer, image in json.loads(path.read_text()):
        by_image.setdefault(image, []).append((question, answer))
    return by_image


def _easy_vqa_sample(rng: random.Random) -> Sample:
    by_image = _easy_vqa("train")
    number = rng.randrange(len(by_image))
    pairs = list(dict.fromkeys(by_image[number]))
    rng.shuffle(pairs)
    open_pairs = [pair for pair in pairs if pair[1] not in ("yes", "no")]
    closed = [pair for pair in pairs if pair[1] in ("yes", "no")][:2]
    chosen = open_pairs + closed
    rng.shuffle(chosen)
    image = Image.open(easy_vqa_folder() / "train" / "images" / f"{number}.png").convert("RGB")
    turns = [Turn(q, a, 0.3 if a in ("yes", "no") else 1.0) for q, a in chosen]
    return Sample((image,), tuple(turns))


def _mixture(progress: float) -> dict[str, float]:
    """Share of samples of each kind when `progress` of the training is done."""
    if progress < _EARLY:
        return {"dense": 0.72, "sparse": 0.12, "easy-vqa": 0.08, "2": 0.08}
    if progress < 0.85:
        return {
            "dense": 0.29, "sparse": 0.11, "counting": 0.15, "easy-vqa": 0.16,
            "2": 0.09, "3": 0.09, "4": 0.07, "8": 0.04,
        }  # fmt: skip
    return {
        "dense": 0.30, "sparse": 0.11, "counting": 0.15, "easy-vqa": 0.16,
        "2": 0.07, "3": 0.06, "4": 0.06, "8": 0.055, "16": 0.035,
    }  # fmt: skip


def draw_sample(rng: random.Random, progress: float, counting: float = 0.0) -> Sample:
    """One training conversation.

    Parameters
    ----------
    rng : random.Random
        Advanced; the only source of chance.
    progress : float
        Share of the training that is done, 0 to 1; later samples hold more images.
    counting : float
        Share of samples that ask for numbers only, besides those of the mixture.
    """
    if rng.random() < counting:
        return _counting_sample(rng)
    shares = _mixture(progress)
    name = rng.choices(list(shares), list(shares.values()))[0]
    makers: dict[str, Callable[[], Sample]] = {
        "dense": lambda: _board_sample(rng, "dense", progress),
        "sparse": lambda: _board_sample(rng, "sparse", progress),
        "counting": lambda: _counting_sample(rng),
        "easy-vqa": lambda: _easy_vqa_sample(rng),
    }
    return makers[name]() if name in makers else _several_sample(rng, int(name))


def single_question(rng: random.Random, kind: str) -> Sample:
    """One held-out conversation of one question, for the score that is logged while training."""
    while True:
        if kind.startswith("which-"):
            boards = [make_board(rng, "dense", "test", (3, 6)) for _ in range(int(kind[6:]))]
            picture = rng.choice(boards[rng.randrange(len(boards))].pictures)
            qa = ask.which_image(picture, boards)
            if " and " not in qa.answer:
                images = tuple(board.image() for board in boards)
                return Sample(images, _turns([qa]), 1, tuple(boards))
            continue
        board = make_board(rng, "dense", "test")
        picture = rng.choice(board.pictures)
        if kind == "what":
            qa = ask.what(picture.row, picture.column, board)
        elif kind == "where":
            qa = ask.where(picture)
        elif kind == "how-many":
            qa = rng.choice(
                [ask.how_many_kind(picture.kind, board), ask.how_many_colour(picture.colour, board)]
            )
            if ask.number_of(qa.answer) != rng.randint(1, 4):
                continue
        elif kind == "left-of":
            qa = ask.left_of(picture, board)
            if (qa.answer == ask.NOTHING) != (rng.random() < 0.15):
                continue
        else:
            qa = ask.list_all(board)
        return Sample((board.image(),), _turns([qa]), boards=(board,))


KIND_COUNT = len(KINDS)
