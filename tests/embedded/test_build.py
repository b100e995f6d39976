"""The cache folder: one rename, damage is noticed, two builders do not disturb each other."""

import json
import os
import threading
from pathlib import Path

import pytest
import torch

from conduit_kv.embedded import build, parts
from conduit_kv.errors import ModelError


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """ensure_built with a small file in the place of the real conversion."""
    calls = []

    def write(found, adapter, folder, progress) -> None:
        calls.append(folder)
        (folder / "model.bin").write_bytes(b"weights " * 100)
        digests = {"model.bin": parts.file_digest(folder / "model.bin")}
        manifest = {"format": build.FORMAT_VERSION, "files": digests}
        (folder / build.MANIFEST).write_text(json.dumps(manifest))

    here = Path(__file__)
    monkeypatch.setattr(build, "_write", write)
    monkeypatch.setattr(build, "check_parts", lambda: parts.Parts(here, here, "a", "b"))
    adapter = tmp_path / "adapter.safetensors"
    adapter.write_bytes(b"one")

    def run() -> Path:
        return build.ensure_built(tmp_path / "cache", progress=False, adapter=adapter)

    run.calls, run.adapter, run.cache = calls, adapter, tmp_path / "cache"
    return run


def test_built_once(quick) -> None:
    folder = quick()
    assert quick() == folder
    assert len(quick.calls) == 1
    assert os.listdir(quick.cache) == [folder.name]


def test_another_adapter_is_another_folder(quick) -> None:
    folder = quick()
    quick.adapter.write_bytes(b"two")
    assert quick() != folder


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest", "format", "empty"])
def test_damage_is_rebuilt(quick, damage: str) -> None:
    folder = quick()
    file, manifest = folder / "model.bin", folder / build.MANIFEST
    if damage == "flip":
        data = bytearray(file.read_bytes())
        data[50] ^= 1
        file.write_bytes(data)
    elif damage == "truncate":
        file.write_bytes(file.read_bytes()[:100])
    elif damage == "remove":
        file.unlink()
    elif damage == "manifest":
        manifest.write_text("{")
    elif damage == "format":
        manifest.write_text(json.dumps({"format": 0, "files": {}}))
    else:
        file.unlink()
        manifest.unlink()
    assert not build.is_intact(folder)
    assert quick() == folder
    assert build.is_intact(folder)
    assert os.listdir(quick.cache) == [folder.name]


def test_killed_while_writing_leaves_no_model(quick, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(found, adapter, folder, progress) -> None:
        (folder / "model.bin").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(build, "_write", killed)
        with pytest.raises(KeyboardInterrupt):
            quick()
    assert os.listdir(quick.cache) == []
    # A kill that nothing can catch leaves the temporary folder, which is swept when it is old.
    left = quick.cache / ".build-1-x"
    left.mkdir()
    os.utime(left, (0, 0))
    folder = quick()
    assert os.listdir(quick.cache) == [folder.name]


def test_two_builders_at_once(quick) -> None:
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(quick())) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(results)) == 1 and len(results) == 6
    assert build.is_intact(results[0])
    assert os.listdir(quick.cache) == [results[0].name]


def test_unwritable_cache_is_a_model_error(quick) -> None:
    (quick.cache).write_text("a file is in the way")
    with pytest.raises(ModelError, match="cache_dir"):
        quick()


def test_missing_adapter_is_a_model_error(quick) -> None:
    quick.adapter.unlink()
    with pytest.raises(ModelError, match="reinstall"):
        quick()


def test_missing_part_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="conduit-kv setup embedded"):
        parts.check_parts()


def test_another_part_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "CNN_SHA256", "0" * 64)
    with pytest.raises(ModelError, match="conduit-kv setup embedded"):
        parts.check_parts()


def test_requirements_are_pinned_with_hashes() -> None:
    text = parts.requirements_path().read_text()
    pins = [line for line in text.splitlines() if "==" in line]
    assert len(pins) == text.count("--hash=sha256:") == 5


def test_adapter_is_small_and_documented() -> None:
    from safetensors import safe_open

    assert build.adapter_path().stat().st_size <= 16_000_000
    with safe_open(str(build.adapter_path()), framework="pt") as file:
        metadata = file.metadata()
    assert {"seed", "steps", "data_version", "rank", "alpha"} <= set(metadata)


def test_folding_batch_norms_changes_nothing() -> None:
    from torch import nn

    from conduit_kv.embedded.tower import fold_state_dict

    torch.manual_seed(0)
    source = torch.load(parts.cnn_path(), weights_only=True)
    folded = fold_state_dict(source)
    norm = nn.BatchNorm2d(32, eps=1e-3).eval()
    norm.load_state_dict(
        {
            key.removeprefix("_bn0."): value
            for key, value in source.items()
            if key.startswith("_bn0.")
        }
    )
    pixels = torch.randn(1, 3, 9, 9)
    plain = norm(nn.functional.conv2d(pixels, source["_conv_stem.weight"]))
    ours = nn.functional.conv2d(pixels, folded["stem.weight"], folded["stem.bias"])
    torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-4)


def test_tower_does_not_depend_on_mode_or_batch() -> None:
    from conduit_kv.embedded import ConduitCnnConfig, ConduitCnnModel

    torch.manual_seed(0)
    tower = ConduitCnnModel(ConduitCnnConfig(hidden_size=32))
    pixels = torch.randn(3, 3, 224, 224)
    with torch.no_grad():
        out = tower.train()(pixels).hidden_states[-1]
        alone = tower.eval()(pixels[1:2]).last_hidden_state
    assert out.shape == (3, 196, 32)
    torch.testing.assert_close(out[1:2], alone, atol=1e-5, rtol=1e-4)


def test_exported_adapter_can_be_trained_on(tmp_path: Path) -> None:
    from types import SimpleNamespace

    from conduit_kv.embedded.train import Eyes, export, load_adapter

    generator = torch.Generator().manual_seed(0)
    eyes = Eyes(592, 24, generator)
    eyes.mean.normal_(generator=generator)
    eyes.deviation.uniform_(1, 3, generator=generator)
    lora = torch.nn.ParameterDict({"0_q_a": torch.randn(4, 8), "0_q_b": torch.randn(8, 4)})
    path = tmp_path / "adapter.safetensors"
    export(SimpleNamespace(eyes=eyes, llama=SimpleNamespace(lora=lora)), path, {"seed": "0"})

    again = Eyes(592, 24, torch.Generator().manual_seed(1))
    again.mean.fill_(0.5)
    again.deviation.fill_(2.0)
    empty = torch.nn.ParameterDict({name: torch.zeros_like(value) for name, value in lora.items()})
    load_adapter(again, empty, path)
    features = torch.randn(1, 196, 592, generator=generator)
    with torch.no_grad():
        torch.testing.assert_close(again(features), eyes(features), atol=0.03, rtol=0.03)
    for name, value in lora.items():
        torch.testing.assert_close(empty[name], value, atol=0.02, rtol=0.01)
