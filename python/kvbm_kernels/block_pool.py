"""The memory that many sequences share, in blocks."""

from __future__ import annotations

from typing import Any, Literal, SupportsIndex, TypeAlias

from kvbm_kernels._wording import counted
from kvbm_kernels.block_allocator import BlockAllocator
from kvbm_kernels.blocks import BlockStack
from kvbm_kernels.dtypes import DTypeLike
from kvbm_kernels.errors import KvbmTypeError, KvbmValueError, Uncopied
from kvbm_kernels.kv_arrays import ArrayMaker, as_arrays
from kvbm_kernels.kv_dtypes import KvDtypeLike, KvFp16
from kvbm_kernels.kv_row_spec import RowSpec
from kvbm_kernels.kv_rows import Rows
from kvbm_kernels.kv_tables import Updates
from kvbm_kernels.layouts import BlockShape, Layout, as_count, as_layout
from kvbm_kernels.streams import StreamLike
from kvbm_kernels.views import BlockIds

Part: TypeAlias = Literal["kv", "k", "v"]


class BlockPool(Uncopied):
    """``num_blocks`` blocks of ``block_size`` tokens for all layers of a model, and the allocator that hands them out.

    ``k`` and ``v`` are arrays ``[num_layers, num_blocks, num_kv_heads, block_size, head_dim]``, with heads and tokens
    the other way round for ``layout="NHD"``; rows of V have ``v_head_dim`` elements, None for as many as K. Behind the
    last block of each layer lies one more, the null block, with the number ``null_block``: tables are padded with it,
    and a kernel that follows such an entry stays inside the array and off every block in use.

    With KvInt8 or KvFp8 every row is stored with its scale behind it, a number of ``scale_dtype``: "fp32", which None
    stands for, or "fp16". Rows of ``k`` and ``v`` then lie further apart than they are long, :meth:`blocks` gives rows
    with their scales, and ``block_shape.hd`` is what such a row has of bytes.

    ``arrays`` is "numpy", "torch" for tensors on ``device``, "cupy" for arrays on the CUDA device with that number, or
    an object that makes arrays as :class:`kvbm_kernels.kv_arrays.ArrayMaker` describes. ``stream`` is where they are
    made, as for the calls of :class:`KvCache`.

    Raises KvbmTypeError and KvbmValueError.
    """

    __slots__ = ("allocator", "block_size", "layout", "num_blocks", "rows", "spec", "updates")

    def __init__(
        self,
        num_blocks: SupportsIndex,
        block_size: SupportsIndex,
        num_layers: SupportsIndex,
        num_kv_heads: SupportsIndex,
        head_dim: SupportsIndex,
        *,
        v_head_dim: SupportsIndex | None = None,
        kv_dtype: KvDtypeLike = KvFp16,
        scale_dtype: DTypeLike | None = None,
        layout: Layout | str = "HND",
        arrays: ArrayMaker | str = "numpy",
        device: object = None,
        stream: StreamLike | None = None,
    ) -> None:
        self.spec = RowSpec.checked(num_layers, num_kv_heads, head_dim, v_head_dim, kv_dtype, scale_dtype)
        self.block_size = as_count(block_size, "block_size", 1)
        self.layout = as_layout(layout)
        maker = as_arrays(arrays, device)
        self.num_blocks = as_count(num_blocks, "num_blocks", 1)
        with maker.on(stream):
            self.rows = Rows(maker, self.spec, self.layout, self.num_blocks, self.block_size, spare=1)
        self.rows.check_stream(stream)
        self.updates = Updates()
        self.allocator = BlockAllocator(self.num_blocks)

    @property
    def k(self) -> Any:
        """K of all layers, ``[num_layers, num_blocks, num_kv_heads, block_size, head_dim]``. Nothing is copied."""
        return self.rows.k[..., : self.head_dim]

    @property
    def v(self) -> Any:
        """V of all layers, as :attr:`k`."""
        return self.rows.v[..., : self.v_head_dim]

    @property
    def k_scales(self) -> Any:
        """The scales of K, ``[num_layers, num_blocks, num_kv_heads, block_size]``; None if it is not quantised."""
        return self.rows.scales(self.rows.k, self.head_dim)

    @property
    def v_scales(self) -> Any:
        """The scales of V, as :attr:`k_scales`."""
        return self.rows.scales(self.rows.v, self.v_head_dim)

    @property
    def null_block(self) -> int:
        """The number that pads tables: no block that is ever handed out."""
        return self.allocator.null_block

    @property
    def num_layers(self) -> int:
        return self.spec.num_layers

    @property
    def num_kv_heads(self) -> int:
        return self.spec.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.spec.head_dim

    @property
    def v_head_dim(self) -> int:
        return self.spec.v_head_dim

    @property
    def kv_dtype(self) -> KvDtypeLike:
        return self.spec.kv_dtype

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses."""
        return self.allocator.num_free

    @property
    def block_shape(self) -> BlockShape:
        """The shape of what :meth:`blocks` gives. Raises KvbmValueError if K and V have different head dimensions."""
        return self.blocks().shape

    def blocks(self, ids: BlockIds | None = None, *, of: Part = "kv") -> BlockStack:
        """The blocks with these ids, or all, as a block stack that :func:`kvbm_kernels.copy_blocks` takes.

        ``of`` is "kv" for K and V as outer index 0 and 1, "k" or "v" for one of them: the only way where they have
        different head dimensions. Raises KvbmIndexError for an id that is no block's, and KvbmValueError.
        """
        views = {"kv": self.rows.kv_view, "k": self.rows.k_view, "v": self.rows.v_view}
        if not isinstance(of, str):
            raise KvbmTypeError(f'of is {of!r}, expected "kv", "k" or "v"')
        if of not in views:
            raise KvbmValueError(f'of is {of!r}, expected "kv", "k" or "v"')
        view = views[of]
        if view is None:
            raise KvbmValueError(
                f'of is "kv", expected "k" or "v": rows of K have {counted(self.head_dim, "element")} and rows of V '
                f"{self.v_head_dim}"
            )
        return view if ids is None else view[ids]

    def __repr__(self) -> str:
        return (
            f"<BlockPool: {self.allocator.num_used} of {counted(self.num_blocks, 'block')} of "
            f"{counted(self.block_size, 'token')} used, "
            f"{counted(self.num_layers, 'layer')}, {self.kv_dtype.NAME}, {self.layout.name}>"
        )
