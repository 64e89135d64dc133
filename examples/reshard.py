"""The life of a KV cache at the block shape of Llama-3.1-8B: saved, re-sharded, and brought back.

Two tensor-parallel ranks hold their heads in NHD blocks, as an engine allocates them: a tensor for each layer. The
blocks are saved as universal blocks, loaded by four ranks in HND, saved again, and loaded by the two ranks into other
blocks of their pools. Every byte is compared with where it came from.

    python examples/reshard.py [--blocks 64] [--device cpu|cuda]

On the CPU it needs NumPy alone. On a GPU, used where there is one and the library is built for it, it needs PyTorch.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import kvbm_kernels as kk

# Llama-3.1-8B: 32 layers, K and V, 8 KV heads of 128, bf16; 16 tokens a block.
SHAPE = kk.BlockShape(nl=32, no=2, nh=8, nt=16, hd=128, dtype="bf16")
ROUNDS = 5


class Host:
    """Arrays of NumPy, moved by the host engine. bf16 as its bits, in uint16."""

    name = "host memory, host engine"
    plain = "plain memcpy, as many threads"

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.threads = len(os.sched_getaffinity(0))
        self.pool = ThreadPoolExecutor(self.threads)

    def filled(self, *shape: int) -> Any:
        return self.random.integers(0, 1 << 16, shape, dtype=np.uint16)

    def zeros(self, *shape: int) -> Any:
        # Not np.zeros: its pages would first be touched, and paid for, by the copy that is timed.
        return np.full(shape, 0, dtype=np.uint16)

    def seconds(self, work: Callable[[], object]) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def memcpy(self, dst: Any, src: Any) -> None:
        parts = zip(np.array_split(dst, self.threads), np.array_split(src, self.threads), strict=True)
        list(self.pool.map(lambda part: np.copyto(*part), parts))

    def equal(self, a: Any, b: Any) -> bool:
        return bool(np.array_equal(a, b))


class Cuda:
    """Tensors of PyTorch on the current GPU."""

    plain = "plain copy on the device"

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.name = f"{torch.cuda.get_device_name()}, CUDA engine"

    def filled(self, *shape: int) -> Any:
        return self.torch.randint(-(1 << 15), 1 << 15, shape, dtype=self.torch.int16, device="cuda")

    def zeros(self, *shape: int) -> Any:
        return self.torch.zeros(shape, dtype=self.torch.int16, device="cuda")

    def seconds(self, work: Callable[[], object]) -> float:
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def memcpy(self, dst: Any, src: Any) -> None:
        dst.copy_(src)

    def equal(self, a: Any, b: Any) -> bool:
        return bool(self.torch.equal(a, b))


def choose_device(asked: str | None) -> Host | Cuda:
    if asked != "cpu" and not kk.is_stub_build():
        try:
            import torch
        except ImportError:
            torch = None
        if torch is not None and torch.cuda.is_available():
            return Cuda(torch)
    if asked == "cuda":
        sys.exit("reshard: --device cuda needs a GPU, PyTorch, and a library built with CUDA")
    return Host()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=64, help="blocks to move (default 64: 1,024 tokens, 128 MiB)")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where it can be used, else cpu")
    arguments = parser.parse_args()
    if arguments.blocks < 1:
        parser.error("--blocks: expected 1 or more")
    device = choose_device(arguments.device)
    nb = arguments.blocks

    nl, no, nh, nt, hd = SHAPE.nl, SHAPE.no, SHAPE.nh, SHAPE.nt, SHAPE.hd
    total = nb * SHAPE.block_nbytes

    # A pool twice as large as the sequence, which lies in it in shuffled blocks.
    source_ids, target_ids = np.split(np.random.default_rng(1).permutation(2 * nb), 2)
    two_ranks = [[device.filled(2 * nb, no, nt, nh // 2, hd) for _ in range(nl)] for _ in range(2)]
    four_ranks = [[device.zeros(nb, no, nh // 4, nt, hd) for _ in range(nl)] for _ in range(4)]
    saved = device.zeros(nb, nh, nl, no, nt, hd)
    saved_again = device.zeros(nb, nh, nl, no, nt, hd)

    def rank_shape(size: int) -> kk.BlockShape:
        return kk.BlockShape(nl=nl, no=no, nh=nh // size, nt=nt, hd=hd, dtype="bf16")

    nhd = [kk.BlockStack.from_layers(layers, rank_shape(2), axes="bothd") for layers in two_ranks]
    hnd = [kk.BlockStack.from_layers(layers, rank_shape(4), axes="bohtd") for layers in four_ranks]
    first, second = kk.UniversalBlocks(saved, SHAPE), kk.UniversalBlocks(saved_again, SHAPE)

    # A universal block holds its heads one after the other, so a rank's part of it is a slice.
    steps: list[tuple[str, Callable[[], None]]] = [
        ("2 ranks, NHD -> universal", lambda: copy_all([(first.shard(r, 2), nhd[r][source_ids]) for r in range(2)])),
        ("universal -> 4 ranks, HND", lambda: copy_all([(hnd[r], first.shard(r, 4)) for r in range(4)])),
        ("4 ranks, HND -> universal", lambda: copy_all([(second.shard(r, 4), hnd[r]) for r in range(4)])),
        ("universal -> 2 ranks, NHD", lambda: copy_all([(nhd[r][target_ids], second.shard(r, 2)) for r in range(2)])),
    ]
    plain_dst = device.zeros(total // 2)
    plain_src = saved.reshape(-1)

    print(f"kvbm_kernels {kk.__version__}, {device.name}")
    print(f"{nb} blocks of {SHAPE}: {nb * nt} tokens, {total / 1e6:.1f} MB")
    times: dict[str, list[float]] = {name: [] for name, _ in steps}
    plain: list[float] = []
    for _ in range(ROUNDS):
        plain.append(device.seconds(lambda: device.memcpy(plain_dst, plain_src)))
        for name, work in steps:
            times[name].append(device.seconds(work))

    plain_seconds = statistics.median(plain)
    print(f"{'':28}{'GB/s':>8}{'of plain':>10}")
    print(f"{device.plain:28}{total / plain_seconds / 1e9:8.1f}")
    for name, seconds in times.items():
        median = statistics.median(seconds)
        print(f"{name:28}{total / median / 1e9:8.1f}{plain_seconds / median:10.2f}")

    if not device.equal(saved, saved_again):
        sys.exit("reshard: the universal blocks differ after the round through four ranks")
    for rank, layers in enumerate(two_ranks):
        for layer, tensor in enumerate(layers):
            if not device.equal(tensor[target_ids], tensor[source_ids]):
                sys.exit(f"reshard: rank {rank}, layer {layer}: the blocks that came back differ")
    print(f"verified: {total} bytes came back as they were, through 2 and 4 ranks")


def copy_all(pairs: list[tuple[kk.View, kk.View]]) -> None:
    for dst, src in pairs:
        kk.copy_blocks(dst, src)


if __name__ == "__main__":
    main()
