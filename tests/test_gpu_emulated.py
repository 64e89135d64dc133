"""The emulated GPU sees what a real one would at best fault on."""

from __future__ import annotations

from ctypes import c_size_t

import numpy as np
import pytest

import reference
from gpu_support import AUTO, BATCH, Memory, Shape, Stream, View, call, check, is_emulated, library, make_view, table

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


REMEMBERED = 512
"""How many allocations a batch knows at a time."""


def num_asked() -> int:
    """How many times the driver was asked about a pointer."""
    function = library().kvbm_emulated_pointers_asked_about
    function.restype = c_size_t
    return int(function())


def starts(pools: list[Memory]) -> np.ndarray:
    return np.array([pool.address for pool in pools], np.uint64)


def copy_pieces(dst: Memory, src: np.ndarray, nbytes: int, mode: int) -> None:
    """Pieces from addresses to places in a row."""
    places = dst.address + nbytes * np.arange(src.size, dtype=np.uint64)
    check("memcpy_batch", table(src).ctypes.data, table(places).ctypes.data, nbytes, src.size, mode, Stream().handle)


@pytest.mark.parametrize("mode", [AUTO, BATCH])
@pytest.mark.parametrize(
    ("num_pools", "order"), [(1, "in turn"), (160, "in turn"), (160, "any"), (REMEMBERED + 80, "in turn")]
)
def test_a_batch_asks_once_about_an_allocation(num_pools, order, mode, rng) -> None:
    """From the pools of layers block by block, no two pieces in a row of one allocation; and in any order."""
    num_blocks, nbytes = 6, 48
    images = rng.integers(0, 256, (num_pools, num_blocks, nbytes), np.uint8)
    pools = [Memory(image.size, "pinned").write(image) for image in images]
    target = Memory(images.size)
    places = np.indices((num_blocks, num_pools)).reshape(2, -1)
    if order == "any":
        places = rng.permutation(places, axis=1)
    block, pool = places
    before = num_asked()
    copy_pieces(target, starts(pools)[pool] + (nbytes * block).astype(np.uint64), nbytes, mode)
    asked = num_asked() - before
    reference.assert_same_bytes(target.read(), images[pool, block].reshape(-1))
    # Of more allocations than are remembered, each piece of those too many is asked about whenever it is looked at.
    remembered, looks = min(num_pools, REMEMBERED), {AUTO: 2, BATCH: 1}[mode]
    assert asked == remembered + 1 + looks * num_blocks * (num_pools - remembered)


def test_allocations_that_are_not_remembered_are_of_their_kind() -> None:
    pools = [Memory(48) for _ in range(REMEMBERED + 40)]
    copy_pieces(Memory(48 * len(pools)), starts(pools), 48, AUTO)
    by_kernel = 1
    assert library().kvbm_kernels_last_batch_routes() == by_kernel


def test_ordinary_memory_takes_no_place_of_allocations() -> None:
    count = REMEMBERED + 10
    ordinary, pools = Memory(48 * count, "pageable"), [Memory(48, "pinned") for _ in range(10)]
    src = np.concatenate([ordinary.address + 48 * np.arange(count, dtype=np.uint64), np.tile(starts(pools), 4)])
    target = Memory(48 * src.size)
    before = num_asked()
    copy_pieces(target, src, 48, BATCH)
    assert num_asked() - before == count + len(pools) + 1
