"""The emulated GPU sees what a real one would at best fault on."""

from __future__ import annotations

from ctypes import c_size_t

import numpy as np
import pytest

import reference
from gpu_support import AUTO, BATCH, Memory, Shape, Stream, View, call, is_emulated, library, make_view, table

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


@pytest.mark.parametrize("mode", [AUTO, BATCH])
@pytest.mark.parametrize("num_pools", [1, 160, 300])
def test_a_batch_asks_once_about_an_allocation(num_pools, mode, rng) -> None:
    """Block by block from the pools of layers, so that no two pieces in a row are of one allocation."""
    asked = library().kvbm_emulated_pointers_asked_about
    asked.restype = c_size_t
    num_blocks, nbytes = 12, 48
    images = rng.integers(0, 256, (num_pools, num_blocks, nbytes), np.uint8)
    pools = [Memory(image.size, "pinned").write(image) for image in images]
    target = Memory(images.size, "device")
    ids = rng.permutation(num_blocks)
    src = np.array([[pool.address + block * nbytes for pool in pools] for block in ids], np.uint64).reshape(-1)
    dst = target.address + nbytes * np.arange(src.size, dtype=np.uint64)
    before = asked()
    sides = (table(src).ctypes.data, table(dst).ctypes.data)
    assert call("memcpy_batch", *sides, nbytes, src.size, mode, Stream().handle) == 0
    reference.assert_same_bytes(target.read(), images[:, ids].transpose(1, 0, 2).reshape(-1))
    # Of more allocations than are remembered, each piece of those too many is asked about whenever it is looked at.
    remembered, looks = min(num_pools, 256), {AUTO: 2, BATCH: 1}[mode]
    assert asked() - before == remembered + 1 + looks * num_blocks * (num_pools - remembered)
