"""The caches of the models that are served: saved, re-sharded, restored; and generation goes on as if never stopped."""

from __future__ import annotations

import pytest

import model_caches
from model_caches import MODELS, build, config_class, generate, groups_of, journey, prefill, restored, tensors_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def one_thread():
    """Models this small are faster without threads that wait for each other, spinning, beside other tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def same_bits(a, b) -> bool:
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_generation_goes_on(model):
    """Tokens and logits are those of the run that was never interrupted, and every tensor came back bit for bit."""
    if config_class(transformers, model) is None:
        pytest.skip(f"this transformers has no {model.name}")
    language_model = build(transformers, torch, model, "cpu")
    token, cache = prefill(transformers, torch, language_model)
    kept = tensors_of(cache)
    expected = generate(torch, language_model, token, cache)
    assert len({step.argmax(-1).item() for step in expected}) > 1

    def store(shape):
        return model_caches.poisoned(torch, shape)

    fresh = journey(torch, kept, model.sizes, "cpu", store)
    for layer, pairs in enumerate(zip(fresh, kept, strict=True)):
        for name, a, b in zip("KV", *pairs, strict=True):
            assert same_bits(a, b), f"{name} of layer {layer} differs"
    actual = generate(torch, language_model, token, restored(transformers, language_model.config, fresh))
    for step, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(a, e), f"logits of step {step} differ"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Llama", [(3, 2, 6, 32, 0)]),
        ("Gemma3", [(2, 2, 2, 32, 77 - 39), (2, 2, 2, 32, 0)]),
        ("Gemma4", [(2, 2, 2, 16, 77 - 23), (2, 2, 1, 32, 0)]),
        ("DeepSeek-V3", [(3, 1, 1, 64, 0), (3, 1, 1, 16, 0)]),
        ("MiMo-V2", [(2, 1, 4, 24, 77 - 31), (2, 1, 4, 16, 77 - 31), (2, 1, 2, 24, 0), (2, 1, 2, 16, 0)]),
    ],
)
def test_the_groups_are_what_the_models_are_known_for(name, expected):
    """Layers, K and V, heads, row, and the first token of each group: else the test above tests less than it says."""
    model = MODELS[name]
    if config_class(transformers, model) is None:
        pytest.skip(f"this transformers has no {model.name}")
    _, cache = prefill(transformers, torch, build(transformers, torch, model, "cpu"))
    found = [(g.shape.nl, g.shape.no, g.shape.nh, g.shape.hd, g.first_token) for g in groups_of(tensors_of(cache))]
    assert sorted(found) == sorted(expected)
