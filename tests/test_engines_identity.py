"""Where an engine already stores one of our formats, a block is one run of bytes, the same on both sides."""

from __future__ import annotations

import numpy as np
import pytest

import kvbm_kernels as kk
import reference_engines as ref
from engine_kinds import KINDS, laid_out, shape_of
from kvbm_kernels import engines
from reference_engines import Size

SIZE = Size(B=5, L=3, N=4, H=2, D=8)


def is_plain_copy(view: kk.View, other: kk.View) -> bool:
    """Whether the library copies a block in one piece, both ways."""
    block, its_copy = view[[3]], other[[1]]
    found = kk.explain(its_copy, block), kk.explain(block, its_copy)
    assert len({(each.segments, each.segment_nbytes) for each in found}) == 1
    assert found[0].segments * found[0].segment_nbytes == view.shape.block_nbytes
    return found[0].segments == 1


def universal(shape: kk.BlockShape) -> kk.View:
    return kk.UniversalBlocks(np.zeros((2, shape.nh, shape.nl, shape.no, shape.nt, shape.hd), np.uint16), shape)


def operational(shape: kk.BlockShape, inner: str) -> kk.View:
    elements = shape.nt * shape.nh * shape.hd
    return kk.OperationalBlocks(np.zeros((2, shape.nl, shape.no, elements), np.uint16), shape, inner)


UNIVERSAL = {"vllm kv_first BHL2ND", "vllm BHL2ND whole", "sglang host page_unified, a head a group"}
OPERATIONAL_NHD = {
    "vllm kv_first BL2NHD",
    "vllm blocks_first BL2NHD",
    "vllm BL2NHD whole",
    "sglang host page_unified",
    "tensorrt_llm pool NHD",
    "tensorrt_llm buffers B2NHD",
    "transformers paged",
}
OPERATIONAL_HND = {"tensorrt_llm pool HND", "tensorrt_llm buffers B2HND", "tensorrt_llm region"}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_that_are_one_of_our_formats(name):
    """These and no others: B2HLND, for one, has heads outside of layers, but K and V outside of heads."""
    kind = KINDS[name]
    view = kind.view(laid_out(kind, SIZE, None, []).tensors, SIZE)
    if view.pieces > 1:
        assert name not in UNIVERSAL | OPERATIONAL_NHD | OPERATIONAL_HND
        return
    shape = shape_of(SIZE)
    assert is_plain_copy(view, universal(shape)) == (name in UNIVERSAL)
    assert is_plain_copy(view, operational(shape, "NHD")) == (name in OPERATIONAL_NHD)
    assert is_plain_copy(view, operational(shape, "HND")) == (name in OPERATIONAL_HND)


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("BHLNC", universal),
        ("BLNHC", lambda shape: operational(shape, "NHD")),
        ("BLHNC", lambda shape: operational(shape, "HND")),
    ],
)
@pytest.mark.parametrize("whole", [False, True])
def test_packed_rows_left_together(rng, name, made, whole):
    """With no=1, BHLNC is universal, and the other two with blocks outermost are operational."""
    cache = (ref.vllm_whole if whole else ref.vllm_packed)(rng, SIZE, name)
    view = engines.from_vllm(cache.tensors, layout=name, block_size=SIZE.N, num_kv_heads=SIZE.H, no=1, dtype="bf16")
    assert view.shape == kk.BlockShape(SIZE.L, 1, SIZE.H, SIZE.N, 2 * SIZE.D, "bf16")
    assert is_plain_copy(view, made(view.shape))


def test_latent_pages_of_all_layers_are_every_format_at_once(rng):
    """With one head and no V, universal and both operational are the same bytes."""
    size = SIZE._replace(H=1, no=1)
    cache = ref.sglang_host(rng, size, "page_unified")
    view = engines.from_sglang(cache.tensors, layout="page_unified", page_size=size.N, dtype="bf16")
    for other in (universal(view.shape), operational(view.shape, "NHD"), operational(view.shape, "HND")):
        assert is_plain_copy(view, other)


@pytest.mark.parametrize("name", sorted(OPERATIONAL_NHD - {"sglang host page_unified", "vllm BL2NHD whole"}))
def test_neighbouring_blocks_are_one_run(name):
    """All the blocks there are, from an engine's cache of this form to another of the same, in one piece."""
    kind = KINDS[name]
    views = [kind.view(laid_out(kind, SIZE, None, []).tensors, SIZE)[2:] for _ in range(2)]
    assert kk.explain(*views).segments == 1


def test_layers_in_tensors_of_their_own_are_a_piece_each(rng):
    """Between two engines with blocks first, K and V of a layer and block are one run: nothing is cut finer."""
    kind = KINDS["vllm blocks_first B2NHD"]
    views = [kind.view(laid_out(kind, SIZE, None, []).tensors, SIZE)[[3, 1]] for _ in range(2)]
    found = kk.explain(*views)
    assert (found.segments, found.segment_nbytes) == (2 * SIZE.L, 2 * views[0].shape.chunk_nbytes)


class TestPieces:
    """Kernel blocks whose tokens no stride steps through."""

    def view(self, rng, physical):
        cache = ref.vllm_kernel_blocks(rng, SIZE, physical, 2)
        return engines.from_vllm(
            cache.tensors,
            layout="packed",
            block_size=4,
            num_kv_heads=2,
            kernel_block_size=2,
            no=2,
            head_size=8,
            dtype="bf16",
        )

    def test_tokens_that_follow_each_other_are_joined(self, rng):
        view = self.view(rng, "BNHC")
        assert (view.shape.nt, view.pieces, len(view), view.num_blocks) == (4, 1, 4, 5)

    def test_others_are_blocks_of_their_own_under_the_id_of_all(self, rng):
        view = self.view(rng, "BHNC")
        assert (view.shape.nt, view.pieces, len(view), view.num_blocks) == (2, 2, 8, 5)
        assert len(view[[4, 2]]) == 4
        assert view[[4, 2]].geometry.ids.tolist() == [8, 9, 4, 5]
        assert view.heads(0, 1)[[4]].geometry.ids.tolist() == [8, 9]

    def test_a_view_says_how_many_blocks_an_id_is(self, rng):
        view = self.view(rng, "BHNC")
        assert repr(view).startswith("<EngineBlocks: 8 blocks, 2 to an id, of nl=")
        assert repr(view[[4]]).startswith("<EngineBlocks: 2 blocks of nl=")

    def test_a_selection_counts_from_0_as_every_view_does(self, rng):
        selected = self.view(rng, "BHNC")[[4, 2]]
        assert (selected.num_reserved, selected.pieces, selected.num_blocks) == (0, 1, 4)
        assert selected[[0, 3]].geometry.ids.tolist() == [8, 5]
        assert selected[1:].geometry.ids.tolist() == [9, 4, 5]

    def test_one_head_has_its_tokens_in_line(self, rng):
        size = SIZE._replace(H=1)
        cache = ref.vllm_kernel_blocks(rng, size, "BHNC", 2)
        view = engines.from_vllm(
            cache.tensors,
            layout="packed",
            block_size=4,
            num_kv_heads=1,
            kernel_block_size=2,
            no=2,
            head_size=8,
            dtype="bf16",
        )
        assert (view.shape.nt, view.pieces) == (4, 1)

    def test_a_pieced_view_can_be_split_further(self, rng):
        view = engines.split_blocks(self.view(rng, "BHNC"), 1)
        assert (view.shape.nt, view.pieces, len(view), view.num_blocks) == (1, 4, 16, 5)
        with pytest.raises(IndexError, match="block id 0 is reserved"):
            view[[0]]
        assert len(view[[1]]) == 4

    def test_a_selection_keeps_its_ids_when_it_is_split(self, rng):
        view = engines.split_blocks(self.view(rng, "BNHC")[[3]], 1)
        assert (view.pieces, view.num_blocks, len(view), len(view[0])) == (4, 1, 4, 4)
        message = r"block id 1, expected 0 to 0: an id stands for 4 blocks of the view, and view\[:\] has one for each$"
        with pytest.raises(IndexError, match=message):
            view[[0, 1, 2]]
        assert view[:][[0, 1, 2]].geometry.ids.tolist() == [12, 13, 14]

    @pytest.mark.parametrize("physical", ["BNHC", "BHNC"])
    def test_a_block_that_is_there_twice_is_told_as_it_was_named(self, rng, physical):
        view = engines.split_blocks(self.view(rng, physical), 1)
        for dst, message in (
            (view[[3, 2, 2]], "dst has block 2 more than once, at 1 and 2"),
            (view[[3, 2, 2]].tokens(0, 1), "dst has block 2 more than once, at 1 and 2"),
            (engines.split_blocks(self.view(rng, "BNHC")[[3, 2, 2]], 1), "dst has block 2 .*, at 1 and 2"),
            (view[[3, 2]][[5, 1, 5]], "dst has block 2 more than once, at 0 and 2"),
            (self.view(rng, physical)[[4, 2, 2]], "dst has block 2 more than once, at 1 and 2"),
            (view[[4, 2]].tokens(0, 1)[[0, 5, 5]], "dst has block 2 more than once, at 1 and 2"),
            (engines.split_blocks(self.view(rng, "BHNC")[[4, 2]], 1)[[0, 2, 2]], "dst has block 2 .*, at 1 and 2"),
            (engines.split_blocks(view.tokens(0, 1)[[4, 2, 2]], 1), "dst has block 2 more than once, at 1 and 2"),
        ):
            with pytest.raises(kk.KvbmValueError, match=message):
                kk.copy_blocks(dst, dst)

    def test_the_first_tokens_of_a_block_are_split_as_all_are(self, rng):
        """Where a sequence ends within a block, what is behind its end stays as it is."""
        view = self.view(rng, "BNHC")
        out = np.zeros((4, view.shape.nh, view.shape.nl, 2, 4, view.shape.hd), np.uint16)
        saved = kk.UniversalBlocks(out, view.shape)
        kk.copy_blocks(saved[:2], view[[2, 4]])
        first = engines.split_blocks(view[[2]].tokens(0, 3), 1)
        assert len(first) == 3
        kk.copy_blocks(first, engines.split_blocks(view[[4]], 1)[:][[0, 1, 2]])
        kk.copy_blocks(saved[2:], view[[2, 4]])
        assert np.array_equal(out[2, ..., :3, :], out[1, ..., :3, :])
        assert np.array_equal(out[2, ..., 3:, :], out[0, ..., 3:, :])
        assert not np.array_equal(out[0], out[1])

    def test_ids_that_there_are_not_are_told_in_the_engines_numbers(self, rng):
        view = self.view(rng, "BHNC")
        message = "block id 5, expected 1 to 4: those below are reserved; an id stands for 2 blocks of the view"
        with pytest.raises(IndexError, match=message):
            view[[1, 5]]
        with pytest.raises(IndexError, match="block id 4, expected 0 to 3: the view has 4 blocks$"):
            view[[1, 2]][4]
        empty = engines.from_vllm(
            np.zeros((1, 1, 2, 8, 16), np.uint16), layout="LBHNC", block_size=8, num_kv_heads=2, no=1, dtype="bf16"
        )
        with pytest.raises(IndexError, match="block id 1, expected none: all blocks are reserved$"):
            empty[1]

    @pytest.mark.parametrize("step", ["a", 1.5, object()])
    def test_slices_are_of_integers(self, rng, step):
        with pytest.raises(kk.KvbmTypeError, match="block ids are slice.*, expected a slice of integers"):
            self.view(rng, "BHNC")[::step]


class TestSplitBlocks:
    @pytest.mark.parametrize("made", ["universal", "operational", "list", "stack"])
    def test_pieces_are_the_tokens_in_order(self, rng, made):
        kv = rng.integers(0, 1 << 16, (3, 2, 2, 6, 2, 4), np.uint16)
        shape = kk.BlockShape(2, 2, 2, 6, 4, "bf16")
        import reference

        view = {
            "universal": lambda: kk.UniversalBlocks(reference.universal(kv), shape),
            "operational": lambda: kk.OperationalBlocks(reference.operational(kv, "HND"), shape, "HND"),
            "list": lambda: kk.UniversalBlocks(list(reference.universal(kv)), shape),
            "stack": lambda: kk.BlockStack(reference.block_stack(kv, "NHD"), shape),
        }[made]()
        ids = [2, 0]
        for selected, blocks in ((view, kv), (view[ids], kv[ids]), (view.layers(1, 2)[ids], kv[ids][:, 1:2])):
            pieces = engines.split_blocks(selected, 2)
            assert type(pieces) is type(view)
            assert len(pieces) == 3 * len(blocks)
            expected = blocks.reshape(len(blocks), -1, 2, 3, 2, 2, 4).transpose(0, 3, 1, 2, 4, 5, 6)
            expected = expected.reshape(-1, *expected.shape[2:])
            out = np.zeros(reference.universal(expected).shape, np.uint16)
            kk.copy_blocks(kk.UniversalBlocks(out, pieces.shape), pieces)
            reference.assert_same_bytes(out, reference.universal(expected))
        assert engines.split_blocks(view, 6) is view
