"""The Python package on CUDA arrays: every library, layout and place bit for bit, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import os

import numpy as np
import pytest

import kvbm_kernels as kk
import reference
from gpu_arrays import HD, NB, NL, NO, NT, ON_DEVICE, PINNED, code_of, get_stack, make, place, put_chunks
from kinds import KINDS, views

pytestmark = pytest.mark.gpu

DTYPES = {"bf16": "bfloat16", "f16": "float16", "fp8_e4m3": "float8_e4m3fn", "int8": "int8", "uint8": "uint8"}


class TestLayouts:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("of", KINDS)
    def test_every_layout_to_every_other(self, rng, of, dtype):
        """Tensors of PyTorch, in every type that a cache has."""
        kv, shape = make(rng, dtype)
        where = place("torch", DTYPES[dtype])
        src, _ = views(kv, shape, *where)[of]
        for to in KINDS:
            dst, read_back = views(np.zeros_like(kv), shape, *where)[to]
            kk.copy_blocks(dst, src)
            reference.assert_same_bytes(read_back(), kv)

    @pytest.mark.parametrize("of", KINDS)
    def test_every_layout_of_cupy(self, rng, of):
        kv, shape = make(rng)
        where = place("cupy")
        src, _ = views(kv, shape, *where)[of]
        for to in KINDS:
            dst, read_back = views(np.zeros_like(kv), shape, *where)[to]
            kk.copy_blocks(dst, src)
            reference.assert_same_bytes(read_back(), kv)

    @pytest.mark.parametrize(("of", "to"), [*itertools.product(ON_DEVICE, ON_DEVICE)])
    def test_every_kind_of_array(self, rng, of, to):
        """Libraries meet where their current streams are the same."""
        kv, shape = make(rng)
        source, target = place(of), place(to)
        chunks = put_chunks(source, kv, "HND")
        out = [target.put(block) for block in np.zeros_like(reference.universal(kv))]
        kk.copy_blocks(kk.UniversalBlocks(out, shape), kk.BlockStack(chunks, shape, "HND"))
        reference.assert_same_bytes(np.stack([target.get(o) for o in out]), reference.universal(kv))

    @pytest.mark.parametrize("pinned", PINNED)
    @pytest.mark.parametrize("device", ["torch", "cupy"])
    def test_pinned_host_memory_on_either_side(self, rng, pinned, device):
        kv, shape = make(rng)
        host, on_device = place(pinned), place(device)
        for of, to in ((host, on_device), (on_device, host), (host, host)):
            for kind, target in (("NHD", "universal"), ("universal", "HND"), ("packed K|V", "operational NHD")):
                src, _ = views(kv, shape, *of)[kind]
                dst, read_back = views(np.zeros_like(kv), shape, *to)[target]
                kk.copy_blocks(dst, src, stream=0 if of is to else None)
                reference.assert_same_bytes(read_back(), kv)

    def test_registered_host_memory(self, rng, torch):
        """Memory of anybody, once it is registered."""
        kv, shape = make(rng)
        source = reference.universal(kv)
        if int(torch.cuda.cudart().cudaHostRegister(source.ctypes.data, source.nbytes, 0)):
            pytest.skip("cudaHostRegister is refused here")
        try:
            dst, read_back = views(np.zeros_like(kv), shape, *place("torch"))["NHD"]
            kk.copy_blocks(dst, kk.UniversalBlocks(source, shape))
            reference.assert_same_bytes(read_back(), kv)
        finally:
            torch.cuda.cudart().cudaHostUnregister(source.ctypes.data)

    @pytest.mark.parametrize("axes", ["bothd", "obthd", "btohd", "bhtod", "blothd"])
    def test_k_and_v_wherever_they_are(self, rng, axes):
        """K and V first, second, side by side in a row, and all layers in one tensor."""
        kv, shape = make(rng)
        where = place("torch", "bfloat16")
        letters = "blothd"
        if "l" in axes:
            arrays = where.put(kv.transpose([letters.index(a) for a in axes]))
        else:
            arrays = [where.put(kv[:, layer].transpose(["bothd".index(a) for a in axes])) for layer in range(NL)]
        out = where.put(np.zeros_like(reference.universal(kv)))
        kk.copy_blocks(kk.UniversalBlocks(out, shape), kk.BlockStack.from_layers(arrays, shape, axes))
        reference.assert_same_bytes(where.get(out), reference.universal(kv))

    @pytest.mark.parametrize("to", KINDS)
    def test_parts_of_blocks_leave_the_rest_alone(self, rng, to):
        kv, shape = make(rng)
        before = reference.random_kv(rng, kv.shape, kv.dtype)
        where = place("torch", "bfloat16")
        dst, read_back = views(before, shape, *where)[to]
        src, _ = views(kv, shape, *where)["HND"]
        kk.copy_blocks(
            dst[[2, 0]].layers(1, 2).tokens(1, 4).heads(1, 3), src[[1, 2]].layers(0, 1).tokens(2, 5).heads(2, 4)
        )
        expected = before.copy()
        expected[[2, 0], 1:2, :, 1:4, 1:3] = kv[[1, 2], 0:1, :, 2:5, 2:4]
        reference.assert_same_bytes(read_back(), expected)

    @pytest.mark.parametrize(("nh", "saved", "loaded"), [(8, 2, 4), (6, 2, 3), (2, 2, 4)])
    def test_saved_to_pinned_memory_by_some_ranks_and_loaded_by_others(self, rng, nh, saved, loaded):
        kv, full = make(rng, extents=(NB, NL, NO, NT, nh, HD))
        where = place("torch", "bfloat16")
        store = place("torch pinned").put(np.zeros_like(reference.universal(kv)))
        universal = kk.UniversalBlocks(store, full)
        for rank in range(saved):
            part = kv[:, :, :, :, reference.heads_of_rank(nh, rank, saved)]
            shape = dataclasses.replace(full, nh=part.shape[4])
            kk.copy_blocks(universal.shard(rank, saved), kk.BlockStack(put_chunks(where, part, "NHD"), shape))
        reference.assert_same_bytes(place("torch pinned").get(store), reference.universal(kv))
        for rank in range(loaded):
            expected = kv[:, :, :, :, reference.heads_of_rank(nh, rank, loaded)]
            shape = dataclasses.replace(full, nh=expected.shape[4])
            chunks = put_chunks(where, np.zeros_like(expected), "HND")
            kk.copy_blocks(kk.BlockStack(chunks, shape, "HND"), universal.shard(rank, loaded))
            reference.assert_same_bytes(get_stack(where, chunks, shape, "HND"), expected)

    @pytest.mark.parametrize("places", [("torch", "torch"), ("torch pinned", "torch"), ("torch", "torch pinned")])
    @pytest.mark.parametrize("max_sms", [None, 1, 7, 10_000])
    def test_any_number_of_multiprocessors(self, rng, places, max_sms):
        kv, shape = make(rng, extents=(20, 4, 2, 16, 8, 64))
        src, _ = views(kv, shape, *place(places[0]))["NHD"]
        dst, read_back = views(np.zeros_like(kv), shape, *place(places[1]))["universal"]
        kk.copy_blocks(dst, src, max_sms=max_sms)
        reference.assert_same_bytes(read_back(), kv)

    def test_jax_arrays_are_read(self, rng):
        """bf16 among them, for which JAX has only DLPack."""
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        jax = pytest.importorskip("jax")
        if jax.default_backend() != "gpu":
            pytest.skip("JAX sees no GPU")
        for dtype in ("float16", "bfloat16"):
            source = jax.numpy.arange(64, dtype=dtype).block_until_ready()
            out = place("torch", dtype).put(np.zeros(64, np.uint16))
            kk.memcpy_batch([out], [source])
            assert out.tolist() == list(range(64))
            with pytest.raises(ValueError, match="read-only"):
                kk.memcpy_batch([source], [out])


class TestConversions:
    @pytest.mark.parametrize("name", ["torch", "cupy"])
    @pytest.mark.parametrize("layout", ["NHD", "HND"])
    def test_universal(self, rng, layout, name):
        kv, shape = make(rng)
        where = place(name, "bfloat16")
        blocks = put_chunks(where, kv, layout)
        universals = [where.put(block) for block in np.zeros_like(reference.universal(kv))]
        kk.universal_from_block(universals, blocks, layout)
        reference.assert_same_bytes(np.stack([where.get(u) for u in universals]), reference.universal(kv))

        back = put_chunks(where, np.zeros_like(kv), layout)
        kk.block_from_universal(back, universals, layout)
        reference.assert_same_bytes(get_stack(where, back, shape, layout), kv)

    @pytest.mark.parametrize("name", ["torch", "cupy"])
    @pytest.mark.parametrize("layout", ["NHD", "HND"])
    def test_operational(self, rng, layout, name):
        kv, shape = make(rng)
        where = place(name, "bfloat16")
        blocks = put_chunks(where, kv, layout)
        operationals = [where.put(block) for block in np.zeros_like(reference.operational(kv, layout))]
        kk.operational_from_block(operationals, blocks)
        reference.assert_same_bytes(np.stack([where.get(o) for o in operationals]), reference.operational(kv, layout))

        back = put_chunks(where, np.zeros_like(kv), layout)
        kk.block_from_operational(back, operationals)
        reference.assert_same_bytes(get_stack(where, back, shape, layout), kv)

    def test_to_pinned_memory_and_back(self, rng):
        kv, shape = make(rng)
        host, where = place("numpy over torch pinned"), place("torch", "bfloat16")
        universals = [host.put(block) for block in np.zeros_like(reference.universal(kv))]
        kk.universal_from_block(universals, put_chunks(where, kv, "NHD"), "NHD")
        reference.assert_same_bytes(np.stack([host.get(u) for u in universals]), reference.universal(kv))
        back = put_chunks(where, np.zeros_like(kv), "HND")
        kk.block_from_universal(back, universals, "HND")
        reference.assert_same_bytes(get_stack(where, back, shape, "HND"), kv)


class TestLists:
    """vectorized_copy and memcpy_batch."""

    @pytest.mark.parametrize("copy", [kk.vectorized_copy, kk.memcpy_batch])
    @pytest.mark.parametrize("places", [("torch", "torch"), ("cupy", "torch"), ("torch pinned", "torch")], ids=str)
    @pytest.mark.parametrize("size", [1, 48, 92, 1032, 40_000])
    def test_alignments_differ_within_one_call(self, rng, copy, places, size):
        """Each pair at its own misalignments, with guard bytes around."""
        shifts = [*itertools.product((0, 1, 2, 8), (0, 3, 8))]
        pitch = size + 128
        source = reference.random_kv(rng, (len(shifts), pitch), np.uint8)
        expected = reference.random_kv(rng, source.shape, np.uint8)
        src, dst = place(places[0]).put(source), place(places[1]).put(expected)
        copy(
            [dst[i, 64 + to : 64 + to + size] for i, (_, to) in enumerate(shifts)],
            [src[i, 64 + of : 64 + of + size] for i, (of, _) in enumerate(shifts)],
        )
        for i, (of, to) in enumerate(shifts):
            expected[i, 64 + to : 64 + to + size] = source[i, 64 + of : 64 + of + size]
        reference.assert_same_bytes(place(places[1]).get(dst), expected)

    @pytest.mark.parametrize("mode", ["auto", "async", "batch"])
    @pytest.mark.parametrize(
        "places",
        [("torch", "torch"), ("torch pinned", "torch"), ("torch", "cupyx pinned"), ("cupy", "torch")],
        ids=str,
    )
    def test_sizes_differ_within_one_batch(self, rng, torch, mode, places):
        if mode == "batch" and not kk.has_memcpy_batch_async():
            pytest.skip("this driver has no cudaMemcpyBatchAsync")
        sizes = [16, 0, 32, 5, 70_000, 4096, 1 << 20]
        sources = [reference.random_kv(rng, (n,), np.uint8) for n in sizes]
        # Not every pinned allocator gives out nothing.
        of, to = ([place(name if n else "torch") for n in sizes] for name in places)
        src = [where.put(source) for where, source in zip(of, sources, strict=True)]
        dst = [where.put(np.zeros_like(source)) for where, source in zip(to, sources, strict=True)]
        torch.cuda.synchronize()
        # The batch entry is not for the NULL stream.
        kk.memcpy_batch(dst, src, mode=mode, stream=torch.cuda.Stream())
        for where, out, source in zip(to, dst, sources, strict=True):
            reference.assert_same_bytes(where.get(out), source)
        assert kk.last_batch_routes() != ()
        if mode != "auto":
            assert kk.last_batch_routes() == (mode,)

    def test_routes(self, rng):
        """Short pieces inside the device are a kernel's."""
        where = place("torch")
        src, dst = where.put(reference.random_kv(rng, (64, 4096), np.uint8)), where.put(np.zeros((64, 4096), np.uint8))
        kk.memcpy_batch(list(dst), [src[i] for i in rng.permutation(64)])
        assert kk.last_batch_routes() == ("kernel",)
        kk.memcpy_batch(list(dst), list(src), mode="async")
        assert kk.last_batch_routes() == ("async",)

    def test_the_batch_entry_is_not_for_the_null_stream(self, rng):
        """It works there, or is refused with nothing done."""
        where = place("torch")
        src, dst = where.put(np.ones((2, 64), np.uint8)), where.put(np.zeros((2, 64), np.uint8))
        code = code_of(lambda: kk.memcpy_batch(list(dst), list(src), mode="batch"))
        assert code in (0, 801)
        assert where.get(dst).all() if code == 0 else not where.get(dst).any()


class TestPageableMemory:
    @pytest.mark.parametrize("mode", ["auto", "async", "batch"])
    @pytest.mark.parametrize("device", ["torch", "cupy"])
    def test_memcpy_batch_serves_it(self, rng, torch, mode, device):
        sources = [reference.random_kv(rng, (n,), np.uint8) for n in (16, 4096, 100_000, 3)]
        for of, to in (("pageable", device), (device, "pageable")):
            src = [place(of).put(source) for source in sources]
            dst = [place(to).put(np.zeros_like(source)) for source in sources]
            torch.cuda.synchronize()
            try:
                kk.memcpy_batch(dst, src, mode=mode, stream=torch.cuda.Stream())
            except kk.KvbmError:
                # cudaMemcpyBatchAsync may refuse it; the other modes may not.
                assert mode == "batch"
                continue
            for out, source in zip(dst, sources, strict=True):
                reference.assert_same_bytes(place(to).get(out), source)

    def test_kernels_are_not_given_it(self, rng):
        kv, shape = make(rng)
        where = place("torch", "bfloat16")
        on_device = where.put(np.zeros_like(reference.universal(kv)))
        device = kk.UniversalBlocks(on_device, shape)
        host = kk.UniversalBlocks(reference.universal(kv), shape)
        message = "{} is in pageable host memory, which a kernel cannot reach: use pinned memory, or memcpy_batch"
        for dst, src, name in ((device, host, "src"), (host, device, "dst")):
            with pytest.raises(ValueError, match=message.format(name)):
                kk.copy_blocks(dst, src)
        with pytest.raises(ValueError, match=message.format("srcs")):
            kk.vectorized_copy([on_device.view(-1)], [reference.universal(kv).ravel()])
        with pytest.raises(ValueError, match=message.format("blocks")):
            kk.universal_from_block(list(on_device), reference.block_stack(kv, "NHD"), "NHD")
        assert not where.get(on_device).any()

    def test_one_pageable_array_among_pinned_ones_is_found(self, rng):
        sources = [place(name).put(np.ones(64, np.uint8)) for name in ("torch pinned", "cupyx pinned", "pageable")]
        dst = [place("torch").put(np.zeros(64, np.uint8)) for _ in sources]
        with pytest.raises(ValueError, match="srcs is in pageable host memory"):
            kk.vectorized_copy(dst, sources)
        kk.vectorized_copy(dst[:2], sources[:2])
        assert [int(d.sum()) for d in dst] == [64, 64, 0]


def test_the_build_is_described(torch):
    info = kk.build_info()
    assert not info.is_stub_build
    assert not kk.is_stub_build()
    assert info.devices == torch.cuda.device_count()
    major, minor = torch.cuda.get_device_capability()
    assert f"{major}{minor}" in [arch.rstrip("af") for arch in info.archs]
    assert info.cuda is not None
    assert info.driver is not None
    assert int(info.driver.split(".")[0]) >= int(info.cuda.split(".")[0])
    assert isinstance(kk.has_memcpy_batch_async(), bool)
