"""What the tiny models share: a tokenizer, seeded weights, images."""

from __future__ import annotations

import zlib

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}
"""Settings of every text model: four layers, four query heads on two KV heads."""

VOCABULARY = 512
"""Rows of every embedding; the tokenizer has fewer."""

_WORDS = (
    "Where", "What", "is", "the", "dog", "red", "in", "image", "this", "that", "and", "a", "USER",
    "ASSISTANT", "user", "assistant", "seconds", "Frame", "please", "Look", "at", "Describe",
)  # fmt: skip


def tokenizer(specials: tuple[str, ...], **names: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of single bytes and a few whole words, padding on the left.

    Parameters
    ----------
    specials : tuple of str
        Special tokens beside ``<pad>``, ``<s>`` and ``</s>``.
    names : str
        Named special tokens, e.g. ``image_token="<image>"``.
    """
    byte = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(byte)}
    merges: list[tuple[str, str]] = []
    for word in _WORDS:
        for text in (word, "Ġ" + word):
            for end in range(2, len(text) + 1):
                if text[:end] not in vocabulary:
                    vocabulary[text[:end]] = len(vocabulary)
                    merges.append((text[: end - 1], text[end - 1]))
    base = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    base.decoder = decoders.ByteLevel()
    base.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("<pad>", "<s>", "</s>", *specials)]
    )
    if len(base.get_vocab()) > VOCABULARY:
        raise ValueError(f"the tokenizer has {len(base.get_vocab())} tokens, above {VOCABULARY}")
    return PreTrainedTokenizerFast(
        tokenizer_object=base,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        padding_side="left",
        extra_special_tokens=names,
    )


def fill(model: PreTrainedModel, silent: list[int]) -> None:
    """Give every parameter seeded values under which attention is peaked and differs by head.

    The values depend on a parameter's name and shape alone: the same in every release.

    Parameters
    ----------
    silent : list of int
        Token ids that the language head never prefers: special tokens get the logit 0.
    """
    tied = model.config.tie_word_embeddings
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim < 2:
                if any(key in name for key in ("norm", "ln_q", "layrnorm", "lambda")):
                    bias = name.endswith("bias")
                    parameter.copy_(0.05 * noise + (0.0 if bias else 1.0))
                else:
                    parameter.copy_(0.05 * noise)
                continue
            fan_in = parameter.shape[1:].numel()
            gain = 1.6 if any(key in name for key in ("q_proj", "k_proj", "qkv")) else 1.0
            scale = 1.0 if "embed" in name and not tied else gain / fan_in**0.5
            parameter.copy_(scale * noise)
        model.get_output_embeddings().weight[silent] = 0.0


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    """Coloured noise in blocks of 7 pixels: every image and every patch differs."""
    rng = np.random.default_rng((seed, height, width))
    blocks = rng.integers(0, 256, (-(-height // 7), -(-width // 7), 3), dtype=np.uint8)
    pixels = blocks.repeat(7, axis=0).repeat(7, axis=1)[:height, :width]
    return Image.fromarray(np.ascontiguousarray(pixels))


def film(frames: int, height: int, width: int, seed: int = 0) -> np.ndarray:
    """``[frames, height, width, 3]`` uint8, every frame another picture."""
    return np.stack(
        [np.asarray(picture(height, width, 1000 * (seed + 1) + n)) for n in range(frames)]
    )
