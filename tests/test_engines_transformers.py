"""The caches of transformers as it makes them itself."""

from __future__ import annotations

import numpy as np
import pytest

import kvbm_kernels as kk
import reference
from kvbm_kernels.engines import from_transformers, from_transformers_paged, layer_groups

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LAYERS, HEADS, HEAD_DIM, BLOCK = 3, 2, 16, 4


def config(**changes):
    return transformers.LlamaConfig(
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=HEADS,
        hidden_size=4 * HEAD_DIM,
        head_dim=HEAD_DIM,
        **changes,
    )


def states(tokens: int, batch: int = 1) -> torch.Tensor:
    """K or V as a model has them, [batch, heads, tokens, head_dim], in memory tokens first."""
    return torch.randn(batch, tokens, HEADS, HEAD_DIM, dtype=torch.bfloat16).transpose(1, 2)


def filled(cache, tokens: list[int], batch: int = 1):
    """What was put into the cache, [layers, 2, batch, heads, all tokens, head_dim]."""
    parts = []
    for count in tokens:
        step = [[states(count, batch) for _ in "kv"] for _ in range(LAYERS)]
        for layer, (k, v) in enumerate(step):
            cache.update(k, v, layer)
        parts.append(torch.stack([torch.stack(pair) for pair in step]))
    return torch.cat(parts, -2).view(torch.int16).numpy()


def pairs(cache):
    return [(layer.keys, layer.values) for layer in cache.layers]


def saved(view: kk.View) -> np.ndarray:
    """The rows of a view as [blocks, layers, 2, tokens, heads, head_dim]."""
    shape = view.shape
    out = np.zeros((len(view), shape.nh, shape.nl, shape.no, shape.nt, shape.hd), np.int16)
    kk.copy_blocks(kk.UniversalBlocks(out, shape), view)
    return reference.from_universal(out)


def blocks_of(put: np.ndarray, sequence: int, start: int, size: int) -> np.ndarray:
    """[layers, 2, batch, heads, tokens, head_dim] as the blocks of one sequence."""
    tokens = put[:, :, sequence, :, start:]
    whole = tokens[..., : tokens.shape[-2] // size * size, :]
    split = whole.reshape(*whole.shape[:3], -1, size, HEAD_DIM)
    return split.transpose(3, 0, 1, 4, 2, 5)


@pytest.mark.parametrize("batch", [1, 3])
def test_dynamic_cache(batch):
    """A prompt and some single tokens; whole blocks, and what is left behind them as one smaller block."""
    cache = transformers.DynamicCache(config=config())
    put = filled(cache, [7, 1, 1, 1, 1], batch)
    sequence = batch - 1
    view = from_transformers(pairs(cache), block_size=BLOCK, sequence=sequence)
    assert (len(view), view.num_reserved, view.layout) == (2, 0, kk.Layout.HND)
    reference.assert_same_bytes(saved(view), blocks_of(put, sequence, 0, BLOCK))
    rest = from_transformers(pairs(cache), block_size=3, sequence=sequence, start=8)
    reference.assert_same_bytes(saved(rest), blocks_of(put, sequence, 8, 3))


def test_static_cache():
    """Rows are as far apart as the cache is long, and what is written into the view is in the cache."""
    cache = transformers.StaticCache(config=config(), max_cache_len=18)
    put = filled(cache, [6, 2])
    view = from_transformers(pairs(cache), block_size=BLOCK)
    assert len(view) == 4
    reference.assert_same_bytes(saved(view[:2]), blocks_of(put, 0, 0, BLOCK))
    kk.copy_blocks(view[2:4], kk.UniversalBlocks(reference.universal(blocks_of(put, 0, 0, BLOCK)), view.shape))
    for layer, outers in enumerate(pairs(cache)):
        for outer, tensor in enumerate(outers):
            reference.assert_same_bytes(tensor[0, :, 8:16].view(torch.int16).numpy(), put[layer, outer, 0, :, :8])


def test_layers_with_a_sliding_window_are_a_view_of_their_own():
    windows = config()
    windows.layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    windows.sliding_window = 9
    cache = transformers.DynamicCache(config=windows)
    put = filled(cache, [12, 1])
    with pytest.raises(
        ValueError, match=r"layers\[1\]\[0\] has shape \[1, 2, 13, 16\] .* expected the shape \[1, 2, 8, 16\]"
    ):
        from_transformers(pairs(cache), block_size=BLOCK)
    full = from_transformers([pairs(cache)[1]], block_size=BLOCK)
    reference.assert_same_bytes(saved(full), blocks_of(put[1:2], 0, 0, BLOCK))
    sliding = from_transformers([pairs(cache)[0], pairs(cache)[2]], block_size=BLOCK)
    reference.assert_same_bytes(saved(sliding), blocks_of(put[::2, :, :, :, 5:], 0, 0, BLOCK))


def test_blocks_of_continuous_batching():
    """Written by the allocator's own update, read by its block ids; and one run of bytes each."""
    allocators = pytest.importorskip("transformers.generation.continuous_batching.cache_allocators")
    pools = pytest.importorskip("transformers.generation.continuous_batching.cache_allocators.cache_pool")
    allocator = allocators.FullAttentionCacheAllocator(
        index=0,
        config=config(),
        num_key_value_heads=HEADS,
        cache_dtype=torch.bfloat16,
        page_size=BLOCK,
        layer_indices=[0, 1, 2],
        allow_block_sharing=False,
    )
    per_sector = 2
    sector = per_sector * allocator.bytes_per_block
    memory = torch.zeros(5 * sector, dtype=torch.uint8)
    pool = pools.CachePool(3, 1)
    allocator.register_cache_tensor(sector, 3 * sector, memory, pool)
    for _ in range(3):
        pool.allocate_sector(0)
    tokens = 3 * BLOCK
    allocator.allocate_cache_to_request("one", 0, tokens)
    ids = allocator.block_table["one"]
    where = torch.tensor(allocator.get_write_indices("one", 0, tokens))
    put = [[torch.randn(tokens, HEADS, HEAD_DIM, dtype=torch.bfloat16) for _ in "kv"] for _ in range(LAYERS)]
    for layer, (k, v) in enumerate(put):
        allocator.update(k, v, layer, torch.empty(0, dtype=torch.int64), where)
    expected = torch.stack([torch.stack(pair) for pair in put]).view(torch.int16).numpy()
    expected = expected.reshape(LAYERS, 2, 3, BLOCK, HEADS, HEAD_DIM).transpose(2, 0, 1, 3, 4, 5)
    for tensor in (memory, allocator.cache_tensor):
        view = from_transformers_paged(
            tensor,
            num_layers=LAYERS,
            page_size=BLOCK,
            num_kv_heads=HEADS,
            head_size=HEAD_DIM,
            blocks_per_sector=allocator.blocks_per_sector,
            dtype="bf16",
        )
        assert (view.num_reserved, view.num_blocks) == (2 * per_sector, 5 * per_sector)
        assert min(ids) >= view.num_reserved
        reference.assert_same_bytes(saved(view[ids]), expected)
    assert view.shape.block_nbytes == allocator.bytes_per_block


def test_groups_of_a_hybrid_cache():
    """Layers that hold as many blocks are together."""
    windows = config()
    windows.layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    windows.sliding_window = 9
    cache = transformers.DynamicCache(config=windows)
    put = filled(cache, [12, 1])
    groups = layer_groups(from_transformers, pairs(cache), block_size=BLOCK)
    assert groups.layers == ((0, 2), (1,))
    assert [len(view) for view in groups] == [2, 3]
    reference.assert_same_bytes(saved(groups[1]), blocks_of(put[1:2], 0, 0, BLOCK))
