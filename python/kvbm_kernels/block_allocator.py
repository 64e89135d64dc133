"""Which blocks of a pool are in use, and by how many: numbers alone, no memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple, SupportsIndex

import numpy as np

from kvbm_kernels._wording import counted
from kvbm_kernels.errors import KvbmMemoryError, KvbmTypeError, KvbmValueError
from kvbm_kernels.layouts import as_count
from kvbm_kernels.views import BlockIds

# A table entry has 32 bits, and kernels that read it as a signed number exist.
_MOST_BLOCKS = (1 << 31) - 1


class OutOfBlocks(KvbmMemoryError):  # noqa: N818 - the name says what happened, as StopIteration does
    """A pool has fewer free blocks than a call needs: ``needed`` and ``free`` say how many. Nothing was taken."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{counted(needed, 'block')} {'is' if needed == 1 else 'are'} needed and {free} are free")
        self.needed = needed
        self.free = free

    def __reduce__(self) -> tuple[type[OutOfBlocks], tuple[int, int]]:
        return type(self), (self.needed, self.free)


class BlockUsage(NamedTuple):
    """Counters of a :class:`BlockAllocator`."""

    capacity: int
    """Blocks there are."""
    used: int
    """Blocks with a reference."""
    free: int
    """Blocks without one, those of ``cached`` among them."""
    cached: int
    """Free blocks that still hold a registered prefix."""
    peak_used: int
    """The most that ever had a reference at one time."""
    allocated: int
    """Blocks handed out so far."""
    evicted: int
    """Registered prefixes forgotten because their block was handed out again."""
    hits: int
    """Blocks found by :meth:`BlockAllocator.lookup` so far."""


class BlockAllocator:
    """Hands out the blocks 0 to ``num_blocks - 1`` and counts the references to each.

    ``null_block``, the number after the last, is a block that is never handed out: tables are padded with it, so that a
    missing entry never names a block someone uses.

    A block can be registered under a hash of what it holds. It then stays findable after its last reference is gone,
    until it is handed out again: free blocks without a hash go first, in the order of their most recent use, then those
    with one, the longest unused first.

    Every call checks first, and one that raises has changed nothing. An allocator is for one thread at a time.
    """

    __slots__ = (
        "_allocated",
        "_block_of_hash",
        "_cached",
        "_evicted",
        "_free",
        "_hash_of_block",
        "_hits",
        "_peak_used",
        "_references",
        "capacity",
    )

    def __init__(self, num_blocks: SupportsIndex) -> None:
        self.capacity = as_count(num_blocks, "num_blocks", 1)
        if self.capacity > _MOST_BLOCKS:
            raise KvbmValueError(f"num_blocks is {self.capacity}, expected at most {_MOST_BLOCKS}")
        self._references = [0] * self.capacity
        # The end is taken first.
        self._free = list(range(self.capacity - 1, -1, -1))
        # Free blocks with a hash, the longest unused first.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._hash_of_block: dict[int, bytes] = {}
        self._block_of_hash: dict[bytes, int] = {}
        self._peak_used = 0
        self._allocated = 0
        self._evicted = 0
        self._hits = 0

    @property
    def null_block(self) -> int:
        """What pads tables: no block that is ever handed out."""
        return self.capacity

    @property
    def num_free(self) -> int:
        """Blocks without a reference, whether or not a prefix is registered for them."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks with a reference."""
        return self.capacity - self.num_free

    def usage(self) -> BlockUsage:
        """All counters at once."""
        return BlockUsage(
            self.capacity,
            self.num_used,
            self.num_free,
            len(self._cached),
            self._peak_used,
            self._allocated,
            self._evicted,
            self._hits,
        )

    def allocate(self, n: SupportsIndex = 1) -> list[int]:
        """``n`` blocks with one reference each, or none at all: raises OutOfBlocks if fewer are free."""
        blocks = self.try_allocate(n)
        if blocks is None:
            raise OutOfBlocks(as_count(n, "n", 0), self.num_free)
        return blocks

    def try_allocate(self, n: SupportsIndex = 1) -> list[int] | None:
        """As :meth:`allocate`, but None if fewer are free."""
        count = as_count(n, "n", 0)
        free = self._free
        start = len(free) - count
        if start >= 0:
            blocks = free[start:]
            del free[start:]
            blocks.reverse()
        elif -start > len(self._cached):
            return None
        else:
            blocks = free[::-1]
            free.clear()
            blocks += [self._evict() for _ in range(-start)]
        references = self._references
        for block in blocks:
            references[block] = 1
        self._allocated += count
        self._note_peak()
        return blocks

    def acquire(self, ids: BlockIds) -> None:
        """One more reference to each of these blocks, which must have one already. Raises KvbmValueError."""
        for block in self._referenced(ids, "acquire"):
            self._references[block] += 1

    def free(self, ids: BlockIds) -> None:
        """One reference less to each of these blocks; a block without any is free.

        Give the blocks of a sequence in its order: they are freed from the end, so that the beginning, which others are
        likelier to share, is forgotten last.

        Raises KvbmValueError for an id that is no block, and for more references than a block has: freed twice.
        """
        blocks = _numbers(ids, self.capacity)
        if not blocks:
            return
        references, hashes = self._references, self._hash_of_block
        counts = _pick(references, blocks)
        if counts.count(1) == len(blocks) == len(set(blocks)) and not (
            hashes and any(map(hashes.__contains__, blocks))
        ):
            # By far the commonest: a sequence that shared nothing.
            for block in blocks:
                references[block] = 0
            blocks.reverse()
            self._free += blocks
            return
        self._check_named(blocks, counts, "free")
        for block in reversed(blocks):
            references[block] -= 1
            if not references[block]:
                if block in hashes:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def refcount(self, block: SupportsIndex) -> int:
        """How many references a block has; 0 if it is free. Raises KvbmValueError for an id that is no block."""
        return self._references[self._known(block)]

    def is_writable(self, block: SupportsIndex) -> bool:
        """Whether one reference is all there is, and no hash says what the block holds."""
        known = self._known(block)
        return self._references[known] == 1 and known not in self._hash_of_block

    def are_writable(self, blocks: Sequence[int]) -> bool:
        """Whether :meth:`is_writable` is true of all these, which are blocks: this does not look whether they are."""
        references, hashes = self._references, self._hash_of_block
        # all() takes twice as long, and a step asks this of every sequence.
        for block in blocks:  # noqa: SIM110
            if references[block] != 1 or block in hashes:
                return False
        return True

    def register(self, block: SupportsIndex, digest: bytes) -> bool:
        """Make a block in use findable under the hash of what it holds.

        False, and nothing happens, if the hash already leads to a block. A block has one hash; another one replaces it.
        Raises KvbmValueError for a block without a reference.
        """
        (known,) = self._referenced([self._known(block)], "register")
        if not isinstance(digest, bytes) or not digest:
            raise KvbmTypeError(f"digest is {digest!r}, expected bytes")
        if digest in self._block_of_hash:
            return False
        self.forget(known)
        self._hash_of_block[known] = digest
        self._block_of_hash[digest] = known
        return True

    def digest_of(self, block: SupportsIndex) -> bytes | None:
        """The hash a block is registered under, or None."""
        return self._hash_of_block.get(self._known(block))

    def forget(self, block: SupportsIndex) -> None:
        """Drop the hash of a block, if it has one: what it holds is about to change."""
        known = self._known(block)
        digest = self._hash_of_block.pop(known, None)
        if digest is not None:
            del self._block_of_hash[digest]
            if not self._references[known]:
                del self._cached[known]
                self._free.append(known)

    def forget_all(self) -> None:
        """Drop every hash: after this, nothing is found. For when the model's weights change."""
        for block in list(self._hash_of_block):
            self.forget(block)

    def lookup(self, digests: Sequence[bytes]) -> list[int]:
        """The blocks registered under the first of these hashes, up to one that is not; each gets a reference."""
        found = []
        for i, digest in enumerate(digests):
            if not isinstance(digest, bytes):
                raise KvbmTypeError(f"digests[{i}] is {digest!r}, expected bytes")
            block = self._block_of_hash.get(digest)
            if block is None:
                break
            found.append(block)
        for block in found:
            if not self._references[block]:
                del self._cached[block]
            self._references[block] += 1
        self._hits += len(found)
        self._note_peak()
        return found

    def check(self) -> None:
        """Raise AssertionError if the books do not balance. For tests: it looks at every block."""
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached, "a block is both cached and plainly free"
        for block, references in enumerate(self._references):
            assert references >= 0, f"block {block} has {references} references"
            assert (references == 0) == (block in free or block in cached), f"block {block} is free and in use, or lost"
        assert free | cached <= set(range(self.capacity)), "a block is free that does not exist"
        hashed = {block: digest for digest, block in self._block_of_hash.items()}
        assert hashed == self._hash_of_block, "hashes and blocks do not match"
        assert len(hashed) == len(self._block_of_hash), "a block has two hashes"
        assert cached <= hashed.keys(), "a cached block has no hash"
        assert not free & hashed.keys(), "a plainly free block has a hash"

    def __repr__(self) -> str:
        return f"<BlockAllocator: {self.num_used} of {counted(self.capacity, 'block')} used>"

    def _evict(self) -> int:
        """The cached block that was not used for the longest time, its hash forgotten."""
        block, _ = self._cached.popitem(last=False)
        del self._block_of_hash[self._hash_of_block.pop(block)]
        self._evicted += 1
        return block

    def _note_peak(self) -> None:
        used = self.capacity - len(self._free) - len(self._cached)
        if used > self._peak_used:
            self._peak_used = used

    def _known(self, block: SupportsIndex) -> int:
        number = as_count(block, "block id", 0)
        if number >= self.capacity:
            raise KvbmValueError(f"block id is {number}, expected 0 to {self.capacity - 1}")
        return number

    def _referenced(self, ids: Any, what: str) -> list[int]:
        """The ids as numbers, all of blocks with a reference."""
        blocks = _numbers(ids, self.capacity)
        if blocks:
            self._check_named(sorted(set(blocks)), _pick(self._references, blocks), what)
        return blocks

    def _check_named(self, blocks: list[int], counts: tuple[int, ...], what: str) -> None:
        """Raise unless every block has at least as many references as it is named times."""
        if min(counts) and len(set(blocks)) == len(blocks):
            return
        for block in blocks:
            named = blocks.count(block)
            if named > self._references[block]:
                times = f"{named} times" if named > 1 else "once"
                raise KvbmValueError(
                    f"{what}: block {block} is named {times} and has {self._references[block]} references"
                )


def _pick(numbers: list[int], indices: list[int]) -> tuple[int, ...]:
    picked = itemgetter(*indices)(numbers)
    return picked if len(indices) > 1 else (picked,)


def _numbers(ids: Any, capacity: int) -> list[int]:
    if not isinstance(ids, list | tuple | range):
        array = np.asarray(ids)
        if array.dtype.kind not in "iu" or array.ndim > 1:
            raise KvbmTypeError(f"block ids are {ids!r}, expected a list or an array of integers")
        blocks: list[int] = array.reshape(-1).tolist()
    elif set(map(type, ids)) <= {int}:
        blocks = list(ids)
    else:
        blocks = [as_count(number, f"block ids [{i}]", 0) for i, number in enumerate(ids)]
    if blocks and not 0 <= min(blocks) <= max(blocks) < capacity:
        wrong = next(block for block in blocks if not 0 <= block < capacity)
        raise KvbmValueError(f"block id is {wrong}, expected 0 to {capacity - 1}")
    return blocks
