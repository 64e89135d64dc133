"""Tensors of any library, and that none is imported for it."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import kvbm_kernels as kk
import reference
from engine_arrays import to_torch
from engine_kinds import EVERY, IDS, assert_same_memory, copy, laid_out, logical, shape_of
from memory import CudaArray, Exporter


@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize("name", EVERY)
def test_tensors_of_torch(rng, name):
    """Out of one cache of tensors, and into another, with their strides and halves as the engine makes them."""
    kind, size = EVERY[name]
    kv = logical(rng, size, len(IDS))
    src = to_torch(laid_out(kind, size, kv, IDS), "cpu")
    out = np.zeros(reference.universal(kv).shape, size.dtype)
    copy(kk.UniversalBlocks(out, shape_of(size)), kind.view(src.tensors, size)[IDS])
    reference.assert_same_bytes(out, reference.universal(kv))
    cache = laid_out(kind, size, None, IDS)
    dst = to_torch(cache, "cpu")
    copy(kind.view(dst.tensors, size)[IDS], kk.UniversalBlocks(out, shape_of(size)))
    dst.fetch()
    assert_same_memory(cache, laid_out(kind, size, kv, IDS))


def test_tensors_that_have_nothing_but_dlpack(rng):
    layers = [reference.random_kv(rng, (4, 2, 3, 2, 8), np.float16) for _ in range(2)]
    view = kk.engines.from_vllm(
        [Exporter(layer) for layer in layers], layout="blocks_first", block_size=3, num_kv_heads=2
    )
    out = np.zeros((3, 2, 2, 2, 3, 8), np.float16)
    kk.copy_blocks(kk.UniversalBlocks(out, view.shape), view)
    reference.assert_same_bytes(out, reference.universal(np.stack(layers, 1)[1:]))


def on_device(places: list[int], strides: tuple[int, ...] | None = None) -> list[CudaArray]:
    """Layers [9, 2, 16, 8, 128] at these bytes of an allocation."""
    return [CudaArray((9, 2, 16, 8, 128), address=0x7F0000000000 + place, strides=strides) for place in places]


def bases_of(layers: list[CudaArray]) -> kk.engines.EngineBlocks:
    return kk.engines.from_vllm(layers, layout="blocks_first", block_size=16, num_kv_heads=8)


PAGE = 2 * 16 * 8 * 128 * 2


def test_layers_within_a_block_are_a_stride():
    """A view only says where rows are, and needs no CUDA: 80 layers block by block are one base."""
    by_block = (80 * PAGE, PAGE // 2, 2048, 256, 2)
    view = bases_of(on_device([i * PAGE for i in range(80)], by_block))
    assert view.device == "cuda:0"
    assert view.geometry.bases.tolist() == [0x7F0000000000]
    assert view.geometry.strides.layer == PAGE


@pytest.mark.parametrize("places", [[0, 9, 18, 27], [0, 45, 54, 180], [27, 18, 9, 0]])
def test_layers_that_are_pools_keep_a_base_each(places):
    """Evenly apart or not: copies take pools one after the other, and have to know them for that."""
    view = bases_of(on_device([i * PAGE for i in places]))
    assert [int(base) - 0x7F0000000000 for base in view.geometry.bases] == [i * PAGE for i in places]
    assert view.layers(2, 4).geometry.strides.layer == 0


def test_layers_that_are_not_evenly_apart_within_a_block_keep_a_base_each():
    view = bases_of(on_device([0, PAGE, 3 * PAGE], (5 * PAGE, PAGE // 2, 2048, 256, 2)))
    assert len(view.geometry.bases) == 3


def test_layers_are_all_in_one_memory():
    layers = [CudaArray((4, 2, 3, 2, 8), strides=None), np.zeros((4, 2, 3, 2, 8), np.float16)]
    with pytest.raises(ValueError, match=r"kv_caches\[1\] is on cpu, expected the cuda:0 of kv_caches\[0\]"):
        kk.engines.from_vllm(layers, layout="blocks_first", block_size=3, num_kv_heads=2)


def test_read_only_arrays_can_be_read_and_not_written(rng):
    layers = [np.zeros((4, 2, 3, 2, 8), np.float16) for _ in range(2)]
    layers[1].flags.writeable = False
    view = kk.engines.from_vllm(layers, layout="blocks_first", block_size=3, num_kv_heads=2, name="caches")
    out = np.zeros((3, 2, 2, 2, 3, 8), np.float16)
    universal = kk.UniversalBlocks(out, view.shape)
    kk.copy_blocks(universal, view)
    with pytest.raises(ValueError, match=r"dst cannot be written: caches\[1\] is read-only"):
        kk.copy_blocks(view, universal)


def test_no_engine_is_imported():
    """Neither by the package nor by a call, not even PyTorch or the one whose name a module here has."""
    code = (
        "import sys, numpy as np, kvbm_kernels as kk\n"
        "kk.engines.from_transformers([(np.zeros((1, 2, 4, 8), 'f2'), np.zeros((1, 2, 4, 8), 'f2'))], block_size=4)\n"
        "print(sorted({'torch', 'vllm', 'sglang', 'transformers', 'lmcache', 'flashinfer'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
