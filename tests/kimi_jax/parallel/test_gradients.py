"""A training step on a mesh is that of one device."""

from collections.abc import Mapping
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kimi_jax.model import Decoder
from kimi_jax.parallel import MeshDecoder
from kimi_jax.sharding import make_mesh
from kimi_jax.train import StepConfig, TrainState, init_params, init_state, make_train_step
from tests.kimi_jax.train.tiny import batch, config

ROWS, TOKENS = 4, 256
KEEP = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params), lambda updates, state, params=None: (updates, updates)
)


def step_of(decoder: Decoder, settings: StepConfig) -> tuple[TrainState, dict[str, jax.Array]]:
    """The state after a step that keeps gradients in place of the optimizer's state, and metrics."""
    state = init_state(init_params(Decoder(config(), dense_attention=decoder.dense_attention), 3), KEEP)
    return make_train_step(decoder, KEEP, settings)(state, batch(1, ROWS, TOKENS))


@cache
def alone(indexer: bool) -> tuple[TrainState, dict[str, jax.Array]]:
    return step_of(Decoder(config(), dense_attention=indexer), settings(indexer))


def settings(indexer: bool) -> StepConfig:
    return StepConfig(dtype=jnp.float32, indexer="dense" if indexer else None, micro_batches=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "indexer"),
    [
        ({"context": 2, "expert": 2, "tensor": 2}, False),
        ({"context": 2, "expert": 4}, False),
        ({"data": 2, "expert": 2}, True),
    ],
    ids=["context-expert-tensor", "context-experts", "data-expert-indexer"],
)
def test_gradients_biases_and_metrics_are_equal(mesh: Mapping[str, int], indexer: bool) -> None:
    """float32, relative to each array's largest entry."""
    decoder = MeshDecoder(config(), make_mesh(mesh), dense_attention=indexer)
    found, metrics = step_of(decoder, settings(indexer))
    want, wanted_metrics = alone(indexer)
    compared = {"gradients": found.optimizer_state, "biases": found.params["moe"]["correction_bias"]}
    against = {"gradients": want.optimizer_state, "biases": want.params["moe"]["correction_bias"]}
    for (path, ours), theirs in zip(
        jax.tree_util.tree_leaves_with_path(compared), jax.tree.leaves(against), strict=True
    ):
        ours, theirs = np.asarray(ours), np.asarray(theirs)
        scale = np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5 * scale + 1e-9, err_msg=jax.tree_util.keystr(path))
    assert metrics.keys() == wanted_metrics.keys()
    for name, value in metrics.items():
        np.testing.assert_allclose(float(value), float(wanted_metrics[name]), rtol=1e-5, err_msg=name)


def test_an_indexer_that_misses_heads_doesnt_learn() -> None:
    decoder = MeshDecoder(config(), make_mesh({"tensor": 2}), dense_attention=True)
    with pytest.raises(ValueError, match="needs all heads and whole rows on a device"):
        step_of(decoder, settings(True))


def test_rows_must_divide() -> None:
    decoder = MeshDecoder(config(), make_mesh({"context": 4}))
    with pytest.raises(
        ValueError, match=r"rows of 256 tokens can't be split over context = 4 devices; .* multiple of 512"
    ):
        step_of(decoder, settings(False))
