"""Fit an artefact: the moments of a model's visual keys and values over a few hundred images."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from conduit_kv.artefact import Artefact, weights_digest
from conduit_kv.cache.capsule import rotate
from conduit_kv.capsule.moments import Moments
from conduit_kv.engine.compress import Run
from conduit_kv.engine.request import Ending
from conduit_kv.errors import InputError, PlanError
from conduit_kv.images import ImageLike, read_image
from conduit_kv.methods.evict.full import Full
from conduit_kv.plan import Plan
from conduit_kv.stages.evict import Eviction
from conduit_kv.stages.hold import Holding

if TYPE_CHECKING:
    from conduit_kv.engine.runner import Runner

DEFAULT_BLOCK = 15
"""Tokens in a block where images have rows of different lengths."""
_QUESTION = "What is in this picture?"
_SAVE_EVERY = 25


@dataclass
class Sums:
    """Sums over the blocks seen so far, per layer.

    Attributes
    ----------
    keys, values : Tensor
        ``[L, G, g, d]`` fp64, sums.
    key_products : Tensor
        ``[L, G, d/2, g, g]`` fp64: channels that RoPE turns together share a matrix, since queries
        weigh them alike.
    value_products : Tensor
        ``[L, g, g]`` fp64.
    queries : Tensor
        ``[L, G, d/2]`` fp64, squares of the queries of text rows after the image.
    blocks, images : int
    """

    keys: Tensor
    values: Tensor
    key_products: Tensor
    value_products: Tensor
    queries: Tensor
    blocks: int = 0
    images: int = 0

    @staticmethod
    def empty(layers: int, heads: int, block: int, key_width: int, value_width: int) -> Sums:
        """No blocks yet."""
        zeros = torch.zeros
        kind = torch.float64
        return Sums(
            zeros((layers, heads, block, key_width), dtype=kind),
            zeros((layers, heads, block, value_width), dtype=kind),
            zeros((layers, heads, key_width // 2, block, block), dtype=kind),
            zeros((layers, block, block), dtype=kind),
            zeros((layers, heads, key_width // 2), dtype=kind),
        )

    def add(self, layer: int, keys: Tensor, values: Tensor, queries: Tensor) -> None:
        """Take in one layer of one image.

        Parameters
        ----------
        keys, values : Tensor
            ``[G, B, g, d]``, keys before RoPE.
        queries : Tensor
            ``[G, n, d]``.
        """
        keys, values = keys.double().cpu(), values.double().cpu()
        self.keys[layer] += keys.sum(1)
        self.values[layer] += values.sum(1)
        pairs = keys.unflatten(3, (2, -1))  # [G, B, g, 2, d/2]
        self.key_products[layer] += torch.einsum("pbsxc,pbtxc->pcst", pairs, pairs)
        self.value_products[layer] += torch.einsum("pbsc,pbtc->st", values, values)
        self.queries[layer] += queries.double().cpu().square().sum(1).unflatten(1, (2, -1)).sum(1)

    def moments(self) -> Moments:
        """What follows from them."""
        key_mean, value_mean = self.keys / self.blocks, self.values / self.blocks
        apart = key_mean.unflatten(3, (2, -1))  # [L, G, g, 2, d/2]
        outer = torch.einsum("lpsxc,lptxc->lpcst", apart, apart)
        spread = self.key_products / self.blocks - outer
        weight = self.queries / self.queries.mean((1, 2), keepdim=True).clamp_min(1e-30)
        key_covariance = (spread * weight[..., None, None]).sum((1, 2))
        outer = torch.einsum("lpsc,lptc->lst", value_mean, value_mean)
        value_covariance = self.value_products / self.blocks - outer
        return Moments(
            key_mean.float(), key_covariance.float(), value_mean.float(), value_covariance.float()
        )


@dataclass
class _Listener(Holding):
    """Stands where a hold method would, and takes in sums instead of packing."""

    sums: Sums | None = None
    block: int = field(default=DEFAULT_BLOCK)

    @property
    def active(self) -> bool:
        return True

    def take_in(self, embeddings: Tensor) -> None:
        pass

    def observe(self, layer: int, queries: Tensor, scaling: float, *, at_once: bool) -> None:
        held = self.cache.layers[layer]
        if held.kind != "full":
            raise PlanError("layers with sliding windows cannot be held by kvcapsule")
        layout = self.cache.progress.layouts[0]
        every = list(range(held.kv_heads))
        _, keys, values = held.read(0, every)
        visual = torch.nonzero(layout.visual).flatten()
        visual = visual[: len(visual) // self.block * self.block]
        if self.sums is None:
            sizes = (len(self.cache.layers), len(every), self.block)
            self.sums = Sums.empty(*sizes, keys.shape[2], values.shape[2])
        cos, sin = self._angles(0, visual)
        scale = cos[:1].square() + sin[:1].square()
        free = rotate(keys[:, visual].float(), cos, -sin) / scale[0, 0]
        after = layout.text & (torch.arange(len(layout)) > int(visual[-1]))
        text = queries[0][:, after.to(queries.device)]
        text = text.reshape(len(every), -1, text.shape[-1])
        self.sums.add(
            layer,
            free.unflatten(1, (-1, self.block)),
            values[:, visual].unflatten(1, (-1, self.block)),
            text,
        )
        if layer == len(self.cache.layers) - 1:
            self.sums.blocks += len(visual) // self.block
            self.sums.images += 1

    def finish(self) -> None:
        pass


def fit(
    vlm: Runner,
    images: Sequence[ImageLike],
    out: Path,
    *,
    block: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Artefact:
    """Fit an artefact and write it; an interrupted fit goes on where it was saved last.

    Parameters
    ----------
    vlm : Runner
    images : sequence
        Calibration images, each asked about alone.
    out : Path
        Beside it ``out`` + ``.progress`` keeps the sums until the end.
    block : int or None
        Tokens in a block; by default two rows of the images' grid where all have the same, else
        15.
    progress : callable
        ``progress(done, total)`` after each image.

    Raises
    ------
    InputError
        If there are no images, or an image has not one block.
    PlanError
        If a layer is not causal full attention.
    """
    if not images:
        raise InputError("there is no image to fit on: name a folder with pictures")
    digest = weights_digest(vlm.family.text_model(vlm.model))
    saved = out.with_name(out.name + ".progress")
    size, sums, done = _saved(saved, digest, block)
    for number, image in enumerate(images):
        if number < done:
            continue
        inputs = _inputs(vlm, image)
        if size is None:
            size = block or _two_rows(vlm, inputs)
        sums = _look(vlm, inputs, size, sums)
        progress(number + 1, len(images))
        if (number + 1) % _SAVE_EVERY == 0:
            _save(saved, digest, size, sums, number + 1)
    if sums is None or size is None:
        raise InputError("there is no image to fit on")
    artefact = sums.moments().artefact(digest, {"images": sums.images, "model_name": vlm.name})
    artefact.save(out)
    saved.unlink(missing_ok=True)
    return artefact


def _inputs(vlm: Runner, image: ImageLike) -> dict[str, Any]:
    message = {
        "role": "user",
        "content": [{"type": "image"}, {"type": "text", "text": _QUESTION}],
    }
    return vlm.process(vlm.render([message]), [read_image(image)])


def _two_rows(vlm: Runner, inputs: dict[str, Any]) -> int:
    layouts = vlm.family.layouts(vlm.model, [inputs["input_ids"][0].cpu()], inputs)
    (grid,) = layouts[0].grids
    # A token resembles those above and below as much as those beside it.
    return DEFAULT_BLOCK if grid.views or grid.frames > 1 else 2 * int(grid.columns)


@torch.inference_mode()
def _look(vlm: Runner, inputs: dict[str, Any], block: int, sums: Sums | None) -> Sums:
    run = Run(vlm.model, vlm.family, Plan())
    cache = run.new_cache()
    listener = _Listener(None, cache, sums=sums, block=block)
    cache.watchers = [Ending(Eviction(Full(), cache), listener)]
    visual = int(vlm.family.visual_mask(vlm.model, inputs["input_ids"]).sum())
    if visual < block:
        raise InputError(f"an image has {visual} tokens, fewer than a block of {block}")
    vlm._run(run, cache, inputs, [])
    if listener.sums is None:
        raise RuntimeError("no layer was observed")
    return listener.sums


def _save(file: Path, digest: str, block: int, sums: Sums, done: int) -> None:
    temporary = file.with_name(file.name + ".part")
    torch.save({"digest": digest, "block": block, "sums": vars(sums), "done": done}, temporary)
    temporary.replace(file)


def _saved(file: Path, digest: str, block: int | None) -> tuple[int | None, Sums | None, int]:
    if not file.is_file():
        return block, None, 0
    state = torch.load(file, weights_only=True)
    if state["digest"] != digest or block not in (None, state["block"]):
        raise InputError(f"{file} belongs to a fit of another model or block: delete it first")
    return state["block"], Sums(**state["sums"]), state["done"]


def image_files(folder: Path) -> list[Path]:
    """The pictures of a folder, in an order that does not depend on the disk."""
    found = [p for p in folder.rglob("*") if p.suffix.lower() in (".png", ".jpg", ".jpeg", ".webp")]
    return sorted(found, key=lambda p: hashlib.sha256(p.name.encode()).hexdigest())


def board_images(count: int) -> Iterator[ImageLike]:
    """Boards of the training split, which the built-in model was made for."""
    from conduit_kv.tasks import get_task

    for task in ("board", "board-sparse"):
        for item in get_task(task).items(-(-count // 2), seed=1000, split="train"):
            yield item.images[0]
