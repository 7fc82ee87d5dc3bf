"""Decoding without loops over layers, as GPUs do it, does what decoding with loops does."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax import model as models
from tests import golden_data


@pytest.mark.parametrize("family", ["kimi-linear-tiny", "kimi-k31-tiny"])
def test_a_step_without_loops_equals_a_step_with_loops(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = golden_data.model(family)
    decoder, rng = model.decoder, np.random.default_rng(3)
    tokens = rng.integers(0, decoder.config.vocab_size, (3, 12)).astype(np.int32)
    lengths = jnp.array([9, 4, 7])
    _, filled = jax.jit(decoder.prefill)(model.params, tokens[:, :9], decoder.allocate(3, 16, jnp.float32), lengths)
    results: list[Any] = []
    layer, numbers = decoder._layer, []

    def spy(kind: Any, index: Any, *given: Any) -> Any:
        numbers.append(index.layer)
        return layer(kind, index, *given)

    monkeypatch.setattr(decoder, "_layer", spy)
    for platform in ("cpu", "gpu"):
        monkeypatch.setattr(models, "platform", lambda platform=platform: platform)
        step = jax.jit(lambda *given: decoder.decode(*given))
        numbers.clear()
        cache, logits = filled, []
        for column in (9, 10, 11):
            found, cache = step(model.params, tokens[:, column], cache)
            logits.append(found)
        results.append((logits, cache))
    # Weights were sliced at places known while the step was traced.
    assert numbers == list(range(len(decoder.kinds)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), *results)


def test_deep_models_and_prefills_keep_their_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = golden_data.model("kimi-linear-tiny").decoder
    monkeypatch.setattr(models, "platform", lambda: "gpu")
    one, two = jnp.zeros((2, 1), jnp.int32), jnp.zeros((2, 2), jnp.int32)
    assert decoder._unrolls(one)
    assert not decoder._unrolls(two)
    monkeypatch.setattr(models, "MOST_UNROLLED", len(decoder.kinds) - 1)
    assert not decoder._unrolls(one)
