"""In bfloat16, gates, states, router and softmax stay float32: long runs with slow decay show it when one doesn't."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kimi_jax.cache import Cache
from kimi_jax.config import KimiConfig
from kimi_jax.modules.kda import KimiDeltaAttention
from kimi_jax.modules.moe import route
from kimi_jax.params import bind
from pallas_kernels.sparse_mla import dense_mla
from tests import golden_data

TOKENS = 20_000
HEADS, WIDTH = 2, 16
HIDDEN = 3 * HEADS * WIDTH + 1


def config() -> KimiConfig:
    base = KimiConfig.from_directory(golden_data.ROOT / "kimi-k3-tiny").to_dict()
    text = base["text_config"]
    text["hidden_size"] = HIDDEN
    text["linear_attn_config"] |= {"num_heads": HEADS, "head_dim": WIDTH}
    return KimiConfig.from_dict(base)


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16)


@functools.cache
def layer_inputs() -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Weights that hand q, k and v to the recurrence exactly as bfloat16 values, and a slow, constant decay.

    The projections pick channels of x; the last channel of x is 1 and carries the constant logit of beta.
    """
    rng = np.random.default_rng(0)
    projection = HEADS * WIDTH
    identity = np.eye(HIDDEN, dtype=np.float32)[: 3 * projection].reshape(3, projection, HIDDEN)
    taps = np.zeros((3, projection, 4), np.float32)
    taps[:, :, 3] = 1
    beta = np.zeros((HEADS, HIDDEN), np.float32)
    beta[:, -1] = -3.3
    weights = {
        "qkv": to_bfloat16(identity),
        "conv": taps,
        "decay_down": to_bfloat16(np.zeros((WIDTH, HIDDEN))),
        "decay_up": to_bfloat16(np.zeros((projection, WIDTH))),
        "A_log": np.array([0.0123, 0.0456], np.float32),
        # -5 sigma(exp(A_log) z): between -3e-3 and -2e-4, of its own in each channel.
        "dt_bias": rng.uniform(-9.5, -7.5, (HEADS, WIDTH)).astype(np.float32),
        "beta": to_bfloat16(beta),
        "output_gate": to_bfloat16(np.zeros((projection, HIDDEN))),
        "output_norm": np.ones(WIDTH, np.float32),
        "output": to_bfloat16(np.zeros((HIDDEN, projection))),
    }
    x = to_bfloat16(rng.normal(size=(TOKENS, HIDDEN)))
    x[:, -1] = 1
    return weights, x


def recurrence(
    weights: dict[str, np.ndarray], x: np.ndarray, round_state=lambda a: a, round_gate=lambda a: a
) -> np.ndarray:
    """The layer's state in float64; the rounding arguments imitate what goes wrong with fewer bits."""

    def silu(a: np.ndarray) -> np.ndarray:
        return a / (1 + np.exp(-a))

    mixed = to_bfloat16(silu(x[:, :-1].astype(np.float64))).astype(np.float64)
    _q, k, v = mixed.reshape(TOKENS, 3, HEADS, WIDTH).transpose(1, 0, 2, 3)
    k = k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
    z = weights["dt_bias"].astype(np.float64)
    decay = np.exp(round_gate(-5 / (1 + np.exp(-np.exp(weights["A_log"].astype(np.float64))[:, None] * z))))
    beta = 1 / (1 + np.exp(-weights["beta"][0, -1].astype(np.float64)))
    state = np.zeros((HEADS, WIDTH, WIDTH))
    for t in range(TOKENS):
        state = decay[..., None] * state
        u = beta * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
        state = round_state(state + k[t][..., None] * u[:, None])
    return state


def relative(found: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(found - want).max() / np.abs(want).max())


@pytest.mark.slow
def test_state_of_a_long_bfloat16_run() -> None:
    weights, x = layer_inputs()
    want = recurrence(weights, x)
    layer = bind(KimiDeltaAttention(config()), {name: jnp.asarray(value) for name, value in weights.items()})
    _, state = jax.jit(lambda x: layer(x, None))(jnp.asarray(x)[None])
    assert state.state.dtype == jnp.float32
    error = relative(np.asarray(state.state[0]), want)
    assert error < 2e-5
    # What the bound can tell apart: a bfloat16 state, and gates rounded to bfloat16.
    short = to_bfloat16
    assert relative(recurrence(weights, x, round_state=lambda a: short(a).astype(np.float64)), want) > 100 * 2e-5
    assert relative(recurrence(weights, x, round_gate=lambda a: short(a).astype(np.float64)), want) > 10 * 2e-5


def test_state_of_one_token_steps_in_bfloat16() -> None:
    """The decode path keeps the same bits as the prefill path: 512 steps from one state."""
    weights, x = layer_inputs()
    steps = 512
    layer = bind(KimiDeltaAttention(config()), {name: jnp.asarray(value) for name, value in weights.items()})
    head = jnp.asarray(x)[None]
    _, begin = jax.jit(lambda x: layer(x, None))(head[:, :steps])
    _, want = jax.jit(lambda x, s: layer(x, s))(head[:, steps : 2 * steps], begin)

    def one(state, token):
        return layer(token[:, None], state)[1], None

    found, _ = jax.jit(lambda s, x: jax.lax.scan(one, s, x.swapaxes(0, 1)))(begin, head[:, steps : 2 * steps])
    assert relative(np.asarray(found.state), np.asarray(want.state)) < 1e-5


def test_softmax_over_many_keys_in_bfloat16() -> None:
    """20 000 equal keys: a bfloat16 sum would stop growing at 256."""
    keys, heads, width, value = 20_000, 2, 16, 8
    latent = to_bfloat16(np.tile(np.linspace(0.5, 1.5, width), (1, keys, 1)))
    q = jnp.ones((1, 1, heads, width), jnp.bfloat16) * 0.01
    w_uk = jnp.zeros((heads, 8, 8), jnp.bfloat16)
    w_uv = jnp.broadcast_to(jnp.eye(value, dtype=jnp.bfloat16), (heads, value, 8))
    out = dense_mla(
        q, jnp.asarray(latent), w_uk, w_uv, q_positions=jnp.array([[keys - 1]], jnp.int32), scale=width**-0.5
    )
    want = latent[0, 0, :8].astype(np.float64)
    np.testing.assert_allclose(np.asarray(out, np.float64)[0, 0], np.tile(want, (heads, 1)), rtol=2**-7)


def test_router_in_bfloat16_keeps_its_sets() -> None:
    """Biases in a narrow band at a large offset, of which bfloat16 tells nine apart."""
    base = KimiConfig.from_directory(golden_data.ROOT / "kimi-k3-tiny").moe
    experts = 896
    bias = np.linspace(6.817, 7.063, experts, dtype=np.float32)
    assert len(np.unique(to_bfloat16(bias))) == 9
    scores = 1 / (1 + np.exp(-np.random.default_rng(0).normal(scale=0.02, size=(64, experts)).astype(np.float32)))
    moe = dataclasses.replace(base, num_experts_per_token=16, num_experts=experts)
    found = route(jnp.asarray(scores), jnp.asarray(bias), moe)
    biased = scores.astype(np.float32) + bias
    want = np.argsort(-biased, axis=-1, kind="stable")[:, :16]
    np.testing.assert_array_equal(np.sort(np.asarray(found.experts)), np.sort(want))
    chosen = np.take_along_axis(scores.astype(np.float64), np.asarray(found.experts), axis=-1)
    np.testing.assert_allclose(np.asarray(found.weights), chosen / chosen.sum(-1, keepdims=True), rtol=1e-6)


@pytest.mark.parametrize("family", golden_data.FAMILIES)
def test_bfloat16_model_keeps_its_float32_parts(family: str) -> None:
    model = golden_data.model(family, "bfloat16")
    params = model.params
    for name in ("A_log", "dt_bias", "conv", "output_norm"):
        assert params["kda"][name].dtype == jnp.float32
    assert params["moe"]["correction_bias"].dtype == jnp.float32
    ids = jnp.asarray(golden_data.expected(family)["input_ids"])
    cache = Cache.allocate(model.config, *ids.shape, jnp.bfloat16)
    found, cache = jax.eval_shape(model.decoder.trace, params, ids, cache)
    assert found["logits"].dtype == found["expert_weights"].dtype == cache.kda_state.dtype == jnp.float32
    assert found["layer_out"].dtype == cache.conv_tail.dtype == cache.latent.dtype == jnp.bfloat16
    if "index_scores" in found:
        assert found["index_scores"].dtype == jnp.float32


@pytest.mark.parametrize("family", golden_data.FAMILIES)
def test_bfloat16_stays_near_float32(family: str) -> None:
    """Random weights flip routes in bfloat16; the references' own bfloat16 runs have a mean KL of at most 0.06."""
    ids = golden_data.expected(family)["input_ids"]
    want = golden_data.expected(family)["logits"].astype(np.float64)
    found = np.asarray(golden_data.model(family, "bfloat16").logits(ids), np.float64)

    def log_softmax(a: np.ndarray) -> np.ndarray:
        a = a - a.max(-1, keepdims=True)
        return a - np.log(np.exp(a).sum(-1, keepdims=True))

    p, q = log_softmax(want), log_softmax(found)
    kl = float((np.exp(p) * (p - q)).sum(-1).mean())
    assert 0 <= kl < 0.12
