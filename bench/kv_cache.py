"""Speed of the KV cache on the host: the allocator, an append of one token, a pool, and for comparison a copy.

    python3 bench/kv_cache.py [--device cuda] [--json FILE]

A line a case: the median and the fastest of some rounds, the time to stay under, and whether what came out was right.
The memory of the pools appended to was touched before, as it is after the first minutes of an engine.

With --device cuda, caches of PyTorch's arrays there, and the time until calls return: what a step costs the host. The
GPU works on meanwhile; how fast it moves the rows is bench/gpu_rows.py's matter.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import kvbm_kernels as kk

ROUNDS = 15
# How far numbers up to 1 may be from what was appended.
TOLERANCES = {"bf16": 0.0, "fp16": 0.0, "int8": 0.5 / 127 * 1.01, "fp8": 0.5 / 8 * 1.01}
# Of a model on one GPU.
GPU_LAYERS, BATCH = 80, 64


class Case:
    """What is timed, how often in a round, what it may take at most, and whether it was right."""

    def __init__(
        self,
        name: str,
        call: Callable[[], Any],
        repeats: int,
        unit: str,
        limit: float | None,
        right: Callable[[], bool],
        settle: Callable[[], object] = lambda: None,
    ) -> None:
        self.name, self.call, self.repeats, self.unit, self.limit, self.right = name, call, repeats, unit, limit, right
        # Before each round and at the end: wait for what was begun.
        self.settle = settle

    def measure(self) -> dict[str, Any]:
        """Times in the unit, a call."""
        scale = {"ms": 1e3, "us": 1e6}[self.unit] / self.repeats
        times = []
        for _ in range(ROUNDS):
            self.settle()
            start = time.perf_counter()
            for _ in range(self.repeats):
                self.call()
            times.append((time.perf_counter() - start) * scale)
        self.settle()
        median = statistics.median(times)
        return {
            "case": self.name,
            "median": median,
            "fastest": min(times),
            "unit": self.unit,
            "limit": self.limit,
            "met": self.limit is None or median < self.limit,
            "right": self.right(),
        }


def pairs() -> Case:
    allocator = kk.BlockAllocator(100_000)

    def call() -> None:
        for _ in range(10_000):
            allocator.free(allocator.allocate(16))

    return Case("10,000 allocate/free pairs of 16 blocks", call, 1, "ms", 50, lambda: allocator.num_free == 100_000)


def build() -> Case:
    made: list[kk.BlockPool] = []

    def call() -> None:
        made[:] = [kk.BlockPool(100_000, 16, 1, 8, 128, kv_dtype=kk.KvFp16)]

    return Case("build a pool of 100,000 blocks", call, 1, "ms", 50, lambda: made[0].num_free == 100_000)


def touched_pool(num_layers: int, layout: str, kv_dtype: type[kk.KvDtype] = kk.KvFp16) -> kk.BlockPool:
    pool = kk.BlockPool(256, 16, num_layers, 8, 128, kv_dtype=kv_dtype, layout=layout)
    pool.k[...] = 0
    pool.v[...] = 0
    return pool


def append(layout: str, n: int, limit: float | None, kv_dtype: type[kk.KvDtype] = kk.KvFp16) -> Case:
    pool = touched_pool(32, layout, kv_dtype)
    cache = kk.KvCache.paged(pool)
    k, v = (np.random.default_rng(seed).random((32, n, 8, 128)).astype(np.float16) for seed in (0, 1))

    def call() -> None:
        if len(cache) + n > cache.capacity:
            cache.truncate(0)
        cache.append(k, v)

    def right() -> bool:
        last = slice(len(cache) - n, len(cache))
        tolerance = TOLERANCES[kv_dtype.NAME]
        return all(np.abs(a[:, last] - b).max() <= tolerance for a, b in zip(cache.gather(), (k, v), strict=True))

    name = f"append {n} {'token' if n == 1 else 'tokens'}, 32 layers, {layout}, {kv_dtype.NAME}"
    return Case(name, call, 1000 if n == 1 else 2, "us", limit, right)


def step(layout: str, kv_dtype: type[kk.KvDtype] = kk.KvFp16) -> Case:
    pool = touched_pool(32, layout, kv_dtype)
    caches = [kk.KvCache.paged(pool) for _ in range(16)]
    batch = kk.KvBatch(caches)
    k = np.random.default_rng(0).random((32, 16, 8, 128)).astype(np.float16)

    def call() -> None:
        if len(caches[0]) == 256:
            for cache in caches:
                cache.truncate(0)
        batch.append(k, k)

    def right() -> bool:
        tolerance = TOLERANCES[kv_dtype.NAME]
        return all(np.abs(cache.gather()[1][:, -1] - k[:, i]).max() <= tolerance for i, cache in enumerate(caches))

    return Case(f"a step of 16 sequences, 32 layers, {layout}, {kv_dtype.NAME}", call, 50, "us", None, right)


def gather() -> Case:
    cache = kk.KvCache.paged(touched_pool(32, "HND"))
    k = np.random.default_rng(0).random((32, 1000, 8, 128)).astype(np.float16)
    cache.append(k, k)
    found: list[Any] = []

    def call() -> None:
        found[:] = cache.gather(3)

    return Case("gather 1,000 tokens of a layer, HND", call, 20, "us", None, lambda: np.array_equal(found[1], k[3]))


def copy(n: int) -> Case:
    src = np.random.default_rng(0).random((2, 32, n, 8, 128)).astype(np.float16)
    dst = np.zeros_like(src)
    name = f"for comparison: NumPy copies the bytes of {n} {'token' if n == 1 else 'tokens'}"
    return Case(
        name,
        lambda: np.copyto(dst, src),
        1000 if n == 1 else 5,
        "us",
        None,
        lambda: np.array_equal(dst, src),
    )


def on_gpu() -> list[Callable[[], Case]]:
    """Appends of one token, and steps of many sequences: in one call, in three, and with the middle one captured."""
    import torch

    def rows(*extents: int) -> Any:
        return torch.rand(*extents, 8, 128, device="cuda").to(torch.bfloat16)

    def append(num_layers: int, kv_dtype: type[kk.KvDtype]) -> Case:
        pool = kk.BlockPool(1024, 16, num_layers, 8, 128, kv_dtype=kv_dtype, arrays="torch", device="cuda")
        cache = kk.KvCache.paged(pool)
        k = rows(num_layers, 1)

        def call() -> None:
            if len(cache) == cache.capacity:
                cache.truncate(0)
            cache.append(k, k)

        def right() -> bool:
            return bool((cache.gather()[0][:, -1:] - k).abs().max() <= TOLERANCES[kv_dtype.NAME])

        name = f"append 1 token, {num_layers} layers, {kv_dtype.NAME}"
        return Case(name, call, 200, "us", None, right, torch.cuda.synchronize)

    def step(how: str, kv_dtype: type[kk.KvDtype]) -> Case:
        pool = kk.BlockPool(BATCH * 20, 16, GPU_LAYERS, 8, 128, kv_dtype=kv_dtype, arrays="torch", device="cuda")
        caches = [kk.KvCache.paged(pool, max_blocks=20) for _ in range(BATCH)]
        batch = kk.KvBatch(caches)
        k = rows(GPU_LAYERS, BATCH)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(GPU_LAYERS):
                batch.write(k[i], k[i], layer=i)

        def call() -> None:
            if len(caches[0]) == 320:
                for cache in caches:
                    cache.truncate(0)
            if how == "append":
                batch.append(k, k)
                return
            batch.reserve()
            if how == "captured":
                graph.replay()
            else:
                for i in range(GPU_LAYERS):
                    batch.write(k[i], k[i], layer=i)
            batch.advance()

        def right() -> bool:
            tolerance = TOLERANCES[kv_dtype.NAME]
            return all((cache.gather()[1][:, -1] - k[:, i]).abs().max() <= tolerance for i, cache in enumerate(caches))

        name = f"a step of {BATCH} sequences, {GPU_LAYERS} layers, {kv_dtype.NAME}, {how}"
        return Case(name, call, 20, "us", None, right, torch.cuda.synchronize)

    return [
        *(lambda kv=kv: append(32, kv) for kv in (kk.KvBf16, kk.KvInt8, kk.KvFp8)),
        *(
            lambda kv=kv, how=how: step(how, kv)
            for kv in (kk.KvBf16, kk.KvInt8)
            for how in ("append", "layer by layer", "captured")
        ),
    ]


def on_host() -> list[Callable[[], Case]]:
    """The allocator, appends, steps and a gather."""
    return [
        pairs,
        build,
        *(lambda lo=lo: append(lo, 1, 100) for lo in ("HND", "NHD")),
        lambda: copy(1),
        *(lambda lo=lo: append(lo, 1000, None) for lo in ("HND", "NHD")),
        lambda: copy(1000),
        *(
            lambda n=n, kv=kv: append("HND", n, 100 if n == 1 else None, kv)
            for kv in (kk.KvInt8, kk.KvFp8)
            for n in (1, 1000)
        ),
        *(lambda lo=lo: step(lo) for lo in ("HND", "NHD")),
        lambda: step("HND", kk.KvInt8),
        gather,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the caches are")
    parser.add_argument("--json", type=Path, help="write the results to this file too")
    arguments = parser.parse_args()
    info = kk.build_info()
    provenance = {
        "kvbm_kernels": info.version,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
    }
    if arguments.device == "cuda":
        import torch

        provenance |= {"torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
    print(", ".join(f"{name} {value}" for name, value in provenance.items()))
    print(f"median and fastest of {ROUNDS} rounds\n")
    print(f"{'':58}{'median':>10}{'fastest':>10}      {'limit':>8}  right")
    results = []
    for make in on_gpu() if arguments.device == "cuda" else on_host():
        r = make().measure()
        results.append(r)
        limit = "" if r["limit"] is None else f"{r['limit']:g} {'met' if r['met'] else 'MISSED'}"
        right = "yes" if r["right"] else "NO"
        print(f"{r['case']:58}{r['median']:10.1f}{r['fastest']:10.1f} {r['unit']}  {limit:>10}  {right}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"provenance": provenance, "results": results}, indent=2) + "\n")
    if not all(r["right"] for r in results):
        raise SystemExit("wrong results")


if __name__ == "__main__":
    main()
