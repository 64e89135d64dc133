"""What kvbench writes and reads: pictures, tables, the JSON, and the page that describes them."""

from __future__ import annotations

import csv
import json
import math
import re
import statistics
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

import kvbm_kernels as kk
from buildtools import ROOT
from kvbench_support import COLUMNS, SMALL, kvbench, on_terminal, results, row
from kvbm_kernels.bench.suites import SUITES, suite

pytest.importorskip("click")
pytest.importorskip("rich")


class TestPlot:
    def test_from_a_run(self, tmp_path):
        """Pictures that open, with the lines and the ceiling named in them."""
        pytest.importorskip("matplotlib")
        image = pytest.importorskip("matplotlib.image")
        saved = tmp_path / "results.json"
        ran = kvbench(*SMALL, "--num-blocks", "1,4", "--backend", "auto,convert", "--json", saved, "--plot",
                      tmp_path / "run.png")  # fmt: skip
        assert ran.status == 0, ran.err
        pixels = image.imread(tmp_path / "run.png")
        assert min(pixels.shape[:2]) > 300
        assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 50
        assert kvbench("plot", saved, tmp_path / "saved.svg").status == 0
        texts = svg_texts(tmp_path / "saved.svg")
        assert {"h2h, 1 block", "h2h, 4 blocks", "size of a piece", "payload, GB/s"} <= texts
        assert [sum(text.startswith(f"{name}  ") for text in texts) > 0 for name in ("auto", "convert", "memcpy")] == [
            True
        ] * 3

    def test_from_csv(self, tmp_path):
        """Which knows no ceiling."""
        pytest.importorskip("matplotlib")
        ran = kvbench(*SMALL, "--num-blocks", "1", "--backend", "auto", "--pattern", "nhd_to_universal,hnd_to_nhd")
        (tmp_path / "run.csv").write_text(ran.out)
        assert kvbench("plot", tmp_path / "run.csv", tmp_path / "run.svg").status == 0
        texts = svg_texts(tmp_path / "run.svg")
        assert any(text.startswith("auto nhd_to_universal  ") for text in texts)
        assert any(text.startswith("auto hnd_to_nhd  ") for text in texts)
        assert not any("memcpy" in text or "baseline" in text for text in texts)

    def test_whatever_the_users_own_settings_are(self, tmp_path):
        """A backend that is none, and names set by TeX."""
        pytest.importorskip("matplotlib")
        (tmp_path / "matplotlibrc").write_text("text.usetex: True\n")
        (tmp_path / "run.csv").write_text(row())
        settings = {"MATPLOTLIBRC": str(tmp_path), "MPLBACKEND": "nonsense", "PATH": "/nowhere"}
        ran = kvbench("plot", tmp_path / "run.csv", tmp_path / "run.svg", **settings)
        assert (ran.status, ran.err) == (0, "")
        assert any(text.startswith("auto") for text in svg_texts(tmp_path / "run.svg"))

    @pytest.mark.parametrize("counts", ["1", "1,2", "1,2,3"])
    def test_nothing_is_cut_off(self, tmp_path, counts, monkeypatch):
        """Everything that is written lies within the picture."""
        pytest.importorskip("matplotlib")
        from matplotlib.figure import Figure
        from matplotlib.text import Text

        from kvbm_kernels.bench import plot
        from kvbm_kernels.bench.results import as_rows

        run = results(tmp_path, *SMALL, "--num-blocks", counts, "--direction", "h2h", "--backend", "auto")
        kept = []
        monkeypatch.setattr(plot, "Figure", lambda **options: kept.append(Figure(**options)) or kept[-1])
        plot.draw(as_rows(run["results"]), tmp_path / "run.png")
        (figure,) = kept
        # Saving is done in other pixels.
        figure.draw_without_rendering()
        width, height = figure.bbox.size
        # Ticks past the end of an axis have a label too, which is not drawn.
        undrawn = {
            label
            for axes in figure.axes
            for axis in (axes.xaxis, axes.yaxis)
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())
            if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
            for label in (tick.label1, tick.label2)
        }
        for text in figure.findobj(Text):
            if text.get_text() and text.get_visible() and text not in undrawn:
                box = text.get_window_extent()
                assert 0 <= box.x0 <= box.x1 <= width, text.get_text()
                assert 0 <= box.y0 <= box.y1 <= height, text.get_text()

    def test_figures_have_the_same_number_of_digits(self, tmp_path):
        pytest.importorskip("matplotlib")
        values = [0.0512, 9.5, 10, 9.996, 100, 1234.5]
        (tmp_path / "run.csv").write_text(
            COLUMNS + "\n" + "".join(f"16,{i},lw_to_fc,h2d,auto,64,64,64,1,0,{v}\n" for i, v in enumerate(values, 1))
        )
        assert kvbench("plot", tmp_path / "run.csv", tmp_path / "run.svg").status == 0
        shown = {text.removeprefix("auto  ") for text in svg_texts(tmp_path / "run.svg") if text.startswith("auto  ")}
        assert shown == {"0.0512", "9.50", "10.0", "100", "1,234"}


def svg_texts(path: Path) -> set[str]:
    """All that is written in a picture."""
    root = ElementTree.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    return {"".join(element.itertext()).strip() for element in root.iter("{http://www.w3.org/2000/svg}text")}


class TestShow:
    def test_the_table_of_a_saved_run(self, tmp_path):
        """Where it comes from, each test with its baseline and ratio, and what was waived."""
        saved = tmp_path / "run.json"
        kvbench(*SMALL, "--num-blocks", "7", "--direction", "h2h", "--backend", "auto,batched", "--json", saved)
        run = json.loads(saved.read_text())
        ran = kvbench("show", saved)
        assert ran.status == 0, ran.err
        lines = ran.out.splitlines()
        assert lines[0] == run["provenance"]["command"]
        assert any(run["provenance"]["machines"]["host"]["device"] in line for line in lines)
        first = run["results"][0]
        figures = (
            rf"memcpy {first['baseline']['bandwidth_gbps']:.2f} +{first['ratio']:.3f} +\d+\.\d{{3}}  host \(cached\)"
        )
        assert sum(bool(re.search(rf"^ +5 +7  fc_to_fc  h2h  auto .*{figures}$", line)) for line in lines) == 1
        assert lines[-3:] == [
            "waived: 7 blocks, fc_to_fc h2h batched: batched is CUDA's; h2h has vectorized, auto and convert",
            "waived: 7 blocks, lw_to_fc h2h batched: batched is CUDA's; h2h has vectorized, auto and convert",
            "2 measured, 2 waived",
        ]

    @pytest.mark.parametrize("columns", [20, 80, 200])
    def test_on_a_terminal_nothing_is_cut(self, tmp_path, columns):
        saved = tmp_path / "run.json"
        kvbench(*SMALL, "--num-blocks", "7,12345", "--direction", "h2h", "--json", saved)
        status, text, _ = on_terminal(columns, "show", saved)
        assert status == 0
        assert "…" not in text
        assert ("╭" in text) == (columns == 200)
        for line in kvbench("show", saved).out.splitlines():
            assert re.search(".*".join(map(re.escape, line.split())), text), line

    @pytest.mark.parametrize(("driver", "said"), [(None, "no driver"), ("13.0", "driver for 13.0")])
    def test_what_a_run_was_made_with(self, tmp_path, driver, said):
        saved = tmp_path / "run.json"
        kvbench(*SMALL, "--num-blocks", "1", "--direction", "h2h", "--backend", "batched", "--json", saved)
        run = json.loads(saved.read_text())
        run["provenance"]["kvbm_kernels"] |= {"is_stub_build": False, "cuda": "13.0", "driver": driver}
        saved.write_text(json.dumps(run))
        ran = kvbench("show", saved)
        assert f", kvbm_kernels {kk.__version__}, CUDA 13.0, {said}\n" in ran.out
        assert "\nwaived: 1 block, fc_to_fc h2h batched: " in ran.out

    def test_a_command_that_is_none(self, tmp_path):
        kvbench(*SMALL, "--num-blocks", "1", "--direction", "h2h", "--json", tmp_path / "run.json")
        run = json.loads((tmp_path / "run.json").read_text())
        run["provenance"]["command"] = 5
        (tmp_path / "run.json").write_text(json.dumps(run))
        ran = kvbench("show", tmp_path / "run.json")
        assert (ran.status, ran.out) == (2, "")
        assert "run.json is no JSON of kvbench: " in ran.err

    def test_what_a_suite_aims_at(self, tmp_path):
        saved = tmp_path / "run.json"
        kvbench("--suite", "link", "--json", saved)
        run = json.loads(saved.read_text())
        assert [result["aims"] for result in run["results"]] == [{"ratio": 0.92}] * 2
        figures = {"status": "measured", "median_ms": 2.0, "bandwidth_gbps": 3.0, "host_ms": 0.5, "route": ["kernel"],
                   "ratio": 0.5, "cached": False, "missed": ["ratio"],
                   "baseline": {"name": "copy engine", "bandwidth_gbps": 6.0}}  # fmt: skip
        run["results"][0] |= figures
        saved.write_text(json.dumps(run))
        ran = kvbench("show", saved)
        assert re.search(r"conversion over the link, 32 blocks .* copy engine 6\.00  0\.500  0\.92 missed", ran.out)
        assert ran.out.endswith("1 that miss an aim\n")


class TestPage:
    def test_the_documents_own_run(self):
        """The page shows the figures of the run whose output lies beside it."""
        page = (ROOT / "docs/kvbench.md").read_text()
        with (ROOT / "docs/kvbench-16.csv").open() as lines:
            rows = list(csv.DictReader(lines))
        assert ",".join(rows[0]) == COLUMNS
        line = r"^\| (\d+) \| (\d+) \| `(\w+)` \| `(\w+)` \| [\d.]+ \| [\d.]+ \| ([\d.]+) \|"
        shown = re.findall(line, page, re.MULTILINE)
        assert shown == [
            (row["tokens_per_block"], row["num_blocks"], row["pattern"], row["backend"], row["bandwidth_gbps"])
            for row in rows
        ]

    def test_every_suite_is_there(self):
        page = (ROOT / "docs/kvbench.md").read_text()
        for name in SUITES:
            assert f"`{name}`" in page or f"--suite {name}" in page

    def test_suites_need_a_gpu(self):
        assert "h2h" not in {case.direction for case in suite("all")}


class TestJson:
    @pytest.fixture(scope="class")
    @classmethod
    def document(cls, tmp_path_factory):
        return results(
            tmp_path_factory.mktemp("json"), *SMALL, "--num-blocks", "1,300", "--direction", "h2h", "--backend",
            "auto,batched", "--iters", "20", "--warmup", "2",
        )  # fmt: skip

    def test_every_field_is_documented(self, document):
        """The page lists the fields with their types, and there are no others."""
        page = (ROOT / "docs/kvbench.md").read_text().split("\n## JSON\n")[1]
        table = dict(re.findall(r"^\| `([\w.\[\]]+)` \| ([a-z, |\[\]\\-]+?) \|", page, re.MULTILINE))
        found = {}
        for path, value in fields(document):
            found.setdefault(path, set()).add(kind(value))
        # Beside a kernel, only a GPU says more; a suite has settings of its own.
        others = ("results[].beside.", "provenance.machines.cuda.", "settings.suite", "settings.only")
        listed = {path for path in table if not path.startswith(others)}
        assert listed == set(found)
        for path, kinds in found.items():
            assert kinds <= set(re.split(r", | \\\| ", table[path])), path

    def test_the_figures_follow_from_the_samples(self, document):
        for result in document["results"]:
            if result["status"] != "measured":
                continue
            for timed in (result, result["baseline"]):
                samples = timed["samples_ms"]
                assert timed["median_ms"] == statistics.median(samples)
                assert (timed["min_ms"], timed["max_ms"]) == (min(samples), max(samples))
                assert timed["bandwidth_gbps"] == pytest.approx(result["total_bytes"] / timed["median_ms"] / 1e6)
                assert len(samples) >= 9
            assert len(result["samples_ms"]) * result["calls_per_sample"] >= 20
            assert result["ratio"] == result["baseline"]["median_ms"] / result["median_ms"]
            assert result["traffic_gbps"] == 2 * result["bandwidth_gbps"]
            assert result["route"] == ["host"]
            assert result["function"] == "kvbm_kernels_host_copy_batch"
            assert result["host_ms"] > 0

    def test_data_is_larger_than_the_cache_or_said_to_be_cached(self, document):
        small, large = (row for row in document["results"] if (row["pattern"], row["backend"]) == ("lw_to_fc", "auto"))
        for result in (small, large):
            assert result["working_set_bytes"] == 2 * result["total_bytes"] * result["sets"]
            assert result["checked_bytes"] == result["total_bytes"] * (result["sets"] + 1)
            assert result["cached"] == (result["working_set_bytes"] < 2 * result["cache_bytes"])
        assert small["sets"] == 1
        assert small["cached"] is True

    @pytest.mark.parametrize(
        "arguments",
        [
            [*SMALL, "--num-blocks", "1,2", "--direction", "h2h"],
            # Whose backends differ.
            [*SMALL, "--num-blocks", "1", "--direction", "h2h,d2d", "--pattern", "lw,nhd_to_universal_pools"],
            ["--model", "llama-3.2-1b", "--num-blocks", "1", "--iters", "1", "--warmup", "0", "--direction", "h2h",
             "--dtype", "float16", "--baseline", "permute", "--backend", "vec,auto", "--library", "torch"],
            [*SMALL, "--num-blocks", "1", "--direction", "h2h", "--max-sms", "4", "--beside", "gemm"],
            ["--suite", "transfer", "--only", "1 x 5 MiB,20480", "--library", "cupy", "--iters", "1"],
        ],
    )  # fmt: skip
    @pytest.mark.skipif(kk.build_info().devices > 0, reason="some of it would take a while")
    def test_the_settings_are_the_flags_of_the_same_tests(self, tmp_path, arguments):
        first = results(tmp_path, *arguments)
        flags = {name: value for name, value in first["settings"].items() if value is not None}
        rebuilt = [
            f"--{name.replace('_', '-')}={','.join(map(str, value)) if isinstance(value, list) else value}"
            for name, value in flags.items()
        ]
        second = results(tmp_path, *rebuilt)
        assert second["settings"] == first["settings"]
        assert [asked(result) for result in second["results"]] == [asked(result) for result in first["results"]]
        assert ("--model=llama-3.2-1b" in rebuilt) == ("--model" in arguments)

    def test_it_says_where_it_comes_from(self, document):
        provenance = document["provenance"]
        assert provenance["command"].startswith("kvbench --layers 3 ")
        assert provenance["kvbm_kernels"]["library"] == kk.build_info().library
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", provenance["date"])
        assert provenance["machines"]["host"]["device"].endswith("threads")
        assert document["settings"]["num_blocks"] == [1, 300]


def asked(result):
    """What a test is, without its figures and with its reason not to have any."""
    names = ("tokens_per_block", "num_blocks", "pattern", "direction", "backend", "total_bytes", "title", "layers",
             "dtype", "status", "reason")  # fmt: skip
    return [result[name] for name in names]


def fields(value, path=""):
    """Every leaf of a document with its path; lists of objects count as one."""
    if isinstance(value, dict) and path != "results[].aims":
        for name, inner in value.items():
            yield from fields(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for inner in value:
            yield from fields(inner, f"{path}[]")
    else:
        yield path, value


def kind(value):
    """The type of a value as the page calls it."""
    if isinstance(value, float):
        assert math.isfinite(value)
    return {str: "string", bool: "boolean", int: "integer", float: "number", list: "list", dict: "object"}.get(
        type(value), "null"
    )
