"""What the KV caches of well-known models look like: the presets of ``--model``."""

from __future__ import annotations

from typing import NamedTuple


class Model(NamedTuple):
    """The extents of a model's KV cache, of all tensor-parallel ranks together."""

    title: str
    layers: int
    kv_heads: int
    head_dim: int
    outer_dim: int = 2
    """2 for K and V; 1 where one latent row stands for both (MLA)."""


DEFAULT = "llama-3.1-70b"

# Models whose layers all have the same heads, with rows of K as long as rows of V.
MODELS = {
    "llama-3.1-8b": Model("Llama 3.1 8B", 32, 8, 128),
    "llama-3.1-70b": Model("Llama 3.1 70B", 80, 8, 128),
    "llama-3.1-405b": Model("Llama 3.1 405B", 126, 8, 128),
    "llama-3.2-1b": Model("Llama 3.2 1B", 16, 8, 64),
    "qwen2.5-0.5b": Model("Qwen2.5 0.5B", 24, 2, 64),
    "qwen2.5-7b": Model("Qwen2.5 7B", 28, 4, 128),
    "qwen2.5-72b": Model("Qwen2.5 72B", 80, 8, 128),
    "qwen3-0.6b": Model("Qwen3 0.6B", 28, 8, 128),
    "qwen3-8b": Model("Qwen3 8B", 36, 8, 128),
    "qwen3-32b": Model("Qwen3 32B", 64, 8, 128),
    "qwen3-30b-a3b": Model("Qwen3 30B A3B", 48, 4, 128),
    "qwen3-235b-a22b": Model("Qwen3 235B A22B", 94, 4, 128),
    "mistral-7b": Model("Mistral 7B", 32, 8, 128),
    "mixtral-8x7b": Model("Mixtral 8x7B", 32, 8, 128),
    "mistral-large": Model("Mistral Large 2411", 88, 8, 128),
    "gemma-2-2b": Model("Gemma 2 2B", 26, 4, 256),
    "gemma-2-9b": Model("Gemma 2 9B", 42, 8, 256),
    "gemma-2-27b": Model("Gemma 2 27B", 46, 16, 128),
    "gemma-3-1b": Model("Gemma 3 1B", 26, 1, 256),
    "gemma-3-4b": Model("Gemma 3 4B", 34, 4, 256),
    "gemma-3-12b": Model("Gemma 3 12B", 48, 8, 256),
    "gemma-3-27b": Model("Gemma 3 27B", 62, 16, 128),
    "phi-3-mini": Model("Phi-3 mini", 32, 32, 96),
    "phi-4": Model("Phi-4", 40, 10, 128),
    "phi-2": Model("Phi-2", 32, 32, 80),
    "mpt-30b": Model("MPT 30B", 48, 64, 112),
    "gpt-oss-120b": Model("GPT-OSS 120B", 36, 8, 64),
    "deepseek-v3": Model("DeepSeek V3", 61, 1, 576, outer_dim=1),
    "glm-4.5": Model("GLM-4.5", 92, 8, 128),
    "falcon-7b": Model("Falcon 7B", 32, 1, 64),
    "falcon-40b": Model("Falcon 40B", 60, 8, 64),
    "falcon-180b": Model("Falcon 180B", 80, 8, 64),
    "falcon3-7b": Model("Falcon3 7B", 28, 4, 256),
}
