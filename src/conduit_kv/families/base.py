"""What Conduit must know of a model family, and nothing else.

To add a family: subclass :class:`Family` in a file of its own, list it in
``families/__init__.py``, and add a tiny random model of its real class to ``tests/tiny``;
docs/families.md has the steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from conduit_kv.errors import PlanError
from conduit_kv.families.binding import IMAGE, VIDEO
from conduit_kv.families.piece import Piece
from conduit_kv.layout import Grid, Layout


class Family(ABC):
    """Adapter of one family of vision-language models.

    An adapter is stateless: everything that belongs to a request travels in arguments.
    """

    name: ClassVar[str]
    """As shown to users, e.g. ``"Qwen3-VL"``."""
    model_types: ClassVar[tuple[str, ...]]
    """``config.model_type`` of the models it covers."""
    position_axes: ClassVar[int] = 1
    """1 for RoPE; 3 (time, row, column) for M-RoPE."""
    nested_images: ClassVar[bool] = False
    """Whether the processor wants a list of images per prompt instead of one list."""
    nested_videos: ClassVar[bool] = False
    """Whether the processor wants a list of videos per prompt instead of one list."""
    needs_torchvision: ClassVar[bool] = False
    """Whether the family's processor needs torchvision."""
    opening: ClassVar[int] = 0
    """Marks (text tokens) that open an image, directly before its first placeholder."""

    # -- where things are --------------------------------------------------------------------

    def text_model(self, model: PreTrainedModel) -> nn.Module:
        """The text decoder stack: embeddings, ``layers``, ``norm``, ``rotary_emb``."""
        return model.model.language_model  # type: ignore[no-any-return]

    def layers(self, text_model: nn.Module) -> Sequence[nn.Module]:
        """The decoder layers in order."""
        # A slice of a ModuleList is a new module, which takes as long as a small layer runs.
        return list(text_model.layers)[: text_model.config.num_hidden_layers]  # type: ignore

    def attention(self, layer: nn.Module) -> nn.Module:
        """A decoder layer's attention module."""
        return layer.self_attn  # type: ignore[return-value]

    def layer_kind(self, text_model: nn.Module, layer: int) -> Literal["full", "sliding", "other"]:
        """What a layer attends with: only causal full attention is evictable.

        ``"sliding"`` has a window, ``"other"`` is anything else: linear attention, chunks,
        attention in both directions.
        """
        config: Any = text_model.config
        kinds = getattr(config, "layer_types", None)
        kind = kinds[layer] if kinds else None
        if kind not in (None, "full_attention", "sliding_attention"):
            return "other"
        attention = getattr(self.layers(text_model)[layer], "self_attn", None)
        if attention is None or not getattr(attention, "is_causal", True):
            return "other"
        window = getattr(attention, "sliding_window", None)
        if window is None and kind is None:
            window = getattr(config, "sliding_window", None)
        return "full" if window is None and kind != "sliding_attention" else "sliding"

    # -- what a request holds ----------------------------------------------------------------

    def kinds(self, model: PreTrainedModel, ids: Tensor) -> Tensor:
        """``ids`` ``[..., T]`` int64 to 0 for text, 1 for image and 2 for video placeholders."""
        config: Any = model.config
        kinds: Tensor = (ids == config.image_token_id).long() * IMAGE
        video = getattr(config, "video_token_id", None)
        return kinds if video is None else kinds + (ids == video).long() * VIDEO

    def visual_mask(self, model: PreTrainedModel, ids: Tensor) -> Tensor:
        """``ids`` ``[..., T]`` int64 to a bool mask of its placeholder tokens."""
        return self.kinds(model, ids) > 0

    @abstractmethod
    def grids(
        self, model: PreTrainedModel, ids: Sequence[Tensor], inputs: Mapping[str, Any]
    ) -> list[list[Grid]]:
        """The images of each sequence, in order of appearance.

        Parameters
        ----------
        ids : sequence of Tensor
            ``[T_b]`` int64 of each sequence of the batch, without padding.
        inputs : mapping
            What the processor gave (``pixel_values``, ``image_grid_thw``, ``image_sizes`` ...).
        """

    @staticmethod
    def has_pixels(kinds: Sequence[Tensor], inputs: Mapping[str, Any]) -> bool:
        """Whether the images of ``inputs`` are those of these very tokens.

        ``generate`` keeps passing grids and sizes, but no pixels, while it decodes text.

        Parameters
        ----------
        kinds : sequence of Tensor
            ``[T_b]`` of each sequence, above 0 at placeholders.
        """
        pixels = ("pixel_values", "pixel_values_videos")
        return any(inputs.get(key) is not None for key in pixels) or any(
            bool((row > 0).any()) for row in kinds
        )

    def layouts(
        self, model: PreTrainedModel, ids: Sequence[Tensor], inputs: Mapping[str, Any]
    ) -> list[Layout]:
        """One layout per sequence of the batch.

        Raises
        ------
        InputError
            If the placeholders and the images disagree in number.
        """
        grids = self.grids(model, ids, inputs)
        return [
            Layout.of(self.visual_mask(model, row), row_grids)
            for row, row_grids in zip(ids, grids, strict=True)
        ]

    def relative_positions(
        self, model: PreTrainedModel, ids: Sequence[Tensor], inputs: Mapping[str, Any]
    ) -> list[Tensor]:
        """Position ids of each sequence counted from 0: ``[T_b]``, or ``[3, T_b]`` for M-RoPE."""
        return [torch.arange(len(row)) for row in ids]

    # -- one image alone ---------------------------------------------------------------------

    def pieces(
        self, model: PreTrainedModel, ids: Tensor, inputs: Mapping[str, Any], layout: Layout
    ) -> list[Piece]:
        """The images of one sequence, each by itself, in order of appearance.

        Parameters
        ----------
        ids : Tensor
            ``[T]`` int64, without padding.
        inputs : mapping
            What the processor gave for this sequence alone.
        layout : Layout
            Of ``ids``.
        """
        kinds = self.kinds(model, ids.cpu())
        first = [int((layout.image == n).nonzero()[0]) for n in range(len(layout.grids))]
        kind_of = [int(kinds[place]) for place in first]
        found: list[Piece] = []
        for number, grid in enumerate(layout.grids):
            kind = kind_of[number]
            alike = [n for n, other in enumerate(kind_of) if other == kind]
            grids = [layout.grids[n] for n in alike]
            place = alike.index(number)
            for frame, alone, own in self.alone(model, inputs, kind, place, grids):
                mine = layout.image == number
                if frame is not None:
                    mine &= layout.frame == frame
                tokens = mine.nonzero().flatten()
                start, stop = int(tokens[0]), int(tokens[-1]) + 1
                marks = layout.text[max(0, start - self.opening) : start]
                opening = len(marks) if bool(marks.all()) else 0
                span = ids[start - opening : stop].cpu()
                found.append(Piece(tokens, span, opening, own, number, alone or grid))
        return found

    @abstractmethod
    def alone(
        self,
        model: PreTrainedModel,
        inputs: Mapping[str, Any],
        kind: int,
        number: int,
        grids: Sequence[Grid],
    ) -> list[tuple[int | None, Grid | None, dict[str, Any]]]:
        """What the model needs to see one image, without the others.

        Parameters
        ----------
        kind : int
            :data:`IMAGE` or :data:`VIDEO`.
        number : int
            Which one among those of its kind.
        grids : sequence of Grid
            Of all of its kind.

        Returns
        -------
        list of (int or None, Grid or None, dict)
            The frame, its grid and its arguments; for what is not taken apart, a single
            ``(None, None, arguments)``.
        """

    # -- what the image encoder looked at ----------------------------------------------------

    def tower(self, model: PreTrainedModel) -> nn.Module | None:
        """The image encoder, where :meth:`looked_at` can read it."""
        return None

    def looked_at(
        self, model: PreTrainedModel, received: Tensor, inputs: Mapping[str, Any]
    ) -> Tensor | None:
        """Attention per encoder token to attention per visual token.

        Parameters
        ----------
        received : Tensor
            ``[B, P]`` fp32, of all images or tiles that were encoded, class token included.
        inputs : mapping
            What ``get_image_features`` was given.

        Returns
        -------
        Tensor or None
            ``[N]``, of all images in order of appearance; 0 for what stands for no patch. None
            where it cannot be told.
        """
        return None

    # -- inside the decoder loop -------------------------------------------------------------

    def keys(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        """``[B, G, n, d]``, the position-free keys of hidden states ``[B, n, D]`` entering a layer.

        Before RoPE and, where the model has one, after the keys' norm.

        Raises
        ------
        PlanError
            If the layer is not built of ``input_layernorm`` and ``self_attn.q_proj`` and so on.
        """
        return self._projected(layer, hidden, "k")

    def queries(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        """``[B, H, n, d]``: as :meth:`keys`, of the queries."""
        return self._projected(layer, hidden, "q")

    def values(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        """``[B, G, n, d]``: as :meth:`keys`, of the values."""
        return self._projected(layer, hidden, "v")

    def _projected(self, layer: nn.Module, hidden: Tensor, name: str) -> Tensor:
        attention: Any = self.attention(layer)
        norm: Any = getattr(layer, "input_layernorm", None)
        project: Any = getattr(attention, f"{name}_proj", None)
        if norm is None or project is None:
            raise PlanError(
                f"{type(layer).__name__} does not name its projections as Llama, Qwen and "
                "Mistral do: reuse and retrieve cannot be used on it"
            )
        projected: Tensor = project(norm(hidden))
        own_norm: Any = getattr(attention, f"{name}_norm", None)
        width = int(attention.head_dim)
        whole = own_norm is not None and own_norm.weight.shape[0] != width
        if whole:  # some models normalise all heads together
            projected = own_norm(projected)
        projected = projected.unflatten(-1, (-1, width))
        if own_norm is not None and not whole:
            projected = own_norm(projected)
        return projected.transpose(1, 2)

    def after_layer(
        self, text_model: nn.Module, layer: int, hidden: Tensor, features: Mapping[str, Any]
    ) -> Tensor:
        """What the family adds to the hidden states after a layer (deepstack); else nothing.

        Parameters
        ----------
        features : mapping
            Keyword arguments that the top-level forward gave to the text model.
        """
        return hidden

    def features_of(self, features: Mapping[str, Any], columns: Tensor) -> Mapping[str, Any]:
        """``features`` for some columns of the step only, as :meth:`after_layer` takes them.

        Parameters
        ----------
        columns : Tensor
            ``[B, m]`` int64, the columns that run; -1 where a sequence has fewer.
        """
        return features
