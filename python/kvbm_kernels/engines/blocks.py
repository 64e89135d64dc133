"""Block stacks that are numbered as an engine numbers its blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar

import numpy as np

from kvbm_kernels._wording import a_type, counted
from kvbm_kernels.blocks import BlockStack
from kvbm_kernels.errors import KvbmIndexError, KvbmTypeError, KvbmValueError
from kvbm_kernels.geometry import Addresses, Geometry
from kvbm_kernels.layouts import BlockShape, as_count, as_integer, resized
from kvbm_kernels.views import BlockIds, View, as_block_ids

if TYPE_CHECKING:
    from typing_extensions import Self

_AnyView = TypeVar("_AnyView", bound=View)


class EngineBlocks(BlockStack):
    """The blocks of an engine's cache: block stacks that take the engine's own block ids.

    ``view[ids]`` takes ids as they stand in the engine's block tables. The first ``num_reserved`` of them are blocks
    that hold no sequence, such as vLLM's null block: to name one is a KvbmIndexError, and what is copied as a whole is
    all other blocks. ``view[ids]`` itself counts from 0, as every view does, and ``heads``, ``layers``, ``tokens`` and
    ``shard`` leave the numbers as they are.

    Where the engine keeps a block in ``pieces`` pieces that no single stride steps through, an id stands for that many
    blocks of the view, in the order of their tokens, and ``len(view[[7]])`` is ``pieces``. :func:`split_blocks` makes
    the like of any other view. ``view[:]`` has an id for each block of the view.
    """

    __slots__ = ("_named", "num_reserved", "pieces")

    num_reserved: int
    pieces: int
    # The ids that were selected, and how many blocks each stands for; None where the geometry has the same ids.
    _named: tuple[Addresses, int] | None

    @property
    def num_blocks(self) -> int:
        """How many ids the engine has, reserved ones among them."""
        return len(self) // self.pieces + self.num_reserved

    def __getitem__(self, ids: SupportsIndex | slice | BlockIds) -> Self:
        """Only some blocks, by the engine's ids; a slice from the start begins behind the reserved ones."""
        if isinstance(ids, slice) and ids.start is None and (ids.step is None or (as_integer(ids.step) or 0) > 0):
            ids = slice(self.num_reserved, ids.stop, ids.step)
        found = as_block_ids(ids, self.num_blocks, self.num_reserved, self.pieces)
        if found.size and found.min() < self.num_reserved:
            raise KvbmIndexError(
                f"block id {found[found < self.num_reserved][0]} is reserved and holds no sequence, "
                f"expected {self.num_reserved} to {self.num_blocks - 1}"
            )
        places = (found - self.num_reserved)[:, None] * self.pieces + np.arange(self.pieces, dtype=np.int64)
        view = super().__getitem__(places.reshape(-1))
        view.num_reserved, view.pieces = 0, 1
        if self._named is not None:
            named, each = self._named
            view._named = named[found * self.pieces // each], self.pieces
        elif self.pieces > 1:
            view._named = found, self.pieces
        return view

    def _repeated(self) -> tuple[int, int, int] | None:
        twice = super()._repeated()
        if twice is None or self._named is None:
            return twice
        named, each = self._named
        first, second = twice[1] // each, twice[2] // each
        return int(named[first]), first, second

    def _counted(self) -> str:
        return super()._counted() + (f", {self.pieces} to an id," if self.pieces > 1 else "")

    def _narrowed(self, geometry: Geometry, shape: BlockShape) -> Self:
        view = super()._narrowed(geometry, shape)
        view.num_reserved, view.pieces, view._named = self.num_reserved, self.pieces, self._named
        return view

    def _lay_out(self, *arguments: Any) -> None:
        super()._lay_out(*arguments)
        self.geometry = self.geometry.folded()
        self.num_reserved, self.pieces, self._named = 0, 1, None

    def _reserve(self, num_reserved: int, pieces: int) -> None:
        """Number the blocks of a view just made, and leave out those that are reserved."""
        first = num_reserved * pieces
        if first:
            end = max(first, self.geometry.extents.block)
            self.geometry = self.geometry.select(np.arange(first, end, dtype=np.int64))
        self.num_reserved, self.pieces = num_reserved, pieces


def split_blocks(view: _AnyView, num_tokens: SupportsIndex) -> _AnyView:
    """The same blocks as more of them, of ``num_tokens`` tokens each: those of block 0, then those of block 1.

    What lies in blocks of 256 tokens is copied to and from an engine's blocks of 16 this way. Nothing is copied to
    split it. Where a sequence ends within a block, its tokens are chosen first: ``split_blocks(view.tokens(0, 48),
    16)`` has 3 blocks for each of the view.

    An :class:`EngineBlocks` keeps the ids it has: each of them stands for all that its block was split into.

    Raises KvbmValueError if the tokens of a block cannot be divided so.
    """
    if not isinstance(view, View):
        raise KvbmTypeError(f"view is {a_type(view)}, expected a view")
    nt = view.shape.nt
    num_tokens = as_count(num_tokens, "num_tokens", 1)
    count, rest = divmod(nt, num_tokens)
    if rest:
        raise KvbmValueError(f"blocks of {counted(nt, 'token')} cannot be split into blocks of {num_tokens}")
    if count == 1:
        return view
    pieces = view._narrowed(view.geometry.in_pieces(count), resized(view.shape, nt=num_tokens))
    if isinstance(pieces, EngineBlocks):
        pieces.pieces *= count
        if pieces._named is not None:
            named, each = pieces._named
            pieces._named = named, each * count
        elif pieces.num_reserved == 0 and view.geometry.ids is not None:
            pieces._named = view.geometry.ids, count
    return pieces
