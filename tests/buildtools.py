"""Building the library from a test: with nvcc hidden or found, configured only or installed."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEADER = ROOT / "include" / "kvbm_kernels.h"

# Everything that steers the build; a test sets what it is about.
VARIABLES = ("CUDA_ARCHS", "CUDA_HOME", "CUDA_PATH", "KVBM_REQUIRE_CUDA")
BIN = Path(sys.executable).parent


@functools.cache
def scratch() -> Path:
    """A folder for what several tests share, removed at exit."""
    path = tempfile.mkdtemp(prefix="kvbm-tests-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)


@functools.cache
def path_without_nvcc() -> str:
    """PATH, with every folder that has an nvcc replaced by links to all else in it."""
    folders = [str(BIN)]
    for index, folder in enumerate(os.environ["PATH"].split(os.pathsep)):
        if Path(folder, "nvcc").exists():
            links = scratch() / f"bin{index}"
            links.mkdir()
            for program in Path(folder).iterdir():
                if program.name != "nvcc":
                    (links / program.name).symlink_to(program)
            folder = str(links)
        folders.append(folder)
    return os.pathsep.join(folders)


def environment(**variables: str) -> dict[str, str]:
    """The environment without nvcc, the build's variables and a git hook's, and with these."""
    env = {name: value for name, value in os.environ.items() if name not in VARIABLES and not name.startswith("GIT_")}
    return {**env, "PATH": path_without_nvcc(), **variables}


@functools.cache
def find_nvcc() -> str | None:
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        if os.environ.get(variable):
            return f"{os.environ[variable]}/bin/nvcc"
    return shutil.which("nvcc")


def require_nvcc() -> str:
    """The real nvcc; without one the test is skipped, or fails if KVBM_REQUIRE_CUDA is set."""
    nvcc = find_nvcc()
    if nvcc is None:
        if os.environ.get("KVBM_REQUIRE_CUDA", "") not in ("", "0"):
            pytest.fail("KVBM_REQUIRE_CUDA is set, but there is no nvcc")
        pytest.skip("needs nvcc")
    return nvcc


def require_program(name: str) -> str:
    program = shutil.which(name, path=environment()["PATH"])
    if program is None:
        pytest.skip(f"needs {name}")
    return program


def run(*command: str | Path, **kwargs) -> str:
    """Run a command that has to succeed, and return what it printed."""
    result = attempt(*command, **kwargs)
    assert result.returncode == 0, f"{' '.join(map(str, command))}\n{result.stdout}"
    return result.stdout


def attempt(
    *command: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        env=environment() if env is None else env,
        cwd=cwd,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def meson(*arguments: str | Path) -> list[str | Path]:
    return [sys.executable, "-m", "mesonbuild.mesonmain", *arguments]


def setup(build: Path, *options: str, source: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Configure only, with nvcc hidden unless a variable brings it back."""
    return attempt(*meson("setup", build, source, *options), env=environment(**variables))


def write_script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@functools.cache
def installed(kind: str) -> Path:
    """The prefix of an installed "stub" or "cuda" build: include/, lib/, lib/pkgconfig/."""
    folder = Path(tempfile.mkdtemp(prefix=kind, dir=scratch()))
    prefix, build = folder / "prefix", folder / "build"
    variables = {}
    if kind == "cuda":
        # One architecture, to be quick, and an unknown one; nvcc stays off PATH. A script, because nvcc looks for its
        # toolkit from where it thinks it lies.
        write_script(folder / "toolkit/bin/nvcc", f'#!/bin/sh\nexec "{require_nvcc()}" "$@"\n')
        variables = {"CUDA_HOME": str(folder / "toolkit"), "CUDA_ARCHS": "90, 999"}
    options = [f"--prefix={prefix}", "--libdir=lib", "-Ddefault_library=both", "-Dtests=false"]
    configured = setup(build, *options, **variables)
    assert configured.returncode == 0, configured.stdout
    (folder / "setup.log").write_text(configured.stdout)
    run(*meson("install", "-C", build))
    return prefix


def setup_log(kind: str) -> str:
    """What meson printed when it configured that build."""
    return (installed(kind).parent / "setup.log").read_text()
