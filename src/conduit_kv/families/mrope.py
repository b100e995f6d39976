"""What the Qwen-VL families share: grids from ``*_grid_thw`` and three-axis positions (M-RoPE)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from conduit_kv.errors import InputError
from conduit_kv.families.base import Family
from conduit_kv.families.binding import IMAGE, VIDEO, bind
from conduit_kv.layout import Grid


class MRope(Family):
    """Images and videos of any size; positions have the axes time, row and column.

    A visual token is a square of ``spatial_merge_size`` x ``spatial_merge_size`` patches; a frame
    of a video is ``temporal_patch_size`` frames of its file.
    """

    position_axes = 3
    opening = 1  # <|vision_start|>
    needs_torchvision = True

    def grids(
        self, model: PreTrainedModel, ids: Sequence[Tensor], inputs: Mapping[str, Any]
    ) -> list[list[Grid]]:
        merge = model.config.vision_config.spatial_merge_size
        kinds = [self.kinds(model, row) for row in ids]
        queues = {
            kind: [Grid(t, h // merge, w // merge) for t, h, w in _rows(inputs.get(key))]
            for kind, key in ((IMAGE, "image_grid_thw"), (VIDEO, "video_grid_thw"))
        }
        return bind(kinds, queues, complete=self.has_pixels(kinds, inputs))

    def relative_positions(
        self, model: PreTrainedModel, ids: Sequence[Tensor], inputs: Mapping[str, Any]
    ) -> list[Tensor]:
        """``[3, T_b]`` int64 of each sequence, by the model's own ``get_rope_index``.

        That function reads the configuration and its arguments only, and its result moves with the
        position at which a sequence begins: what follows a text token at position ``p`` has these
        positions plus ``p + 1``. ``generate`` goes on at the largest position plus 1, which is the
        same unless a video's time axis outgrew its rows, its columns and the text behind it.
        """
        images, videos = _rows(inputs.get("image_grid_thw")), _rows(inputs.get("video_grid_thw"))
        seconds = inputs.get("second_per_grid_ts")
        positions: list[Tensor] = []
        image = video = 0
        for row, grids in zip(ids, self.grids(model, ids, inputs), strict=True):
            kinds = self.kinds(model, row)
            n_videos = _count(kinds, grids, VIDEO)
            n_images = len(grids) - n_videos
            if not grids:
                positions.append(torch.arange(len(row), device=row.device).expand(3, -1))
                continue
            mine = images[image : image + n_images], videos[video : video + n_videos]
            self._check_runs(model, kinds, *mine)
            arguments: dict[str, Any] = {
                "mm_token_type_ids": kinds[None],
                "image_grid_thw": _thw(mine[0], row),
                "video_grid_thw": _thw(mine[1], row),
            }
            if n_videos and seconds is not None:
                mine_seconds = seconds[video : video + n_videos]
                if isinstance(mine_seconds, Tensor):
                    mine_seconds = mine_seconds.to(row.device)
                arguments["second_per_grid_ts"] = mine_seconds
            image, video = image + n_images, video + n_videos
            found, _ = model.model.get_rope_index(row[None], **arguments)
            positions.append(found[:, 0])
        return positions

    def alone(
        self,
        model: PreTrainedModel,
        inputs: Mapping[str, Any],
        kind: int,
        number: int,
        grids: Sequence[Grid],
    ) -> list[tuple[int | None, Grid | None, dict[str, Any]]]:
        pixels, grid_name = (
            ("pixel_values", "image_grid_thw")
            if kind == IMAGE
            else ("pixel_values_videos", "video_grid_thw")
        )
        rows = _rows(inputs[grid_name])
        t, h, w = rows[number]
        start = sum(a * b * c for a, b, c in rows[:number])
        like = inputs[grid_name]
        found: list[tuple[int | None, Grid | None, dict[str, Any]]] = []
        merge = model.config.vision_config.spatial_merge_size
        for frame in range(t):  # the image encoder never looks from one frame to another
            first = start + frame * h * w
            arguments = {
                pixels: inputs[pixels][first : first + h * w],
                grid_name: torch.as_tensor(like).new_tensor([[1, h, w]]),
            }
            seconds = inputs.get("second_per_grid_ts")
            if kind == VIDEO and seconds is not None:
                arguments["second_per_grid_ts"] = seconds[number : number + 1]
            found.append((frame, Grid(1, h // merge, w // merge), arguments))
        return found

    def frames_are_apart(self) -> bool:
        """Whether text (time stamps) stands between the frames of a video."""
        return False

    def _check_runs(
        self,
        model: PreTrainedModel,
        kinds: Tensor,
        images: list[list[int]],
        videos: list[list[int]],
    ) -> None:
        """``get_rope_index`` takes one grid per run of placeholders: see that they agree."""
        if self.frames_are_apart():
            videos = [[1, h, w] for t, h, w in videos for _ in range(t)]
        merge = model.config.vision_config.spatial_merge_size
        queues = {IMAGE: iter(images), VIDEO: iter(videos)}
        for kind, run in groupby(kinds.tolist()):
            if not kind:
                continue
            length = len(list(run))
            t, h, w = next(queues[kind], [0, 0, 0])
            if length != t * h * w // merge**2:
                raise InputError(
                    f"a run of {length} placeholder tokens does not match its image or video "
                    f"({t} x {h // merge} x {w // merge} tokens): {self.name} needs a "
                    "vision-start and a vision-end token around each, as its chat template writes"
                )


def _rows(grid_thw: Any) -> list[list[int]]:
    """``[N, 3]`` to N lists ``[t, h, w]`` in patches."""
    if grid_thw is None:
        return []
    rows: list[list[int]] = torch.as_tensor(grid_thw).reshape(-1, 3).tolist()
    return rows


def _thw(rows: list[list[int]], like: Tensor) -> Tensor | None:
    return torch.tensor(rows, dtype=torch.long, device=like.device) if rows else None


def _count(kinds: Tensor, grids: Sequence[Grid], kind: int) -> int:
    """How many of one sequence's ``grids`` are of ``kind``."""
    visual = kinds[kinds > 0].tolist()
    place = count = 0
    for grid in grids:
        count += visual[place] == kind
        place += grid.tokens
    return count
