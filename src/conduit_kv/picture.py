"""A picture of what each layer kept: over the images, and over the whole sequence."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from conduit_kv.errors import InputError
from conduit_kv.methods.hold.base import FULL_BITS
from conduit_kv.stages.flow import RUNS, WAITS, activity
from conduit_kv.stages.hold import held_bits

if TYPE_CHECKING:
    from conduit_kv.engine.request import RequestCache
    from conduit_kv.engine.runner import Runner
    from conduit_kv.layout import Layout

__all__ = ["Retention", "center_crop", "draw_retention", "seen"]

_PAPER, _INK, _FAINT, _LINE = (255, 255, 255), (30, 33, 40), (110, 116, 128), (214, 218, 226)
_TEXT_COLOUR = (214, 120, 30)
_EVICTED = (24, 26, 34)
_BACK = (40, 190, 90)
_DARKEN = 0.86
"""How much of an image's light is taken where no layer of a group holds a token."""
_PANEL = 150
_GAP, _MARGIN, _LABEL = 12, 24, 20
_PER_ROW = 6
_WIDTH = 6 * _PANEL + 5 * _GAP + 2 * _MARGIN
_RAMP = np.array(
    [[241, 243, 247], [190, 214, 232], [120, 178, 214], [54, 128, 186], [14, 78, 142], [6, 38, 88]],
    dtype=float,
)
"""From nothing held to held by all KV heads."""


@dataclass(frozen=True)
class Retention:
    """Which tokens each layer holds of one sequence, frozen at one moment.

    Attributes
    ----------
    plan : str
    layout : Layout
        Of the tokens seen.
    held : numpy array
        ``[layers, T]`` float32: share of the layer's KV heads that hold each token.
    ran : numpy array or None
        ``[layers, T]`` int8: whether each token was gone, waited or ran while the prompt ran
        (:func:`conduit_kv.stages.flow.activity`); None if all of them ran everywhere.
    bits : numpy array or None
        ``[layers, T]`` float32: bits per number in which each token is held, mean over the KV heads
        that hold it, 0 where none does; None if nothing is packed.
    """

    plan: str
    layout: Layout
    held: np.ndarray
    ran: np.ndarray | None = None
    bits: np.ndarray | None = None

    @staticmethod
    def of(cache: RequestCache, row: int = 0) -> Retention:
        """Read sequence ``row`` of a cache."""
        layout = cache.progress.layouts[row]
        held = np.zeros((len(cache), len(layout)), dtype=np.float32)
        for number, layer in enumerate(cache):
            heads = range(1 if layer.heads_agree(row) else layer.kv_heads)
            for head in heads:
                held[number, layer.held(row, head).numpy()] += 1 / len(heads)
        ran = activity(cache.flows, len(cache), layout, row).numpy() if cache.flows else None
        return Retention(str(cache.plan), layout, held.clip(0.0, 1.0), ran, _bits(cache, row))

    @property
    def layers(self) -> int:
        return int(self.held.shape[0])

    def kept(self, image: int | None = None) -> float:
        """Tokens held, mean over layers: of one image, or all."""
        chosen = slice(None) if image is None else self._of(image)
        return float(self.held[:, chosen].sum(1).mean())

    def map(self, image: int, layers: slice = slice(None)) -> np.ndarray:
        """``[rows, columns]`` float32: how much of each cell some layers hold, mean over them.

        Where an image has several frames (an overview and tiles, say) a cell shows the frame that
        is held most; a cell that no token stands for shows 0.
        """
        return self.cells(image, self.held[layers].mean(0))

    def stages(self) -> list[slice]:
        """Runs of layers in which the same tokens ran; none if all ran everywhere."""
        if self.ran is None:
            return []
        edges = np.flatnonzero((self.ran[1:] != self.ran[:-1]).any(1)) + 1
        return [slice(int(a), int(b)) for a, b in itertools.pairwise([0, *edges, self.layers])]

    def cells(self, image: int, values: np.ndarray) -> np.ndarray:
        """``[rows, columns]`` float32: values ``[T]`` of an image's tokens, where they lie."""
        chosen = np.flatnonzero(self._of(image))
        shares = values[chosen].astype(np.float32)
        grid = self.layout.grids[image]
        frame, row, column = self.layout.places[1:].numpy()[:, chosen]
        whole = np.zeros((grid.rows, grid.columns), dtype=np.float32)
        for number in range(grid.frames):
            mine = frame == number
            if not mine.any():
                continue
            size = (int(row[mine].max()) + 1, int(column[mine].max()) + 1)
            cells = np.zeros(size, dtype=np.float32)
            cells[row[mine], column[mine]] = shares[mine]
            scaled = Image.fromarray(cells).resize(
                (grid.columns, grid.rows), Image.Resampling.NEAREST
            )
            whole = np.maximum(whole, np.asarray(scaled))
        return whole

    def _of(self, image: int) -> np.ndarray:
        mask: np.ndarray = (self.layout.image == image).numpy()
        return mask


def draw_retention(
    source: Retention | RequestCache | Sequence[Retention],
    images: Sequence[Image.Image],
    path: str | Path,
    *,
    center_crop: bool = False,
) -> Path:
    """Draw what each layer kept, and write it.

    For every image a row of panels, one per group of layers: the image darkened where tokens were
    evicted. Below, a heat map of layers by tokens. Several retentions of the same images are drawn
    one under the other.

    Parameters
    ----------
    source : Retention, RequestCache or sequence of Retention
    images : sequence of PIL image
        As the prompt has them. An image that is not given (or a video) is drawn on grey.
    path : str or Path
        Ends in ``.png``, ``.jpg`` or ``.webp``.
    center_crop : bool
        Whether the model saw only the middle square of each image, as CLIP's processor cuts it.

    Raises
    ------
    InputError
        If the file cannot be written, or nothing has been seen.
    """
    retentions = _retentions(source)
    pictures = [seen(image.convert("RGB"), center_crop) for image in images]
    small = len(retentions) > 1
    canvases = [_draw(retention, pictures, small) for retention in retentions]
    sheet = Image.new("RGB", (_WIDTH, sum(canvas.height for canvas in canvases)), _PAPER)
    top = 0
    for canvas in canvases:
        sheet.paste(canvas, (0, top))
        top += canvas.height
    target = Path(path).expanduser()
    try:
        sheet.save(target)
    except (OSError, ValueError) as error:
        raise InputError(f"the picture cannot be written to {target}: {error}") from None
    return target


def _bits(cache: RequestCache, row: int) -> np.ndarray | None:
    """:attr:`Retention.bits` of a sequence."""
    total, heads = (np.zeros((len(cache), len(cache.progress.layouts[row]))) for _ in range(2))
    for layer, bits in held_bits(cache, row):
        total[layer] += bits.numpy()
        heads[layer] += bits.numpy() > 0
    return (total / heads.clip(1)).astype(np.float32) if heads.any() else None


def _retentions(source: Retention | RequestCache | Sequence[Retention]) -> list[Retention]:
    from conduit_kv.engine.request import RequestCache

    found: list[Retention]
    if isinstance(source, Retention):
        found = [source]
    elif isinstance(source, RequestCache):
        found = [Retention.of(source)]
    else:
        found = list(cast("Sequence[Retention]", source))
    if not found or any(not each.held.size for each in found):
        raise InputError("nothing to draw: no prompt has been run")
    return found


def center_crop(vlm: Runner) -> bool:
    """Whether the model's image processor cuts the middle out of each image."""
    return bool(getattr(getattr(vlm.processor, "image_processor", None), "do_center_crop", False))


def seen(image: Image.Image, center_crop: bool) -> Image.Image:
    """The part of an image that the model sees."""
    if not center_crop:
        return image
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.crop((left, top, left + side, top + side))


def _groups(layers: int, most: int) -> list[slice]:
    """At most ``most`` runs of layers: as many as divide them, or as even as can be."""
    count = min(layers, most)
    fitting = [number for number in range(1, count + 1) if layers % number == 0]
    if 2 * fitting[-1] > count:
        count = fitting[-1]
    edges = [round(number * layers / count) for number in range(count + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


def _draw(retention: Retention, pictures: Sequence[Image.Image], small: bool) -> Image.Image:
    total = retention.held.shape[1]
    visual = int(retention.layout.visual.sum())
    kept_visual = sum(retention.kept(number) for number in range(len(retention.layout.grids)))
    blocks = [
        _title(
            retention.plan,
            f"{retention.kept():.1f} of {total} tokens kept, mean over {retention.layers} layers; "
            f"{kept_visual:.1f} of {visual} visual ones. Dark: evicted; the brighter, the more of "
            "the layers keep it.",
        )
    ]
    shown = [
        (number, pictures[number] if number < len(pictures) else None)
        for number in range(len(retention.layout.grids))
    ]
    blocks += [_image_block(retention, number, picture, small) for number, picture in shown]
    if retention.stages():
        blocks += [_stage_block(retention, number, picture) for number, picture in shown]
    if retention.bits is not None:
        blocks += [_bits_block(retention, number, picture) for number, picture in shown]
    blocks.append(_heat_map(retention, small))
    canvas = Image.new("RGB", (_WIDTH, sum(b.height for b in blocks) + _MARGIN), _PAPER)
    top = 0
    for block in blocks:
        canvas.paste(block, (0, top))
        top += block.height
    return canvas


def _title(plan: str, line: str) -> Image.Image:
    block = Image.new("RGB", (_WIDTH, 74), _PAPER)
    draw = ImageDraw.Draw(block)
    draw.text((_MARGIN, 18), plan, fill=_INK, font=_font(20))
    draw.text((_MARGIN, 48), line, fill=_FAINT, font=_font(13))
    return block


@dataclass(frozen=True)
class _Panel:
    """A small picture with what stands below it, on the left and on the right."""

    picture: Image.Image
    left: str
    right: str


def _panels(line: str, panels: Sequence[_Panel], per_row: int = _PER_ROW) -> Image.Image:
    """Panels of one size in rows, under a line of text if there is one."""
    width, height = panels[0].picture.size
    head = 30 if line else 4
    rows = -(-len(panels) // per_row)
    block = Image.new("RGB", (_WIDTH, head + rows * (height + _LABEL + _GAP)), _PAPER)
    draw = ImageDraw.Draw(block)
    draw.text((_MARGIN, 6), line, fill=_INK, font=_font(14))
    for number, panel in enumerate(panels):
        x = _MARGIN + (number % per_row) * (_PANEL + _GAP)
        y = head + (number // per_row) * (height + _LABEL + _GAP)
        block.paste(panel.picture, (x, y))
        draw.rectangle((x, y, x + width - 1, y + height - 1), outline=_LINE)
        below = y + height + 3
        draw.text((x, below), panel.left, fill=_INK, font=_font(12))
        end = x + width - draw.textlength(panel.right, font=_font(12))
        draw.text((end, below), panel.right, fill=_FAINT, font=_font(12))
    return block


def _named(layers: slice) -> str:
    one = layers.stop - layers.start == 1
    return f"layer {layers.start}" if one else f"layers {layers.start}-{layers.stop - 1}"


def _fitted(retention: Retention, image: int, picture: Image.Image | None) -> Image.Image:
    """The picture at a panel's size, or grey where there is none."""
    if picture is None:
        grid = retention.layout.grids[image]
        picture = Image.new("RGB", (grid.columns * 8, grid.rows * 8), (168, 172, 180))
    return picture.resize(_fit(picture.size))


def _image_block(
    retention: Retention, image: int, picture: Image.Image | None, small: bool
) -> Image.Image:
    """An image by groups of layers: what they hold of it."""
    many = len(retention.layout.grids) > 1
    groups = _groups(retention.layers, _PER_ROW if many or small else 2 * _PER_ROW)
    fitted = _fitted(retention, image, picture)
    mine = retention._of(image)
    tokens = int(mine.sum())
    panels = []
    for layers in groups:
        kept = float(retention.held[layers][:, mine].sum(1).mean())
        panel = _darkened(fitted, retention.map(image, layers))
        panels.append(_Panel(panel, _named(layers), f"{100 * kept / max(tokens, 1):.0f} %"))
    line = f"image {image + 1}: {retention.kept(image):.1f} of {tokens} kept" if many else ""
    rows = -(-len(groups) // _PER_ROW)
    return _panels(line, panels, -(-len(groups) // rows))


def _stage_block(retention: Retention, image: int, picture: Image.Image | None) -> Image.Image:
    """An image stage by stage of the prefill: what ran, what waited, what came back."""
    ran = cast("np.ndarray", retention.ran)
    fitted = _fitted(retention, image, picture)
    before = np.full(ran.shape[1], RUNS)
    mine = retention._of(image)
    panels = []
    for layers in retention.stages():
        now = ran[layers.start]
        light = np.choose(now, [0.0, 0.12, 1.0])
        panel = _darkened(fitted, retention.cells(image, light))
        back = retention.cells(image, (now == RUNS) & (before == WAITS))
        tint = Image.fromarray((back * 110).astype(np.uint8)).resize(
            fitted.size, Image.Resampling.NEAREST
        )
        panel.paste(Image.new("RGB", fitted.size, _BACK), (0, 0), tint)
        share = f"{int((now[mine] == RUNS).sum())} of {int(mine.sum())}"
        panels.append(_Panel(panel, _named(layers), share))
        before = now
    line = f"image {image + 1} while the prompt ran. Dim: waits. Dark: gone. Green: came back"
    return _panels(line, panels)


def _bits_block(retention: Retention, image: int, picture: Image.Image | None) -> Image.Image:
    """An image by groups of layers: in how many bits its tokens are held."""
    bits = cast("np.ndarray", retention.bits)
    fitted = _fitted(retention, image, picture)
    mine = retention._of(image)
    panels = []
    for layers in _groups(retention.layers, _PER_ROW):
        part = bits[layers]
        mean = np.divide(part.sum(0), (part > 0).sum(0).clip(1))
        # A bit more is as much at 2 as at 8: twice the bits are one step of light.
        light = np.log2(mean.clip(1.0)) / np.log2(FULL_BITS)
        panel = _darkened(fitted, retention.cells(image, light))
        held = part[:, mine]
        average = held.sum() / max(int((held > 0).sum()), 1)
        panels.append(_Panel(panel, _named(layers), f"{average:.2f} bits"))
    levels = sorted({int(level) for level in np.unique(bits[:, mine]) if level > 0})
    line = f"image {image + 1} in bits, the brighter the more: " + ", ".join(map(str, levels))
    return _panels(line, panels)


def _fit(size: tuple[int, int]) -> tuple[int, int]:
    """The panel's size: the image's shape within the panel's width, at most twice as high."""
    width, height = size
    scale = min(_PANEL / width, 2 * _PANEL / height)
    return max(1, round(width * scale)), max(1, round(height * scale))


def _darkened(picture: Image.Image, share: np.ndarray) -> Image.Image:
    """``picture`` with its light taken where ``share`` ``[rows, columns]`` is low."""
    levels = Image.fromarray((share * 255).round().astype(np.uint8))
    light = np.asarray(levels.resize(picture.size, Image.Resampling.NEAREST), dtype=float) / 255
    # The eye sees little between dark and very dark: what few layers hold is to be seen too.
    light = (1 - _DARKEN + _DARKEN * light**0.6)[..., None]
    pixels = np.asarray(picture, dtype=float) * light + np.array(_EVICTED, dtype=float) * (
        1 - light
    )
    return Image.fromarray(pixels.round().astype(np.uint8))


def _heat_map(retention: Retention, small: bool) -> Image.Image:
    """Layers by tokens, text and images marked above."""
    layers, tokens = retention.held.shape
    left, top = _MARGIN + 30, 50
    width = _WIDTH - left - _MARGIN
    height = max(90, min(5 * layers, 150) if small else min(12 * layers, 240))
    block = Image.new("RGB", (_WIDTH, top + height + 44), _PAPER)
    draw = ImageDraw.Draw(block)
    draw.text((_MARGIN, 8), "which layer (row) holds which token", fill=_INK, font=_font(14))
    colours = _colours(retention.held)
    shown = Image.fromarray(colours)
    # Nearest enlarges; a longer sequence than the picture is wide is averaged.
    how = Image.Resampling.NEAREST if tokens <= width else Image.Resampling.BOX
    block.paste(shown.resize((width, height), how), (left, top))
    draw.rectangle((left - 1, top - 1, left + width, top + height), outline=_LINE)
    for number in _ticks(layers):
        y = top + round((number + 0.5) * height / layers)
        draw.text((left - 8, y), str(number), fill=_FAINT, font=_font(12), anchor="rm")
    for kind, start, stop in _spans(retention.layout):
        x0, x1 = (left + round(edge * width / tokens) for edge in (start, stop))
        colour = _TEXT_COLOUR if kind == "text" else (54, 128, 186)
        draw.rectangle((x0, top - 8, max(x0, x1 - 2), top - 4), fill=colour)
        if draw.textlength(kind, font=_font(12)) < x1 - x0:
            draw.text(((x0 + x1) // 2, top - 10), kind, fill=colour, font=_font(12), anchor="ms")
    y = top + height + 14
    draw.text((left, y), f"{tokens} tokens", fill=_FAINT, font=_font(12))
    x = _WIDTH - _MARGIN - 256
    draw.text((x, y), "held by no KV head", fill=_FAINT, font=_font(12))
    ramp = Image.fromarray(_colours(np.linspace(0, 1, 90, dtype=np.float32)[None].repeat(10, 0)))
    block.paste(ramp, (x + 112, y + 3))
    draw.rectangle((x + 111, y + 2, x + 202, y + 13), outline=_LINE)
    draw.text((x + 212, y), "by all", fill=_FAINT, font=_font(12))
    return block


def _colours(share: np.ndarray) -> np.ndarray:
    """``[rows, columns]`` shares to ``[rows, columns, 3]`` uint8."""
    place = share * (len(_RAMP) - 1)
    low = np.minimum(place.astype(int), len(_RAMP) - 2)
    rest = (place - low)[..., None]
    colours: np.ndarray = _RAMP[low] * (1 - rest) + _RAMP[low + 1] * rest
    return colours.round().astype(np.uint8)


def _ticks(layers: int) -> list[int]:
    step = max(1, -(-layers // 8))
    return list(range(0, layers, step))


def _spans(layout: Layout) -> list[tuple[str, int, int]]:
    """Runs of text and of each image: name, first token, token after the last."""
    image = layout.image.numpy()
    edges = np.flatnonzero(np.diff(image)) + 1
    starts = [0, *edges.tolist()]
    stops = [*edges.tolist(), len(image)]
    return [
        ("text" if image[a] < 0 else f"image {image[a] + 1}", a, b)
        for a, b in zip(starts, stops, strict=True)
    ]


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
