"""A cache in blocks of a pool that many sequences share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from kvbm_kernels._wording import a_type, counted
from kvbm_kernels.arrays import ArrayLike
from kvbm_kernels.block_pool import BlockPool, Part
from kvbm_kernels.blocks import BlockStack
from kvbm_kernels.copy import copy_views
from kvbm_kernels.csr import Csr, csr_of
from kvbm_kernels.errors import KvbmIndexError, KvbmTypeError, KvbmValueError
from kvbm_kernels.held_blocks import HeldBlocks, RoomMade
from kvbm_kernels.kv_cache import KvCache
from kvbm_kernels.kv_rows import Rows
from kvbm_kernels.kv_tables import SequenceTables
from kvbm_kernels.layouts import Layout, as_count, as_layout
from kvbm_kernels.prefix_cache import Tokens, as_tokens, block_hashes
from kvbm_kernels.streams import StreamLike
from kvbm_kernels.views import BlockIds, View

if TYPE_CHECKING:
    from typing_extensions import Self


class PagedKvCache(KvCache):
    """A cache in blocks taken from ``pool`` as they are needed.

    Its blocks may be shared with others, through :meth:`fork` and :meth:`attach_prefix`. A shared block is copied
    before this cache writes to it; who writes through :meth:`blocks` or the arrays has to look after that.
    """

    __slots__ = ("_block_table", "_held", "max_blocks", "pool")

    def __init__(
        self, pool: BlockPool, max_blocks: SupportsIndex | None = None, stream: StreamLike | None = None
    ) -> None:
        if not isinstance(pool, BlockPool):
            raise KvbmTypeError(f"pool is {a_type(pool)}, expected a BlockPool")
        self.pool = pool
        self.max_blocks = pool.num_blocks if max_blocks is None else as_count(max_blocks, "max_blocks", 1)
        pool.rows.check_stream(stream)
        super().__init__(pool.spec, pool.rows.arrays, pool.updates, self.max_blocks, pool.null_block, stream)
        self._held = HeldBlocks(pool, self.max_blocks, self._tables)
        self._block_table = self._tables.own.block_table[0]

    @property
    def k(self) -> Any:
        """K of the whole pool, ``[num_blocks, num_kv_heads, block_size, head_dim]``; the layers in front if several."""
        return self._without_layers(self.pool.k)

    @property
    def v(self) -> Any:
        """V of the whole pool, as :attr:`k`."""
        return self._without_layers(self.pool.v)

    @property
    def k_scales(self) -> Any:
        return self._without_layers(self.pool.k_scales)

    @property
    def v_scales(self) -> Any:
        return self._without_layers(self.pool.v_scales)

    @property
    def capacity(self) -> int:
        """Tokens that the block table has room for; the pool may run out before."""
        return self.max_blocks * self.block_size

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.pool.block_size

    @property
    def block_table(self) -> Any:
        """The block of each ``block_size`` tokens, u32 ``[max_blocks]``, padded with the null block. For kernels to
        read: it is the same array for the whole life of the cache."""
        return self._block_table

    @property
    def context_lens(self) -> Any:
        """The length, u32 ``[1]``. For kernels to read: it is the same memory for the whole life of the cache."""
        return self._tables.own.lens

    @property
    def paged_block_indices(self) -> list[int]:
        """The blocks the cache holds, in order, those among them that are only reserved."""
        return list(self._held.ids)

    def blocks(self, ids: BlockIds | None = None, *, of: Part = "kv") -> BlockStack:
        """The blocks with tokens in them, as a block stack that :func:`kvbm_kernels.copy_blocks` takes.

        ``ids`` are block ids of the pool, all of them this cache's; with them, blocks that are only reserved can be
        named too. ``of`` is as for :meth:`BlockPool.blocks`. Raises KvbmIndexError for a block the cache does not hold.
        """
        if ids is None:
            return self.pool.blocks(self._held.ids[: self._held.num_blocks(self._lens.longest)], of=of)
        view = self.pool.blocks(ids, of=of)
        named = view.geometry.ids
        strangers = set() if named is None else set(named.tolist()).difference(self._held.ids)
        if strangers:
            raise KvbmIndexError(
                f"block id {min(strangers)} is not among the {counted(len(self._held.ids), 'block')} of the cache"
            )
        return view

    def slot_mapping(self, start: SupportsIndex, n: SupportsIndex, *, stream: StreamLike | None = None) -> Any:
        """Where the ``n`` tokens from ``start`` on lie: block times block_size plus the place in the block, int64.

        The tokens may be ones to come, to be written there, if they are reserved. Raises KvbmIndexError for those the
        cache's blocks have no room for, and KvbmValueError for those to come in a block that others have too, or that
        is registered: :meth:`reserve` makes room in blocks of this cache alone.
        """
        self._rows().check_stream(stream)
        first, count = as_count(start, "start", 0), as_count(n, "n", 0)
        if first + count > self._room():
            raise KvbmIndexError(
                f"slot_mapping({first}, {count}) ends at {first + count}, expected at most {self._room()}: "
                "what the cache's blocks have room for"
            )
        self._check_writable(max(first, self.len), first + count)
        slots = [block * self.block_size + token for block, token in self._slots(first, first + count)]
        with self._rows().arrays.on(stream):
            return self._rows().arrays.table(np.array(slots, np.int64))

    def csr(self, *, stream: StreamLike | None = None) -> Csr:
        """The blocks with tokens, as FlashInfer takes them, for this sequence alone."""
        self._rows().check_stream(stream)
        with self._rows().arrays.on(stream):
            return csr_of([(len(self), self._held.ids)], self.block_size, self._rows().arrays)

    def write(
        self,
        k: ArrayLike,
        v: ArrayLike,
        *,
        layer: SupportsIndex | None = None,
        order: Layout | str = "NHD",
        stream: StreamLike | None = None,
    ) -> None:
        """Put K and V where the block table and the length say that the next tokens lie, and count nothing.

        The arrays are as for :meth:`append`, and may not lie in the pool. :meth:`reserve` comes before: a token without
        a block is skipped, and a block that others have too is written. :meth:`advance` counts the tokens afterwards.

        In CUDA memory, all there is to it is a kernel or two that read table and length when the stream gets there: it
        can be captured in a graph, and replayed as the sequence grows.
        """
        self._check_usable(stream)
        layers = self._spec.layer_range(layer)
        rows = self._rows().given(k, v, layer, as_layout(order, "order"))
        self._rows().append(rows, layers, self._tables.own.from_lens(self.block_size), None, stream)

    def fork(self, *, stream: StreamLike | None = None) -> Self:
        """Another cache with the same tokens, at the cost of at most one block.

        Full blocks are shared; a block that is not full is copied. What is reserved stays with this cache.
        Raises OutOfBlocks, and KvbmValueError while layers differ in length.
        """
        self._check_usable(stream)
        n = self._lens.even("fork")
        full, rest = divmod(n, self.block_size)
        child = type(self)(self.pool, self.max_blocks, stream)
        tail = self._held.copies(self._held.ids[full : full + bool(rest)], stream)
        shared = self._held.ids[:full]
        self.pool.allocator.acquire(shared)
        child._held.hold(shared + tail)
        child._set_lens((0, self.num_layers), n)
        self._updates.publish(stream)
        return child

    def attach_prefix(self, tokens: Tokens, *, extra: bytes = b"", stream: StreamLike | None = None) -> int:
        """Begin an empty cache with the blocks of a registered prefix of these tokens; gives how many were found.

        Only full blocks are found, and never the last token: there is always one to compute. ``extra`` is as for
        :func:`block_hashes`. Raises KvbmTypeError and KvbmValueError.
        """
        self._check_usable(stream)
        self._check_empty("attach_prefix")
        numbers = as_tokens(tokens)
        most = min(max(len(numbers) - 1, 0) // self.block_size, self.max_blocks)
        hashes = block_hashes(numbers[: most * self.block_size], self.block_size, extra=extra)
        found = self.pool.allocator.lookup(hashes)
        self._held.hold(found)
        self._set_lens((0, self.num_layers), len(found) * self.block_size)
        self._updates.publish(stream)
        return self.len

    def register_prefix(self, tokens: Tokens, *, extra: bytes = b"") -> int:
        """Make the full blocks of this cache findable by :meth:`attach_prefix`; gives how many were not before.

        ``tokens`` are those whose K and V the cache holds, from the first on; there may be more of them, or fewer.
        Raises KvbmTypeError and KvbmValueError.
        """
        self._check_usable(None)
        numbers = as_tokens(tokens)[: self.len]
        hashes = block_hashes(numbers, self.block_size, extra=extra)
        return sum(map(self.pool.allocator.register, self._held.ids[: len(hashes)], hashes))

    def restore(self, src: View | tuple[View, View], n: SupportsIndex, *, stream: StreamLike | None = None) -> None:
        """Fill an empty cache with ``n`` tokens from a view of as many blocks as they need, in any layout.

        The way back from ``copy_blocks(saved, cache.blocks())``. With different head dimensions for K and V, ``src`` is
        a view of each. Raises what :func:`kvbm_kernels.copy_blocks` raises, OutOfBlocks and CapacityError.
        """
        self._check_usable(stream)
        self._check_empty("restore")
        count = as_count(n, "n", 0)
        views = {"k": src[0], "v": src[1]} if isinstance(src, tuple) and len(src) == 2 else {"kv": src}
        for view in views.values():
            if not isinstance(view, View):
                raise KvbmTypeError(f"src is {a_type(view)}, expected a view, or a pair of views of K and V")
        undo = self._make_room(0, count, stream)
        try:
            for of, view in views.items():
                copy_views(self.pool.blocks(self._held.ids, of=of), view, stream, "the cache", "src")  # type: ignore[arg-type]
        except BaseException:
            self._take_back(undo)
            self._updates.publish(stream)
            raise
        self._set_lens((0, self.num_layers), count)
        self._updates.publish(stream)

    def view(self, layer: SupportsIndex | None = None) -> tuple[Any, Any]:
        layers = self._spec.layer_range(layer)
        n = self.len if layer is None else self._lens[layers[0]]
        ids = self._held.ids[: self._held.num_blocks(n)]
        first = ids[0] if ids else 0
        self._check_not_quantised()
        one = layers[0] if layer is not None or self.num_layers == 1 else slice(None)
        nhd = self.pool.layout is Layout.NHD
        if len(ids) > 1 and (not nhd or ids != list(range(first, first + len(ids)))):
            raise KvbmValueError(
                f"view: the tokens lie in blocks {ids[0]}, {ids[1]} and so on, expected one block, or in NHD blocks in "
                "a row: use gather"
            )
        found = []
        for array in (self.pool.k, self.pool.v):
            pages = array[one, first : first + max(len(ids), 1)]
            if nhd:
                rows = pages.reshape(*pages.shape[:-4], -1, *pages.shape[-2:])
            else:
                rows = pages[..., 0, :, :, :].swapaxes(-3, -2)
            found.append(rows[..., :n, :, :])
        return found[0], found[1]

    def _without_layers(self, array: Any) -> Any:
        return array if array is None or self.num_layers > 1 else array[0]

    def _rows(self) -> Rows:
        return self.pool.rows

    def _slots(self, start: int, stop: int) -> list[tuple[int, int]]:
        return self._held.slots(start, stop)

    def _room(self) -> int:
        return self._held.room

    def _check_writable(self, start: int, stop: int) -> None:
        self._held.check_writable(start, stop)

    def _make_room(self, start: int, stop: int, stream: StreamLike | None) -> RoomMade:
        return self._held.make_room(start, stop, stream)

    def _copied(self, undo: RoomMade) -> list[int]:
        return self._held.copied(undo)

    def _take_back(self, undo: RoomMade) -> None:
        self._held.take_back(undo)

    def _room_is_taken(self, undo: RoomMade) -> None:
        self._held.keep(undo)

    def _give_back(self, n: int) -> None:
        self._held.give_back(n)

    def _enter(self, tables: SequenceTables, row: int) -> None:
        """Have a row in the tables of a batch, for as long as the batch has them."""
        self._tables.enter(tables, row, self._held.ids, self._lens.shortest)

    def _check_empty(self, what: str) -> None:
        n, held = self._lens.longest, len(self._held.ids)
        if n or held:
            raise KvbmValueError(
                f"{what}: the cache has {counted(n, 'token')} and {counted(held, 'block')}, expected an empty one"
            )
