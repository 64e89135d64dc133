"""vectorized_copy and memcpy_batch: lists of arrays, each moved in one piece."""

from __future__ import annotations

import mmap

import ml_dtypes
import numpy as np
import pytest

import kvbm_kernels as kk
import reference
from memory import CudaArray, Guarded

BOTH = pytest.mark.parametrize("copy", [kk.vectorized_copy, kk.memcpy_batch])

SIZES = [*range(1, 68), 132, 576, 584, 656, 1032, 37440]


@BOTH
@pytest.mark.parametrize("size", SIZES)
def test_every_size_exactly(rng, copy, size):
    source = reference.random_kv(rng, (size,), np.uint8)
    out = Guarded((size,), np.uint8)
    copy([out.array], [source])
    reference.assert_same_bytes(out.array, source)
    out.assert_guards()


@BOTH
@pytest.mark.parametrize(("of", "to"), [(0, 2), (2, 0), (1, 1), (8, 3), (15, 16)])
def test_addresses_need_no_alignment(rng, copy, of, to):
    """92 bytes from an aligned source to a destination at +2, the two swapped, and worse."""
    source, out = Guarded((92,), np.uint8, of), Guarded((92,), np.uint8, to)
    source.array[:] = reference.random_kv(rng, (92,), np.uint8)
    copy([out.array], [source.array])
    reference.assert_same_bytes(out.array, source.array)
    out.assert_guards()


@BOTH
def test_alignments_differ_within_one_call(rng, copy):
    """Three pairs of 48 bytes, aligned, at +1 and at +8: what suits one pair is not used for another."""
    sources = [Guarded((48,), np.uint8, m) for m in (0, 1, 8)]
    outs = [Guarded((48,), np.uint8, m) for m in (0, 1, 8)]
    for source in sources:
        source.array[:] = reference.random_kv(rng, (48,), np.uint8)
    copy([out.array for out in outs], [source.array for source in sources])
    for out, source in zip(outs, sources, strict=True):
        reference.assert_same_bytes(out.array, source.array)
        out.assert_guards()


@BOTH
def test_70_000_pairs(rng, copy):
    source = reference.random_kv(rng, (70_000, 4), np.uint8)
    out = np.zeros_like(source)
    order = rng.permutation(70_000)
    copy([out[i] for i in order], [source[i] for i in order])
    reference.assert_same_bytes(out, source)


@BOTH
def test_nothing_to_do(copy):
    copy([], [])
    copy([np.zeros((0, 3))] * 2, [np.zeros((2, 0))] * 2)


def test_memcpy_batch_takes_sizes_that_differ_and_zero_among_them(rng):
    sources = [reference.random_kv(rng, (n,), np.uint8) for n in (16, 0, 32, 5)]
    outs = [np.zeros_like(source) for source in sources]
    kk.memcpy_batch(outs, sources)
    for out, source in zip(outs, sources, strict=True):
        reference.assert_same_bytes(out, source)


def test_vectorized_copy_takes_one_size():
    message = r"dsts\[2\] has 8 bytes, expected the 4 of dsts\[0\]"
    with pytest.raises(ValueError, match=message):
        kk.vectorized_copy([np.zeros(n, np.uint8) for n in (4, 4, 8)], [np.ones(n, np.uint8) for n in (4, 4, 8)])


@BOTH
def test_shapes_need_not_agree(rng, copy):
    source = reference.random_kv(rng, (3, 4, 5), np.float16)
    out = np.zeros((60,), np.float16)
    copy([out], [source])
    reference.assert_same_bytes(out, source.ravel())


@BOTH
def test_any_kind_of_buffer(torch, rng, copy):
    source = reference.random_kv(rng, (64,), np.uint8)
    bf16 = source.view(ml_dtypes.bfloat16)
    outs = [
        bytearray(64),
        memoryview(bytearray(64)),
        mmap.mmap(-1, 64),
        torch.zeros(32, dtype=torch.bfloat16),
        np.zeros(32, np.uint16),
        np.zeros((4, 8), ml_dtypes.bfloat16),
    ]
    copy(outs, [source, source.tobytes(), bytearray(source), bf16, bf16, memoryview(source)])
    for out in outs:
        if isinstance(out, torch.Tensor):
            out = out.view(torch.uint8).numpy()
        got = np.frombuffer(out, np.uint8) if not isinstance(out, np.ndarray) else out.view(np.uint8).ravel()
        reference.assert_same_bytes(got, source)


@BOTH
def test_any_type_moves_to_its_own(rng, copy):
    """Block tables and the like are moved as well as floats."""
    for dtype in (np.int64, np.uint32, np.complex64, "M8[s]", bool):
        source = np.arange(4).astype(dtype)
        out = np.zeros_like(source)
        copy([out], [source])
        assert (out == source).all()


def refused(copy, dsts, srcs, error, message):
    """The call raises and writes nothing."""
    kept = [array for array in dsts if isinstance(array, np.ndarray)]
    before = [array.copy() for array in kept]
    with pytest.raises(error, match=message) as raised:
        copy(dsts, srcs)
    assert isinstance(raised.value, kk.KvbmError)
    for array, was in zip(kept, before, strict=True):
        reference.assert_same_bytes(array, was)


@BOTH
class TestErrors:
    def test_types_that_differ(self, copy):
        dsts, srcs = [np.zeros(4, ml_dtypes.bfloat16)] * 2, [np.ones(4, np.uint16), np.ones(4, np.float16)]
        refused(copy, dsts, srcs, TypeError, r"dsts\[1\] has dtype bfloat16 and srcs\[1\] float16, expected the same")

    def test_raw_integers_of_another_size(self, copy):
        refused(copy, [np.zeros(4, np.float32)], [np.ones(8, np.uint16)], TypeError, "expected the same")

    def test_sizes_that_differ(self, copy):
        refused(copy, [np.zeros(4)], [np.ones(5)], ValueError, r"dsts\[0\] has 32 bytes and srcs\[0\] 40")

    def test_lists_that_differ(self, copy):
        refused(copy, [np.zeros(4)], [], ValueError, "dsts has 1 arrays and srcs 0, expected the same number")

    def test_arrays_instead_of_lists(self, copy):
        refused(copy, np.zeros((2, 4)), [np.ones(4)] * 2, TypeError, "dsts is a ndarray, expected a list of arrays")
        refused(copy, [np.zeros(4)], bytearray(32), TypeError, "srcs is a bytearray, expected a list of arrays")

    def test_things_that_are_no_arrays(self, copy):
        refused(copy, [np.zeros(4), None], [np.ones(4)] * 2, TypeError, r"dsts\[1\] is a NoneType, expected an array")

    def test_arrays_that_are_not_contiguous(self, copy):
        message = r"srcs\[0\] has shape \[2, 2\] and strides \[32, 8\] bytes, expected a contiguous array"
        refused(copy, [np.zeros((2, 2))], [np.ones((2, 4))[:, :2]], ValueError, message)
        refused(copy, [np.zeros((4, 2)).T], [np.ones((2, 4))], ValueError, r"dsts\[0\] has shape \[2, 4\] and strides")

    def test_destinations_that_cannot_be_written(self, copy):
        refused(
            copy, [np.zeros(4, np.uint8), b"1234"], [np.ones(4, np.uint8)] * 2, ValueError, r"dsts\[1\] is read-only"
        )

    def test_overlapping_destinations(self, copy):
        memory = np.zeros(12, np.uint8)
        srcs = [np.ones(4, np.uint8)] * 3
        message = "dsts overlap: some memory would be written more than once"
        refused(copy, [memory[:4], memory[8:], memory[:4]], srcs, ValueError, message)
        refused(copy, [memory[8:], memory[:4], memory[3:7]], srcs, ValueError, message)
        copy([memory[8:], memory[:4], memory[4:8]], srcs)
        assert memory.all()

    def test_chains(self, copy):
        """A to B and B to C in one call: what C gets would depend on the order."""
        a, b, c = (np.full(8, i, np.uint8) for i in range(3))
        message = "dsts and srcs overlap: some memory would be both written and read"
        refused(copy, [b, c], [a, b], ValueError, message)
        refused(copy, [c, b], [b[4:].repeat(2), c], ValueError, message)
        refused(copy, [b[:7]], [b[1:]], ValueError, message)
        refused(copy, [b], [b], ValueError, message)

    def test_empty_arrays_overlap_nothing(self, copy):
        memory = np.zeros(8, np.uint8)
        copy([memory[4:4], memory[4:4]], [memory[:0], memory[2:2]])

    def test_cuda_arrays(self, copy):
        """The stub has no way to reach them; a kernel cannot reach the pageable side."""
        if kk.is_stub_build():
            refused(copy, [CudaArray((4,))], [np.ones(4, np.float16)], kk.StubBuildError, "has no CUDA")
        elif copy is kk.vectorized_copy:
            refused(copy, [CudaArray((4,))], [np.ones(4, np.float16)], ValueError, "srcs is in pageable host memory")

    def test_without_a_driver_cuda_says_so(self, copy):
        """memcpy_batch takes pageable memory to CUDA, which here is not there."""
        if kk.is_stub_build() or kk.build_info().devices or copy is not kk.memcpy_batch:
            pytest.skip("this needs CUDA, and no GPU")
        dsts, srcs = [np.zeros(4)], [np.ones(4)]
        with pytest.raises(kk.CudaError) as raised:
            copy(dsts, srcs, stream=0)
        assert raised.value.code in (35, 100)
        with pytest.raises(kk.CudaError):
            copy([bytearray(4), bytearray(8)], [bytes(4), bytes(8)], stream=0)
        copy(dsts, srcs)
        assert dsts[0].all()

    def test_a_stream_is_for_cuda(self, copy):
        if not kk.is_stub_build():
            pytest.skip("this build has CUDA")
        with pytest.raises(kk.StubBuildError, match="has no CUDA"):
            copy([np.zeros(4)], [np.ones(4)], stream=0)
        with pytest.raises(TypeError, match="stream is '1'"):
            copy([np.zeros(4)], [np.ones(4)], stream="1")


@pytest.mark.parametrize("mode", ["auto", "async", "batch"])
def test_in_host_memory_every_mode_copies(rng, mode):
    source = reference.random_kv(rng, (1000,), np.uint8)
    out = np.zeros_like(source)
    kk.memcpy_batch([out], [source], mode=mode)
    reference.assert_same_bytes(out, source)


def test_modes_that_are_none():
    for mode, error in (("fast", ValueError), ("", ValueError), (0, TypeError), (None, TypeError)):
        out = np.zeros(4)
        with pytest.raises(error, match=f"mode is {mode!r}, expected"):
            kk.memcpy_batch([out], [np.ones(4)], mode=mode)
        assert not out.any()
