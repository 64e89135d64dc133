#!/usr/bin/env bash
# The tests with the engines' own code: vLLM, SGLang, LMCache, FlashInfer and transformers, as their packages have it.
# Downloads about 1 GB. No GPU is needed, and nothing of the engines is built; what cannot be loaded is skipped with the
# reason, at the end of the output.
source "$(dirname "$0")/lib.sh"

step 'Set up'
use_venv engines-venv
(hide_nvcc; pip install --quiet '.[test]')
pip install --quiet torch==2.13.0 transformers
# Without what they depend on: it pins other versions of PyTorch, and is mostly for GPUs.
pip install --quiet --no-warn-conflicts --no-deps flashinfer-python==0.7.4 lmcache==0.5.6 sglang==0.5.23 vllm==0.33.0
# What of it their files import.
pip install --quiet --no-warn-conflicts aiohttp apache-tvm-ffi cachetools compressed-tensors dill einops fastapi gguf \
  interegular ipython msgspec numba nvidia-ml-py openai orjson partial-json-parser pillow prometheus_client psutil \
  py-cpuinfo pybase64 python-multipart pyzmq requests scipy setproctitle tabulate triton uvicorn uvloop xxhash zstandard

step 'Tests'
CUDA_VISIBLE_DEVICES='' pytest -q -rs -m engines tests/engines "$@"
