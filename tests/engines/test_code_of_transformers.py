"""transformers: the paged cache of its continuous batching, and caches of fixed size. test_models.py has the rest."""

from __future__ import annotations

import types

import pytest

import kvbm_kernels as kk


@pytest.fixture
def config(load):
    return load("transformers").LlamaConfig(
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, head_dim=16, hidden_size=64
    )


def paged(load, config):
    import torch

    module = load("transformers.generation.continuous_batching.cache")
    batching = load("transformers").generation.ContinuousBatchingConfig(
        page_size=8, num_blocks=32, max_batch_tokens=64, max_requests_per_batch=4, max_memory_percent=0.5
    )
    one_rank = types.SimpleNamespace(tp_size=1)
    return module.PagedAttentionCache(config, batching, "cpu", one_rank, torch.bfloat16)


def test_blocks_of_continuous_batching(load, logical, config):
    """What it writes for a request is read by its block table, and what is restored it reads for another request."""
    import torch

    cache = logical()
    engine = paged(load, config)
    allocator = engine.cache_allocators["full_attention"]
    # Another request first, so that blocks do not begin at the first.
    for name, tokens in (("other", 20), ("request", 40), ("restored", 40)):
        state = types.SimpleNamespace(request_id=name, current_len=lambda: 0)
        assert engine.can_store_request_tokens(state, tokens)
    everything = torch.arange(40)
    for i, (keys, values) in enumerate(cache.tokens):
        at = torch.tensor(allocator.get_write_indices("request", 0, 40))
        allocator.update(keys, values, i, everything[:0], at)
    blocks = kk.engines.from_transformers_paged(
        engine.cache_tensor,
        num_layers=3,
        page_size=allocator.tokens_per_page,
        num_kv_heads=4,
        head_size=16,
        blocks_per_sector=allocator.blocks_per_sector,
        dtype="bf16",
    )
    cache.assert_read(blocks[allocator.block_table["request"]])
    cache.write(blocks[allocator.block_table["restored"]])
    at = torch.tensor(allocator.get_read_indices("restored", 0, 40))
    for i, (keys, values) in enumerate(cache.tokens):
        k_view, v_view = allocator._kv_token_views[i]
        assert torch.equal(k_view[at].view(torch.int16), keys.view(torch.int16))
        assert torch.equal(v_view[at].view(torch.int16), values.view(torch.int16))


def test_a_cache_of_fixed_size(load, logical, config):
    """40 tokens in a StaticCache with room for 64."""
    import torch

    cache = logical()
    own = load("transformers").StaticCache(config=config, max_cache_len=64)
    for i, (keys, values) in enumerate(cache.tokens):
        own.update(keys.transpose(0, 1)[None], values.transpose(0, 1)[None], i, {"cache_position": torch.arange(40)})
    blocks = kk.engines.from_transformers([(layer.keys, layer.values) for layer in own.layers], block_size=8)
    assert len(blocks) == 8
    cache.assert_read(blocks[:5])
