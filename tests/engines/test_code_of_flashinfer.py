"""FlashInfer's own definitions of its operations in PyTorch, which need no GPU and no compiler."""

from __future__ import annotations

import itertools

import pytest

import kvbm_kernels as kk

NUM_PAGES = 7
# Two sequences, of three pages and of two; the last page of each is full.
INDICES = [6, 1, 4, 2, 3]
INDPTR = [0, 3, 5]


@pytest.fixture
def page(load):
    return load("flashinfer.trace.templates.page")


@pytest.fixture
def attention(load):
    return load("flashinfer.trace.templates.attention")


def tables(nt):
    """What says where the tokens of the two sequences go."""
    import torch

    lengths = [stop - start for start, stop in itertools.pairwise(INDPTR)]
    return dict(
        batch_indices=torch.repeat_interleave(torch.arange(2), torch.tensor(lengths) * nt),
        positions=torch.cat([torch.arange(n * nt) for n in lengths]),
        kv_indices=torch.tensor(INDICES, dtype=torch.int32),
        kv_indptr=torch.tensor(INDPTR, dtype=torch.int32),
        kv_last_page_len=torch.full((2,), nt, dtype=torch.int32),
    )


def caches(cache, layout, pairs):
    import torch

    nt, nh, hd = cache.shape.nt, cache.shape.nh, cache.shape.hd
    inner = (nt, nh, hd) if layout == "NHD" else (nh, nt, hd)

    def layer():
        if pairs:
            return tuple(torch.zeros(NUM_PAGES, *inner, dtype=torch.bfloat16) for _ in "kv")
        return torch.zeros(NUM_PAGES, 2, *inner, dtype=torch.bfloat16)

    return [layer() for _ in range(cache.shape.nl)]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("pairs", [False, True])
def test_appended_tokens_are_read(page, logical, layout, pairs):
    cache = logical()
    layers = caches(cache, layout, pairs)
    for (keys, values), layer in zip(cache.tokens, layers, strict=True):
        page._append_paged_kv_cache_reference(keys, values, paged_kv_cache=layer, kv_layout=layout, **tables(8))
    cache.assert_read(kk.engines.from_flashinfer(layers, layout=layout, page_size=8)[INDICES])


@pytest.mark.parametrize("part", ["k", "v"])
def test_appended_latents_are_read(page, logical, part):
    import torch

    cache = logical(no=1, nh=1, hd=32 if part == "k" else 8)
    layers = [
        (torch.zeros(NUM_PAGES, 8, 32, dtype=torch.bfloat16), torch.zeros(NUM_PAGES, 8, 8, dtype=torch.bfloat16))
        for _ in range(3)
    ]
    for (rows,), pair in zip(cache.tokens, layers, strict=True):
        own = rows[:, 0]
        other = torch.zeros(len(own), 40 - own.shape[1], dtype=torch.bfloat16)
        page._append_paged_mla_kv_cache_reference(
            *((own, other) if part == "k" else (other, own)),
            **{"ckv_cache": pair[0], "kpe_cache": pair[1], **tables(8)},
        )
    cache.assert_read(kk.engines.from_flashinfer(layers, layout="MLA", page_size=8, part=part)[INDICES])


def test_attention_over_restored_pages(attention, logical):
    """Restored into other pages, attention gives the same to the bit."""
    import torch

    cache = logical(nl=1)
    # Random bits are no numbers to attend over.
    cache.tensor.copy_(torch.randn(cache.tensor.shape, generator=torch.Generator().manual_seed(0)))
    query = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = []
    for indices in (INDICES, [0, 5, 3, 1, 2]):
        (layer,) = caches(cache, "NHD", pairs=False)
        cache.write(kk.engines.from_flashinfer([layer], layout="NHD", page_size=8)[indices])
        indptr, pages = torch.tensor(INDPTR, dtype=torch.int32), torch.tensor(indices, dtype=torch.int32)
        found.append(attention._gqa_paged_decode_reference(query, layer[:, 0], layer[:, 1], indptr, pages, 0.25)[0])
    assert found[0].isfinite().all()
    assert torch.equal(*found)
