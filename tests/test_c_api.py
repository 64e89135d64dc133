"""The C API called directly: what each function refuses, with which code and words, and what it leaves alone."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import kvbm_kernels as kk
import reference
from c_calls import INT_MIN, LAUNCHED, NULL, SIZE_MAX, message, no_gpu, pointers, refused
from kvbm_kernels import ffi, lib


@pytest.fixture(autouse=True)
def other_message():
    """Another message than any that a test looks for."""
    assert lib.kvbm_kernels_memcpy_batch(NULL, NULL, 0, 0, -99, NULL) == 1


class Conversion:
    """The arguments of a conversion, of which a test replaces some."""

    def __init__(self, name: str, rng: np.random.Generator) -> None:
        self.name = name
        self.function = getattr(lib, f"kvbm_kernels_{name}")
        self.words = name.removeprefix("launch_")
        self.on_host = name.startswith("host_")
        self.suffix = "" if self.on_host else "_device"
        self.kv = reference.random_kv(rng, (2, 2, 2, 3, 4, 8), np.float16)
        self.universal = np.zeros_like(reference.universal(self.kv))
        self.chunks = reference.block_stack(self.kv, "NHD")

    def __call__(self, **changed) -> int:
        arguments = {
            "universal_ptrs": pointers(*self.universal),
            "block_ptrs": pointers(*[chunk for block in self.chunks for chunk in block]),
            "num_blocks": 2,
            "nh": 4,
            "nl": 2,
            "no": 2,
            "nt": 3,
            "hd": 8,
            "dtype_value": 0,
            "layout_value": 0,
            "last": 1 if self.on_host else NULL,
        }
        assert set(changed) <= set(arguments)
        return self.function(*{**arguments, **changed}.values())


CONVERSIONS = [
    "launch_universal_from_block",
    "launch_block_from_universal",
    "host_universal_from_block",
    "host_block_from_universal",
]


@pytest.fixture(params=CONVERSIONS)
def convert(request, rng):
    call = Conversion(request.param, rng)
    before = call.universal.copy(), [chunk.copy() for block in call.chunks for chunk in block]
    yield call
    if not hasattr(call, "moved"):
        reference.assert_same_bytes(call.universal, before[0])
        for chunk, was in zip([c for block in call.chunks for c in block], before[1], strict=True):
            reference.assert_same_bytes(chunk, was)


class TestConversions:
    @pytest.mark.parametrize("value", [-1, 8, 99, INT_MIN])
    def test_unknown_types(self, convert, value):
        expected = rf"{convert.words}: dtype_value is {value}, expected 0 \(f16\), 1 \(bf16\), .* or 7 \(uint8\)"
        refused(convert(dtype_value=value), expected)

    @pytest.mark.parametrize("value", [-1, 2, 7])
    def test_unknown_layouts(self, convert, value):
        refused(
            convert(layout_value=value), rf"{convert.words}: layout_value is {value}, expected 0 \(NHD\) or 1 \(HND\)"
        )

    def test_values_are_checked_even_where_there_is_nothing_to_do(self, convert):
        refused(convert(num_blocks=0, layout_value=2), r".*layout_value is 2.*")
        refused(convert(hd=0, dtype_value=99), r".*dtype_value is 99.*")

    def test_null_tables(self, convert):
        for name in ("universal_ptrs", "block_ptrs"):
            refused(convert(**{name: NULL}), f"{convert.words}: {name}{convert.suffix} is NULL")

    @pytest.mark.parametrize("count", ["num_blocks", "nh", "nl", "no", "nt", "hd"])
    def test_nothing_to_do_whatever_the_pointers(self, convert, count):
        assert convert(**{count: 0}) == 0
        assert convert(**{count: 0}, universal_ptrs=NULL, block_ptrs=NULL) == 0
        others = {"num_blocks": SIZE_MAX, "nh": SIZE_MAX, "nt": SIZE_MAX}
        assert convert(**{**others, count: 0}) == 0

    @pytest.mark.parametrize(
        "sizes",
        [
            {"nh": SIZE_MAX},
            {"nl": SIZE_MAX // 2 + 1, "no": 2},
            {"nh": 1 << 33, "nl": 1 << 33},
            {"nt": SIZE_MAX, "hd": 1 << 32},
            {"num_blocks": SIZE_MAX},
            {"nh": 1 << 16, "nl": 1 << 16, "no": 1 << 16, "nt": 1 << 16},
        ],
    )
    def test_products_that_overflow(self, convert, sizes):
        refused(convert(**sizes), f"{convert.words}: the sizes .* multiply to more than size_t holds")
        # Rows are named by their bytes.
        named = {name: size for name, size in sizes.items() if name != "hd"}
        assert all(f"{name}={size}" in message() for name, size in named.items())

    def test_a_row_that_overflows(self, convert):
        for value in (SIZE_MAX, SIZE_MAX // 2 + 1):
            refused(convert(hd=value), rf"{convert.words}: hd is {value}, .*more than size_t holds")

    def test_sizes_are_checked_before_tables(self, convert):
        refused(convert(nh=SIZE_MAX, universal_ptrs=NULL), ".*more than size_t holds")

    @no_gpu
    def test_a_launch_answers_what_this_build_answers(self, convert):
        if convert.on_host:
            convert.moved = True
            assert convert() == 0
            back = reference.from_block_stack(convert.chunks, 2, 2, "NHD")
            expected = convert.kv if convert.words == "host_universal_from_block" else np.zeros_like(convert.kv)
            reference.assert_same_bytes(reference.from_universal(convert.universal), expected)
            reference.assert_same_bytes(back, expected)
        else:
            assert convert() in LAUNCHED
            assert message().startswith(f"{convert.words}: ")

    def test_negative_thread_counts(self, convert):
        if convert.on_host:
            for value in (-1, INT_MIN):
                refused(convert(last=value), f"{convert.words}: num_threads is {value}, expected 0 or more")

    def test_null_entries_of_host_tables(self, convert):
        if convert.on_host:
            universal = pointers(convert.universal[0], 0)
            refused(convert(universal_ptrs=universal), rf"{convert.words}: universal_ptrs\[1\] is NULL")
            entries = [chunk for block in convert.chunks for chunk in block]
            entries[5] = 0
            refused(convert(block_ptrs=pointers(*entries)), rf"{convert.words}: block_ptrs\[5\] is NULL")


class TestVectorizedCopy:
    def call(self, src=NULL, dst=NULL, nbytes=16, num_pairs=1):
        return lib.kvbm_kernels_launch_vectorized_copy(src, dst, nbytes, num_pairs, NULL)

    @pytest.mark.parametrize("num_pairs", [-1, INT_MIN])
    def test_negative_counts(self, num_pairs):
        refused(self.call(num_pairs=num_pairs), f"vectorized_copy: num_pairs is {num_pairs}, expected 0 or more")
        refused(self.call(num_pairs=num_pairs, nbytes=0), "vectorized_copy: num_pairs is .*")

    def test_nothing_to_do(self):
        assert self.call(num_pairs=0) == 0
        assert self.call(nbytes=0) == 0

    def test_null_tables(self):
        table = pointers(4096)
        refused(self.call(dst=table), "vectorized_copy: src_ptrs_device is NULL")
        refused(self.call(src=table), "vectorized_copy: dst_ptrs_device is NULL")

    def test_products_that_overflow(self):
        refused(self.call(nbytes=SIZE_MAX, num_pairs=2), "vectorized_copy: .*more than size_t holds")

    @no_gpu
    def test_a_launch_answers_what_this_build_answers(self):
        assert self.call(src=pointers(4096), dst=pointers(8192)) in LAUNCHED
        assert message().startswith("vectorized_copy: ")


class TestMemcpyBatch:
    def call(self, src=NULL, dst=NULL, nbytes=16, num_copies=1, mode=0):
        return lib.kvbm_kernels_memcpy_batch(src, dst, nbytes, num_copies, mode, NULL)

    @pytest.mark.parametrize("mode", [-1, 3, 7, INT_MIN])
    def test_unknown_modes(self, mode):
        expected = rf"memcpy_batch: mode_value is {mode}, expected 0 \(auto\), 1 \(async\) or 2 \(batch\)"
        refused(self.call(mode=mode), expected)
        refused(self.call(mode=mode, num_copies=0), expected)

    @pytest.mark.parametrize("mode", [0, 1, 2])
    def test_nothing_to_do(self, mode):
        assert self.call(mode=mode, nbytes=0) == 0
        assert self.call(mode=mode, num_copies=0) == 0

    def test_null_tables_and_entries(self):
        table = pointers(4096, 8192)
        refused(self.call(dst=table), "memcpy_batch: src_ptrs_host is NULL")
        refused(self.call(src=table), "memcpy_batch: dst_ptrs_host is NULL")
        refused(self.call(src=pointers(4096, 0), dst=table, num_copies=2), r"memcpy_batch: src_ptrs_host\[1\] is NULL")
        refused(self.call(src=table, dst=pointers(0, 4096), num_copies=2), r"memcpy_batch: dst_ptrs_host\[0\] is NULL")

    def test_products_that_overflow(self):
        refused(self.call(nbytes=1 << 63, num_copies=2), "memcpy_batch: .*more than size_t holds")

    @no_gpu
    @pytest.mark.parametrize("mode", [0, 1, 2])
    def test_a_launch_answers_what_this_build_answers(self, mode):
        src, dst = np.ones(16, np.uint8), np.zeros(16, np.uint8)
        status = self.call(src=pointers(src), dst=pointers(dst), mode=mode)
        assert status in (LAUNCHED if mode != 2 or kk.is_stub_build() else LAUNCHED | {801})
        assert not dst.any()


class TestMemcpyBatchSized:
    """The batch on a stream with a size for each piece."""

    def call(self, src=NULL, dst=NULL, nbytes=(16,), mode=0):
        sizes = ffi.new("size_t[]", nbytes)
        failed = ffi.new("size_t *", 99)
        status = lib.kvbm_kernels_memcpy_batch_sized(src, dst, sizes, len(nbytes), mode, NULL, failed)
        return status, failed[0]

    def test_nothing_to_do(self):
        assert self.call(nbytes=()) == (0, 0)
        assert self.call(nbytes=(0, 0)) == (0, 2)

    def test_checks_come_before_any_work(self):
        table = pointers(4096, 4096, 4096)
        status, failed = self.call(table, table, (1, 1, 1), mode=3)
        refused(status, "memcpy_batch_sized: mode_value is 3, .*")
        assert failed == 3
        status, _ = self.call(NULL, table)
        refused(status, "memcpy_batch_sized: src_ptrs_host is NULL")
        status, _ = self.call(table, NULL)
        refused(status, "memcpy_batch_sized: dst_ptrs_host is NULL")
        refused(
            lib.kvbm_kernels_memcpy_batch_sized(table, table, NULL, 3, 0, NULL, NULL),
            "memcpy_batch_sized: nbytes is NULL",
        )

    def test_the_first_bad_entry_is_told(self):
        """A NULL pointer is wrong only where there is something to copy."""
        status, failed = self.call(pointers(0, 4096, 0), pointers(0, 4096, 4096), (0, 1, 1))
        refused(status, r"memcpy_batch_sized: src_ptrs_host\[2\] is NULL")
        assert failed == 2
        status, failed = self.call(pointers(4096, 4096), pointers(4096, 0), (1, 1))
        refused(status, r"memcpy_batch_sized: dst_ptrs_host\[1\] is NULL")
        assert failed == 1

    def test_sizes_that_add_up_to_too_much(self):
        table = pointers(4096, 4096)
        status, failed = self.call(table, table, (1 << 63, 1 << 63))
        refused(status, "memcpy_batch_sized: .*more than size_t holds")
        assert failed == 1

    @no_gpu
    def test_a_call_with_work_is_launched(self):
        table = pointers(4096, 4096)
        status, failed = self.call(table, table, (16, 0))
        assert status in LAUNCHED
        assert failed == 2
        assert lib.kvbm_kernels_last_batch_routes() == 0


class TestMemoryKind:
    def test_null_is_refused(self):
        kind = ffi.new("int *", 77)
        refused(lib.kvbm_kernels_get_memory_kind(NULL, kind, NULL), "get_memory_kind: pointer is NULL")
        assert kind[0] == 77
        refused(lib.kvbm_kernels_get_memory_kind(kind, NULL, NULL), "get_memory_kind: kind is NULL")

    def test_ordinary_memory_is_pageable(self):
        kind, device = ffi.new("int *", 77), ffi.new("int *", 77)
        assert lib.kvbm_kernels_get_memory_kind(kind, kind, device) == 0
        assert kind[0] == lib.KVBM_KERNELS_MEMORY_PAGEABLE
        assert device[0] == -1
        assert lib.kvbm_kernels_get_memory_kind(kind, kind, NULL) == 0


class TestHostCopyBatch:
    def call(self, sources, outs, sizes, num_threads=0, failed_index=NULL):
        nbytes = NULL if sizes is None else ffi.new("size_t[]", sizes)
        return lib.kvbm_kernels_host_copy_batch(sources, outs, nbytes, len(sizes or [1]), num_threads, failed_index)

    def test_a_size_for_each_piece_and_zero_among_them(self, rng):
        source = reference.random_kv(rng, (48,), np.uint8)
        outs = [np.zeros(n, np.uint8) for n in (16, 1, 32)]
        failed = ffi.new("size_t *", 99)
        table = pointers(source, 0, source[16:])
        assert self.call(table, pointers(*outs), [16, 0, 32], failed_index=failed) == 0
        reference.assert_same_bytes(outs[0], source[:16])
        reference.assert_same_bytes(outs[2], source[16:])
        assert not outs[1].any()
        assert failed[0] == 3

    def test_nothing_to_do(self):
        assert lib.kvbm_kernels_host_copy_batch(NULL, NULL, NULL, 0, 0, NULL) == 0
        assert self.call(NULL, NULL, [0, 0]) == 0

    def test_the_first_bad_piece_is_reported_and_nothing_copied(self):
        a, b = np.ones(8, np.uint8), np.zeros(8, np.uint8)
        failed = ffi.new("size_t *")
        status = self.call(pointers(a, a, 0, 0), pointers(b, b, b, b), [8, 0, 8, 8], failed_index=failed)
        refused(status, r"host_copy_batch: src_ptrs\[2\] is NULL")
        assert failed[0] == 2
        status = self.call(pointers(a, a), pointers(b, 0), [8, 8], failed_index=failed)
        refused(status, r"host_copy_batch: dst_ptrs\[1\] is NULL")
        assert failed[0] == 1
        assert not b.any()

    def test_other_arguments(self):
        a, b = pointers(np.ones(8)), pointers(np.zeros(8))
        refused(self.call(a, b, [8], num_threads=-2), "host_copy_batch: num_threads is -2, expected 0 or more")
        refused(self.call(a, b, None), "host_copy_batch: nbytes is NULL")
        refused(self.call(NULL, b, [8]), "host_copy_batch: src_ptrs is NULL")
        refused(self.call(a, NULL, [8]), "host_copy_batch: dst_ptrs is NULL")
        expected = r"host_copy_batch: nbytes\[0\] to nbytes\[1\] add up to more than size_t holds"
        refused(self.call(pointers(1, 1), pointers(1, 1), [SIZE_MAX, 2]), expected)


class TestInformation:
    def test_build_info(self):
        info = ffi.new("kvbm_kernels_build_info *")
        refused(lib.kvbm_kernels_get_build_info(NULL), "get_build_info: info is NULL")
        info.struct_nbytes = 8
        refused(
            lib.kvbm_kernels_get_build_info(info), r"get_build_info: info->struct_nbytes is 8, expected at least \d+"
        )
        assert info.version == NULL

    def test_a_newer_callers_longer_struct_is_filled_as_far_as_it_is_known(self):
        nbytes = ffi.sizeof("kvbm_kernels_build_info")
        memory = ffi.new("char[]", nbytes + 16)
        ffi.buffer(memory)[:] = b"\xa5" * (nbytes + 16)
        info = ffi.cast("kvbm_kernels_build_info *", memory)
        info.struct_nbytes = nbytes + 16
        assert lib.kvbm_kernels_get_build_info(info) == 0
        assert info.struct_nbytes == nbytes + 16
        assert ffi.string(info.version) == ffi.string(lib.kvbm_kernels_version())
        assert ffi.buffer(memory)[nbytes:] == b"\xa5" * 16

    @pytest.mark.parametrize(
        ("code", "name"),
        [
            (0, "cudaSuccess"),
            (1, "cudaErrorInvalidValue"),
            (2, "cudaErrorMemoryAllocation"),
            (34, "cudaErrorStubLibrary"),
            (35, "cudaErrorInsufficientDriver"),
            (100, "cudaErrorNoDevice"),
            (801, "cudaErrorNotSupported"),
        ],
    )
    def test_both_builds_know_the_codes_they_answer_with(self, code, name):
        assert ffi.string(lib.kvbm_kernels_status_name(code)).decode() == name
        assert ffi.string(lib.kvbm_kernels_status_string(code)).decode() not in ("", "unrecognized")

    @pytest.mark.parametrize("code", [-1, 123456, INT_MIN])
    def test_codes_nobody_knows(self, code):
        assert ffi.string(lib.kvbm_kernels_status_name(code)) == b"unrecognized"
        assert "unrecognized" in ffi.string(lib.kvbm_kernels_status_string(code)).decode()

    def test_success_leaves_the_last_message(self):
        before = message()
        assert lib.kvbm_kernels_memcpy_batch(NULL, NULL, 0, 0, 0, NULL) == 0
        assert message() == before != ""

    def test_the_last_message_belongs_to_the_thread(self):
        """Another thread starts with none, and its failures are not seen here."""
        mine = message()
        seen = []

        def other():
            seen.append(message())
            lib.kvbm_kernels_launch_vectorized_copy(NULL, NULL, 1, -7, NULL)
            seen.append(message())

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert seen == ["", "vectorized_copy: num_pairs is -7, expected 0 or more"]
        assert message() == mine
