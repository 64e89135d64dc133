"""Two runs beside each other, and files that are no runs."""

from __future__ import annotations

import json
import re

import pytest

import kvbm_kernels as kk
from kvbench_support import COLUMNS, SMALL, kvbench, on_terminal, row, saved

pytest.importorskip("click")
pytest.importorskip("rich")


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
