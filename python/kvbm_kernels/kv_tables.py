"""Block tables and lengths: the host's, and the arrays with the same in them that kernels read.

In host memory they are one. In CUDA memory, what a call changes is noted, and published at its end: one launch, with
the words in its parameters, that nothing waits for. So what kernels read is what the host knows, in the order of the
stream.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvbm_kernels._native import ffi, lib
from kvbm_kernels.arrays import Memory, describe, memory_of
from kvbm_kernels.errors import KvbmMemoryError, KvbmValueError, Uncopied
from kvbm_kernels.kv_arrays import ArrayMaker
from kvbm_kernels.streams import StreamLike, launch

Words = npt.NDArray[np.uint32]

_DSTS = ffi.typeof("uint32_t *const[]")
_WORDS = ffi.typeof("uint32_t[]")
_MAP = ffi.typeof("kvbm_kernels_token_map *")
_SLOTS = ffi.typeof("const int64_t *")
_TABLE = ffi.typeof("const uint32_t *")
# Lengths begin on a multiple of this many words behind the tables.
_ALIGNED = 4


class Updates(Uncopied):
    """Words of CUDA memory that are no longer what the host has, of all tables of a pool, until they are published."""

    __slots__ = ("_memories", "_values")

    def __init__(self) -> None:
        # By address: what changes twice is published once.
        self._values: dict[int, int] = {}
        self._memories: dict[int, Memory] = {}

    def note(self, memory: Memory, address: int, value: int) -> None:
        """A word at this address, in this memory, has to get this value."""
        self._values[address] = value
        self._memories[id(memory)] = memory

    def publish(self, stream: StreamLike | None) -> None:
        """Put what was noted on a stream, in one launch. Raises CudaError."""
        if not self._values:
            return
        dsts = np.fromiter(self._values.keys(), np.uint64, len(self._values))
        # The library asks CUDA about each allocation that the addresses come to in a row.
        order = np.argsort(dsts)
        dsts = dsts[order]
        values = np.fromiter(self._values.values(), np.uint32, len(self._values))[order]
        launch(
            lambda handle: lib.kvbm_kernels_launch_store_u32(
                ffi.from_buffer(_DSTS, dsts), ffi.from_buffer(_WORDS, values), len(values), handle
            ),
            stream,
            {"the tables": joined(list(self._memories.values()))},
        )
        self._values.clear()
        self._memories.clear()


def joined(memories: Sequence[Memory]) -> Memory:
    """The memory of several sides as that of one."""
    if len(memories) == 1:
        return memories[0]
    return Memory(
        [owner for memory in memories for owner in memory.owners],
        [owner for memory in memories for owner in memory.host_owners],
        set().union(*[memory.places for memory in memories]),
        next((memory.readonly for memory in memories if memory.readonly), ""),
    )


class Table(Uncopied):
    """Words of the host, and an array of a maker's that has the same once ``updates`` are published."""

    __slots__ = ("_noted_at", "_updates", "address", "array", "host", "memory")

    def __init__(self, host: Words, arrays: ArrayMaker, updates: Updates) -> None:
        self.host = host
        self.array = arrays.table(host)
        described = describe(self.array)
        self.address = described.address
        self.memory = memory_of(described, "the tables")
        if self.memory.is_host and self.address != host.ctypes.data:
            raise KvbmValueError(
                "arrays.table gave another array in host memory, expected the memory of the one it was given, or an "
                "array in CUDA memory"
            )
        self._noted_at = None if self.memory.is_host else self.address
        self._updates = updates

    def put(self, at: int, value: int) -> None:
        """Change one word."""
        if self._noted_at is not None and self.host[at] != value:
            self._updates.note(self.memory, self._noted_at + 4 * at, value)
        self.host[at] = value

    def put_all(self, start: int, values: Sequence[int]) -> None:
        """Change the words from one on."""
        if self._noted_at is None:
            self.host[start : start + len(values)] = values
            return
        new = np.array(values, np.uint32)
        old = self.host[start : start + len(new)]
        for i in np.flatnonzero(old != new).tolist():
            self._updates.note(self.memory, self._noted_at + 4 * (start + i), values[i])
        old[:] = new


class TokenMap(NamedTuple):
    """Where the tokens of a call lie: a ``kvbm_kernels_token_map *``, and the memory that its arrays are in."""

    c_map: Any
    memory: Memory


def token_map(block_size: int, table: Table, stride: int, num_sequences: int, starts: Table | int | None) -> TokenMap:
    """Sequences whose block tables are at the beginning of ``table``, ``stride`` words each.

    ``starts`` is where their first tokens are: the number of the word in the table, a table of their own, or None for
    the beginning of each.
    """
    memory = table.memory
    if isinstance(starts, Table):
        first, memory = starts.address, joined([memory, starts.memory])
    else:
        first = 0 if starts is None else table.address + 4 * starts
    c_map = ffi.new(
        _MAP,
        (
            ffi.sizeof("kvbm_kernels_token_map"),
            block_size,
            ffi.cast(_SLOTS, 0),
            ffi.cast(_TABLE, table.address),
            stride,
            ffi.cast(_TABLE, first),
            num_sequences,
        ),
    )
    return TokenMap(c_map, memory)


class SequenceTables(Uncopied):
    """The block tables and the lengths of some sequences, at addresses that stay."""

    __slots__ = (
        "__weakref__",
        "_arrays",
        "_lens_at",
        "_maps",
        "_null",
        "_table",
        "_updates",
        "block_table",
        "lens",
        "max_blocks",
        "num_sequences",
    )

    def __init__(
        self, num_sequences: int, max_blocks: int, null_block: int, arrays: ArrayMaker, updates: Updates
    ) -> None:
        self.num_sequences = num_sequences
        self.max_blocks = max_blocks
        words = num_sequences * max_blocks
        self._lens_at = -(-words // _ALIGNED) * _ALIGNED
        try:
            host = np.zeros(self._lens_at + num_sequences, np.uint32)
            host[:words] = null_block
        # NumPy has another error for what no machine holds.
        except (MemoryError, ValueError) as error:
            raise KvbmMemoryError(
                f"max_blocks is {max_blocks}: {4 * words} bytes for the table cannot be had: {error}"
            ) from None
        self._table = Table(host, arrays, updates)
        self._arrays = arrays
        self._updates = updates
        self._null = null_block
        self._maps: dict[tuple[int, bool], TokenMap] = {}
        self.block_table: Any = self._table.array[:words].reshape(num_sequences, max_blocks)
        """u32 ``[num_sequences, max_blocks]``, padded with the null block."""
        self.lens: Any = self._table.array[self._lens_at :]
        """u32 ``[num_sequences]``."""

    def put_blocks(self, row: int, start: int, blocks: Sequence[int], num_entries: int) -> None:
        """The table of a sequence names these blocks from ``start`` on; before, ``num_entries`` named one in all."""
        padding = [self._null] * (num_entries - start - len(blocks))
        self._table.put_all(row * self.max_blocks + start, [*blocks, *padding])

    def put_sequence(self, row: int, blocks: Sequence[int], n: int) -> None:
        """A sequence with these blocks and n tokens takes the place of another, or none does."""
        self.put_blocks(row, 0, blocks, self.max_blocks)
        self.put_len(row, n)

    def put_len(self, row: int, n: int) -> None:
        """A sequence has n tokens."""
        self._table.put(self._lens_at + row, n)

    def from_lens(self, block_size: int) -> TokenMap:
        """The tokens from the lengths on, as they are when a kernel reads them."""
        return self._map(block_size, True)

    def from_beginnings(self, block_size: int) -> TokenMap:
        """The tokens from the first on."""
        return self._map(block_size, False)

    def from_starts(self, block_size: int, starts: list[int], stream: StreamLike | None) -> TokenMap:
        """The tokens from these positions on, one for each sequence."""
        lens = self._table.host[self._lens_at :]
        if starts == lens.tolist():
            return self.from_lens(block_size)
        with self._arrays.on(stream):
            table = Table(np.array(starts, np.uint32), self._arrays, self._updates)
        return token_map(block_size, self._table, self.max_blocks, self.num_sequences, table)

    def _map(self, block_size: int, at_lens: bool) -> TokenMap:
        found = self._maps.get((block_size, at_lens))
        if found is None:
            starts = self._lens_at if at_lens else None
            found = token_map(block_size, self._table, self.max_blocks, self.num_sequences, starts)
            self._maps[block_size, at_lens] = found
        return found


class TableRows(Uncopied):
    """The rows that one sequence has: that in its own tables, and one in those of each batch that it is in."""

    __slots__ = ("_in_batches", "_num_entries", "own")

    def __init__(self, own: SequenceTables) -> None:
        self.own = own
        self._in_batches: list[tuple[weakref.ref[SequenceTables], int]] = []
        # How many entries name a block.
        self._num_entries = 0

    def put_blocks(self, ids: Sequence[int], start: int) -> None:
        """These are the blocks of the sequence; those before ``start`` are as they were."""
        for tables, row in self._all():
            tables.put_blocks(row, start, ids[start:], self._num_entries)
        self._num_entries = len(ids)

    def put_len(self, n: int) -> None:
        """The sequence has n tokens."""
        for tables, row in self._all():
            tables.put_len(row, n)

    def enter(self, tables: SequenceTables, row: int, ids: Sequence[int], n: int) -> None:
        """Have a row in the tables of a batch too, for as long as the batch has them."""
        self.leave(tables)
        self._in_batches.append((weakref.ref(tables), row))
        tables.put_sequence(row, ids, n)

    def leave(self, tables: SequenceTables) -> None:
        """Have no row there any more; what it says stays."""
        self._in_batches = [
            (reference, row) for reference, row in self._in_batches if reference() not in (None, tables)
        ]

    def _all(self) -> list[tuple[SequenceTables, int]]:
        found = [(self.own, 0)]
        for reference, row in self._in_batches:
            tables = reference()
            if tables is not None:
                found.append((tables, row))
        return found
