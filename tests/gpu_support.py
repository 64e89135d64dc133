"""What the GPU tests share: the C API through ctypes, and memory that a kernel can reach.

The library is the file that KVBM_GPU_LIBRARY or KVBM_KERNELS_LIBRARY names, or the one inside the installed package.
Where it is the one with an emulated GPU (tests/native/emulated), all memory is its own, and CUDA is not used. Nothing
here touches CUDA or torch before a test asks for it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from collections.abc import Sequence
from ctypes import POINTER, c_bool, c_int, c_int64, c_size_t, c_uint8, c_void_p
from typing import Any

import numpy as np

NHD, HND = 0, 1
AUTO, ASYNC, BATCH = 0, 1, 2
LEGACY, PER_THREAD = 1, 2
DTYPE_OF_NBYTES = {1: 7, 2: 0, 4: 2, 8: 3}


class Shape(ctypes.Structure):
    _fields_ = [(name, c_size_t) for name in ("num_layers", "num_outer", "num_heads", "num_tokens", "row_nbytes")]


class View(ctypes.Structure):
    _fields_ = [
        ("bases", c_void_p),
        ("num_bases", c_size_t),
        ("base_block_step", c_size_t),
        ("base_layer_step", c_size_t),
        ("base_outer_step", c_size_t),
        ("block_ids", c_void_p),
        ("num_blocks", c_size_t),
        ("offset", c_int64),
        ("block_stride", c_int64),
        ("layer_stride", c_int64),
        ("outer_stride", c_int64),
        ("token_stride", c_int64),
        ("head_stride", c_int64),
    ]


class Options(ctypes.Structure):
    _fields_ = [("struct_nbytes", c_size_t), ("max_sms", c_int)]


@functools.cache
def library() -> ctypes.CDLL:
    path = os.environ.get("KVBM_GPU_LIBRARY") or os.environ.get("KVBM_KERNELS_LIBRARY")
    if path is None:
        from importlib.resources import files

        path = str(files("kvbm_kernels") / "_lib" / "libkvbm_kernels.so")
    lib = ctypes.CDLL(path)
    sizes = [c_size_t] * 6
    for name, arguments in {
        "launch_universal_from_block": [c_void_p, c_void_p, *sizes, c_int, c_int, c_void_p],
        "launch_block_from_universal": [c_void_p, c_void_p, *sizes, c_int, c_int, c_void_p],
        "launch_vectorized_copy": [c_void_p, c_void_p, c_size_t, c_int, c_void_p],
        "memcpy_batch": [c_void_p, c_void_p, c_size_t, c_size_t, c_int, c_void_p],
        "copy_blocks": [POINTER(View), POINTER(View), POINTER(Shape), c_size_t, POINTER(Options), c_void_p],
    }.items():
        getattr(lib, f"kvbm_kernels_{name}").argtypes = arguments
    lib.kvbm_kernels_last_error_message.restype = ctypes.c_char_p
    lib.kvbm_kernels_has_memcpy_batch_async.restype = c_bool
    return lib


@functools.cache
def is_emulated() -> bool:
    """Whether the kernels of the library run on the host."""
    return hasattr(library(), "kvbm_emulated_malloc")


def emulated_memory(nbytes: int, where: str) -> Any:
    """Memory of the emulated GPU, "device" or "pinned", as a buffer."""
    lib = library()
    lib.kvbm_emulated_malloc.argtypes, lib.kvbm_emulated_malloc.restype = [c_size_t, c_bool], c_void_p
    lib.kvbm_emulated_free.argtypes, lib.kvbm_emulated_free.restype = [c_void_p], None
    address = lib.kvbm_emulated_malloc(nbytes, where == "device")
    memory = (c_uint8 * nbytes).from_address(address)
    weakref.finalize(memory, lib.kvbm_emulated_free, address)
    return memory


def call(name: str, *arguments: object) -> int:
    return int(getattr(library(), f"kvbm_kernels_{name}")(*arguments))


def check(name: str, *arguments: object) -> None:
    """Call a function that must succeed."""
    status = call(name, *arguments)
    assert status == 0, f"{name} returned {status}: {library().kvbm_kernels_last_error_message().decode()}"


class Memory:
    """Bytes in one place: "device", "pinned" or "pageable"; address is that of the first."""

    def __init__(self, nbytes: int, where: str = "device", misalign: int = 0) -> None:
        import torch

        self.nbytes = nbytes
        self._start = misalign
        total = nbytes + misalign
        if is_emulated() and where != "pageable":
            self._tensor = torch.frombuffer(emulated_memory(total, where), dtype=torch.uint8)
        elif where == "device":
            self._tensor = torch.empty(total, dtype=torch.uint8, device="cuda")
        else:
            self._tensor = torch.empty(total, dtype=torch.uint8, pin_memory=where == "pinned")
        self._bytes = self._tensor[misalign:]
        self.address = self._bytes.data_ptr()

    def write(self, data: np.ndarray) -> Memory:
        import torch

        self._bytes.copy_(torch.from_numpy(np.ascontiguousarray(data).reshape(-1).view(np.uint8)))
        return self

    def fill(self, value: int) -> Memory:
        self._bytes.fill_(value)
        return self

    def read(self) -> np.ndarray:
        return self._bytes.cpu().numpy().copy()


def synchronize() -> None:
    import torch

    if not is_emulated():
        torch.cuda.synchronize()


class Stream:
    """A stream of its own that does not wait for the NULL stream's work, or one of CUDA's default handles."""

    def __init__(self) -> None:
        import torch

        self._stream = None if is_emulated() else torch.cuda.Stream()
        self.handle = 3 if self._stream is None else self._stream.cuda_stream

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def table(addresses: Sequence[int] | np.ndarray) -> np.ndarray:
    """A pointer table in ordinary host memory."""
    return np.asarray(addresses, dtype=np.uint64)


def device_table(addresses: Sequence[int] | np.ndarray, where: str = "device") -> Memory:
    return Memory(8 * len(addresses), where).write(table(addresses))


def pointer(array: np.ndarray | None) -> int | None:
    return None if array is None else array.ctypes.data


def make_view(
    bases: np.ndarray,
    ids: np.ndarray | None = None,
    num_blocks: int = 0,
    steps: tuple[int, int, int] = (0, 0, 0),
    offset: int = 0,
    block: int = 0,
    layer: int = 0,
    outer: int = 0,
    token: int = 0,
    head: int = 0,
) -> View:
    """A view over a table and an int64 id array that the caller keeps alive."""
    return View(pointer(bases), len(bases), *steps, pointer(ids), num_blocks, offset, block, layer, outer, token, head)


def copy_blocks(dst: View, src: View, shape: Shape, num_blocks: int, stream: int = 0, max_sms: int = 0) -> None:
    options = Options(ctypes.sizeof(Options), max_sms)
    check("copy_blocks", dst, src, shape, num_blocks, options, stream)
