"""The files that a command writes: looked at before anything is measured, and replaced by whole ones only."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path


def check_output(path: Path, *others: Path) -> None:
    """Raise ValueError for a file that cannot be written, or is one of the others, or where standard output goes."""
    if str(path) == "-":
        raise ValueError("-, expected a file: standard output is the CSV")
    try:
        target, is_regular = _target(path)
        # A pipe, for example, can be opened once.
        if is_regular is not False:
            _try(target)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from None
    for other in others:
        if os.path.realpath(other) == str(target) or (is_regular and other.exists() and other.samefile(target)):
            raise ValueError(f"{path} and {other} are the same file, expected two")
    # A device, such as /dev/null, takes both.
    if is_regular is not None and not target.is_char_device() and _is_stdout(target):
        raise ValueError(f"{path} is where standard output goes, expected another file")


def write_output(path: Path, data: bytes) -> None:
    """Write a file, or leave what was there before. Raises OSError, with the path."""
    try:
        target, is_regular = _target(path)
        try:
            if is_regular is False:
                raise PermissionError
            with _beside(target) as temporary:
                temporary.write_bytes(data)
                if is_regular:
                    temporary.chmod(stat.S_IMODE(target.stat().st_mode))
                temporary.replace(target)
        except PermissionError:
            # In someone else's folder only what is there can be written.
            if is_regular is None:
                raise
            target.write_bytes(data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _target(path: Path) -> tuple[Path, bool | None]:
    """Where links lead to, and whether a regular file is there; None for nothing."""
    target = Path(os.path.realpath(path))
    if not target.exists() and path.exists():
        # It leads to something without a name, as /dev/fd/3 does to a pipe.
        target = path
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return target, None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return target, stat.S_ISREG(mode)


def _try(target: Path) -> None:
    """Raise OSError where write_output() would for a file, or for none yet."""
    try:
        with _beside(target):
            pass
    except PermissionError:
        if not os.access(target, os.W_OK):
            raise


@contextlib.contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """An empty file in the same folder, as others would be made there; if it is still there at the end, it goes."""
    number, name = tempfile.mkstemp(prefix=".kvbm-", dir=target.parent)
    os.close(number)
    temporary = Path(name)
    try:
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _is_stdout(target: Path) -> bool:
    try:
        return sys.stdout is not None and os.path.samestat(os.fstat(sys.stdout.fileno()), target.stat())
    except (OSError, ValueError):
        return False
