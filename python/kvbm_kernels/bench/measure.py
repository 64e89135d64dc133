"""How one test is measured and checked."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kvbm_kernels.bench.backends import Prepared, Waived, is_not_supported, prepare
from kvbm_kernels.bench.beside import run_beside
from kvbm_kernels.bench.cases import DIRECTIONS, Case
from kvbm_kernels.bench.machine import Call, CudaMachine, Machine
from kvbm_kernels.bench.results import Result, Timing
from kvbm_kernels.bench.sides import Buffers
from kvbm_kernels.errors import KvbmError

# How many times the size of the cache the sets of buffers have together, read and written: what is aimed at, and what
# is enough. Data for which so many sets are not enough is measured in one set, from the cache.
_CACHES, _ENOUGH = 7, 2
_MOST_SETS = 64
# A turn through fewer sets is repeated until a sample has so many calls, unless too few samples would be left.
_CALLS, _SAMPLES = 4, 9

Tick = Callable[[float], object]


class Effort(NamedTuple):
    """How often a test is called."""

    warmup: int
    iters: int


class Turns(NamedTuple):
    """Samples, in milliseconds a call."""

    case_ms: list[float]
    copy_ms: list[float]
    calls: int
    """How many calls a sample is."""
    queued_ahead: bool
    """Whether in each sample of the test all calls were queued before the first ran."""


class Wrong(Exception):  # noqa: N818 - it is a finding
    """A byte that is not what it should be."""


class Bench:
    """Measures tests one after the other, and keeps memory from one to the next where it fits."""

    def __init__(self, effort: Effort, machine_for: Callable[[str], Machine]) -> None:
        """``machine_for`` gives the machine of a direction, or raises LookupError."""
        self.effort = effort
        self._machine_for = machine_for
        self._kept: tuple[Any, list[Buffers]] | None = None

    def run(self, case: Case, tick: Tick) -> Result:
        """Measure and check a test. ``tick`` is called with the part of the work just done; all parts make 1.

        Anything that keeps it from being measured is in the result, but KeyboardInterrupt.
        """
        try:
            machine = self._machine_for(case.direction)
        except LookupError as error:
            return Result(case, "waived", str(error))
        try:
            return self._measure(case, machine, tick)
        except Waived as reason:
            return Result(case, "waived", str(reason))
        except Wrong as difference:
            return Result(case, "wrong", str(difference))
        except (KvbmError, RuntimeError, MemoryError) as error:
            if machine.is_out_of_memory(error):
                self._forget()
                machine.release()
                return Result(case, "waived", f"out of memory: {_one_line(error)}")
            if is_not_supported(error):
                return Result(case, "waived", f"not supported here: {_one_line(error)}")
            return Result(case, "failed", f"{type(error).__name__}: {_one_line(error)}")

    def _measure(self, case: Case, machine: Machine, tick: Tick) -> Result:
        if case.beside and not isinstance(machine, CudaMachine):
            raise Waived("--beside runs a kernel on the GPU, and h2h uses none")
        if case.baseline == "permute" and case.direction not in ("d2d", "h2h"):
            raise Waived("the array library permutes inside one memory: d2d or h2h")
        sets = self._buffers(case, machine)
        prepared = [prepare(case.backend, case.pattern, buffers, case.max_sms) for buffers in sets]
        for buffers, ready in zip(sets, prepared, strict=True):
            buffers.dst.spoil()
            ready.call()
            _check(buffers)
        route = prepared[0].route()
        calls = [ready.call for ready in prepared]
        permutes = case.baseline == "permute"
        copies: list[Call] = [buffers.permute if permutes else buffers.copy for buffers in sets]
        host_seconds = machine.host_seconds(calls[0])
        turns = self._in_turns(machine, calls, copies, host_seconds, tick)
        # The baseline may have written the same target, so once more.
        sets[0].dst.spoil()
        calls[0]()
        _check(sets[0])
        timing, baseline = (Timing(samples, case.total_bytes) for samples in (turns.case_ms, turns.copy_ms))
        measured = self._facts(case, machine, sets, prepared[0], route, timing)
        # Without a stream a call is all the host's.
        host_ms = timing.median_ms if machine.stream is None else 1e3 * host_seconds
        measured |= {"calls_per_sample": turns.calls, "host_ms": host_ms, "queued_ahead": turns.queued_ahead}
        if case.beside and isinstance(machine, CudaMachine):
            beside = [
                run_beside(machine, case.beside, call, of.median_ms)
                for call, of in ((calls[0], timing), (copies[0], baseline))
            ]
            measured["beside"] = {**beside[0], "baseline": beside[1]}
        name = f"{machine.library.split()[0]} permute" if permutes else machine.copy_name
        return Result(case, "measured", "", timing, baseline, name, measured)

    def _in_turns(
        self, machine: Machine, calls: list[Call], copies: list[Call], host_seconds: float, tick: Tick
    ) -> Turns:
        """Sample a test and its baseline, which take turns."""
        warmup, iters = self.effort
        for group in (calls, copies):
            for i in range(warmup):
                group[i % len(group)]()
        machine.synchronize()
        wanted = max(1, min(_CALLS, iters // _SAMPLES))
        rounds = max(1, wanted // len(calls))
        samples = max(min(iters, _SAMPLES), math.ceil(iters / (rounds * len(calls))))
        times: tuple[list[float], list[float]] = ([], [])
        queued = True
        for _ in range(samples):
            for kept, group in zip(times, (calls, copies), strict=True):
                sample = machine.sample(group, rounds, host_seconds)
                kept.append(1e3 * sample.seconds)
                queued = queued and (sample.queued_ahead or group is copies)
            tick(1 / samples)
        return Turns(*times, rounds * len(calls), queued)

    def _buffers(self, case: Case, machine: Machine) -> list[Buffers]:
        key = (machine, case.shape, case.num_blocks, case.pattern, case.direction)
        if self._kept is None or self._kept[0] != key:
            self._forget()
            machine.release()
            random = np.random.default_rng(0)
            self._kept = (
                key,
                [
                    Buffers(machine, case.pattern, case.shape, case.num_blocks, DIRECTIONS[case.direction], random)
                    for _ in range(_sets(2 * case.total_bytes, machine.cache_nbytes))
                ],
            )
        return self._kept[1]

    def _forget(self) -> None:
        self._kept = None

    def _facts(
        self,
        case: Case,
        machine: Machine,
        sets: list[Buffers],
        prepared: Prepared,
        route: tuple[str, ...],
        timing: Timing,
    ) -> dict[str, Any]:
        inside = case.direction in ("d2d", "h2h")
        working_set = 2 * case.total_bytes * len(sets)
        return {
            # What the memory moves: inside one, each byte is read and written.
            "traffic_gbps": timing.bandwidth_gbps * (2 if inside else 1),
            "function": prepared.function,
            "route": list(route),
            "sets": len(sets),
            "working_set_bytes": working_set,
            "cache_bytes": machine.cache_nbytes,
            "cached": working_set < _ENOUGH * machine.cache_nbytes,
            "checked_bytes": case.total_bytes * (len(sets) + 1),
        }


def _sets(nbytes: int, cache_nbytes: int) -> int:
    """How many sets of so many bytes, so that what was just written is not read from the cache."""
    if _MOST_SETS * nbytes < _ENOUGH * cache_nbytes:
        return 1
    return min(_MOST_SETS, math.ceil(_CACHES * cache_nbytes / nbytes))


def _check(buffers: Buffers) -> None:
    difference = buffers.first_difference()
    if difference is not None:
        raise Wrong(difference)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
