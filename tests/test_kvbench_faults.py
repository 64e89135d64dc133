"""A library that copies wrongly, or not at all: kvbench finds it and says where."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import kvbm_kernels as kk
from buildtools import require_program, run
from kvbench_support import SMALL, kvbench

pytest.importorskip("click")
pytest.importorskip("rich")

# A library that does what the real one does, but for something before or after it.
BROKEN = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
typedef int copy_batch(const void *const *, void *const *, const size_t *, size_t, int, size_t *);
int kvbm_kernels_host_copy_batch(const void *const *src, void *const *dst, const size_t *nbytes, size_t count,
                                 int threads, size_t *failed) {
  static int calls;
  calls++;
  BEFORE
  copy_batch *real = (copy_batch *)dlsym(RTLD_NEXT, "kvbm_kernels_host_copy_batch");
  int status = real(src, dst, nbytes, count, threads, failed);
  AFTERWARDS
  return status;
}
"""


def broken_library(folder: Path, afterwards: str = "", before: str = "") -> str:
    """The path of a library like the loaded one, but for a batch of pieces on the host."""
    real = Path(kk.build_info().library).resolve()
    source, library = folder / "broken.c", folder / "libbroken.so"
    source.write_text(BROKEN.replace("BEFORE", before).replace("AFTERWARDS", afterwards))
    run(
        require_program("cc"),
        "-shared",
        "-fPIC",
        "-o",
        library,
        source,
        "-Wl,--no-as-needed",
        real,
        f"-Wl,-rpath,{real.parent}",
        "-ldl",
    )
    return str(library)


class TestFaults:
    def test_a_wrong_byte_fails_the_run_and_is_named(self, tmp_path):
        """The last byte of the last piece: block 1, the last layer, V."""
        flip = "((unsigned char *)dst[count - 1])[nbytes[count - 1] - 1] ^= 0x40;"
        library = broken_library(tmp_path, flip)
        ran = kvbench(*SMALL, "--num-blocks", "2", "--direction", "h2h", "--pattern", "lw,nhd_to_universal",
                      "--backend", "auto", "--json", tmp_path / "out.json", KVBM_KERNELS_LIBRARY=library)  # fmt: skip
        assert ran.status == 1
        named = r"block 1, layer 2, outer 1, token 4, head 1, byte 23 is 0x(\w\w), expected 0x(\w\w)"
        line, summary = re.findall(rf"WRONG: .*{named}", ran.err)
        assert line == summary
        assert int(line[0], 16) ^ int(line[1], 16) == 0x40
        # No figure for it, and the other test is measured.
        assert [row["pattern"] for row in ran.rows] == ["nhd_to_universal"]
        wrong, right = json.loads((tmp_path / "out.json").read_text())["results"]
        assert (wrong["status"], right["status"]) == ("wrong", "measured")
        assert "median_ms" not in wrong
        assert "2 tests: 1 measured, 1 wrong" in ran.err

    @pytest.mark.parametrize(
        "fault",
        [
            # Targets are checked again after they were timed,
            {"afterwards": "if (calls > 60) ((unsigned char *)dst[0])[0] ^= 1;"},
            # having been spoilt: a call that does nothing is not saved by an earlier one.
            {"before": "if (calls > 60) return 0;"},
            # There are several sets of buffers of this size, and each is checked.
            {"afterwards": "if (calls == 2) ((unsigned char *)dst[0])[0] ^= 1;"},
        ],
    )
    def test_a_fault_that_comes_later_is_found(self, fault, tmp_path):
        library = broken_library(tmp_path, **fault)
        ran = kvbench("--num-blocks", "8", "--layers", "16", "--iters", "60", "--direction", "h2h", "--pattern", "lw",
                      KVBM_KERNELS_LIBRARY=library)  # fmt: skip
        assert ran.status == 1
        assert "WRONG: block 0, layer 0, outer 0, token 0, head 0, byte 0" in ran.err

    def test_a_call_that_fails_is_no_success(self, tmp_path):
        library = broken_library(tmp_path, "status = 700;")
        ran = kvbench(*SMALL, "--num-blocks", "1", "--direction", "h2h", "--pattern", "lw,nhd_to_hnd", "--backend",
                      "auto", KVBM_KERNELS_LIBRARY=library)  # fmt: skip
        assert ran.status == 1
        assert "FAILED: CudaError: " in ran.err
        assert [row["pattern"] for row in ran.rows] == ["nhd_to_hnd"]
