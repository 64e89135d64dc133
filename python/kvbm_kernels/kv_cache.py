"""The keys and values of one sequence: what contiguous and paged caches have in common."""

from __future__ import annotations

import abc
from types import TracebackType
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from kvbm_kernels.arrays import ArrayLike
from kvbm_kernels.dtypes import DTypeLike
from kvbm_kernels.errors import KvbmValueError, Uncopied
from kvbm_kernels.kv_arrays import ArrayMaker, as_arrays
from kvbm_kernels.kv_dtypes import KvDtypeLike, KvFp16
from kvbm_kernels.kv_layer import LayerCache
from kvbm_kernels.kv_rows import Rows, RowSpec
from kvbm_kernels.layouts import Layout, as_count, as_layout

if TYPE_CHECKING:
    from typing_extensions import Self

    from kvbm_kernels.block_pool import BlockPool
    from kvbm_kernels.contiguous_cache import ContiguousKvCache
    from kvbm_kernels.paged_cache import PagedKvCache


class CapacityError(KvbmValueError):
    """More tokens than a cache may ever hold: ``needed`` and ``capacity`` say how many. Nothing was written."""

    def __init__(self, needed: int, capacity: int) -> None:
        super().__init__(f"{needed} tokens are needed and the capacity is {capacity}")
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
    a ``with`` block, it holds nothing and takes nothing more.
    """

    __slots__ = ("__weakref__", "_counts", "_counts_table", "_lens", "_released", "_spec")

    def __init__(self, spec: RowSpec, arrays: ArrayMaker) -> None:
        self._spec = spec
        self._released = False
        # Of each layer.
        self._lens = [0] * spec.num_layers
        # The same for kernels, and the length of the cache after them.
        self._counts = np.zeros(spec.num_layers + 1, np.uint32)
        self._counts_table = arrays.table(self._counts)

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
        return ContiguousKvCache(spec, as_arrays(arrays, device), initial, most)

    @staticmethod
    def paged(pool: BlockPool, *, max_blocks: SupportsIndex | None = None) -> PagedKvCache:
        """A cache in blocks taken from a pool as they are needed, at most ``max_blocks`` of them.

        ``max_blocks`` is the length of the block table; None is the number of blocks of the pool.
        Raises KvbmTypeError and KvbmValueError.
        """
        from kvbm_kernels.paged_cache import PagedKvCache

        return PagedKvCache(pool, max_blocks)

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
        return min(self._lens)

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
        self, k: ArrayLike, v: ArrayLike, *, layer: SupportsIndex | None = None, order: Layout | str = "NHD"
    ) -> None:
        """Add tokens: ``[num_layers, n, num_kv_heads, head_dim]`` for all layers, or without the first for one.

        With ``layer``, or where the cache has one layer, K and V are ``[n, num_kv_heads, head_dim]``. ``order="HND"``
        takes heads before tokens. Layer by layer, the length moves once the last layer has its rows.

        Raises KvbmTypeError and KvbmValueError for arrays that are not that, OutOfBlocks where the pool has too few,
        and CapacityError.
        """
        self._check_usable()
        layers = self._spec.layer_range(layer)
        rows = self._rows().incoming(k, v, layer, as_layout(order, "order"))
        start = self._even_len("append without a layer") if layer is None else self._lens[layers[0]]
        if not rows.num_tokens:
            return
        stop = start + rows.num_tokens
        undo = self._make_room(start, stop)
        try:
            self._rows().write(self._places(), start, rows, layers)
        except BaseException:
            self._take_back(undo)
            raise
        self._room_is_taken(undo)
        self._set_lens(layers, stop)

    def reserve(self, n: SupportsIndex) -> None:
        """Make room for ``n`` more tokens, all or nothing: appending them then takes no more blocks.

        Raises OutOfBlocks and CapacityError.
        """
        self._check_usable()
        count = as_count(n, "n", 0)
        self._room_is_taken(self._make_room(self.len, max(self.len + count, *self._lens)))

    def advance(self, n: SupportsIndex) -> None:
        """Count ``n`` more tokens in all layers, written by someone else, such as a kernel of the engine.

        They need room that :meth:`reserve` made. Raises KvbmValueError for more than that, and where they would lie in
        a block that others have too, or that is registered.
        """
        self._check_usable()
        start = self._even_len("advance")
        stop = start + as_count(n, "n", 0)
        if stop > self._room():
            raise KvbmValueError(f"n is {stop - start}, expected at most {self._room() - start}: reserve comes first")
        self._check_writable(start, stop)
        self._set_lens((0, self.num_layers), stop)

    def truncate(self, n: SupportsIndex) -> None:
        """Keep the first ``n`` tokens, at most ``len(cache)``, and give the blocks behind them back.

        What was reserved goes too, and so do rows of layers that are ahead. Raises KvbmValueError.
        """
        self._check_usable()
        count = as_count(n, "n", 0)
        if count > self.len:
            raise KvbmValueError(f"n is {count}, expected at most the length, {self.len}")
        self._give_back(count)
        self._set_lens((0, self.num_layers), count)

    def release(self) -> None:
        """Give everything back. The cache then has no tokens and takes none; to release it again does nothing."""
        if not self._released:
            self._give_back(0)
            self._set_lens((0, self.num_layers), 0)
            self._released = True

    def gather(
        self, layer: SupportsIndex | None = None, *, order: Layout | str = "NHD", dtype: DTypeLike | None = None
    ) -> tuple[Any, Any]:
        """Copies of K and V, ``[len, num_kv_heads, head_dim]``, with the layers in front if it is all of several.

        ``order="HND"`` gives heads before tokens. For a layer that is ahead of the others, all its tokens. ``dtype`` is
        for quantised caches, "fp32", "fp16" or "bf16": what to give numbers as, None for fp32.
        """
        layers = self._spec.layer_range(layer)
        n = self.len if layer is None else self._lens[layers[0]]
        found = self._spec.given_dtype(dtype)
        return self._rows().read(self._places(), n, layer, as_layout(order, "order"), found)

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
        where = "released" if self._released else f"{len(self)} of {self.capacity} tokens"
        return f"<{type(self).__name__}: {where}, {self.num_layers} layers, {self.kv_dtype.NAME}>"

    # What the two kinds do differently.

    @abc.abstractmethod
    def _rows(self) -> Rows: ...

    @abc.abstractmethod
    def _places(self) -> list[int]:
        """The blocks of the rows in which the sequence lies."""

    @abc.abstractmethod
    def _room(self) -> int:
        """Tokens there is room for without taking anything more."""

    @abc.abstractmethod
    def _check_writable(self, start: int, stop: int) -> None:
        """Raise KvbmValueError if writing these tokens, which there is room for, would change what others see."""

    @abc.abstractmethod
    def _make_room(self, start: int, stop: int) -> Any:
        """Make the tokens from ``start`` up to ``stop`` writable; gives what _take_back() needs to undo it."""

    @abc.abstractmethod
    def _take_back(self, undo: Any) -> None: ...

    @abc.abstractmethod
    def _room_is_taken(self, undo: Any) -> None:
        """The write came off, and nothing will be taken back."""

    @abc.abstractmethod
    def _give_back(self, n: int) -> None:
        """Let go of what the first ``n`` tokens do not need."""

    def _set_lens(self, layers: tuple[int, int], n: int) -> None:
        first, stop = layers
        for i in range(first, stop):
            self._lens[i] = n
        self._counts[first:stop] = n
        self._counts[-1] = min(self._lens)
        self._rows().arrays.publish(self._counts_table, self._counts)

    def _even_len(self, what: str) -> int:
        """The length, if all layers have it."""
        longest = max(self._lens)
        if longest != min(self._lens):
            behind, ahead = self._lens.index(min(self._lens)), self._lens.index(longest)
            raise KvbmValueError(
                f"{what}: layer {behind} has {self._lens[behind]} tokens and layer {ahead} {longest}, "
                "expected as many in all: append to the layers that are behind, or truncate"
            )
        return longest

    def _check_not_quantised(self) -> None:
        if self._spec.scale is not None:
            raise KvbmValueError(
                f"view: rows of {self.kv_dtype.NAME} have to be multiplied by their scales, expected plain numbers: "
                "use gather, or k and k_scales"
            )

    def _check_usable(self) -> None:
        if self._released:
            raise KvbmValueError("the cache was released, expected one in use")
