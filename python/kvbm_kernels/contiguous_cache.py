"""A cache in one piece of memory, which grows."""

from __future__ import annotations

from typing import Any, SupportsIndex

from kvbm_kernels.kv_arrays import ArrayMaker
from kvbm_kernels.kv_cache import CapacityError, KvCache
from kvbm_kernels.kv_row_spec import RowSpec
from kvbm_kernels.kv_rows import Rows
from kvbm_kernels.kv_tables import Updates
from kvbm_kernels.layouts import Layout
from kvbm_kernels.streams import StreamLike


class ContiguousKvCache(KvCache):
    """A cache whose K and V are one array each, ``[num_kv_heads, capacity, head_dim]`` a layer.

    ``capacity`` is what the arrays have room for now, ``max_capacity`` what they may grow to. Growing makes new arrays:
    ``k`` and ``v`` from before stay what they were, and see no later token.
    """

    __slots__ = ("_storage", "max_capacity")

    def __init__(
        self, spec: RowSpec, arrays: ArrayMaker, capacity: int, max_capacity: int, stream: StreamLike | None
    ) -> None:
        with arrays.on(stream):
            self._storage = Rows(arrays, spec, Layout.HND, 1, capacity)
        self._storage.check_stream(stream)
        super().__init__(spec, arrays, Updates(), 1, 1, stream)
        # For kernels that append, all of it is block 0.
        self._tables.put_blocks([0], 0)
        self._updates.publish(stream)
        self.max_capacity = max_capacity

    @property
    def k(self) -> Any:
        """K, ``[num_kv_heads, capacity, head_dim]``; with the layers in front if there are several."""
        return self._unblocked(self._storage.k[..., : self.head_dim])

    @property
    def v(self) -> Any:
        """V, as :attr:`k`."""
        return self._unblocked(self._storage.v[..., : self.v_head_dim])

    @property
    def k_scales(self) -> Any:
        return self._unblocked(self._storage.scales(self._storage.k, self.head_dim))

    @property
    def v_scales(self) -> Any:
        return self._unblocked(self._storage.scales(self._storage.v, self.v_head_dim))

    @property
    def capacity(self) -> int:
        """Tokens the arrays have room for."""
        return self._storage.block_size

    @property
    def block_size(self) -> int:
        """0: there are no blocks."""
        return 0

    @property
    def block_table(self) -> None:
        """None: there are no blocks."""
        return None

    @property
    def context_lens(self) -> None:
        """None: kernels for contiguous caches are told the length."""
        return None

    @property
    def paged_block_indices(self) -> list[int]:
        """Empty: there are no blocks."""
        return []

    def view(self, layer: SupportsIndex | None = None) -> tuple[Any, Any]:
        layers = self._spec.layer_range(layer)
        n = self.len if layer is None else self._lens[layers[0]]
        self._check_not_quantised()
        one = layers[0] if layer is not None or self.num_layers == 1 else slice(None)
        k, v = (array[one, 0][..., :n, :].swapaxes(-3, -2) for array in (self._storage.k, self._storage.v))
        return k, v

    def _unblocked(self, array: Any) -> Any:
        if array is None:
            return None
        return array[0, 0] if self.num_layers == 1 else array[:, 0]

    def _rows(self) -> Rows:
        return self._storage

    def _slots(self, start: int, stop: int) -> list[tuple[int, int]]:
        return [(0, token) for token in range(start, stop)]

    def _room(self) -> int:
        return self.capacity

    def _check_writable(self, start: int, stop: int) -> None:
        pass

    def _make_room(self, start: int, stop: int, stream: StreamLike | None) -> Rows | None:
        if stop > self.max_capacity:
            raise CapacityError(stop, self.max_capacity)
        if stop <= self.capacity:
            return None
        doubled = self.capacity
        while doubled < stop:
            doubled *= 2
        old = self._storage
        with old.arrays.on(stream):
            grown = Rows(old.arrays, self._spec, Layout.HND, 1, min(doubled, self.max_capacity))
        grown.copy_beginning(old, self._lens.longest, stream)
        self._storage = grown
        return old

    def _copied(self, undo: Rows | None) -> list[int]:
        return []

    def _take_back(self, undo: Rows | None) -> None:
        if undo is not None:
            self._storage = undo

    def _room_is_taken(self, undo: Rows | None) -> None:
        pass

    def _give_back(self, n: int) -> None:
        # The arrays are for the whole life of the cache: a kernel may hold their addresses.
        pass
