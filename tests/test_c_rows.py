"""Append and gather of the C API on host memory, bit for bit, and what they and store_u32 refuse."""

from __future__ import annotations

import ctypes
import functools

import numpy as np
import pytest

import reference
from c_calls import LAUNCHED, NULL, SIZE_MAX, message, no_gpu, pointers, refused
from kvbm_kernels import ffi, lib
from kvbm_kernels._native import library_path
from rows_case import ALL_FORMATS, PLACES, Call, Case, check_case, make_call


@functools.cache
def host(name: str) -> ctypes._CFuncPtr:
    return getattr(ctypes.CDLL(library_path), f"kvbm_kernels_host_{name}")


def address(array: np.ndarray | None) -> int | None:
    return None if array is None else array.ctypes.data


def run(call: Call, num_threads: int = 0) -> tuple[np.ndarray, np.ndarray]:
    cache, rows, tables = call.cache_image.copy(), call.rows_image.copy(), call.tables
    # On the cache line, so that misalignment is what the case says.
    images = []
    for image in (cache, rows):
        memory = np.empty(image.size + 64, np.uint8)
        aligned = memory[-memory.ctypes.data % 64 :][: image.size]
        aligned[...] = image
        images.append(aligned)
    cache, rows = images
    arguments, keep = call.arguments(
        cache.ctypes.data, rows.ctypes.data, address(tables.slots), address(tables.block_tables), address(tables.starts)
    )
    dst, src, shape, token_map, quantization = arguments
    by_reference = [ctypes.byref(argument) for argument in (dst, src, shape, token_map)]
    last = None if quantization is None else ctypes.byref(quantization)
    status = host("append" if call.appends else "gather")(*by_reference, last, num_threads)
    del keep
    assert status == 0, message()
    return cache, rows


class TestPlaces:
    @pytest.mark.parametrize("name", PLACES)
    @pytest.mark.parametrize("stored", [None, "int8", "fp8"])
    def test_rows_lie_where_the_map_says(self, name, stored):
        for seed in range(3):
            check_case(PLACES[name].but(stored=stored, seed=seed), run)

    @pytest.mark.parametrize("threads", [1, 2, 3, 64])
    @pytest.mark.parametrize("stored", [None, "fp8"])
    def test_threads_share_the_tokens(self, threads, stored):
        case = Case(each=50, num_sequences=2, num_blocks=40, stored=stored)
        check_case(case, lambda call: run(call, threads))

    @pytest.mark.parametrize("order", ["bloth", "bloht"])
    def test_more_than_the_cache_of_a_processor(self, order):
        case = Case(nl=4, nh=8, hd=128, each=1300, num_blocks=100, block_size=16, cache_order=order, holes=False)
        check_case(case, run)

    @pytest.mark.parametrize("row", [*range(1, 70), 127, 130, 576, 2049])
    def test_plain_rows_of_every_size(self, row):
        """bf16 stands for two bytes; gaps of one make the rows odd."""
        for order in ("bloth", "bloht"):
            check_case(Case(hd=row, cache_order=order, rows_order=order, gaps=(row % 3, row % 2), each=9), run)


class TestNumbers:
    @pytest.mark.parametrize(("dtype", "stored", "scale"), ALL_FORMATS)
    def test_head_dims(self, dtype, stored, scale, rng):
        dims = [*range(1, 36), 63, 64, 65, 80, 96, 112, 127, 128, 129, 192, 256, 257, 512, 576]
        for hd in [*dims, *rng.integers(130, 600, 6)]:
            misalign = tuple(int(n) for n in rng.integers(0, 16, 2))
            case = Case(hd=int(hd), dtype=dtype, stored=stored, scale=scale, misalign=misalign, seed=int(hd))
            check_case(case.but(nl=1, each=12, num_sequences=2, num_blocks=24), run)

    @pytest.mark.parametrize(("dtype", "stored", "scale"), ALL_FORMATS)
    def test_many_rows(self, dtype, stored, scale):
        """Zeros, ties, subnormal numbers, NaNs, infinities, and scales beyond float16, by the thousand."""
        case = Case(hd=24, dtype=dtype, stored=stored, scale=scale, each=600, num_blocks=160, nl=3, nh=4)
        check_case(case, run)

    @pytest.mark.parametrize("stored", ["int8", "fp8"])
    @pytest.mark.parametrize("scale", ["f32", "f16"])
    def test_every_half(self, stored, scale):
        """Rows of one f16 or bf16 of all 65536."""
        for dtype in ("f16", "bf16"):
            case = Case(nl=1, no=1, nh=64, hd=1, each=1024, dtype=dtype, stored=stored, scale=scale, holes=False)
            call = make_call(case.but(num_blocks=64, block_size=16, with_starts=False), True)
            bits = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
            call.rows.of(call.rows_image)[...] = bits.reshape(1, 1, 1, 1024, 64, 2)
            x = reference.numbers_of(bits.view(np.uint16).reshape(1, 1, 1024, 64, 1), dtype)
            scale_type = {"f32": np.float32, "f16": np.float16}[scale]
            for token, place in enumerate(call.tables.places):
                block, inside = place
                call.cache.of(call.expected)[block, :, :, inside] = reference.quantised(
                    x[:, :, token], stored, scale_type
                )
            reference.assert_same_bytes(run(call)[0], call.expected)

    @pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
    @pytest.mark.parametrize("appends", [True, False])
    def test_settings_of_the_application_do_not_count(self, dtype, appends, torch):
        """Subnormal numbers stay what they are where a program has them flushed to zero."""
        call = make_call(Case(dtype=dtype, stored="int8", each=150, num_blocks=50, seed=5), appends)
        torch.set_flush_denormal(True)
        try:
            assert np.float32(1e-40) * np.float32(0.5) == 0
            written = run(call, 1)[0 if appends else 1]
            assert np.float32(1e-40) * np.float32(0.5) == 0
        finally:
            torch.set_flush_denormal(False)
        reference.assert_same_bytes(written, call.expected)


class Rows:
    """A call of append or gather, with parts of it replaced."""

    def __init__(self, name: str, on_host: bool) -> None:
        self.words = f"host_{name}" if on_host else name
        self.on_host, self.appends = on_host, name == "append"
        self.function = getattr(lib, f"kvbm_kernels_{'host' if on_host else 'launch'}_{name}")
        # 2 layers, K and V, 2 heads, 6 tokens of 3 sequences, rows of 8 bytes; blocks of 4 tokens.
        self.cache_memory = np.zeros((2, 2, 5, 4, 2, 16), np.uint8)
        self.rows_memory = np.zeros((2, 2, 6, 2, 8), np.uint8)
        self.tables = np.arange(3, dtype=np.uint32).reshape(3, 1)
        self.shape = ffi.new("kvbm_kernels_block_shape *", (2, 2, 2, 6, 8))
        self.map = ffi.new("kvbm_kernels_token_map *")
        self.map.struct_nbytes = ffi.sizeof("kvbm_kernels_token_map")
        self.map.block_size = 4
        self.map.block_tables = ffi.from_buffer("uint32_t[]", self.tables)
        self.map.block_table_stride = 1
        self.map.num_sequences = 3
        self.quantization = ffi.new("kvbm_kernels_quantization *")
        self.quantization.struct_nbytes = ffi.sizeof("kvbm_kernels_quantization")
        self.quantization.stored_value = 1
        self.quantization.scale_dtype_value = 2
        self.cache_table, self.rows_table = (
            pointers(*memory.reshape(4, -1)) for memory in (self.cache_memory, self.rows_memory)
        )
        self.cache = self.view(self.cache_table, 5, block=128, token=32, head=16)
        self.rows = self.view(self.rows_table, 1, block=0, token=16, head=8)

    @staticmethod
    def view(table, num_blocks: int, block: int, token: int, head: int):
        view = ffi.new("kvbm_kernels_view *")
        view.bases, view.num_bases, view.base_layer_step, view.base_outer_step = table, 4, 2, 1
        view.num_blocks, view.block_stride, view.token_stride, view.head_stride = num_blocks, block, token, head
        return view

    def __call__(self, **changed) -> int:
        names = ("cache", "rows") if self.appends else ("rows", "cache")
        arguments = [changed.get(name, getattr(self, name)) for name in (*names, "shape", "map")]
        last = changed.get("num_threads", 0) if self.on_host else NULL
        return self.function(*arguments, changed.get("quantization", NULL), last)


@pytest.fixture(params=["append", "gather"])
def rows(request):
    return Rows(request.param, False)


@pytest.fixture(params=[("append", True), ("gather", True), ("append", False), ("gather", False)], ids=str)
def any_rows(request):
    call = Rows(*request.param)
    call.cache_memory[...], call.rows_memory[...] = 7, 9
    yield call
    assert (call.cache_memory == 7).all(), "a call that was refused wrote to the cache"
    assert (call.rows_memory == 9).all(), "a call that was refused wrote to the rows"


class TestChecks:
    @no_gpu
    def test_a_launch_answers_what_this_build_answers(self, rows):
        for quantization in (NULL, rows.quantization):
            assert rows(quantization=quantization) in LAUNCHED
            assert message().startswith(f"{rows.words}: ")

    @no_gpu
    def test_a_cache_spans_its_stored_rows(self, rows):
        """16 bytes a row of 8 halves are 8 bytes and a scale of 4 in the cache."""
        rows.shape.row_nbytes, rows.quantization.dtype_value = 16, 1
        inside = 4 * rows.cache.block_stride + 3 * rows.cache.token_stride + rows.cache.head_stride
        rows.cache.offset = (1 << 63) - 1 - inside - 12
        assert rows(quantization=rows.quantization) in LAUNCHED
        rows.cache.offset += 1
        refused(
            rows(quantization=rows.quantization), f"{rows.words}: the strides and sizes of cache span more than 63 bits"
        )

    def test_nothing_to_do(self, any_rows):
        for field in ("num_layers", "num_outer", "num_heads", "num_tokens", "row_nbytes"):
            shape = ffi.new("kvbm_kernels_block_shape *", any_rows.shape[0])
            setattr(shape, field, 0)
            assert any_rows(cache=NULL, rows=NULL, map=NULL, shape=shape) == 0
        any_rows.cache.num_blocks = 0
        any_rows.cache.bases = NULL
        assert any_rows() == 0

    @pytest.mark.parametrize("name", ["cache", "rows", "shape", "map"])
    def test_null_arguments(self, any_rows, name):
        refused(any_rows(**{name: NULL}), f"{any_rows.words}: {name} is NULL")

    @pytest.mark.parametrize(
        ("field", "value", "expected"),
        [
            ("struct_nbytes", 8, r"struct_nbytes is 8, expected at least \d+"),
            ("stored_value", 0, r"stored_value is 0, expected 1 \(int8\) or 2 \(fp8\)"),
            ("stored_value", 3, r"stored_value is 3, expected 1 \(int8\) or 2 \(fp8\)"),
            ("dtype_value", 3, r"dtype_value is 3, expected 0 \(f16\), 1 \(bf16\) or 2 \(f32\)"),
            ("dtype_value", -1, r"dtype_value is -1, expected 0 \(f16\), 1 \(bf16\) or 2 \(f32\)"),
            ("scale_dtype_value", 1, r"scale_dtype_value is 1, expected 2 \(f32\) or 0 \(f16\)"),
        ],
    )
    def test_quantizations(self, any_rows, field, value, expected):
        setattr(any_rows.quantization, field, value)
        words = f"{any_rows.words}: quantization->{expected}"
        refused(any_rows(quantization=any_rows.quantization), words)
        # Before there is nothing to do.
        any_rows.shape.num_tokens = 0
        refused(any_rows(quantization=any_rows.quantization), words)

    def test_rows_that_are_no_whole_elements(self, any_rows):
        any_rows.shape.row_nbytes = 7
        refused(
            any_rows(quantization=any_rows.quantization),
            f"{any_rows.words}: shape->row_nbytes is 7, expected a multiple of 2, the size of an element",
        )

    def test_maps(self, any_rows):
        words, of = any_rows.words, any_rows.map
        of.struct_nbytes = 8
        refused(any_rows(), rf"{words}: map->struct_nbytes is 8, expected at least \d+")
        of.struct_nbytes, of.block_size = ffi.sizeof("kvbm_kernels_token_map"), 0
        refused(any_rows(), f"{words}: map->block_size is 0, expected 1 or more")
        of.block_size = SIZE_MAX // 2
        refused(any_rows(), f"{words}: cache->num_blocks=5 and map->block_size={SIZE_MAX // 2} multiply to .*63 bits")
        of.block_size = 4
        for wrong in (0, 4, 7):
            of.num_sequences = wrong
            expected = f"map->num_sequences is {wrong}, expected a divisor of the 6 tokens of the shape"
            refused(any_rows(), f"{words}: {expected}")
        of.num_sequences, of.block_table_stride = 3, SIZE_MAX // 3
        refused(any_rows(), f"{words}: map->num_sequences=3 and map->block_table_stride=.* more than size_t holds")
        of.block_tables = NULL
        refused(any_rows(), f"{words}: map->slots and map->block_tables are NULL, expected one of them")

    def test_views(self, any_rows):
        words = any_rows.words
        ids = ffi.new("int64_t[]", 5)
        any_rows.cache.block_ids = ids
        refused(any_rows(), f"{words}: cache->block_ids is not NULL: the map says which blocks")
        any_rows.cache.block_ids = NULL
        any_rows.rows.block_ids = ids
        refused(any_rows(), f"{words}: rows->block_ids is not NULL: all tokens are one block")
        any_rows.rows.block_ids = NULL
        any_rows.rows.num_blocks = 2
        refused(any_rows(), f"{words}: rows->num_blocks is 2, expected 1: all tokens are one block")
        any_rows.rows.num_blocks = 1
        any_rows.cache.base_block_step = 4
        refused(any_rows(), f"{words}: cache->base_block_step is 4, expected 0: the blocks of a layer have one base")
        any_rows.cache.base_block_step = 0
        any_rows.cache_table[3] = NULL
        refused(any_rows(), rf"{words}: cache->bases\[3\] is NULL")
        any_rows.rows.num_bases = 3
        any_rows.cache.num_bases = 3
        refused(any_rows(), rf"{words}: cache->num_bases is 3, but the copy would use bases\[3\]")

    @pytest.mark.parametrize("name", ["cache", "rows"])
    @pytest.mark.parametrize("field", ["offset", "layer_stride", "outer_stride", "token_stride", "head_stride"])
    def test_addresses_beyond_63_bits(self, any_rows, name, field):
        for value in ((1 << 63) - 1, -(1 << 63)):
            setattr(getattr(any_rows, name), field, value)
            refused(any_rows(), f"{any_rows.words}: the strides and sizes of {name} span more than 63 bits")

    def test_products_that_overflow(self, any_rows):
        for field in ("num_layers", "num_outer", "num_heads", "num_tokens", "row_nbytes"):
            shape = ffi.new("kvbm_kernels_block_shape *", any_rows.shape[0])
            setattr(shape, field, SIZE_MAX)
            refused(any_rows(shape=shape), f"{any_rows.words}: .*{SIZE_MAX}.*more than size_t holds")

    def test_threads(self, any_rows):
        if any_rows.on_host:
            refused(any_rows(num_threads=-1), f"{any_rows.words}: num_threads is -1, expected 0 or more")

    def test_no_place_at_all(self, any_rows):
        if any_rows.on_host:
            any_rows.tables[...] = 5
            assert any_rows() == 0
            any_rows.map.block_table_stride = 0
            assert any_rows() == 0

    def test_negative_strides(self):
        """The rows from the last token to the first."""
        call = Rows("append", True)
        call.rows_memory[...] = np.arange(call.rows_memory.size).reshape(call.rows_memory.shape)
        call.rows.offset, call.rows.token_stride = 5 * 16, -16
        assert call() == 0
        expected = np.zeros_like(call.cache_memory)
        for token in range(6):
            expected[:, :, token // 2, token % 2, :, :8] = call.rows_memory[:, :, 5 - token]
        reference.assert_same_bytes(call.cache_memory, expected)


class TestStoreU32:
    store = staticmethod(lib.kvbm_kernels_launch_store_u32)

    def test_nothing_to_do(self):
        assert self.store(NULL, NULL, 0, NULL) == 0

    def test_refused(self):
        memory = np.zeros(4, np.uint32)
        dsts = ffi.cast("uint32_t **", pointers(*(memory.ctypes.data + 4 * np.arange(3)).tolist()))
        values = ffi.new("uint32_t[]", 3)
        refused(self.store(NULL, values, 3, NULL), "store_u32: dsts is NULL")
        refused(self.store(dsts, NULL, 3, NULL), "store_u32: values is NULL")
        refused(self.store(dsts, values, SIZE_MAX, NULL), "store_u32: .* more than size_t holds")
        table = pointers(memory, memory.ctypes.data + 6, memory)
        refused(
            self.store(ffi.cast("uint32_t **", table), values, 3, NULL),
            r"store_u32: dsts\[1\] is 0x[0-9a-f]+, expected a multiple of 4",
        )
        table = pointers(memory, memory, 0)
        refused(self.store(ffi.cast("uint32_t **", table), values, 3, NULL), r"store_u32: dsts\[2\] is NULL")
        assert not memory.any()

    @no_gpu
    def test_what_this_build_answers(self):
        memory = np.zeros(4, np.uint32)
        table = pointers(memory)
        assert self.store(ffi.cast("uint32_t **", table), ffi.new("uint32_t[]", 1), 1, NULL) in LAUNCHED
        assert message().startswith("store_u32: ")
