"""What copying blocks layer by layer costs, as a connector does while the model runs, beside one copy of all layers.

    python3 bench/layers.py [--device cpu|cuda] [--blocks 1 128] [--json FILE]

The blocks of one rank of Llama-3.1-70B at tensor-parallel size 8, of a pool with a tensor for each layer, to universal
blocks and back; on a GPU, on the device and to pinned host memory. A line a case:

    whole      one copy of all layers
    layers     for each layer, both views narrowed to it and copied
    narrowed   the same with views narrowed beforehand

``call`` is the host's time until the last call has returned, divided by the number of calls, in microseconds. On the
CPU that is the copy itself; with one block it is mostly the calls. ``total`` is the time from the first call until all
bytes have arrived, in milliseconds, with the rate in GB/s. All are medians.
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

SHAPE = kk.BlockShape(nl=80, no=2, nh=1, nt=16, hd=128, dtype="bf16")
ROUNDS = 15


class Host:
    """NumPy's arrays: a call returns when the bytes are there."""

    places = ("host",)

    def __init__(self) -> None:
        self.name = platform.processor() or platform.machine()
        self.random = np.random.default_rng(0)

    def filled(self, shape: tuple[int, ...], _: str) -> Any:
        return self.random.integers(0, 1 << 16, shape, dtype=np.uint16)

    def equal(self, a: Any, b: Any) -> bool:
        return bool(np.array_equal(a, b))

    def wait(self) -> None:
        """There is nothing to wait for."""


class Cuda:
    """PyTorch's tensors on the current GPU, and pinned ones of the host."""

    places = ("device", "pinned")

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.name = torch.cuda.get_device_name()

    def filled(self, shape: tuple[int, ...], place: str) -> Any:
        # Integers hold the bits of bf16.
        tensor = self.torch.randint(-(1 << 15), 1 << 15, shape, dtype=self.torch.int16, device="cuda")
        return tensor.cpu().pin_memory() if place == "pinned" else tensor

    def equal(self, a: Any, b: Any) -> bool:
        return bool(self.torch.equal(a.cpu(), b.cpu()))

    def wait(self) -> None:
        self.torch.cuda.synchronize()


def measure(device: Host | Cuda, work: Callable[[], int]) -> tuple[float, float]:
    """Seconds a call until the last has returned, and seconds until the bytes have arrived."""
    calls, totals = [], []
    for _ in range(ROUNDS + 1):
        device.wait()
        start = time.perf_counter()
        count = work()
        returned = time.perf_counter()
        device.wait()
        totals.append(time.perf_counter() - start)
        calls.append((returned - start) / count)
    # The first round touches the memory, and fills what is kept.
    return statistics.median(calls[1:]), statistics.median(totals[1:])


def cases(dst: kk.View, src: kk.View, ids: Any, into_pool: bool) -> dict[str, Callable[[], int]]:
    """The ways to copy; each picks the blocks of the pool anew, as for a request that has just finished."""

    def picked() -> tuple[kk.View, kk.View]:
        return (dst[ids], src) if into_pool else (dst, src[ids])

    def whole() -> int:
        kk.copy_blocks(*picked())
        return 1

    def layers() -> int:
        to, of = picked()
        for i in range(SHAPE.nl):
            kk.copy_blocks(to.layers(i, i + 1), of.layers(i, i + 1))
        return SHAPE.nl

    to, of = picked()
    parts = [(to.layers(i, i + 1), of.layers(i, i + 1)) for i in range(SHAPE.nl)]

    def narrowed() -> int:
        for part in parts:
            kk.copy_blocks(*part)
        return SHAPE.nl

    return {"whole": whole, "layers": layers, "narrowed": narrowed}


def run(device: Host | Cuda, nb: int, place: str) -> list[dict[str, Any]]:
    nl, no, nh, nt, hd = SHAPE.nl, SHAPE.no, SHAPE.nh, SHAPE.nt, SHAPE.hd
    ids = np.random.default_rng(1).permutation(2 * nb)[:nb]
    engine = "device" if isinstance(device, Cuda) else "host"
    pool = [device.filled((2 * nb, no, nt, nh, hd), engine) for _ in range(nl)]
    saved = device.filled((nb, nh, nl, no, nt, hd), place)
    stack, universal = kk.BlockStack.from_layers(pool, SHAPE), kk.UniversalBlocks(saved, SHAPE)
    nbytes = nb * SHAPE.block_nbytes
    results = []
    for into_pool in (False, True):
        dst, src = (stack, universal) if into_pool else (universal, stack)
        for name, work in cases(dst, src, ids, into_pool).items():
            # Else a case could be right by what an earlier one left. The other side keeps random bits.
            for array in pool if into_pool else [saved]:
                array[...] = 0
            call, total = measure(device, work)
            right = all(device.equal(saved[:, 0, layer], pool[layer][ids][:, :, :, 0]) for layer in range(nl))
            results.append(
                {
                    "blocks": nb,
                    "place": place,
                    "direction": "universal -> pool" if into_pool else "pool -> universal",
                    "case": name,
                    "call_us": call * 1e6,
                    "total_ms": total * 1e3,
                    "gb_per_s": nbytes / total / 1e9,
                    "right": right,
                }
            )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 128])
    parser.add_argument("--json", type=Path, help="write the results to this file too")
    arguments = parser.parse_args()
    device = Cuda() if arguments.device == "cuda" else Host()
    provenance = {
        "kvbm_kernels": kk.__version__,
        "python": platform.python_version(),
        "device": device.name,
        "cpus": os.cpu_count(),
        "blocks of": str(SHAPE),
    }
    print(", ".join(f"{name} {value}" for name, value in provenance.items()))
    print(f"medians of {ROUNDS} rounds\n")
    print(f"{'blocks':>6} {'place':8}{'direction':19}{'case':10}{'call us':>10}{'total ms':>10}{'GB/s':>8}  right")
    results = []
    for nb in arguments.blocks:
        for place in device.places:
            for r in run(device, nb, place):
                results.append(r)
                print(
                    f"{r['blocks']:6} {r['place']:8}{r['direction']:19}{r['case']:10}{r['call_us']:10.1f}"
                    f"{r['total_ms']:10.3f}{r['gb_per_s']:8.1f}  {'yes' if r['right'] else 'NO'}",
                    flush=True,
                )
    if arguments.json:
        arguments.json.write_text(json.dumps({"provenance": provenance, "results": results}, indent=2) + "\n")
    if not all(r["right"] for r in results):
        raise SystemExit("wrong results")


if __name__ == "__main__":
    main()
