"""One layer of a cache, as an object with the fields of a cache that has no other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvbm_kernels.arrays import ArrayLike
from kvbm_kernels.dtypes import DTypeLike
from kvbm_kernels.errors import Uncopied
from kvbm_kernels.kv_dtypes import KvDtypeLike
from kvbm_kernels.layouts import Layout
from kvbm_kernels.streams import StreamLike

if TYPE_CHECKING:
    from kvbm_kernels.kv_cache import KvCache

CacheT = TypeVar("CacheT", bound="KvCache", covariant=True)


class LayerCache(Uncopied, Generic[CacheT]):
    """One layer of a cache, under the names of the cache. It keeps nothing of its own."""

    __slots__ = ("_layer", "cache")

    def __init__(self, cache: CacheT, layer: int) -> None:
        self.cache = cache
        self._layer = layer

    @property
    def k(self) -> Any:
        """K of this layer: ``[num_kv_heads, capacity, head_dim]``, or ``[num_blocks, ...]`` paged. No copy."""
        return self._of_layer(self.cache.k)

    @property
    def v(self) -> Any:
        """V of this layer, as :attr:`k`."""
        return self._of_layer(self.cache.v)

    @property
    def k_scales(self) -> Any:
        """The scales of :attr:`k`; None if the cache is not quantised."""
        return self._of_layer(self.cache.k_scales)

    @property
    def v_scales(self) -> Any:
        """The scales of :attr:`v`."""
        return self._of_layer(self.cache.v_scales)

    @property
    def len(self) -> int:
        """Tokens in this layer; more than in the cache while other layers are behind."""
        return self.cache._lens[self._layer]

    @property
    def context_lens(self) -> Any:
        """The length of this layer, u32 ``[1]``; None for a contiguous cache."""
        return None if self.cache.context_lens is None else self.cache._lens_for_kernels(self._layer)

    @property
    def capacity(self) -> int:
        return self.cache.capacity

    @property
    def num_kv_heads(self) -> int:
        return self.cache.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.cache.head_dim

    @property
    def v_head_dim(self) -> int:
        return self.cache.v_head_dim

    @property
    def kv_dtype(self) -> KvDtypeLike:
        return self.cache.kv_dtype

    @property
    def block_size(self) -> int:
        return self.cache.block_size

    @property
    def block_table(self) -> Any:
        return self.cache.block_table

    @property
    def paged_block_indices(self) -> list[int]:
        return self.cache.paged_block_indices

    def __len__(self) -> int:
        return self.len

    def append(
        self, k: ArrayLike, v: ArrayLike, *, order: Layout | str = "NHD", stream: StreamLike | None = None
    ) -> None:
        """Add tokens to this layer: ``cache.append(k, v, layer=i)``."""
        self.cache.append(k, v, layer=self._layer, order=order, stream=stream)

    def gather(
        self, *, order: Layout | str = "NHD", dtype: DTypeLike | None = None, stream: StreamLike | None = None
    ) -> tuple[Any, Any]:
        """Copies of K and V of this layer: ``cache.gather(i)``."""
        return self.cache.gather(self._layer, order=order, dtype=dtype, stream=stream)

    def view(self) -> tuple[Any, Any]:
        """K and V of this layer, not copied: ``cache.view(i)``."""
        return self.cache.view(self._layer)

    def _of_layer(self, array: Any) -> Any:
        return array if array is None or self.cache.num_layers == 1 else array[self._layer]
