"""Running the package's commands as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# What would make a command look for a terminal's size, colours or shell.
_TERMINAL = ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TERM", "_KVBM_KERNELS_COMPLETE")


def kvbm_kernels(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m kvbm_kernels`` into a pipe, with these variables in its environment."""
    return python("-m", "kvbm_kernels", *arguments, **variables)


def python(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in _TERMINAL}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**env, "TERM": "xterm-256color", **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def output(result: subprocess.CompletedProcess[str]) -> str:
    """What a command that has to succeed wrote to standard output; it wrote nothing else."""
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout
