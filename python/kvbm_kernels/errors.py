"""The exceptions this package raises.

Each derives from :class:`KvbmError` and from the built-in exception that a reader of Python expects at that place, so
``except ValueError`` works as well as ``except KvbmError``. A call that raises has changed nothing, unless CUDA itself
failed with the work already begun.
"""

from __future__ import annotations

from typing import NoReturn, SupportsIndex


class KvbmError(Exception):
    """What every exception of this package derives from; never raised itself."""


class KvbmValueError(KvbmError, ValueError):
    """A shape, layout, stride, stream or count that the call cannot work with, or memory that overlaps."""


class KvbmTypeError(KvbmError, TypeError):
    """Something that is no array, or elements of another type than the call moves."""


class KvbmIndexError(KvbmError, IndexError):
    """A block id, or a range of heads, layers or tokens, outside what a view has."""


class KvbmMemoryError(KvbmError, MemoryError):
    """The library could not get the memory it needed."""


class LibraryError(KvbmError, ImportError):
    """``libkvbm_kernels.so`` or its header could not be loaded."""


class StubBuildError(KvbmError, RuntimeError):
    """CUDA work was asked of the build without CUDA."""


class CudaError(KvbmError, RuntimeError):
    """CUDA's own failure: ``code`` is the ``cudaError_t`` and ``name`` how CUDA calls it."""

    def __init__(self, message: str, code: int, name: str) -> None:
        super().__init__(message)
        self.code = code
        self.name = name

    def __reduce__(self) -> tuple[type[CudaError], tuple[str, int, str]]:
        # The default would call the constructor with the message alone, and fail in whoever unpickles it.
        return type(self), (str(self), self.code, self.name)


class Uncopied:
    """Base of what refers to memory that a copy would not keep alive: ``copy`` and ``pickle`` refuse it."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise KvbmTypeError(
            f"a {type(self).__name__} cannot be copied or pickled: it refers to memory of this process; make another "
            "from the same arrays, or copy what it holds"
        )
