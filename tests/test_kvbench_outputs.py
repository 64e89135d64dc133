"""The files that kvbench writes, and its streams: nothing measured is lost, and nothing that was there before."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from pathlib import Path

import pytest

from kvbench_support import COLUMNS, COMMAND, SMALL, kvbench

pytest.importorskip("click")
pytest.importorskip("rich")

RUN = [*SMALL, "--num-blocks", "1,2", "--direction", "h2h", "--backend", "auto"]
CSV = f"{COLUMNS}\n16,1,fc_to_fc,h2h,auto,8,1,8,1,1,1\n"


def shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a line of the shell, in which KVBENCH is the command."""
    return subprocess.run(
        ["bash", "-c", line.replace("KVBENCH", " ".join(COMMAND))], cwd=folder, capture_output=True, text=True
    )


def counts(path: Path) -> dict[str, int]:
    return {name: count for name, count in json.loads(path.read_text())["counts"].items() if count}


class TestFiles:
    def test_a_pipe_without_a_name(self, tmp_path):
        """As of a process substitution; but not the one that has the CSV."""
        run = " ".join(RUN)
        ran = shell(
            f"KVBENCH {run} --json >(cat >run.json) 2>err && wait $! && KVBENCH {run} --json /dev/null", tmp_path
        )
        assert ran.returncode == 0, (tmp_path / "err").read_text()
        assert counts(tmp_path / "run.json") == {"measured": 4}
        ran = shell(f"KVBENCH {run} --json /dev/fd/1 | cat; exit ${{PIPESTATUS[0]}}", tmp_path)
        assert (ran.returncode, ran.stdout) == (2, "")
        assert "/dev/fd/1 is where standard output goes, expected another file" in ran.stderr

    def test_a_pipe_with_a_name(self, tmp_path):
        """It is opened once, and who reads it gets everything."""
        os.mkfifo(tmp_path / "pipe")
        got = []
        reader = threading.Thread(target=lambda: got.append((tmp_path / "pipe").read_text()))
        reader.start()
        ran = kvbench(*RUN, "--json", tmp_path / "pipe")
        reader.join()
        assert ran.status == 0, ran.err
        assert json.loads(got[0])["counts"]["measured"] == 4

    @pytest.mark.parametrize("before", [None, "old"])
    def test_a_link_is_followed(self, tmp_path, before):
        """Whether there is something where it leads to or not."""
        pytest.importorskip("matplotlib")
        (tmp_path / "far").mkdir()
        for name in ("run.json", "run.svg"):
            if before is not None:
                (tmp_path / "far" / name).write_text(before)
            (tmp_path / name).symlink_to(f"far/{name}")
        ran = kvbench(*RUN, "--json", tmp_path / "run.json", "--plot", tmp_path / "run.svg")
        assert ran.status == 0, ran.err
        for name in ("run.json", "run.svg"):
            assert (tmp_path / name).is_symlink()
            assert len((tmp_path / "far" / name).read_text()) > 100
        assert sorted(path.name for path in (tmp_path / "far").iterdir()) == ["run.json", "run.svg"]

    def test_a_file_keeps_its_mode_and_a_new_one_gets_the_usual_one(self, tmp_path):
        (tmp_path / "old.json").write_text("old")
        (tmp_path / "old.json").chmod(0o640)
        assert shell(f"umask 002; KVBENCH {' '.join(RUN)} --json old.json", tmp_path).returncode == 0
        assert shell(f"umask 002; KVBENCH {' '.join(RUN)} --json new.json", tmp_path).returncode == 0
        modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
        assert modes == {"old.json": 0o640, "new.json": 0o664}

    def test_a_name_as_long_as_names_can_be(self, tmp_path):
        saved = tmp_path / ("x" * 250 + ".json")
        assert kvbench(*RUN, "--json", saved).status == 0
        assert counts(saved) == {"measured": 4}

    def test_one_that_cannot_be_written_is_named_and_takes_no_other_along(self, tmp_path):
        pytest.importorskip("matplotlib")
        ran = kvbench(*RUN, "--json", "/dev/full", "--plot", tmp_path / "run.svg")
        assert ran.status == 1
        assert len(ran.rows) == 4
        assert ran.err.endswith("Done.\nkvbench: error: /dev/full: No space left on device\n")
        assert (tmp_path / "run.svg").read_text().endswith("</svg>\n")

    def test_what_was_there_stays_where_there_is_no_room(self, tmp_path):
        pytest.importorskip("matplotlib")
        for name in ("run.json", "run.svg"):
            (tmp_path / name).write_text("good")
        ran = shell(f"ulimit -f 1; KVBENCH {' '.join(RUN)} --json run.json --plot run.svg", tmp_path)
        assert ran.returncode == 1
        assert ran.stderr.endswith(
            "".join(f"kvbench: error: {name}: File too large\n" for name in ("run.json", "run.svg"))
        )
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"run.json": "good", "run.svg": "good"}

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
    def test_a_file_in_a_folder_that_takes_no_other(self, tmp_path):
        saved = tmp_path / "run.json"
        saved.write_text("old")
        tmp_path.chmod(0o555)
        ran = kvbench(*RUN, "--json", saved)
        tmp_path.chmod(0o755)
        assert ran.status == 0, ran.err
        assert counts(saved) == {"measured": 4}

    @pytest.mark.parametrize(
        ("line", "said"),
        [
            ("--json same.svg --plot same.svg", "same.svg and same.svg are the same file, expected two"),
            ("--json ./new.svg --plot new.svg", "new.svg and new.svg are the same file, expected two"),
            ("--json link.svg --plot same.svg", "same.svg and link.svg are the same file, expected two"),
            ("--json hard.svg --plot same.svg", "same.svg and hard.svg are the same file, expected two"),
            ("plot same.svg same.svg", "same.svg and same.svg are the same file, expected two"),
            ("--json same.svg > same.svg", "same.svg is where standard output goes, expected another file"),
            ("plot same.svg nowhere/x.svg", "nowhere/x.svg cannot be written: No such file or directory"),
        ],
    )
    def test_two_that_are_one(self, tmp_path, line, said):
        """Refused before anything is measured."""
        pytest.importorskip("matplotlib")
        (tmp_path / "same.svg").write_text(CSV)
        (tmp_path / "link.svg").symlink_to("same.svg")
        (tmp_path / "hard.svg").hardlink_to(tmp_path / "same.svg")
        options = "" if line.startswith("plot") else " ".join(RUN)
        ran = shell(f"KVBENCH {options} {line}", tmp_path)
        assert (ran.returncode, ran.stdout, ran.stderr) == (2, "", f"kvbench: error: {said}\n")
        assert ">" in line or (tmp_path / "same.svg").read_text() == CSV
        assert len(list(tmp_path.iterdir())) == 3


class TestStreams:
    @pytest.mark.parametrize(
        ("redirect", "said"),
        [
            ("| true", None),
            ("2>&1 | true", ""),
            (">/dev/full", "kvbench: error: standard output: No space left on device\n"),
        ],
    )
    def test_files_are_written_whoever_reads_the_rows(self, tmp_path, redirect, said):
        pytest.importorskip("matplotlib")
        line = f"set -o pipefail; KVBENCH {' '.join(RUN)} --json run.json --plot run.svg {redirect}"
        ran = shell(line, tmp_path)
        assert ran.returncode == 1
        assert "Traceback" not in ran.stderr
        assert "Exception" not in ran.stderr
        assert said is None or said in ran.stderr
        assert counts(tmp_path / "run.json") == {"measured": 4}
        assert (tmp_path / "run.svg").read_text().endswith("</svg>\n")

    def test_without_files_nothing_is_measured_for_nobody(self, tmp_path):
        ran = shell(f"set -o pipefail; KVBENCH {' '.join(RUN)} --num-blocks 1,2,3,4,5,6 >/dev/full", tmp_path)
        assert ran.returncode == 1
        assert ran.stderr.endswith("\nkvbench: error: No space left on device\n")
        assert "[1/" not in ran.stderr

    @pytest.mark.parametrize("redirect", ["2>/dev/full", "2>&-"])
    def test_the_rows_come_whoever_reads_the_rest(self, tmp_path, redirect):
        ran = shell(f"KVBENCH {' '.join(RUN)} {redirect}", tmp_path)
        assert (ran.returncode, ran.stdout.count("\n")) == (0, 5)
        ran = shell(f"KVBENCH bogus {redirect}", tmp_path)
        assert (ran.returncode, ran.stdout) == (2, "")

    @pytest.mark.parametrize(("redirect", "status"), [(">&-", 0), (">/dev/full", 1), ("| true", (0, 1))])
    def test_saved_runs_for_nobody(self, tmp_path, redirect, status):
        kvbench(*RUN, "--json", tmp_path / "run.json")
        (tmp_path / "run.csv").write_text(CSV)
        for command in ("show run.json", "compare run.csv run.csv"):
            ran = shell(f"set -o pipefail; KVBENCH {command} {redirect}", tmp_path)
            assert ran.returncode in (status if isinstance(status, tuple) else (status,)), ran.stderr
            summary = "1 test: ratio 1.000 to 1.000, geometric mean 1.000\n" * ("compare" in command)
            full = "kvbench: error: No space left on device\n" * ("full" in redirect)
            # Written at once or not, the rows come first.
            assert ran.stderr in (summary + full, full)

    def test_a_terminal_of_ascii(self, tmp_path):
        """What it has no letters for is told by their numbers."""
        saved = tmp_path / "r\u00fcn.json"
        kvbench(*RUN, "--json", saved)
        for arguments in (["show", saved], ["compare", saved, saved]):
            ran = kvbench(*arguments, PYTHONIOENCODING="ascii")
            assert ran.status == 0, ran.err
        assert "r\\xfcn.json" in kvbench("show", saved, PYTHONIOENCODING="ascii").out
