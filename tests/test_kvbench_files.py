"""What kvbench writes and reads: pictures, tables, comparisons, the JSON, and the page that describes them."""

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
from kvbench_support import COLUMNS, SMALL, kvbench, on_terminal, results
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


class TestCompare:
    ROW = "16,{blocks},lw_to_fc,h2d,{backend},5242880,32768,32768,160,0.1,{bandwidth}\n"

    def saved(self, path, *rows):
        text = COLUMNS + "\n"
        for blocks, backend, bandwidth in rows:
            text += self.ROW.format(blocks=blocks, backend=backend, bandwidth=bandwidth)
        path.write_text(text)
        return path

    def test_ratios_of_two_runs(self, tmp_path):
        """The second over the first, whatever the order of the rows; what only one of them has is counted."""
        before = self.saved(tmp_path / "a.csv", (1, "auto", 20.0), (8, "auto", 25.0), (8, "batched", 10.0))
        after = self.saved(tmp_path / "b.csv", (8, "auto", 50.0), (1, "auto", 10.0), (9, "auto", 1), (9, "batched", 1))
        ran = kvbench("compare", before, after)
        assert ran.status == 0, ran.err
        assert ran.out == (
            "tokens_per_block,num_blocks,pattern,direction,backend,copy_size,before_gbps,after_gbps,ratio,"
            "within_spread\n"
            "16,1,lw_to_fc,h2d,auto,32768,20.00,10.00,0.500,\n"
            "16,8,lw_to_fc,h2d,auto,32768,25.00,50.00,2.000,\n"
        )
        assert ran.err == (
            f"2 tests: ratio 0.500 to 2.000, geometric mean 1.000\n1 more only in {before}\n2 more only in {after}\n"
        )

    @pytest.mark.parametrize("columns", [20, 80, 200])
    def test_on_a_terminal_nothing_is_cut(self, tmp_path, columns):
        before = self.saved(tmp_path / "a.csv", (1, "auto", 20.0), (100_000_000, "memcpy_async", 25.0))
        ran = kvbench("compare", before, before)
        status, text, _ = on_terminal(columns, "compare", before, before)
        assert status == 0
        assert "…" not in text
        assert ("┃" in text) == (columns == 200)
        for line in ran.out.splitlines():
            assert re.search(".*".join(map(re.escape, line.split(",")[:-1])), text), line

    def test_csv_and_json_of_one_run(self, tmp_path):
        saved = tmp_path / "run.json"
        # Two types of one size are one test in the CSV.
        ran = kvbench(*SMALL, "--num-blocks", "3000", "--dtype", "f16", "--json", saved)
        (tmp_path / "run.csv").write_text(ran.out)
        compared = kvbench("compare", saved, tmp_path / "run.csv")
        assert [float(line.split(",")[-2]) for line in compared.out.splitlines()[1:]] == pytest.approx([1, 1], abs=0.05)
        other = json.loads(saved.read_text())
        for result in other["results"]:
            result["dtype"] = "bf16"
        (tmp_path / "other.json").write_text(json.dumps(other))
        refused = kvbench("compare", saved, tmp_path / "other.json")
        assert refused.status == 2
        assert refused.err == (
            f"kvbench: error: {saved} and {tmp_path / 'other.json'} have no test in common: "
            f"dtype is f16 in {saved}, bf16 in {tmp_path / 'other.json'}\n"
        )

    @pytest.mark.parametrize(
        ("before", "after", "why"),
        [
            ([(1, "auto", 1)], [(2, "auto", 1), (3, "auto", 1)], "num_blocks is 1 in {a}, 2, 3 in {b}"),
            # Every value is in both, but not with the one before it.
            ([(1, "auto", 1), (2, "batched", 1)], [(2, "auto", 1)], "backend is batched in {a}, auto in {b}"),
            ([(n, "auto", 1) for n in range(1, 6)], [(9, "auto", 1)], "num_blocks is 1, 2, 3, ... in {a}, 9 in {b}"),
            ([], [(1, "auto", 1)], None),
        ],
    )
    def test_runs_without_a_test_in_common(self, tmp_path, before, after, why):
        """The first field that keeps them apart is named."""
        a, b = self.saved(tmp_path / "a.csv", *before), self.saved(tmp_path / "b.csv", *after)
        ran = kvbench("compare", a, b)
        assert (ran.status, ran.out) == (2, "")
        said = f"{a} has no measured test" if why is None else f"no test in common: {why.format(a=a, b=b)}"
        assert ran.err.startswith("kvbench: error: ")
        assert ran.err.endswith(f"{said}\n")

    def test_where_both_were_measured(self, tmp_path):
        """Above the ratios, and what differs is named; a CSV does not tell."""
        a, b, c = (tmp_path / name for name in ("a.json", "b.json", "c.csv"))
        c.write_text(kvbench(*SMALL, "--num-blocks", "1", "--direction", "h2h", "--json", a).out)
        run = json.loads(a.read_text())
        provenance = run["provenance"]
        processor, library = provenance["machines"]["host"]["device"], f"kvbm_kernels {kk.__version__}, "
        lines = kvbench("compare", a, a).err.splitlines()
        assert [line.startswith(f"{a}: {processor}; {library}") for line in lines] == [True] * 2 + [False] * 2
        provenance["machines"]["host"]["device"] = "another\n one"
        provenance["kvbm_kernels"] |= {"version": "9.9", "is_stub_build": True}
        # Which only one of them has: no test of it is in common.
        provenance["machines"]["cuda"] = {"device": "NVIDIA H200"}
        b.write_text(json.dumps(run))
        lines = kvbench("compare", a, b).err.splitlines()
        assert lines[1:3] == [
            f"{b}: NVIDIA H200; another one; kvbm_kernels 9.9, stub build",
            "The runs differ in: processor, library",
        ]
        assert f"\n{c}: it does not tell its machine\n" in kvbench("compare", a, c).err
        del provenance["machines"]
        b.write_text(json.dumps(run))
        assert kvbench("compare", a, b).err == f"kvbench: error: {b} is no result of kvbench: it has no 'machines'\n"

    @pytest.mark.parametrize(
        ("before", "after", "within"),
        [
            # The median, the fastest, and the slowest sample.
            ((1.0, 0.9, 1.2), (1.1, 1.0, 1.3), True),
            ((1.0, 0.9, 1.05), (1.1, 1.0, 1.3), False),
            # One slow sample alone does not make everything the same.
            ((1.0, 0.9, 50.0), (1.1, 1.05, 1.2), False),
        ],
    )
    def test_ratios_within_the_spread_are_marked(self, tmp_path, before, after, within):
        for name, times in (("a.json", before), ("b.json", after)):
            (tmp_path / name).write_text(saved(**dict(zip(("median_ms", "min_ms", "max_ms"), times, strict=True))))
        arguments = ["compare", tmp_path / "a.json", tmp_path / "b.json"]
        ran = kvbench(*arguments)
        assert ran.out.endswith(f",{'yes' if within else 'no'}\n")
        meaning = ": 1 of 1 ratio; each median is between the fastest and the slowest sample of the other run\n"
        assert (f"within_spread{meaning}" in ran.err) == within
        _, shown, said = on_terminal(200, *arguments)
        assert (" 1.000~ " in shown, f"~{meaning}" in said) == (within, within)

    @pytest.mark.parametrize(
        ("times", "bandwidths", "ratio"),
        [
            # Two hundredths of a GB/s are 0.015 or 0.025, and the time has five digits.
            ((1.0, 0.5), ("0.00", "0.00"), "2.000"),
            ((1.0, 0.9), ("0.01", "0.01"), "1.111"),
            # Of a time of a few tenths of a microsecond, it is the bandwidth that has more.
            ((0.0005, 0.0005), ("20.00", "21.00"), "1.050"),
            ((0.0, 0.0), ("20.00", "10.00"), "0.500"),
        ],
    )
    def test_of_a_csv_the_figure_with_more_digits_counts(self, tmp_path, times, bandwidths, ratio):
        before, after = (tmp_path / name for name in ("a.csv", "b.csv"))
        for path, time, bandwidth in zip((before, after), times, bandwidths, strict=True):
            path.write_text(row(total=10_000, time=time, bandwidth=bandwidth))
        ran = kvbench("compare", before, after)
        assert ran.status == 0, ran.err
        assert ran.out.splitlines()[1].endswith(f",{ratio},")
        assert ran.err.startswith(f"1 test: ratio {ratio} to")

    def test_files_from_a_spreadsheet(self, tmp_path):
        """With the mark in front that says they are UTF-8."""
        for name, text in (("a.csv", row()), ("a.json", saved())):
            (tmp_path / name).write_text(text, encoding="utf-8-sig")
        ran = kvbench("compare", tmp_path / "a.csv", tmp_path / "a.json")
        assert (ran.status, ran.err) == (0, "1 test: ratio 1.000 to 1.000, geometric mean 1.000\n")


def row(total: object = 8, size: object = 8, time: object = 1, bandwidth: object = 1, backend: object = "auto") -> str:
    """A CSV with one test."""
    return f"{COLUMNS}\n16,1,fc_to_fc,h2h,{backend},{total},1,{size},1,{time},{bandwidth}\n"


def saved(**changes: object) -> str:
    """A JSON with as much of one test as comparing and drawing read."""
    result = {
        "tokens_per_block": 16, "num_blocks": 1, "pattern": "fc_to_fc", "direction": "h2h", "backend": "auto",
        "total_bytes": 8, "copy_size": 8, "median_ms": 1.0, "bandwidth_gbps": 8e-6, "layers": 1, "dtype": "bf16",
    }  # fmt: skip
    return json.dumps({"schema": "kvbench/1", "results": [result | changes]})


class TestBroken:
    """Files that are not what kvbench writes: one line that names them, whatever they are given to."""

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ('{"schema": "kvbench/1"}', "it has no 'results'"),
            ('{"schema": "kvbench/1", "results": 5}', "."),
            ('{"schema": "kvbench/1", "results": [5]}', "."),
            ('{"schema": "kvbench/1", "results": [{"median_ms": 1}]}', "it has no 'tokens_per_block'"),
            ('{"schema":' * 100_000, "recursion"),
            (row(total=0), r"total_bytes is '0', expected a whole number from 1 to 2\*\*63 - 1"),
            (row(size="inf"), "copy_size is 'inf', expected a whole number"),
            *[(row(size=10**n), f"copy_size is '1{'0' * min(n, 58)}.*, expected a whole") for n in (30, 300, 400)],
            (row(size="1_0"), "copy_size is '1_0', expected a whole"),
            (row(backend="$x$"), r"backend is '\$x\$', expected a name of letters and digits"),
            ('{"schema": "kvbench/1", "results": [{"median_ms": 1' + "0" * 5000 + "}]}", "digits"),
            *[
                (saved(**{field: value}), f"{field} is {re.escape(shown)}, expected a ")
                for field, value, shown in (
                    ("copy_size", 10**30, str(10**30)),
                    ("copy_size", 64.5, "64.5"),
                    ("num_blocks", True, "True"),
                    ("median_ms", 10**300, f"1{'0' * 59}..."),
                    ("pattern", "\ud800", r"'\ud800'"),
                    ("pattern", r"$\frac{$", r"'$\\frac{$'"),
                    ("layers", [1], "[1]"),
                    ("dtype", "x\ny", r"'x\ny'"),
                )
            ],
            (row(bandwidth="nan"), "bandwidth_gbps is 'nan', expected a positive number"),
            (row(bandwidth="inf"), "bandwidth_gbps is 'inf', expected a positive number"),
            (row(bandwidth=-1), "bandwidth_gbps is '-1', expected a positive number"),
            (row(time=0, bandwidth=0), "bandwidth_gbps is '0', expected a positive number"),
            (COLUMNS + "\n" + "x" * 200_000, "field larger than field limit"),
            (COLUMNS + "\n1,1", "."),
        ],
        ids=range(27),
    )  # fmt: skip
    def test_is_refused_in_one_line(self, tmp_path, text, reason):
        path = tmp_path / "broken"
        path.write_text(text)
        arguments = [("compare", path, path), ("plot", path, tmp_path / "image.svg")]
        if text.startswith("{"):
            arguments.append(("show", path))
        for each in arguments:
            ran = kvbench(*each)
            assert (ran.status, ran.out) == (2, "")
            # Which is what is shown first.
            why = f"{reason}|it has no 'provenance'" if each[0] == "show" else reason
            said = f"kvbench: error: {path} is no (result|JSON) of kvbench: .*({why}).*\n"
            assert re.fullmatch(said, ran.err), ran.err


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
