from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kimi_jax.model import Decoder
from kimi_jax.params import Params
from kimi_jax.train import (
    Batch,
    IndexerStage,
    OptimizerConfig,
    StepConfig,
    TrainStep,
    evaluate_batch,
    init_params,
    init_state,
    make_optimizer,
    make_train_step,
    wsd_schedule,
)
from kimi_jax.train.losses import TrainingObserver, targets
from tests.kimi_jax.train.tiny import VOCAB, batch, config

SPARSE = Decoder(config())
DENSE = Decoder(config(), dense_attention=True)


@cache
def params() -> Params:
    found = init_params(SPARSE)
    # Noise in place of zeros and ones, so that every gradient has something to flow through.
    leaves, tree = jax.tree.flatten(found)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    return jax.tree.unflatten(
        tree, [x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    )


KEEP = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params), lambda updates, state, params=None: (updates, updates)
)


@cache
def step_of(micro_batches: int, indexer: IndexerStage | None, language: bool) -> TrainStep:
    settings = StepConfig(dtype=jnp.float32, micro_batches=micro_batches, indexer=indexer, language=language)
    return make_train_step(SPARSE, KEEP, settings)


def gradients(
    micro_batches: int, given: Batch, indexer: IndexerStage | None = None, language: bool = True
) -> tuple[Params, dict[str, Any]]:
    """What a step hands to its optimizer, and its metrics."""
    state = init_state(jax.tree.map(jnp.copy, params()), KEEP)
    state, metrics = step_of(micro_batches, indexer, language)(state, given)
    return state.optimizer_state, metrics


def norm(tree: Any) -> float:
    return float(np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(tree))))


def difference(a: Params, b: Params) -> float:
    return norm(jax.tree.map(jnp.subtract, a, b)) / norm(a)


@cache
def whole() -> tuple[Params, dict[str, Any]]:
    return gradients(1, batch(), indexer="sparse")


def test_the_loss_is_the_mean_over_counting_tokens() -> None:
    given = batch()
    wanted, counts = targets(given)
    logits = SPARSE.logits(params(), jnp.asarray(given.tokens), segment_ids=jnp.asarray(given.segment_ids))
    log_p = np.asarray(jax.nn.log_softmax(logits), np.float64)
    nats = -np.take_along_axis(log_p, np.asarray(wanted)[..., None], -1)[..., 0]
    assert float(whole()[1]["loss"]) == pytest.approx(nats[np.asarray(counts)].mean(), rel=1e-5)
    found = evaluate_batch(SPARSE, jnp.float32)(params(), given)
    np.testing.assert_allclose(found["nats"], np.where(counts, nats, 0), atol=1e-4)
    np.testing.assert_array_equal(found["correct"], (log_p.argmax(-1) == wanted) & np.asarray(counts))


def test_micro_batches_of_unequal_content_change_nothing_but_rounding() -> None:
    given = batch()
    uneven = Batch(given.tokens, given.segment_ids, given.learned & (np.arange(4)[:, None] != 1))
    one, in_one = gradients(1, uneven, indexer="sparse")
    four, in_four = gradients(4, uneven, indexer="sparse")
    assert difference(one, four) < 1e-5
    for name in in_one:
        assert float(in_one[name]) == pytest.approx(float(in_four[name]), rel=1e-5), name


def test_what_is_not_learned_has_no_influence_as_a_target() -> None:
    given = batch()
    # Tokens at the end of their example that aren't learned: nothing reads them and nothing predicts them.
    last = np.diff(given.segment_ids, axis=1, append=-1) != 0
    idle = last & ~given.learned & (given.segment_ids >= 0)
    assert idle.any()
    changed = Batch(np.where(idle, (given.tokens + 7) % VOCAB, given.tokens), given.segment_ids, given.learned)
    found, metrics = gradients(1, changed)
    wanted, same = gradients(1, given)
    assert float(metrics["loss"]) == float(same["loss"])
    # Router statistics see them, gradients of the loss don't.
    assert difference(wanted, found) < 1e-6


def test_a_batch_in_which_nothing_counts_has_no_gradient() -> None:
    given = batch()
    found, metrics = gradients(1, Batch(given.tokens, given.segment_ids, np.zeros_like(given.learned)))
    assert norm(found) == 0
    assert float(metrics["loss"]) == 0


def test_the_indexer_learns_from_its_own_loss_and_nothing_else_does() -> None:
    language, _ = gradients(1, batch())
    both, _ = whole()
    only, _ = gradients(1, batch(), indexer="sparse", language=False)
    assert norm(language["mla"]["indexer"]) == 0
    assert norm(only["mla"]["indexer"]) > 0
    assert difference(both["mla"]["indexer"], only["mla"]["indexer"]) < 1e-6
    rest = {name: value for name, value in only["mla"].items() if name != "indexer"}
    assert norm([rest, *(value for name, value in only.items() if name != "mla")]) == 0


def test_gradients_of_the_indexer_are_those_of_finite_differences() -> None:
    given = jax.tree.map(jnp.asarray, batch())

    @jax.jit
    def loss(params: Params) -> Any:
        observer = TrainingObserver(SPARSE, "sparse")
        found = SPARSE.hidden(params, given.tokens, segment_ids=given.segment_ids, observer=observer)[1]
        return jnp.sum(found["indexer_kl"]) / jnp.sum(given.segment_ids >= 0)

    gradient, _ = gradients(1, batch(), indexer="sparse", language=False)
    for name in ("query", "key", "head_weights"):
        direction = gradient["mla"]["indexer"][name]
        direction = direction / jnp.linalg.norm(direction)

        def moved(step: float, name: str = name, direction: Any = direction) -> Params:
            indexer = params()["mla"]["indexer"]
            indexer = indexer | {name: indexer[name] + step * direction}
            return params() | {"mla": params()["mla"] | {"indexer": indexer}}

        slope = (float(loss(moved(0.02))) - float(loss(moved(-0.02)))) / 0.04
        assert slope == pytest.approx(float(jnp.sum(direction * gradient["mla"]["indexer"][name])), rel=0.05), name


def test_a_model_learns_and_its_experts_stay_balanced() -> None:
    optimizer = make_optimizer(DENSE, OptimizerConfig(5e-3), wsd_schedule(60, warmup=5, decay=20))
    step = make_train_step(DENSE, optimizer, StepConfig(dtype=jnp.float32))
    state = init_state(init_params(DENSE), optimizer)
    losses = []
    for number in range(60):
        state, metrics = step(state, batch(number, rows=8))
        losses.append(float(metrics["loss"]))
    # Half of the tokens repeat the one before them: ½ ln 64 nats are left.
    assert losses[0] == pytest.approx(np.log(VOCAB), rel=0.05)
    assert np.mean(losses[-5:]) < 0.75 * np.log(VOCAB)
    assert float(metrics["expert_imbalance"]) < 1.5
    assert int(state.step) == 60


def test_contradictions_are_refused() -> None:
    with pytest.raises(ValueError, match="indexer='dense' with Decoder\\(dense_attention=False\\)"):
        TrainingObserver(SPARSE, "dense")
    with pytest.raises(ValueError, match="leaves nothing to learn"):
        StepConfig(language=False)
    with pytest.raises(ValueError, match="micro_batches=0"):
        StepConfig(micro_batches=0)
    with pytest.raises(ValueError, match=r"balance=1\.5"):
        StepConfig(balance=1.5)
    optimizer = make_optimizer(DENSE, OptimizerConfig(1e-3), wsd_schedule(2, warmup=0, decay=0))
    step = make_train_step(DENSE, optimizer, StepConfig(micro_batches=3))
    with pytest.raises(ValueError, match="micro_batches=3 doesn't divide the batch's 4 rows"):
        step(init_state(init_params(DENSE), optimizer), batch())
