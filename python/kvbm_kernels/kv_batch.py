"""A step of several sequences at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, SupportsIndex

from kvbm_kernels._wording import a_type
from kvbm_kernels.arrays import ArrayLike
from kvbm_kernels.block_allocator import OutOfBlocks
from kvbm_kernels.block_pool import BlockPool
from kvbm_kernels.csr import Csr, csr_of
from kvbm_kernels.errors import KvbmIndexError, KvbmTypeError, KvbmValueError, Uncopied
from kvbm_kernels.held_blocks import NOTHING, RoomMade
from kvbm_kernels.kv_rows import TokenRows
from kvbm_kernels.kv_tables import SequenceTables
from kvbm_kernels.layouts import Layout, as_count, as_integer, as_layout
from kvbm_kernels.paged_cache import PagedKvCache
from kvbm_kernels.streams import StreamLike


class BatchTables(NamedTuple):
    """The tables of several sequences, for an attention kernel."""

    block_table: Any
    """u32 ``[batch, max_blocks]``, padded with the null block."""
    context_lens: Any
    """u32 ``[batch]``."""


class KvBatch(Uncopied):
    """Paged caches of one pool, no cache twice, in the slots of a batch: what a decode step works on.

    An entry of ``caches`` that is None is an empty slot; :meth:`replace` fills and empties slots later. ``pool`` has to
    be said only where all are empty. ``max_blocks`` is the width of the batch's block table, None for that of the
    widest table among the caches, or of the pool if there is none; no cache may have a longer table.

    A batch has a table and lengths of its own, at addresses that stay. They say of each sequence what its own do, also
    after calls of the caches themselves; an empty slot has only null blocks, and no tokens.

    A step is :meth:`append`, or in three parts: :meth:`reserve`, which takes blocks; :meth:`write`, once for all layers
    or once for each, which is work of the device alone; and :meth:`advance`, which counts. What ``write`` puts on a
    stream can be captured in a CUDA graph and replayed between the two others, whatever sequences are in the slots.

    ``stream`` is as for :class:`KvCache`. Raises KvbmTypeError and KvbmValueError.
    """

    __slots__ = ("_tables", "caches", "pool")

    def __init__(
        self,
        caches: Sequence[PagedKvCache | None],
        *,
        pool: BlockPool | None = None,
        max_blocks: SupportsIndex | None = None,
        stream: StreamLike | None = None,
    ) -> None:
        self.caches = tuple(caches)
        if not self.caches:
            raise KvbmValueError("caches has no entries, expected one or more")
        if pool is not None and not isinstance(pool, BlockPool):
            raise KvbmTypeError(f"pool is {a_type(pool)}, expected a BlockPool")
        first = f"caches[{next((i for i, cache in enumerate(self.caches) if cache is not None), 0)}]"
        for i, cache in enumerate(self.caches):
            if cache is None:
                continue
            if not isinstance(cache, PagedKvCache):
                raise KvbmTypeError(f"caches[{i}] is {a_type(cache)}, expected a paged KvCache")
            if pool is None:
                pool = cache.pool
            elif cache.pool is not pool:
                raise KvbmValueError(f"caches[{i}] is of another pool than {first}, expected the same")
        if pool is None:
            raise KvbmValueError("caches has only None, expected a cache, or a pool as well")
        self.pool = pool
        live = self._live()
        if len(set(map(id, live))) < len(live):
            raise KvbmValueError("caches has the same cache twice, expected different ones")
        pool.rows.check_stream(stream)
        widest = max((cache.max_blocks for cache in live), default=pool.num_blocks)
        width = widest if max_blocks is None else as_count(max_blocks, "max_blocks", 1)
        for i, cache in enumerate(self.caches):
            if cache is not None:
                _check_fits(cache, width, f"caches[{i}]")
        with pool.rows.arrays.on(stream):
            self._tables = SequenceTables(len(self.caches), width, pool.null_block, pool.rows.arrays, pool.updates)
        for i, cache in enumerate(self.caches):
            if cache is not None:
                cache._enter(self._tables, i)
        pool.updates.publish(stream)

    def __len__(self) -> int:
        return len(self.caches)

    @property
    def max_blocks(self) -> int:
        """The width of the block table."""
        return self._tables.max_blocks

    @property
    def block_table(self) -> Any:
        """The block tables of all slots, u32 ``[batch, max_blocks]``, padded with the null block. For kernels to read:
        it is the same array for the whole life of the batch."""
        return self._tables.block_table

    @property
    def context_lens(self) -> Any:
        """The lengths, u32 ``[batch]``, 0 for an empty slot. It is the same array for the whole life of the batch."""
        return self._tables.lens

    def tables(self, max_blocks: SupportsIndex | None = None) -> BatchTables:
        """:attr:`block_table` cut to the columns that are needed, and :attr:`context_lens`; nothing is copied.

        ``max_blocks`` is how many columns, None for the most blocks that one of the caches holds, and 1 at least.
        Raises KvbmValueError if a cache holds more, or the table is not that wide.
        """
        most = max((len(cache._held.ids) for cache in self._live()), default=0)
        width = max(most, 1) if max_blocks is None else as_count(max_blocks, "max_blocks", 1)
        if width < most:
            raise KvbmValueError(f"max_blocks is {width}, expected at least {most}: what one of the caches holds")
        if width > self.max_blocks:
            raise KvbmValueError(f"max_blocks is {width}, expected at most {self.max_blocks}, the batch's own")
        return BatchTables(self.block_table[:, :width], self.context_lens)

    def csr(self, *, stream: StreamLike | None = None) -> Csr:
        """The blocks with tokens, as FlashInfer takes them; an empty slot has none."""
        self.pool.rows.check_stream(stream)
        sequences = [(0, []) if cache is None else (len(cache), cache._held.ids) for cache in self.caches]
        with self.pool.rows.arrays.on(stream):
            return csr_of(sequences, self.pool.block_size, self.pool.rows.arrays)

    def replace(
        self, slot: SupportsIndex, cache: PagedKvCache | None, *, stream: StreamLike | None = None
    ) -> PagedKvCache | None:
        """Put a cache in a slot, None to empty it; gives the cache that was there, which is otherwise left alone.

        Raises KvbmIndexError for a slot that is none, KvbmTypeError, and KvbmValueError for a cache of another pool,
        with a longer table, or in another slot.
        """
        self.pool.rows.check_stream(stream)
        number = as_integer(slot)
        if number is None:
            raise KvbmTypeError(f"slot is {slot!r}, expected an integer")
        if not 0 <= number < len(self):
            raise KvbmIndexError(f"slot is {number}, expected 0 to {len(self) - 1}")
        old = self.caches[number]
        if cache is old:
            return old
        if cache is not None:
            if not isinstance(cache, PagedKvCache):
                raise KvbmTypeError(f"cache is {a_type(cache)}, expected a paged KvCache or None")
            if cache.pool is not self.pool:
                raise KvbmValueError("cache is of another pool than the batch, expected the same")
            if any(cache is other for other in self.caches):
                raise KvbmValueError(f"cache is in slot {self.caches.index(cache)} already, expected one in none")
            _check_fits(cache, self.max_blocks, "cache")
        if old is not None:
            old._tables.leave(self._tables)
        if cache is None:
            self._tables.put_sequence(number, [], 0)
        else:
            cache._enter(self._tables, number)
        self.caches = (*self.caches[:number], cache, *self.caches[number + 1 :])
        self.pool.updates.publish(stream)
        return old

    def append(
        self,
        k: ArrayLike,
        v: ArrayLike,
        *,
        layer: SupportsIndex | None = None,
        order: Layout | str = "NHD",
        stream: StreamLike | None = None,
    ) -> None:
        """Add tokens to each cache, as many to all, in one copy, all or nothing.

        K and V are ``[num_layers, batch * n, num_kv_heads, head_dim]`` for all layers, or without the first for one
        layer; the n tokens of a slot are next to each other, and those of an empty slot are left out.
        Raises what :meth:`KvCache.append` raises.
        """
        live = self._usable(stream)
        layers = self.pool.spec.layer_range(layer)
        rows, n = self._given(k, v, layer, order)
        if not n:
            return
        if layer is None:
            starts = [cache._lens.even("append without a layer") for cache in live]
        else:
            starts = [cache._lens[layers[0]] for cache in live]
        undos = self._make_room([(start, start + n) for start in starts], live, stream)
        try:
            self.pool.updates.publish(stream)
            position = iter(starts)
            of_slots = [0 if cache is None else next(position) for cache in self.caches]
            places = self._tables.from_starts(self.pool.block_size, of_slots, stream)

            def written() -> list[tuple[int, int]]:
                each = [cache._held.slots(start, start + n) for cache, start in zip(live, starts, strict=True)]
                return [slot for slots in each for slot in slots]

            copied = [block for cache, undo in zip(live, undos, strict=True) for block in cache._held.copied(undo)]
            self.pool.rows.append(rows, layers, places, written, stream, copied)
        except BaseException:
            self._take_back(undos, live)
            self.pool.updates.publish(stream)
            raise
        for cache, undo, start in zip(live, undos, starts, strict=True):
            cache._held.keep(undo)
            cache._set_lens(layers, start + n)
        self.pool.updates.publish(stream)

    def reserve(self, n: SupportsIndex = 1, *, stream: StreamLike | None = None) -> None:
        """Make room for ``n`` more tokens in each cache, all or nothing. Raises OutOfBlocks and CapacityError."""
        live = self._usable(stream)
        count = as_count(n, "n", 0)
        ranges = [(cache._lens.shortest, max(cache._lens.shortest + count, cache._lens.longest)) for cache in live]
        for cache, undo in zip(live, self._make_room(ranges, live, stream), strict=True):
            cache._held.keep(undo)
        self.pool.updates.publish(stream)

    def write(
        self,
        k: ArrayLike,
        v: ArrayLike,
        *,
        layer: SupportsIndex | None = None,
        order: Layout | str = "NHD",
        stream: StreamLike | None = None,
    ) -> None:
        """Put K and V where :attr:`block_table` and :attr:`context_lens` say that the next tokens lie; count nothing.

        The arrays are as for :meth:`append`, and may not lie in the pool. :meth:`reserve` comes before: a token without
        a block is skipped, and a block that others have too is written. :meth:`advance` counts the tokens afterwards.

        In CUDA memory, all there is to it is a kernel or two that read table and lengths when the stream gets there: it
        can be captured in a graph, and replayed as the sequences grow and slots are replaced.
        """
        self.pool.rows.check_stream(stream)
        layers = self.pool.spec.layer_range(layer)
        rows, _ = self._given(k, v, layer, order)
        self.pool.rows.append(rows, layers, self._tables.from_lens(self.pool.block_size), None, stream)

    def advance(self, n: SupportsIndex = 1, *, stream: StreamLike | None = None) -> None:
        """Count ``n`` more tokens in all layers of each cache, those that :meth:`write` put there.

        Raises KvbmValueError as :meth:`KvCache.advance` does, and then counts none.
        """
        live = self._usable(stream)
        count = as_count(n, "n", 0)
        lens = [cache._advanced(count) for cache in live]
        for cache, length in zip(live, lens, strict=True):
            cache._set_lens((0, self.pool.num_layers), length)
        self.pool.updates.publish(stream)

    def _live(self) -> list[PagedKvCache]:
        return [cache for cache in self.caches if cache is not None]

    def _usable(self, stream: StreamLike | None) -> list[PagedKvCache]:
        """The caches in the slots, all of which can be used."""
        self.pool.rows.check_stream(stream)
        for slot, cache in enumerate(self.caches):
            if cache is not None and cache._released:
                raise KvbmValueError(f"the cache in slot {slot} was released, expected one in use: replace it")
        return self._live()

    def _given(
        self, k: ArrayLike, v: ArrayLike, layer: SupportsIndex | None, order: Layout | str
    ) -> tuple[TokenRows, int]:
        """Rows for all slots, and how many tokens of each."""
        rows = self.pool.rows.given(k, v, layer, as_layout(order, "order"))
        n, rest = divmod(rows.num_tokens, len(self))
        if rest:
            raise KvbmValueError(f"k has rows for {rows.num_tokens} tokens, expected a multiple of {len(self)} slots")
        return rows, n

    def _make_room(
        self, ranges: list[tuple[int, int]], live: list[PagedKvCache], stream: StreamLike | None
    ) -> list[RoomMade]:
        """Make these tokens of each cache writable; gives what it takes to undo it."""
        parts = list(zip(live, ranges, strict=True))
        unready = [not cache._held.is_ready(*tokens) for cache, tokens in parts]
        missing = sum(cache._held.missing(*tokens) for (cache, tokens), do in zip(parts, unready, strict=True) if do)
        allocator = self.pool.allocator
        if missing > allocator.num_free:
            raise OutOfBlocks(missing, allocator.num_free)
        undos: list[RoomMade] = []
        try:
            for (cache, tokens), do in zip(parts, unready, strict=True):
                undos.append(cache._held.make_room(*tokens, stream) if do else NOTHING)
        except BaseException:
            self._take_back(undos, live)
            self.pool.updates.publish(stream)
            raise
        return undos

    def _take_back(self, undos: list[RoomMade], live: list[PagedKvCache]) -> None:
        for cache, undo in reversed(list(zip(live, undos, strict=False))):
            cache._held.take_back(undo)


def _check_fits(cache: PagedKvCache, max_blocks: int, name: str) -> None:
    if cache.max_blocks > max_blocks:
        raise KvbmValueError(
            f"{name} has a table of {cache.max_blocks} blocks, expected at most max_blocks = {max_blocks} of the batch"
        )
