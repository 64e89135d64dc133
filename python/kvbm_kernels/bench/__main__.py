"""The command ``kvbench``."""

from __future__ import annotations

import sys

from kvbm_kernels._starting import start


def main() -> int:
    """Run the command with the arguments of this process; its exit status."""
    return start("kvbench", _run)


def _run(arguments: list[str]) -> int:
    from kvbm_kernels.bench.app import run_command

    return run_command(arguments)


if __name__ == "__main__":
    sys.exit(main())
