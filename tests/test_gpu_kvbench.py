"""kvbench on a GPU: every way to carry a test out, what is reported of it, and what is waived."""

from __future__ import annotations

import json

import pytest

import kvbm_kernels as kk
from kvbench_support import SMALL, kvbench
from kvbm_kernels.bench.patterns import PATTERNS

pytestmark = pytest.mark.gpu

pytest.importorskip("click")
pytest.importorskip("rich")


def results(tmp_path, *arguments, status=0):
    """The JSON of a run in this process: PyTorch takes seconds to import, and some tests are many runs."""
    from kvbm_kernels.bench.app import run_command

    path = tmp_path / "results.json"
    assert run_command([*arguments, "--json", str(path)]) == status
    return json.loads(path.read_text())


@pytest.fixture(params=["torch", "cupy"])
def library(request):
    pytest.importorskip(request.param)
    return request.param


def by_key(run):
    return {(row["pattern"], row["direction"], row["backend"]): row for row in run["results"]}


def test_every_pattern_in_every_direction(tmp_path, library):
    """Right bytes by every backend; waived is only what reorders rows."""
    run = results(tmp_path, *SMALL, "--num-blocks", "3", "--warmup", "0", "--iters", "1", "--pattern",
                  ",".join(PATTERNS), "--backend", "vectorized,auto,convert", "--direction", "h2d,d2h,d2d",
                  "--library", library)  # fmt: skip
    assert run["counts"]["measured"] + run["counts"]["waived"] == len(run["results"]) == 9 * len(PATTERNS)
    for row in run["results"]:
        if row["status"] == "waived":
            assert row["backend"] == "vectorized"
            assert "reorders pieces of" in row["reason"]
    assert run["counts"]["waived"] < run["counts"]["measured"] / 2


def test_routes_and_functions(tmp_path, library):
    arguments = ["--layers", "16", "--num-blocks", "4", "--iters", "10", "--direction", "h2d,d2d", "--pattern",
                 "lw_to_fc_pools,nhd_to_universal,nhd_to_hnd", "--library", library]  # fmt: skip
    run = by_key(results(tmp_path, *arguments, "--backend", "vectorized,batched,memcpy_async,auto,convert"))
    for direction in ("h2d", "d2d"):
        pieces = {backend: run["lw_to_fc_pools", direction, backend] for backend in
                  ("vectorized", "batched", "memcpy_async", "auto", "convert")}  # fmt: skip
        assert pieces["vectorized"]["function"] == "kvbm_kernels_launch_vectorized_copy"
        assert pieces["vectorized"]["route"] == ["kernel"]
        assert pieces["memcpy_async"]["route"] == ["async"]
        assert pieces["auto"]["function"] == "kvbm_kernels_memcpy_batch"
        assert pieces["auto"]["route"]
        if kk.has_memcpy_batch_async():
            assert pieces["batched"]["route"] == ["batch"]
        else:
            assert pieces["batched"]["reason"].startswith("not supported here")
        convert = run["nhd_to_universal", direction, "convert"]
        assert convert["function"] == "kvbm_kernels_launch_universal_from_block"
        assert run["nhd_to_hnd", direction, "convert"]["function"].startswith("copy_blocks")
        # A kernel launch is far shorter than what holds the stream.
        assert convert["queued_ahead"] is True
        assert convert["baseline"]["name"] == "copy engine"
        assert convert["traffic_gbps"] == convert["bandwidth_gbps"] * (2 if direction == "d2d" else 1)
        assert convert["working_set_bytes"] > 2 * convert["cache_bytes"]
        assert convert["cached"] is False


def test_the_documents_own_flags(tmp_path):
    """With a GPU nothing of that run is waived, but for its size here."""
    ran = kvbench("--num-blocks=1,3", "--tokens-per-block=16,64", "--backend", "vectorized,batched", "--direction",
                  "h2d", "--layers", "4", "--iters", "2", "--plot", tmp_path / "run.png")  # fmt: skip
    assert ran.status == 0, ran.err
    assert len(ran.rows) == (16 if kk.has_memcpy_batch_async() else 8)
    assert ran.rows[0]["direction"] == "h2d"
    assert "  GPU: " in ran.err
    assert (tmp_path / "run.png").stat().st_size > 10_000


def test_all_directions_are_the_default(tmp_path):
    run = results(tmp_path, *SMALL, "--num-blocks", "1", "--iters", "1")
    assert list(dict.fromkeys(row["direction"] for row in run["results"])) == ["h2d", "d2h", "d2d"]
    assert "cuda" in run["provenance"]["machines"]
    assert run["provenance"]["kvbm_kernels"]["devices"] > 0


@pytest.mark.parametrize("kernel", ["gemm", "memory"])
def test_beside_a_kernel(tmp_path, kernel, library, capsys):
    """Both sides are timed, alone and beside the other, and so is the baseline."""
    run = results(tmp_path, "--num-blocks", "16", "--iters", "5", "--direction", "h2d", "--pattern", "lw_to_fc_pools",
                  "--backend", "auto", "--beside", kernel, "--library", library)  # fmt: skip
    (row,) = run["results"]
    for beside in (row["beside"], row["beside"]["baseline"]):
        assert beside["kernel"] == kernel
        assert beside["overlapped"] is True
        for side in ("compute", "transfer"):
            assert beside[f"{side}_slowdown"] == beside[f"{side}_beside_ms"] / beside[f"{side}_alone_ms"]
            assert beside[f"{side}_slowdown"] > 0.5
    assert row["beside"]["transfer_alone_ms"] == row["median_ms"]
    said = f"beside {kernel}, times over those alone: kernel and transfer {row['beside']['compute_slowdown']:.3f} and "
    assert said in capsys.readouterr().err


def test_fewer_multiprocessors(tmp_path):
    """A bound that is taken: one of them is far slower than all."""
    arguments = ["--num-blocks", "32", "--iters", "5", "--direction", "d2d", "--pattern", "nhd_to_universal",
                 "--backend", "auto"]  # fmt: skip
    (free,) = results(tmp_path, *arguments)["results"]
    (bound,) = results(tmp_path, *arguments, "--max-sms", "1")["results"]
    assert bound["median_ms"] > 4 * free["median_ms"]
    (waived,) = results(tmp_path, *arguments[:-1], "vectorized", "--max-sms", "1")["results"]
    assert waived["status"] == "waived"


def test_the_array_librarys_own_conversion(tmp_path, library):
    arguments = ["--layers", "8", "--num-blocks", "4", "--iters", "2", "--direction", "d2d,h2d", "--pattern",
                 "nhd_to_universal_pools", "--backend", "auto", "--library", library]  # fmt: skip
    run = results(tmp_path, *arguments, "--baseline", "permute")
    on_device, over_link = run["results"]
    assert on_device["baseline"]["name"] == {"torch": "PyTorch permute", "cupy": "CuPy permute"}[library]
    assert over_link["status"] == "waived"


def test_out_of_memory_is_one_tests_matter(tmp_path, library):
    """More than any device has, in between tests that fit."""
    run = results(tmp_path, "--num-blocks", "1,200000,2", "--iters", "1", "--direction", "d2d,h2d", "--pattern", "fc",
                  "--backend", "auto", "--library", library)  # fmt: skip
    assert [row["status"] for row in run["results"]] == ["measured"] * 2 + ["waived"] * 2 + ["measured"] * 2
    for row in run["results"][2:4]:
        assert row["reason"].startswith("out of memory")


def test_suites_run(tmp_path):
    """A row of each; what they aim at is in the results."""
    for suite, only in (("conversion", "5 MB"), ("link", "to_universal"), ("transfer", "1 x 5 MiB")):
        run = results(tmp_path, "--suite", suite, "--only", only, "--iters", "2", "--warmup", "1")
        assert run["counts"]["measured"] == len(run["results"]) > 0
        assert any("ratio" in row["aims"] for row in run["results"])
