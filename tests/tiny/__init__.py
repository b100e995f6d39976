"""Tiny random models of the real classes, with real processors and nothing downloaded.

>>> model, processor = tiny_model("qwen3-vl")
>>> inputs = tiny_inputs("qwen3-vl", n_images=(2, 0, 1))   # a batch of three, padded on the left
>>> model(**inputs)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import cycle, islice
from typing import Any

from tests.tiny import torchvision_shim

torchvision_shim.install()  # before anything of Transformers, which imports torchvision itself

from transformers import BatchFeature, PreTrainedModel, ProcessorMixin  # noqa: E402

from tests.tiny.models import TINY, build  # noqa: E402
from tests.tiny.parts import film, picture  # noqa: E402

FAMILY_NAMES = (
    "llava",
    "llava-next",
    "llava-onevision",
    "qwen2-vl",
    "qwen2.5-vl",
    "qwen3-vl",
    "internvl3",
    "smolvlm",
    "idefics3",
)
"""One tiny model per family."""

NAMES = tuple(TINY)
"""All tiny models: one per family, and variants."""

VIDEO_NAMES = tuple(name for name, tiny in TINY.items() if tiny.video)
"""Those whose processor takes videos."""

MIXED_NAMES = tuple(name for name in VIDEO_NAMES if TINY[name].mixes)
"""Those whose processor takes images and videos in one prompt."""


@cache
def tiny_model(name: str) -> tuple[PreTrainedModel, ProcessorMixin]:
    """The model ``name`` of :data:`NAMES`: fp32, evaluation mode, always the same weights.

    Four layers, four query heads on two KV heads, hidden size 64. It is shared by all tests of a
    process: leave it as it was, or copy it.
    """
    return build(TINY[name])


def tiny_inputs(
    name: str,
    n_images: Sequence[int] = (1,),
    sizes: Sequence[tuple[int, int]] | None = None,
    *,
    n_videos: Sequence[int] | None = None,
    frames: int = 4,
    text: tuple[str, str, str] = ("Look at this ", " and ", " Where is the red dog?"),
    seed: int = 0,
    **options: Any,
) -> BatchFeature:
    """What the processor gives for a batch of prompts, padded on the left.

    Parameters
    ----------
    name : str
        A tiny model.
    n_images, n_videos : sequence of int
        Images and videos of each sequence; its images come before its videos. The batch has
        ``len(n_images)`` sequences.
    sizes : sequence of (int, int), optional
        (height, width) in pixels of the images and videos, in order, repeated as needed.
    frames : int
        Frames of each video, at 2 per second.
    text : tuple of str
        Text before the first image, between two images, and after the last. Sequence ``b`` has
        ``b`` words more at its end, so that lengths differ.
    seed : int
        Of the pictures.
    options
        For the processor.
    """
    tiny = TINY[name]
    _, processor = tiny_model(name)
    videos_of = tuple(n_videos or (0,) * len(n_images))
    before, between, after = text
    prompts = []
    for number, (images, videos) in enumerate(zip(n_images, videos_of, strict=True)):
        parts = [tiny.image] * images + [tiny.video] * videos
        body = before + between.join(parts) + after + " please" * number
        prompts.append(tiny.start + body + tiny.end)
    size = cycle(sizes or tiny.sizes)
    images = [picture(h, w, seed * 100 + n) for n, (h, w) in enumerate(islice(size, sum(n_images)))]
    films = [
        film(frames, h, w, seed * 100 + n) for n, (h, w) in enumerate(islice(size, sum(videos_of)))
    ]
    arguments: dict[str, Any] = {"text": prompts, "return_tensors": "pt", "padding": True}
    if images:
        arguments["images"] = _nested(images, n_images) if tiny.nested else images
    if films:
        arguments["videos"] = _nested(films, videos_of) if tiny.nested_videos else films
        arguments["video_metadata"] = [
            {"fps": 2.0, "total_num_frames": frames, "frames_indices": list(range(frames))}
            for _ in films
        ]
        arguments["do_sample_frames"] = False
    return processor(**arguments | options)


def _nested(images: list[Any], counts: Sequence[int]) -> list[list[Any]]:
    source = iter(images)
    return [list(islice(source, count)) for count in counts]


__all__ = ["FAMILY_NAMES", "MIXED_NAMES", "NAMES", "VIDEO_NAMES", "tiny_inputs", "tiny_model"]
