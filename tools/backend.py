"""The PEP 517 backend: meson-python with two corrections, explained at the functions."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import mesonpy
from mesonpy import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
]


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """Tag the wheel py3-none-PLATFORM.

    meson-python takes the native library for an extension module and ties the wheel to the Python
    that built it. The library knows nothing of Python, so every Python 3 can use it.
    """
    name = mesonpy.build_wheel(wheel_directory, config_settings, metadata_directory)
    wheel_tags = [sys.executable, "-m", "wheel", "tags", "--remove"]
    result = subprocess.run(
        [*wheel_tags, "--python-tag=py3", "--abi-tag=none", str(Path(wheel_directory) / name)],
        check=True,
        text=True,
        stdout=subprocess.PIPE,
    )
    return Path(result.stdout.strip()).name


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    """Give the editable install a ninja that stays.

    It calls ninja at every import, and in an isolated build the only one may lie in the build
    environment, which is deleted after the install.
    """
    ninja = shutil.which(os.environ.get("NINJA", "ninja"))
    if ninja:
        kept = Path("build/ninja").resolve()
        kept.parent.mkdir(exist_ok=True)
        shutil.copy2(ninja, kept)
        os.environ["NINJA"] = str(kept)
    return mesonpy.build_editable(wheel_directory, config_settings, metadata_directory)
