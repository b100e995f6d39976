"""Builders of the tiny models: real configurations, real classes, real processors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, ProcessorMixin

from tests.tiny.parts import TEXT, VOCABULARY, fill, tokenizer


@dataclass(frozen=True)
class Tiny:
    """How to build a tiny model, and what its prompts look like.

    Attributes
    ----------
    build : callable
        Gives the model (unfilled) and its processor.
    image, video : str
        What stands for an image or a video in the processor's text; no video if empty.
    start, end : str
        Around the user's text, as in the family's chat template.
    sizes : tuple
        Default image sizes, (height, width) in pixels.
    nested, nested_videos : bool
        Whether the processor wants one list of images, or of videos, per sequence.
    mixes : bool
        Whether the processor takes images and videos in one call.
    """

    build: Callable[[], tuple[PreTrainedModel, ProcessorMixin]]
    image: str
    start: str
    end: str
    video: str = ""
    sizes: tuple[tuple[int, int], ...] = ((28, 42), (42, 28), (56, 28))
    nested: bool = False
    nested_videos: bool = False
    mixes: bool = True


def build(tiny: Tiny) -> tuple[PreTrainedModel, ProcessorMixin]:
    """The filled model in evaluation mode, and its processor."""
    state = torch.random.get_rng_state()
    try:
        model, processor = tiny.build()
    finally:
        torch.random.set_rng_state(state)
    ids = processor.tokenizer.all_special_ids
    fill(model, ids)
    model.generation_config.pad_token_id = processor.tokenizer.pad_token_id
    model.generation_config.eos_token_id = processor.tokenizer.eos_token_id
    model.generation_config.bos_token_id = processor.tokenizer.bos_token_id
    return model.float().eval(), processor


# -- LLaVA-1.5 -----------------------------------------------------------------------------------

_LLAVA_CHAT = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '<image>\n' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{{ ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def _clip(**changes: Any) -> Any:
    from transformers import CLIPVisionConfig

    settings = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "projection_dim": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 7,
    }
    return CLIPVisionConfig(**settings | changes)


def _siglip(**changes: Any) -> Any:
    from transformers import SiglipVisionConfig

    settings = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 7,
        "vision_use_head": False,
    }
    return SiglipVisionConfig(**settings | changes)


def llama(tokens: Any, **changes: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**_text(tokens) | changes)


def _text(tokens: Any) -> dict[str, Any]:
    return TEXT | {
        "vocab_size": VOCABULARY,
        "pad_token_id": tokens.pad_token_id,
        "bos_token_id": tokens.bos_token_id,
        "eos_token_id": tokens.eos_token_id,
    }


def llava(
    *, strategy: str = "default", tower: str = "clip", kv_heads: int = 2, tied: bool = False
) -> tuple[PreTrainedModel, ProcessorMixin]:
    """LLaVA-1.5; ``tower`` is ``"clip"``, with a class token, or ``"siglip"``, without."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    tokens = tokenizer(("<image>",), image_token="<image>")
    config = LlavaConfig(
        vision_config=_clip() if tower == "clip" else _siglip(),
        text_config=llama(tokens, num_key_value_heads=kv_heads, tie_word_embeddings=tied),
        image_token_index=tokens.convert_tokens_to_ids("<image>"),
        vision_feature_select_strategy=strategy,
        tie_word_embeddings=tied,
    )
    images = LlavaImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}
    )
    processor = LlavaProcessor(
        images,
        tokens,
        patch_size=7,
        vision_feature_select_strategy=strategy,
        num_additional_image_tokens=int(tower == "clip"),
        chat_template=_LLAVA_CHAT,
    )
    return LlavaForConditionalGeneration(config), processor


def pixtral() -> tuple[PreTrainedModel, ProcessorMixin]:
    """``LlavaForConditionalGeneration`` over Pixtral's encoder: any size, a mark after each row."""
    from transformers import (
        LlavaConfig,
        LlavaForConditionalGeneration,
        PixtralProcessor,
        PixtralVisionConfig,
    )
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    tokens = tokenizer(("[IMG]", "[IMG_BREAK]", "[IMG_END]"))
    config = LlavaConfig(
        vision_config=PixtralVisionConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=56,
            patch_size=14,
        ),
        text_config=mistral(tokens),
        image_token_index=tokens.convert_tokens_to_ids("[IMG]"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    images = PixtralImageProcessorPil(
        size={"longest_edge": 56}, patch_size={"height": 14, "width": 14}
    )
    return LlavaForConditionalGeneration(config), PixtralProcessor(images, tokens, patch_size=14)


# -- Qwen-VL -------------------------------------------------------------------------------------

_QWEN_SPECIALS = (
    "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
_QWEN_CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% elif part['type'] == 'video' %}"
    "{{ '<|vision_start|><|video_pad|><|vision_end|>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _qwen_tokens() -> Any:
    return tokenizer(_QWEN_SPECIALS)


def _qwen_ids(tokens: Any) -> dict[str, int]:
    find = tokens.convert_tokens_to_ids
    return {
        "image_token_id": find("<|image_pad|>"),
        "video_token_id": find("<|video_pad|>"),
        "vision_start_token_id": find("<|vision_start|>"),
        "vision_end_token_id": find("<|vision_end|>"),
    }


_QWEN_PIXELS = {"patch_size": 7, "temporal_patch_size": 2, "merge_size": 2}
_QWEN_SIZE = {"shortest_edge": 14 * 14, "longest_edge": 84 * 84}


def _qwen_processor(cls: type, videos: Any, tokens: Any) -> ProcessorMixin:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    images = Qwen2VLImageProcessorPil(**_QWEN_PIXELS, size=dict(_QWEN_SIZE))
    return cls(images, tokens, videos, chat_template=_QWEN_CHAT)


def _qwen_text(tokens: Any, section: list[int], **changes: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": section}
    return _text(tokens) | {"rope_parameters": rope} | changes


_QWEN_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 7,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": TEXT["hidden_size"],
}


def qwen2_vl() -> tuple[PreTrainedModel, ProcessorMixin]:
    from transformers import (
        Qwen2VLConfig,
        Qwen2VLForConditionalGeneration,
        Qwen2VLProcessor,
        Qwen2VLVideoProcessor,
    )

    tokens = _qwen_tokens()
    text = _qwen_text(tokens, [2, 3, 3])
    del text["head_dim"]
    vision = {
        "depth": 2,
        "embed_dim": 32,
        "hidden_size": TEXT["hidden_size"],
        "mlp_ratio": 2,
        "num_heads": 2,
        "patch_size": 7,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    config = Qwen2VLConfig(text_config=text, vision_config=vision, **_qwen_ids(tokens))
    videos = Qwen2VLVideoProcessor(
        **_QWEN_PIXELS, size=dict(_QWEN_SIZE), cap_pixels_per_frame=False
    )
    return Qwen2VLForConditionalGeneration(config), _qwen_processor(
        Qwen2VLProcessor, videos, tokens
    )


def qwen2_5_vl(**changes: Any) -> tuple[PreTrainedModel, ProcessorMixin]:
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLVideoProcessor,
    )

    tokens = _qwen_tokens()
    text = _qwen_text(tokens, [2, 3, 3], **changes)
    del text["head_dim"]
    vision = _QWEN_VISION | {
        "window_size": 28,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
    }
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **_qwen_ids(tokens))
    videos = Qwen2VLVideoProcessor(
        **_QWEN_PIXELS, size=dict(_QWEN_SIZE), cap_pixels_per_frame=False
    )
    return Qwen2_5_VLForConditionalGeneration(config), _qwen_processor(
        Qwen2_5_VLProcessor, videos, tokens
    )


def qwen3_vl() -> tuple[PreTrainedModel, ProcessorMixin]:
    from transformers import (
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    tokens = _qwen_tokens()
    text = _qwen_text(tokens, [3, 3, 2])
    text["rope_parameters"]["mrope_interleaved"] = True
    vision = _QWEN_VISION | {
        "depth": 3,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }
    config = Qwen3VLConfig(text_config=text, vision_config=vision, **_qwen_ids(tokens))
    videos = Qwen3VLVideoProcessor(
        **_QWEN_PIXELS,
        size={"shortest_edge": 14 * 14, "longest_edge": 8 * 84 * 84},
        min_frames=2,
        cap_pixels_per_frame=False,
    )
    return Qwen3VLForConditionalGeneration(config), _qwen_processor(
        Qwen3VLProcessor, videos, tokens
    )


# -- LLaVA-NeXT and LLaVA-OneVision ------------------------------------------------------------

_PINPOINTS = [[28, 56], [56, 28], [56, 56]]


def mistral(tokens: Any, **changes: Any) -> Any:
    from transformers import MistralConfig

    return MistralConfig(**_text(tokens) | {"sliding_window": None} | changes)


def qwen2(tokens: Any, **changes: Any) -> Any:
    from transformers import Qwen2Config

    settings = _text(tokens)
    del settings["head_dim"]
    return Qwen2Config(**settings | changes)


def llava_next(
    text: Callable[..., Any] = llama, **changes: Any
) -> tuple[PreTrainedModel, ProcessorMixin]:
    """LLaVA-NeXT over the text model of ``text``."""
    from transformers import LlavaNextConfig, LlavaNextForConditionalGeneration, LlavaNextProcessor
    from transformers.models.llava_next.image_processing_pil_llava_next import (
        LlavaNextImageProcessorPil,
    )

    tokens = tokenizer(("<image>",), image_token="<image>")
    config = LlavaNextConfig(
        vision_config=_clip(),
        text_config=text(tokens, **changes),
        image_token_index=tokens.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=_PINPOINTS,
    )
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 28},
        crop_size={"height": 28, "width": 28},
        image_grid_pinpoints=_PINPOINTS,
    )
    processor = LlavaNextProcessor(
        images,
        tokens,
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_LLAVA_CHAT,
    )
    return LlavaNextForConditionalGeneration(config), processor


def llava_onevision() -> tuple[PreTrainedModel, ProcessorMixin]:
    from transformers import (
        LlavaOnevisionConfig,
        LlavaOnevisionForConditionalGeneration,
        LlavaOnevisionProcessor,
        LlavaOnevisionVideoProcessor,
    )
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
        LlavaOnevisionImageProcessorPil,
    )

    tokens = tokenizer(
        ("<|im_start|>", "<|im_end|>", "<image>", "<video>"),
        image_token="<image>",
        video_token="<video>",
    )
    size = {"height": 28, "width": 28}
    config = LlavaOnevisionConfig(
        vision_config=_siglip(),
        text_config=qwen2(tokens),
        image_token_index=tokens.convert_tokens_to_ids("<image>"),
        video_token_index=tokens.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=_PINPOINTS,
        vision_aspect_ratio="anyres_max_2",
    )
    processor = LlavaOnevisionProcessor(
        LlavaOnevisionImageProcessorPil(size=size, image_grid_pinpoints=_PINPOINTS),
        tokens,
        LlavaOnevisionVideoProcessor(size=size),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        chat_template=_ONEVISION_CHAT,
        vision_aspect_ratio="anyres_max_2",
    )
    return LlavaOnevisionForConditionalGeneration(config), processor


_ONEVISION_CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ' ' }}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '<image>\n' }}"
    "{% elif part['type'] == 'video' %}{{ '<video>\n' }}{% endif %}{% endfor %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


# -- InternVL ------------------------------------------------------------------------------------

_INTERN_CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '<IMG_CONTEXT>\n' }}"
    "{% elif part['type'] == 'video' %}{{ '<video>\n' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def internvl() -> tuple[PreTrainedModel, ProcessorMixin]:
    from transformers import (
        InternVLConfig,
        InternVLForConditionalGeneration,
        InternVLProcessor,
        InternVLVideoProcessor,
    )
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    tokens = tokenizer(
        ("<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        start_image_token="<img>",
        end_image_token="</img>",
        context_image_token="<IMG_CONTEXT>",
        video_token="<video>",
    )
    size = {"height": 28, "width": 28}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 7,
    }
    config = InternVLConfig(
        vision_config=vision,
        text_config=qwen2(tokens),
        image_token_id=tokens.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    processor = InternVLProcessor(
        GotOcr2ImageProcessorPil(size=size, crop_to_patches=True, max_patches=6),
        tokens,
        InternVLVideoProcessor(size=size),
        image_seq_length=4,
        chat_template=_INTERN_CHAT,
    )
    return InternVLForConditionalGeneration(config), processor


# -- Idefics3 and SmolVLM ------------------------------------------------------------------------

_IDEFICS_SPECIALS = ("<fake_token_around_image>", "<image>", "<end_of_utterance>")
_IDEFICS_CHAT = (
    "<|begin_of_text|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
_IDEFICS_PIXELS = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}
_IDEFICS_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}


def idefics3() -> tuple[PreTrainedModel, ProcessorMixin]:
    """Idefics3; the marks of its tiles are several tokens each."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    tokens = tokenizer(("<|begin_of_text|>", *_IDEFICS_SPECIALS))
    config = Idefics3Config(
        vision_config=_IDEFICS_VISION,
        text_config=llama(tokens),
        image_token_id=tokens.convert_tokens_to_ids("<image>"),
        pad_token_id=tokens.pad_token_id,
        scale_factor=2,
    )
    processor = Idefics3Processor(
        Idefics3ImageProcessorPil(**_IDEFICS_PIXELS),
        tokens,
        image_seq_len=4,
        chat_template=_IDEFICS_CHAT,
    )
    return Idefics3ForConditionalGeneration(config), processor


def smolvlm() -> tuple[PreTrainedModel, ProcessorMixin]:
    """SmolVLM; the marks of its tiles are single tokens."""
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration, SmolVLMProcessor
    from transformers.models.smolvlm import processing_smolvlm
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
    from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor

    if processing_smolvlm.num2words is None:  # TEST-ONLY: it writes "four frames" in a prompt
        processing_smolvlm.num2words = str
    marks = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
    tokens = tokenizer(
        ("<|im_start|>", *_IDEFICS_SPECIALS, "<global-img>", "<video>", *marks),
        image_token="<image>",
        video_token="<video>",
        fake_image_token="<fake_token_around_image>",
        global_image_token="<global-img>",
    )
    config = SmolVLMConfig(
        vision_config=_IDEFICS_VISION,
        text_config=llama(tokens),
        image_token_id=tokens.convert_tokens_to_ids("<image>"),
        pad_token_id=tokens.pad_token_id,
        scale_factor=2,
    )
    processor = SmolVLMProcessor(
        SmolVLMImageProcessorPil(**_IDEFICS_PIXELS),
        tokens,
        SmolVLMVideoProcessor(**_IDEFICS_PIXELS),
        image_seq_len=4,
        chat_template=_IDEFICS_CHAT.replace("<|begin_of_text|>", "<|im_start|>"),
    )
    return SmolVLMForConditionalGeneration(config), processor


_QWEN = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
    "start": "<|im_start|>user\n",
    "end": "<|im_end|>\n<|im_start|>assistant\n",
}
_LLAVA = {"image": "<image>\n", "start": "USER: ", "end": " ASSISTANT:"}
_ONEVISION = _QWEN | {"image": "<image>\n", "video": "<video>\n", "nested": True}
_INTERN = _QWEN | {"image": "<IMG_CONTEXT>\n", "video": "<video>\n"}
_IDEFICS = {
    "image": "<image>",
    "start": "<|begin_of_text|>User: ",
    "end": "<end_of_utterance>\nAssistant:",
    "nested": True,
}
_SMOLVLM = _IDEFICS | {
    "start": "<|im_start|>User: ",
    "video": "<video>",
    "nested_videos": True,
    "mixes": False,
}

TINY: dict[str, Tiny] = {
    "llava": Tiny(llava, **_LLAVA),
    "llava-full": Tiny(lambda: llava(strategy="full"), **_LLAVA),
    "llava-siglip": Tiny(lambda: llava(strategy="full", tower="siglip"), **_LLAVA),
    "llava-mha": Tiny(lambda: llava(kv_heads=4), **_LLAVA),
    "llava-tied": Tiny(lambda: llava(tied=True), **_LLAVA),
    "llava-pixtral": Tiny(pixtral, image="[IMG]", start="[INST] ", end=" [/INST]"),
    "llava-next": Tiny(llava_next, **_LLAVA),
    "llava-next-mistral": Tiny(lambda: llava_next(mistral), **_LLAVA),
    "llava-next-sliding": Tiny(lambda: llava_next(mistral, sliding_window=16), **_LLAVA),
    "llava-onevision": Tiny(llava_onevision, **_ONEVISION),
    "qwen2-vl": Tiny(qwen2_vl, **_QWEN),
    "qwen2.5-vl": Tiny(qwen2_5_vl, **_QWEN),
    "qwen2.5-vl-sliding": Tiny(
        lambda: qwen2_5_vl(use_sliding_window=True, sliding_window=16, max_window_layers=2),
        **_QWEN,
    ),
    "qwen3-vl": Tiny(qwen3_vl, **_QWEN),
    "internvl3": Tiny(internvl, **_INTERN),
    "smolvlm": Tiny(smolvlm, **_SMOLVLM),
    "idefics3": Tiny(idefics3, **_IDEFICS),
}
