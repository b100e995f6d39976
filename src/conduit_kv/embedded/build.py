"""Build the embedded model once, as a standard Transformers folder in the user's cache.

The language model comes as GGUF, the CNN as a PyTorch state dict, the adapter with this package.
Together they become a ``LlavaForConditionalGeneration`` with processor and tokenizer that
``from_pretrained`` loads like any other. The folder's name is a digest of everything that went in,
it appears under that name by one rename when it is complete, and what is in it is compared with the
digests written beside it before it is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conduit_kv.embedded.parts import Parts, check_parts, file_digest
from conduit_kv.embedded.tower import ConduitCnnConfig, fold_state_dict
from conduit_kv.errors import ModelError

__all__ = [
    "CHAT_TEMPLATE",
    "adapter_path",
    "default_cache_dir",
    "ensure_built",
    "language_state",
    "load_embedded",
    "make_processor",
    "make_tokenizer",
]

FORMAT_VERSION = 2
MANIFEST = "conduit.json"
IMAGE_TOKEN = "<image>"
IMAGE_SIZE = 224
PATCH = 16
TOKENS_PER_IMAGE = (IMAGE_SIZE // PATCH) ** 2
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)

# SmolLM2's own ChatML form, with images, and without its default system prompt.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>\\n' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_LANGUAGE_CONFIG = {
    "vocab_size": 49153,  # SmolLM2's 49,152 and the image token
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_LORA = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
    "o": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip

Progress = Callable[[str, int, int], None]


def adapter_path() -> Path:
    """The trained weights that come with this package."""
    return Path(__file__).parent / "adapter.safetensors"


def default_cache_dir() -> Path:
    """Where built models are kept: in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME")
    root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return root / "conduit-kv" / "embedded"


# --- parts to tensors -----------------------------------------------------------------------


def language_state(path: Path, advance: Callable[[], None] = lambda: None) -> dict[str, Tensor]:
    """Weights of the language model from GGUF, under the names of ``LlamaForCausalLM``.

    Parameters
    ----------
    path : Path
    advance : callable
        Called once per tensor.

    Returns
    -------
    dict
        bfloat16 tensors. The output layer is the embedding, and is not repeated.
    """
    from gguf import GGUFReader
    from gguf.quants import dequantize

    state: dict[str, Tensor] = {}
    heads = {"attn_q": 9, "attn_k": 3}
    for tensor in GGUFReader(str(path)).tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            name = f"model.layers.{parts[1]}.{_NAMES[parts[2]]}.weight"
            if parts[2] in heads:
                # GGUF interleaves the two halves that rotary embedding pairs; undo that.
                rows = values.shape[0] // heads[parts[2]]
                values = values.view(heads[parts[2]], rows // 2, 2, -1).transpose(1, 2)
                values = values.reshape(-1, values.shape[-1])
        elif parts[0] == "token_embd":
            name = "model.embed_tokens.weight"
        elif parts[0] == "output_norm":
            name = "model.norm.weight"
        else:
            raise ModelError(f"{path} holds a tensor {tensor.name} that the model does not have")
        state[name] = values.to(torch.bfloat16).contiguous()
        advance()
    return state


def make_tokenizer(gguf: Path) -> Any:
    """SmolLM2's tokenizer with the image token, left padding and the chat template."""
    from transformers import AutoTokenizer

    # Given here and not set later: only what the tokenizer was made with is saved.
    tokenizer = AutoTokenizer.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, padding_side="left"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE_TOKEN]})
    tokenizer.pad_token = "<|endoftext|>"
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.model_max_length = 8192
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _image_processor() -> Any:
    # By its module, not through an auto class: where torchvision is installed that would choose
    # another resize, and the same picture would be other pixels.
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    return ViTImageProcessorPil(
        do_resize=True,
        size={"height": IMAGE_SIZE, "width": IMAGE_SIZE},
        resample=3,
        do_rescale=True,
        do_normalize=True,
        image_mean=list(MEAN),
        image_std=list(STD),
        do_convert_rgb=True,
    )


def make_processor(tokenizer: Any) -> Any:
    """The ``LlavaProcessor`` of the model: 224 x 224 without cropping, 196 tokens per image."""
    from transformers import LlavaProcessor

    return LlavaProcessor(
        image_processor=_image_processor(),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="full",
        num_additional_image_tokens=0,
        image_token=IMAGE_TOKEN,
        chat_template=CHAT_TEMPLATE,
    )


def _config(image_token_id: int) -> Any:
    from transformers import LlamaConfig, LlavaConfig

    return LlavaConfig(
        vision_config=ConduitCnnConfig(image_size=IMAGE_SIZE, patch_size=PATCH),
        text_config=LlamaConfig(**_LANGUAGE_CONFIG),
        image_token_id=image_token_id,
        image_seq_length=TOKENS_PER_IMAGE,
        projector_hidden_act="gelu",
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )


def _merged_state(parts: Parts, adapter: Path, advance: Callable[[], None]) -> dict[str, Tensor]:
    """Everything under the names of ``LlavaForConditionalGeneration``, bfloat16."""
    from safetensors import safe_open

    language = language_state(parts.gguf, advance)
    state: dict[str, Tensor] = {}
    with safe_open(str(adapter), framework="pt") as file:
        metadata = file.metadata() or {}
        scale = float(metadata["alpha"]) / float(metadata["rank"])
        names = set(file.keys())
        for layer in range(_LANGUAGE_CONFIG["num_hidden_layers"]):  # type: ignore[call-overload]
            for short, target in _LORA.items():
                name = f"model.layers.{layer}.{target}.weight"
                a = file.get_tensor(f"lora.{layer}.{short}.a").float()
                b = file.get_tensor(f"lora.{layer}.{short}.b").float()
                merged = language[name].float() + scale * (b @ a)
                language[name] = merged.to(torch.bfloat16)
            advance()
        for name in sorted(names):
            if not name.startswith("lora."):
                state[name] = file.get_tensor(name)
    embedding = language.pop("model.embed_tokens.weight")
    # The image token's own row is never read (visual tokens take its place); the mean of all rows
    # keeps its logit unremarkable.
    mean = embedding.float().mean(0, keepdim=True).to(torch.bfloat16)
    language["model.embed_tokens.weight"] = torch.cat([embedding, mean])
    for name, tensor in language.items():
        state["model.language_model." + name.removeprefix("model.")] = tensor
    cnn = fold_state_dict(torch.load(parts.cnn, map_location="cpu", weights_only=True))
    for name, tensor in cnn.items():
        state[f"model.vision_tower.cnn.{name}"] = tensor.to(torch.bfloat16)
    state["lm_head.weight"] = state["model.language_model.embed_tokens.weight"]
    return state


def _write(parts: Parts, adapter: Path, folder: Path, progress: Progress) -> None:
    """Write the whole model into an empty folder."""
    from transformers import GenerationConfig, LlavaForConditionalGeneration

    total = 272 + 30 + 3
    done = 0

    def advance(what: str = "reading the language model") -> None:
        nonlocal done
        done += 1
        progress(what, done, total)

    tokenizer = make_tokenizer(parts.gguf)
    config = _config(tokenizer.convert_tokens_to_ids(IMAGE_TOKEN))
    advance("reading the tokenizer")
    state = _merged_state(parts, adapter, advance)
    # Shapes only: random weights of 140 million parameters would be drawn to be thrown away.
    with torch.device("meta"):
        model = LlavaForConditionalGeneration(config)
    problems = model.load_state_dict(state, strict=False, assign=True)
    if problems.missing_keys or problems.unexpected_keys:
        raise ModelError(
            f"the adapter {adapter} does not fit this version: missing "
            f"{problems.missing_keys[:3]}, unexpected {problems.unexpected_keys[:3]}; "
            "reinstall conduit-kv"
        )
    model.tie_weights()
    model.config.dtype = torch.bfloat16
    model.generation_config = GenerationConfig(
        bos_token_id=1, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    advance("writing the model")
    make_processor(tokenizer).save_pretrained(folder)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    manifest = {
        "format": FORMAT_VERSION,
        "files": {path.name: file_digest(path) for path in files},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    advance("checking the model")


# --- the cache folder -----------------------------------------------------------------------


def _key(parts: Parts, adapter: Path) -> str:
    text = " ".join(
        (str(FORMAT_VERSION), parts.gguf_sha256, parts.cnn_sha256, file_digest(adapter))
    )
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def is_intact(folder: Path) -> bool:
    """Whether every file of a built model is there and is what was written."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return manifest["format"] == FORMAT_VERSION and all(
            file_digest(folder / name) == digest for name, digest in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _remove(folder: Path) -> None:
    """Remove a folder such that nobody sees it half removed under its name."""
    away = folder.with_name(f".trash-{os.getpid()}-{time.monotonic_ns()}")
    try:
        os.rename(folder, away)
    except FileNotFoundError:
        return
    shutil.rmtree(away, ignore_errors=True)


def _sweep(cache: Path, age: float = 3600.0) -> None:
    """Remove what builds that were killed left behind."""
    for path in cache.glob(".*-*"):
        try:
            if time.time() - path.stat().st_mtime > age:
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue


@contextmanager
def _progress_bar(show: bool) -> Iterator[Progress]:
    if not show:
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    with Bar(
        TextColumn("building the embedded model (once)"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %  {task.description}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task("", total=1)
        yield lambda what, done, total: bar.update(
            task, description=what, completed=done, total=total
        )


def ensure_built(
    cache_dir: str | Path | None = None,
    progress: bool = True,
    adapter: str | Path | None = None,
) -> Path:
    """Folder of the embedded model, built if it is not there or is damaged.

    Several processes may call this at once, and may be killed at any moment.

    Parameters
    ----------
    cache_dir : str or Path, optional
        Where built models are kept; :func:`default_cache_dir` if not given.
    progress : bool
        Show a progress bar on standard error while building.
    adapter : str or Path, optional
        Trained weights other than those of the package.

    Returns
    -------
    Path
        A folder for ``LlavaForConditionalGeneration.from_pretrained``.

    Raises
    ------
    ModelError
        If a part is missing or is another version, or the folder cannot be written.
    """
    parts = check_parts()
    source = Path(adapter) if adapter is not None else adapter_path()
    if not source.is_file():
        raise ModelError(f"the trained weights {source} are missing; reinstall conduit-kv")
    cache = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    folder = cache / _key(parts, source)
    if is_intact(folder):
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _sweep(cache)
        temporary = Path(tempfile.mkdtemp(prefix=f".build-{os.getpid()}-", dir=cache))
    except OSError as error:
        raise ModelError(
            f"cannot write to {cache} ({error.strerror}); give another folder as cache_dir"
        ) from error
    try:
        with _progress_bar(progress) as report:
            _write(parts, source, temporary, report)
        for _ in range(3):
            try:
                os.rename(temporary, folder)
                return folder
            except OSError:
                # Somebody else's folder is there: finished while we built, or damaged before.
                if is_intact(folder):
                    return folder
                _remove(folder)
        raise ModelError(f"cannot put the built model at {folder}; remove that folder")
    except OSError as error:
        raise ModelError(
            f"building the embedded model in {cache} failed: {error.strerror or error}; it needs "
            "about 300 MB of space"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load_embedded(
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    cache_dir: str | Path | None = None,
    progress: bool = True,
    adapter: str | Path | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Load the embedded model, building it on the first use.

    Parameters
    ----------
    dtype : str or torch.dtype
        "auto" is bfloat16, as stored.
    device : str or torch.device
    cache_dir, progress, adapter
        See :func:`ensure_built`.
    **options
        Passed to ``from_pretrained`` (e.g. ``attn_implementation``).

    Returns
    -------
    model : LlavaForConditionalGeneration
        In evaluation mode.
    processor : LlavaProcessor
    """
    from transformers import AutoTokenizer, LlavaForConditionalGeneration

    folder = ensure_built(cache_dir, progress, adapter)
    model = LlavaForConditionalGeneration.from_pretrained(
        folder, dtype=dtype, local_files_only=True, **options
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return model.to(device).eval(), make_processor(tokenizer)
