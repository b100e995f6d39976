"""The Triton kernel, run by Triton's interpreter on the CPU, against plain PyTorch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import torch
from conduit_kv.kernels import gpu
from tests.cache.test_cpu_kernel import pair, slow

CASES = [
    (2, 70, 32, 32, 2, 3), (3, 40, 64, 32, 1, 2), (4, 130, 16, 16, 2, 1),
    (8, 33, 32, 64, 1, 7), (2, 300, 64, 64, 1, 4), (3, 65, 16, 16, 1, 3),
]
for case in CASES:
    store, query = pair(*case)
    index = torch.arange(case[1], dtype=torch.int32)
    index[::7] = -1
    output, lse = gpu.decode(
        query[0, :, 0], store.keys, store.key_scales, store.values, store.value_scales, index,
        store.bits, store.widths[1], 0.2,
    )
    wanted, sums = slow(store, query, index, 0.2)
    error = float((output - wanted).abs().max()), float((lse - sums).abs().max())
    print(case, error)
    assert max(error) < 2e-5, (case, error)
print("all equal")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_equals_attention_over_the_numbers():
    """In a process of its own: the interpreter is chosen before Triton is imported."""
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "all equal" in found.stdout
