"""The indexer in two stages: exact with bounds and for short rows, with means as good as the blocks that they find."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from pallas_kernels.dispatch import UnsupportedImplementationError
from pallas_kernels.fp8_latent import Fp8Latent
from pallas_kernels.lightning_indexer import (
    TwoStage,
    best_candidates,
    index_candidates,
    lightning_indexer,
    recall,
    two_stage_recall,
)
from pallas_kernels.mxfp8 import Mxfp8
from pallas_kernels.sparse_mla import dsa_mla
from tests import oracle_dsa as oracle

BATCH, QUERIES, KEYS, HEADS, WIDTH, TOP_K = 2, 24, 200, 4, 32, 10
BOUND = TwoStage(8, 0.3, "bound")
MEAN = TwoStage(8, 0.3, "mean")
LINEAR = TwoStage(1, 0.2, "linear")


def make(kind: str, seed: int = 0) -> dict[str, Any]:
    """Small integers, so that every product is exact and scores tie; or normal numbers."""
    rng = np.random.default_rng(seed)
    draw = (lambda *s: rng.integers(-2, 3, s)) if kind != "normal" else (lambda *s: rng.standard_normal(s))
    q, k, w = (
        draw(*s).astype(np.float32)
        for s in ((BATCH, QUERIES, HEADS, WIDTH), (BATCH, KEYS, WIDTH), (BATCH, QUERIES, HEADS))
    )
    if kind == "equal":
        k[:] = k[:, :1]
    if kind == "negative":
        w = -np.abs(w) - 1
    if kind == "zeros":
        k[:] = 0
    positions = rng.integers(0, KEYS, (BATCH, QUERIES)).astype(np.int32)
    positions[:, 0], positions[:, 1], positions[:, 2], positions[:, 3] = -1, 0, KEYS - 1, TOP_K
    return {"q": q, "k": k, "w": w, "q_positions": positions}


@cache
def compiled(stage: TwoStage | None, segmented: bool = False) -> Any:
    def run(q: Any, k: Any, w: Any, q_positions: Any, segment_ids: Any = None, key_segment_ids: Any = None) -> Any:
        return lightning_indexer(
            q,
            k,
            w,
            top_k=TOP_K,
            q_positions=q_positions,
            segment_ids=segment_ids,
            key_segment_ids=key_segment_ids,
            two_stage=stage,
            budget_bytes=2**20,
        )

    return jax.jit(run)


def expected(inputs: dict[str, Any]) -> np.ndarray:
    arrays = (inputs[name] for name in ("q", "k", "w"))
    return oracle.padded(oracle.selections(*arrays, TOP_K, inputs["q_positions"]), TOP_K)


@pytest.mark.parametrize("kind", ["integers", "equal", "negative", "zeros", "normal"])
def test_bounds_select_what_the_oracle_does(kind: str) -> None:
    for seed in range(2):
        inputs = make(kind, seed)
        np.testing.assert_array_equal(compiled(BOUND)(**inputs), expected(inputs))


def test_bounds_prove_the_selection_where_it_lies_in_few_blocks() -> None:
    """Large keys in three blocks: the bounds of all others are below the tenth score."""
    inputs = make("normal", 3)
    inputs["k"] *= 0.01
    for first in (16, 64, 120):
        inputs["k"][:, first : first + 8] *= 300
    inputs["q_positions"][:] = KEYS - 1
    np.testing.assert_array_equal(compiled(BOUND)(**inputs), expected(inputs))


def test_mxfp8_keys_and_queries() -> None:
    inputs = make("normal", 4)
    inputs["q"], inputs["k"] = (Mxfp8.quantize(jnp.asarray(inputs[name])) for name in ("q", "k"))
    plain = inputs | {name: np.asarray(inputs[name].dequantize(jnp.float32)) for name in ("q", "k")}
    np.testing.assert_array_equal(compiled(BOUND)(**inputs), expected(plain))
    assert np.all(np.asarray(compiled(MEAN)(**inputs)) < KEYS)


@pytest.mark.parametrize("stage", [BOUND, MEAN, LINEAR], ids=["bound", "mean", "linear"])
def test_what_nobody_sees_may_hold_anything(stage: TwoStage) -> None:
    inputs = make("normal", 5)
    inputs["q_positions"] = np.minimum(inputs["q_positions"], 149)
    clean = np.asarray(compiled(stage)(**inputs))
    inputs["k"] = inputs["k"].copy()
    inputs["k"][:, 150:] = np.nan
    inputs["k"][:, 170:] = np.inf
    np.testing.assert_array_equal(compiled(stage)(**inputs), clean)


@pytest.mark.parametrize("stage", [BOUND, MEAN, LINEAR], ids=["bound", "mean", "linear"])
def test_later_keys_change_nothing(stage: TwoStage) -> None:
    """A block's mean must not tell of keys behind the query: those blocks are kept without looking at it."""
    inputs = make("normal", 6)
    before = np.asarray(compiled(stage)(**inputs))
    other = inputs | {"k": inputs["k"].copy()}
    other["k"][:, 101:] += 5
    after = np.asarray(compiled(stage)(**other))
    early = inputs["q_positions"] <= 100
    np.testing.assert_array_equal(after[early], before[early])
    assert np.all(after.max(axis=-1) <= inputs["q_positions"])


def test_rows_that_see_few_blocks_are_exact() -> None:
    """Four blocks are scored at least: those of ten keys, the first and the newest."""
    inputs = make("normal", 7)
    found, want = np.asarray(compiled(MEAN)(**inputs)), expected(inputs)
    short = inputs["q_positions"] < 4 * 8
    assert short.sum() >= 6
    np.testing.assert_array_equal(found[short], want[short])
    assert MEAN.fewest(TOP_K) == 4
    assert MEAN.most(24, TOP_K) == 3
    assert MEAN.most(8 * 40, TOP_K) == 12
    assert MEAN.keeps_all(32, TOP_K)
    assert not MEAN.keeps_all(33, TOP_K)


def test_the_first_and_the_newest_block_are_always_scored() -> None:
    """Their means point away from the query, and every key in between scores better than nothing."""
    inputs = make("normal", 8)
    inputs["q"][:], inputs["w"][:] = 1, 1
    inputs["k"][:] = 0.1
    inputs["q_positions"][:] = KEYS - 3
    for place in (0, 3, KEYS - 3, KEYS - 8):
        block = slice(place // 8 * 8, place // 8 * 8 + 8)
        inputs["k"][:, block] = -5
    for place in (0, 3, KEYS - 3, KEYS - 8):
        inputs["k"][:, place] = 2
    found = np.asarray(compiled(MEAN)(**inputs))
    for place in (0, 3, KEYS - 3, KEYS - 8):
        assert np.all(np.any(found == place, axis=-1)), place


def test_keys_that_lie_together_are_found_by_their_mean() -> None:
    """Two blocks hold the selected keys among noise, as long passages do that are about one thing."""
    rng = np.random.default_rng(9)
    inputs = make("normal", 9)
    direction = rng.standard_normal(WIDTH)
    inputs["q"] += direction.astype(np.float32)
    inputs["w"] = np.abs(inputs["w"])
    for first in (40, 104):
        inputs["k"][:, first : first + 8] += 2 * direction.astype(np.float32)
    inputs["q_positions"][:] = KEYS - 1
    arrays = {name: jnp.asarray(value) for name, value in inputs.items()}
    found = two_stage_recall(**arrays, top_k=TOP_K, two_stage=MEAN)
    assert float(found.mean()) > 0.97


def test_heads_that_are_always_positive_cost_the_linear_form_nothing() -> None:
    """All products positive but those of one head, which are negative: the linear score is the score."""
    inputs = make("normal", 13)
    inputs["q"], inputs["k"] = np.abs(inputs["q"]), np.abs(inputs["k"])
    inputs["q"][:, :, 1] *= -1
    tight = TwoStage(1, 0.001, "linear")
    assert tight.most(KEYS, TOP_K) == TOP_K + 2
    np.testing.assert_array_equal(compiled(tight)(**inputs), expected(inputs))


def test_blocks_of_several_keys_are_chosen_by_their_best() -> None:
    """Ten keys are in at most ten blocks; the first and the newest are kept besides."""
    inputs = make("normal", 14)
    inputs["q"], inputs["k"] = np.abs(inputs["q"]), np.abs(inputs["k"])
    np.testing.assert_array_equal(compiled(TwoStage(4, 0.9, "linear"))(**inputs), expected(inputs))


@pytest.mark.parametrize("stage", [BOUND, MEAN, LINEAR], ids=["bound", "mean", "linear"])
def test_selection_stays_inside_segments(stage: TwoStage) -> None:
    inputs = make("integers", 10)
    keys = np.repeat(np.arange(5), KEYS // 5)[None].repeat(BATCH, 0).astype(np.int32)
    keys[1, 190:] = -1
    own = np.take_along_axis(keys, np.maximum(inputs["q_positions"], 0), axis=1)
    found = np.asarray(compiled(stage)(**inputs, segment_ids=own, key_segment_ids=keys))
    exact = np.asarray(compiled(None)(**inputs, segment_ids=own, key_segment_ids=keys))
    chosen = np.where(found < 0, -2, np.take_along_axis(keys[:, None], np.maximum(found, 0), axis=2))
    assert np.all((chosen == own[..., None]) | (chosen == -2))
    np.testing.assert_array_equal((found >= 0).sum(-1), (exact >= 0).sum(-1))
    if stage.coarse == "bound":
        np.testing.assert_array_equal(found, exact)


def test_candidates_have_the_scores_of_what_is_selected() -> None:
    inputs = {name: jnp.asarray(value) for name, value in make("integers", 11).items()}
    indices, scores = index_candidates(**inputs, top_k=TOP_K, two_stage=BOUND)
    exact = index_candidates(**inputs, top_k=TOP_K)
    np.testing.assert_array_equal(indices, exact.indices)
    np.testing.assert_array_equal(scores, exact.scores)
    np.testing.assert_array_equal(best_candidates(scores, top_k=TOP_K), np.asarray(indices) >= 0)


def test_attention_over_what_two_stages_select() -> None:
    inputs = {name: jnp.asarray(value) for name, value in make("integers", 12).items()}
    index_q, index_k, index_w, positions = inputs.values()
    rng = np.random.default_rng(12)
    q, latent, up_k, up_v = (
        jnp.asarray(rng.standard_normal(s), jnp.float32)
        for s in ((BATCH, QUERIES, 3, 40), (BATCH, KEYS, 136), (3, 32, 128), (3, 16, 128))
    )
    options: dict[str, Any] = {"top_k": TOP_K, "q_positions": positions, "scale": 0.1, "return_indices": True}
    arguments = index_q, index_k, index_w, q, Fp8Latent.quantize(latent, 128), up_k / 8, up_v / 8
    out, chosen = dsa_mla(*arguments, two_stage=BOUND, **options)
    want, exact = dsa_mla(*arguments, **options)
    np.testing.assert_array_equal(chosen, exact)
    np.testing.assert_allclose(out, want, atol=2e-5)
    with pytest.raises(ValueError, match=r"form='mask' with two_stage; it must be 'gather' or None"):
        dsa_mla(*arguments, two_stage=BOUND, form="mask", **options)
    with pytest.raises(UnsupportedImplementationError, match="reference of dsa_mla is exact"):
        dsa_mla(*arguments, two_stage=BOUND, implementation="reference", **options)


def test_recall_counts_what_was_wanted() -> None:
    wanted = jnp.array([[[1, 4, 9, 12], [3, 5, -1, -1], [-1, -1, -1, -1], [0, 2, 4, 6]]], jnp.int32)
    found = jnp.array([[[12, 1, 7, -1], [3, 5, 8, 9], [1, 2, -1, -1], [-1, -1, -1, -1]]], jnp.int32)
    np.testing.assert_array_equal(recall(found, wanted), [[0.5, 1, 1, 0]])


def test_mistakes_are_said_in_sentences() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"block_size": 0}, r"block_size=0; it must be an integer of at least 1"),
        ({"kept_fraction": 0.0}, r"kept_fraction=0.0; it must be a number above 0 and at most 1"),
        ({"kept_fraction": 1.5}, r"kept_fraction=1.5"),
        ({"coarse": "max"}, r"coarse='max'; it must be 'linear', 'mean' or 'bound'|coarse"),
    ]
    for fields, words in wrong:
        with pytest.raises((ValueError, jaxtyping.TypeCheckError), match=words):
            TwoStage(**fields)
    inputs = {name: jnp.asarray(value) for name, value in make("normal").items()}
    with pytest.raises(UnsupportedImplementationError, match=r"NVIDIA Hopper GPUs, and the platform is 'cpu'"):
        lightning_indexer(**inputs, top_k=TOP_K, two_stage=MEAN, implementation="gpu")
    with pytest.raises(UnsupportedImplementationError, match="is the exact selection; leave two_stage out"):
        lightning_indexer(**inputs, top_k=TOP_K, two_stage=MEAN, implementation="reference")
