"""The command ``kvbench``."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command with the arguments of this process; its exit status."""
    try:
        from kvbm_kernels.bench.app import run_command
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich"):
            raise
        print(f"kvbench: error: {error.name} is not installed: pip install 'kvbm-kernels[cli]'", file=sys.stderr)
        return 2
    return run_command(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
