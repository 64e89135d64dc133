"""The four conversions under their C names, against the reference, bit for bit."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

import kvbm_kernels as kk
import reference
from memory import CudaArray, Guarded

BF16 = ml_dtypes.bfloat16
DTYPES = [np.float16, BF16, np.float32, np.float64, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.int8, np.uint8]


def guarded_stack(kv: np.ndarray, layout: str, misalignments=(0,)) -> list[list[Guarded]]:
    """Empty chunks for a cache like this one, in memory with guards."""
    nb, nl, no, nt, nh, hd = kv.shape
    shape = (nt, nh, hd) if layout == "NHD" else (nh, nt, hd)
    return [
        [Guarded(shape, kv.dtype, misalignments[i % len(misalignments)]) for i in range(nl * no)] for _ in range(nb)
    ]


def guarded_blocks(kv: np.ndarray, block_shape: tuple[int, ...], misalignments=(0,)) -> list[Guarded]:
    return [Guarded(block_shape, kv.dtype, misalignments[b % len(misalignments)]) for b in range(kv.shape[0])]


def arrays(guarded):
    return [arrays(entry) for entry in guarded] if isinstance(guarded, list) else guarded.array


def assert_guards(guarded):
    for entry in guarded:
        assert_guards(entry) if isinstance(entry, list) else entry.assert_guards()


@pytest.mark.parametrize("hd", [1, 46, 80, 96, 112, 192, 256, 576])
@pytest.mark.parametrize("nt", [1, 5, 13])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_universal_from_block_and_back(rng, dtype, layout, nt, hd):
    """Equal to the NumPy transpose, and the inverse restores it; nothing around the arrays is written."""
    kv = reference.random_kv(rng, (2, 2, 2, nt, 3, hd), dtype)
    universals = guarded_blocks(kv, (3, 2, 2, nt, hd))
    kk.universal_from_block(arrays(universals), reference.block_stack(kv, layout), layout)
    reference.assert_same_bytes(np.stack(arrays(universals)), reference.universal(kv))
    assert_guards(universals)

    blocks = guarded_stack(kv, layout)
    kk.block_from_universal(arrays(blocks), arrays(universals), layout)
    reference.assert_same_bytes(reference.from_block_stack(arrays(blocks), 2, 2, layout), kv)
    assert_guards(blocks)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.uint8], ids=lambda d: np.dtype(d).name)
def test_operational_from_block_and_back(rng, dtype, layout):
    """The elements of a chunk keep their order, whatever it is."""
    kv = reference.random_kv(rng, (3, 4, 2, 5, 3, 46), dtype)
    operationals = guarded_blocks(kv, (4, 2, 5 * 3 * 46))
    kk.operational_from_block(arrays(operationals), reference.block_stack(kv, layout))
    reference.assert_same_bytes(np.stack(arrays(operationals)), reference.operational(kv, layout))
    assert_guards(operationals)

    blocks = guarded_stack(kv, layout)
    kk.block_from_operational(arrays(blocks), arrays(operationals))
    reference.assert_same_bytes(reference.from_block_stack(arrays(blocks), 4, 2, layout), kv)
    assert_guards(blocks)


def test_flat_chunks_and_strided_chunks_go_with_operational_blocks(rng):
    kv = reference.random_kv(rng, (2, 3, 2, 5, 3, 8), BF16)
    chunks = reference.block_stack(kv, "NHD")
    expected = reference.operational(kv, "NHD")
    wide = [[np.repeat(chunk, 2, axis=0)[::2] for chunk in block] for block in chunks]
    for blocks in (chunks, [[chunk.ravel() for chunk in block] for block in chunks], wide):
        out = np.zeros_like(expected)
        kk.operational_from_block(list(out), blocks)
        reference.assert_same_bytes(out, expected)


@pytest.mark.parametrize("misalignments", [(2,), (6,), (1, 8, 33, 4), (16, 3)])
def test_arrays_need_no_alignment(rng, misalignments):
    """Universal buffers at +2, chunks at +6, and different alignments within one call."""
    kv = reference.random_kv(rng, (3, 2, 2, 5, 2, 24), np.float16)
    universals = guarded_blocks(kv, (2, 2, 2, 5, 24), misalignments[::-1])
    source = guarded_stack(kv, "HND", misalignments)
    for block, chunks in zip(arrays(source), reference.block_stack(kv, "HND"), strict=True):
        for array, chunk in zip(block, chunks, strict=True):
            array[:] = chunk
    kk.universal_from_block(arrays(universals), arrays(source), "HND")
    reference.assert_same_bytes(np.stack(arrays(universals)), reference.universal(kv))
    assert_guards(universals)
    blocks = guarded_stack(kv, "HND", misalignments)
    kk.block_from_universal(arrays(blocks), arrays(universals), "HND")
    reference.assert_same_bytes(reference.from_block_stack(arrays(blocks), 2, 2, "HND"), kv)
    assert_guards(blocks)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_a_single_element(rng, dtype):
    """Every extent 1, with 64 guard bytes on each side."""
    kv = reference.random_kv(rng, (1, 1, 1, 1, 1, 1), dtype)
    universals, blocks = guarded_blocks(kv, (1, 1, 1, 1, 1), (7,)), guarded_stack(kv, "NHD", (5,))
    kk.universal_from_block(arrays(universals), reference.block_stack(kv, "NHD"), kk.Layout.NHD)
    kk.block_from_universal(arrays(blocks), arrays(universals), "hnd")
    reference.assert_same_bytes(reference.from_block_stack(arrays(blocks), 1, 1, "NHD"), kv)
    assert_guards(universals)
    assert_guards(blocks)


@pytest.mark.parametrize("shape", [(2, 2, 2, 2, 2, 2), (1, 3, 2, 2, 2, 4), (2, 1, 2, 5, 1, 4), (2, 2, 2, 3, 2, 4)])
def test_the_layout_is_what_the_caller_says(rng, shape):
    """nh = nt, nh = 1, nh = no = 2, nb = 2: no shape is taken for a hint."""
    kv = reference.random_kv(rng, shape, np.float16)
    nb, nl, no, nt, nh, hd = shape
    for layout in ("NHD", "HND"):
        out = np.zeros((nb, nh, nl, no, nt, hd), np.float16)
        kk.universal_from_block(list(out), reference.block_stack(kv, layout), layout)
        reference.assert_same_bytes(out, reference.universal(kv))
    if nh == nt:
        kk.universal_from_block(list(out), reference.block_stack(kv, "NHD"), "HND")
        reference.assert_same_bytes(out, reference.universal(kv.swapaxes(3, 4)))


def test_torch_tensors(torch, rng):
    kv = reference.random_kv(rng, (2, 3, 2, 4, 5, 8), np.uint16)
    blocks = [[torch.from_numpy(c).view(torch.bfloat16) for c in block] for block in reference.block_stack(kv, "NHD")]
    universals = [torch.zeros(5, 3, 2, 4, 8, dtype=torch.bfloat16) for _ in range(2)]
    kk.universal_from_block(universals, blocks, "NHD")
    for universal, expected in zip(universals, reference.universal(kv), strict=True):
        reference.assert_same_bytes(universal.view(torch.uint16).numpy(), expected)
    back = [[torch.zeros_like(chunk) for chunk in block] for block in blocks]
    kk.block_from_universal(back, universals, "NHD")
    for block, expected in zip(back, blocks, strict=True):
        for chunk, was in zip(block, expected, strict=True):
            assert torch.equal(chunk.view(torch.int16), was.view(torch.int16))


@pytest.mark.parametrize("carrier", ["uint16", "int16", "V2", "bytes", "torch"])
def test_bf16_in_many_guises(request, rng, carrier):
    """Bits move unchanged between ml_dtypes, raw integers, torch and plain memory."""
    kv = reference.random_kv(rng, (2, 2, 2, 3, 2, 8), BF16)
    as_carrier = {
        "bytes": lambda a: bytearray(a.tobytes()),
        "torch": lambda a: (
            request.getfixturevalue("torch")
            .from_numpy(a.view(np.uint16).copy())
            .view(request.getfixturevalue("torch").bfloat16)
        ),
    }.get(carrier, lambda a: a.view(carrier))
    blocks = [[as_carrier(chunk) for chunk in block] for block in reference.block_stack(kv, "HND")]
    out = np.zeros_like(reference.universal(kv))
    kk.universal_from_block(list(out), blocks, "HND")
    reference.assert_same_bytes(out, reference.universal(kv))


def test_raw_integers_on_both_sides(rng):
    kv = reference.random_kv(rng, (2, 2, 2, 3, 2, 8), np.uint16)
    out = np.zeros_like(reference.universal(kv)).view(np.int16)
    kk.universal_from_block(list(out), reference.block_stack(kv, "NHD"), "NHD")
    reference.assert_same_bytes(out, reference.universal(kv))


def test_chunks_by_layer_and_outer(rng):
    kv = reference.random_kv(rng, (2, 3, 2, 4, 2, 8), BF16)
    blocks = [[block[2 * i : 2 * i + 2] for i in range(3)] for block in reference.block_stack(kv, "NHD")]
    out = np.zeros_like(reference.universal(kv))
    kk.universal_from_block(list(out), blocks, "NHD")
    reference.assert_same_bytes(out, reference.universal(kv))


def test_slices_of_larger_arrays(rng):
    """Chunks and universals may be strided; what lies between is neither read nor written."""
    kv = reference.random_kv(rng, (2, 2, 2, 4, 3, 8), BF16)
    chunks = [[np.repeat(chunk, 2, axis=1)[:, ::2] for chunk in block] for block in reference.block_stack(kv, "NHD")]
    wide = np.full((2, 3, 2, 2, 4, 11), 7, BF16)
    kk.universal_from_block(list(wide[..., 1:9]), chunks, "NHD")
    reference.assert_same_bytes(wide[..., 1:9], reference.universal(kv))
    assert (wide[..., [0, 9, 10]] == 7).all()


@pytest.mark.parametrize("gap", [0, 8])
def test_arrays_that_lie_between_each_other(rng, gap):
    """A universal block between the chunks of its source, as near as can be; a byte nearer is an overlap."""
    kv = reference.random_kv(rng, (1, 1, 2, 2, 2, 4), np.uint8)
    size = kv.nbytes // 2
    memory = np.zeros(4 * size + 2 * gap, np.uint8)
    starts = 0, size + gap, 3 * size + 2 * gap
    first, universal, last = (memory[start:][:n] for start, n in zip(starts, (size, 2 * size, size), strict=True))
    blocks = [[first.reshape(2, 2, 4), last.reshape(2, 2, 4)]]
    for chunk, source in zip(blocks[0], reference.block_stack(kv, "NHD")[0], strict=True):
        chunk[:] = source
    kk.universal_from_block([universal.reshape(2, 1, 2, 2, 4)], blocks, "NHD")
    reference.assert_same_bytes(universal.reshape(1, 2, 1, 2, 2, 4), reference.universal(kv))
    if not gap:
        nearer = memory[size - 1 :][: 2 * size].reshape(2, 1, 2, 2, 4)
        with pytest.raises(ValueError, match="universals and blocks overlap"):
            kk.universal_from_block([nearer], blocks, "NHD")
        with pytest.raises(ValueError, match="blocks and universals overlap"):
            kk.block_from_universal(blocks, [nearer], "NHD")


def test_no_blocks_are_no_work():
    kk.universal_from_block([], [], "NHD")
    kk.block_from_universal([], [], "HND")
    kk.operational_from_block([], [])
    kk.block_from_operational([], [])
    with pytest.raises(ValueError, match="layout is 'XYZ'"):
        kk.universal_from_block([], [], "XYZ")


CALLS = {
    "universal_from_block": lambda u, b, layout="NHD": kk.universal_from_block(u, b, layout),
    "block_from_universal": lambda u, b, layout="NHD": kk.block_from_universal(b, u, layout),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
class TestErrors:
    @pytest.fixture
    def case(self, rng):
        kv = reference.random_kv(rng, (2, 2, 2, 4, 3, 8), BF16)
        return list(np.zeros_like(reference.universal(kv))), reference.block_stack(kv, "NHD")

    def refused(self, call, case, error, message, layout="NHD"):
        universals, blocks = case
        chunks = [chunk for block in blocks if isinstance(block, list) for chunk in block]
        arrays = [array for array in [*universals, *chunks] if isinstance(array, np.ndarray)]
        before = [array.copy() for array in arrays]
        with pytest.raises(error, match=message) as raised:
            call(universals, blocks, layout)
        assert isinstance(raised.value, kk.KvbmError)
        for array, was in zip(arrays, before, strict=True):
            reference.assert_same_bytes(array, was)

    @pytest.mark.parametrize(
        ("layout", "error"),
        [("NDH", ValueError), ("", ValueError), (0, TypeError), (None, TypeError), (True, TypeError)],
    )
    def test_layouts(self, call, case, layout, error):
        self.refused(call, case, error, f"layout is {layout!r}, expected", layout)

    def test_wrong_layout_where_shapes_tell(self, call, case):
        message = r"blocks\[0\]\[0\] has shape \[4, 3, 8\], expected \[nh, nt, hd\] = \[3, 4, 8\]"
        self.refused(call, case, ValueError, message, "HND")

    def test_different_types(self, call, case):
        """F16 on one side and BF16 on the other."""
        universals, blocks = case
        universals = [u.view(np.float16) for u in universals]
        self.refused(call, (universals, blocks), TypeError, r"blocks\[0\]\[0\] has dtype bfloat16, expected f16")

    def test_one_chunk_of_another_type(self, call, case):
        universals, blocks = case
        blocks[1][2] = blocks[1][2].view(np.float16)
        self.refused(call, (universals, blocks), TypeError, r"blocks\[1\]\[2\] has dtype float16, expected bf16")

    def test_types_the_library_has_no_name_for(self, call, case):
        universals, blocks = case
        universals = [np.zeros(u.shape, np.complex64) for u in universals]
        self.refused(call, (universals, blocks), TypeError, r"universals\[0\] has complex64.*expected one of f16, bf16")

    def test_raw_integers_of_different_sizes(self, call, case):
        universals, blocks = case
        universals = [np.zeros(u.shape, np.uint32) for u in universals]
        blocks = [[chunk.view(np.uint16) for chunk in block] for block in blocks]
        message = r"universals\[0\] has uint32, blocks\[0\]\[0\] has uint16; expected"
        self.refused(call, (universals, blocks), TypeError, message)

    def test_dimensions(self, call, case):
        universals, blocks = case
        message = r"universals\[0\] has shape \[6, 2, 4, 8\], expected \[nh, nl, no, nt, hd\]"
        self.refused(call, ([u.reshape(6, 2, 4, 8) for u in universals], blocks), ValueError, message)

    def test_numbers_of_blocks(self, call, case):
        universals, blocks = case
        message = "universals has 1 entry and blocks 2, expected one for each block"
        self.refused(call, (universals[:1], blocks), ValueError, message)

    def test_numbers_of_chunks(self, call, case):
        universals, blocks = case
        message = r"blocks\[1\] has 3 entries, expected nl\*no = 2\*2 = 4 chunks"
        self.refused(call, (universals, [blocks[0], blocks[1][:3]]), ValueError, message)
        self.refused(call, (universals, [[], []]), ValueError, r"blocks\[0\] is empty, expected nl\*no chunks")

    def test_things_that_are_no_lists_or_arrays(self, call, case):
        universals, blocks = case
        self.refused(call, (universals, [None, None]), TypeError, r"blocks\[0\] is a NoneType, expected an array")
        self.refused(call, ([1, 2], blocks), TypeError, r"universals\[0\] is an int, expected an array")
        with pytest.raises(TypeError, match="universals is a ndarray, expected a list with an entry for each block"):
            call(np.stack(universals), blocks)
        with pytest.raises(TypeError, match="blocks is a NoneType, expected a list with an entry for each block"):
            call(universals, None)

    def test_a_read_only_destination(self, call, case):
        universals, blocks = case
        for array in (universals[1], blocks[1][3]):
            array.flags.writeable = False
        message = r"cannot be written: (universals\[1\]|blocks\[1\]\[3\]) is read-only"
        self.refused(call, case, ValueError, message)

    def test_a_repeated_destination(self, call, case):
        universals, blocks = case
        blocks = [blocks[0], blocks[0]]
        universals = [universals[0], universals[0]]
        message = "(universals|blocks) has rows that overlap each other"
        self.refused(call, (universals, blocks), ValueError, message)

    def test_source_and_destination_in_one_place(self, call, case):
        memory = np.zeros(2 * 2 * 4 * 3 * 8, BF16)
        universals = [memory.reshape(3, 2, 2, 4, 8)]
        blocks = [list(memory.reshape(4, 4, 3, 8))]
        self.refused(call, (universals, blocks), ValueError, "(universals and blocks|blocks and universals) overlap")

    def test_cuda_arrays(self, call, case):
        universals = [CudaArray(u.shape, "<V2", address=(1 + i) << 20) for i, u in enumerate(case[0])]
        error = kk.StubBuildError if kk.is_stub_build() else ValueError
        self.refused(call, (universals, case[1]), error, "has no CUDA|pageable host memory")


def test_operational_errors(rng):
    kv = reference.random_kv(rng, (2, 2, 2, 4, 3, 8), BF16)
    operationals, blocks = list(reference.operational(kv, "NHD")), reference.block_stack(kv, "NHD")
    for shape in ((4, 96), (2, 2, 2, 48)):
        message = rf"operationals\[0\] has shape {re.escape(str(list(shape)))}, expected \[nl, no, nt\*nh\*hd\]"
        with pytest.raises(ValueError, match=message):
            kk.operational_from_block([o.reshape(shape) for o in operationals], blocks)
    short = [np.zeros((2, 2, 95), BF16) for _ in range(2)]
    with pytest.raises(ValueError, match=r"operationals\[0\] has shape \[2, 2, 95\], expected .* = \[2, 2, 96\]"):
        kk.operational_from_block(short, blocks)
    with pytest.raises(TypeError, match=r"blocks\[1\]\[0\] has dtype float16, expected bf16"):
        kk.operational_from_block(operationals, [blocks[0], [c.view(np.float16) for c in blocks[1]]])
