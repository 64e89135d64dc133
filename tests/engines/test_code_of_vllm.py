"""vLLM's own code makes the views of its cache; what it means by them is what is read and written."""

from __future__ import annotations

import pytest

import kvbm_kernels as kk

LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
NUM_BLOCKS = 7
# Ids as block tables have them: out of order, and without the null block.
IDS = [6, 1, 4, 2, 3]


@pytest.fixture
def vllm(load):
    return load("vllm.v1.kv_cache_interface")


def allocate(vllm, spec, num_layers, layout, kernel_block_size=None):
    """The one buffer of some layers of one spec, where they lie in it, and vLLM's views of them."""
    import torch

    layer_stride, block_stride = vllm.compute_layout_strides(spec, NUM_BLOCKS, num_layers, layout)[:2]
    nbytes = spec.page_size_bytes * NUM_BLOCKS * num_layers
    place = vllm.KVCacheTensor(
        size=nbytes,
        layers=[f"model.layers.{i}.attn" for i in range(num_layers)],
        layer_stride=layer_stride,
        block_stride=block_stride,
    )
    buffer = torch.full((nbytes,), 0x5A, dtype=torch.int8)
    views = vllm.create_kv_cache_views(buffer, spec, NUM_BLOCKS, layout, place, kernel_block_size)
    return buffer, place, dict(zip(place.layers, views, strict=True))


def fill(views, cache, v_start):
    """Write each token as a kernel does that is given ``[num_blocks, num_heads, block_size, K and V]``."""
    for layer, view in enumerate(views.values()):
        for i, block in enumerate(IDS):
            for outer, start in enumerate((0, v_start)[: cache.shape.no]):
                rows = cache.tensor[i, layer, outer].transpose(0, 1)
                view[block, :, :, start : start + cache.shape.hd] = rows


def assert_holds(views, cache, v_start):
    import torch

    for layer, view in enumerate(views.values()):
        for i, block in enumerate(IDS):
            for outer, start in enumerate((0, v_start)[: cache.shape.no]):
                rows = view[block, :, :, start : start + cache.shape.hd].transpose(0, 1)
                assert torch.equal(rows.contiguous().view(torch.int16), cache.tensor[i, layer, outer].view(torch.int16))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_layouts_are_those_we_know(load, name):
    layouts = load("vllm.v1.kv_cache_layout").KVCacheLayout
    assert sorted(layout.name for layout in layouts) == sorted(LAYOUTS)
    assert name == "".join("LBHNC"[axis] for axis in layouts[name].stride_order)


@pytest.mark.parametrize("name", LAYOUTS)
def test_heads(vllm, logical, name):
    """K and V read apart: what vLLM wrote is read, and what is restored vLLM finds; the null block is not touched."""
    import torch

    cache = logical()
    spec = vllm.FullAttentionSpec(block_size=8, num_kv_heads=4, head_size=16, dtype=torch.bfloat16)
    layout = vllm.KVCacheLayout[name]
    buffer, place, views = allocate(vllm, spec, 3, layout)
    fill(views, cache, v_start=16)
    arguments = dict(layout=name, block_size=8, num_kv_heads=4, no=2, head_size=16)
    cache.assert_read(kk.engines.from_vllm(views, **arguments)[IDS])
    of_buffer = dict(num_layers=3, num_blocks=NUM_BLOCKS, dtype="bf16")
    strides = dict(layer_stride=place.layer_stride, block_stride=place.block_stride)
    cache.assert_read(kk.engines.from_vllm_buffer(buffer, **arguments, **of_buffer, **strides)[IDS])

    _, _, fresh = allocate(vllm, spec, 3, layout)
    before = [view[0].clone() for view in fresh.values()]
    cache.write(kk.engines.from_vllm(fresh, **arguments)[IDS])
    assert_holds(fresh, cache, v_start=16)
    assert all(
        torch.equal(view[0].view(torch.int16), was.view(torch.int16))
        for view, was in zip(fresh.values(), before, strict=True)
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_packed_rows(vllm, logical, name):
    """With no=1 a row has K and V as vLLM keeps them."""
    import torch

    cache = logical(no=1, hd=32)
    spec = vllm.FullAttentionSpec(block_size=8, num_kv_heads=4, head_size=16, dtype=torch.bfloat16)
    _, _, views = allocate(vllm, spec, 3, vllm.KVCacheLayout[name])
    fill(views, cache, v_start=None)
    cache.assert_read(kk.engines.from_vllm(views, layout=name, block_size=8, num_kv_heads=4, no=1)[IDS])


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("part", ["k", "v"])
def test_rows_of_two_lengths(vllm, logical, name, part):
    import torch

    cache = logical(no=1, hd=24 if part == "k" else 16)
    spec = vllm.FullAttentionSpec(block_size=8, num_kv_heads=4, head_size=24, head_size_v=16, dtype=torch.bfloat16)
    _, _, views = allocate(vllm, spec, 3, vllm.KVCacheLayout[name])
    start = 0 if part == "k" else 24
    fill({layer: view[..., start:] for layer, view in views.items()}, cache, v_start=None)
    view = kk.engines.from_vllm(
        views, layout=name, block_size=8, num_kv_heads=4, no=2, head_size=24, head_size_v=16, part=part
    )
    cache.assert_read(view[IDS])


@pytest.mark.parametrize("name", LAYOUTS)
def test_latents(vllm, logical, name):
    import torch

    cache = logical(no=1, nh=1, hd=72)
    spec = vllm.MLAAttentionSpec(block_size=8, num_kv_heads=1, head_size=72, head_size_v=0, dtype=torch.bfloat16)
    _, _, views = allocate(vllm, spec, 3, vllm.KVCacheLayout[name])
    fill(views, cache, v_start=None)
    cache.assert_read(kk.engines.from_vllm(views, layout=name, block_size=8, num_kv_heads=1, no=1)[IDS])


@pytest.mark.parametrize("name", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_padded_pages(vllm, logical, name):
    import torch

    cache = logical()
    page = 8 * 4 * 32 * 2
    spec = vllm.FullAttentionSpec(
        block_size=8, num_kv_heads=4, head_size=16, dtype=torch.bfloat16, page_size_padded=page + 512
    )
    buffer, _, views = allocate(vllm, spec, 3, vllm.KVCacheLayout[name])
    fill(views, cache, v_start=16)
    view = kk.engines.from_vllm(views, layout=name, block_size=8, num_kv_heads=4, no=2, head_size=16)
    cache.assert_read(view[IDS])
    cache.write(view[IDS])
    assert (buffer.view(-1, page + 512)[:, page:] == 0x5A).all()


@pytest.mark.parametrize("name", ["LBHNC", "LBNHC"])
def test_kernel_blocks(vllm, logical, name):
    """Blocks of 8 tokens that kernels see as two of 4."""
    import torch

    cache = logical()
    spec = vllm.FullAttentionSpec(block_size=8, num_kv_heads=4, head_size=16, dtype=torch.bfloat16)
    _, _, views = allocate(vllm, spec, 3, vllm.KVCacheLayout[name], kernel_block_size=4)
    for layer, view in enumerate(views.values()):
        kernel_blocks = vllm.group_kernel_blocks(view, NUM_BLOCKS)
        for i, block in enumerate(IDS):
            for outer in range(2):
                rows = cache.tensor[i, layer, outer].transpose(0, 1)
                for piece in range(2):
                    kernel_blocks[block, piece, :, :, 16 * outer : 16 * outer + 16] = rows[:, 4 * piece : 4 * piece + 4]
    view = kk.engines.from_vllm(
        views, layout=name, block_size=8, kernel_block_size=4, num_kv_heads=4, no=2, head_size=16
    )[IDS]
    store = kk.UniversalBlocks(torch.empty(5, 4, 3, 2, 8, 16, dtype=torch.bfloat16), cache.shape)
    kk.copy_blocks(kk.engines.split_blocks(store, view.shape.nt), view)
    cache.assert_read(store)
