"""CuPy without PyTorch, in a process of its own: what keeps arrays alive is then CuPy's."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

PROGRAM = """
import sys

import cupy, cupyx
import numpy as np

import kvbm_kernels as kk
from kvbm_kernels import lifetime


def held():
    return sum(map(len, lifetime._held.values()))


def spin(stream):
    with stream:
        for _ in range(8):
            big @ big


big = cupy.ones((4096, 4096), np.float32)
cupy.cuda.Device().synchronize()
for stream in (cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream.null, None):
    on = cupy.cuda.get_current_stream() if stream is None else stream
    spin(on)
    on.synchronize()
    numbers = np.random.default_rng(0).integers(0, 255, 1 << 20, np.uint8)
    source = cupyx.empty_pinned(1 << 20, np.uint8)
    source[:] = numbers
    dst = cupy.zeros(1 << 20, np.uint8)
    cupy.cuda.Device().synchronize()
    spin(on)
    kk.vectorized_copy([dst], [source], stream=stream)
    del source
    assert held() == 1, held()
    on.synchronize()
    lifetime.let_go()
    assert held() == 0, held()
    assert (dst.get() == numbers).all()
assert "torch" not in sys.modules
"""


def test_arrays_are_kept_until_the_stream_has_passed():
    pytest.importorskip("cupyx")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
