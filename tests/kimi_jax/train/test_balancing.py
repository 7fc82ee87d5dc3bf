import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.train import balancing
from kimi_jax.train.balancing import BINS

margin_histogram = jax.jit(balancing.margin_histogram, static_argnums=2)
quantile_bias = jax.jit(balancing.quantile_bias, static_argnums=2)


def scores_of(rng: np.random.Generator, tokens: int, experts: int) -> np.ndarray:
    """Scores of a router that prefers its first experts."""
    logits = rng.normal(size=(tokens, experts)) + np.linspace(2, -2, experts)
    return 1 / (1 + np.exp(-logits))


def load(scores: np.ndarray, bias: np.ndarray, k: int) -> np.ndarray:
    """How often each expert is among the k best."""
    chosen = np.argsort(-(scores + bias), axis=1)[:, :k]
    return np.bincount(chosen.reshape(-1), minlength=scores.shape[1])


def exact_quantiles(scores: np.ndarray, bias: np.ndarray, k: int) -> np.ndarray:
    """The (k/E)-quantiles of the margins, by sorting."""
    threshold = -np.sort(-(scores + bias), axis=1)[:, k]
    found = np.quantile(threshold[:, None] - scores, k / scores.shape[1], axis=0)
    return found - found.mean()


@pytest.mark.parametrize(("experts", "k"), [(4, 1), (16, 4), (7, 6)])
def test_the_bias_is_the_quantile_of_the_margins(experts: int, k: int) -> None:
    rng = np.random.default_rng(0)
    scores, bias = scores_of(rng, 4000, experts), 0.1 * rng.normal(size=experts)
    histogram = margin_histogram(
        jnp.asarray(scores, jnp.float32), jnp.asarray(bias, jnp.float32), k, jnp.ones(4000, bool)
    )
    found = quantile_bias(histogram, jnp.asarray(bias, jnp.float32), k)
    bin_width = (bias.max() - bias.min() + 2) / BINS
    np.testing.assert_allclose(found, exact_quantiles(scores, bias, k), atol=2 * bin_width)


def test_a_few_steps_balance_a_skewed_router() -> None:
    rng = np.random.default_rng(1)
    experts, k = 16, 4
    bias = np.zeros(experts, np.float32)
    before = load(scores_of(rng, 8000, experts), bias, k)
    for _ in range(6):
        scores = jnp.asarray(scores_of(rng, 8000, experts), jnp.float32)
        histogram = margin_histogram(scores, jnp.asarray(bias), k, jnp.ones(8000, bool))
        bias = np.asarray(quantile_bias(histogram, jnp.asarray(bias), k))
    after = load(scores_of(rng, 8000, experts), bias, k)
    assert before.max() / before.mean() > 2.5
    assert after.max() / after.mean() < 1.1


def test_histograms_add_up_and_leave_out_what_is_not_valid() -> None:
    rng = np.random.default_rng(2)
    scores = jnp.asarray(scores_of(rng, 300, 8), jnp.float32)
    bias = jnp.asarray(0.1 * rng.normal(size=8), jnp.float32)
    valid = jnp.arange(300) < 200
    whole = margin_histogram(scores, bias, 2, valid)
    parts = [margin_histogram(scores[a:b], bias, 2, valid[a:b]) for a, b in ((0, 90), (90, 230), (230, 300))]
    np.testing.assert_array_equal(whole, sum(parts))
    np.testing.assert_array_equal(jnp.sum(whole, axis=1), np.full(8, 200))
    np.testing.assert_array_equal(whole, margin_histogram(scores.at[200:].set(jnp.nan), bias, 2, valid))


def test_without_tokens_the_bias_stays() -> None:
    bias = jnp.asarray([0.5, -0.25, -0.25])
    np.testing.assert_array_equal(quantile_bias(jnp.zeros((3, BINS), jnp.int32), bias, 1), bias)


def test_layers_are_balanced_each_on_its_own() -> None:
    rng = np.random.default_rng(3)
    bias = jnp.asarray(0.1 * rng.normal(size=(2, 8)), jnp.float32)
    histograms = jnp.stack(
        [
            margin_histogram(jnp.asarray(scores_of(rng, 500, 8), jnp.float32), bias[i], 2, jnp.ones(500, bool))
            for i in range(2)
        ]
    )
    together = quantile_bias(histograms, bias, 2)
    for i in range(2):
        np.testing.assert_allclose(together[i], quantile_bias(histograms[i], bias[i], 2), atol=1e-6)


@pytest.mark.parametrize("k", [0, 4, 5])
def test_balancing_needs_experts_to_choose_from(k: int) -> None:
    with pytest.raises(ValueError, match=f"num_chosen={k}.*less than the 4 experts"):
        margin_histogram(jnp.zeros((2, 4)), jnp.zeros(4), k, jnp.ones(2, bool))
