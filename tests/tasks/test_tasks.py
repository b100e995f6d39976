"""Tasks: unambiguous answers, comparable forms, and scores."""

import re

import pytest

from conduit_kv.errors import InputError
from conduit_kv.tasks import get_task, messages, task_names
from conduit_kv.tasks.items import exact_match, list_f1
from conduit_kv.tasks.questions import NOTHING, number_of, parse_list
from conduit_kv.tasks.registry import POOL_SIZE
from conduit_kv.tasks.scenes import COLOURS, held_out, plural

NAMES = [name.replace("-N", "-3") for name in task_names()]
NAMES = ["video-4" if name == "video-3" else name for name in NAMES]
BOARDS = [name for name in NAMES if name.startswith("board")]
ANSWERED = [name for name in NAMES if name.startswith(("board", "haystack")) and "list" not in name]


def pictures_named(item, text: str):
    """(image number, picture) of every picture whose whole name is in a text."""
    return [
        (number, picture)
        for number, board in enumerate(item.sources, start=1)
        for picture in board.pictures
        if re.search(rf"\b{picture.name}\b", text)
    ]


def right_answer(item) -> str:
    """The answer, worked out from the question's words alone."""
    question = item.question
    board = item.sources[0]
    inside = re.match(r"In image (\d+), (.*)", question)
    if inside:
        board, question = item.sources[int(inside[1]) - 1], inside[2].capitalize()
    cell = re.search(r"What is in row (\d), column (\d)", question)
    if cell:
        found = board.at(int(cell[1]), int(cell[2]))
        return NOTHING if found is None else found.name
    if question.startswith("In which image"):
        numbers = {number for number, _ in pictures_named(item, question)}
        (number,) = numbers
        return f"image {number}"
    many = re.match(r"How many (\w+)( pictures)? are there", question)
    if many:
        if many[2]:
            counted = [p.kind for p in board.pictures if p.colour == many[1]]
        else:
            counted = [p.colour for p in board.pictures if plural(p.kind) == many[1]]
        return f"{', '.join(counted)}: {len(counted)}"
    (picture,) = [p for p in board.pictures if re.search(rf"\b{p.name}\b", question)]
    if question.startswith("Where"):
        return f"row {picture.row}, column {picture.column}"
    left = board.at(picture.row, picture.column - 1)
    return NOTHING if left is None else left.name


@pytest.mark.parametrize("name", ANSWERED)
@pytest.mark.parametrize("split", ["train", "test"])
def test_answers_follow_from_the_question(name: str, split: str) -> None:
    for item in get_task(name).items(40, seed=3, split=split):
        assert item.answer == right_answer(item)


@pytest.mark.parametrize("name", NAMES)
def test_items_are_deterministic_and_prefix_stable(name: str) -> None:
    task = get_task(name)
    items = task.items(8, seed=1)
    assert items == task.items(8, seed=1)
    assert items[:3] == task.items(3, seed=1)
    assert items != task.items(8, seed=2)
    assert len({item.id for item in items}) == 8


@pytest.mark.parametrize("base", ["board", "board-sparse", "haystack-3"])
def test_forms_of_a_task_ask_the_same_last_questions(base: str) -> None:
    plain = get_task(base).items(12)
    for form in ("late", "follow-up"):
        other = get_task(f"{base}-{form}").items(12)
        assert [(i.question, i.answer, i.sources) for i in other] == [
            (i.question, i.answer, i.sources) for i in plain
        ]


@pytest.mark.parametrize("name", ["board", "board-sparse", "haystack-4"])
def test_test_questions_are_about_held_out_combinations(name: str) -> None:
    for item in get_task(name).items(60):
        about = []
        words = item.question + " " + item.answer
        for board in item.sources:
            for p in board.pictures:
                counted = item.kind == "how-many" and (
                    f" {p.colour} " in words or f" {plural(p.kind)} " in words
                )
                if counted or p.name in words or p.place in words:
                    about.append(held_out(p.colour, p.kind, p.row, p.column))
        assert any(about)


@pytest.mark.parametrize(
    "name", ["board-follow-up", "board-sparse-follow-up", "haystack-3-follow-up"]
)
def test_first_question_does_not_give_the_second_away(name: str) -> None:
    for item in get_task(name).items(60):
        assert item.first is not None
        question, answer = item.first
        assert question != item.question
        if item.kind in ("what", "where", "left-of", "which-image"):
            asked = pictures_named(item, f"{item.question} {item.answer}")
            for _, picture in asked:
                assert picture.name not in f"{question} {answer}"
        if name.startswith("haystack"):
            number = re.match(r"In image (\d+),", question)[1]
            where = re.search(r"image (\d+)", f"{item.question} {item.answer}")
            assert number != where[1]


def test_no_short_answer_is_a_good_guess() -> None:
    items = get_task("board").items(800)
    for kind, most in (("what", 0.05), ("where", 0.15), ("how-many", 0.4), ("left-of", 0.3)):
        answers = [item.answer for item in items if item.kind == kind]
        if kind == "how-many":
            answers = [str(number_of(answer)) for answer in answers]
        assert max(answers.count(a) for a in set(answers)) / len(answers) < most


def test_haystacks_draw_from_a_fixed_pool() -> None:
    keys = set()
    for seed in range(4):
        for item in get_task("haystack-16").items(60, seed=seed):
            assert len(set(item.image_keys)) == 16
            keys.update(item.image_keys)
    assert len(keys) <= POOL_SIZE


def test_easy_vqa_is_open_questions_of_the_test_split() -> None:
    items = get_task("easy-vqa").items(500)
    assert not {"yes", "no"} & {item.answer for item in items}
    assert all("test" in str(item.sources[0]) for item in items)
    assert items[0].images[0].mode == "RGB"


@pytest.mark.parametrize("name", NAMES)
def test_right_answers_score_one(name: str) -> None:
    task = get_task(name)
    for item in task.items(6):
        assert task.score(item.answer, item) == 1.0
        assert task.score(f"  {item.answer.upper()}. ", item) == 1.0
        assert task.score("", item) == 0.0


def test_scores() -> None:
    assert exact_match("Red bus.\n", "red bus") == 1.0
    assert exact_match("red  bus", "red bus") == 1.0
    assert exact_match("red bus, green star", "red bus") == 0.0
    right = "row 1: red bus, nothing; row 2: nothing, green star"
    assert parse_list(right) == {(1, 1): "red bus", (2, 2): "green star"}
    assert list_f1("row 1: red bus, nothing; row 2: nothing, nothing", right) == pytest.approx(
        2 / 3
    )
    assert list_f1("row 1: nothing, red bus; row 2: nothing, green star", right) == 0.5
    assert list_f1("row 1: nothing; row 2: nothing", right) == 0.0
    assert list_f1("I see a bus.", right) == 0.0


@pytest.mark.parametrize("style", ["board-list", "board-sparse-list"])
def test_lists_name_every_cell(style: str) -> None:
    for item in get_task(style).items(20):
        cells = parse_list(item.answer)
        assert cells == {(p.row, p.column): p.name for p in item.sources[0].pictures}
        assert item.answer.count(",") == 12


def test_messages() -> None:
    (item,) = get_task("board").items(1)
    assert messages(item) == [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": item.question}]}
    ]
    (item,) = get_task("haystack-2-follow-up").items(1)
    first, answer, second = messages(item)
    assert messages(item, turn=1) == [first]
    assert [part["type"] for part in first["content"]] == ["text", "image", "text", "image", "text"]
    assert first["content"][2]["text"] == "Image 2:"
    assert answer["content"][0]["text"] == item.first[1]
    assert second["content"] == [{"type": "text", "text": item.question}]
    assert messages(item, turn=2, reply="it said this")[1]["content"][0]["text"] == "it said this"


def test_errors_name_the_remedy() -> None:
    with pytest.raises(InputError, match="board-follow-up"):
        get_task("bord")
    with pytest.raises(InputError, match="400"):
        get_task("haystack-401")
    with pytest.raises(InputError, match="2 to 400"):
        get_task("haystack-1-follow-up")
    with pytest.raises(InputError, match="negative"):
        get_task("board").items(-1)
    with pytest.raises(InputError, match="split"):
        get_task("board").items(1, split="validation")
    with pytest.raises(InputError, match="follow-up"):
        messages(get_task("board").items(1)[0], turn=2)
    with pytest.raises(InputError, match="open test questions"):
        get_task("easy-vqa").items(10**6)


def test_colours_are_words_of_their_own() -> None:
    assert not any(a != b and a in b for a in COLOURS for b in COLOURS)
