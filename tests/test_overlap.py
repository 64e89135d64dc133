"""copy_blocks writes a row once and not one that it also reads; everything short of that is allowed."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

import kvbm_kernels as kk
import reference
from kinds import KINDS, layers, packed, views
from kvbm_kernels import overlap

BF16 = ml_dtypes.bfloat16
NB, NL, NO, NT, NH, HD = 3, 2, 2, 5, 4, 16
SHAPE = kk.BlockShape(nl=NL, no=NO, nh=NH, nt=NT, hd=HD, dtype="bf16")


@pytest.fixture
def kv(rng):
    return reference.random_kv(rng, (NB, NL, NO, NT, NH, HD), BF16)


def refuses(dst, src, message):
    owner = np.asarray(dst.memory.owners[0])
    before = owner.copy()
    with pytest.raises(ValueError, match=message) as raised:
        kk.copy_blocks(dst, src)
    assert isinstance(raised.value, kk.KvbmError)
    reference.assert_same_bytes(owner, before)


@pytest.fixture
def pool(kv):
    return kk.BlockStack.from_layers(layers(kv), SHAPE)


@pytest.fixture
def other(kv):
    return kk.UniversalBlocks(reference.universal(kv), SHAPE)


def test_a_block_named_twice_cannot_be_written(pool, other):
    refuses(pool[[0, 1, 0]], other, "dst has block 0 more than once, at 0 and 2")


def test_a_block_named_twice_can_be_read(pool, other, kv):
    kk.copy_blocks(pool, other[[1, 1, 0]])
    reference.assert_same_bytes(np.stack(pool.memory.owners).swapaxes(0, 1), kv[[1, 1, 0]])


def test_an_array_named_twice(other):
    block = np.zeros((NH, NL, NO, NT, HD), np.uint16)
    twice = kk.UniversalBlocks([block, np.zeros_like(block), block], SHAPE)
    refuses(twice, other, "dst has rows that overlap")
    kk.copy_blocks(twice[[0, 1]], other[:2])


def test_a_chunk_named_twice(other):
    chunk = np.zeros((NT, NH, HD), np.uint16)
    stack = kk.BlockStack([[np.zeros_like(chunk), chunk, np.zeros_like(chunk), chunk]], SHAPE)
    refuses(stack, other[[0]], "dst has rows that overlap")


def test_a_layer_named_twice(kv, other):
    tensors = layers(kv)
    refuses(kk.BlockStack.from_layers([tensors[0]] * NL, SHAPE), other, "dst has rows that overlap")


def test_rows_that_a_stride_lays_over_each_other(torch, other):
    """A tensor expanded over tokens, and windows that slide by less than a row."""
    expanded = torch.zeros(NB, NO, 1, NH, HD, dtype=torch.int16).expand(NB, NO, NT, NH, HD)
    refuses(kk.BlockStack.from_layers([expanded] * NL, SHAPE), other, "dst has rows that overlap")
    memory = np.zeros(4096, np.uint16)
    sliding = np.lib.stride_tricks.as_strided(memory, (NB, NH, NL, NO, NT, HD), (1280, 320, 160, 80, 16, 2))
    refuses(kk.UniversalBlocks(sliding, SHAPE), other, "dst has rows that overlap")


def test_a_view_onto_itself(pool):
    refuses(pool, pool, "dst and src overlap")


def test_the_same_memory_through_another_view(kv, other):
    tensors = layers(kv)
    one, two = kk.BlockStack.from_layers(tensors, SHAPE), kk.BlockStack.from_layers(tensors, SHAPE)
    refuses(one[[0]], two[[0]], "dst and src overlap")
    kk.copy_blocks(one[[0]], two[[1]])


def test_from_one_block_of_a_pool_to_another(pool, kv):
    kk.copy_blocks(pool[[2]], pool[[0]])
    reference.assert_same_bytes(np.stack(pool.memory.owners).swapaxes(0, 1), kv[[0, 1, 0]])


def test_a_chain_through_a_pool(pool):
    refuses(pool[[1, 2]], pool[[0, 1]], "dst and src overlap")


@pytest.mark.parametrize("kind", KINDS)
def test_between_parts_of_one_block(kv, kind):
    """Heads 0-1 to heads 2-3, one token, one layer to the next: all inside the same blocks."""
    view, read_back = views(kv.copy(), SHAPE)[kind]
    expected = kv.copy()
    kk.copy_blocks(view.heads(2, 4), view.heads(0, 2))
    expected[:, :, :, :, 2:4] = expected[:, :, :, :, 0:2]
    kk.copy_blocks(view.tokens(4, 5), view.tokens(0, 1))
    expected[:, :, :, 4] = expected[:, :, :, 0]
    kk.copy_blocks(view.layers(1, 2), view.layers(0, 1))
    expected[:, 1] = expected[:, 0]
    reference.assert_same_bytes(read_back(), expected)
    for dst, src in (
        (view.heads(1, 3), view.heads(0, 2)),
        (view.tokens(1, 5), view.tokens(0, 4)),
        (view.heads(0, 1).layers(0, 1), view.heads(0, 1).layers(0, 1)),
    ):
        with pytest.raises(ValueError, match="dst and src overlap"):
            kk.copy_blocks(dst, src)


def test_between_interleaved_views_of_one_tensor(kv):
    """K to V where both are slices of the same packed rows, which only the rows themselves tell apart."""
    tensors = packed(kv)
    shape = dataclasses.replace(SHAPE, no=1)
    k = kk.BlockStack.from_layers([t[..., :HD] for t in tensors], shape, "bthd")
    v = kk.BlockStack.from_layers([t[..., HD:] for t in tensors], shape, "bthd")
    across = kk.BlockStack.from_layers([t[..., HD - 1 : -1] for t in tensors], shape, "bthd")
    kk.copy_blocks(v, k)
    reference.assert_same_bytes(tensors[0][..., HD:], tensors[0][..., :HD])
    refuses(across, k, "dst and src overlap")


def test_pairs_of_interleaved_slices_can_be_written(kv, other):
    """The K and V of each layer, and the layers of a pool, as separate tensors over the same bytes."""
    tensors = packed(np.zeros_like(kv))
    pairs = [(t[..., :HD], t[..., HD:]) for t in tensors]
    kk.copy_blocks(kk.BlockStack.from_layers(pairs, SHAPE, "bthd"), other)
    reference.assert_same_bytes(np.stack(tensors), np.stack(packed(kv)))
    pool = np.zeros((NB, NL, NO, NT, NH, HD), BF16)
    kk.copy_blocks(kk.BlockStack.from_layers([pool[:, i] for i in range(NL)], SHAPE), other)
    reference.assert_same_bytes(pool, kv)


def test_nested_interleaved_chunks_can_be_written(kv, other):
    tensors = packed(np.zeros_like(kv))
    blocks = [[t[b, ..., o * HD :][..., :HD] for t in tensors for o in range(NO)] for b in range(NB)]
    kk.copy_blocks(kk.BlockStack(blocks, SHAPE), other)
    reference.assert_same_bytes(np.stack(tensors), np.stack(packed(kv)))
    blocks[1][2] = tensors[1][1, ..., 1 : HD + 1]
    refuses(kk.BlockStack(blocks, SHAPE), other, "dst has rows that overlap")


def test_backwards_strides(kv, other):
    """An array of negative strides lies below its address."""
    memory = np.zeros_like(reference.universal(kv))
    kk.copy_blocks(kk.UniversalBlocks(memory[::-1, ::-1, ::-1], SHAPE), other)
    reference.assert_same_bytes(memory[::-1, ::-1, ::-1], reference.universal(kv))
    half = dataclasses.replace(SHAPE, nt=NT - 1)
    backwards = kk.UniversalBlocks(memory[:, ::-1, :, :, 1:][:, ::-1], half)
    forwards = kk.UniversalBlocks(memory[:, :, :, :, :-1], half)
    refuses(backwards, forwards, "dst and src overlap")


class TestGroupsInOneBuffer:
    """Engines keep groups of layers in one buffer, and a connector copies them at every step: no row is looked at."""

    @pytest.fixture(autouse=True)
    def nothing_laid_out(self, monkeypatch):
        def fail(_):
            raise AssertionError("strides alone tell that these views share nothing")

        monkeypatch.setattr(overlap, "_runs", fail)

    def group(self, buffer, shape=SHAPE):
        return kk.BlockStack.from_layers(list(buffer), shape)

    def test_side_by_side_in_each_block(self, kv):
        """Blocks of all layers, [num_blocks, layers, ...], and two groups of the layers."""
        blocks = np.zeros((NB, 2 * NL, NO, NT, NH, HD), BF16)
        layers_first = blocks.swapaxes(0, 1)
        kk.copy_blocks(self.group(layers_first[:NL]), self.group(layers_first[NL:]))

    @pytest.mark.parametrize("layers_outermost", [True, False])
    def test_over_each_other_in_different_blocks(self, layers_outermost):
        """A block belongs to one group at a time, which may divide it in another way."""
        narrow = dataclasses.replace(SHAPE, nt=2 * NT, hd=HD // 2)
        extents = (NL, NB) if layers_outermost else (NB, NL)
        wide = np.zeros((*extents, NO, NT, NH, HD), BF16)
        same = wide.reshape(*extents, NO, 2 * NT, NH, HD // 2)
        if not layers_outermost:
            wide, same = wide.swapaxes(0, 1), same.swapaxes(0, 1)
        outs = [np.zeros_like(wide.swapaxes(0, 1)[:1]), np.zeros_like(same.swapaxes(0, 1)[:1])]
        srcs = [self.group(out.swapaxes(0, 1), shape) for out, shape in zip(outs, (SHAPE, narrow), strict=True)]
        kk.copy_blocks([self.group(wide)[[2]], self.group(same, narrow)[[0]]], srcs)
