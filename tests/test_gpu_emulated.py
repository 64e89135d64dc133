"""The emulated GPU sees what a real one would at best fault on."""

from __future__ import annotations

import pytest

from gpu_support import Memory, Shape, View, call, is_emulated, library, make_view, table

pytestmark = pytest.mark.gpu
ILLEGAL_ADDRESS = 700


@pytest.fixture(autouse=True)
def _only_emulated() -> None:
    if not is_emulated():
        pytest.skip("would leave a real GPU's context broken")


def copy(dst: View, src: View, nbytes: int) -> int:
    return call("copy_blocks", dst, src, Shape(1, 1, 1, 1, nbytes), 1, None, None)


@pytest.mark.parametrize("nbytes", [64, 65, 80, 4096])
@pytest.mark.parametrize("misalign", [0, 1])
def test_accesses_outside_an_allocation_are_told(capfd, nbytes, misalign) -> None:
    for short_source in (False, True):
        src, dst = (Memory(nbytes - (short == short_source), misalign=misalign) for short in (True, False))
        bases = table([src.address]), table([dst.address])
        assert copy(make_view(bases[1], None, 1), make_view(bases[0], None, 1), nbytes) == ILLEGAL_ADDRESS
        assert b"CUDA refused the launch" in library().kvbm_kernels_last_error_message()
        assert f"a {'read' if short_source else 'write'} of" in capfd.readouterr().err


def test_freed_memory_is_told() -> None:
    memory, freed = Memory(64), Memory(64)
    bases = table([memory.address]), table([freed.address])
    # It would be ordinary memory to the first look.
    views = [make_view(b, None, 1) for b in bases]
    assert copy(*views, 64) == 0
    del freed
    assert copy(*views, 64) == 1
