"""The mean of two models, and biases that settle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.model import Decoder
from kimi_jax.train import evaluate_batch, init_params
from recipes.kimi_tiny.finish import mean, settle
from tests.kimi_jax.train.tiny import batch, config


def test_a_mean_lies_between() -> None:
    first, second = {"a": jnp.array([0.0, 4.0])}, {"a": jnp.array([1.0, 0.0])}
    assert mean(first, second, 0.25)["a"].tolist() == [0.25, 3.0]
    with pytest.raises(ValueError, match=r"share=1\.5; it must be from 0 to 1"):
        mean(first, second, 1.5)


def test_settled_biases_load_experts_evenly_and_nothing_else_changes() -> None:
    decoder = Decoder(config())
    params = init_params(decoder, 1)
    # The router begins as good as blind: one expert that everybody likes is what balancing is for.
    params["moe"]["correction_bias"] = params["moe"]["correction_bias"].at[:, 0].add(0.2)
    batches = [batch(seed, 8, 128) for seed in range(3)]

    def imbalance(params: dict) -> float:
        load = sum(np.asarray(evaluate_batch(decoder, jnp.float32)(params, b)["expert_load"]) for b in batches)
        return float((load.max(-1) / load.mean(-1)).max())

    settled = settle(decoder, params, batches, rounds=4)
    assert imbalance(params) > 1.5
    assert imbalance(settled) < 1.1
    for (path, before), after in zip(
        jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(settled), strict=True
    ):
        if "correction_bias" not in jax.tree_util.keystr(path):
            assert before is after
