"""Blocks are handed out, shared, found again and given back, and no mistake goes through."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

import kvbm_kernels as kk


@pytest.fixture
def allocator():
    return kk.BlockAllocator(8)


def hashes(n):
    return kk.block_hashes(range(n), 1)


def test_blocks_come_in_order(allocator):
    """A new allocator hands out 0, 1, 2 and so on, so that the first sequences lie in runs of blocks."""
    assert allocator.allocate(3) == [0, 1, 2]
    assert allocator.allocate() == [3]
    assert allocator.allocate(0) == []
    allocator.check()


def test_allocate_is_all_or_nothing():
    """Of a pool of 4, asking 5 takes nothing, and asking 4 then succeeds."""
    allocator = kk.BlockAllocator(4)
    with pytest.raises(kk.OutOfBlocks, match="5 blocks are needed and 4 are free") as raised:
        allocator.allocate(5)
    assert (raised.value.needed, raised.value.free) == (5, 4)
    assert isinstance(raised.value, MemoryError)
    assert isinstance(raised.value, kk.KvbmError)
    assert allocator.num_free == 4
    assert allocator.try_allocate(5) is None
    assert sorted(allocator.allocate(4)) == [0, 1, 2, 3]
    assert allocator.try_allocate() is None
    allocator.check()


@pytest.mark.parametrize("error", [kk.OutOfBlocks(5, 4), kk.CapacityError(9, 8)])
def test_errors_travel_between_processes(error):
    """Numbers and message of an error survive pickling and copying."""
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert (str(again), vars(again)) == (str(error), vars(error))


def test_the_null_block_is_none_of_the_blocks(allocator):
    """The block that pads tables is never handed out, and cannot be given back."""
    assert allocator.null_block not in allocator.allocate(8)
    with pytest.raises(kk.KvbmValueError, match="block id is 8, expected 0 to 7"):
        allocator.free([allocator.null_block])


def test_references_decide_when_a_block_is_free(allocator):
    """A block is free when it was given back as often as it was taken."""
    (block,) = allocator.allocate()
    allocator.acquire([block])
    assert allocator.refcount(block) == 2
    assert not allocator.is_writable(block)
    allocator.free([block])
    assert (allocator.refcount(block), allocator.num_free) == (1, 7)
    assert allocator.is_writable(block)
    allocator.free([block])
    assert (allocator.refcount(block), allocator.num_free) == (0, 8)
    allocator.check()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([0, 1, 0], "free: block 0 is named 2 times and has 1 references"),
        ([1, 2, 2, 2], "block 2 is named 3 times and has 2 references"),
        ([0, 5], "block 5 is named once and has 0 references"),
        ([1, 8], "block id is 8, expected 0 to 7"),
        ([1, -1], "expected 0 or more|block id is -1, expected 0 to 7"),
    ],
)
@pytest.mark.parametrize("hashed", [False, True])
def test_a_wrong_free_changes_nothing(allocator, wrong, message, hashed):
    """Freed twice, free already, no block at all: ValueError, and every block is as it was."""
    blocks = allocator.allocate(3)
    allocator.acquire([2])
    if hashed:
        allocator.register(1, b"1")
    for ids in (wrong, np.array(wrong), tuple(wrong)):
        with pytest.raises(ValueError, match=message):
            allocator.free(ids)
        assert [allocator.refcount(block) for block in blocks] == [1, 1, 2]
        assert allocator.num_free == 5
    allocator.check()
    allocator.free([2, 0, 2, 1])
    assert allocator.num_free == 8
    allocator.check()


def test_a_wrong_acquire_changes_nothing(allocator):
    """A block that nobody has cannot be shared."""
    allocator.allocate(2)
    with pytest.raises(kk.KvbmValueError, match="acquire: block 3 is named once and has 0 references"):
        allocator.acquire([0, 3])
    assert allocator.refcount(0) == 1
    allocator.acquire([0, 0])
    assert allocator.refcount(0) == 3


@pytest.mark.parametrize("wrong", [[0.0], [True], ["0"], [None], np.array([0.0]), 0.5])
def test_ids_are_integers(allocator, wrong):
    """What is no integer is a TypeError, a float even where it is a whole number."""
    allocator.allocate(2)
    with pytest.raises(kk.KvbmTypeError):
        allocator.free(wrong)
    assert allocator.num_used == 2


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint32])
def test_ids_may_be_arrays(allocator, dtype):
    """Tables of any integer type are taken."""
    allocator.free(np.array(allocator.allocate(3), dtype))
    allocator.allocate(2)
    allocator.free([dtype(0), dtype(1)])
    assert allocator.num_free == 8
    assert all(type(block) is int for block in allocator.allocate(8))


def test_wrong_counts(allocator):
    """A number of blocks is an integer, and not negative."""
    for wrong, error in ((-1, ValueError), (1.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match=f"n is {wrong}"):
            allocator.allocate(wrong)
    for wrong in (0, 1 << 31):
        with pytest.raises(ValueError, match=f"num_blocks is {wrong}"):
            kk.BlockAllocator(wrong)


def test_what_was_freed_last_is_reused_first(allocator):
    """A sequence's blocks come back in its order, the most recently used before any other."""
    first, second = allocator.allocate(3), allocator.allocate(2)
    allocator.free(first)
    allocator.free(second)
    assert allocator.allocate(5) == [*second, *first]


def test_unhashed_blocks_go_first_and_of_the_hashed_the_longest_unused(allocator):
    """Blocks without a hash are reused before those with one; of a sequence, the end is forgotten first."""
    old, new, plain = allocator.allocate(2), allocator.allocate(2), allocator.allocate(4)
    digests = hashes(4)
    for block, digest in zip(old + new, digests, strict=True):
        assert allocator.register(block, digest)
    allocator.free(old)
    allocator.free(new)
    allocator.free(plain)
    assert allocator.usage().cached == 4
    assert allocator.allocate(4) == plain
    assert allocator.allocate(3) == [old[1], old[0], new[1]]
    allocator.check()
    assert allocator.lookup([digests[2]]) == [new[0]]
    assert allocator.lookup([digests[0]]) == []
    assert allocator.usage().evicted == 3


def test_a_hashed_block_is_found_in_use_and_free(allocator):
    """Finding a block takes a reference, and takes a free one off the list of those to be reused."""
    blocks = allocator.allocate(2)
    one, two, other = hashes(3)
    allocator.register(blocks[0], one)
    allocator.register(blocks[1], two)
    assert allocator.lookup([one, two, other]) == blocks
    assert allocator.refcount(blocks[0]) == 2
    allocator.free(blocks)
    allocator.free(blocks)
    assert allocator.num_free == 8
    assert allocator.lookup([one, other, two]) == blocks[:1]
    assert allocator.num_free == 7
    assert allocator.lookup([other, one]) == []
    assert allocator.usage().hits == 3
    allocator.check()


def test_the_first_block_with_a_hash_keeps_it(allocator):
    """A second block with the same contents stays unregistered; a block with another hash takes the new one."""
    first, second = allocator.allocate(2)
    assert allocator.register(first, b"one")
    assert not allocator.register(second, b"one")
    assert not allocator.register(first, b"one")
    assert allocator.lookup([b"one"]) == [first]
    assert allocator.register(first, b"two")
    assert allocator.lookup([b"one"]) == []
    assert allocator.digest_of(first) == b"two"
    allocator.check()


def test_forgotten_hashes_are_not_found(allocator):
    """After forget, and forget_all, a block is free like any other, or in use as before."""
    blocks = allocator.allocate(3)
    for block in blocks:
        allocator.register(block, bytes([block + 1]))
    allocator.free(blocks[:2])
    allocator.forget(blocks[0])
    allocator.check()
    assert allocator.lookup([b"\1"]) == []
    allocator.forget_all()
    allocator.check()
    assert allocator.usage().cached == 0
    assert allocator.lookup([b"\2"]) == []
    assert allocator.refcount(blocks[2]) == 1
    assert allocator.num_free == 7


def test_only_blocks_in_use_are_registered(allocator):
    """A free block holds nothing worth finding; a digest is bytes."""
    with pytest.raises(kk.KvbmValueError, match="register: block 0 is named once and has 0 references"):
        allocator.register(0, b"x")
    allocator.allocate()
    for wrong in ("x", b"", 3):
        with pytest.raises(kk.KvbmTypeError, match="digest is"):
            allocator.register(0, wrong)


def test_usage_counts(allocator):
    """The counters say what is in use, what was at most, and what was handed out."""
    allocator.free(allocator.allocate(5))
    allocator.allocate(2)
    assert allocator.usage() == kk.BlockUsage(
        capacity=8, used=2, free=6, cached=0, peak_used=5, allocated=7, evicted=0, hits=0
    )
    assert repr(allocator) == "<BlockAllocator: 2 of 8 blocks used>"


def test_many_cycles_end_with_every_block_free(allocator):
    """1,000 rounds of taking and giving back lose no block."""
    for i in range(1000):
        allocator.free(allocator.allocate(i % 8))
    assert allocator.num_free == 8
    allocator.check()


def test_check_finds_books_that_do_not_balance(allocator):
    """check() is no formality."""
    allocator.allocate(2)
    allocator._references[1] = 0
    with pytest.raises(AssertionError, match="block 1"):
        allocator.check()


def test_hashes_chain():
    """A hash stands for its block and for all before it; what does not fill a block has none."""
    hashes = kk.block_hashes([1, 2, 3, 4, 5, 6, 7], 2)
    assert len(hashes) == 3
    assert kk.block_hashes([1, 2, 3, 4], 2) == hashes[:2]
    changed = kk.block_hashes([9, 2, 3, 4, 5, 6], 2)
    assert not set(changed) & set(hashes)
    assert kk.block_hashes([1, 2, 3, 9, 5, 6], 2)[0] == hashes[0]
    assert not set(kk.block_hashes([1, 2, 3, 4], 2, extra=b"adapter")) & set(hashes)
    assert kk.block_hashes([1], 2) == kk.block_hashes([], 2) == []
    assert all(len(digest) == 32 for digest in hashes)


def test_tokens_are_numbers_whatever_holds_them(torch):
    """A list, and arrays of any integer type, have the same hashes; floats and tables have none."""
    expected = kk.block_hashes([5, 6, 7, 8], 2)
    for tokens in (np.array([5, 6, 7, 8], np.uint32), (5, 6, 7, 8), range(5, 9), torch.tensor([5, 6, 7, 8])):
        assert kk.block_hashes(tokens, 2) == expected
    with pytest.raises(kk.KvbmTypeError, match="tokens have dtype float64"):
        kk.block_hashes([0.5], 1)
    with pytest.raises(kk.KvbmValueError, match="2 dimensions"):
        kk.block_hashes([[1]], 1)
    with pytest.raises(kk.KvbmValueError, match="block_size is 0"):
        kk.block_hashes([1], 0)
    with pytest.raises(kk.KvbmTypeError, match="extra is 'x'"):
        kk.block_hashes([1], 1, extra="x")


def test_hashes_are_the_same_in_every_process():
    """Another process, with another seed for Python's own hashes, gets these very bytes."""
    program = "import kvbm_kernels as kk; print(kk.block_hashes([1, 2, 3], 3)[0].hex())"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert outputs == {"7012468fd5dc5eb31e00c7f35e841c2f3c8167f5081523fdb1046ed6ead7983e"}


@pytest.mark.parametrize("wrong", [[1], "a", None, 3], ids=repr)
def test_hashes_that_are_none_are_not_looked_up(wrong):
    allocator = kk.BlockAllocator(2)
    (block,) = allocator.allocate()
    allocator.register(block, b"x")
    with pytest.raises(kk.KvbmTypeError, match=r"digests\[1\] is .*, expected bytes"):
        allocator.lookup([b"x", wrong])
    assert allocator.refcount(block) == 1
