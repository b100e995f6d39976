"""Needles and films: the answer follows from the images, and lies where ``gold`` says."""

import random
import re

import pytest

from conduit_kv.errors import InputError
from conduit_kv.tasks import get_task
from conduit_kv.tasks.needles import needle_item
from conduit_kv.tasks.questions import NOTHING
from conduit_kv.tasks.registry import training_boards
from conduit_kv.tasks.scenes import GRID, held_out


def named(item, text: str):
    """(image, picture) of every picture whose whole name is in a text."""
    return [
        (number, picture)
        for number, board in enumerate(item.sources)
        for picture in board.pictures
        if re.search(rf"\b{picture.name}\b", text)
    ]


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("name", ["needle-9", "needle-9-distractors", "needle-1"])
def test_a_needle_is_in_one_image(name: str, split: str) -> None:
    task = get_task(name)
    for item in task.items(30, seed=5, split=split):
        ((place, picture),) = named(item, item.question)
        assert item.gold == (place,)
        assert not re.search(r"image \d", item.question)
        if item.kind == "which-image":
            assert item.answer == f"image {place + 1}"
        elif item.kind == "where":
            assert item.answer == picture.place
        else:
            left = item.sources[place].at(picture.row, picture.column - 1)
            assert item.answer == (NOTHING if left is None else left.name)
        alike = [
            number
            for number, board in enumerate(item.sources)
            if number != place and any(p.kind == picture.kind for p in board.pictures)
        ]
        assert len(alike) == (2 if task.distractors else 0)
        assert len(set(item.image_keys)) == len(item.sources) == task.images
        if split == "test":
            assert held_out(picture.colour, picture.kind, picture.row, picture.column)


def test_needles_are_anywhere() -> None:
    places = [item.gold[0] for item in get_task("needle-4").items(80)]
    assert min(places.count(place) for place in range(4)) >= 8


def test_two_needles_are_in_two_images() -> None:
    for item in get_task("multi-needle-6").items(30):
        first, second = sorted(
            named(item, item.question), key=lambda f: item.question.find(f[1].name)
        )
        assert item.gold == (first[0], second[0]) and first[0] != second[0]
        if item.kind == "which-images":
            assert item.answer == f"image {first[0] + 1} and image {second[0] + 1}"
        else:
            assert item.answer == f"{first[1].place}; {second[1].place}"


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("frames", [4, 24])
def test_films(frames: int, split: str) -> None:
    for item in get_task(f"video-{frames}").items(30, seed=2, split=split):
        assert len(item.sources) == frames
        shown = {frame for frame, _ in named(item, item.question)}
        visible = sorted(shown)
        if item.kind == "when":
            assert item.gold == tuple(visible)
            assert item.answer == f"image {visible[0] + 1}"
        elif item.kind == "how-often":
            times = sum(frame - 1 not in shown for frame in visible)
            assert item.answer == str(times) and item.gold == tuple(visible)
        else:
            before = visible[0] - 1
            row, column = map(int, re.search(r"row (\d), column (\d)", item.question).groups())
            then = item.sources[before].at(row, column)
            assert item.gold == (before,) and then is not None and item.answer == then.name
            assert item.sources[before + 1].at(row, column) != then
        for board in item.sources:
            cells = [(p.row, p.column) for p in board.pictures]
            assert len(set(cells)) == len(cells)
            assert all(1 <= side <= GRID for cell in cells for side in cell)
            if split == "train":
                assert not any(held_out(p.colour, p.kind, p.row, p.column) for p in board.pictures)


def test_films_move() -> None:
    (item,) = get_task("video-16").items(1)
    assert len(set(item.image_keys)) > 4


def test_haystacks_say_where_the_answer_is() -> None:
    for item in get_task("haystack-5").items(24):
        number = re.search(r"image (\d+)", f"{item.question} {item.answer}")[1]
        assert item.gold == (int(number) - 1,)


def test_numbers_of_images_are_checked() -> None:
    for name, limits in (
        ("needle-257", "1 to 256"),
        ("needle-1-distractors", "2 to 256"),
        ("multi-needle-1", "2 to 256"),
        ("video-3", "4 to 256"),
    ):
        with pytest.raises(InputError, match=limits):
            get_task(name)
    assert len(get_task("needle-256").items(2)[1].sources) == 256


def test_a_pool_that_is_too_small_is_an_error() -> None:
    pool = training_boards(20)
    with pytest.raises(InputError, match="take fewer"):
        needle_item(random.Random(0), "", pool, 19, "train", "where", distractors=True)
