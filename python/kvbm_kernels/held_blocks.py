"""The blocks of one sequence: taken when they are needed, shared, copied before they are written, and given back."""

from __future__ import annotations

from typing import NamedTuple

from kvbm_kernels.block_pool import BlockPool
from kvbm_kernels.errors import KvbmValueError, Uncopied
from kvbm_kernels.kv_cache import CapacityError
from kvbm_kernels.kv_tables import TableRows
from kvbm_kernels.streams import StreamLike


class RoomMade(NamedTuple):
    """What making room changed."""

    held: int
    """How many blocks there were."""
    replaced: list[tuple[int, int]]
    """Positions in the list, and the shared block that was there before its copy."""
    forgotten: list[tuple[int, bytes]]
    """Blocks that are about to change, and the hashes of what they held."""


# What making room changed where there was nothing to do.
NOTHING = RoomMade(0, [], [])


class HeldBlocks(Uncopied):
    """``ids`` in the order of the tokens, at most ``most`` of them; the rows of the sequence in tables name them."""

    __slots__ = ("_allocator", "_pool", "_size", "_tables", "ids", "most")

    def __init__(self, pool: BlockPool, most: int, tables: TableRows) -> None:
        self.ids: list[int] = []
        self.most = most
        self._pool = pool
        self._allocator = pool.allocator
        self._size = pool.block_size
        self._tables = tables

    @property
    def room(self) -> int:
        """Tokens there is room for."""
        return len(self.ids) * self._size

    def num_blocks(self, tokens: int) -> int:
        """How many blocks so many tokens take up."""
        return -(-tokens // self._size)

    def slots(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The block of each of these tokens, and its place there."""
        return [(self.ids[n // self._size], n % self._size) for n in range(start, stop)]

    def hold(self, ids: list[int]) -> None:
        """Have these blocks, with the references that they come with, where there were none."""
        self.ids = ids
        self._tables.put_blocks(self.ids, 0)

    def give_back(self, n: int) -> None:
        """Keep the blocks of the first n tokens only."""
        keep = self.num_blocks(n)
        self._allocator.free(self.ids[keep:])
        del self.ids[keep:]
        self._tables.put_blocks(self.ids, keep)

    def copies(self, ids: list[int], stream: StreamLike | None) -> list[int]:
        """New blocks with what these hold. Raises OutOfBlocks."""
        return self._copied(self._allocator.allocate(len(ids)), ids, stream)

    def check_writable(self, start: int, stop: int) -> None:
        """Raise KvbmValueError if writing these tokens, which there is room for, would change what others see."""
        if self._are_writable(start, stop):
            return
        for i in self._written(start, stop):
            block = self.ids[i]
            if not self._allocator.is_writable(block):
                why = "others have too" if self._allocator.refcount(block) > 1 else "is registered"
                raise KvbmValueError(
                    f"token {max(start, i * self._size)} would be written to block {block}, which "
                    f"{why}: reserve comes first"
                )

    def is_ready(self, start: int, stop: int) -> bool:
        """Whether make_room() would do nothing."""
        return stop <= self.room and self._are_writable(start, stop)

    def missing(self, start: int, stop: int) -> int:
        """Blocks that make_room() would take. Raises CapacityError."""
        if stop > self.most * self._size:
            raise CapacityError(stop, self.most * self._size)
        return max(self.num_blocks(stop) - len(self.ids), 0) + len(self._shared(start, stop))

    def make_room(self, start: int, stop: int, stream: StreamLike | None) -> RoomMade:
        """Make the tokens from ``start`` up to ``stop`` writable. Raises OutOfBlocks and CapacityError."""
        if self.is_ready(start, stop):
            return NOTHING
        missing = self.missing(start, stop)
        held = len(self.ids)
        written = self._written(start, stop)
        made = RoomMade(held, [], [])
        if missing:
            shared = self._shared(start, stop)
            fresh = self._allocator.allocate(missing)
            if shared:
                self._copied(fresh, [self.ids[i] for i in shared], stream)
            for i, copy in zip(shared, fresh, strict=False):
                made.replaced.append((i, self.ids[i]))
                self.ids[i] = copy
            self.ids += fresh[len(shared) :]
            self._tables.put_blocks(self.ids, min(shared, default=held))
        # A block of this cache alone is written where it is, and no longer what was registered.
        for block in self.ids[written.start : written.stop]:
            digest = self._allocator.digest_of(block)
            if digest is not None:
                made.forgotten.append((block, digest))
                self._allocator.forget(block)
        return made

    def copied(self, made: RoomMade) -> list[int]:
        """The blocks that are in the place of shared ones since room was made, copies of those."""
        return [self.ids[i] for i, _ in made.replaced]

    def take_back(self, made: RoomMade) -> None:
        """Undo making room."""
        if made is NOTHING:
            return
        # In the order they came, so that the next to ask is given the same.
        fresh = [self.ids[i] for i, _ in made.replaced] + self.ids[made.held :]
        del self.ids[made.held :]
        for i, block in made.replaced:
            self.ids[i] = block
        self._allocator.free(fresh)
        self._tables.put_blocks(self.ids, 0)
        for block, digest in made.forgotten:
            self._allocator.register(block, digest)

    def keep(self, made: RoomMade) -> None:
        """The room is used, and nothing will be taken back."""
        if made.replaced:
            self._allocator.free([block for _, block in made.replaced])

    def _written(self, start: int, stop: int) -> range:
        """Where in the list there are blocks that writing these tokens would change."""
        # Nothing is to be written where the tokens are all there.
        if start >= stop:
            return range(0)
        return range(start // self._size, min(self.num_blocks(stop), len(self.ids)))

    def _are_writable(self, start: int, stop: int) -> bool:
        size = self._size
        return start >= stop or self._allocator.are_writable(self.ids[start // size : -(-stop // size)])

    def _shared(self, start: int, stop: int) -> list[int]:
        """Where in the list there are blocks of others that writing these tokens would change."""
        references = self._allocator.refcount
        return [i for i in self._written(start, stop) if references(self.ids[i]) > 1]

    def _copied(self, fresh: list[int], ids: list[int], stream: StreamLike | None) -> list[int]:
        """The first of some fresh blocks, now copies of these; all of them are free again if that fails."""
        try:
            if ids:
                self._pool.rows.copy_blocks(fresh[: len(ids)], ids, stream)
        except BaseException:
            self._allocator.free(fresh)
            raise
        return fresh
