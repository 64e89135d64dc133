"""The caches of engines in CUDA memory: the same matrix, by kernels."""

from __future__ import annotations

import numpy as np
import pytest

import kvbm_kernels as kk
import reference
from engine_arrays import Moved, to_cupy, to_emulated, to_torch
from engine_kinds import EVERY, IDS, assert_same_memory, copy, laid_out, logical, shape_of
from gpu_arrays import place
from gpu_support import is_emulated, synchronize

pytestmark = pytest.mark.gpu

OTHERS = [3, 6, 4]
# Rows of a length that kernels move in one piece, and heads and tokens enough for a tile.
WIDE = {"B": 8, "L": 2, "N": 16, "H": 8, "D": 128}
WIDE_MLA = {"B": 8, "L": 2, "N": 64, "H": 1, "D": 576}


def on_device(library: str, cache) -> Moved:
    if library == "cupy":
        pytest.importorskip("cupy")
        return to_cupy(cache)
    return to_emulated(cache) if is_emulated() else to_torch(cache, "cuda")


def fetched(moved: Moved) -> None:
    synchronize()
    moved.fetch()


@pytest.mark.parametrize("library", ["torch", "cupy"])
@pytest.mark.parametrize("name", EVERY)
def test_universal_bytes_and_back(rng, name, library):
    """Saved to pinned memory and to the device, and restored from there; nothing else is touched."""
    kind, size = EVERY[name]
    kv = logical(rng, size, len(IDS))
    src = on_device(library, laid_out(kind, size, kv, IDS))
    expected = reference.universal(kv)
    for where in (place("torch"), place("torch pinned")):
        out = where.put(np.zeros_like(expected))
        copy(kk.UniversalBlocks(out, shape_of(size)), kind.view(src.tensors, size)[IDS])
        reference.assert_same_bytes(where.get(out).view(expected.dtype), expected)
        cache = laid_out(kind, size, None, IDS)
        dst = on_device(library, cache)
        copy(kind.view(dst.tensors, size)[IDS], kk.UniversalBlocks(out, shape_of(size)))
        fetched(dst)
        assert_same_memory(cache, laid_out(kind, size, kv, IDS), name)


@pytest.mark.parametrize("src_name", EVERY)
def test_from_each_engine_to_each(rng, src_name):
    kind, size = EVERY[src_name]
    kv = logical(rng, size, len(IDS))
    src = on_device("torch", laid_out(kind, size, kv, IDS))
    of = kind.view(src.tensors, size)[IDS]
    for name, (other, its_size) in EVERY.items():
        if its_size is size:
            cache = laid_out(other, size, None, OTHERS)
            dst = on_device("torch", cache)
            copy(other.view(dst.tensors, size)[OTHERS], of)
            fetched(dst)
            assert_same_memory(cache, laid_out(other, size, kv, OTHERS), name)


@pytest.mark.parametrize("name", EVERY)
def test_sizes_of_models(rng, name):
    """Rows of 256 bytes and more, in and out, where kernels take their wide paths."""
    kind, size = EVERY[name]
    size = size._replace(**(WIDE if size.no == 2 else WIDE_MLA))
    kv = logical(rng, size, len(IDS))
    src = on_device("torch", laid_out(kind, size, kv, IDS))
    where = place("torch")
    expected = reference.universal(kv)
    out = where.put(np.zeros_like(expected))
    copy(kk.UniversalBlocks(out, shape_of(size)), kind.view(src.tensors, size)[IDS])
    reference.assert_same_bytes(where.get(out).view(expected.dtype), expected)
    cache = laid_out(kind, size, None, OTHERS)
    dst = on_device("torch", cache)
    copy(kind.view(dst.tensors, size)[OTHERS], kk.UniversalBlocks(out, shape_of(size)))
    fetched(dst)
    assert_same_memory(cache, laid_out(kind, size, kv, OTHERS), name)
