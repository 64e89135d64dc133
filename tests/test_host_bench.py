"""The arguments of the benchmark of the host engine."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import kvbm_kernels as kk
from buildtools import ROOT, require_program, run


class TestHostBench:
    @pytest.mark.parametrize("arguments", [["--help"], ["12x"], ["-1"], ["0"], [""], ["9" * 30], ["1", "1"]])
    def test_what_is_no_number_is_told_the_usage(self, program, arguments):
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == "usage: host_bench [MiB of KV data, 1 to 1048576, default 128]\n"

    @pytest.fixture(scope="class")
    @classmethod
    def program(cls, tmp_path_factory):
        library = Path(kk.build_info().library).resolve()
        program = tmp_path_factory.mktemp("host") / "host_bench"
        options = ["-std=c++17", "-pthread", f"-I{ROOT}/include", f"-Wl,-rpath,{library.parent}"]
        run(require_program("c++"), *options, ROOT / "bench/host.cpp", library, "-o", program)
        return program
