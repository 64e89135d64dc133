"""The one seam to whatever library has the memory: allocation, streams, events, and arrays to check results with.

``HostMachine`` is NumPy. ``cuda_machine()`` is PyTorch or CuPy, whichever is installed. Memory is arrays of bytes in a
place, "device" or "host"; the host memory of a CUDA machine is pinned.
"""

from __future__ import annotations

import os
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvbm_kernels.processor import processor_name

Call = Callable[[], object]

SPOILT = 0xEE
# A spinning kernel holds the stream for as long, so that a sample is queued before any of it runs.
SPIN_SECONDS = (0.004, 0.05)


class Sample(NamedTuple):
    """A timed group of calls."""

    seconds: float
    """Of one call."""
    queued_ahead: bool
    """Whether all calls were queued before the first ran, so that the host's part does not count."""


class Machine(ABC):
    """Memory of one kind of machine, and how time is taken on it."""

    library: str
    """The array library and its version."""
    device: str
    """What does the work."""
    cache_nbytes: int
    """The last-level cache between the memory and what does the work."""
    stream: Any
    """The stream that calls go to, None where there is none."""
    copy_name: str
    """What copy() is."""
    xp: Any
    """The module with the arrays' functions, in NumPy's words."""

    @abstractmethod
    def empty(self, nbytes: int, place: str) -> Any:
        """A flat array of bytes. Raises MemoryError, or what is_out_of_memory() knows."""

    @abstractmethod
    def randomize(self, array: Any) -> None:
        """Fill with random bytes."""

    @abstractmethod
    def copy(self, dst: Any, src: Any) -> None:
        """One plain copy between contiguous arrays, on the stream."""

    @abstractmethod
    def sample(self, calls: Sequence[Call], rounds: int, host_seconds: float) -> Sample:
        """Time ``rounds`` turns through the calls, each of which keeps the host for about host_seconds."""

    def spoil(self, array: Any) -> None:
        """Fill with bytes that nobody takes for right ones."""
        array[...] = SPOILT

    def address(self, array: Any) -> int:
        """Where an array starts."""
        return int(array.data_ptr() if hasattr(array, "data_ptr") else array.ctypes.data)

    def near(self, array: Any) -> Any:
        """The array where its values can be looked at."""
        return array

    def take(self, array: Any, places: npt.NDArray[np.int64]) -> Any:
        """Some of the first dimension, near()."""
        return array[places]

    def put(self, array: Any, places: npt.NDArray[np.int64], values: Any) -> None:
        """Replace some of the first dimension."""
        array[places] = values

    def transposed(self, array: Any, axes: Sequence[int]) -> Any:
        return array.transpose(axes)

    def words(self, array: Any, width: int) -> Any:
        """An array of bytes as integers of as many bytes, as far as the last dimension allows."""
        return array.view(f"i{width}")

    def stacked(self, arrays: Sequence[Any]) -> Any:
        return self.xp.stack(list(arrays))

    def equal(self, one: Any, other: Any) -> bool:
        return bool(self.xp.array_equal(one, other))

    def to_numpy(self, array: Any) -> npt.NDArray[Any]:
        return np.asarray(array)

    def device_visible(self, table: npt.NDArray[np.uint64]) -> Any:
        """A pointer table where the work can read it."""
        return table

    def host_seconds(self, call: Call) -> float:
        """How long a call keeps the host, the median of nine, with nothing queued."""
        times = []
        for _ in range(9):
            self.synchronize()
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        self.synchronize()
        return statistics.median(times)

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all that was started."""

    @abstractmethod
    def release(self) -> None:
        """Give memory that is no longer used back to the system."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError) or "out of memory" in str(error).lower()

    def provenance(self) -> dict[str, Any]:
        """What a reader of the results has to know about this machine."""
        return {"device": self.device, "array_library": self.library, "cache_bytes": self.cache_nbytes}


class HostMachine(Machine):
    """Pageable memory of the host, and its processors."""

    copy_name = "memcpy"
    stream = None
    xp = np

    def __init__(self) -> None:
        self.library = f"NumPy {np.__version__}"
        self.threads = len(os.sched_getaffinity(0))
        self.device = f"{processor_name()}, {self.threads} threads"
        self.cache_nbytes = _last_level_cache()
        self._random = np.random.default_rng()
        self._pool = ThreadPoolExecutor(self.threads)

    def empty(self, nbytes: int, place: str) -> npt.NDArray[np.uint8]:
        check_host_memory(nbytes)
        array = np.empty(nbytes, np.uint8)
        # Else the first who writes would pay for the pages.
        array[:: 1 << 12] = SPOILT
        return array

    def randomize(self, array: Any) -> None:
        flat = array.reshape(-1)
        for start in range(0, flat.size, 1 << 26):
            part = flat[start : start + (1 << 26)]
            words = self._random.integers(0, 1 << 64, part.size // 8 + 1, dtype=np.uint64)
            part[:] = words.view(np.uint8)[: part.size]

    def copy(self, dst: Any, src: Any) -> None:
        """As many threads as the library may use, each with a part of its own of 1 MiB at least."""
        threads = min(self.threads, max(1, dst.nbytes >> 20))
        if threads == 1:
            np.copyto(dst, src)
            return
        parts = zip(np.array_split(dst, threads), np.array_split(src, threads), strict=True)
        list(self._pool.map(lambda part: np.copyto(*part), parts))

    def sample(self, calls: Sequence[Call], rounds: int, host_seconds: float) -> Sample:
        start = time.perf_counter()
        for _ in range(rounds):
            for call in calls:
                call()
        return Sample((time.perf_counter() - start) / rounds / len(calls), False)

    def synchronize(self) -> None:
        """Calls have finished when they return."""

    def release(self) -> None:
        """NumPy keeps nothing."""


class CudaMachine(Machine):
    """What PyTorch and CuPy have in common: the current device, and a created stream that is made the current one."""

    copy_name = "copy engine"
    handle: int
    """The stream as the C API takes it."""
    multiprocessors: int

    @abstractmethod
    def spin(self, seconds: float) -> None:
        """Keep the stream busy."""

    @abstractmethod
    def event(self, stream: Any = None) -> Any:
        """An event that is recorded now, on the machine's stream or another."""

    @abstractmethod
    def elapsed(self, begin: Any, end: Any) -> float:
        """Seconds between two events; waits for the second."""

    @abstractmethod
    def has_passed(self, event: Any) -> bool:
        """Whether the stream has come past an event."""

    @abstractmethod
    def other_stream(self) -> Any:
        """Another stream, which does not wait for this one."""

    @abstractmethod
    def on(self, stream: Any) -> Any:
        """A context in which this stream is the current one."""

    @abstractmethod
    def product(self, size: int) -> Call:
        """A product of two square matrices, of 16-bit floats, on the stream that is then current."""

    @abstractmethod
    def sweep(self, nbytes: int) -> Call:
        """A kernel bound by memory, that reads and writes as many bytes, on the stream that is then current."""

    def provenance(self) -> dict[str, Any]:
        return {**super().provenance(), "multiprocessors": self.multiprocessors, "driver": kernel_driver()}

    def sample(self, calls: Sequence[Call], rounds: int, host_seconds: float) -> Sample:
        least, most = SPIN_SECONDS
        self.spin(min(most, max(least, 2 * host_seconds * rounds * len(calls))))
        begin = self.event()
        for _ in range(rounds):
            for call in calls:
                call()
        end = self.event()
        queued_ahead = not self.has_passed(begin)
        return Sample(self.elapsed(begin, end) / rounds / len(calls), queued_ahead)


def cuda_machine(library: str | None) -> CudaMachine:
    """A machine over "torch" or "cupy", or the first of them that is installed and sees a device.

    Raises LookupError that says what was looked for.
    """
    from kvbm_kernels.bench.cuda import CupyMachine, TorchMachine

    machines: dict[str, type[CudaMachine]] = {"torch": TorchMachine, "cupy": CupyMachine}
    failures = []
    for name in machines if library is None else [library]:
        try:
            return machines[name]()
        except (ImportError, RuntimeError) as error:
            reason = "is not installed" if isinstance(error, ModuleNotFoundError) else str(error).splitlines()[0]
            failures.append(f"{name} {reason}")
    raise LookupError(f"no array library with CUDA: {'; '.join(failures)}")


def kernel_driver() -> str | None:
    """The version of the driver for NVIDIA's GPUs, where the system tells it."""
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return None


def check_host_memory(nbytes: int) -> None:
    """Raise MemoryError for more host memory than there is; Linux would find out only when it is touched."""
    available = _available_memory()
    if nbytes > 0.9 * available:
        raise MemoryError(f"{nbytes / 1e9:.1f} GB of host memory, of {available / 1e9:.1f} available")


def _available_memory() -> int:
    with Path("/proc/meminfo").open() as lines:
        figures = dict(line.split(":", 1) for line in lines)
    available = int(figures["MemAvailable"].split()[0]) << 10
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        available = min(available, limit - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # There is no group, or it has no limit.
        pass
    return available


def _last_level_cache() -> int:
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1], 0))
    # Where the kernel does not say, as large as one is likely to be.
    return max(sizes, default=32 << 20)
