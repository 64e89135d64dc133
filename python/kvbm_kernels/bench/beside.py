"""What a transfer and a compute kernel on another stream do to each other."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

from kvbm_kernels.bench.machine import Call, CudaMachine

KERNELS: dict[str, Callable[[CudaMachine], Call]] = {
    # 8192^3 products of 16-bit floats, as the feed-forward layers of a large model are.
    "gemm": lambda machine: machine.product(8192),
    # 1 GB read and written: what decoding is bound by.
    "memory": lambda machine: machine.sweep(1 << 30),
}
_WARMUP, _COUNT, _SAMPLES = 20, 50, 3
# One side is to outlast the other by so much; a doubling of it is tried as often when it does not.
_LONGER, _TRIES = 1.5, 5


def run_beside(machine: CudaMachine, kernel: str, transfer: Call, transfer_ms: float) -> dict[str, Any]:
    """Times of the kernel and of a transfer, alone and each while the other runs.

    ``transfer_ms`` is what a transfer takes alone. A time beside the other counts only if the other was still running
    at its end; ``overlapped`` says whether that was so.
    """
    compute = KERNELS[kernel](machine)
    model, mover = machine.other_stream(), machine.stream
    machine.synchronize()
    _timed(machine, model, compute, _WARMUP)
    compute_ms = statistics.median(_timed(machine, model, compute, _COUNT) for _ in range(_SAMPLES))
    compute_beside, held = _while_other_runs(
        machine, (model, compute, _COUNT), (mover, transfer), compute_ms * _COUNT / transfer_ms
    )
    # As long a look at the transfer as at the kernel.
    count = max(1, round(compute_ms * _COUNT / transfer_ms))
    transfer_beside, outlasted = _while_other_runs(
        machine, (mover, transfer, count), (model, compute), transfer_ms * count / compute_ms
    )
    return {
        "kernel": kernel,
        "compute_alone_ms": compute_ms,
        "compute_beside_ms": compute_beside,
        "compute_slowdown": compute_beside / compute_ms,
        "transfer_alone_ms": transfer_ms,
        "transfer_beside_ms": transfer_beside,
        "transfer_slowdown": transfer_beside / transfer_ms,
        "overlapped": held and outlasted,
    }


def _timed(machine: CudaMachine, stream: Any, call: Call, count: int) -> float:
    """Milliseconds a call."""
    with machine.on(stream):
        begin = machine.event(stream)
        for _ in range(count):
            call()
        end = machine.event(stream)
    return 1e3 * machine.elapsed(begin, end) / count


def _while_other_runs(
    machine: CudaMachine, timed: tuple[Any, Call, int], other: tuple[Any, Call], matching: float
) -> tuple[float, bool]:
    """Milliseconds a timed call while the other runs, and whether the other did to the end.

    ``matching`` calls of the other take as long as the timed ones, when each is alone.
    """
    stream, call, count = timed
    longer = _LONGER
    for _ in range(_TRIES):
        with machine.on(other[0]):
            other[1]()
            for _ in range(math.ceil(longer * matching)):
                other[1]()
            end = machine.event(other[0])
        milliseconds = _timed(machine, stream, call, count)
        still_running = not machine.has_passed(end)
        machine.synchronize()
        if still_running:
            break
        longer *= 2
    return milliseconds, still_running
