"""Write which tokens kvpress keeps of seeded prompts in tiny text models.

Runs where kvpress is installed, and this package is not:

    python tests/oracle/kvpress_indices.py indices.json

``indices.json`` says what ran and what was kept, per layer and KV head. Beside it,
``indices.safetensors`` has the models' weights, the prompts' ids, the logits of each prompt's last
token and the scores behind each kept set. Kept tokens are found from the cache alone: each
compressed key is looked up among the keys of a plain prefill, bit by bit. Only AdaKV removes no
key; it lists the ones that it masks.
"""

from __future__ import annotations

import argparse
import json
import zlib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from kvpress import (
    AdaKVPress,
    KnormPress,
    PyramidKVPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "vocab_size": 512,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),  # q_norm and k_norm
}
LENGTHS = (16, 40, 64, 129)
RATIOS = (0.3, 0.5, 0.8)
PLAIN_IDS = 256
"""Ids below this are no special tokens. A prompt repeats none: equal tokens have equal norms."""
PRESSES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("SnapKVPress", {}),
    ("SnapKVPress", {"window_size": 8}),
    ("SnapKVPress", {"window_size": 12, "kernel_size": 3}),
    ("KnormPress", {}),
    ("TOVAPress", {}),
    ("StreamingLLMPress", {}),
    ("StreamingLLMPress", {"n_sink": 1}),
    ("PyramidKVPress", {}),
    ("PyramidKVPress", {"window_size": 8}),
    ("PyramidKVPress", {"window_size": 8, "beta": 2}),
    ("AdaKVPress", {}),
    ("AdaKVPress", {"window_size": 8}),
    ("AdaKVPress", {"window_size": 8, "alpha_safeguard": 0.9}),
    ("AdaKVPress", {"window_size": 8, "alpha_safeguard": 0.0}),
)
"""Which press, with which settings beside its defaults; AdaKV's scores are SnapKV's."""

CLASSES = {
    cls.__name__: cls
    for cls in (SnapKVPress, KnormPress, TOVAPress, StreamingLLMPress, PyramidKVPress)
}


def tiny(name: str) -> PreTrainedModel:
    """A model whose weights depend on a parameter's name and shape alone."""
    model_class, config_class = MODELS[name]
    model = model_class(config_class(**TEXT, attn_implementation="sdpa")).float().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(zlib.crc32(key.encode()))
            )
            if parameter.ndim == 1:
                parameter.copy_(1 + 0.1 * noise)
            elif "embed" in key:
                parameter.copy_(noise)
            else:
                gain = 1.6 if "q_proj" in key or "k_proj" in key else 1.0
                parameter.copy_(gain * noise / parameter.shape[1] ** 0.5)
    return model


def prompt(length: int) -> Tensor:
    """``[length]`` ids, none of them twice."""
    return torch.randperm(PLAIN_IDS, generator=torch.Generator().manual_seed(length))[:length]


def press_of(name: str, settings: dict[str, Any], ratio: float) -> tuple[Any, Any, dict[str, Any]]:
    """The press, the part of it that scores, and all its settings."""
    if name == "AdaKVPress":
        given = dict(settings)
        alpha = (
            {"alpha_safeguard": given.pop("alpha_safeguard")} if "alpha_safeguard" in given else {}
        )
        scorer = SnapKVPress(compression_ratio=ratio, **given)
        press = AdaKVPress(scorer, **alpha)
        options = {"alpha_safeguard": press.alpha_safeguard}
    else:
        press = scorer = CLASSES[name](compression_ratio=ratio, **settings)
        options = {}
    options |= {key: value for key, value in vars(scorer).items() if key != "compression_ratio"}
    return press, scorer, options


def found(kept: Tensor, every: Tensor) -> list[int]:
    """Which rows of ``every`` ``[T, d]`` the rows of ``kept`` ``[n, d]`` are, ascending."""
    same = (kept[:, None] == every[None]).all(-1)
    if not (same.sum(1) == 1).all():
        raise RuntimeError("a compressed key is not exactly one of the prompt's keys")
    return sorted(same.int().argmax(1).tolist())


def keys_of(cache: DynamicCache) -> list[Tensor]:
    """Per layer ``[G, n, d]``."""
    return [layer.keys[0] for layer in cache.layers]


def case(
    model: PreTrainedModel, ids: Tensor, plain: list[Tensor], press: Any, scorer: Any
) -> tuple[list[list[list[int]]], Tensor]:
    """Kept tokens per layer and KV head, and the scores ``[L, G, T]``."""
    scores: list[Tensor] = []
    score = scorer.score

    def listen(*args: Any, **kwargs: Any) -> Tensor:
        result = score(*args, **kwargs)
        scores.append(result[0].clone())
        return result

    scorer.score = listen
    cache = DynamicCache()
    with torch.no_grad(), press(model):
        model(ids[None], past_key_values=cache)
    kept = [
        [found(*pair) for pair in zip(keys, every, strict=True)]
        for keys, every in zip(keys_of(cache), plain, strict=True)
    ]
    if isinstance(press, AdaKVPress):
        for layer, heads in zip(model.model.layers, kept, strict=True):
            _, masked_heads, masked = layer.self_attn.masked_key_indices
            gone = set(zip(masked_heads.tolist(), masked.tolist(), strict=True))
            for head, tokens in enumerate(heads):
                heads[head] = [token for token in tokens if (head, token) not in gone]
            layer.self_attn.masked_key_indices = None
    return kept, torch.stack(scores)


def cases(
    name: str, model: PreTrainedModel, tensors: dict[str, Tensor]
) -> Iterator[dict[str, Any]]:
    """Run every press on every prompt; what is too large for JSON goes into ``tensors``."""
    for length in LENGTHS:
        ids = prompt(length)
        cache = DynamicCache()
        with torch.no_grad():
            logits = model(ids[None], past_key_values=cache).logits[0, -1]
        plain = keys_of(cache)
        tensors[f"prompt.{length}"] = ids
        tensors[f"logits.{name}.{length}"] = logits
        for press_name, settings in PRESSES:
            for ratio in RATIOS:
                press, scorer, options = press_of(press_name, settings, ratio)
                if length <= options.get("window_size", 0):
                    continue  # SnapKVPress asserts a prompt longer than its window
                kept, scores = case(model, ids, plain, press, scorer)
                given = "".join(f",{key}={value}" for key, value in options.items())
                label = f"{name}/{length}/{press_name}({ratio}{given})"
                tensors[f"scores.{label}"] = scores
                yield {
                    "label": label,
                    "model": name,
                    "tokens": length,
                    "press": press_name,
                    "options": options,
                    "compression_ratio": ratio,
                    "kept": kept,
                }


def main() -> None:
    parser = argparse.ArgumentParser(description="Write which tokens kvpress keeps.")
    parser.add_argument("json", type=Path)
    out: Path = parser.parse_args().json
    torch.set_num_threads(1)
    tensors: dict[str, Tensor] = {}
    rows = []
    for name in MODELS:
        model = tiny(name)
        for key, parameter in model.state_dict().items():
            tensors[f"weights.{name}.{key}"] = parameter
        rows.extend(cases(name, model, tensors))
    result = {
        "versions": {name: version(name) for name in ("kvpress", "transformers", "torch")},
        "text": TEXT,
        "cases": rows,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out.with_suffix(".safetensors"))
    out.write_text(json.dumps(result))
    print(f"kvpress {result['versions']['kvpress']}: {len(rows)} cases in {out}")


if __name__ == "__main__":
    main()
