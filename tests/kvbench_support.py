"""What the tests of kvbench share: the real command, as a user runs it."""

from __future__ import annotations

import csv
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

COMMAND = [sys.executable, "-m", "kvbm_kernels.bench"]
COLUMNS = (
    "tokens_per_block,num_blocks,pattern,direction,backend,"
    "total_bytes,inner_bytes,copy_size,num_copies,median_ms,bandwidth_gbps"
)
# A cache of a few kilobytes, called as often as a test needs.
SMALL = ("--layers", "3", "--kv-heads", "2", "--head-dim", "12", "--tokens-per-block", "5", "--iters", "3")


class Ran(NamedTuple):
    """What a run of the command left."""

    status: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, str]]:
        """The rows of the CSV."""
        return list(csv.DictReader(self.out.splitlines()))


def kvbench(*arguments: str | int | Path, **variables: str) -> Ran:
    """Run the command with these arguments and environment variables."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def on_terminal(columns: int, *arguments: str | int | Path, stream: str = "stdout") -> tuple[int, str, str]:
    """Run the command with one of its streams on a terminal: its status, and what came there and on the other one."""
    master, slave = pty.openpty()
    other = "stderr" if stream == "stdout" else "stdout"
    with subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        **{stream: slave, other: subprocess.PIPE},
        text=True,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns)},
    ) as process:
        os.close(slave)
        shown = b""
        try:
            while part := os.read(master, 4096):
                shown += part
        except OSError:  # The other end is closed.
            pass
        rest = getattr(process, other).read()
    os.close(master)
    return process.returncode, shown.decode(), rest


def results(tmp_path: Path, *arguments: str | Path, status: int = 0, **variables: str) -> dict[str, Any]:
    """The JSON of a run that ends with this exit status."""
    path = tmp_path / "results.json"
    ran = kvbench(*arguments, "--json", path, **variables)
    assert ran.status == status, ran.err
    return json.loads(path.read_text())


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
