"""How kvbench lays its tests out, and what it takes for right: compared with the definition of the layouts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvbm_kernels as kk
import reference
from kvbm_kernels.bench.backends import Waived, prepare, usual_backends
from kvbm_kernels.bench.cases import DIRECTIONS, Case, combinations
from kvbm_kernels.bench.machine import HostMachine
from kvbm_kernels.bench.models import MODELS
from kvbm_kernels.bench.patterns import PATTERNS, as_pattern
from kvbm_kernels.bench.results import Result, Timing
from kvbm_kernels.bench.sides import Buffers
from kvbm_kernels.bench.suites import SUITES, suite

# The columns before the times of the document's own run, on a GPU.
DOCUMENTED = """\
16,1,fc_to_fc,h2d,vectorized,5242880,32768,5242880,1
16,1,fc_to_fc,h2d,batched,5242880,32768,5242880,1
16,1,lw_to_fc,h2d,vectorized,5242880,32768,32768,160
16,1,lw_to_fc,h2d,batched,5242880,32768,32768,160
16,128,fc_to_fc,h2d,vectorized,671088640,32768,5242880,128
16,128,fc_to_fc,h2d,batched,671088640,32768,5242880,128
16,128,lw_to_fc,h2d,vectorized,671088640,32768,32768,20480
16,128,lw_to_fc,h2d,batched,671088640,32768,32768,20480
64,1,fc_to_fc,h2d,vectorized,20971520,131072,20971520,1
64,1,fc_to_fc,h2d,batched,20971520,131072,20971520,1
64,1,lw_to_fc,h2d,vectorized,20971520,131072,131072,160
64,1,lw_to_fc,h2d,batched,20971520,131072,131072,160
64,128,fc_to_fc,h2d,vectorized,2684354560,131072,20971520,128
64,128,fc_to_fc,h2d,batched,2684354560,131072,20971520,128
64,128,lw_to_fc,h2d,vectorized,2684354560,131072,131072,20480
64,128,lw_to_fc,h2d,batched,2684354560,131072,131072,20480
"""

SHAPES = st.builds(
    kk.BlockShape,
    nl=st.integers(1, 3),
    no=st.integers(1, 2),
    nh=st.integers(1, 3),
    nt=st.integers(1, 4),
    hd=st.integers(1, 9),
    dtype=st.sampled_from(["int8", "bf16", "f64"]),
)


@pytest.fixture(scope="module")
def machine():
    return HostMachine()


def make(machine, name, shape, num_blocks, seed=0):
    buffers = Buffers(machine, as_pattern(name), shape, num_blocks, DIRECTIONS["h2h"], np.random.default_rng(seed))
    buffers.dst.spoil()
    return buffers


def units(side):
    """The bytes of a side's units, in logical order: read where the pointer table says."""
    table = side.addresses.reshape(-1).tolist()
    return np.stack([_bytes_at(start, side.unit_nbytes) for start in table])


def _bytes_at(address, nbytes):
    return np.frombuffer(bytes(kk.ffi.buffer(kk.ffi.cast("char *", address), nbytes)), np.uint8)


def laid_out(kv, layout, pattern):
    """What the units of a layout hold, by the definition of the layouts; kv is [b, l, o, t, h, row bytes]."""
    if layout in ("lw", "nhd", "hnd"):
        blocks = reference.block_stack(kv, "HND" if layout == "hnd" else "NHD")
        return np.stack([chunk.reshape(-1) for block in blocks for chunk in block])
    if layout == "packed":
        nb, nl = kv.shape[:2]
        # A token's heads, and K and V of each.
        return np.array(kv.transpose(0, 1, 3, 4, 2, 5), order="C").reshape(nb * nl, -1)
    if layout == "universal":
        return reference.universal(kv).reshape(len(kv), -1)
    inner = "HND" if layout == "operational" and "hnd" in (pattern.src, pattern.dst) else "NHD"
    return reference.operational(kv, inner).reshape(len(kv), -1)


class TestLayouts:
    @settings(max_examples=150, deadline=None)
    @given(name=st.sampled_from(list(PATTERNS)), shape=SHAPES, num_blocks=st.integers(1, 4), seed=st.integers(0, 99))
    def test_both_sides_are_what_the_definition_says(self, machine, name, shape, num_blocks, seed):
        """What rows() reads, laid out by the definition, is what lies where the pointer tables say."""
        pattern = PATTERNS[name]
        buffers = make(machine, name, shape, num_blocks, seed)
        prepare("auto", pattern, buffers, None).call()
        for side in (buffers.src, buffers.dst):
            kv = side.rows(0, num_blocks)
            kv = (
                np.ascontiguousarray(kv)
                .view(np.uint8)
                .reshape(num_blocks, shape.nl, shape.no, shape.nt, shape.nh, shape.row_nbytes)
            )
            reference.assert_same_bytes(units(side), laid_out(kv, side.layout, pattern))
        assert buffers.first_difference() is None

    @settings(max_examples=150, deadline=None)
    @given(name=st.sampled_from(list(PATTERNS)), shape=SHAPES, num_blocks=st.integers(1, 4))
    def test_every_backend_does_the_same(self, machine, name, shape, num_blocks):
        pattern = PATTERNS[name]
        buffers = make(machine, name, shape, num_blocks)
        for backend in ("vectorized", "auto", "convert"):
            buffers.dst.spoil()
            try:
                prepare(backend, pattern, buffers, None).call()
            except Waived:
                assert backend == "vectorized"
                assert pattern.is_conversion
            else:
                assert buffers.first_difference() is None

    @settings(max_examples=100, deadline=None)
    @given(name=st.sampled_from(list(PATTERNS)), shape=SHAPES, num_blocks=st.integers(1, 4))
    def test_the_array_library_does_the_same(self, machine, name, shape, num_blocks):
        buffers = make(machine, name, shape, num_blocks)
        buffers.permute()
        assert buffers.first_difference() is None

    @settings(max_examples=100, deadline=None)
    @given(name=st.sampled_from(list(PATTERNS)), shape=SHAPES, num_blocks=st.integers(1, 4), data=st.data())
    def test_one_wrong_byte_is_found_and_named(self, machine, name, shape, num_blocks, data):
        """Whichever it is: its place in the definition of the layouts is the place in the message."""
        pattern = PATTERNS[name]
        buffers = make(machine, name, shape, num_blocks)
        prepare("auto", pattern, buffers, None).call()
        side = buffers.dst
        table = side.addresses.reshape(-1)
        unit = data.draw(st.integers(0, len(table) - 1))
        offset = data.draw(st.integers(0, side.unit_nbytes - 1))
        memory = kk.ffi.buffer(kk.ffi.cast("char *", int(table[unit])), side.unit_nbytes)
        before = memory[offset]
        memory[offset] = bytes([before[0] ^ 1])
        extents = (num_blocks, shape.nl, shape.no, shape.nt, shape.nh, shape.row_nbytes)
        places = laid_out(np.arange(math.prod(extents)).reshape(extents), side.layout, pattern)
        b, layer, o, t, h, d = np.unravel_index(places[unit, offset], extents)
        assert buffers.first_difference() == (
            f"block {b}, layer {layer}, outer {o}, token {t}, head {h}, byte {d} is "
            f"0x{before[0] ^ 1:02x}, expected 0x{before[0]:02x}"
        )

    def test_shuffled_is_not_adjacent(self, machine):
        """Pieces of pools and shuffled pieces do not follow each other, adjacent ones do."""
        shape = kk.BlockShape(8, 2, 1, 2, 8, "bf16")
        followed = {}
        for name in ("lw_to_lw", "lw_to_lw_shuffled", "lw_to_lw_pools"):
            table = make(machine, name, shape, 16).src.addresses.reshape(-1).astype(np.int64)
            followed[name] = float(np.mean(np.diff(table) == shape.chunk_nbytes))
        assert followed["lw_to_lw"] == 1
        assert followed["lw_to_lw_shuffled"] < 0.1
        assert followed["lw_to_lw_pools"] < 0.1

    def test_a_large_comparison_takes_parts(self, machine, monkeypatch):
        monkeypatch.setattr("kvbm_kernels.bench.sides._COMPARED_NBYTES", 1)
        for name in ("nhd_to_universal", "hnd_to_operational_shuffled", "packed_to_nhd_pools"):
            buffers = make(machine, name, kk.BlockShape(2, 2, 3, 4, 5, "f16"), 6)
            prepare("auto", as_pattern(name), buffers, None).call()
            assert buffers.first_difference() is None
            machine.spoil(buffers.dst.memory[-1][-1])
            table = buffers.dst.addresses.reshape(-1).tolist()
            found = buffers.first_difference()
            last = machine.address(buffers.dst.memory[-1][-1])
            assert (found is not None) == (last in table)


class TestCases:
    def test_the_documents_own_run(self):
        patterns = [as_pattern("fc_to_fc"), as_pattern("lw_to_fc")]
        shapes = [kk.BlockShape(80, 2, 8, nt, 128, "bf16") for nt in (16, 64)]
        cases = combinations(shapes, [1, 128], patterns, ["h2d"], ["vectorized", "batched"])
        timing = Timing([2.0], 1)
        rows = [Result(case, "measured", timing=timing).columns() for case in cases]
        assert [",".join(row[:9]) for row in rows] == DOCUMENTED.splitlines()
        assert rows[0][9:] == ["2.0000", "0.00"]

    @pytest.mark.parametrize(
        ("name", "nbytes"),
        [
            ("fc_to_fc", 80 * 2 * 32768),
            ("lw_to_fc_pools", 32768),
            ("nhd_to_operational", 32768),
            ("hnd_to_operational", 32768),
            ("nhd_to_universal", 256),
            ("hnd_to_universal_shuffled", 16 * 256),
            ("universal_to_hnd", 16 * 256),
            ("operational_to_universal", 256),
            ("nhd_to_hnd", 256),
            ("packed_to_nhd", 256),
        ],
    )
    def test_the_size_of_a_piece(self, name, nbytes):
        assert as_pattern(name).run_nbytes(kk.BlockShape(80, 2, 8, 16, 128, "bf16")) == nbytes

    def test_the_size_of_a_piece_of_mla(self):
        """With one head, nothing is reordered."""
        shape = kk.BlockShape(61, 1, 1, 64, 576, "bf16")
        for name in ("nhd_to_universal", "hnd_to_nhd", "packed_to_universal"):
            assert as_pattern(name).run_nbytes(shape) == shape.chunk_nbytes
        assert as_pattern("operational_to_universal").run_nbytes(shape) == shape.block_nbytes

    def test_usual_backends(self):
        """Where none is named, none is run that the pattern or the direction has not."""
        assert usual_backends(as_pattern("lw"), "h2d") == ("vectorized", "batched", "auto")
        assert usual_backends(as_pattern("lw"), "h2h") == ("auto",)
        assert usual_backends(as_pattern("nhd_to_universal"), "d2d") == ("convert", "auto")

    @pytest.mark.parametrize("name", SUITES)
    def test_suites_name_each_test_once(self, name):
        cases = suite(name)
        keys = [(case.shape, case.num_blocks, case.pattern, case.direction, case.backend) for case in cases]
        assert len(set(keys)) == len(keys) > 1
        assert all(case.title for case in cases)
        assert all(case in suite("all") for case in cases)

    def test_aims(self):
        case = Case(kk.BlockShape(1, 1, 1, 1, 1, "int8"), 1, as_pattern("fc"), "d2d", "auto",
                    aims={"ratio": 0.9, "host_ms": 1.0, "compute_slowdown": 1.1})  # fmt: skip

        def missed(milliseconds, host_ms, slowdown):
            measured = {"host_ms": host_ms, "beside": {"compute_slowdown": slowdown}}
            timing, baseline = Timing([milliseconds], 1), Timing([0.9], 1)
            return Result(case, "measured", timing=timing, baseline=baseline, measured=measured).missed

        assert missed(1.0, 1.0, 1.1) == []
        assert missed(1.01, 1.01, 1.11) == ["ratio", "host_ms", "compute_slowdown"]
        assert Result(case, "waived").missed == []

    def test_models(self):
        """Bytes of a token, all layers, in bf16: as published for these."""
        kib = {"llama-3.1-8b": 128, "llama-3.1-70b": 320, "llama-3.1-405b": 504, "gemma-3-27b": 496, "phi-4": 200,
               "deepseek-v3": 68.625, "mpt-30b": 1344, "falcon-7b": 8, "gpt-oss-120b": 72}  # fmt: skip
        for name, expected in kib.items():
            model = MODELS[name]
            shape = kk.BlockShape(model.layers, model.outer_dim, model.kv_heads, 1, model.head_dim, "bf16")
            assert shape.block_nbytes == 1024 * expected, name
