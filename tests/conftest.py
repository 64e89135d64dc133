"""What all tests share."""

from __future__ import annotations

import os

import numpy as np
import pytest

from gpu_support import is_emulated


def pytest_runtest_setup(item):
    """Skip GPU tests where there is no GPU, unless KVBM_REQUIRE_GPU says that there has to be one.

    An emulated GPU is one, except for tests that say ``emulated=False``.
    """
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return
    if not marker.kwargs.get("emulated", True) and is_emulated():
        pytest.skip("needs more than an emulated GPU")
    if os.environ.get("KVBM_REQUIRE_GPU"):
        return
    import kvbm_kernels

    if not kvbm_kernels.build_info().devices:
        pytest.skip("no CUDA device")


@pytest.fixture
def rng():
    """Random numbers, the same in every run."""
    return np.random.default_rng(20)


@pytest.fixture
def torch():
    """PyTorch; the test is skipped where it is not installed."""
    return pytest.importorskip("torch")


@pytest.fixture
def cupy():
    """CuPy; the test is skipped where it is not installed."""
    return pytest.importorskip("cupy")


@pytest.fixture
def idle_cuda(torch):
    """PyTorch's CUDA, idle before the test and after."""
    torch.cuda.synchronize()
    yield
    torch.cuda.synchronize()
