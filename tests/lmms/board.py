"""A task of lmms-eval over the bench's boards: no data set has to be fetched."""

from __future__ import annotations

from typing import Any

from conduit_kv.tasks import get_task

Document = dict[str, Any]


def item_of(document: Document) -> Any:
    """The bench's item that a document stands for."""
    number = int(document["number"])
    return get_task(document["task"]).items(number + 1)[number]


def visual(document: Document) -> list[Any]:
    return list(item_of(document).images)


def text(document: Document, settings: Any = None) -> str:
    return str(item_of(document).question)


def target(document: Document) -> str:
    return str(item_of(document).answer)


def messages(document: Document, settings: Any = None) -> list[dict[str, Any]]:
    """The bench's own prompt, as lmms-eval writes prompts."""
    item = item_of(document)
    content: list[dict[str, Any]] = []
    for number, image in enumerate(item.images, 1):
        if len(item.images) > 1:
            content.append({"type": "text", "text": f"Image {number}:"})
        content.append({"type": "image", "url": image})
    content.append({"type": "text", "text": item.question})
    return [{"role": "user", "content": content}]


def score(document: Document, results: list[str]) -> dict[str, float]:
    return {"right": get_task(document["task"]).score(results[0], item_of(document))}
