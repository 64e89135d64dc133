"""Conversions on the GPU at the shapes of real models, and between pools as engines hold them."""

from __future__ import annotations

import numpy as np
import pytest

import reference
from gpu_layouts import Layout, convert, pool_slots, spread
from gpu_support import HND, NHD, Shape, copy_blocks, make_view, synchronize, table

pytestmark = pytest.mark.gpu

# nl, no, nt, nh, hd, and the bytes of an element.
MODELS = {
    "Llama-3.1-8B, Mistral-7B": (32, 2, 16, 8, 128, 2),
    "Llama-3.1-70B, Qwen2.5-72B": (80, 2, 16, 8, 128, 2),
    "Llama-3.1-70B, fp8, of 8 ranks": (80, 2, 16, 1, 128, 1),
    "Llama-3.1-405B": (126, 2, 16, 8, 128, 2),
    "Llama-3.2-1B": (16, 2, 16, 8, 64, 2),
    "Qwen2.5-0.5B": (24, 2, 16, 2, 64, 2),
    "Qwen2.5-7B": (28, 2, 16, 4, 128, 2),
    "Qwen3-8B": (36, 2, 16, 8, 128, 2),
    "Qwen3-235B-A22B": (94, 2, 16, 4, 128, 2),
    "Gemma-2-9B": (42, 2, 16, 8, 256, 2),
    "Gemma-2-27B": (46, 2, 16, 16, 128, 2),
    "Gemma-3-1B": (26, 2, 16, 1, 256, 2),
    "Gemma 4, global layers": (10, 2, 16, 4, 512, 2),
    "Phi-3-mini": (32, 2, 16, 32, 96, 2),
    "Phi-4": (40, 2, 16, 10, 128, 2),
    "Phi-2, Pythia-2.8B": (32, 2, 16, 32, 80, 2),
    "Phi-2, int8": (32, 2, 16, 32, 80, 1),
    "MPT-30B": (48, 2, 16, 64, 112, 2),
    "GPT-OSS-120B": (36, 2, 16, 8, 64, 2),
    "DeepSeek-V3": (61, 1, 64, 1, 576, 2),
    "DeepSeek-V3, fp8 with its scales": (61, 1, 64, 1, 656, 1),
    "GLM-4.5": (92, 2, 16, 8, 128, 2),
    "Falcon-7B": (32, 2, 16, 1, 64, 2),
    "Falcon-40B": (60, 2, 16, 8, 64, 2),
    "MiMo-V2-Flash, K": (48, 1, 16, 4, 192, 2),
    "MiMo-V2-Flash, V": (48, 1, 16, 4, 128, 2),
    "int8 rows with an fp32 scale": (32, 2, 16, 8, 132, 1),
    "one token a page": (32, 2, 1, 8, 128, 2),
    "256 tokens a page": (28, 2, 256, 4, 128, 2),
}
DIRECTIONS = ("launch_universal_from_block", "launch_block_from_universal")


def random_kv(nb: int, model: str) -> np.ndarray:
    *shape, nbytes = MODELS[model]
    return reference.random_kv(np.random.default_rng(11), (nb, *shape), np.dtype(f"u{nbytes}"))


@pytest.mark.parametrize("name", DIRECTIONS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("pools", [False, True])
def test_models(name: str, model: str, pools: bool) -> None:
    """Blocks of real models convert exactly, wherever their chunks lie."""
    convert(name, random_kv(2, model), NHD, pools=pools)


@pytest.mark.parametrize("model", ["Llama-3.2-1B", "Phi-4", "Gemma-3-1B", "int8 rows with an fp32 scale"])
@pytest.mark.parametrize("pair", [("layers NHD", "layers HND"), ("universal", "layers NHD"), ("layers HND", "packed")])
def test_models_between_pools(model: str, pair: tuple[str, str]) -> None:
    """So do blocks in pools of a layer, with ids on both sides, and no other block of the pools is touched."""
    kv = random_kv(5, model)
    nb, nl, no, nt, nh, hd = kv.shape
    src_ids, dst_ids = np.array([6, 0, 3, 2, 7], np.int64), np.array([1, 5, 2, 4, 0], np.int64)
    src = Layout(pair[0], kv, src_ids, 8, "device")
    expected = Layout(pair[1], kv, dst_ids, 8, "device").memory.read()
    blank = Layout(pair[1], np.zeros_like(kv), dst_ids, 8, "device")
    synchronize()
    copy_blocks(blank.view, src.view, Shape(nl, no, nh, nt, hd * kv.itemsize), nb)
    synchronize()
    reference.assert_same_bytes(blank.memory.read(), expected)


@pytest.mark.parametrize("name", DIRECTIONS)
@pytest.mark.parametrize("layout", [NHD, HND])
@pytest.mark.parametrize("shape", [(5, 3, 2, 16, 4, 64), (2, 1, 2, 16, 8, 128), (7, 4, 1, 64, 1, 576)], ids=str)
def test_pools_of_a_layer(name: str, layout: int, shape: tuple[int, ...]) -> None:
    """Chunks that lie in pools of a layer may be copied in another order, but are the same chunks."""
    convert(name, reference.random_kv(np.random.default_rng(12), shape, np.uint16), layout, pools=True)


@pytest.mark.parametrize("ids", [(False, True), (True, False), (True, True)], ids=str)
@pytest.mark.parametrize("nb", [40, 1006, 2100])
def test_many_blocks_of_pools(ids: tuple[bool, bool], nb: int) -> None:
    """However many blocks a copy between pools has, and with ids on either side or both."""
    kv = reference.random_kv(np.random.default_rng(13), (nb, 2, 2, 2, 2, 16), np.uint8)
    rng = np.random.default_rng(14)
    src_ids, dst_ids = (rng.permutation(nb + 3)[:nb].astype(np.int64) if taken else None for taken in ids)
    src = Layout("layers NHD", kv, src_ids, nb + 3, "device")
    expected = Layout("layers HND", kv, dst_ids, nb + 3, "device").memory.read()
    blank = Layout("layers HND", np.zeros_like(kv), dst_ids, nb + 3, "device")
    synchronize()
    copy_blocks(blank.view, src.view, Shape(2, 2, 2, 2, 16), nb)
    synchronize()
    reference.assert_same_bytes(blank.memory.read(), expected)


@pytest.mark.parametrize("nb", [3, 300])
def test_pointers_into_pools(nb: int) -> None:
    """A pointer a chunk, all into pools of a layer, and more of them than one launch carries."""
    rng = np.random.default_rng(15)
    kv = reference.random_kv(rng, (nb, 12, 2, 2, 2, 16), np.uint8)
    _, nl, no, nt, nh, row = kv.shape
    views, memories, expected = [], [], []
    for layout in ("NHD", "HND"):
        chunks = [chunk for block in reference.block_stack(kv, layout) for chunk in block]
        memory, at = spread(chunks, "device", 0, rng, pool_slots(nb, nl * no, rng))
        bases = table(memory.address + at)
        token, head = (nh * row, row) if layout == "NHD" else (row, nt * row)
        views.append((make_view(bases, None, nb, (nl * no, no, 1), token=token, head=head), bases))
        memories.append(memory)
        expected.append(memory.read())
    wiped = expected[1].copy()
    for address in views[1][1]:
        start = int(address) - memories[1].address
        wiped[start : start + nt * nh * row] = 0x11
    memories[1].write(wiped)
    synchronize()
    copy_blocks(views[1][0], views[0][0], Shape(nl, no, nh, nt, row), nb)
    synchronize()
    reference.assert_same_bytes(memories[1].read(), expected[1])
