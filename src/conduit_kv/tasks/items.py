"""Items: what is asked, about which images, and what is right."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from conduit_kv.errors import InputError
from conduit_kv.tasks.questions import parse_list
from conduit_kv.tasks.scenes import Board

__all__ = ["Item", "exact_match", "list_f1", "messages", "normalise"]

Message = dict[str, Any]


@functools.lru_cache(maxsize=512)
def _draw(source: Board | Path) -> Image.Image:
    if isinstance(source, Board):
        return source.image()
    with Image.open(source) as image:
        return image.convert("RGB")


@dataclass(frozen=True)
class Item:
    """One question about one or more images.

    Attributes
    ----------
    id : str
        Unique within a task, split and seed.
    kind : str
        ``what``, ``where``, ``how-many``, ``left-of``, ``list``, ``which-image``, ``image-what``,
        ``image-where``, ``which-images``, ``where-both``, ``when``, ``before``, ``how-often`` or
        ``easy-vqa``.
    sources : tuple of Board or Path
        What the images are drawn or read from; equal sources are equal pixels.
    question, answer : str
        The question that is scored, and its one right answer.
    first : (str, str), optional
        Question and right answer of the turn before, for follow-ups.
    max_new_tokens : int
        Enough for any right answer and its end mark.
    gold : tuple of int
        Images, from 0, in which the answer lies, where that is a question (one of several images).
    """

    id: str
    kind: str
    sources: tuple[Board | Path, ...]
    question: str
    answer: str
    first: tuple[str, str] | None = None
    max_new_tokens: int = 16
    gold: tuple[int, ...] = ()

    @property
    def images(self) -> tuple[Image.Image, ...]:
        """The images, drawn when they are asked for. They are shared: do not change them."""
        return tuple(_draw(source) for source in self.sources)

    @property
    def image_keys(self) -> tuple[str, ...]:
        """A short name per image; equal names are equal pixels."""
        return tuple(
            hashlib.sha256(repr(source).encode()).hexdigest()[:16] for source in self.sources
        )


def messages(item: Item, turn: int | None = None, reply: str | None = None) -> list[Message]:
    """Chat messages of an item, the same for everyone who asks it.

    Several images are introduced as ``Image 1:``, ``Image 2:`` and so on; a single one is not.

    Parameters
    ----------
    item : Item
    turn : {None, 1, 2}
        1: only the first user message. 2, or None: everything up to the last user message.
    reply : str, optional
        What to put as the assistant's answer to the first question; the right one if not given.

    Returns
    -------
    list of dict
        ``{"role": ..., "content": [{"type": "image"} | {"type": "text", "text": ...}, ...]}``

    Raises
    ------
    InputError
        If turn 2 is wanted of an item that has one turn.
    """
    if turn not in (None, 1, 2):
        raise InputError(f"turn is 1 or 2 (or None for the last one), not {turn!r}")
    if turn == 2 and item.first is None:
        raise InputError(f"item {item.id} has no second turn; use a -follow-up task")
    content: list[Mapping[str, str]] = []
    for number in range(1, len(item.sources) + 1):
        if len(item.sources) > 1:
            content.append({"type": "text", "text": f"Image {number}:"})
        content.append({"type": "image"})
    question, right = item.first or (item.question, item.answer)
    content.append({"type": "text", "text": question})
    chat: list[Message] = [{"role": "user", "content": content}]
    if item.first is not None and turn != 1:
        answer = right if reply is None else reply
        chat.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
        chat.append({"role": "user", "content": [{"type": "text", "text": item.question}]})
    return chat


def normalise(text: str) -> str:
    """Strip, fold case, join white space, and drop trailing periods."""
    return " ".join(text.casefold().split()).rstrip(".").rstrip()


def exact_match(text: str, answer: str) -> float:
    """1.0 if two short answers are equal after :func:`normalise`, else 0.0."""
    return float(normalise(text) == normalise(answer))


def list_f1(text: str, answer: str) -> float:
    """F1 over the occupied cells of a list answer.

    A cell counts as right if its row, its column and its whole name are right. Cells said to hold
    nothing are not counted, so an answer of nothing everywhere scores 0.
    """
    said, right = parse_list(text), parse_list(answer)
    if not said or not right:
        return float(said == right)
    hits = sum(right.get(cell) == name for cell, name in said.items())
    return 2 * hits / (len(said) + len(right))
