"""LMCache's own transfers, in the form it has for machines without a GPU, beside ours."""

from __future__ import annotations

import pytest

import kvbm_kernels as kk

NUM_BLOCKS = 7
IDS = [6, 1, 4, 2, 3]


@pytest.fixture
def lmcache(load):
    """Its transfers, and the names of formats and directions."""
    load("lmcache.v1.memory_management")
    return load("lmcache.v1.platform.torch_ops.mem_kernels")


def slots(nt):
    import torch

    return (torch.tensor(IDS)[:, None] * nt + torch.arange(nt)).flatten()


def transfer(lmcache, memory, layers, fmt, nt, direction):
    """Between a memory object and the layers of vLLM or SGLang."""
    import torch

    of_format, towards = getattr(lmcache.EngineKVFormat, fmt), getattr(lmcache.TransferDirection, direction)
    flat = [layer.flatten(-2) for layer in layers]
    if fmt == "TWO_X_NL_X_NBBS_NH_HS":
        lmcache.multi_layer_kv_transfer_unilateral(
            memory, flat, slots(nt), torch.device("cpu"), NUM_BLOCKS * nt, towards, of_format
        )
        return
    if fmt == "NL_X_TWO_NB_BS_NH_HS":
        flat = [layer.flatten(1, 2) for layer in flat]
    lmcache.multi_layer_kv_transfer(
        memory, flat, slots(nt), torch.device("cpu"), NUM_BLOCKS * nt, towards, of_format, nt
    )


def paged(fmt, cache):
    """Empty layers in one of the engines' formats, and our view of them."""
    import torch

    nl, nh, nt, hd = cache.shape.nl, cache.shape.nh, cache.shape.nt, cache.shape.hd

    def zeros(*extents):
        return torch.zeros(*extents, dtype=torch.bfloat16)

    if fmt == "TWO_X_NL_X_NBBS_NH_HS":
        layers = [zeros(NUM_BLOCKS * nt, nh, hd) for _ in range(2 * nl)]
        pairs = list(zip(layers[:nl], layers[nl:], strict=True))
        return layers, kk.engines.from_sglang(pairs, layout="NHD", page_size=nt)
    first = fmt == "NL_X_TWO_NB_BS_NH_HS"
    extents = (2, NUM_BLOCKS) if first else (NUM_BLOCKS, 2)
    layers = [zeros(*extents, nt, nh, hd) for _ in range(nl)]
    layout = "kv_first" if first else "blocks_first"
    return layers, kk.engines.from_vllm(layers, layout=layout, block_size=nt, num_kv_heads=nh)


@pytest.mark.parametrize("fmt", ["NL_X_TWO_NB_BS_NH_HS", "NL_X_NB_TWO_BS_NH_HS", "TWO_X_NL_X_NBBS_NH_HS"])
def test_memory_objects_are_the_same_bytes(lmcache, logical, fmt):
    """From an engine's pages to KV_2LTD and back, by LMCache and by us: the same objects, and the same pages."""
    import torch

    cache = logical()
    shape = cache.shape
    layers, view = paged(fmt, cache)
    cache.write(view[IDS])
    theirs, ours = (torch.zeros(2, shape.nl, 5 * shape.nt, shape.nh * shape.hd, dtype=torch.bfloat16) for _ in "ab")
    transfer(lmcache, theirs, layers, fmt, shape.nt, "D2H")
    objects = kk.engines.from_lmcache(ours, fmt="KV_2LTD", block_size=shape.nt, num_kv_heads=shape.nh)
    kk.copy_blocks(objects, view[IDS])
    assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))
    cache.assert_read(objects)

    restored, back = paged(fmt, cache)
    transfer(lmcache, ours, restored, fmt, shape.nt, "H2D")
    cache.assert_read(back[IDS])


@pytest.mark.parametrize(("fmt", "layout"), [("NL_X_NB_NH_BS_CS", "LBHNC"), ("NL_X_NB_BS_NH_CS", "LBNHC")])
def test_rows_of_k_and_v(load, lmcache, logical, fmt, layout):
    """vLLM's cache of today: a row has K and V, in LMCache's objects of two blocks too."""
    import torch

    cache = logical(nb=4)
    extents = (NUM_BLOCKS, 4, 8, 32) if layout == "LBHNC" else (NUM_BLOCKS, 8, 4, 32)
    layers = [torch.zeros(extents, dtype=torch.bfloat16) for _ in range(3)]
    views = layers if layout == "LBHNC" else [layer.transpose(1, 2) for layer in layers]
    rows = dict(no=2, head_size=16)
    view = kk.engines.from_vllm(views, layout=layout, block_size=8, num_kv_heads=4, **rows)[IDS[:4]]
    cache.write(view)
    shape = load("lmcache.v1.platform.ops_types").PageBufferShapeDesc()
    shape.kv_size, shape.nl, shape.nb, shape.bs, shape.nh, shape.hs = 1, 3, NUM_BLOCKS, 8, 4, 32
    shape.element_size, shape.dtype = 2, torch.bfloat16
    theirs, ours = ([torch.zeros(3, 16, 128, dtype=torch.bfloat16) for _ in range(2)] for _ in "ab")
    load("lmcache.v1.platform.torch_ops.mp_mem_kernels").multi_layer_block_kv_transfer(
        layers,
        theirs,
        torch.tensor(IDS[:4]),
        "cpu",
        lmcache.TransferDirection.D2H,
        shape,
        16,
        getattr(lmcache.EngineKVFormat, fmt),
        0,
    )
    objects = kk.engines.from_lmcache(ours, fmt="KV_2LTD", block_size=8, num_kv_heads=4, **rows)
    kk.copy_blocks(objects, view)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.view(torch.int16), b.view(torch.int16))


def test_latents(lmcache, logical):
    import torch

    cache = logical(no=1, nh=1, hd=72)
    layers = [torch.zeros(NUM_BLOCKS, 8, 72, dtype=torch.bfloat16) for _ in range(3)]
    view = kk.engines.from_vllm(layers, layout="mla", block_size=8)
    cache.write(view[IDS])
    theirs, ours = (torch.zeros(1, 3, 40, 72, dtype=torch.bfloat16) for _ in "ab")
    formats, directions = lmcache.EngineKVFormat, lmcache.TransferDirection
    lmcache.multi_layer_kv_transfer(
        theirs,
        [layer.flatten(0, 1) for layer in layers],
        slots(8),
        torch.device("cpu"),
        NUM_BLOCKS * 8,
        directions.D2H,
        formats.NL_X_NB_BS_HS,
        8,
    )
    objects = kk.engines.from_lmcache(ours, fmt="KV_MLA_FMT", block_size=8, num_kv_heads=1)
    kk.copy_blocks(objects, view[IDS])
    assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))
    cache.assert_read(objects)


def test_the_formats_are_those_we_know(load):
    """A format that is new is neither taken nor refused with a reason: look at it."""
    from kvbm_kernels.engines import lmcache as ours

    formats = {fmt.name for fmt in load("lmcache.v1.memory_management").MemoryFormat}
    assert formats == {*ours._FORMATS, *ours.REFUSED, "UNDEFINED"}
