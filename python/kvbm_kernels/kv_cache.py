"""The keys and values of one sequence: what contiguous and paged caches have in common."""

from __future__ import annotations

import abc
from types import TracebackType
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from kvbm_kernels._wording import counted
from kvbm_kernels.arrays import ArrayLike
from kvbm_kernels.dtypes import DTypeLike
from kvbm_kernels.errors import KvbmValueError, Uncopied
from kvbm_kernels.kv_arrays import ArrayMaker, as_arrays
from kvbm_kernels.kv_dtypes import KvDtypeLike, KvFp16
from kvbm_kernels.kv_layer import LayerCache
from kvbm_kernels.kv_row_spec import RowSpec
from kvbm_kernels.kv_rows import Rows
from kvbm_kernels.kv_tables import SequenceTables, Table, TableRows, Updates
from kvbm_kernels.layer_lengths import LayerLengths
from kvbm_kernels.layouts import Layout, as_count, as_layout
from kvbm_kernels.streams import StreamLike

if TYPE_CHECKING:
    from typing_extensions import Self

    from kvbm_kernels.block_pool import BlockPool
    from kvbm_kernels.contiguous_cache import ContiguousKvCache
    from kvbm_kernels.paged_cache import PagedKvCache


class CapacityError(KvbmValueError):
    """More tokens than a cache may ever hold: ``needed`` and ``capacity`` say how many. Nothing was written."""

    def __init__(self, needed: int, capacity: int) -> None:
        super().__init__(
            f"{counted(needed, 'token')} {'is' if needed == 1 else 'are'} needed and the capacity is {capacity}"
        )
        self.needed = needed
        self.capacity = capacity

    def __reduce__(self) -> tuple[type[CapacityError], tuple[int, int]]:
        return type(self), (self.needed, self.capacity)


class KvCache(Uncopied, abc.ABC):
    """K and V of one sequence, for all layers of a model; made by :meth:`contiguous` or :meth:`paged`.

    The fields are those that the cache of one layer has in an engine. ``k`` and ``v`` have a dimension for the layers
    in front if the cache has several; ``layer(i)`` gives an object for one of them whose ``k`` and ``v`` have not.

    ``len(cache)`` tokens are in all layers. Appended to layer by layer, a layer can be ahead of that; its own object
    tells how far.

    A call that raises has changed nothing. A cache is for one thread at a time. After :meth:`release`, or at the end of
    a ``with`` block, it holds nothing and takes nothing more. A cache that is merely dropped keeps its blocks for as
    long as the pool lives: a kernel may still be at them.

    In CUDA memory, calls put their work on ``stream`` and return: a handle, a stream of PyTorch or CuPy, or an object
    with ``__cuda_stream__``; None is the current stream of the arrays' library. In host memory it has to be None, and
    the work is done when they return. docs/kv_cache.md says what has to be in which order.
    """

    __slots__ = ("__weakref__", "_layer_lens", "_lens", "_released", "_spec", "_tables", "_updates")

    def __init__(
        self,
        spec: RowSpec,
        arrays: ArrayMaker,
        updates: Updates,
        max_blocks: int,
        null_block: int,
        stream: StreamLike | None,
    ) -> None:
        self._spec = spec
        self._released = False
        self._lens = LayerLengths(spec.num_layers)
        self._updates = updates
        with arrays.on(stream):
            self._tables = TableRows(SequenceTables(1, max_blocks, null_block, arrays, updates))
        # Those of each layer, once somebody wants them.
        self._layer_lens: Table | None = None

    @staticmethod
    def contiguous(
        *,
        num_kv_heads: SupportsIndex,
        head_dim: SupportsIndex,
        capacity: SupportsIndex,
        initial_capacity: SupportsIndex | None = None,
        num_layers: SupportsIndex = 1,
        v_head_dim: SupportsIndex | None = None,
        kv_dtype: KvDtypeLike = KvFp16,
        scale_dtype: DTypeLike | None = None,
        arrays: ArrayMaker | str = "numpy",
        device: object = None,
        stream: StreamLike | None = None,
    ) -> ContiguousKvCache:
        """A cache in one array each for K and V, ``[num_kv_heads, capacity, head_dim]`` a layer.

        The arrays are made with ``initial_capacity`` tokens and grow by doubling up to ``capacity``; None makes them
        full size at once. ``scale_dtype``, ``arrays`` and ``device`` are as for :class:`BlockPool`.
        Raises KvbmTypeError and KvbmValueError.
        """
        # Imported here, for the two kinds of cache are caches.
        from kvbm_kernels.contiguous_cache import ContiguousKvCache

        spec = RowSpec.checked(num_layers, num_kv_heads, head_dim, v_head_dim, kv_dtype, scale_dtype)
        most = as_count(capacity, "capacity", 1)
        initial = most if initial_capacity is None else as_count(initial_capacity, "initial_capacity", 1)
        if initial > most:
            raise KvbmValueError(f"initial_capacity is {initial}, expected at most capacity = {most}")
        return ContiguousKvCache(spec, as_arrays(arrays, device), initial, most, stream)

    @staticmethod
    def paged(
        pool: BlockPool, *, max_blocks: SupportsIndex | None = None, stream: StreamLike | None = None
    ) -> PagedKvCache:
        """A cache in blocks taken from a pool as they are needed, at most ``max_blocks`` of them.

        ``max_blocks`` is the length of the block table; None is the number of blocks of the pool.
        Raises KvbmTypeError and KvbmValueError.
        """
        from kvbm_kernels.paged_cache import PagedKvCache

        return PagedKvCache(pool, max_blocks, stream)

    # The fields.

    @property
    @abc.abstractmethod
    def k(self) -> Any:
        """K: ``[num_kv_heads, capacity, head_dim]``, or ``[num_blocks, num_kv_heads, block_size, head_dim]`` paged."""

    @property
    @abc.abstractmethod
    def v(self) -> Any:
        """V, as :attr:`k`."""

    @property
    @abc.abstractmethod
    def k_scales(self) -> Any:
        """The scales of :attr:`k`, its shape without the last dimension; None if the cache is not quantised."""

    @property
    @abc.abstractmethod
    def v_scales(self) -> Any:
        """The scales of :attr:`v`."""

    @property
    @abc.abstractmethod
    def capacity(self) -> int:
        """Tokens there is room for: in the arrays of a contiguous cache, in the block table of a paged one."""

    @property
    @abc.abstractmethod
    def block_size(self) -> int:
        """Tokens in a block, 0 for a contiguous cache."""

    @property
    @abc.abstractmethod
    def block_table(self) -> Any:
        """The block of each ``block_size`` tokens, u32, padded with the null block; None for a contiguous cache."""

    @property
    @abc.abstractmethod
    def context_lens(self) -> Any:
        """The length, u32 ``[1]``, for kernels to read; None for a contiguous cache."""

    @property
    @abc.abstractmethod
    def paged_block_indices(self) -> list[int]:
        """The blocks the cache holds, in order: the beginning of the block table. Empty for a contiguous cache."""

    @property
    def len(self) -> int:
        """Tokens in all layers."""
        return self._lens.shortest

    @property
    def num_layers(self) -> int:
        return self._spec.num_layers

    @property
    def num_kv_heads(self) -> int:
        return self._spec.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self._spec.head_dim

    @property
    def v_head_dim(self) -> int:
        return self._spec.v_head_dim

    @property
    def kv_dtype(self) -> KvDtypeLike:
        return self._spec.kv_dtype

    @property
    def is_released(self) -> bool:
        """Whether :meth:`release` was called."""
        return self._released

    def __len__(self) -> int:
        return self.len

    # What can be done with it.

    def append(
        self,
        k: ArrayLike,
        v: ArrayLike,
        *,
        layer: SupportsIndex | None = None,
        order: Layout | str = "NHD",
        stream: StreamLike | None = None,
    ) -> None:
        """Add tokens: ``[num_layers, n, num_kv_heads, head_dim]`` for all layers, or without the first for one.

        With ``layer``, or where the cache has one layer, K and V are ``[n, num_kv_heads, head_dim]``. ``order="HND"``
        takes heads before tokens. Layer by layer, the length moves once the last layer has its rows.

        Quantised caches take float32, float16 and bfloat16, other caches what they store. A cache in CUDA memory takes
        CUDA arrays and pinned host memory, one in host memory what is there.

        Raises KvbmTypeError and KvbmValueError for arrays that are not that, OutOfBlocks where the pool has too few,
        and CapacityError.
        """
        self._check_usable(stream)
        layers = self._spec.layer_range(layer)
        rows = self._rows().given(k, v, layer, as_layout(order, "order"))
        start = self._lens.even("append without a layer") if layer is None else self._lens[layers[0]]
        if not rows.num_tokens:
            return
        stop = start + rows.num_tokens
        undo = self._make_room(start, stop, stream)
        try:
            self._updates.publish(stream)
            places = self._tables.own.from_starts(self._rows().block_size, [start], stream)
            self._rows().append(rows, layers, places, lambda: self._slots(start, stop), stream, self._copied(undo))
        except BaseException:
            self._take_back(undo)
            self._updates.publish(stream)
            raise
        self._room_is_taken(undo)
        self._set_lens(layers, stop)
        self._updates.publish(stream)

    def reserve(self, n: SupportsIndex, *, stream: StreamLike | None = None) -> None:
        """Make room for ``n`` more tokens, all or nothing: appending them then takes no more blocks.

        Raises OutOfBlocks and CapacityError.
        """
        self._check_usable(stream)
        count = as_count(n, "n", 0)
        self._room_is_taken(self._make_room(self.len, max(self.len + count, self._lens.longest), stream))
        self._updates.publish(stream)

    def advance(self, n: SupportsIndex, *, stream: StreamLike | None = None) -> None:
        """Count ``n`` more tokens in all layers, written by someone else, such as a kernel of the engine.

        They need room that :meth:`reserve` made. Raises KvbmValueError for more than that, and where they would lie in
        a block that others have too, or that is registered.
        """
        self._check_usable(stream)
        self._set_lens((0, self.num_layers), self._advanced(as_count(n, "n", 0)))
        self._updates.publish(stream)

    def truncate(self, n: SupportsIndex, *, stream: StreamLike | None = None) -> None:
        """Keep the first ``n`` tokens, at most ``len(cache)``, and give the blocks behind them back.

        What was reserved goes too, and so do rows of layers that are ahead. Raises KvbmValueError.
        """
        self._check_usable(stream)
        count = as_count(n, "n", 0)
        if count > self.len:
            raise KvbmValueError(f"n is {count}, expected at most the length, {self.len}")
        self._give_back(count)
        self._set_lens((0, self.num_layers), count)
        self._updates.publish(stream)

    def release(self, *, stream: StreamLike | None = None) -> None:
        """Give everything back. The cache then has no tokens and takes none; to release it again does nothing."""
        if not self._released:
            self._rows().check_stream(stream)
            self._give_back(0)
            self._set_lens((0, self.num_layers), 0)
            self._released = True
            self._updates.publish(stream)

    def gather(
        self,
        layer: SupportsIndex | None = None,
        *,
        order: Layout | str = "NHD",
        dtype: DTypeLike | None = None,
        stream: StreamLike | None = None,
    ) -> tuple[Any, Any]:
        """Copies of K and V, ``[len, num_kv_heads, head_dim]``, with the layers in front if it is all of several.

        ``order="HND"`` gives heads before tokens. For a layer that is ahead of the others, all its tokens. ``dtype`` is
        for quantised caches, "fp32", "fp16" or "bf16": what to give numbers as, None for fp32. The arrays are of the
        cache's own library and, in CUDA memory, made on the stream.
        """
        self._rows().check_stream(stream)
        layers = self._spec.layer_range(layer)
        n = self.len if layer is None else self._lens[layers[0]]
        found, axes = self._spec.given_dtype(dtype), as_layout(order, "order")
        places = self._tables.own.from_beginnings(self._rows().block_size)
        return self._rows().read(n, layer, axes, found, places, stream)

    @abc.abstractmethod
    def view(self, layer: SupportsIndex | None = None) -> tuple[Any, Any]:
        """K and V as :meth:`gather` gives them, but not copied: they are parts of the cache's own arrays.

        Raises KvbmValueError where the tokens of a paged cache do not lie in one piece.
        """

    def layer(self, i: SupportsIndex) -> LayerCache[Self]:
        """One layer, with the fields and methods of a cache that has only this one."""
        first, _ = self._spec.layer_range(i)
        return LayerCache(self, first)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        where = "released" if self._released else f"{len(self)} of {counted(self.capacity, 'token')}"
        return f"<{type(self).__name__}: {where}, {counted(self.num_layers, 'layer')}, {self.kv_dtype.NAME}>"

    # What the two kinds do differently.

    @abc.abstractmethod
    def _rows(self) -> Rows: ...

    @abc.abstractmethod
    def _slots(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Where these tokens lie: pairs of a block of the rows and a token in it."""

    @abc.abstractmethod
    def _room(self) -> int:
        """Tokens there is room for without taking anything more."""

    @abc.abstractmethod
    def _check_writable(self, start: int, stop: int) -> None:
        """Raise KvbmValueError if writing these tokens, which there is room for, would change what others see."""

    @abc.abstractmethod
    def _make_room(self, start: int, stop: int, stream: StreamLike | None) -> Any:
        """Make the tokens from ``start`` up to ``stop`` writable; gives what _take_back() needs to undo it."""

    @abc.abstractmethod
    def _copied(self, undo: Any) -> list[int]:
        """The blocks that were written to make room: copies of shared ones."""

    @abc.abstractmethod
    def _take_back(self, undo: Any) -> None: ...

    @abc.abstractmethod
    def _room_is_taken(self, undo: Any) -> None:
        """The write came off, and nothing will be taken back."""

    @abc.abstractmethod
    def _give_back(self, n: int) -> None:
        """Let go of what the first ``n`` tokens do not need."""

    def _set_lens(self, layers: tuple[int, int], n: int) -> None:
        """All layers have n tokens, or one has that is to have more than before."""
        before = self._lens.shortest
        self._lens.set(layers, n)
        if self._lens.shortest != before:
            self._tables.put_len(self._lens.shortest)
        if self._layer_lens is not None:
            self._layer_lens.put_all(0, self._lens.to_list())

    def _lens_for_kernels(self, layer: int) -> Any:
        """The length of one layer, u32 ``[1]``."""
        if self._layer_lens is None:
            lens = np.array(self._lens.to_list(), np.uint32)
            self._layer_lens = Table(lens, self._rows().arrays, self._updates)
        return self._layer_lens.array[layer : layer + 1]

    def _advanced(self, n: int) -> int:
        """The length with n more tokens, which are there to be counted. Raises KvbmValueError."""
        start = self._lens.even("advance")
        stop = start + n
        if stop > self._room():
            raise KvbmValueError(f"n is {n}, expected at most {self._room() - start}: reserve comes first")
        self._check_writable(start, stop)
        return stop

    def _check_not_quantised(self) -> None:
        if self._spec.scale is not None:
            raise KvbmValueError(
                f"view: rows of {self.kv_dtype.NAME} have to be multiplied by their scales, expected plain numbers: "
                "use gather, or k and k_scales"
            )

    def _check_usable(self, stream: StreamLike | None) -> None:
        self._rows().check_stream(stream)
        if self._released:
            raise KvbmValueError("the cache was released, expected one in use")
