"""How the commands start and end: imports that take time or fail, and streams that nobody takes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import TextIO

# Signalled processes end with 128 and the signal's number; SIGINT is 2.
INTERRUPTED = 130
_EXTRA = ("click", "matplotlib", "rich")


def start(name: str, run: Callable[[list[str]], int]) -> int:
    """Call ``run``, which imports what it needs, with the arguments of this process; the exit status."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        # A terminal that knows no other letters than ASCII's still gets the figures.
        reconfigure(errors="backslashreplace")
    try:
        return finish(name, lambda: run(sys.argv[1:]))
    except KeyboardInterrupt:
        return INTERRUPTED
    except ModuleNotFoundError as error:
        if not of_extra(error):
            raise
        say(f"{name}: error: {advice(error)}")
        return 2


def finish(name: str, run: Callable[[], int | None]) -> int:
    """The status of what prints to standard output, or 1 where that, or a file, or the memory, does not take it."""
    try:
        status = run()
        # None where the program was started without one.
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        # A reader that has gone has what it wanted.
        if not isinstance(error, BrokenPipeError):
            say(f"{name}: error: {reason(error)}")
    except MemoryError:
        say(f"{name}: error: out of memory")
    else:
        return status or 0
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        drop(sys.stdout)
    return 1


def reason(error: OSError) -> str:
    """What could not be written or read, if it has a name, and why."""
    why = error.strerror or str(error)
    return why if error.filename is None else f"{error.filename}: {why}"


def say(text: str) -> None:
    """Print a line on standard error, if anyone takes it."""
    if sys.stderr is None:
        return
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        drop(sys.stderr)


def drop(stream: TextIO) -> None:
    """Let what a stream still has buffered, and what is yet to come, go nowhere: it would fail again at exit."""
    # What is no stream of the process has nothing to flush at its exit.
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:  # noqa: PTH123
        os.dup2(nowhere.fileno(), stream.fileno())


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream, None where the program was started without it, is a terminal."""
    return stream is not None and stream.isatty()


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
