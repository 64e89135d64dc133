"""copy_blocks: every layout to every other, whole blocks and parts, and what it refuses."""

from __future__ import annotations

import dataclasses
import itertools
import threading

import ml_dtypes
import numpy as np
import pytest

import kvbm_kernels as kk
import reference
from kinds import KINDS, views
from memory import CudaArray, Guarded

BF16 = ml_dtypes.bfloat16
NB, NL, NO, NT, NH, HD = 3, 2, 2, 5, 4, 16
SHAPE = kk.BlockShape(nl=NL, no=NO, nh=NH, nt=NT, hd=HD, dtype="bf16")


@pytest.fixture
def kv(rng):
    return reference.random_kv(rng, (NB, NL, NO, NT, NH, HD), BF16)


@pytest.mark.parametrize(("to", "of"), list(itertools.product(KINDS, KINDS)))
@pytest.mark.parametrize(
    "dtype", [BF16, np.float32, ml_dtypes.float8_e4m3fn, np.float64], ids=lambda d: np.dtype(d).name
)
def test_every_layout_to_every_other(rng, to, of, dtype):
    """The bits of the logical cache arrive, NaNs, negative zeros and denormals among them."""
    kv = reference.random_kv(rng, (NB, NL, NO, NT, NH, HD), dtype)
    shape = kk.BlockShape(NL, NO, NH, NT, HD, dtype)
    src, _ = views(kv, shape)[of]
    dst, read_back = views(np.zeros_like(kv), shape)[to]
    kk.copy_blocks(dst, src)
    reference.assert_same_bytes(read_back(), kv)


@pytest.mark.parametrize("to", KINDS)
def test_parts_of_blocks_leave_the_rest_alone(rng, kv, to):
    """Some blocks, layers, tokens and heads: what is outside keeps its bits, padding included."""
    before = reference.random_kv(rng, kv.shape, BF16)
    dst, read_back = views(before.copy(), SHAPE)[to]
    src, _ = views(kv, SHAPE)["HND"]
    kk.copy_blocks(
        dst[[2, 0]].layers(1, 2).tokens(1, 4).heads(1, 3),
        src[[1, 2]].layers(0, 1).tokens(2, 5).heads(2, 4),
    )
    expected = before.copy()
    expected[[2, 0], 1:2, :, 1:4, 1:3] = kv[[1, 2], 0:1, :, 2:5, 2:4]
    reference.assert_same_bytes(read_back(), expected)


def test_padding_between_rows_is_never_written(rng):
    """Rows of 576 bytes, 584 apart."""
    kv = reference.random_kv(rng, (2, 2, 1, 8, 1, 576), np.uint8)
    shape = kk.BlockShape(2, 1, 1, 8, 576, "uint8")
    pages = np.full((2, 2, 8, 584), 0xA5, np.uint8)
    dst = kk.BlockStack.from_layers(list(pages[..., :576]), shape, "btd")
    kk.copy_blocks(dst, kk.UniversalBlocks(reference.universal(kv), shape))
    reference.assert_same_bytes(pages[..., :576], kv[:, :, 0, :, 0].swapaxes(0, 1))
    assert (pages[..., 576:] == 0xA5).all()


@pytest.mark.parametrize("misalignment", [0, 1, 2, 6, 8, 33])
def test_addresses_need_no_alignment(rng, misalignment):
    """And nothing outside a destination is touched."""
    kv = reference.random_kv(rng, (1, 1, 2, 3, 2, 37), np.uint8)
    shape = kk.BlockShape(1, 2, 2, 3, 37, "uint8")
    chunks = [Guarded((2, 3, 37), np.uint8, misalignment + i) for i in range(2)]
    kk.copy_blocks(
        kk.BlockStack([[chunk.array for chunk in chunks]], shape, "HND"),
        kk.UniversalBlocks(reference.universal(kv), shape),
    )
    for chunk in chunks:
        chunk.assert_guards()
    reference.assert_same_bytes(reference.from_block_stack([[c.array for c in chunks]], 1, 2, "HND"), kv)


@pytest.mark.parametrize("threads", [0, 1, 2, 7, 64])
def test_any_number_of_threads(rng, threads):
    kv = reference.random_kv(rng, (9, 4, 2, 16, 8, 64), np.float16)
    shape = kk.BlockShape(4, 2, 8, 16, 64, "f16")
    out = np.zeros_like(reference.universal(kv))
    kk.copy_blocks(
        kk.UniversalBlocks(out, shape), kk.BlockStack(reference.block_stack(kv, "NHD"), shape), num_threads=threads
    )
    reference.assert_same_bytes(out, reference.universal(kv))


def test_calls_from_many_threads(rng):
    kv = reference.random_kv(rng, (NB, NL, NO, NT, NH, HD), BF16)
    src = kk.BlockStack(reference.block_stack(kv, "NHD"), SHAPE)
    outs = [np.zeros_like(reference.universal(kv)) for _ in range(8)]

    def copy(out):
        for _ in range(50):
            out[:] = 0
            kk.copy_blocks(kk.UniversalBlocks(out, SHAPE), src)

    workers = [threading.Thread(target=copy, args=(out,)) for out in outs]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for out in outs:
        reference.assert_same_bytes(out, reference.universal(kv))


class TestTensorParallelism:
    @pytest.mark.parametrize(("nh", "saved", "loaded"), [(8, 2, 4), (6, 2, 3), (8, 4, 1), (2, 2, 4), (1, 1, 4)])
    def test_saved_by_some_ranks_and_loaded_by_others(self, rng, nh, saved, loaded):
        """Each rank loads exactly the NumPy slice of the full cache, wherever it was saved."""
        kv = reference.random_kv(rng, (NB, NL, NO, NT, nh, HD), BF16)
        full = kk.BlockShape(NL, NO, nh, NT, HD, "bf16")
        store = np.zeros_like(reference.universal(kv))
        universal = kk.UniversalBlocks(store, full)
        for rank in range(saved):
            part = kv[:, :, :, :, reference.heads_of_rank(nh, rank, saved)]
            kk.copy_blocks(
                universal.shard(rank, saved),
                kk.BlockStack(reference.block_stack(part, "NHD"), dataclasses.replace(full, nh=part.shape[4])),
            )
        reference.assert_same_bytes(store, reference.universal(kv))
        for rank in range(loaded):
            expected = kv[:, :, :, :, reference.heads_of_rank(nh, rank, loaded)]
            shape = dataclasses.replace(full, nh=expected.shape[4])
            chunks = reference.block_stack(np.zeros_like(expected), "HND")
            kk.copy_blocks(kk.BlockStack(chunks, shape, "HND"), universal.shard(rank, loaded))
            reference.assert_same_bytes(reference.from_block_stack(chunks, NL, NO, "HND"), expected)

    def test_a_universal_array_of_one_rank_is_a_slice_of_the_full_one(self, kv):
        full = reference.universal(kv)
        shape = dataclasses.replace(SHAPE, nh=2)
        by_slice = np.zeros((NB, 2, NL, NO, NT, HD), BF16)
        kk.copy_blocks(kk.UniversalBlocks(by_slice, shape), kk.UniversalBlocks(full[:, 2:4], shape))
        by_shard = np.zeros_like(by_slice)
        kk.copy_blocks(kk.UniversalBlocks(by_shard, shape), kk.UniversalBlocks(full, SHAPE).shard(1, 2))
        reference.assert_same_bytes(by_slice, by_shard)


class TestMismatches:
    @pytest.fixture
    def dst(self):
        return kk.UniversalBlocks(np.zeros((NB, NH, NL, NO, NT, HD), np.uint16), SHAPE)

    def refused(self, dst, src, error, message):
        """The call raises, and the destination keeps its bytes."""
        before = [np.copy(owner) for owner in dst.memory.owners]
        with pytest.raises(error, match=message) as raised:
            kk.copy_blocks(dst, src)
        assert isinstance(raised.value, kk.KvbmError)
        for owner, was in zip(dst.memory.owners, before, strict=True):
            reference.assert_same_bytes(owner, was)

    def test_numbers_of_blocks(self, dst, kv):
        src = kk.UniversalBlocks(reference.universal(kv), SHAPE)
        self.refused(dst, src[:2], ValueError, "dst has 3 blocks and src 2, expected the same number")

    def test_shapes(self, dst, kv):
        src = kk.UniversalBlocks(reference.universal(kv), SHAPE).heads(0, 2)
        self.refused(dst, src, ValueError, "dst has blocks of nl=2 no=2 nh=4 .* and src of nl=2 no=2 nh=2 .*")

    def test_types(self, dst, kv):
        """Types of the same size are not exchanged: the bits would mean something else."""
        shape = dataclasses.replace(SHAPE, dtype="f16")
        src = kk.UniversalBlocks(reference.universal(kv).view(np.float16), shape)
        self.refused(dst, src, TypeError, "dst has dtype bf16 and src f16, expected the same: no value is converted")

    def test_read_only_destinations(self, kv):
        arrays = list(reference.universal(kv))
        arrays[1].flags.writeable = False
        dst = kk.UniversalBlocks(arrays, SHAPE)
        src = kk.UniversalBlocks(reference.universal(kv), SHAPE)
        self.refused(dst, src, ValueError, r"dst cannot be written: arrays\[1\] is read-only")
        self.refused(dst[[0]], src[[0]], ValueError, r"dst cannot be written: ")
        kk.copy_blocks(src, dst)

    @pytest.mark.parametrize("wrong", [None, np.zeros(3), 1])
    def test_things_that_are_no_views(self, dst, wrong):
        with pytest.raises(TypeError, match=f"src is an? {type(wrong).__name__}, expected a view"):
            kk.copy_blocks(dst, wrong)
        with pytest.raises(TypeError, match=f"dst is an? {type(wrong).__name__}, expected a view"):
            kk.copy_blocks(wrong, dst)

    def test_options(self, dst, kv):
        src = kk.UniversalBlocks(reference.universal(kv), SHAPE)
        kk.copy_blocks(dst, src, max_sms=4, num_threads=np.int8(2))
        for options, error, message in (
            ({"num_threads": -1}, ValueError, "num_threads is -1, expected 0 or more"),
            ({"num_threads": 1.5}, TypeError, "num_threads is 1.5, expected an integer"),
            ({"num_threads": 1 << 31}, ValueError, r"num_threads is 2147483648, expected less than 2\*\*31"),
            ({"max_sms": 1 << 40}, ValueError, r"max_sms is 1099511627776, expected less than 2\*\*31"),
            ({"max_sms": 0}, ValueError, "max_sms is 0, expected 1 or more"),
            ({"max_sms": True}, TypeError, "max_sms is True, expected an integer"),
            ({"stream": "0"}, TypeError, "stream is '0', expected a handle"),
            ({"stream": -1}, ValueError, "stream is -1, expected a handle"),
        ):
            with pytest.raises(error, match=message):
                kk.copy_blocks(dst, src, **options)


class TestCuda:
    """Which memory goes where. Nothing here gets as far as a device."""

    def cuda_view(self):
        return kk.UniversalBlocks(CudaArray((NB, NH, NL, NO, NT, HD), "<V2"), SHAPE)

    def test_the_device_shows(self):
        assert self.cuda_view().device == "cuda:0"

    def test_arrays_of_one_view_are_on_one_device(self):
        arrays = [np.zeros((NH, NL, NO, NT, HD), np.uint16), CudaArray((NH, NL, NO, NT, HD), "<u2")]
        with pytest.raises(ValueError, match=r"arrays\[1\] is on cuda:0, expected the cpu of arrays\[0\]"):
            kk.UniversalBlocks(arrays, SHAPE)

    def test_the_stub_refuses_cuda_memory_and_streams(self, kv):
        if not kk.is_stub_build():
            pytest.skip("this build has CUDA")
        host = kk.UniversalBlocks(reference.universal(kv), SHAPE)
        for dst, src in ((self.cuda_view(), host), (host, self.cuda_view())):
            with pytest.raises(kk.StubBuildError, match="has no CUDA"):
                kk.copy_blocks(dst, src)
        with pytest.raises(kk.StubBuildError, match="has no CUDA"):
            kk.copy_blocks(kk.UniversalBlocks(np.zeros_like(reference.universal(kv)), SHAPE), host, stream=0)

    @pytest.fixture
    def no_driver(self):
        if kk.is_stub_build() or kk.build_info().devices:
            pytest.skip("this needs CUDA, and no GPU")

    def test_without_a_driver_cuda_says_so(self, no_driver, monkeypatch, kv, torch):
        """The CUDA build without a driver still copies in host memory, and reports CUDA's own code for the rest."""
        monkeypatch.setattr("kvbm_kernels.arrays.is_pinned", lambda _: True)
        src = kk.UniversalBlocks(torch.from_numpy(reference.universal(kv).view(np.int16)), SHAPE)
        dst = kk.UniversalBlocks(torch.zeros(NB, NH, NL, NO, NT, HD, dtype=torch.int16), SHAPE)
        with pytest.raises(kk.CudaError, match="copy_blocks: ") as raised:
            kk.copy_blocks(dst, src, stream=0)
        assert (raised.value.code, raised.value.name) in [
            (35, "cudaErrorInsufficientDriver"),
            (100, "cudaErrorNoDevice"),
        ]
        kk.copy_blocks(dst, src)
        assert torch.equal(dst.memory.owners[0], src.memory.owners[0])

    def test_pageable_memory_is_refused_before_a_launch(self, kv):
        if kk.is_stub_build():
            pytest.skip("this build has no CUDA")
        host = kk.UniversalBlocks(reference.universal(kv), SHAPE)
        with pytest.raises(ValueError, match="src is in pageable host memory, which a kernel cannot reach"):
            kk.copy_blocks(self.cuda_view(), host)
        with pytest.raises(ValueError, match="dst is in pageable host memory"):
            kk.copy_blocks(host, self.cuda_view())
        with pytest.raises(ValueError, match="dst is in pageable host memory"):
            kk.copy_blocks(kk.UniversalBlocks(np.zeros_like(reference.universal(kv)), SHAPE), host, stream=0)
