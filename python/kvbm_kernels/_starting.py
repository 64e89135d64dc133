"""How the commands start: what they are made of takes time to import, and packages that may be missing."""

from __future__ import annotations

import sys
from collections.abc import Callable

# Signalled processes end with 128 and the signal's number; SIGINT is 2.
INTERRUPTED = 130
_EXTRA = ("click", "matplotlib", "rich")


def start(name: str, run: Callable[[list[str]], int]) -> int:
    """Call ``run``, which imports what it needs, with the arguments of this process; the exit status."""
    try:
        return run(sys.argv[1:])
    except KeyboardInterrupt:
        return INTERRUPTED
    except ModuleNotFoundError as error:
        if not of_extra(error):
            raise
        print(f"{name}: error: {advice(error)}", file=sys.stderr)
        return 2


def of_extra(error: ModuleNotFoundError) -> bool:
    """Whether it is a package of the extra ``cli`` that is missing."""
    return _package(error) in _EXTRA


def advice(error: ModuleNotFoundError) -> str:
    """What is missing, and how to install it."""
    return (
        f"{_package(error)} is not installed, expected the extra cli: pip install '.[cli]' in a checkout, or "
        "'kvbm-kernels[cli]' from a package index that has it"
    )


def _package(error: ModuleNotFoundError) -> str:
    return str(error.name).partition(".")[0]
