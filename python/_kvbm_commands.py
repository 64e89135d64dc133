"""Where the commands begin: outside of the package, which cannot be imported without its library."""

from __future__ import annotations

import importlib
import signal
import sys


def kvbm_kernels() -> int:
    """The command ``kvbm-kernels``; its exit status."""
    return _run("kvbm-kernels", "kvbm_kernels.__main__")


def kvbench() -> int:
    """The command ``kvbench``."""
    return _run("kvbench", "kvbm_kernels.bench.__main__")


def _run(name: str, module: str) -> int:
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if raises:
        # Ctrl-C in the middle of an import ends the process, as it ends a command that has no more to say.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        main = importlib.import_module(module).main
    except ImportError as error:
        # By its name: nothing of the package is there to tell.
        if type(error).__name__ != "LibraryError":
            raise
        if sys.stderr is not None:
            print(f"{name}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    finally:
        if raises:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    status: int = main()
    return status
