"""The shared library through cffi, as declared by the header it was built with.

``ffi`` and ``lib`` are public: everything in ``kvbm_kernels.h`` can be called as ``kvbm_kernels.lib.NAME``, with the
rules of that header and none of this package's checks.
"""

from __future__ import annotations

import os
import re
from importlib import resources
from typing import Any

from cffi import FFI

from kvbm_kernels.errors import (
    CudaError,
    KvbmError,
    KvbmMemoryError,
    KvbmValueError,
    LibraryError,
    StubBuildError,
)

LIBRARY_VARIABLE = "KVBM_KERNELS_LIBRARY"

_CPLUSPLUS_BLOCK = re.compile(r"^#ifdef __cplusplus\n.*?^#endif\n", re.MULTILINE | re.DOTALL)
_DIRECTIVE = re.compile(r"^[ \t]*#(?!define KVBM_KERNELS_\w+ \d+[ \t]*(?:/\*.*\*/[ \t]*)?$).*$", re.MULTILINE)
_API_MACRO = re.compile(r"\bKVBM_KERNELS_API\b")


def declarations(header: str) -> str:
    """What of the header's text cffi understands: everything but the preprocessor's part, integer constants kept."""
    return _API_MACRO.sub("", _DIRECTIVE.sub("", _CPLUSPLUS_BLOCK.sub("", header)))


def _load() -> tuple[Any, Any, str]:
    # Not relative to __file__: in an editable install the built files lie elsewhere.
    package = resources.files("kvbm_kernels")
    header = package.joinpath("include", "kvbm_kernels.h")
    override = os.environ.get(LIBRARY_VARIABLE)
    path = override or str(package.joinpath("_lib", "libkvbm_kernels.so"))
    origin = f"named by {LIBRARY_VARIABLE}" if override else "the package's own"

    ffi: Any = FFI()
    lib: Any = None
    failures = []
    try:
        ffi.cdef(declarations(header.read_text(encoding="utf-8")))
    except OSError as error:
        failures.append(f"{header} (the header): {error.strerror}")
    try:
        lib = ffi.dlopen(path)
    except OSError as error:
        failures.append(f"{path} ({origin}): {_reason(error, path)}")
    except UnicodeEncodeError:
        failures.append(f"{path!r} ({origin}): its name is no UTF-8")
    if not failures:
        try:
            version = ffi.string(lib.kvbm_kernels_version()).decode()
        except AttributeError:
            failures.append(f"{path} ({origin}) has no kvbm_kernels_version: it is another library, or an old one")
        else:
            major = lib.KVBM_KERNELS_VERSION_MAJOR
            if version.split(".")[0] != str(major):
                failures.append(f"{path} ({origin}) is version {version}, and the header {major}.x")
    if failures:
        raise LibraryError(
            f"kvbm_kernels cannot use its library; {LIBRARY_VARIABLE} can name another one.\n  " + "\n  ".join(failures)
        )
    return ffi, lib, path


def _reason(error: OSError, path: str) -> str:
    """What the loader said, without the path, and where else cffi looked."""
    why = str(error).partition(".  Additionally, ctypes.util")[0]
    why = why.removeprefix(f"cannot load library '{path}': ").removeprefix(f"{path}: ")
    if "/" not in path:
        why += "; a name without a / is looked for where the system has its libraries, not in the current folder"
    return why


ffi, lib, library_path = _load()


def text(chars: Any) -> str:
    """A C string as a Python one."""
    decoded: str = ffi.string(chars).decode()
    return decoded


def error_from_status(status: int) -> KvbmError:
    """The exception for a status code that a function of the library has just returned on this thread."""
    message = text(lib.kvbm_kernels_last_error_message()) or text(lib.kvbm_kernels_status_string(status))
    if status == lib.KVBM_KERNELS_ERROR_INVALID_VALUE:
        return KvbmValueError(message)
    if status == lib.KVBM_KERNELS_ERROR_MEMORY_ALLOCATION:
        return KvbmMemoryError(message)
    if status == lib.KVBM_KERNELS_ERROR_STUB_LIBRARY:
        return StubBuildError(message)
    return CudaError(message, status, text(lib.kvbm_kernels_status_name(status)))


def check(status: int) -> None:
    """Raise what a status code other than 0 stands for."""
    if status:
        raise error_from_status(status)
