"""A cache that is packed fits where the dense one does not, under a limit that the system sets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import resource, sys
import torch
from conduit_kv.engine.request import RequestCache
from conduit_kv.kernels import cpu
from conduit_kv.layout import Grid, Layout
from conduit_kv.plan import Plan

torch.set_num_threads(1)
LAYERS, HEADS, ROWS, COLUMNS, WIDTH = 20, 4, 96, 64, 64
plan, limit = sys.argv[1], int(sys.argv[2]) << 20
count = ROWS * COLUMNS + 32
layout = Layout.text_only(16).extend(
    Layout.of(torch.ones(ROWS * COLUMNS, dtype=torch.bool), [Grid(1, ROWS, COLUMNS)])
).extend(Layout.text_only(16))
torch.randn(4, 4) @ torch.randn(4, 4)  # what a process maps once
cpu.available()
pages = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (pages + limit, pages + limit))
with torch.inference_mode():
    cache = RequestCache(["full"] * LAYERS, Plan.parse(plan))
    valid = torch.ones(1, count, dtype=torch.bool)
    cache.progress.advance(valid, [layout], [torch.arange(count)[None]])
    if cache.scores_turns:
        cache.take_in(torch.randn(1, count, 8))
        cache.begin()
    try:
        for number in range(LAYERS):
            shape = (1, HEADS, count, WIDTH)
            cache.layers[number].update(torch.randn(shape), torch.randn(shape))
            if cache.scores_turns:
                cache.observe(number, torch.randn(1, HEADS, count, WIDTH), WIDTH**-0.5)
        if cache.scores_turns:
            cache.finish()
    except (RuntimeError, MemoryError) as error:
        print("does not fit:", str(error)[:100])
        sys.exit(3)
allocated = sum(cache.bytes_allocated().values())
print("fits:", allocated)
query = torch.randn(1, HEADS, 1, WIDTH)
cache.progress.step_tokens = torch.tensor([[count]], dtype=torch.int32)
assert bool(torch.isfinite(cache.layers[5].attend(query, 0.1, None)).all())
"""
DENSE_MB = 20 * 2 * 4 * (96 * 64 + 32) * 64 * 4 >> 20
LIMIT_MB = 200
"""Much less than the dense cache, and room for one layer while it is packed."""


def run(plan):
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, plan, str(LIMIT_MB)],
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are Linux's")
def test_it_fits_where_the_dense_cache_does_not():
    dense = run("full")
    assert dense.returncode == 3 and "does not fit" in dense.stdout, dense.stdout + dense.stderr
    # Random K and V would wake the outlier guard, which takes more bits.
    packed = run("windowquant:3.17(tolerance=0)")
    assert packed.returncode == 0 and "fits" in packed.stdout, packed.stdout + packed.stderr
    allocated = int(packed.stdout.split("fits:")[1].split()[0])
    assert allocated < DENSE_MB * 2**20 / 6
