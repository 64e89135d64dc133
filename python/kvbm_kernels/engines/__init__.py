"""From the tensors of inference engines to views of their blocks, in one line each.

Only tensors and names are taken, and no engine is imported. Every function returns an :class:`EngineBlocks`, a block
stack like any other, that takes the engine's own block ids; caches that no one view describes are several, a
:class:`LayerGroups`. docs/engines has a page for each engine.
"""

from kvbm_kernels.engines.blocks import EngineBlocks, split_blocks
from kvbm_kernels.engines.flashinfer import from_flashinfer
from kvbm_kernels.engines.groups import LayerGroups, layer_groups
from kvbm_kernels.engines.llama_cpp import from_llama_cpp
from kvbm_kernels.engines.lmcache import from_lmcache
from kvbm_kernels.engines.sglang import from_sglang
from kvbm_kernels.engines.tensorrt_llm import from_tensorrt_llm
from kvbm_kernels.engines.transformers import from_transformers, from_transformers_paged
from kvbm_kernels.engines.vllm import from_vllm, from_vllm_buffer

__all__ = [
    "EngineBlocks",
    "LayerGroups",
    "from_flashinfer",
    "from_llama_cpp",
    "from_lmcache",
    "from_sglang",
    "from_tensorrt_llm",
    "from_transformers",
    "from_transformers_paged",
    "from_vllm",
    "from_vllm_buffer",
    "layer_groups",
    "split_blocks",
]
