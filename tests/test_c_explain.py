"""kvbm_kernels_explain_copy() called directly: its checks, and the CUDA engine's side of what it tells."""

from __future__ import annotations

import platform

import pytest

from c_calls import INT_MIN, NULL, SIZE_MAX, pointers, refused
from kvbm_kernels import ffi, lib

KIB = 1024


class Explain:
    """An explanation of NHD chunks to universal blocks, at addresses where nothing is, with parts of it replaced."""

    def __init__(self, nb: int, nl: int, no: int, nh: int, nt: int, row: int, chunk_gap: int = 0, base: int = 1 << 32):
        self.shape = ffi.new("kvbm_kernels_block_shape *", (nl, no, nh, nt, row))
        chunk = nt * nh * row
        block = nl * no * chunk
        self.num_blocks = nb
        self.tables = (
            pointers(*[base + b * block for b in range(nb)]),
            pointers(*[base + nb * block + i * (chunk + chunk_gap) for i in range(nb * nl * no)]),
        )
        self.dst, self.src = ffi.new("kvbm_kernels_view *"), ffi.new("kvbm_kernels_view *")
        assert lib.kvbm_kernels_universal_view(self.dst, self.tables[0], nb, self.shape) == 0
        assert lib.kvbm_kernels_block_stack_view(self.src, self.tables[1], nb, self.shape, 0) == 0
        self.options = ffi.new("kvbm_kernels_explain_options *")
        self.options.struct_nbytes = ffi.sizeof("kvbm_kernels_explain_options")
        self.found = ffi.new("kvbm_kernels_copy_explanation *")
        self.found.struct_nbytes = ffi.sizeof("kvbm_kernels_copy_explanation")

    def __call__(self, **changed) -> int:
        names = ("dst", "src", "shape", "num_blocks", "options", "found")
        return lib.kvbm_kernels_explain_copy(*[changed.get(name, getattr(self, name)) for name in names])

    def kernel(self, **options) -> str:
        for name, value in options.items():
            setattr(self.options, name, value)
        assert self() == 0
        return ffi.string(self.found.kernel).decode()

    def addresses(self, source: list[int] | None = None, destination: list[int] | None = None) -> None:
        for view, table in ((self.src, source), (self.dst, destination)):
            if table is not None:
                self.tables += (pointers(*table),)
                view.bases = self.tables[-1]


@pytest.fixture
def explain():
    return Explain(3, 2, 2, 4, 16, 128)


class TestChecks:
    def test_null_arguments(self, explain):
        refused(explain(found=NULL), "explain_copy: explanation is NULL")
        for name in ("dst", "src", "shape"):
            refused(explain(**{name: NULL}), f"explain_copy: {name} is NULL")
        assert explain(options=NULL) == 0

    def test_structs_that_are_too_small(self, explain):
        explain.found.struct_nbytes -= 1
        refused(explain(num_blocks=0), r"explain_copy: explanation->struct_nbytes is \d+, expected at least \d+")
        explain.found.struct_nbytes += 1
        explain.options.struct_nbytes -= 1
        refused(explain(num_blocks=0), r"explain_copy: options->struct_nbytes is \d+, expected at least \d+")

    @pytest.mark.parametrize("name", ["max_sms", "num_threads"])
    def test_negative_options(self, explain, name):
        for value in (-1, INT_MIN):
            setattr(explain.options, name, value)
            refused(explain(num_blocks=0), f"explain_copy: options->{name} is {value}, expected 0 or more")

    def test_a_refusal_changes_nothing(self, explain):
        assert explain() == 0
        before = bytes(ffi.buffer(explain.found))
        explain.shape.num_heads = SIZE_MAX
        refused(explain(), f"explain_copy: .*{SIZE_MAX}.*more than size_t holds")
        assert bytes(ffi.buffer(explain.found)) == before

    def test_a_table_entry_that_is_null(self, explain):
        explain.tables[1][5] = NULL
        refused(explain(), r"explain_copy: src->bases\[5\] is NULL")

    def test_nothing_to_do(self, explain):
        assert explain() == 0
        assert explain(num_blocks=0, dst=NULL, src=NULL, shape=NULL) == 0
        found = explain.found
        assert (found.total_nbytes, found.num_segments, found.num_launches, found.host_threads) == (0, 0, 0, 0)
        assert (ffi.string(found.kernel), ffi.string(found.host_rows)) == (b"", b"")

    def test_a_later_and_longer_struct_keeps_its_size(self, explain):
        room = ffi.new("char[]", ffi.sizeof("kvbm_kernels_copy_explanation") + 64)
        longer = ffi.cast("kvbm_kernels_copy_explanation *", room)
        longer.struct_nbytes = len(room)
        assert explain(found=longer) == 0
        assert longer.struct_nbytes == len(room)
        assert longer.total_nbytes == 3 * 2 * 2 * 4 * 16 * 128

    def test_more_than_a_launch_can_index(self):
        """What the copy would refuse, the explanation refuses as the copy would."""
        explain = Explain(1, 1, 1, 1 << 20, 1 << 20, 16)
        for view in (explain.dst, explain.src):
            view.token_stride, view.head_stride = 32, 1 << 26
        refused(explain(), "explain_copy: one block is more than a launch can index")


class TestPlan:
    def test_rows_of_nhd_chunks(self, explain):
        assert explain() == 0
        found = explain.found
        assert (found.segment_nbytes, found.num_segments) == (128, 3 * 2 * 2 * 4 * 16)
        assert found.num_items == 3 * 2 * 2
        loops = zip(found.loop_sizes, found.loop_src_strides, found.loop_dst_strides, strict=True)
        chunk = 4 * 16 * 128
        # A head is a universal block's outermost index.
        assert sorted(list(loops)[: found.num_loops]) == [(4, 128, chunk), (16, 4 * 128, 128)]
        assert found.alignment == 16

    def test_alignment_is_that_of_rows(self):
        explain = Explain(1, 1, 1, 4, 16, 24)
        assert explain() == 0
        assert explain.found.alignment == 8


class TestLaunches:
    """What is asserted here is what launches.h, launch.h and widths.h say; a change there changes this with reason."""

    def test_a_cta_a_tile_inside_the_device(self, explain):
        assert explain.kernel() == "move_tile"
        found = explain.found
        assert (found.tile_nbytes, found.cta_threads) == (4 * KIB, 128)
        # Chunks of 8 KiB are two tiles each.
        assert found.num_tiles == found.num_ctas == 3 * 2 * 2 * 2
        assert (found.read_nbytes, found.write_nbytes, found.is_shifted) == (16, 16, False)

    def test_few_ctas_across_the_link(self):
        explain = Explain(30, 2, 2, 4, 16, 128)
        assert explain.kernel(src_on_host=True) == "move"
        assert (explain.found.num_ctas, explain.found.cta_threads) == (6, 512)
        assert explain.kernel(src_on_host=False, dst_on_host=True) == "move"
        assert (explain.found.num_ctas, explain.found.cta_threads) == (7, 256)
        assert explain.kernel(max_sms=3) == "move"
        assert explain.found.num_ctas == 3

    def test_rows_of_a_few_bytes_are_gathered(self):
        explain = Explain(1, 2, 2, 4, 64, 2)
        assert explain.kernel() == "gather"
        assert (explain.found.read_nbytes, explain.found.write_nbytes) == (2, 16)
        # No vector is made of whole rows of 6 bytes.
        explain = Explain(1, 2, 2, 4, 64, 6)
        assert explain.kernel(max_sms=1) == "move"
        assert (explain.found.read_nbytes, explain.found.write_nbytes) == (2, 2)

    @pytest.mark.parametrize("misaligned", [1, 2, 4, 8])
    def test_a_misaligned_side_narrows_the_accesses(self, misaligned):
        explain = Explain(1, 1, 1, 4, 16, 128)
        explain.addresses(source=[(1 << 32) + misaligned], destination=[1 << 33])
        assert explain() == 0
        assert (explain.found.read_nbytes, explain.found.is_shifted) == (misaligned, False)

    def test_sides_that_are_equally_misaligned_are_shifted(self):
        explain = Explain(1, 1, 1, 4, 16, 128)
        explain.addresses(source=[(1 << 32) + 3], destination=[(1 << 33) + 19])
        assert explain() == 0
        assert (explain.found.read_nbytes, explain.found.is_shifted) == (16, True)

    def test_the_narrowest_item_counts(self):
        explain = Explain(600, 1, 1, 4, 16, 128)
        bases = [(1 << 33) + i * 8192 for i in range(600)]
        bases[599] += 4
        explain.addresses(source=bases)
        assert explain() == 0
        assert explain.found.read_nbytes == 4

    def test_whole_tiles_of_a_long_segment_count_and_not_its_odd_end(self):
        explain = Explain(1, 1, 1, 1, 1, 4 * KIB + 2)
        explain.addresses(source=[1 << 32], destination=[1 << 33])
        assert explain() == 0
        found = explain.found
        assert (found.num_tiles, found.read_nbytes, found.is_shifted) == (2, 16, False)

    def test_gathering_needs_aligned_vectors(self):
        explain = Explain(1, 1, 1, 4, 64, 2)
        explain.addresses(destination=[(1 << 33) + 2])
        assert explain.kernel() == "gather"
        assert (explain.found.read_nbytes, explain.found.write_nbytes) == (2, 2)

    def test_parameters_grow_with_the_tables(self):
        """32,764 bytes hold about 8,000 words of 4 bytes: a block of one chunk takes one on each side."""
        for nb, nbytes, launches in ((1, 640, 1), (400, 8192, 1), (2000, 32764, 1), (20000, 32764, 5)):
            explain = Explain(nb, 1, 1, 1, 1, 64, chunk_gap=64)
            assert explain() == 0
            assert (nb, explain.found.params_nbytes, explain.found.num_launches) == (nb, nbytes, launches)
            assert explain.found.num_tiles == nb

    def test_strides_past_32_bits_become_dimensions_of_the_launch(self):
        """A layer stride of 4 GiB and 2 bytes: every other layer is off alignment."""
        explain = Explain(1, 2, 1, 4, 16, 128)
        for view in (explain.dst, explain.src):
            view.base_block_step = view.base_layer_step = view.base_outer_step = 0
        explain.src.layer_stride = (4 << 30) + 2
        assert explain() == 0
        assert (explain.found.num_items, explain.found.read_nbytes) == (1, 2)


class TestHost:
    @pytest.mark.parametrize("row", [1, 2, 4, 8, 16])
    def test_rows_of_a_power_of_two_have_code_of_their_own(self, row):
        explain = Explain(1, 1, 1, 4, 16, row)
        assert explain() == 0
        assert ffi.string(explain.found.host_rows) == b"fixed"

    def test_small_copies_stay_in_the_cache_and_large_ones_go_around_it(self):
        small = Explain(1, 1, 1, 4, 16, 128)
        assert small() == 0
        assert ffi.string(small.found.host_rows) in (b"avx2", b"memcpy")
        # More than any cache, at addresses where nothing is.
        large = Explain(1, 1, 1, 1 << 10, 1 << 20, 128)
        assert large() == 0
        around = {b"stream_avx2", b"stream_sse2"} if platform.machine() == "x86_64" else {b"memcpy"}
        assert ffi.string(large.found.host_rows) in around

    def test_threads(self, explain):
        assert explain() == 0
        assert explain.found.host_threads == 1
        for asked, used in ((5, 5), (64, 64), (65, 64), ((1 << 31) - 1, 64)):
            explain.options.num_threads = asked
            assert explain() == 0
            assert explain.found.host_threads == used

    def test_segments_that_are_whole_items_are_joined_and_long_ones_cut(self):
        explain = Explain(2, 1, 1, 1, 16, 128)
        assert explain() == 0
        assert explain.found.num_loops == 0
        assert (explain.found.host_joins_segments, explain.found.host_cuts_segments) == (True, False)
        assert ffi.string(explain.found.host_rows) in (b"memcpy", b"fixed")
        explain = Explain(2, 1, 1, 1, 16, 64 * KIB)
        assert explain() == 0
        assert explain.found.host_cuts_segments
