"""CUDA errors of others in the same thread, beside the Python package and its own."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import numpy as np
import pytest

import kvbm_kernels as kk
import reference
from gpu_arrays import code_of, make, place
from kinds import views
from kvbm_kernels import lifetime

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("idle_cuda")]


@pytest.fixture
def cudart(torch):
    """The CUDA runtime that PyTorch uses, with the error it remembers for this thread cleared before and after."""
    found = re.findall(r"(/\S*libcudart\.so\S*)", Path("/proc/self/maps").read_text())
    if not found:
        pytest.skip("PyTorch's CUDA runtime is not a library of its own")
    runtime = ctypes.CDLL(found[0])
    runtime.cudaGetLastError()
    yield runtime
    runtime.cudaGetLastError()


class TestErrorsOfOthers:
    def test_they_are_neither_reported_nor_swallowed(self, torch, cudart, rng):
        kv, shape = make(rng)
        where = place("torch", "bfloat16")
        src, _ = views(kv, shape, *where)["NHD"]
        dst, read_back = views(np.zeros_like(kv), shape, *where)["universal"]
        staging = place("torch pinned").put(np.zeros(64, np.uint8))
        lists = [staging], [torch.ones(64, dtype=torch.uint8, device="cuda")]
        torch.cuda.synchronize()
        lifetime.let_go()
        invalid_device = cudart.cudaSetDevice(9999)
        assert invalid_device
        assert cudart.cudaPeekAtLastError() == invalid_device
        kk.copy_blocks(dst, src)
        kk.vectorized_copy(*lists)
        kk.build_info()
        assert cudart.cudaGetLastError() == invalid_device
        torch.cuda.synchronize()
        assert staging.all()
        reference.assert_same_bytes(read_back(), kv)

    def test_ours_do_not_stay_behind(self, torch, cudart):
        src, dst = (torch.zeros(2, 64, dtype=torch.uint8, device="cuda") for _ in range(2))
        with pytest.raises(kk.KvbmError):
            kk.vectorized_copy(list(dst), [np.zeros(64, np.uint8)] * 2)
        assert code_of(lambda: kk.memcpy_batch(list(dst), list(src), mode="batch", stream=0)) in (0, 801)
        assert cudart.cudaPeekAtLastError() == 0
