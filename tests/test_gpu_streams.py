"""Order, capture, threads, errors of others, and sizes past 32 bits."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import reference
from gpu_support import (
    ASYNC,
    AUTO,
    BATCH,
    Memory,
    Shape,
    Stream,
    call,
    check,
    copy_blocks,
    device_table,
    make_view,
    synchronize,
    table,
)

pytestmark = pytest.mark.gpu


def test_order() -> None:
    """A source that is rewritten on the stream right after the call was copied before that, and the copy after it sees
    the new bytes."""
    import torch

    for places in (("cuda", "cuda"), ("cpu", "cuda"), ("cuda", "cpu")):
        src, dst = (torch.zeros(64, 4096, dtype=torch.uint8, device=p, pin_memory=p == "cpu") for p in places)
        out = torch.zeros(64, 4096, dtype=torch.uint8, device="cuda")
        bad = torch.zeros((), dtype=torch.int64, device="cuda")
        stream = torch.cuda.Stream()
        order = np.random.default_rng(0).permutation(64)
        src_table = table(src.data_ptr() + order * 4096)
        dst_table = table(dst.data_ptr() + order * 4096)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for i in range(1000):
                if places[0] == "cuda":
                    src.fill_(i % 251)
                else:
                    stream.synchronize()
                    src.fill_(i % 251)
                check("memcpy_batch", src_table.ctypes.data, dst_table.ctypes.data, 4096, 64, AUTO, stream.cuda_stream)
                out.copy_(dst, non_blocking=True)
                bad += (out != i % 251).sum()
        stream.synchronize()
        assert int(bad) == 0, places


def test_capture_and_replay() -> None:
    """Captured calls replay with the source's new content; a device table is read again at each replay."""
    import torch

    rng = np.random.default_rng(1)
    kv = reference.random_kv(rng, (2, 2, 2, 4, 2, 64), np.uint16)
    nb, nl, no, nt, nh, hd = kv.shape
    chunk = nt * nh * hd * 2
    blocks = [Memory(kv.nbytes).fill(0) for _ in range(2)]
    by_device, by_host, by_batch = (Memory(kv.nbytes).fill(0) for _ in range(3))
    block_table = device_table(blocks[0].address + np.arange(nb * nl * no) * chunk)
    universal_at = np.arange(nb) * (kv.nbytes // nb)
    universal_table = device_table(by_device.address + universal_at)
    src_bases = table(blocks[0].address + np.arange(nb * nl * no) * chunk)
    dst_bases = table(by_host.address + universal_at)
    src_pieces = table(blocks[0].address + np.arange(nb) * (kv.nbytes // nb))
    dst_pieces = table(by_batch.address + universal_at[::-1])
    row = hd * 2
    synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream().cuda_stream
        check(
            "launch_universal_from_block",
            universal_table.address,
            block_table.address,
            nb,
            nh,
            nl,
            no,
            nt,
            hd,
            0,
            0,
            stream,
        )
        copy_blocks(
            make_view(
                dst_bases, None, nb, (1, 0, 0), layer=no * nt * row, outer=nt * row, token=row, head=nl * no * nt * row
            ),
            make_view(src_bases, None, nb, (nl * no, no, 1), token=nh * row, head=row),
            Shape(nl, no, nh, nt, row),
            nb,
            stream,
        )
        check("memcpy_batch", src_pieces.ctypes.data, dst_pieces.ctypes.data, kv.nbytes // nb, nb, AUTO, stream)
        check("memcpy_batch", src_pieces.ctypes.data, dst_pieces.ctypes.data, kv.nbytes // nb, nb, ASYNC, stream)
        assert (
            call("memcpy_batch", src_pieces.ctypes.data, dst_pieces.ctypes.data, kv.nbytes // nb, nb, BATCH, stream)
            != 0
        )
    # What the host tables held is in the graph.
    for bases in (src_bases, dst_bases, src_pieces, dst_pieces):
        bases[:] = 0
    for _ in range(2):
        kv = reference.random_kv(rng, kv.shape, np.uint16)
        stacks = np.array(reference.block_stack(kv, "NHD"))
        blocks[0].write(stacks)
        synchronize()
        graph.replay()
        synchronize()
        expected = reference.universal(kv).reshape(-1).view(np.uint8)
        reference.assert_same_bytes(by_device.read(), expected)
        reference.assert_same_bytes(by_host.read(), expected)
        reference.assert_same_bytes(by_batch.read(), np.ascontiguousarray(stacks[::-1]).reshape(-1).view(np.uint8))
    kv = reference.random_kv(rng, kv.shape, np.uint16)
    blocks[1].write(np.array(reference.block_stack(kv, "NHD")))
    block_table.write(table(blocks[1].address + np.arange(nb * nl * no) * chunk))
    synchronize()
    graph.replay()
    synchronize()
    reference.assert_same_bytes(by_device.read(), reference.universal(kv).reshape(-1).view(np.uint8))


def test_first_call_of_a_process_in_capture() -> None:
    """Nothing has to be warmed up before a capture."""
    program = """
import torch, numpy as np
from gpu_support import check, table
src, dst = torch.arange(64, device="cuda"), torch.zeros(64, dtype=torch.int64, device="cuda")
tables = [table([t.data_ptr(), t.data_ptr() + 256]) for t in (src, dst)]
tables[0] = tables[0][::-1].copy()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    stream = torch.cuda.current_stream().cuda_stream
    check("memcpy_batch", tables[0].ctypes.data, tables[1].ctypes.data, 256, 2, 0, stream)
graph.replay()
torch.cuda.synchronize()
assert torch.equal(dst, torch.roll(src, 32)), dst
"""
    path = str(Path(__file__).parent) + os.pathsep + os.environ.get("PYTHONPATH", "")
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_threads_on_their_own_streams() -> None:
    """Callers on several threads do not disturb each other."""
    failures: list[str] = []

    def work(seed: int) -> None:
        try:
            rng = np.random.default_rng(seed)
            stream = Stream()
            count, nbytes = 50, 4096
            image = rng.integers(0, 256, (count, nbytes), np.uint8)
            src = Memory(image.size).write(image)
            synchronize()
            for _ in range(50):
                dst = Memory(image.size).fill(0)
                synchronize()
                order = rng.permutation(count)
                src_table = table(src.address + order * nbytes)
                dst_table = table(dst.address + np.arange(count) * nbytes)
                check("memcpy_batch", src_table.ctypes.data, dst_table.ctypes.data, nbytes, count, AUTO, stream.handle)
                stream.synchronize()
                reference.assert_same_bytes(dst.read(), image[order].reshape(-1))
        except BaseException as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def test_a_thread_that_never_used_cuda() -> None:
    """The first CUDA call of a thread may be ours."""
    src, dst = Memory(256).fill(7), Memory(256).fill(0)
    synchronize()
    src_table, dst_table = table([src.address, src.address + 128]), table([dst.address + 128, dst.address])
    statuses: list[int] = []
    thread = threading.Thread(
        target=lambda: statuses.append(
            call("memcpy_batch", src_table.ctypes.data, dst_table.ctypes.data, 128, 2, AUTO, 0)
        )
    )
    thread.start()
    thread.join()
    synchronize()
    assert statuses == [0]
    assert (dst.read() == 7).all()


def test_stream_of_another_device() -> None:
    """The stream's device does the work, and the current device stays what it was."""
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with torch.cuda.device(1):
        src = torch.arange(4096, device="cuda:1")
        dst = torch.zeros_like(src)
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
    src_table = table(src.data_ptr() + np.array([0, 8192, 16384, 24576]))
    dst_table = table(dst.data_ptr() + np.array([8192, 0, 24576, 16384]))
    with torch.cuda.device(0):
        check("memcpy_batch", src_table.ctypes.data, dst_table.ctypes.data, 8192, 4, AUTO, stream.cuda_stream)
        assert torch.cuda.current_device() == 0
    stream.synchronize()
    assert torch.equal(dst.view(4, -1)[[1, 0, 3, 2]], src.view(4, -1))


@pytest.mark.parametrize("rows", ["one segment", "strided", "bytes"])
def test_more_than_32_bits(rows: str) -> None:
    """More than 2^31 elements, and offsets past 4 GiB, in one call."""
    import torch

    if rows == "one segment":
        nbytes = (5 << 30) + 7
        src = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
        dst = torch.zeros_like(src)
        src_table, dst_table = device_table([src.data_ptr()]), device_table([dst.data_ptr()])
        synchronize()
        check("launch_vectorized_copy", src_table.address, dst_table.address, nbytes, 1, 0)
        synchronize()
        assert torch.equal(src, dst)
        return
    # nh*nl and nt*hd exchange places through a single base on each side.
    nb, nl, nt, nh, row = (40, 80, 16, 128, 1024) if rows == "strided" else (1, 3, 1 << 15, 1 << 15, 1)
    src = torch.randint(0, 256, (nb, nl, nt, nh, row), dtype=torch.uint8, device="cuda")
    dst = torch.zeros(nb, nh, nl, nt, row, dtype=torch.uint8, device="cuda")
    assert src.numel() > 1 << 31
    src_bases, dst_bases = table([src.data_ptr()]), table([dst.data_ptr()])
    synchronize()
    copy_blocks(
        make_view(dst_bases, None, nb, head=nl * nt * row, layer=nt * row, token=row, block=src[0].numel()),
        make_view(src_bases, None, nb, head=row, token=nh * row, layer=nt * nh * row, block=src[0].numel()),
        Shape(nl, 1, nh, nt, row),
        nb,
    )
    synchronize()
    assert torch.equal(dst.permute(0, 2, 3, 1, 4), src)
