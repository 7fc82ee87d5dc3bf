"""What `Inside` reports of a model is what the model computed with."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax.modules.attn_res import AttentionResidual
from kimi_jax.modules.kda import KimiDeltaAttention
from kimi_jax.observe import Inside, Observed
from tests import golden_data

FAMILY = "kimi-k31-tiny"


class Witness(Inside):
    """Keeps the inputs and outputs beside what is reported of them."""

    def kda(self, mixer: KimiDeltaAttention, x: jax.Array) -> Observed:
        return super().kda(mixer, x) | {"x": x}

    def residual(
        self, place: Any, residual: AttentionResidual, partial: jax.Array, bank: jax.Array, num_rows: Any
    ) -> Observed:
        rows = jnp.concatenate([bank, partial[None]])
        mixed = residual(partial, bank, num_rows, implementation="reference")
        own = {f"{place}_rows": rows, f"{place}_mixed": mixed, f"{place}_count": jnp.asarray(num_rows)}
        return super().residual(place, residual, partial, bank, num_rows) | own


@functools.cache
def seen() -> dict[str, np.ndarray]:
    model = golden_data.model(FAMILY)
    ids = np.random.default_rng(3).integers(0, model.config.vocab_size, (2, 40), dtype=np.int32)
    hidden = jax.jit(functools.partial(model.decoder.hidden, observer=Witness()))
    return {name: np.asarray(value) for name, value in hidden(model.params, ids)[1].items()}


def test_decays_follow_the_formula() -> None:
    model, found = golden_data.model(FAMILY), seen()
    weights = {name: np.asarray(value, np.float64) for name, value in model.params["kda"].items() if name != "qkv"}
    bound = model.config.kda.gate_lower_bound
    assert bound is not None
    x = found["x"].astype(np.float64)
    raw = np.einsum("lbtd,lkd,lpk->lbtp", x, weights["decay_down"], weights["decay_up"])
    z = raw.reshape(found["log_decay"].shape) + weights["dt_bias"][:, None, None]
    rate = np.exp(weights["A_log"])[:, None, None, :, None]
    decay = np.exp(bound / (1 + np.exp(-rate * z)))
    np.testing.assert_allclose(np.exp(found["log_decay"]), decay, rtol=1e-4, atol=1e-6)
    assert decay.min() > np.exp(bound)
    assert decay.max() < 1
    beta = 1 / (1 + np.exp(-np.einsum("lbtd,lhd->lbth", x, weights["beta"])))
    np.testing.assert_allclose(found["beta"], beta, rtol=1e-4, atol=1e-6)


def test_mixtures_of_attention_residuals() -> None:
    model, found = golden_data.model(FAMILY), seen()
    for place in ("attention", "ffn"):
        weights = found[f"{place}_residual"].astype(np.float64)
        assert weights.shape[0] == model.config.num_hidden_layers
        np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-6)
        rows, count = found[f"{place}_rows"].astype(np.float64), found[f"{place}_count"]
        there = np.arange(rows.shape[1] - 1) < count[:, None]
        assert (weights[:, :-1][~there] == 0).all()
        assert (weights[:, :-1][there] > 0).all()
        mixed = np.einsum("lmbt,lmbtd->lbtd", weights, rows)
        np.testing.assert_allclose(mixed, found[f"{place}_mixed"], rtol=1e-4, atol=1e-5)


def test_what_trace_reports_is_there_too() -> None:
    assert {"layer_out", "experts", "expert_weights", "index_scores", "selected"} <= set(seen())
