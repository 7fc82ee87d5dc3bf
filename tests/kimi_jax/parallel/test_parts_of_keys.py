"""What the operations return about a part of the keys, and what makes a whole of the parts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.lightning_indexer import best_candidates, index_candidates, lightning_indexer
from pallas_kernels.sparse_mla import dense_mla, dsa_mla, indexer_kl, latent_mla
from tests import oracle_dsa as oracle
from tests.kimi_jax.parallel.dsa_numbers import LATENT, SCALE, SLOT, WEIGHTS, numbers

IMPLEMENTATIONS = ("xla", "reference")
PLACES, TOKENS, TOP_K = 90, 6, 8


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_candidates_are_the_selection_with_its_scores(implementation: Any) -> None:
    x = numbers(0, TOKENS, rows=2, places=PLACES)
    positions = np.array([[-1, 0, 5, 7, 8, 89], [3, 20, 40, 41, 42, 88]], np.int32)
    q, k, w = x["index_q"], x["index_k"], x["index_w"]
    found = index_candidates(
        jnp.asarray(q),
        jnp.asarray(k),
        jnp.asarray(w),
        top_k=TOP_K,
        q_positions=jnp.asarray(positions),
        implementation=implementation,
    )
    np.testing.assert_array_equal(found.indices, oracle.padded(oracle.selections(q, k, w, TOP_K, positions), TOP_K))
    table = oracle.scores(q, k, w)
    chosen = np.take_along_axis(table, np.maximum(found.indices, 0), axis=2)
    np.testing.assert_array_equal(found.scores, np.where(np.asarray(found.indices) < 0, -np.inf, chosen))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_scores_of_candidates_can_be_ranked(implementation: Any) -> None:
    """NaN and -inf are the lowest finite number, so that they lose against what is visible and not against nothing."""
    q, w = jnp.ones((1, 1, 1, 1)), jnp.ones((1, 1, 1))
    k = jnp.asarray([1.0, jnp.nan, 2.0, jnp.nan]).reshape(1, 4, 1)
    found = index_candidates(q, k, w, top_k=6, q_positions=jnp.asarray([[2]]), implementation=implementation)
    lowest = np.finfo(np.float32).min
    np.testing.assert_array_equal(found.indices[0, 0], [0, 1, 2, -1, -1, -1])
    np.testing.assert_array_equal(found.scores[0, 0], [1, lowest, 2, -np.inf, -np.inf, -np.inf])


def test_best_candidates() -> None:
    """The first of equal scores, both zeros alike, and never one that isn't there."""
    none = -np.inf
    scores = np.array([[[1, 2, 2, none], [none, -0.0, 0.0, 0.0], [none, 3, none, none], [none] * 4]], np.float32)
    best = best_candidates(jnp.asarray(scores), top_k=2)
    np.testing.assert_array_equal(best[0].astype(int), [[0, 1, 1, 0], [0, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]])
    assert np.array_equal(best_candidates(jnp.asarray(scores), top_k=9), scores > none)
    with pytest.raises(ValueError, match="top_k=0"):
        best_candidates(jnp.asarray(scores), top_k=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("budget_bytes", [None, 20_000])
def test_dense_attention_in_the_latent_space(implementation: Any, budget_bytes: int | None) -> None:
    """The output and its log-sum-exp; NaN behind what is visible; nothing visible gives 0 and -inf."""
    rng = np.random.default_rng(1)
    q = rng.standard_normal((2, 20, 2, LATENT + SLOT)).astype(np.float32)
    latent = rng.standard_normal((2, PLACES, LATENT + SLOT)).astype(np.float32)
    latent[:, 70:] = np.nan
    positions = rng.integers(-1, 70, (2, 20)).astype(np.int32)
    positions[0, 3] = -1
    o, lse = latent_mla(
        *(jnp.asarray(x) for x in (q, latent)),
        q_positions=jnp.asarray(positions),
        latent_width=LATENT,
        scale=SCALE,
        budget_bytes=budget_bytes,
        implementation=implementation,
    )
    indices = np.where(np.arange(PLACES) <= positions[..., None], np.arange(PLACES), -1)
    expected_o, expected_lse = oracle.sparse(q, latent, indices, LATENT, SCALE)
    np.testing.assert_allclose(o, expected_o, atol=2e-6)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-6)
    assert np.all(np.asarray(lse)[positions < 0] == -np.inf)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_queries_may_be_some_of_the_packed_tokens(implementation: Any) -> None:
    """Every operation, with the segments of the keys apart: the rows that it computes for all tokens."""
    x = {name: jnp.asarray(value) for name, value in numbers(2, 24, rows=2, places=24).items()}
    ids = jnp.asarray(np.repeat([[0, 1, 2, -1], [0, 0, 3, 3]], 6, axis=1).astype(np.int32))
    positions = jnp.where(ids >= 0, jnp.arange(24), -1)
    some = jnp.asarray([17, 3, 6, 11, 20])

    def operations(x: dict[str, jax.Array], positions: jax.Array, **segments: Any) -> list[Any]:
        options = segments | {"q_positions": positions, "implementation": implementation}
        index: Any = [x[name] for name in ("index_q", "index_k", "index_w")]
        return [
            lightning_indexer(*index, top_k=4, **options),
            dsa_mla(**x, top_k=4, scale=SCALE, **options),
            dense_mla(x["q"], x["latent"], *(x[name] for name in WEIGHTS), scale=SCALE, **options),
            indexer_kl(*index, *(x[name] for name in ("q", "latent", "w_uk")), top_k=4, scale=SCALE, **options),
        ]

    whole = operations(x, positions, segment_ids=ids)
    queries = {name: x[name][:, some] for name in ("index_q", "index_w", "q")}
    part = operations(x | queries, positions[:, some], segment_ids=ids[:, some], key_segment_ids=ids)
    for a, b in zip(part, whole, strict=True):
        np.testing.assert_allclose(a, b[:, some], atol=2e-5)
    with pytest.raises(ValueError, match="or key_segment_ids"):
        operations(x | queries, positions[:, some], segment_ids=ids[:, some])
    with pytest.raises(ValueError, match="key_segment_ids were given without segment_ids"):
        operations(x | queries, positions[:, some], key_segment_ids=ids)
