"""The models of test_models.py on a GPU: pools in its memory, saved to pinned memory, in bf16."""

from __future__ import annotations

import pytest

import model_caches
from model_caches import MODELS, build, config_class, generate, journey, prefill, restored, tensors_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


def stored_on_device(shape):
    return model_caches.poisoned(torch, shape, device="cuda")


def stored_in_pinned_memory(shape):
    return model_caches.poisoned(torch, shape, pin_memory=True)


@pytest.mark.parametrize("store", [stored_on_device, stored_in_pinned_memory])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_generation_goes_on(model, store):
    """Tokens and logits are those of the run that was never interrupted, and every tensor came back bit for bit."""
    if config_class(transformers, model) is None:
        pytest.skip(f"this transformers has no {model.name}")
    language_model = build(transformers, torch, model, "cuda")
    token, cache = prefill(transformers, torch, language_model)
    kept = tensors_of(cache)
    expected = generate(torch, language_model, token, cache)
    fresh = journey(torch, kept, model.sizes, "cuda", store)
    for a, e in zip(fresh, kept, strict=True):
        for name, moved, own in zip("KV", a, e, strict=True):
            assert torch.equal(moved.contiguous().view(torch.int16), own.contiguous().view(torch.int16)), name
    actual = generate(torch, language_model, token, restored(transformers, language_model.config, fresh))
    for step, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(a, e), f"logits of step {step} differ"
