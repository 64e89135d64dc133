"""The command ``kvbm-kernels``, also as ``python -m kvbm_kernels``."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command with the arguments of this process; its exit status."""
    try:
        from kvbm_kernels.cli.app import run_command
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        if missing not in ("click", "rich"):
            raise
        print(f"kvbm-kernels: error: {missing} is not installed: pip install 'kvbm-kernels[cli]'", file=sys.stderr)
        return 2
    return run_command(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
