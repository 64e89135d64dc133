"""The C API's views called directly: copy_blocks in both forms, and the functions that fill a view in."""

from __future__ import annotations

import numpy as np
import pytest

import kvbm_kernels as kk
import reference
from c_calls import LAUNCHED, NULL, SIZE_MAX, message, no_gpu, pointers, refused
from kvbm_kernels import ffi, lib


@pytest.fixture(autouse=True)
def other_message():
    """Another message than any that a test looks for."""
    assert lib.kvbm_kernels_memcpy_batch(NULL, NULL, 0, 0, -99, NULL) == 1


class Copy:
    """A copy between a block stack of 3 blocks and universal blocks, with parts of it replaced."""

    def __init__(self, name: str, rng: np.random.Generator) -> None:
        self.words = name
        self.function = getattr(lib, f"kvbm_kernels_{name}")
        self.kv = reference.random_kv(rng, (3, 2, 2, 3, 4, 8), np.float16)
        self.out = np.zeros_like(reference.universal(self.kv))
        self.chunks = [chunk for block in reference.block_stack(self.kv, "NHD") for chunk in block]
        self.shape = ffi.new("kvbm_kernels_block_shape *", (2, 2, 4, 3, 16))
        self.tables = pointers(*self.out), pointers(*self.chunks)
        self.dst, self.src = ffi.new("kvbm_kernels_view *"), ffi.new("kvbm_kernels_view *")
        assert lib.kvbm_kernels_universal_view(self.dst, self.tables[0], 3, self.shape) == 0
        assert lib.kvbm_kernels_block_stack_view(self.src, self.tables[1], 3, self.shape, 0) == 0

    def __call__(self, num_blocks=3, **changed) -> int:
        dst, src, shape = (changed.get(name, getattr(self, name)) for name in ("dst", "src", "shape"))
        if self.words == "host_copy_blocks":
            return self.function(dst, src, shape, num_blocks, changed.get("num_threads", 0))
        return self.function(dst, src, shape, num_blocks, changed.get("options", NULL), NULL)


@pytest.fixture(params=["copy_blocks", "host_copy_blocks"])
def copy(request, rng):
    call = Copy(request.param, rng)
    yield call
    if not hasattr(call, "moved"):
        assert not call.out.view(np.uint16).any()


class TestCopyBlocks:
    @no_gpu
    def test_a_copy_answers_what_this_build_answers(self, copy):
        copy.moved = True
        if copy.words == "host_copy_blocks":
            assert copy() == 0
            reference.assert_same_bytes(copy.out, reference.universal(copy.kv))
        else:
            assert copy() in LAUNCHED
            assert message().startswith("copy_blocks: ")

    def test_nothing_to_do(self, copy):
        assert copy(num_blocks=0, dst=NULL, src=NULL, shape=NULL) == 0
        for field in ("num_layers", "num_outer", "num_heads", "num_tokens", "row_nbytes"):
            shape = ffi.new("kvbm_kernels_block_shape *", copy.shape[0])
            setattr(shape, field, 0)
            assert copy(dst=NULL, src=NULL, shape=shape) == 0

    @pytest.mark.parametrize("name", ["dst", "src", "shape"])
    def test_null_arguments(self, copy, name):
        refused(copy(**{name: NULL}), f"{copy.words}: {name} is NULL")

    def test_products_that_overflow(self, copy):
        for field in ("num_layers", "num_outer", "num_heads", "num_tokens", "row_nbytes"):
            shape = ffi.new("kvbm_kernels_block_shape *", copy.shape[0])
            setattr(shape, field, SIZE_MAX)
            refused(copy(shape=shape), f"{copy.words}: .*{SIZE_MAX}.*more than size_t holds")

    @pytest.mark.parametrize("name", ["dst", "src"])
    def test_null_tables_and_entries(self, copy, name):
        view = getattr(copy, name)
        view.bases = NULL
        refused(copy(), f"{copy.words}: {name}->bases is NULL")
        table = copy.tables[name == "src"]
        view.bases = table
        table[2] = NULL
        refused(copy(), rf"{copy.words}: {name}->bases\[2\] is NULL")

    def test_null_entries_that_the_call_does_not_use(self, copy):
        copy.moved = True
        for table in copy.tables:
            table[len(table) - 1] = NULL
        refused(copy(), rf"{copy.words}: dst->bases\[2\] is NULL")
        if copy.words == "host_copy_blocks":
            assert copy(num_blocks=2) == 0
            reference.assert_same_bytes(copy.out[:2], reference.universal(copy.kv)[:2])

    @pytest.mark.parametrize("name", ["dst", "src"])
    @pytest.mark.parametrize("wrong", [-1, 3, 511, -(1 << 63), (1 << 63) - 1])
    def test_ids_out_of_range(self, copy, name, wrong):
        ids = ffi.new("int64_t[]", [0, 1, wrong])
        getattr(copy, name).block_ids = ids
        expected = rf"{copy.words}: {name}->block_ids\[2\] is {wrong}, expected 0 to 2 \(of num_blocks 3\)"
        refused(copy(), expected)

    @pytest.mark.parametrize("name", ["dst", "src"])
    def test_more_blocks_than_a_view_has(self, copy, name):
        getattr(copy, name).num_blocks = 2
        refused(copy(), f"{copy.words}: num_blocks is 3, but {name} has 2 blocks")
        getattr(copy, name).num_blocks = 1
        refused(copy(), f"{copy.words}: num_blocks is 3, but {name} has 1 block")

    @pytest.mark.parametrize("name", ["dst", "src"])
    def test_tables_that_are_too_short(self, copy, name):
        view = getattr(copy, name)
        last = view.num_bases - 1
        view.num_bases = last
        expected = rf"{copy.words}: {name}->num_bases is {last}, but the copy would use bases\[{last}\]"
        refused(copy(), expected)
        view.base_block_step = SIZE_MAX
        refused(copy(), f"{copy.words}: the base steps and sizes of {name} multiply to more than size_t holds")

    @pytest.mark.parametrize("name", ["dst", "src"])
    @pytest.mark.parametrize(
        "field", ["offset", "block_stride", "layer_stride", "outer_stride", "token_stride", "head_stride"]
    )
    def test_addresses_beyond_63_bits(self, copy, name, field):
        for value in ((1 << 63) - 1, -(1 << 63)):
            setattr(getattr(copy, name), field, value)
            refused(copy(), f"{copy.words}: the strides and sizes of {name} span more than 63 bits")

    def test_ids_pick_blocks(self, copy):
        if copy.words == "host_copy_blocks":
            copy.moved = True
            to, of = ffi.new("int64_t[]", [2, 0]), ffi.new("int64_t[]", [1, 1])
            copy.dst.block_ids, copy.src.block_ids = to, of
            assert copy(num_blocks=2) == 0
            expected = np.zeros_like(copy.out)
            expected[[2, 0]] = reference.universal(copy.kv)[[1, 1]]
            reference.assert_same_bytes(copy.out, expected)

    def test_negative_strides(self, copy):
        if copy.words == "host_copy_blocks":
            copy.moved = True
            copy.dst.offset = 3 * copy.dst.head_stride
            copy.dst.head_stride *= -1
            assert copy() == 0
            reference.assert_same_bytes(copy.out[:, ::-1], reference.universal(copy.kv))

    def test_options(self, copy):
        if copy.words == "host_copy_blocks":
            refused(copy(num_threads=-1), "host_copy_blocks: num_threads is -1, expected 0 or more")
            return
        options = ffi.new("kvbm_kernels_copy_options *", (ffi.sizeof("kvbm_kernels_copy_options"), -5))
        refused(copy(options=options), "copy_blocks: options->max_sms is -5, expected 0 or more")
        options.max_sms = 4
        if not kk.build_info().devices:
            assert copy(options=options) in LAUNCHED
        options.struct_nbytes = 3
        refused(copy(options=options), r"copy_blocks: options->struct_nbytes is 3, expected at least \d+")


class TestViews:
    @pytest.fixture
    def shape(self):
        return ffi.new("kvbm_kernels_block_shape *", (3, 2, 5, 7, 16))

    def test_block_stack(self, shape):
        view, bases = ffi.new("kvbm_kernels_view *"), pointers(*range(1, 25))
        assert lib.kvbm_kernels_block_stack_view(view, bases, 4, shape, 0) == 0
        assert (view.num_bases, view.num_blocks) == (24, 4)
        assert (view.base_block_step, view.base_layer_step, view.base_outer_step) == (6, 2, 1)
        assert (view.token_stride, view.head_stride) == (80, 16)
        assert view.block_ids == NULL
        assert lib.kvbm_kernels_block_stack_view(view, bases, 4, shape, 1) == 0
        assert (view.token_stride, view.head_stride) == (16, 112)

    def test_operational(self, shape):
        view = ffi.new("kvbm_kernels_view *")
        assert lib.kvbm_kernels_operational_view(view, pointers(1, 2), 2, shape, 1) == 0
        assert (view.num_bases, view.base_block_step, view.base_layer_step) == (2, 1, 0)
        assert (view.layer_stride, view.outer_stride, view.token_stride, view.head_stride) == (1120, 560, 16, 112)

    def test_universal(self, shape):
        view = ffi.new("kvbm_kernels_view *")
        assert lib.kvbm_kernels_universal_view(view, pointers(1, 2), 2, shape) == 0
        assert (view.head_stride, view.layer_stride, view.outer_stride, view.token_stride) == (672, 224, 112, 16)

    def test_what_is_refused(self, shape):
        view, bases = ffi.new("kvbm_kernels_view *"), pointers(1)
        for name, rest in (("block_stack_view", (0,)), ("operational_view", (0,)), ("universal_view", ())):
            function = getattr(lib, f"kvbm_kernels_{name}")
            refused(function(NULL, bases, 1, shape, *rest), f"{name}: view is NULL")
            refused(function(view, NULL, 1, shape, *rest), f"{name}: bases is NULL")
            refused(function(view, bases, 1, NULL, *rest), f"{name}: shape is NULL")
            if rest:
                expected = rf"{name}: layout_value is 2, expected 0 \(NHD\) or 1 \(HND\)"
                refused(function(view, bases, 1, shape, 2), expected)
            huge = ffi.new("kvbm_kernels_block_shape *", (1 << 40, 1 << 40, 1, 1 << 40, 16))
            refused(function(view, bases, 1, huge, *rest), f"{name}: .* do not fit 63 bits")
        assert bytes(ffi.buffer(view)) == bytes(ffi.sizeof("kvbm_kernels_view"))
