"""Find the CUDA toolkit for meson.build, which cannot read the environment itself.

Usage: cuda_toolkit.py auto|enabled|disabled

Prints a key, a tab and a value a line, and nothing at all for the build without CUDA. On failure the end of stderr is
the sentence for the user.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

DEFAULT_ARCHS = "80,86,89,90,100,120"


def fail(sentence: str) -> NoReturn:
    sys.exit(sentence)


def say(key: str, value: str) -> None:
    print(key, value, sep="\t")


def is_set(variable: str) -> bool:
    return os.environ.get(variable, "").strip().lower() not in ("", "0", "false", "no", "off")


def find_nvcc() -> str | None:
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        root = os.environ.get(variable)
        if root:
            nvcc = Path(root) / "bin" / "nvcc"
            if not os.access(nvcc, os.X_OK):
                fail(f"{variable} is {root}, but there is no program {nvcc}.")
            return str(nvcc)
    return shutil.which("nvcc")


def run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        print(result.stdout, result.stderr, file=sys.stderr)
        fail(f"{command[0]} is there but does not work (see above); -Dcuda=disabled builds without CUDA.")
    return result.stdout + result.stderr


def compiles(nvcc: str, arch: str) -> bool:
    """Whether there is this variant of an architecture: no list of nvcc's has them."""
    flag = f"-gencode=arch=compute_{arch},code=sm_{arch}"
    command = [nvcc, flag, "-x", "cu", os.devnull, "-cubin", "-o", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def choose_archs(nvcc: str) -> list[str]:
    known = set(re.findall(r"sm_(\d+)", run(nvcc, "--list-gpu-code")))
    asked = re.split(r"[,\s]+", (os.environ.get("CUDA_ARCHS", "").strip() or DEFAULT_ARCHS).strip(","))
    chosen = []
    for arch in dict.fromkeys(asked):
        # 90a and 100f are variants of an architecture that --list-gpu-code does not list by themselves.
        number = re.fullmatch(r"(\d+)[af]?", arch)
        if number and number[1] in known and (arch.isdigit() or compiles(nvcc, arch)):
            chosen.append(arch)
        else:
            say("warning", f"CUDA_ARCHS: this nvcc does not know {arch!r}, so it is left out")
    if not chosen:
        fail(f"CUDA_ARCHS: this nvcc knows none of {', '.join(asked)}; it knows {', '.join(sorted(known, key=int))}.")
    return chosen


def code_flags(archs: list[str]) -> list[str]:
    flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    # As PTX, the newest one runs on every later GPU. A variant (90a) would not, so it is the last choice.
    newest = max(archs, key=lambda arch: (arch.isdigit(), int(arch.rstrip("af"))))
    return [*flags, f"-gencode=arch=compute_{newest},code=compute_{newest}"]


def library_dirs(nvcc: str) -> list[str]:
    """nvcc's own library folders. The path of nvcc says nothing: it is often a wrapper or a link."""
    dryrun = run(nvcc, "--dryrun", "-x", "cu", os.devnull, "-c", "-o", os.devnull)
    dirs = [Path(path) for path in re.findall(r'"-L([^"]+)"', dryrun)]
    top = re.search(r"TOP=(.+)", dryrun)
    if top:
        dirs += [Path(top[1].strip()) / name for name in ("lib64", "lib")]
    return [os.path.realpath(path) for path in dirs if (path / "libcudart_static.a").exists()]


def main() -> None:
    option = sys.argv[1]
    required = is_set("KVBM_REQUIRE_CUDA")
    if option == "disabled":
        if required:
            fail("KVBM_REQUIRE_CUDA is set, but -Dcuda=disabled asks for the build without CUDA.")
        return
    nvcc = find_nvcc()
    if nvcc is None:
        if required or option == "enabled":
            why = "KVBM_REQUIRE_CUDA is set" if required else "-Dcuda=enabled is given"
            fail(f"{why}, but there is no nvcc on PATH, and neither CUDA_PATH nor CUDA_HOME is set.")
        return

    archs = choose_archs(nvcc)
    flags = code_flags(archs)
    usage = run(nvcc, "--help")
    for flag in ("--threads=0", "--compress-mode=size"):
        if flag.split("=")[0] in usage:
            flags.append(flag)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cu"
        source.write_text("__global__ void probe() {}\n")
        run(nvcc, *flags, "-c", str(source), "-o", str(source.with_suffix(".o")))
    dirs = library_dirs(nvcc)
    if not dirs:
        fail(f"{nvcc} works, but its toolkit has no libcudart_static.a; -Dcuda=disabled builds without CUDA.")

    release = re.search(r"release ([\d.]+)", run(nvcc, "--version"))
    say("nvcc", nvcc)
    say("version", release[1] if release else "unknown")
    say("archs", ",".join(archs))
    say("flags", " ".join(flags))
    say("libdir", dirs[0])


main()
