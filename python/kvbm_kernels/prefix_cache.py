"""What a block of tokens is registered under: a hash of the tokens in it and of all before them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from kvbm_kernels.errors import KvbmTypeError, KvbmValueError
from kvbm_kernels.layouts import as_count

Tokens: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]

# Changes with the way hashes are made, so that old ones are never found under new rules.
_SEED = b"kvbm_kernels prefix 1"


def block_hashes(tokens: Tokens, block_size: SupportsIndex, *, extra: bytes = b"") -> list[bytes]:
    """A hash for each full block of tokens; what is left over at the end has none.

    Each is SHA-256 over the hash before it and the tokens of the block as 64-bit little-endian numbers, so equal hashes
    mean equal tokens from the first on, in every process and on every machine. ``extra`` is whatever else K and V
    depend on, such as the name of the model or of an adapter, or a secret that keeps tenants apart.

    Raises KvbmTypeError for tokens that are no integers, KvbmValueError for a block size below 1.
    """
    size = as_count(block_size, "block_size", 1)
    data = memoryview(as_tokens(tokens).astype("<i8").tobytes())
    if not isinstance(extra, bytes):
        raise KvbmTypeError(f"extra is {extra!r}, expected bytes")
    digest = hashlib.sha256(_SEED + extra).digest()
    step = size * 8
    hashes = []
    for start in range(0, len(data) - step + 1, step):
        digest = hashlib.sha256(digest + data[start : start + step]).digest()
        hashes.append(digest)
    return hashes


def as_tokens(tokens: Any) -> npt.NDArray[np.int64]:
    """Token ids as one array. Raises KvbmTypeError and KvbmValueError."""
    if isinstance(tokens, list | tuple | range) and not len(tokens):
        return np.empty(0, np.int64)
    try:
        array = np.asarray(tokens)
    except (TypeError, ValueError, RuntimeError) as error:
        raise KvbmTypeError(f"tokens are a {type(tokens).__name__}: {error}") from None
    if array.dtype.kind not in "iu":
        raise KvbmTypeError(f"tokens have dtype {array.dtype}, expected integers")
    if array.ndim != 1:
        raise KvbmValueError(f"tokens have {array.ndim} dimensions, expected one")
    if array.dtype == np.uint64 and array.size and array.max() >= 1 << 63:
        raise KvbmValueError(f"tokens have a {array.max()}, expected less than 2**63")
    return array.astype(np.int64)
