"""What tests of the C API share: its constants, tables of addresses, and how a refusal is recognised."""

from __future__ import annotations

import re

import numpy as np
import pytest

import kvbm_kernels as kk
from kvbm_kernels import ffi, lib

NULL = ffi.NULL
SIZE_MAX = (1 << 64) - 1
INT_MIN = -(1 << 31)

# What a launch that passes every check answers where there is no GPU.
LAUNCHED = {34} if kk.is_stub_build() else {35, 100}
no_gpu = pytest.mark.skipif(kk.build_info().devices > 0, reason="addresses that a GPU would follow")


def message() -> str:
    return ffi.string(lib.kvbm_kernels_last_error_message()).decode()


def refused(status: int, expected: str) -> None:
    """The call answered "invalid value", and said this."""
    assert status == lib.KVBM_KERNELS_ERROR_INVALID_VALUE
    assert re.fullmatch(expected, message()), message()


def pointers(*arrays) -> object:
    """A host table of the addresses of arrays, or of addresses; keeps the arrays alive."""
    table = np.array([a if isinstance(a, int) else a.ctypes.data for a in arrays], np.uint64)
    return ffi.from_buffer("void *[]", table)
