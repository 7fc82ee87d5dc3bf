"""Decoding with KDA states that are written where they are does what decoding with copies does."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.modules import kda
from pallas_kernels.kda import kda_conv_decode
from tests import golden_data


def _decoded(model: Any, lengths: Any) -> tuple[Any, ...]:
    """Logits, states and tails after a prompt and three tokens, of which row 1 gets none."""
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, model.decoder.config.vocab_size, (3, 12)).astype(np.int32)
    cache = model.decoder.allocate(3, 16, jnp.float32)
    _, cache = jax.jit(model.decoder.prefill)(model.params, tokens[:, :9], cache, jnp.array([9, 4, 7]))
    step, logits = jax.jit(lambda *arguments: model.decoder.prefill(*arguments)), []
    for column in (9, 10, 11):
        found, cache = step(model.params, tokens[:, column : column + 1], cache, lengths)
        logits.append(np.asarray(found)[np.asarray(lengths) > 0])
    return np.stack(logits), np.asarray(cache.kda_state), np.asarray(cache.conv_tail), np.asarray(cache.lengths)


@pytest.mark.parametrize("family", ["kimi-linear-tiny"])
def test_a_step_in_place_equals_a_step_with_copies(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, lengths = golden_data.model(family), jnp.array([1, 0, 1])
    copied = _decoded(model, lengths)
    calls: list[int] = []

    def in_place(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        return partial(kda_conv_decode, **options | {"implementation": "xla"})(*arguments)

    monkeypatch.setattr(kda, "platform", lambda: "gpu")
    monkeypatch.setattr(kda, "conv_decode_obstacle", lambda *_, **__: None)
    monkeypatch.setattr(kda, "kda_conv_decode", in_place)
    found = _decoded(model, lengths)
    assert calls
    for name, x, want in zip(("logits", "states", "tails", "lengths"), found, copied, strict=True):
        np.testing.assert_allclose(x, want, rtol=2e-5, atol=2e-5, err_msg=name)
