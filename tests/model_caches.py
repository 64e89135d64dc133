"""Small models of transformers with random weights, and the journey that their caches make.

The blocks of a cache go to the ranks of one tensor-parallel size, each with a pool of its own, are saved as universal
blocks, loaded by the ranks of another size, and come back into a fresh cache: each step is one call for all groups of
layers, between views that a plan narrows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import kvbm_kernels as kk

TOKENS_PER_BLOCK = 16
# Past every window, and no multiple of a block.
PROMPT_TOKENS = 77
STEPS = 6
VOCABULARY = 256

_COMMON = dict(
    vocab_size=VOCABULARY,
    hidden_size=96,
    intermediate_size=128,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    # Ten times the usual, or all tokens would look alike to the model.
    initializer_range=0.2,
    tie_word_embeddings=False,
)
_SLIDING = ["sliding_attention", "full_attention"] * 2


class Model(NamedTuple):
    """The name of its classes, its configuration, and the tensor-parallel sizes that its cache moves between."""

    name: str
    config: dict[str, Any]
    sizes: tuple[int, int]


MODELS = {
    "Llama": Model(
        "Llama", dict(num_hidden_layers=3, num_attention_heads=12, num_key_value_heads=6, head_dim=32), (2, 3)
    ),
    "Llama, 10 heads": Model(
        "Llama",
        dict(num_hidden_layers=2, num_attention_heads=10, num_key_value_heads=10, head_dim=16, hidden_size=160),
        (5, 2),
    ),
    "Qwen3": Model(
        "Qwen3", dict(num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4, head_dim=24), (4, 2)
    ),
    # More ranks than heads on one side.
    "Gemma3": Model(
        "Gemma3",
        dict(
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            sliding_window=40,
            layer_types=_SLIDING,
        ),
        (1, 4),
    ),
    # Global layers have fewer heads with longer rows.
    "Gemma4": Model(
        "Gemma4",
        dict(
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_global_key_value_heads=1,
            head_dim=16,
            global_head_dim=32,
            sliding_window=24,
            layer_types=_SLIDING,
            attention_k_eq_v=True,
            num_kv_shared_layers=0,
            hidden_size_per_layer_input=16,
            vocab_size_per_layer_input=VOCABULARY,
        ),
        (2, 1),
    ),
    "GPT-OSS": Model(
        "GptOss",
        dict(
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=16,
            sliding_window=32,
            layer_types=_SLIDING,
            num_local_experts=4,
            num_experts_per_tok=2,
        ),
        (2, 8),
    ),
    # Latents of two lengths in the place of K and V, with a head that all ranks have.
    "DeepSeek-V3": Model(
        "DeepseekV3",
        dict(
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            kv_lora_rank=64,
            q_lora_rank=48,
            qk_rope_head_dim=16,
            qk_nope_head_dim=24,
            v_head_dim=32,
            moe_intermediate_size=32,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
        ),
        (4, 2),
    ),
    # Rows of K longer than those of V, and windows.
    "MiMo-V2": Model(
        "MiMoV2Flash",
        dict(
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=24,
            v_head_dim=16,
            swa_num_attention_heads=4,
            swa_num_key_value_heads=4,
            swa_head_dim=24,
            swa_v_head_dim=16,
            sliding_window=32,
            layer_types=_SLIDING,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
        ),
        (2, 4),
    ),
}


def config_class(transformers: Any, model: Model) -> Any:
    """The class of its configuration, or of its text part's; None where transformers has no such model."""
    return getattr(transformers, f"{model.name}TextConfig", None) or getattr(transformers, f"{model.name}Config", None)


def build(transformers: Any, torch: Any, model: Model, device: str) -> Any:
    """The model with random weights in bf16."""
    torch.manual_seed(0)
    config = config_class(transformers, model)(**{**_COMMON, **model.config})
    language_model = getattr(transformers, f"{model.name}ForCausalLM")(config)
    return language_model.to(torch.bfloat16).to(device).eval()


def logits_of(model: Any, tokens: Any, cache: Any) -> Any:
    """What a model makes of tokens behind those that a cache has seen, which sees them too."""
    # By its place: releases of transformers differ in whether it is called past_key_values or cache.
    return model(tokens, None, None, cache, use_cache=True).logits


def prefill(transformers: Any, torch: Any, model: Any) -> tuple[Any, Any]:
    """The first token after a prompt, and the cache."""
    prompt = torch.randint(3, VOCABULARY, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        logits = logits_of(model, prompt.to(model.device), cache)
    return logits[:, -1:].argmax(-1), cache


def generate(torch: Any, model: Any, token: Any, cache: Any) -> list[Any]:
    """The logits of the next steps; each step's likeliest token is the next one's input."""
    logits = []
    with torch.no_grad():
        for _ in range(STEPS):
            logits.append(logits_of(model, token, cache))
            token = logits[-1].argmax(-1)
    return logits


def tensors_of(cache: Any) -> list[tuple[Any, Any]]:
    """K and V of each layer, copied: [1, heads, tokens, row], of all tokens or of those in the window."""
    return [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]


def restored(transformers: Any, config: Any, tensors: list[tuple[Any, Any]]) -> Any:
    """A cache that has seen the prompt and holds these tensors."""
    cache = transformers.DynamicCache(config=config)
    for layer, (keys, values) in zip(cache.layers, tensors, strict=True):
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        if layer.is_sliding:
            layer.cumulative_length = PROMPT_TOKENS
    return cache


class Group(NamedTuple):
    """Layers, and K, V or both of them, whose rows are alike, in the cache's own tensors."""

    layers: list[tuple[Any, Any]]
    part: Any
    shape: kk.BlockShape
    first_token: int

    @property
    def blocks(self) -> range:
        """The blocks that the tokens lie in, counted from the beginning of the sequence."""
        return range(self.first_token // TOKENS_PER_BLOCK, -(-PROMPT_TOKENS // TOKENS_PER_BLOCK))


def groups_of(tensors: list[tuple[Any, Any]]) -> list[Group]:
    """The groups of a cache, in the order of their first layers."""
    alike: dict[Any, list[tuple[Any, Any]]] = {}
    for keys, values in tensors:
        alike.setdefault((keys.shape, values.shape), []).append((keys, values))
    groups = []
    for (of_keys, of_values), layers in alike.items():
        parts = [None] if of_keys == of_values else ["k", "v"]
        for part, (_, nh, tokens, hd) in zip(parts, (of_keys, of_values), strict=False):
            shape = kk.BlockShape(len(layers), 2 if part is None else 1, nh, TOKENS_PER_BLOCK, hd, "bf16")
            groups.append(Group(layers, part, shape, PROMPT_TOKENS - tokens))
    return groups


def pieces(group: Group) -> list[tuple[kk.View, slice, tuple[int, int]]]:
    """Views of a group's own tensors, and for each the blocks and the tokens within them that it has.

    A window begins, and a sequence ends, within a block; what is there of it is a view of a block of fewer tokens.
    """
    first, nt = group.blocks.start, TOKENS_PER_BLOCK
    starts = [group.first_token, *range((first + 1) * nt, PROMPT_TOKENS, nt), PROMPT_TOKENS]
    found = []
    for (offset, count), run in itertools.groupby(
        itertools.pairwise(starts), lambda ends: (ends[0] % nt, ends[1] - ends[0])
    ):
        blocks = [start for start, _ in run]
        view = kk.engines.from_transformers(
            group.layers, block_size=count, start=blocks[0] - group.first_token, part=group.part
        )
        place = blocks[0] // nt - first
        found.append((view[: len(blocks)], slice(place, place + len(blocks)), (offset, offset + count)))
    return found


def pools(torch: Any, group: Group, size: int, layout: str, device: str) -> list[kk.BlockStack]:
    """A pool for each rank, twice as large as the sequence, and the sequence in blocks of it out of order."""
    stacks = []
    shape = group.shape
    for rank in range(size):
        start, stop = kk.tp.heads_of_rank(rank, size, shape.nh)
        own = kk.BlockShape(shape.nl, shape.no, stop - start, shape.nt, shape.hd, "bf16")
        axes, inner = ("bothd", (own.nt, own.nh)) if layout == "NHD" else ("bohtd", (own.nh, own.nt))
        count = 2 * len(group.blocks)
        tensors = [poisoned(torch, (count, own.no, *inner, own.hd), device=device) for _ in range(own.nl)]
        ids = np.random.default_rng(rank).permutation(count)[: len(group.blocks)]
        stacks.append(kk.BlockStack.from_layers(tensors, own, axes=axes)[ids])
    return stacks


def poisoned(torch: Any, shape: tuple[int, ...], **where: Any) -> Any:
    """Memory that would show wherever it is read before it is written."""
    return torch.full(shape, float("nan"), dtype=torch.bfloat16, **where)


def journey(
    torch: Any, tensors: list[tuple[Any, Any]], sizes: tuple[int, int], device: str, store: Callable[..., Any]
) -> list[tuple[Any, Any]]:
    """A cache's tensors after the way there and back. ``store`` makes the memory that is saved to, of a shape."""
    fresh = [(torch.full_like(keys, float("nan")), torch.full_like(values, float("nan"))) for keys, values in tensors]
    groups = groups_of(tensors)
    first = [pools(torch, group, sizes[0], "NHD", device) for group in groups]
    second = [pools(torch, group, sizes[1], "HND", device) for group in groups]
    saved = []
    for group in groups:
        nl, no, nh, nt, hd = (getattr(group.shape, extent) for extent in ("nl", "no", "nh", "nt", "hd"))
        saved.append(kk.UniversalBlocks(store((len(group.blocks), nh, nl, no, nt, hd)), group.shape))

    def of_cache(groups: list[Group], ranks: list[list[kk.BlockStack]]) -> list[tuple[list[kk.View], list[kk.View]]]:
        """The pieces of each group's own tensors, and the same tokens in the pools of the ranks."""
        return [
            ([view], [pool[blocks].tokens(*tokens) for pool in own])
            for group, own in zip(groups, ranks, strict=True)
            for view, blocks, tokens in pieces(group)
        ]

    copy_all(of_cache(groups, first), to_ranks=True)
    copy_all([([blocks], own) for blocks, own in zip(saved, first, strict=True)], to_ranks=False)
    copy_all([([blocks], own) for blocks, own in zip(saved, second, strict=True)], to_ranks=True)
    copy_all(of_cache(groups_of(fresh), second), to_ranks=False)
    return fresh


def copy_all(pairs: list[tuple[list[kk.View], list[kk.View]]], *, to_ranks: bool) -> None:
    """Between the one that has all heads and the ranks, in the one call that all groups are."""
    dsts: list[kk.View] = []
    srcs: list[kk.View] = []
    for whole, ranks in pairs:
        nh = whole[0].shape.nh
        if to_ranks:
            to, of = kk.tp.plan(1, len(ranks), nh).views(ranks, whole)
        else:
            to, of = kk.tp.plan(len(ranks), 1, nh).views(whole, ranks)
        dsts += to
        srcs += of
    kk.copy_blocks(dsts, srcs)
