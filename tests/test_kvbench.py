"""The command kvbench on the host engine: what it prints, what it refuses, and how it ends."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import kvbm_kernels as kk
from buildtools import ROOT, run
from kvbench_support import COLUMNS, COMMAND, SMALL, kvbench, on_terminal, results
from kvbm_kernels.bench.backends import BACKENDS
from kvbm_kernels.bench.models import MODELS

pytest.importorskip("click")
pytest.importorskip("rich")

# The banner, the section lines and the lines of tests as the source document shows them, for a small model. The last
# two lines of the banner, and what follows the time of a test, are more than the document has.
DOCUMENTED = """\
KV Cache Transfer Benchmark
  Model: Llama 3.2 1B (bf16)
  Layers: 16, KV heads: 8, Head dim: 64, Outer dim: 2
  Warmup: 0, Timed: 1
  Batch API available: {batch}
  tokens_per_block: [1, 16]
  num_blocks: [1, 3]
  directions: [h2h]
  patterns: [fc_to_fc, lw_to_fc]
  backends: [vectorized, auto]
  Total tests: 16
  Library: kvbm_kernels {library}
  Host: ...

--- tokens_per_block=1, inner=1024 bytes (1 KB), block=32768 bytes (0.0 MB) ---
  [1/16] tpb=1 N=  1 fc_to_fc h2h    vectorized   ... #.## GB/s (#.#### ms), #.## of memcpy
  [2/16] tpb=1 N=  1 fc_to_fc h2h    auto         ... #.## GB/s (#.#### ms), #.## of memcpy
  [3/16] tpb=1 N=  1 lw_to_fc h2h    vectorized   ... #.## GB/s (#.#### ms), #.## of memcpy
  [4/16] tpb=1 N=  1 lw_to_fc h2h    auto         ... #.## GB/s (#.#### ms), #.## of memcpy
  [5/16] tpb=1 N=  3 fc_to_fc h2h    vectorized   ... #.## GB/s (#.#### ms), #.## of memcpy
  [6/16] tpb=1 N=  3 fc_to_fc h2h    auto         ... #.## GB/s (#.#### ms), #.## of memcpy
  [7/16] tpb=1 N=  3 lw_to_fc h2h    vectorized   ... #.## GB/s (#.#### ms), #.## of memcpy
  [8/16] tpb=1 N=  3 lw_to_fc h2h    auto         ... #.## GB/s (#.#### ms), #.## of memcpy
--- tokens_per_block=16, inner=16384 bytes (16 KB), block=524288 bytes (0.5 MB) ---
  [9/16] tpb=16 N=  1 fc_to_fc h2h    vectorized   ... #.## GB/s (#.#### ms), #.## of memcpy
  [10/16] tpb=16 N=  1 fc_to_fc h2h    auto         ... #.## GB/s (#.#### ms), #.## of memcpy
  [11/16] tpb=16 N=  1 lw_to_fc h2h    vectorized   ... #.## GB/s (#.#### ms), #.## of memcpy
  [12/16] tpb=16 N=  1 lw_to_fc h2h    auto         ... #.## GB/s (#.#### ms), #.## of memcpy
  [13/16] tpb=16 N=  3 fc_to_fc h2h    vectorized   ... #.## GB/s (#.#### ms), #.## of memcpy
  [14/16] tpb=16 N=  3 fc_to_fc h2h    auto         ... #.## GB/s (#.#### ms), #.## of memcpy
  [15/16] tpb=16 N=  3 lw_to_fc h2h    vectorized   ... #.## GB/s (#.#### ms), #.## of memcpy
  [16/16] tpb=16 N=  3 lw_to_fc h2h    auto         ... #.## GB/s (#.#### ms), #.## of memcpy

16 tests: 16 measured
Done.
"""


class TestOutput:
    def test_the_documented_streams(self):
        """Standard error has the documented banner and lines, standard output the CSV and nothing else."""
        ran = kvbench(
            "--num-blocks=1,3", "--tokens-per-block=1,16", "--backend", "vectorized,auto", "--direction", "h2h",
            "--model", "llama-3.2-1b", "--warmup", "0", "--iters", "1",
        )  # fmt: skip
        assert ran.status == 0, ran.err
        timed = r"\d+\.\d\d GB/s \(\d+\.\d{4} ms\), \d+\.\d\d of"
        shown = re.sub(timed, "#.## GB/s (#.#### ms), #.## of", ran.err)
        shown = re.sub(r"  Host: .+", "  Host: ...", shown)
        build = kk.build_info()
        driver = f"driver for {build.driver}" if build.driver else "no driver"
        cuda = "stub build" if build.is_stub_build else f"CUDA {build.cuda}, {driver}"
        assert shown == DOCUMENTED.format(
            batch=str(kk.has_memcpy_batch_async()).lower(), library=f"{build.version}, {cuda}"
        )
        header, *rows = ran.out.splitlines()
        assert header == COLUMNS
        assert len(rows) == 16
        pattern = r"16,3,lw_to_fc,h2h,auto,1572864,16384,16384,96,\d+\.\d{4},\d+\.\d\d"
        assert re.fullmatch(pattern, rows[-1])

    @pytest.mark.parametrize(("baseline", "name"), [("copy", "memcpy"), ("permute", "NumPy permute")])
    def test_the_ratio_ends_the_line_of_a_test(self, tmp_path, baseline, name):
        saved = tmp_path / "run.json"
        ran = kvbench(*SMALL, "--num-blocks", "300", "--direction", "h2h", "--pattern", "nhd_to_universal", "--backend",
                      "auto", "--baseline", baseline, "--json", saved)  # fmt: skip
        (row,) = json.loads(saved.read_text())["results"]
        assert f" GB/s ({row['median_ms']:.4f} ms), {row['ratio']:.2f} of {name}\n" in ran.err

    def test_bandwidth_is_payload_over_the_median(self):
        for row in kvbench(*SMALL, "--num-blocks", "200").rows:
            # Both figures are rounded.
            assert float(row["bandwidth_gbps"]) == pytest.approx(
                int(row["total_bytes"]) / float(row["median_ms"]) / 1e6, rel=0.05
            )

    @pytest.mark.skipif(kk.build_info().devices > 0, reason="with a GPU the others are")
    def test_the_host_engine_is_the_default_without_a_gpu(self):
        """And the banner says why; not where it was asked for."""
        ran = kvbench(*SMALL, "--num-blocks", "2")
        assert [(row["pattern"], row["direction"], row["backend"]) for row in ran.rows] == [
            ("fc_to_fc", "h2h", "auto"),
            ("lw_to_fc", "h2h", "auto"),
        ]
        why = "this build of kvbm_kernels has no CUDA" if kk.is_stub_build() else "there is no CUDA device"
        assert re.search(rf"\n  GPU: none \({why}[^()]*\); measuring h2h\n  Host: ", ran.err)
        assert "GPU: none" not in kvbench(*SMALL, "--num-blocks", "2", "--direction", "h2h").err

    def test_abbreviations(self, tmp_path):
        """The documented ones; a test asked for twice is one."""
        run = results(tmp_path, *SMALL, "--pattern", "fc,lw,lw_to_fc", "--backend", "vec,batch,async,memcpy",
                      "--direction", "h2h", "--num-blocks", "1")  # fmt: skip
        assert [(row["pattern"], row["backend"]) for row in run["results"]] == [
            (pattern, backend)
            for pattern in ("fc_to_fc", "lw_to_fc")
            for backend in ("vectorized", "batched", "memcpy_async")
        ]

    def test_a_pipe_gets_plain_lines(self):
        assert "\x1b" not in kvbench(*SMALL, FORCE_COLOR="", TERM="xterm-256color").err

    def test_a_terminal_gets_a_bar_and_a_table(self):
        """Also there, standard output is the CSV."""
        status, text, out = on_terminal(200, *SMALL, "--num-blocks", "1,2", stream="stderr")
        assert status == 0, text
        assert out.splitlines()[0] == COLUMNS
        assert len(out.splitlines()) == 5
        assert "\x1b" in text
        assert re.search(r"\d+% .*left", text)
        assert re.search(r"memcpy \d+\.\d\d +│ +\d+\.\d{3}", text), "no table with the baseline and the ratio"

    @pytest.mark.parametrize("columns", [20, 80])
    def test_a_narrow_terminal_gets_a_table_with_all_figures(self, columns, tmp_path):
        saved = tmp_path / "run.json"
        status, text, _ = on_terminal(columns, *SMALL, "--num-blocks", "1,2", "--json", saved, stream="stderr")
        assert status == 0, text
        shown = text.partition("GB/s of payload")[2]
        assert "…" not in shown
        for result in json.loads(saved.read_text())["results"]:
            baseline = f"memcpy {result['baseline']['bandwidth_gbps']:.2f}"
            assert re.search(rf"{result['bandwidth_gbps']:.2f}  {baseline} +{result['ratio']:.3f} ", shown)

    def test_the_script_is_the_module(self):
        script = Path(sysconfig.get_path("scripts"), "kvbench")
        assert script.exists(), "the package is installed without its scripts"
        assert run(script, "--version") == f"kvbench, version {kk.__version__}\n"

    @pytest.mark.parametrize(
        ("option", "value", "offered"),
        [
            ("--model", "llama-3.1-", ["llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b"]),
            ("--backend", "vec", ["vectorized"]),
            ("--backend", "auto,b", ["auto,batched"]),
            ("--direction", "h2h,d2", ["h2h,d2h", "h2h,d2d"]),
            (
                "--pattern",
                "nhd_to_universal",
                ["nhd_to_universal", "nhd_to_universal_shuffled", "nhd_to_universal_pools"],
            ),
        ],
    )
    def test_completion_knows_the_names(self, option, value, offered):
        ran = kvbench(_KVBENCH_COMPLETE="bash_complete", COMP_WORDS=f"kvbench {option} {value}", COMP_CWORD="2")
        assert (ran.status, ran.err) == (0, "")
        assert [line.removeprefix("plain,") for line in ran.out.splitlines()] == offered

    @pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
    def test_completion_of_shells(self, shell):
        assert f"_KVBENCH_COMPLETE={shell}_complete" in kvbench(_KVBENCH_COMPLETE=f"{shell}_source").out
        assert f"_KVBENCH_COMPLETE={shell}_source" in kvbench("--help").out or shell == "zsh"

    def test_help_has_all_names(self):
        text = kvbench("--help").out
        listed = text.split("Models:")[1].split("Examples:")[0]
        assert " ".join(listed.split()).split(", ") == list(MODELS)
        assert all(f"\n    {name} " in text for name in BACKENDS)

    def test_nobody_reads_on(self):
        """A closed pipe ends the run without a traceback."""
        done = subprocess.run(
            f"{' '.join(COMMAND)} {' '.join(SMALL)} --num-blocks 1,2,3,4,5,6 | head -n 1",
            shell=True, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.stdout == f"{COLUMNS}\n"
        assert "Traceback" not in done.stderr


class TestRefused:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--num-blocks", "1,x"], "'x', expected a whole number"),
            (["--num-blocks", "0"], "'0', expected a whole number from 1 to 2**63 - 1"),
            (["--num-blocks", str(1 << 63)], f"'{1 << 63}', expected a whole number from 1 to 2**63 - 1"),
            *[
                (["--num-blocks", "9" * n], f"{'9' * 20}... of {n} digits, expected a whole number")
                for n in (401, 5000)
            ],
            (["--iters", "9" * 401], "is not in the range 1<=x<=9223372036854775807"),
            (["--layers", "9" * 5000], "is not a valid integer range"),
            (["--tokens-per-block", "-1"], "'-1', expected a whole number"),
            (["--backend", "fast"], "expected vectorized (or vec), batched (or batch), memcpy_async (or async/memcpy)"),
            (["--direction", "d2x"], "expected h2d, d2h, d2d, h2h"),
            (["--pattern", "nhd_to_nhd"], "expected fc_to_fc (or fc), lw_to_fc (or lw)"),
            (["--pattern", "fc_to_fc_pools"], "expected fc_to_fc"),
            (["--dtype", "bf17"], "expected one of f16, bf16"),
            (["--model", "llama"], "expected llama-3.1-8b"),
            (["--iters", "0"], "1<=x"),
            (["--layers", str((1 << 63) - 1)], "less than 2**63"),
            (["--beside", "gem"], "'gemm'"),
            (["--suite", "all", "--pattern", "fc"], "--pattern with --suite, expected only"),
            (["--suite", "link", "--only", "nothing"], "leaves no test"),
            (["--only", "nothing"], "without --suite"),
            (["--only", "nothing,"], "'nothing,', expected a text, or several with commas"),
            (["--suite", "link", "--only", ""], "'', expected a text"),
            (["--json", ""], ". cannot be written: Is a directory"),
            (["--plot", "picture.gif"], "expected a .png or .svg file"),
            (["--json", "no/such/folder.json"], "no/such/folder.json cannot be written: No such file or directory"),
            (["--plot", "/proc/picture.png"], "cannot be written"),
            (["--json", "-"], "-, expected a file: standard output is the CSV"),
            (["--plot", "-"], "-, expected a file: standard output is the CSV"),
            (["--wormup", "1"], "--warmup"),
            (["--zzz"], "--help"),
            (["plt"], "Did you mean 'plot'?"),
            (["zzz"], "--help"),
            (["--iters", "3", "plot", "pyproject.toml", "x.png"], "in front of plot"),
            (["plot", "pyproject.toml", "x.png"], "pyproject.toml is no result of kvbench"),
            (["plot", "pyproject.toml", "x.gif"], "expected a .png or .svg file"),
            (["compare", "pyproject.toml", "pyproject.toml"], "pyproject.toml is no result of kvbench"),
            (["compare", "pyproject.toml"], "Missing argument"),
            (["show", "pyproject.toml"], "pyproject.toml is no JSON of kvbench"),
            (["show", "docs/kvbench-16.csv"], "no JSON of kvbench: it is the CSV of a run, expected what --json FILE"),
        ],
    )
    def test_bad_flags_take_one_line(self, arguments, said, monkeypatch):
        monkeypatch.chdir(ROOT)
        ran = kvbench(*arguments)
        assert ran.status == 2
        assert ran.out == ""
        assert ran.err.startswith("kvbench: error: ")
        assert said in ran.err
        assert ran.err.count("\n") == 1

    @pytest.mark.parametrize("missing", ["click", "rich", "matplotlib"])
    def test_without_the_extra(self, missing, tmp_path):
        (tmp_path / f"{missing}.py").write_text(f"raise ModuleNotFoundError('no {missing}', name='{missing}')\n")
        # Only drawing needs the last one.
        ran = kvbench(*SMALL, "--plot", tmp_path / "plot.png", PYTHONPATH=str(tmp_path))
        assert (ran.status, ran.out) == (2, "")
        assert ran.err.startswith(f"kvbench: error: {missing} is not installed, expected the extra cli: pip install ")
        assert ran.err.count("\n") == 1
        assert (kvbench(*SMALL, "--num-blocks", "1", PYTHONPATH=str(tmp_path)).status == 0) == (missing == "matplotlib")

    def test_the_package_needs_none_of_it(self):
        program = (
            "import sys, kvbm_kernels; print({'click', 'rich', 'matplotlib', 'kvbm_kernels.bench'} & set(sys.modules))"
        )
        assert run(sys.executable, "-c", program) == "set()\n"


class TestWaived:
    @pytest.mark.skipif(kk.build_info().devices > 0, reason="there is a GPU")
    def test_the_documents_own_run_without_a_gpu(self):
        """Every test is waived and counted, with a reason; nothing failed."""
        ran = kvbench("--num-blocks=1,128", "--tokens-per-block=16,64", "--backend", "vectorized,batched",
                      "--direction", "h2d")  # fmt: skip
        assert ran.status == 0
        assert ran.rows == []
        assert len(re.findall(r"\[\d+/16\] .* \.\.\. WAIVED: \S+", ran.err)) == 16
        assert "\n16 tests: 16 waived\n" in ran.err

    def test_what_the_host_engine_has_not(self, tmp_path):
        run = results(tmp_path, *SMALL, "--num-blocks", "2", "--direction", "h2h", "--pattern", "lw,nhd_to_universal",
                      "--backend", "vectorized,batched,convert")  # fmt: skip
        found = {(row["pattern"], row["backend"]): (row["status"], row["reason"]) for row in run["results"]}
        assert found == {
            ("lw_to_fc", "vectorized"): ("measured", ""),
            ("lw_to_fc", "batched"): ("waived", "batched is CUDA's; h2h has vectorized, auto and convert"),
            ("lw_to_fc", "convert"): ("measured", ""),
            ("nhd_to_universal", "vectorized"): (
                "waived",
                "nhd_to_universal reorders pieces of 24 bytes: convert and auto do that",
            ),
            ("nhd_to_universal", "batched"): (
                "waived",
                "nhd_to_universal reorders pieces of 24 bytes: convert and auto do that",
            ),
            ("nhd_to_universal", "convert"): ("measured", ""),
        }
        assert run["counts"] == {"measured": 3, "waived": 3, "wrong": 0, "failed": 0, "not_run": 0}

    @pytest.mark.parametrize("option", [["--beside", "gemm"], ["--max-sms", "4"]])
    @pytest.mark.parametrize("backend", ["auto", "convert"])
    def test_options_of_a_gpu(self, option, backend, tmp_path):
        run = results(tmp_path, *SMALL, "--num-blocks", "1", "--direction", "h2h", "--backend", backend, *option)
        assert [row["status"] for row in run["results"]] == ["waived", "waived"]
        assert run["results"][0]["reason"].startswith(f"{option[0]} ")
        assert run["results"][0]["reason"].endswith(", and h2h uses none")

    def test_out_of_memory_is_one_tests_matter(self, tmp_path):
        run = results(tmp_path, "--num-blocks", "1000000000,1", "--pattern", "lw", "--iters", "1", "--direction", "h2h")
        huge, small = run["results"]
        assert huge["status"] == "waived"
        assert re.match(r"out of memory: \d+\.\d GB of host memory, of \d+\.\d available", huge["reason"])
        assert small["status"] == "measured"


class TestInterrupted:
    def test_what_was_measured_is_kept(self, tmp_path):
        path, plot = tmp_path / "results.json", tmp_path / "plot.svg"
        counts = ",".join(str(n) for n in range(1, 100))
        with (
            (tmp_path / "shown.txt").open("w") as shown,
            subprocess.Popen(
                [*COMMAND, *SMALL, "--num-blocks", counts, "--pattern", "fc", "--json", path, "--plot", plot],
                stdout=subprocess.PIPE, stderr=shown, text=True,
            ) as process,
        ):  # fmt: skip
            header, first = process.stdout.readline(), process.stdout.readline()
            process.send_signal(signal.SIGINT)
            rest = process.stdout.read()
        err = (tmp_path / "shown.txt").read_text()
        assert process.returncode == 130
        assert header == f"{COLUMNS}\n"
        assert first.startswith("5,1,fc_to_fc,h2h,auto,")
        assert "Traceback" not in err
        assert err.endswith("Interrupted.\n")
        run = json.loads(path.read_text())
        measured = 1 + len(rest.splitlines())
        assert run["interrupted"] is True
        assert run["counts"]["measured"] == measured
        assert run["counts"]["not_run"] == 99 - measured > 0
        assert plot.exists()

    def test_not_where_it_is_ignored(self):
        """As by what a script starts in the background."""
        with subprocess.Popen(
            [*COMMAND, *SMALL, "--num-blocks", ",".join(str(n) for n in range(1, 30)), "--pattern", "fc"],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        ) as process:  # fmt: skip
            process.stdout.readline()
            process.send_signal(signal.SIGINT)
            assert len(process.stdout.readlines()) == 29
        assert process.returncode == 0
