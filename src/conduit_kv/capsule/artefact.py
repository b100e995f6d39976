"""The file that holds what was learned of a model's visual keys and values."""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from conduit_kv.cache.capsule import BlockParts
from conduit_kv.digests import weights_known
from conduit_kv.errors import InputError, PlanError

FORMAT = "kvcapsule 1"
_NAMES = ("key_mean", "key_covariance", "value_mean", "value_covariance")


def weights_digest(model: nn.Module) -> str:
    """SHA-256 over all weights, rounded to bf16 so that a model's number type does not matter.

    Read once, and again when a weight was replaced or changed in place.
    """
    named = sorted(model.named_parameters())

    def read() -> str:
        digest = hashlib.sha256()
        for name, tensor in named:
            digest.update(f"{name} {tuple(tensor.shape)}".encode())
            plain = tensor.detach().to("cpu", torch.bfloat16).contiguous()
            digest.update(plain.view(torch.int16).numpy().tobytes())
        return digest.hexdigest()

    return weights_known(model, "capsule", (tensor for _, tensor in named), read)


@dataclass(frozen=True, eq=False)
class Artefact:
    """Moments of a model's visual keys and values within blocks, per layer.

    All that depends on how much is kept follows from them in closed form (:meth:`parts`), so that
    one artefact serves every share.

    Attributes
    ----------
    model : str
        Name, for messages.
    digest : str
        Of the model's weights.
    block : int
        ``g``, tokens in a block.
    images : int
        How many images it was fitted on.
    key_mean, value_mean : Tensor
        ``[L, G, g, d]`` fp32; keys before RoPE.
    key_covariance, value_covariance : Tensor
        ``[L, g, g]`` fp32 over the tokens of a block, summed over heads and channels; a key's
        channels weigh as much as queries make of them.
    """

    model: str
    digest: str
    block: int
    images: int
    key_mean: Tensor
    key_covariance: Tensor
    value_mean: Tensor
    value_covariance: Tensor

    @property
    def layers(self) -> int:
        """``L``."""
        return int(self.key_mean.shape[0])

    @property
    def bytes(self) -> int:
        """Bytes of process memory that it takes."""
        return sum(getattr(self, n).numel() * getattr(self, n).element_size() for n in _NAMES)

    def check(self, model: nn.Module) -> None:
        """Raise PlanError unless it was fitted on these very weights."""
        if weights_digest(model) != self.digest:
            raise PlanError(
                f"this artefact was fitted on other weights ({self.model}): fit one for this "
                "model with conduit-kv fit kvcapsule --model MODEL --images FOLDER --out FILE, "
                "and name it as artefact=FILE"
            )

    def save(self, file: Path) -> None:
        """Write it, whole or not at all."""
        tensors = {name: getattr(self, name).contiguous() for name in _NAMES}
        header = {
            "format": FORMAT,
            "model": self.model,
            "digest": self.digest,
            "block": str(self.block),
            "images": str(self.images),
            "layers": str(self.layers),
        }
        header["checksum"] = _checksum(header, tensors)
        temporary = file.with_name(file.name + ".part")
        save_file(tensors, temporary, metadata=header)
        temporary.replace(file)

    # -- what follows from the moments -------------------------------------------------------

    def counts(self, keep: float) -> list[tuple[int, int]]:
        """Per layer, how many keys and how many coefficients of values are kept of a block.

        One budget, ``keep`` of all numbers, is spent where it lowers the relative error most; every
        layer has at least one of each.
        """
        key_gain = [_gains(_removal(covariance)[1]) for covariance in self.key_covariance]
        value_gain = [_gains(_tails(covariance)) for covariance in self.value_covariance]
        counts = [[1, 1] for _ in range(self.layers)]
        room = int(keep * 2 * self.block * self.layers + 1e-9) - 2 * self.layers
        gains = [key_gain, value_gain]
        while room > 0:
            best, where = -1.0, None
            for layer, pair in enumerate(counts):
                for kind in (0, 1):
                    if pair[kind] < self.block and gains[kind][layer][pair[kind]] > best:
                        best, where = gains[kind][layer][pair[kind]], (layer, kind)
            if where is None:
                break
            counts[where[0]][where[1]] += 1
            room -= 1
        return [(keys, values) for keys, values in counts]

    def parts(self, keep: float) -> list[BlockParts]:
        """Per layer, what packs and reads its blocks when ``keep`` of all numbers is kept."""
        return [
            self._layer(layer, keys, values)
            for layer, (keys, values) in enumerate(self.counts(keep))
        ]

    def _layer(self, layer: int, keys: int, values: int) -> BlockParts:
        covariance = self.key_covariance[layer].double()
        order, _ = _removal(self.key_covariance[layer])
        kept = torch.tensor(sorted(order[:keys]))
        missing = torch.tensor([t for t in range(self.block) if t not in set(kept.tolist())])
        mix = _regression(covariance, kept, missing.long())
        basis = _basis(self.value_covariance[layer], values)
        return BlockParts(
            kept, mix, self.key_mean[layer], self.value_mean[layer], basis, basis.T.contiguous()
        )

    def key_bases(self, keep: float) -> list[tuple[Tensor, Tensor]]:
        """Per layer, bases over the tokens ``[g, r]`` of keys and of values, of the same sizes."""
        return [
            (_basis(k, keys), _basis(v, values))
            for k, v, (keys, values) in zip(
                self.key_covariance, self.value_covariance, self.counts(keep), strict=True
            )
        ]


def _regression(covariance: Tensor, kept: Tensor, missing: Tensor) -> Tensor:
    """``[g - m, m]`` fp32: the best linear prediction of some tokens from others."""
    inner = covariance[kept][:, kept]
    ridge = 1e-4 * covariance.diagonal().mean() * torch.eye(len(kept), dtype=torch.float64)
    mix: Tensor = torch.linalg.solve(inner + ridge, covariance[kept][:, missing]).T
    return mix.float().contiguous()


def _removal(covariance: Tensor) -> tuple[list[int], list[float]]:
    """Tokens in the order in which keeping them explains most, and the error after each.

    Greedy: after each choice the others are left with what the chosen ones cannot predict.
    """
    rest = covariance.double().clone()
    total = max(float(rest.diagonal().sum()), 1e-30)
    order: list[int] = []
    errors = [1.0]
    floor = 1e-9 * total
    for _ in range(len(rest)):
        spread = rest.diagonal().clamp_min(0)
        gain = rest.square().sum(0) / spread.clamp_min(floor)
        gain[order] = -1.0
        token = int(gain.argmax())
        order.append(token)
        if float(spread[token]) > floor:
            rest -= rest[:, token : token + 1] @ rest[token : token + 1] / rest[token, token]
        errors.append(max(float(rest.diagonal().sum()), 0.0) / total)
    return order, errors


def _tails(covariance: Tensor) -> list[float]:
    """What a basis of 0, 1, 2, ... vectors leaves of the variance."""
    values = torch.linalg.eigvalsh(covariance.double()).flip(0).clamp_min(0)
    total = values.sum().clamp_min(1e-30)
    left = 1 - torch.cat([torch.zeros(1, dtype=torch.float64), values.cumsum(0)]) / total
    return left.clamp_min(0).tolist()  # type: ignore[no-any-return]


def _gains(errors: list[float]) -> list[float]:
    """What one more than ``n`` lowers the error by, for each ``n``."""
    return [before - after for before, after in itertools.pairwise(errors)]


def _basis(covariance: Tensor, size: int) -> Tensor:
    vectors: Tensor = torch.linalg.eigh(covariance.double()).eigenvectors.flip(1)
    return vectors[:, :size].float().contiguous()


def _checksum(header: dict[str, str], tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    known = {name: text for name, text in header.items() if name != "checksum"}
    digest.update(json.dumps(known, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


_loaded: dict[tuple[str, int, int], Artefact] = {}


def load_artefact(file: str | Path, model: Any = None) -> Artefact:
    """Read an artefact and check it.

    Parameters
    ----------
    file : str or Path
    model : PreTrainedModel or VLM, optional
        Raise unless the artefact was fitted on its weights.

    Raises
    ------
    InputError
        If the file is missing, damaged, or of another kind or format.
    PlanError
        If it belongs to other weights.
    """
    path = Path(file).expanduser()
    try:
        status = path.stat()
        known = (str(path.resolve()), status.st_mtime_ns, status.st_size)
        if known not in _loaded:
            _loaded[known] = _read(path)
        artefact = _loaded[known]
    except OSError as error:
        raise InputError(f"{path}: no artefact can be read there: {error.strerror}") from None
    if model is not None:
        artefact.check(getattr(model, "model", model) if hasattr(model, "processor") else model)
    return artefact


def _read(path: Path) -> Artefact:
    try:
        with safe_open(path, "pt") as stored:
            header = stored.metadata() or {}
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise InputError(f"{path} is damaged or no artefact: {error}") from None
    if header.get("format") != FORMAT:
        raise InputError(
            f"{path} is no artefact of this version: its format is "
            f"{header.get('format', 'missing')!r}, not {FORMAT!r}; fit it again"
        )
    if set(tensors) != set(_NAMES) or header.get("checksum") != _checksum(header, tensors):
        raise InputError(f"{path} is damaged: its checksum does not fit; fit it again")
    return Artefact(
        header["model"], header["digest"], int(header["block"]), int(header["images"]), **tensors
    )
