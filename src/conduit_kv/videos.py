"""Reading videos: every way in ends in evenly spaced upright frames, or in one clear error."""

from __future__ import annotations

import importlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from conduit_kv.errors import InputError
from conduit_kv.images import ImageLike, bytes_of, read_image

MOST_FRAMES = 32
"""Frames taken of a video unless more are asked for."""


@dataclass(frozen=True)
class Video:
    """Frames of a video.

    Attributes
    ----------
    frames : tuple of PIL image
        Upright RGB, all of one size.
    fps : float
        Of these frames, not of the file.
    """

    frames: tuple[Image.Image, ...]
    fps: float = 1.0

    def __post_init__(self) -> None:
        if not self.frames:
            raise InputError("a video without frames shows nothing")
        if len({frame.size for frame in self.frames}) > 1:
            raise InputError("the frames of a video differ in size: make them one size")
        if not self.fps > 0:
            raise InputError(f"fps={self.fps:g}: a video has more than 0 frames per second")

    @staticmethod
    def of(frames: Sequence[ImageLike], fps: float = 1.0) -> Video:
        """A video of images that are read like any others."""
        return Video(tuple(read_image(frame) for frame in frames), fps)


VideoLike = str | Path | bytes | Video


def read_video(source: VideoLike, frames: int = MOST_FRAMES) -> Video:
    """Evenly spaced frames of a video file.

    Parameters
    ----------
    source : path, bytes or Video
        What PyAV reads; a :class:`Video` is taken as it is.
    frames : int
        Most frames taken: the middles of as many equal parts.

    Raises
    ------
    InputError
        For what is missing, empty, damaged, no video, or needs PyAV where it is not installed.
    """
    if isinstance(source, Video):
        return source
    if frames < 1:
        raise InputError(f"frames={frames}: take at least one")
    name, data = bytes_of(source, "a video", "a Video")
    try:
        av: Any = importlib.import_module("av")
    except ImportError:
        raise InputError(
            f"{name}: reading videos needs PyAV; run `pip install 'conduit-kv[video]'`, or pass "
            "frames as Video.of([...])"
        ) from None
    try:
        with av.open(io.BytesIO(data)) as container:
            if not container.streams.video:
                raise InputError(f"{name} holds no pictures, only other streams")
            count = sum(1 for packet in container.demux(video=0) if packet.size)
            if not count:
                raise InputError(f"{name} has no frames")
            wanted = {
                int((j + 0.5) * count / min(frames, count)) for j in range(min(frames, count))
            }
            container.seek(0)
            taken, times = [], []
            for number, frame in enumerate(container.decode(video=0)):
                if number in wanted:
                    taken.append(_upright(frame))
                    times.append(float(frame.time or 0.0))
            rate = float(container.streams.video[0].average_rate or 0) or 1.0
    except av.error.FFmpegError as error:
        raise InputError(f"{name} is damaged or no video: {error.strerror}") from None
    if not taken:
        raise InputError(f"{name} has no frame that can be decoded")
    span = times[-1] - times[0]
    return Video(tuple(taken), (len(taken) - 1) / span if span > 0 else rate)


def _upright(frame: Any) -> Image.Image:
    image: Image.Image = frame.to_image()
    turn = int(getattr(frame, "rotation", 0) or 0)
    return image.rotate(turn, expand=True) if turn % 360 else image
