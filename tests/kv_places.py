"""Where the arrays of a cache can be, and how NumPy's get there and back: the same tests run on all of them.

``fake cuda`` is host memory that says it is on a device. What a cache puts on a stream is done only when somebody
looks, in the order in which it was put there; so it shows without a GPU what a call has forgotten to publish, or
publishes too late.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest

from kvbm_kernels import DType, KvbmValueError, copy, kv_rows, kv_tables
from kvbm_kernels._native import check, ffi, lib

CARRIERS = {DType.F32: "f4", DType.F16: "f2", DType.BF16: "u2", DType.INT8: "i1", DType.FP8_E4M3: "u1"}


class Host:
    """NumPy's."""

    options: ClassVar[dict[str, Any]] = {}
    has_bfloat16 = True

    def put(self, array: np.ndarray) -> Any:
        """A copy of the array there."""
        return array.copy()

    def get(self, array: Any) -> np.ndarray:
        """The bits of an array from there, when all that has to be done is done."""
        return np.array(array)

    def close(self) -> None:
        pass


class Torch:
    """PyTorch's on the GPU."""

    has_bfloat16 = True

    def __init__(self) -> None:
        self.torch = pytest.importorskip("torch")
        self.options = {"arrays": "torch", "device": "cuda"}

    def put(self, array: np.ndarray) -> Any:
        bits = np.ascontiguousarray(array).view(f"i{array.itemsize}")
        dtype = getattr(self.torch, array.dtype.name)
        return self.torch.from_numpy(bits).cuda().view(dtype)

    def get(self, array: Any) -> np.ndarray:
        self.torch.cuda.synchronize()
        return array.view(getattr(self.torch, f"int{8 * array.element_size()}")).cpu().numpy().copy()

    def close(self) -> None:
        self.torch.cuda.synchronize()


class Cupy:
    """CuPy's on the GPU, which has integers with the bits of bfloat16."""

    has_bfloat16 = False

    def __init__(self) -> None:
        self.cupy = pytest.importorskip("cupy")
        self.options = {"arrays": "cupy"}

    def put(self, array: np.ndarray) -> Any:
        return self.cupy.asarray(array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array)

    def get(self, array: Any) -> np.ndarray:
        self.cupy.cuda.Device().synchronize()
        return array.get()

    def close(self) -> None:
        self.cupy.cuda.Device().synchronize()


class FakeArray:
    """An array of NumPy that says it is in CUDA memory."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory
        self.shape = memory.shape
        self.dtype = memory.dtype

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        memory = self.memory
        data = (memory.ctypes.data, not memory.flags.writeable)
        name = "<V2" if memory.dtype == ml_dtypes.bfloat16 else memory.dtype.str
        return {"data": data, "shape": memory.shape, "typestr": name, "strides": memory.strides, "version": 3}

    def __getitem__(self, key: Any) -> FakeArray:
        return FakeArray(self.memory[key])

    def reshape(self, *shape: Any) -> FakeArray:
        made = self.memory.reshape(*shape)
        assert np.shares_memory(made, self.memory) or not made.size
        return FakeArray(made)

    def swapaxes(self, first: int, second: int) -> FakeArray:
        return FakeArray(self.memory.swapaxes(first, second))


class FakeCuda:
    """A maker of such arrays, and the one stream that all work on them is put on."""

    has_bfloat16 = False

    def __init__(self) -> None:
        self.options = {"arrays": self}
        self.launched: Counter[str] = Counter()
        # The words of each launch that stores some, by address.
        self.stored: list[dict[int, int]] = []
        # The stream argument of each launch.
        self.streams: list[Any] = []
        # The launch that is to fail, by its name.
        self.fails: str | None = None
        self._queue: deque[tuple[Callable[[], None], Any]] = deque()
        self._last: Callable[[], None] | None = None
        self._patch = pytest.MonkeyPatch()
        library = SimpleNamespace(
            kvbm_kernels_is_stub_build=lambda: False,
            kvbm_kernels_copy_blocks=self._function("copy_blocks", lib.kvbm_kernels_host_copy_blocks),
            kvbm_kernels_launch_append=self._function("append", lib.kvbm_kernels_host_append),
            kvbm_kernels_launch_gather=self._function("gather", lib.kvbm_kernels_host_gather),
            kvbm_kernels_launch_store_u32=self._store,
            kvbm_kernels_host_copy_blocks=lib.kvbm_kernels_host_copy_blocks,
            kvbm_kernels_host_append=lib.kvbm_kernels_host_append,
            kvbm_kernels_host_gather=lib.kvbm_kernels_host_gather,
        )
        for module in (copy, kv_rows, kv_tables):
            self._patch.setattr(module, "lib", library)
            self._patch.setattr(module, "launch", self._launch)

    # What a maker does.

    def on(self, stream: Any) -> Any:
        return nullcontext()

    def zeros(self, shape: tuple[int, ...], dtype: DType) -> FakeArray:
        return FakeArray(np.zeros(shape, CARRIERS[dtype]))

    def empty(self, shape: tuple[int, ...], dtype: DType) -> FakeArray:
        return FakeArray(np.full(shape, 0x55, CARRIERS[dtype]))

    def view(self, array: FakeArray, dtype: DType) -> FakeArray:
        return FakeArray(array.memory.view(CARRIERS[dtype]))

    def table(self, host: np.ndarray) -> FakeArray:
        return FakeArray(host.copy())

    # What a place does.

    def put(self, array: np.ndarray) -> FakeArray:
        return FakeArray(array.copy())

    def get(self, array: FakeArray) -> np.ndarray:
        self.synchronize()
        return array.memory.copy()

    def close(self) -> None:
        self.synchronize()
        self._patch.undo()

    # The stream.

    def synchronize(self) -> None:
        """Do what is left to do."""
        while self._queue:
            work, _held = self._queue.popleft()
            work()

    def reset(self) -> None:
        """Forget what has been launched so far."""
        self.launched.clear()
        self.stored.clear()
        self.streams.clear()

    def _launch(self, work: Callable[[Any], int], stream: Any, sides: dict[str, Any]) -> None:
        for name, memory in sides.items():
            if memory.host_owners:
                raise KvbmValueError(f"{name} is in pageable host memory")
        self.streams.append(stream)
        assert work(stream) == 0
        # The work holds what it was called with, and the sides hold the arrays.
        self._queue.append((self._last, (work, sides)))

    def _function(self, name: str, host: Callable[..., int]) -> Callable[..., int]:
        def launched(*arguments: Any) -> int:
            if self.fails == name:
                raise MemoryError(f"{name} was told to fail")
            self.launched[name] += 1
            given = arguments[:4] if name == "copy_blocks" else arguments[:5]

            def work() -> None:
                check(host(*given, 1))

            self._last = work
            return 0

        return launched

    def _store(self, dsts: Any, values: Any, n: int, stream: Any) -> int:
        self.launched["store"] += 1
        pairs = {int(ffi.cast("uintptr_t", dsts[i])): values[i] for i in range(n)}
        assert len(pairs) == n, "a word is stored twice in one launch"
        self.stored.append(pairs)

        def work() -> None:
            for address, value in pairs.items():
                ffi.cast("uint32_t *", address)[0] = value

        self._last = work
        return 0


PLACES: dict[str, Callable[[], Any]] = {"numpy": Host, "fake cuda": FakeCuda, "torch": Torch, "cupy": Cupy}
ON_GPU = [pytest.param(name, marks=pytest.mark.gpu) for name in ("torch", "cupy")]
