"""What the loaded library is and can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvbm_kernels._native import check, ffi, lib, library_path, text


@dataclass(frozen=True)
class BuildInfo:
    """What was built and where it runs."""

    version: str
    """The version of the library."""
    is_stub_build: bool
    """Whether it is the build without CUDA."""
    cuda: str | None
    """The CUDA runtime linked in, such as "13.0"; None in the stub."""
    archs: tuple[str, ...]
    """The CUDA architectures compiled in, such as "90"; the newest is also there as PTX."""
    driver: str | None
    """The newest CUDA that the installed driver supports; None in the stub and without a driver."""
    devices: int
    """How many CUDA devices this process sees."""
    library: str
    """The path of the library."""


def build_info() -> BuildInfo:
    """Describe the library that was loaded and the CUDA it found."""
    info: Any = ffi.new("kvbm_kernels_build_info *")
    info.struct_nbytes = ffi.sizeof("kvbm_kernels_build_info")
    check(lib.kvbm_kernels_get_build_info(info))
    archs = text(info.cuda_archs)
    return BuildInfo(
        version=text(info.version),
        is_stub_build=bool(info.is_stub_build),
        cuda=_cuda_version(info.cuda_version),
        archs=tuple(archs.split(",")) if archs else (),
        driver=_cuda_version(info.driver_version),
        devices=info.num_devices,
        library=library_path,
    )


def is_stub_build() -> bool:
    """Whether this is the build without CUDA."""
    return bool(lib.kvbm_kernels_is_stub_build())


def has_memcpy_batch_async() -> bool:
    """Whether :func:`kvbm_kernels.memcpy_batch` can use cudaMemcpyBatchAsync with this driver."""
    return bool(lib.kvbm_kernels_has_memcpy_batch_async())


def _cuda_version(number: int) -> str | None:
    return f"{number // 1000}.{number % 1000 // 10}" if number else None
