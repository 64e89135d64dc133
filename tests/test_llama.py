"""A real model's cache makes the journey: cut into blocks, saved, re-sharded, loaded; and generation goes on.

A small Llama with random weights, on the CPU.
"""

from __future__ import annotations

import pytest

import kvbm_kernels as kk
from model_caches import logits_of
from reference import heads_of_rank

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("default")

NUM_LAYERS = 3
NUM_TOKENS = 64
TOKENS_PER_BLOCK = 16
HEAD_DIM = 32
STEPS = 8


def small_llama(num_kv_heads: int):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=8 * HEAD_DIM,
        intermediate_size=256,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=8,
        num_key_value_heads=num_kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=256,
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()


def prefill(model):
    prompt = torch.randint(0, 256, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(1))
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        logits = logits_of(model, prompt, cache)
    return logits[:, -1:].argmax(-1), cache


def generate(model, token, cache) -> list:
    logits = []
    with torch.no_grad():
        for _ in range(STEPS):
            logits.append(logits_of(model, token, cache))
            token = logits[-1].argmax(-1)
    return logits


def blocks_of_cache(layers: list, shape: kk.BlockShape) -> kk.BlockStack:
    """Tensors [1, nh, tokens, hd], a (keys, values) pair a layer, seen as blocks of tokens."""
    pages = (-1, shape.nt)
    pairs = [[tensor[0].unflatten(1, pages) for tensor in pair] for pair in layers]
    return kk.BlockStack.from_layers(pairs, shape, axes="hbtd")


def rank_blocks(shape: kk.BlockShape, num_blocks: int, size: int, layout: str) -> list[kk.BlockStack]:
    """Empty block stacks for each of ``size`` ranks, a tensor a layer, poisoned."""
    stacks = []
    for rank in range(size):
        heads = heads_of_rank(shape.nh, rank, size)
        own = kk.BlockShape(shape.nl, shape.no, heads.stop - heads.start, shape.nt, shape.hd, shape.dtype)
        axes, inner = ("bothd", (own.nt, own.nh)) if layout == "NHD" else ("bohtd", (own.nh, own.nt))
        tensors = [
            torch.full((num_blocks, own.no, *inner, own.hd), float("nan"), dtype=torch.bfloat16) for _ in range(own.nl)
        ]
        stacks.append(kk.BlockStack.from_layers(tensors, own, axes=axes))
    return stacks


def writers(nh: int, size: int) -> list[int]:
    """The ranks that write on the way back: one of those that hold the same heads."""
    return list(range(size)) if nh % size == 0 else list(range(0, size, size // nh))


@pytest.mark.parametrize("num_kv_heads", [8, 1], ids=["gqa", "mqa"])
def test_generation_goes_on_after_save_reshard_and_load(num_kv_heads: int) -> None:
    """2 ranks NHD -> universal -> 4 ranks HND -> a fresh cache: the logits are those of the run that never stopped."""
    model = small_llama(num_kv_heads)
    first, cache = prefill(model)
    kept = [[layer.keys.clone(), layer.values.clone()] for layer in cache.layers]
    expected = generate(model, first, cache)

    shape = kk.BlockShape(NUM_LAYERS, 2, num_kv_heads, TOKENS_PER_BLOCK, HEAD_DIM, "bf16")
    engine = blocks_of_cache(kept, shape)
    num_blocks = len(engine)
    assert num_blocks == NUM_TOKENS // TOKENS_PER_BLOCK

    two = rank_blocks(shape, num_blocks, 2, "NHD")
    for rank, stack in enumerate(two):
        kk.copy_blocks(stack, engine.shard(rank, 2))

    saved = torch.full(
        (num_blocks, num_kv_heads, NUM_LAYERS, 2, TOKENS_PER_BLOCK, HEAD_DIM), float("nan"), dtype=torch.bfloat16
    )
    universal = kk.UniversalBlocks(saved, shape)
    for rank in writers(num_kv_heads, 2):
        kk.copy_blocks(universal.shard(rank, 2), two[rank])

    four = rank_blocks(shape, num_blocks, 4, "HND")
    for rank, stack in enumerate(four):
        kk.copy_blocks(stack, universal.shard(rank, 4))

    fresh = [[torch.full_like(tensor, float("nan")) for tensor in pair] for pair in kept]
    loaded = blocks_of_cache(fresh, shape)
    for rank in writers(num_kv_heads, 4):
        kk.copy_blocks(loaded.shard(rank, 4), four[rank])

    restored = transformers.DynamicCache(config=model.config)
    for layer, (keys, values) in enumerate(fresh):
        restored.update(keys, values, layer)
    actual = generate(model, first, restored)
    for step, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(a, e), f"logits of step {step} differ"
