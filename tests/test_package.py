"""The Python package as a user gets it: sdist, wheel, and an editable install."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from buildtools import ROOT, environment, require_program, run

# Imports the package and does a conversion with the library that it carries.
SMOKE = """
import importlib.resources
import numpy as np
import kvbm_kernels as kk

print(importlib.resources.files("kvbm_kernels").joinpath("include", "kvbm_kernels.h").is_file())
print(importlib.resources.files("kvbm_kernels").joinpath("_lib", "libkvbm_kernels.so"))
blocks = [[np.full((16, 8, 64), chunk, np.float16) for chunk in range(4)]]
universal = np.zeros((8, 2, 2, 16, 64), np.float16)
kk.universal_from_block([universal], blocks, "NHD")
print(universal[:, :, :, 0, 0].tolist() == [[[0, 1], [2, 3]]] * 8, kk.is_stub_build())
"""


def pip(*arguments: str | Path, cwd: Path | None = None) -> str:
    """pip with what is installed here, and without asking anyone else."""
    return run(sys.executable, "-m", "pip", *arguments, "--no-deps", "--no-index", cwd=cwd)


def copy_sources(source: Path, target: Path) -> None:
    """Copy what git does not ignore, links as links. In an unpacked sdist, which git knows nothing of, everything."""
    if not has_git(source):
        unwanted = shutil.ignore_patterns("build*", ".*_cache", "__pycache__", ".hypothesis", "dist")
        shutil.copytree(source, target, ignore=unwanted, symlinks=True)
        return
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    # Without what git may say beside it.
    listed = subprocess.run(command, cwd=source, env=environment(), stdout=subprocess.PIPE, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        # Not what is deleted and not yet committed.
        if os.path.lexists(source / name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target / name, follow_symlinks=False)


def has_git(folder: Path) -> bool:
    """Whether it is a checkout, or a worktree of one."""
    return shutil.which("git") is not None and (folder / ".git").exists()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """The working tree as a clean checkout: what is not committed yet included, what git ignores not."""
    git = require_program("git")
    root = tmp_path_factory.mktemp("checkout") / "kvbm-kernels"
    copy_sources(ROOT, root)
    run(git, "init", "--quiet", cwd=root)
    run(git, "add", "--all", cwd=root)
    run(git, "-c", "user.name=test", "-c", "user.email=test@localhost", "commit", "--quiet", "-m", "all", cwd=root)
    return root


@pytest.fixture(scope="module")
def sdist(checkout, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--skip-dependency-check", "-o", folder, checkout)
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-build-isolation", "-w", folder, sdist)
    (path,) = folder.iterdir()
    return path


@pytest.fixture
def venv(tmp_path):
    """The python of a new environment with links to all that is installed here but kvbm_kernels."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    (site,) = (tmp_path / "venv/lib").glob("python3*/site-packages")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "kvbm" not in entry.name and entry.suffix != ".pth":
            (site / entry.name).symlink_to(entry)
    return tmp_path / "venv/bin/python"


def smoke(python: Path, folder: Path) -> list[str]:
    env = {name: value for name, value in environment().items() if name != "KVBM_KERNELS_LIBRARY"}
    return run(python, "-c", SMOKE, env=env, cwd=folder).splitlines()


@pytest.mark.parametrize("is_checkout", [True, False])
def test_what_a_checkout_is_copied_from(tmp_path, is_checkout):
    """Neither what git ignores nor what links lead to; what is not committed yet is copied as well."""
    source, target = tmp_path / "source", tmp_path / "target"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/large").touch()
    (source / "python").mkdir(parents=True)
    (source / "build-1").mkdir()
    for name in ("python/new.py", "python/gone.py", "build-1/log"):
        (source / name).write_text(name)
    (source / ".gitignore").write_text("build*\nscratch/\n")
    (source / "folder").symlink_to(tmp_path / "elsewhere")
    (source / "nowhere").symlink_to("missing")
    wanted = {"python", "python/new.py", ".gitignore", "folder", "nowhere"}
    if is_checkout:
        git = require_program("git")
        run(git, "init", "--quiet", cwd=source)
        run(git, "add", "python/gone.py", cwd=source)
        (source / "scratch").mkdir()
        (source / "scratch/large").touch()
    (source / "python/gone.py").unlink()
    copy_sources(source, target)
    assert {str(path.relative_to(target)) for path in target.rglob("*")} == wanted
    assert (target / "folder").is_symlink()
    assert (target / "nowhere").is_symlink()


def test_the_sdist_holds_the_project(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert re.fullmatch(r"kvbm_kernels-\d+\.\d+\.\d+\.tar\.gz", sdist.name)
    assert {
        "LICENSE",
        "include/kvbm_kernels.h",
        "native/api.cpp",
        "native/kvbm_kernels.map",
        "python/kvbm_kernels/__init__.py",
        "tests/reference.py",
        "tools/backend.py",
    } <= names


def test_the_wheel_is_for_this_platform_and_any_python_3(wheel):
    assert re.fullmatch(r"kvbm_kernels-\d+\.\d+\.\d+-py3-none-linux_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/WHEEL")]
        text = archive.read(name).decode()
    assert "Root-Is-Purelib: false" in text
    assert re.findall(r"^Tag: (\w+-\w+)-linux_\w+$", text, re.MULTILINE) == ["py3-none"]


def test_the_wheel_holds_the_package_the_library_and_the_header(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = [archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA")]
    package = ROOT / "python/kvbm_kernels"
    files = (path for path in package.rglob("*") if path.is_file() and path.parent.name != "__pycache__")
    sources = {str(path.relative_to(package)) for path in files}
    built = {"kvbm_kernels/_lib/libkvbm_kernels.so", "kvbm_kernels/include/kvbm_kernels.h", "_kvbm_commands.py"}
    assert "py.typed" in sources
    assert names == built | {f"kvbm_kernels/{name}" for name in sources}
    required = re.findall(r"^Requires-Dist: (\w+)(?![^\n]*extra)", metadata, re.MULTILINE)
    assert sorted(required) == ["cffi", "numpy"]


def test_the_wheel_works_in_a_new_environment(wheel, venv, tmp_path):
    pip("--python", venv, "install", wheel)
    header, library, converted = smoke(venv, tmp_path)
    assert header == "True"
    assert library.startswith(str(tmp_path))
    assert converted == "True True"


def test_an_editable_install_works(checkout, venv, tmp_path):
    """It finds library and header in the source and build folders, and sees a new file at once."""
    pip("--python", venv, "install", "--no-build-isolation", "--editable", checkout)
    header, library, converted = smoke(venv, tmp_path)
    assert header == "True"
    assert library.startswith(str(checkout))
    assert converted == "True True"
    (checkout / "python/kvbm_kernels/extra.py").write_text("value = 7\n")
    assert run(venv, "-c", "from kvbm_kernels.extra import value; print(value)", cwd=tmp_path) == "7\n"
