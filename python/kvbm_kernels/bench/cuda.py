"""The CUDA machines: PyTorch's memory, streams and events, or CuPy's."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvbm_kernels.bench.machine import Call, CudaMachine, check_host_memory

# The clock of a multiprocessor under load, near enough for how long a kernel is to spin.
_CLOCK_HZ = 1.9e9


class TorchMachine(CudaMachine):
    """A GPU through PyTorch."""

    def __init__(self) -> None:
        torch = self.torch = importlib.import_module("torch")
        if not torch.cuda.is_available():
            raise RuntimeError("sees no CUDA device")
        self.xp = torch
        self.cuda = torch.cuda
        properties = self.cuda.get_device_properties()
        self.library = f"PyTorch {torch.__version__}"
        self.device = properties.name
        self.cache_nbytes = properties.L2_cache_size
        self.multiprocessors = properties.multi_processor_count
        # Not the NULL stream, on which cudaMemcpyBatchAsync does not work.
        self.stream = self.cuda.Stream()
        self.cuda.set_stream(self.stream)
        self.handle = self.stream.cuda_stream

    def empty(self, nbytes: int, place: str) -> Any:
        if place == "device":
            return self.torch.empty(nbytes, dtype=self.torch.uint8, device="cuda")
        check_host_memory(nbytes)
        return self.torch.empty(nbytes, dtype=self.torch.uint8, pin_memory=True)

    def randomize(self, array: Any) -> None:
        flat = array.view(-1)
        words = self.torch.randint(-(2**62), 2**62, (flat.numel() // 8 + 1,), device="cuda")
        flat.copy_(words.view(self.torch.uint8)[: flat.numel()])

    def copy(self, dst: Any, src: Any) -> None:
        dst.copy_(src, non_blocking=True)

    def near(self, array: Any) -> Any:
        return array.cuda()

    def take(self, array: Any, places: npt.NDArray[np.int64]) -> Any:
        return array[self.torch.from_numpy(places).to(array.device)].cuda()

    def put(self, array: Any, places: npt.NDArray[np.int64], values: Any) -> None:
        array[self.torch.from_numpy(places).to(array.device)] = values.to(array.device)

    def transposed(self, array: Any, axes: Sequence[int]) -> Any:
        return array.permute(*axes)

    def words(self, array: Any, width: int) -> Any:
        return array.view(getattr(self.torch, f"int{8 * width}"))

    def equal(self, one: Any, other: Any) -> bool:
        return bool(self.torch.equal(one, other))

    def to_numpy(self, array: Any) -> npt.NDArray[Any]:
        host: npt.NDArray[Any] = array.cpu().numpy()
        return host

    def device_visible(self, table: npt.NDArray[np.uint64]) -> Any:
        return self.torch.from_numpy(table.view(np.int64)).cuda()

    def synchronize(self) -> None:
        self.cuda.synchronize()

    def release(self) -> None:
        self.synchronize()
        self.cuda.empty_cache()
        # Pinned memory is kept too; there is no public name for letting it go yet.
        empty_host_cache = getattr(self.torch._C, "_host_emptyCache", None)
        if empty_host_cache is not None:
            empty_host_cache()

    def spin(self, seconds: float) -> None:
        self.cuda._sleep(int(seconds * _CLOCK_HZ))

    def event(self, stream: Any = None) -> Any:
        event = self.cuda.Event(enable_timing=True)
        event.record(stream or self.stream)
        return event

    def elapsed(self, begin: Any, end: Any) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def has_passed(self, event: Any) -> bool:
        return bool(event.query())

    def other_stream(self) -> Any:
        return self.cuda.Stream()

    def on(self, stream: Any) -> Any:
        return self.cuda.stream(stream)

    def product(self, size: int) -> Call:
        a, b = (self.torch.randn(size, size, dtype=self.torch.bfloat16, device="cuda") for _ in range(2))
        out = self.torch.empty_like(a)
        return lambda: self.torch.mm(a, b, out=out)

    def sweep(self, nbytes: int) -> Call:
        source = self.torch.ones(nbytes // 8, device="cuda")
        out = self.torch.empty_like(source)
        return lambda: self.torch.add(source, 1, out=out)


class CupyMachine(CudaMachine):
    """A GPU through CuPy."""

    def __init__(self) -> None:
        cupy = self.cupy = importlib.import_module("cupy")
        self.cupyx = importlib.import_module("cupyx")
        if not cupy.cuda.is_available():
            raise RuntimeError("sees no CUDA device")
        self.xp = cupy
        self.runtime = cupy.cuda.runtime
        properties = self.runtime.getDeviceProperties(cupy.cuda.Device().id)
        self.library = f"CuPy {cupy.__version__}"
        self.device = properties["name"].decode()
        self.cache_nbytes = properties["l2CacheSize"]
        self.multiprocessors = properties["multiProcessorCount"]
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.stream.use()
        self.handle = self.stream.ptr
        self._spin = cupy.RawKernel(
            'extern "C" __global__ void spin(long long cycles) '
            "{ long long begin = clock64(); while (clock64() - begin < cycles) {} }",
            "spin",
        )

    def empty(self, nbytes: int, place: str) -> Any:
        if place == "device":
            return self.cupy.empty(nbytes, self.cupy.uint8)
        check_host_memory(nbytes)
        return self.cupyx.empty_pinned(nbytes, np.uint8)

    def randomize(self, array: Any) -> None:
        words = self.cupy.random.randint(-(2**31), 2**31 - 1, array.size // 4 + 1, dtype=self.cupy.int32)
        self.copy(array.reshape(-1), words.view(self.cupy.uint8)[: array.size])
        self.synchronize()

    def copy(self, dst: Any, src: Any) -> None:
        addresses = self.address(dst), self.address(src)
        self.runtime.memcpyAsync(*addresses, dst.nbytes, self.runtime.memcpyDefault, self.stream.ptr)

    def address(self, array: Any) -> int:
        return int(array.data.ptr if isinstance(array, self.cupy.ndarray) else array.ctypes.data)

    def near(self, array: Any) -> Any:
        return self.cupy.asarray(array)

    def take(self, array: Any, places: npt.NDArray[np.int64]) -> Any:
        if isinstance(array, self.cupy.ndarray):
            return array[self.cupy.asarray(places)]
        return self.cupy.asarray(array[places])

    def put(self, array: Any, places: npt.NDArray[np.int64], values: Any) -> None:
        if isinstance(array, self.cupy.ndarray):
            array[self.cupy.asarray(places)] = values
        else:
            array[places] = self.cupy.asnumpy(values)

    def to_numpy(self, array: Any) -> npt.NDArray[Any]:
        host: npt.NDArray[Any] = self.cupy.asnumpy(array)
        return host

    def device_visible(self, table: npt.NDArray[np.uint64]) -> Any:
        return self.cupy.asarray(table)

    def synchronize(self) -> None:
        self.runtime.deviceSynchronize()

    def release(self) -> None:
        self.synchronize()
        self.cupy.get_default_memory_pool().free_all_blocks()
        self.cupy.get_default_pinned_memory_pool().free_all_blocks()

    def spin(self, seconds: float) -> None:
        self._spin((1,), (1,), (int(seconds * _CLOCK_HZ),))

    def event(self, stream: Any = None) -> Any:
        event = self.cupy.cuda.Event()
        event.record(stream or self.stream)
        return event

    def elapsed(self, begin: Any, end: Any) -> float:
        end.synchronize()
        return float(self.cupy.cuda.get_elapsed_time(begin, end)) / 1e3

    def has_passed(self, event: Any) -> bool:
        return bool(event.done)

    def other_stream(self) -> Any:
        return self.cupy.cuda.Stream(non_blocking=True)

    def on(self, stream: Any) -> Any:
        return stream

    def product(self, size: int) -> Call:
        a, b = (self.cupy.random.standard_normal((size, size)).astype(self.cupy.float16) for _ in range(2))
        out = self.cupy.empty_like(a)
        return lambda: self.cupy.matmul(a, b, out=out)

    def sweep(self, nbytes: int) -> Call:
        source = self.cupy.ones(nbytes // 8, self.cupy.float32)
        out = self.cupy.empty_like(source)
        return lambda: self.cupy.add(source, 1, out=out)
