"""The command ``kvbm-kernels``, also as ``python -m kvbm_kernels``."""

from __future__ import annotations

import sys

from kvbm_kernels._starting import of_extra, start


def main() -> int:
    """Run the command with the arguments of this process; its exit status."""
    return start("kvbm-kernels", _run)


def _run(arguments: list[str]) -> int:
    try:
        from kvbm_kernels.cli.app import run_command
    except ModuleNotFoundError as error:
        # A bug can be reported from any installation.
        if not of_extra(error) or arguments not in (["info"], ["info", "--json"]):
            raise
        from kvbm_kernels.cli import report

        print(report.as_text(report.collect(), as_json="--json" in arguments))
        return 0
    return run_command(arguments)


if __name__ == "__main__":
    sys.exit(main())
