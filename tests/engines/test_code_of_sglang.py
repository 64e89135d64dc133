"""SGLang's own pools, on the device and on the host."""

from __future__ import annotations

import types

import pytest

import kvbm_kernels as kk

NUM_PAGES = 7
# Ids are pages; page 0 is the dummy.
IDS = [6, 1, 4, 2, 3]
HOST_IDS = [2, 0, 4, 1, 3]


@pytest.fixture
def pools(load):
    return load("sglang.srt.mem_cache.memory_pool")


def device_pool(pools, cache, **arguments):
    import torch

    nt = cache.shape.nt
    return pools.MHATokenToKVPool(
        size=(NUM_PAGES - 1) * nt,
        page_size=nt,
        dtype=torch.bfloat16,
        head_num=cache.shape.nh,
        head_dim=cache.shape.hd,
        layer_num=cache.shape.nl,
        device="cpu",
        enable_memory_saver=False,
        **arguments,
    )


def slots(nt, pages=IDS):
    import torch

    return (torch.tensor(pages)[:, None] * nt + torch.arange(nt)).flatten()


def same_bits(a, b) -> bool:
    import torch

    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("nt", [1, 8, 64])
def test_heads(pools, logical, monkeypatch, layout, nt):
    """What SGLang writes to slots is read as pages, and what is restored is what it would have written."""
    cache = logical(nt=nt)
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", str(int(layout == "HND")))
    pool, fresh = (device_pool(pools, cache) for _ in "ab")
    for i, (keys, values) in enumerate(cache.tokens):
        pool.set_kv_buffer(types.SimpleNamespace(layer_id=i), slots(nt), keys.clone(), values.clone())
    blocks, restored = (
        kk.engines.from_sglang(list(zip(p.k_buffer, p.v_buffer, strict=True)), layout=layout, page_size=nt)[IDS]
        for p in (pool, fresh)
    )
    cache.assert_read(blocks)
    cache.write(restored)
    for i in range(cache.shape.nl):
        assert same_bits(fresh.get_key_buffer(i), pool.get_key_buffer(i))
        assert same_bits(fresh.get_value_buffer(i), pool.get_value_buffer(i))


@pytest.mark.parametrize("part", ["k", "v"])
def test_rows_of_two_lengths(pools, logical, part):
    cache = logical(no=1, hd=24 if part == "k" else 16)
    keys = logical(no=1, hd=24)
    pool = device_pool(pools, keys, v_head_dim=16)
    for i, (rows,) in enumerate(cache.tokens):
        (pool.k_buffer if part == "k" else pool.v_buffer)[i][slots(8)] = rows
    buffers = list(zip(pool.k_buffer, pool.v_buffer, strict=True))
    cache.assert_read(kk.engines.from_sglang(buffers, layout="NHD", page_size=8, part=part)[IDS])


def test_latents(load, pools, logical):
    import torch

    cache = logical(no=1, nh=1, hd=72)
    pool = pools.MLATokenToKVPool(
        size=(NUM_PAGES - 1) * 8,
        page_size=8,
        dtype=torch.bfloat16,
        kv_lora_rank=64,
        qk_rope_head_dim=8,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
    )
    with load("sglang.srt.runtime_context").get_parallel().override(dcp_enabled=False):
        for i, (rows,) in enumerate(cache.tokens):
            pool.set_kv_buffer(types.SimpleNamespace(layer_id=i), slots(8), rows.clone(), None)
    cache.assert_read(kk.engines.from_sglang(pool.kv_buffer, layout="MLA", page_size=8)[IDS])


def host_pool(load, pools, cache, layout, **arguments):
    host = load("sglang.srt.mem_cache.pool_host.mha")
    pool = device_pool(pools, cache)
    return host.MHATokenToKVPoolHost(
        pool._mha_buffer_info(),
        host_to_device_ratio=2.0,
        host_size=0,
        page_size=cache.shape.nt,
        layout=layout,
        pin_memory=False,
        device="cpu",
        device_capacity_tokens=pool.size,
        start_layer=0,
        end_layer=cache.shape.nl - 1,
        **arguments,
    )


# A page of a host pool, as get_data_page() gives it, from [layer, outer, token, head, hd].
PAGES = {
    "layer_first": (1, 0, 2, 3, 4),
    "page_first": (1, 2, 0, 3, 4),
    "page_first_direct": (1, 0, 2, 3, 4),
    "page_head": (1, 3, 2, 0, 4),
}


@pytest.mark.parametrize("layout", PAGES)
def test_host_pages(load, pools, logical, layout):
    """Pages that SGLang set from its own flat form are read; those that we write come out in that form."""
    cache = logical()
    pool = host_pool(load, pools, cache, layout)
    flat = [page.permute(PAGES[layout]).flatten() for page in cache.tensor]
    for page, data in zip(HOST_IDS, flat, strict=True):
        pool.set_from_flat_data_page(page * 8, data)
    cache.assert_read(kk.engines.from_sglang(pool.kv_buffer, layout=layout, page_size=8)[HOST_IDS])

    fresh = host_pool(load, pools, cache, layout)
    cache.write(kk.engines.from_sglang(fresh.kv_buffer, layout=layout, page_size=8)[HOST_IDS])
    for page, data in zip(HOST_IDS, flat, strict=True):
        assert same_bits(fresh.get_data_page(page * 8), data)


def test_unified_pages_are_universal_blocks(load, pools, logical):
    """With a head in each group: the same bytes, and SGLang's chunk of layers and head is where ours is."""
    import torch

    cache = logical()
    pool = host_pool(load, pools, cache, "page_unified", head_group_num=4)
    view = kk.engines.from_sglang(pool.kv_buffer, layout="page_unified", page_size=8)
    cache.write(view[HOST_IDS])
    cache.assert_read(view[HOST_IDS])
    pages = pool.kv_buffer.view(torch.uint8).flatten(1)
    universal = cache.tensor.permute(0, 4, 1, 2, 3, 5).contiguous().view(torch.uint8).flatten(1)
    assert torch.equal(pages[HOST_IDS], universal)
    for group in range(4):
        for layers in ((0, 1), (1, 3)):
            offset, nbytes = pool.page_unified_layout.chunk_span(layers, group)
            part = torch.empty(5, nbytes // 2, dtype=torch.bfloat16)
            shape = view.heads(group, group + 1).layers(*layers).shape
            kk.copy_blocks(
                kk.UniversalBlocks(part.unflatten(1, (1, shape.nl, 2, 8, 16)), shape),
                view[HOST_IDS].heads(group, group + 1).layers(*layers),
            )
            assert torch.equal(part.view(torch.uint8), pages[HOST_IDS][:, offset : offset + nbytes])


def test_unified_pages_in_two_groups(load, pools, logical):
    """Two heads in each of two groups: a view for each, which a plan finds the heads of."""
    import torch

    cache = logical()
    pool = host_pool(load, pools, cache, "page_unified", head_group_num=2)
    groups = [
        kk.engines.from_sglang(pool.kv_buffer, layout="page_unified", page_size=8, head_group=group)[HOST_IDS]
        for group in range(2)
    ]
    store = kk.UniversalBlocks(cache.tensor.permute(0, 4, 1, 2, 3, 5).contiguous(), cache.shape)
    kk.copy_blocks(*kk.tp.plan(1, 2, 4).views(groups, [store]))
    back = kk.UniversalBlocks(torch.empty_like(store.memory.owners[0]), cache.shape)
    kk.copy_blocks(*kk.tp.plan(2, 1, 4).views([back], groups))
    cache.assert_read(back)
