"""A cache in blocks of a pool that many sequences share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

import numpy as np

from kvbm_kernels.block_pool import BlockPool, Part
from kvbm_kernels.blocks import BlockStack
from kvbm_kernels.copy import copy_views
from kvbm_kernels.errors import KvbmIndexError, KvbmTypeError, KvbmValueError
from kvbm_kernels.kv_cache import CapacityError, KvCache
from kvbm_kernels.kv_rows import Rows
from kvbm_kernels.layouts import Layout, as_count
from kvbm_kernels.prefix_cache import Tokens, as_tokens, block_hashes
from kvbm_kernels.views import BlockIds, View

if TYPE_CHECKING:
    from typing_extensions import Self


class Csr(NamedTuple):
    """The blocks of sequences one after another, as FlashInfer takes them; all int32."""

    indptr: Any
    """``[batch + 1]``: where the blocks of each sequence begin in ``indices``, and where the last one's end."""
    indices: Any
    """The blocks."""
    last_page_len: Any
    """``[batch]``: tokens in the last block of each sequence, 1 to block_size; 0 for a sequence without tokens."""


class _Undo(NamedTuple):
    """What making room changed."""

    held: int
    """How many blocks the cache had."""
    replaced: list[tuple[int, int]]
    """Positions in the table, and the shared block that was there before its copy."""
    forgotten: list[tuple[int, bytes]]
    """Blocks that are about to change, and the hashes of what they held."""


class PagedKvCache(KvCache):
    """A cache in blocks taken from ``pool`` as they are needed.

    Its blocks may be shared with others, through :meth:`fork` and :meth:`attach_prefix`. A shared block is copied
    before this cache writes to it; who writes through :meth:`blocks` or the arrays has to look after that.
    """

    __slots__ = ("_blocks", "_entries", "_table", "_table_array", "max_blocks", "pool")

    def __init__(self, pool: BlockPool, max_blocks: SupportsIndex | None = None) -> None:
        if not isinstance(pool, BlockPool):
            raise KvbmTypeError(f"pool is a {type(pool).__name__}, expected a BlockPool")
        super().__init__(pool.spec, pool.rows.arrays)
        self.pool = pool
        self.max_blocks = pool.num_blocks if max_blocks is None else as_count(max_blocks, "max_blocks", 1)
        self._blocks: list[int] = []
        # How many entries of the table name one.
        self._entries = 0
        self._table = np.full(self.max_blocks, pool.null_block, np.uint32)
        self._table_array = pool.rows.arrays.table(self._table)

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
        return self._table_array

    @property
    def context_lens(self) -> Any:
        """The length, u32 ``[1]``. For kernels to read: it is the same memory for the whole life of the cache."""
        return self._counts_table[self.num_layers :]

    @property
    def paged_block_indices(self) -> list[int]:
        """The blocks the cache holds, in order, those among them that are only reserved."""
        return list(self._blocks)

    def blocks(self, ids: BlockIds | None = None, *, of: Part = "kv") -> BlockStack:
        """The blocks with tokens in them, as a block stack that :func:`kvbm_kernels.copy_blocks` takes.

        ``ids`` are block ids of the pool, all of them this cache's; with them, blocks that are only reserved can be
        named too. ``of`` is as for :meth:`BlockPool.blocks`. Raises KvbmIndexError for a block the cache does not hold.
        """
        if ids is None:
            return self.pool.blocks(self._blocks[: self._num_blocks(max(self._lens))], of=of)
        view = self.pool.blocks(ids, of=of)
        named = view.geometry.ids
        strangers = set() if named is None else set(named.tolist()).difference(self._blocks)
        if strangers:
            raise KvbmIndexError(f"block id {min(strangers)} is not among the {len(self._blocks)} blocks of the cache")
        return view

    def slot_mapping(self, start: SupportsIndex, n: SupportsIndex) -> Any:
        """Where the ``n`` tokens from ``start`` on lie: block times block_size plus the place in the block, int64.

        The tokens may be ones to come, to be written there, if they are reserved. Raises KvbmIndexError for those the
        cache's blocks have no room for, and KvbmValueError for those to come in a block that others have too, or that
        is registered: :meth:`reserve` makes room in blocks of this cache alone.
        """
        first, count = as_count(start, "start", 0), as_count(n, "n", 0)
        if first + count > self._room():
            raise KvbmIndexError(
                f"slot_mapping({first}, {count}) ends at {first + count}, expected at most {self._room()}: "
                "what the cache's blocks have room for"
            )
        self._check_writable(max(first, self.len), first + count)
        positions = np.arange(first, first + count)
        blocks, tokens = np.divmod(positions, self.block_size)
        return self._rows().arrays.table(self._table[blocks].astype(np.int64) * self.block_size + tokens)

    def csr(self) -> Csr:
        """The blocks with tokens, as FlashInfer takes them, for this sequence alone."""
        return csr_of([self])

    def fork(self) -> Self:
        """Another cache with the same tokens, at the cost of at most one block.

        Full blocks are shared; a block that is not full is copied. What is reserved stays with this cache.
        Raises OutOfBlocks, and KvbmValueError while layers differ in length.
        """
        self._check_usable()
        n = self._even_len("fork")
        full, rest = divmod(n, self.block_size)
        allocator = self.pool.allocator
        child = type(self)(self.pool, self.max_blocks)
        tail = allocator.allocate(1 if rest else 0)
        if tail:
            self._copy_blocks(tail, self._blocks[full : full + 1])
        allocator.acquire(self._blocks[:full])
        child._hold(self._blocks[:full] + tail)
        child._set_lens((0, self.num_layers), n)
        return child

    def attach_prefix(self, tokens: Tokens, *, extra: bytes = b"") -> int:
        """Begin an empty cache with the blocks of a registered prefix of these tokens; gives how many were found.

        Only full blocks are found, and never the last token: there is always one to compute. ``extra`` is as for
        :func:`block_hashes`. Raises KvbmTypeError and KvbmValueError.
        """
        self._check_usable()
        self._check_empty("attach_prefix")
        numbers = as_tokens(tokens)
        most = min(max(len(numbers) - 1, 0) // self.block_size, self.max_blocks)
        hashes = block_hashes(numbers[: most * self.block_size], self.block_size, extra=extra)
        found = self.pool.allocator.lookup(hashes)
        self._hold(found)
        self._set_lens((0, self.num_layers), len(found) * self.block_size)
        return self.len

    def register_prefix(self, tokens: Tokens, *, extra: bytes = b"") -> int:
        """Make the full blocks of this cache findable by :meth:`attach_prefix`; gives how many were not before.

        ``tokens`` are those whose K and V the cache holds, from the first on; there may be more of them, or fewer.
        Raises KvbmTypeError and KvbmValueError.
        """
        self._check_usable()
        numbers = as_tokens(tokens)[: self.len]
        hashes = block_hashes(numbers, self.block_size, extra=extra)
        return sum(map(self.pool.allocator.register, self._blocks[: len(hashes)], hashes))

    def restore(self, src: View | tuple[View, View], n: SupportsIndex) -> None:
        """Fill an empty cache with ``n`` tokens from a view of as many blocks as they need, in any layout.

        The way back from ``copy_blocks(saved, cache.blocks())``. With different head dimensions for K and V, ``src`` is
        a view of each. Raises what :func:`kvbm_kernels.copy_blocks` raises, OutOfBlocks and CapacityError.
        """
        self._check_usable()
        self._check_empty("restore")
        count = as_count(n, "n", 0)
        views = {"k": src[0], "v": src[1]} if isinstance(src, tuple) and len(src) == 2 else {"kv": src}
        for view in views.values():
            if not isinstance(view, View):
                raise KvbmTypeError(f"src is a {type(view).__name__}, expected a view, or a pair of views of K and V")
        undo = self._make_room(0, count)
        try:
            for of, view in views.items():
                copy_views(self.pool.blocks(self._blocks, of=of), view, None, "the cache", "src")  # type: ignore[arg-type]
        except BaseException:
            self._take_back(undo)
            raise
        self._set_lens((0, self.num_layers), count)

    def view(self, layer: SupportsIndex | None = None) -> tuple[Any, Any]:
        layers = self._spec.layer_range(layer)
        n = self.len if layer is None else self._lens[layers[0]]
        ids = self._blocks[: self._num_blocks(n)]
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

    def _places(self) -> list[int]:
        return self._blocks

    def _room(self) -> int:
        return len(self._blocks) * self.block_size

    def _num_blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _changed(self, start: int, stop: int) -> range:
        """Where in the table there are blocks that writing these tokens would change."""
        if start == stop:
            return range(0)
        return range(start // self.block_size, min(self._num_blocks(stop), len(self._blocks)))

    def _shared(self, start: int, stop: int) -> list[int]:
        """Where in the table there are blocks of others that writing these tokens would change."""
        held = self._changed(start, stop)
        references = self.pool.allocator.refcount
        return [i for i in held if references(self._blocks[i]) > 1]

    def _check_writable(self, start: int, stop: int) -> None:
        allocator = self.pool.allocator
        # Nothing is to be written where the tokens are all there.
        for i in self._changed(start, max(start, stop)):
            block = self._blocks[i]
            if not allocator.is_writable(block):
                why = "others have too" if allocator.refcount(block) > 1 else "is registered"
                raise KvbmValueError(
                    f"token {max(start, i * self.block_size)} would be written to block {block}, which "
                    f"{why}: reserve comes first"
                )

    def _missing(self, start: int, stop: int) -> int:
        """Blocks that _make_room() would take. Raises CapacityError."""
        if stop > self.capacity:
            raise CapacityError(stop, self.capacity)
        return max(self._num_blocks(stop) - len(self._blocks), 0) + len(self._shared(start, stop))

    def _make_room(self, start: int, stop: int) -> _Undo:
        missing = self._missing(start, stop)
        held = len(self._blocks)
        changed = self._changed(start, stop)
        undo = _Undo(held, [], [])
        allocator = self.pool.allocator
        if missing:
            shared = self._shared(start, stop)
            fresh = allocator.allocate(missing)
            copies, added = fresh[: len(shared)], fresh[len(shared) :]
            if shared:
                self._copy_blocks(copies, [self._blocks[i] for i in shared])
            for i, copy in zip(shared, copies, strict=True):
                undo.replaced.append((i, self._blocks[i]))
                self._blocks[i] = copy
            self._blocks += added
            self._publish(min(shared, default=held))
        # A block of this cache alone is written where it is, and no longer what was registered.
        for block in self._blocks[changed.start : changed.stop]:
            digest = allocator.digest_of(block)
            if digest is not None:
                undo.forgotten.append((block, digest))
                allocator.forget(block)
        return undo

    def _take_back(self, undo: _Undo) -> None:
        allocator = self.pool.allocator
        # In the order they came, so that the next to ask is given the same.
        fresh = [self._blocks[i] for i, _ in undo.replaced] + self._blocks[undo.held :]
        del self._blocks[undo.held :]
        for i, block in undo.replaced:
            self._blocks[i] = block
        allocator.free(fresh)
        self._publish(0)
        for block, digest in undo.forgotten:
            allocator.register(block, digest)

    def _room_is_taken(self, undo: _Undo) -> None:
        if undo.replaced:
            self.pool.allocator.free([block for _, block in undo.replaced])

    def _give_back(self, n: int) -> None:
        keep = self._num_blocks(n)
        self.pool.allocator.free(self._blocks[keep:])
        del self._blocks[keep:]
        self._publish(keep)

    def _hold(self, blocks: list[int]) -> None:
        self._blocks = blocks
        self._publish(0)

    def _publish(self, start: int) -> None:
        """Bring the table up to date from one entry on."""
        held = len(self._blocks)
        self._table[start:held] = self._blocks[start:]
        self._table[held : self._entries] = self.pool.null_block
        self._entries = held
        self.pool.rows.arrays.publish(self._table_array, self._table)

    def _copy_blocks(self, dsts: list[int], srcs: list[int]) -> None:
        try:
            self.pool.rows.copy_blocks(dsts, srcs)
        except BaseException:
            self.pool.allocator.free(dsts)
            raise

    def _check_empty(self, what: str) -> None:
        if self._blocks or any(self._lens):
            raise KvbmValueError(
                f"{what}: the cache has {max(self._lens)} tokens and {len(self._blocks)} blocks, expected an empty one"
            )


def csr_of(caches: Sequence[PagedKvCache]) -> Csr:
    """The blocks of several caches of one pool, as FlashInfer takes them."""
    blocks: list[int] = []
    indptr, last = [0], []
    for cache in caches:
        n, size = len(cache), cache.block_size
        blocks += cache._blocks[: cache._num_blocks(n)]
        indptr.append(len(blocks))
        last.append((n - 1) % size + 1 if n else 0)
    table = caches[0].pool.rows.arrays.table
    return Csr(*[table(np.array(numbers, np.int32)) for numbers in (indptr, blocks, last)])
