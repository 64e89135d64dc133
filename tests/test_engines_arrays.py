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


def test_cuda_arrays_are_views_without_cuda():
    """A view only says where rows are: 80 layers far apart in one allocation are one base and a stride."""
    layers = [CudaArray((9, 2, 16, 8, 128), address=0x7F0000000000 + i * (9 << 16)) for i in range(80)]
    view = kk.engines.from_vllm(layers, layout="blocks_first", block_size=16, num_kv_heads=8)
    assert view.device == "cuda:0"
    assert view.geometry.bases.tolist() == [0x7F0000000000]
    assert view.geometry.strides.layer == 9 << 16


def test_layers_that_are_not_evenly_apart_keep_their_bases():
    places = [0, 5, 6, 20]
    layers = [CudaArray((9, 2, 16, 8, 128), address=0x7F0000000000 + i * (9 << 16)) for i in places]
    view = kk.engines.from_vllm(layers, layout="blocks_first", block_size=16, num_kv_heads=8)
    assert [int(base) - 0x7F0000000000 for base in view.geometry.bases] == [i * (9 << 16) for i in places]
    assert view.layers(2, 4).geometry.strides.layer == 0


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
