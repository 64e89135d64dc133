"""Copies between two GPUs. Each case has a process of its own, because access between devices stays enabled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gpu_support import AUTO, Options, Shape, check, device_table, library, make_view, table

pytestmark = pytest.mark.gpu

NB, NL, NT, NH, ROW = 5, 3, 16, 8, 256
BLOCK = NL * NT * NH * ROW
SHAPE = Shape(NL, 1, NH, NT, ROW)
CASES = (
    "a copy to the other device",
    "a copy from the other device",
    "both sides elsewhere",
    "captured",
    "tables in device memory",
    "managed memory",
    "a batch",
)


@pytest.mark.parametrize("case", [*CASES, "no access"])
def test_between_two_gpus(case: str) -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    # PyTorch gives memory of these segments to peers only when it copies between them.
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if case == "no access" else {}
    done = subprocess.run(
        [sys.executable, __file__, case],
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def random(device: int) -> object:
    import torch

    return torch.randint(0, 256, (NB * BLOCK,), dtype=torch.uint8, device=device)


def nhd(bases: np.ndarray) -> object:
    return make_view(bases, None, NB, block=BLOCK, layer=NT * NH * ROW, token=NH * ROW, head=ROW)


def universal(bases: np.ndarray) -> object:
    return make_view(bases, None, NB, block=BLOCK, head=NL * NT * ROW, layer=NT * ROW, token=ROW)


def run_case(case: str) -> None:
    import torch

    work = {"a copy from the other device": 1, "both sides elsewhere": 1}.get(case, 0)
    src, dst = random(0), random(1 if case != "both sides elsewhere" else 0)
    for device in (0, 1):
        torch.cuda.synchronize(device)
    expected = src.cpu().view(NB, NL, NT, NH, ROW).permute(0, 3, 1, 2, 4)
    with torch.cuda.device(work):
        stream = torch.cuda.Stream()
    src_bases, dst_bases = table([src.data_ptr()]), table([dst.data_ptr()])

    def convert() -> int:
        return library().kvbm_kernels_copy_blocks(
            universal(dst_bases), nhd(src_bases), SHAPE, NB, Options(16, 0), stream.cuda_stream
        )

    if case == "no access":
        before = dst.cpu()
        assert convert() == 1
        assert library().kvbm_kernels_last_error_message().decode() == (
            "copy_blocks: the destination is memory of device 1, expected memory that the stream's device 0 has "
            "access to"
        )
        torch.cuda.synchronize(0)
        assert torch.equal(dst.cpu(), before)
        return
    if case == "captured":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            assert convert() == 0
        graph.replay()
    elif case == "tables in device memory":
        rows = device_table(src.data_ptr() + np.arange(NB * NL) * (NT * NH * ROW))
        blocks = device_table([dst.data_ptr() + b * BLOCK for b in range(NB)])
        # What device tables name is the caller's to make reachable.
        torch.ones(1, device=0).to(1)
        check("launch_universal_from_block", blocks.address, rows.address, NB, NH, NL, 1, NT, ROW, 7, 0, 0)
    elif case == "managed memory":
        from cuda.bindings import runtime

        status, address = runtime.cudaMallocManaged(NB * BLOCK, 1)
        assert int(status) == 0
        dst_bases[0] = address
        assert convert() == 0
        stream.synchronize()
        assert int(runtime.cudaMemcpy(dst.data_ptr(), address, NB * BLOCK, 4)[0]) == 0
    elif case == "a batch":
        pieces = np.arange(0, NB * BLOCK, 4096)
        src_table, dst_table = table(src.data_ptr() + pieces), table(dst.data_ptr() + pieces[::-1])
        check("memcpy_batch", src_table.ctypes.data, dst_table.ctypes.data, 4096, len(pieces), AUTO, stream.cuda_stream)
        stream.synchronize()
        assert torch.equal(dst.cpu().view(-1, 4096), src.cpu().view(-1, 4096).flip(0))
        return
    else:
        assert convert() == 0
        assert torch.cuda.current_device() == 0
    stream.synchronize()
    torch.cuda.synchronize(0)
    assert torch.equal(dst.cpu().view(expected.shape), expected)


if __name__ == "__main__":
    run_case(sys.argv[1])
