"""What all tests share."""

from __future__ import annotations

import os

import numpy as np
import pytest


def pytest_runtest_setup(item):
    """Skip GPU tests where there is no GPU, unless KVBM_REQUIRE_GPU says that there has to be one."""
    if item.get_closest_marker("gpu") is None or os.environ.get("KVBM_REQUIRE_GPU"):
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
