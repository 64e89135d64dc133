"""A real model generates with our paged cache in place of its own: the same tokens, the same logits to the bit."""

from __future__ import annotations

import pytest

import kvbm_kernels as kk
from model_caches import logits_of
from test_llama import HEAD_DIM, NUM_LAYERS, STEPS, small_llama

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("default")

# Longer than a block and not a multiple of it.
PROMPT_TOKENS = 45


class PagedCache(transformers.Cache):
    """One sequence of a pool, as the cache that transformers expects: tensors [1, num_kv_heads, n, head_dim]."""

    def __init__(self, cache: kk.PagedKvCache) -> None:
        super().__init__(layers=[])
        self.sequence = cache

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        layer = self.sequence.layer(layer_idx)
        layer.append(key_states[0], value_states[0], order="HND")
        keys, values = layer.gather(order="HND", dtype="bf16")
        return keys[None], values[None]

    def get_seq_length(self, layer_idx=0):
        return len(self.sequence)

    def get_mask_sizes(self, query_length, layer_idx=0):
        # transformers gives the positions of the queries up to its fourth version, and their number since.
        n = query_length if isinstance(query_length, int) else query_length.shape[0]
        return len(self.sequence) + n, 0


def prompt(seed: int):
    return torch.randint(0, 256, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(seed))


def run(model, tokens, cache) -> list:
    """The logits of the tokens' last position and of STEPS greedy steps more."""
    logits = []
    with torch.no_grad():
        for _ in range(STEPS):
            logits.append(logits_of(model, tokens, cache)[:, -1:])
            tokens = logits[-1].argmax(-1)
    return logits


def assert_same(actual: list, expected: list) -> None:
    for step, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(a, e), f"logits of step {step} differ"


@pytest.fixture
def model():
    return small_llama(num_kv_heads=2)


@pytest.fixture(params=["HND", "NHD"])
def pool(request):
    return kk.BlockPool(
        16, 16, NUM_LAYERS, 2, HEAD_DIM, kv_dtype=kk.KvBf16, layout=request.param, arrays="torch", device="cpu"
    )


def test_logits_are_those_of_the_models_own_cache(model, pool):
    """Two sequences take turns in one pool; each gets the logits it gets with a cache of its own."""
    expected = [run(model, prompt(seed), transformers.DynamicCache(config=model.config)) for seed in (1, 2)]
    caches = [PagedCache(kk.KvCache.paged(pool)) for _ in range(2)]
    tokens, actual = [prompt(1), prompt(2)], ([], [])
    for _ in range(STEPS):
        for i in (0, 1):
            actual[i].extend(run_one(model, tokens[i], caches[i]))
            tokens[i] = actual[i][-1].argmax(-1)
    for got, wanted in zip(actual, expected, strict=True):
        assert_same(got, wanted)
    assert caches[0].sequence.paged_block_indices == [0, 1, 2, 6]
    pool.allocator.check()


def run_one(model, tokens, cache) -> list:
    with torch.no_grad():
        return [logits_of(model, tokens, cache)[:, -1:]]


def test_generation_goes_on_after_offload_and_restore(model, pool):
    """Saved as universal blocks, freed, and restored into other blocks: the logits do not change."""
    own = transformers.DynamicCache(config=model.config)
    first = run_one(model, prompt(1), own)
    expected = run(model, first[0].argmax(-1), own)

    sequence = kk.KvCache.paged(pool)
    assert_same(run_one(model, prompt(1), PagedCache(sequence)), first)
    shape = pool.block_shape
    saved = torch.zeros((len(sequence.blocks()), 2, NUM_LAYERS, 2, 16, HEAD_DIM), dtype=torch.bfloat16)
    universal = kk.UniversalBlocks(saved, shape)
    kk.copy_blocks(universal, sequence.blocks())
    n, old = len(sequence), sequence.paged_block_indices
    sequence.release()
    run(model, prompt(2), PagedCache(kk.KvCache.paged(pool)))

    back = kk.KvCache.paged(pool)
    back.restore(universal, n)
    assert not set(back.paged_block_indices) & set(old)
    assert_same(run(model, first[0].argmax(-1), PagedCache(back)), expected)


def test_forks_and_prefixes_generate_alike(model, pool):
    """A fork goes on as the sequence itself would, and a prompt whose beginning is found needs only the rest."""
    own = transformers.DynamicCache(config=model.config)
    first = run_one(model, prompt(1), own)
    expected = run(model, first[0].argmax(-1), own)

    sequence = kk.KvCache.paged(pool)
    run_one(model, prompt(1), PagedCache(sequence))
    sequence.register_prefix(prompt(1)[0])
    fork = sequence.fork()
    assert_same(run(model, first[0].argmax(-1), PagedCache(fork)), expected)
    assert_same(run(model, first[0].argmax(-1), PagedCache(sequence)), expected)
    sequence.release()

    again = kk.KvCache.paged(pool)
    found = again.attach_prefix(prompt(1)[0])
    assert found == 32
    rest = run_one(model, prompt(1)[:, found:], PagedCache(again))
    # Fewer rows in a product of matrices may round otherwise; the tokens are the same.
    assert torch.equal(rest[0].argmax(-1), first[0].argmax(-1))


@pytest.mark.parametrize(("kv_dtype", "bound"), [(kk.KvInt8, 0.06), (kk.KvFp8, 0.2)])
def test_quantised_logits_stay_close(model, kv_dtype, bound):
    """With int8 and fp8 a step's logits differ from those of bf16 by less than a bound, as a part of their spread."""
    pool = kk.BlockPool(8, 16, NUM_LAYERS, 2, HEAD_DIM, kv_dtype=kv_dtype, arrays="torch")
    quantised = PagedCache(kk.KvCache.paged(pool))
    own = transformers.DynamicCache(config=model.config)
    tokens = prompt(1)
    for _ in range(STEPS):
        (wanted,) = run_one(model, tokens, own)
        (got,) = run_one(model, tokens, quantised)
        error = (got - wanted).float().abs().max() / wanted.float().std()
        assert error < bound
        tokens = wanted.argmax(-1)
