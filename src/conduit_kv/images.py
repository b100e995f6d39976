"""Reading images: every way in ends in an upright RGB image, or in one clear error."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

from conduit_kv.errors import InputError

_SMALLEST = 2
_ASPECT = 200
"""Longer than this, Qwen's processors refuse, and others squeeze the picture to nothing."""

ImageLike = str | Path | bytes | Image.Image


def read_image(source: ImageLike) -> Image.Image:
    """An upright RGB image from a path, bytes or a PIL image.

    EXIF orientation is applied and transparency is laid over white, before any key is made.

    Raises
    ------
    InputError
        For what is missing, empty, truncated, no image, animated, of a colour mode that cannot be
        shown as RGB without loss, or of a size or shape that no model can see.
    """
    name, image = _open(source)
    frames = getattr(image, "n_frames", 1)
    if frames > 1:
        raise InputError(f"{name} is animated ({frames} frames): save one frame of it")
    if image.mode == "CMYK" or image.mode.startswith(("I", "F")):
        raise InputError(
            f"{name} has colour mode {image.mode}: convert it to 8-bit RGB first, since how to map "
            "its colours is not for us to guess"
        )
    width, height = image.size
    if min(width, height) < _SMALLEST:
        raise InputError(f"{name} is {width}x{height} pixels: too small to see anything in")
    if max(width, height) > _ASPECT * min(width, height):
        raise InputError(f"{name} is {width}x{height} pixels: cut it to at most {_ASPECT}:1")
    try:
        image = ImageOps.exif_transpose(image)
        if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
            over = Image.new("RGBA", image.size, "white")
            over.alpha_composite(image.convert("RGBA"))
            image = over
        return image.convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise InputError(f"{name} is damaged: {error}") from None


def bytes_of(source: object, what: str, other: str) -> tuple[str, bytes]:
    """What a user's file is called in messages, and its contents.

    Parameters
    ----------
    source : str, Path or bytes
    what : str
        What it should be, with its article.
    other : str
        What may be given in its place, for the message.

    Raises
    ------
    InputError
        If it cannot be read or is empty.
    """
    if isinstance(source, bytes):
        name, data = f"the {what.split()[-1]}", source
    elif isinstance(source, str | Path):
        name, path = str(source), Path(source).expanduser()
        if not path.exists():
            raise InputError(f"{name}: no such file")
        if path.is_dir():
            raise InputError(f"{name} is a folder: name {what} in it")
        try:
            data = path.read_bytes()
        except OSError as error:
            raise InputError(f"{name} cannot be read: {error.strerror}") from None
    else:
        raise InputError(f"{what} is a path, bytes or {other}, not {type(source).__name__}")
    if not data:
        raise InputError(f"{name} is empty (0 bytes)")
    return name, data


def _open(source: ImageLike) -> tuple[str, Image.Image]:
    if isinstance(source, Image.Image):
        return "the image", source
    name, data = bytes_of(source, "an image", "a PIL image")
    try:
        image = Image.open(io.BytesIO(data))
        if getattr(image, "n_frames", 1) == 1:
            image.load()
    except UnidentifiedImageError:
        raise InputError(f"{name} is not an image that can be read") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InputError(f"{name} is damaged: {error}") from None
    return name, image
