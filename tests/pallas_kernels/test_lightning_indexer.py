"""The indexer against a sort of NumPy float64 scores: exact sets, exact ties, and what must never be selected."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from pallas_kernels.dispatch import UnsupportedImplementationError
from pallas_kernels.lightning_indexer import DEFAULT_BUDGET_BYTES, index_scores, lightning_indexer
from pallas_kernels.lightning_indexer.select import kth_largest, select, selected_indices
from pallas_kernels.lightning_indexer.specs import LONG, SPECS, TINY, IndexerSpec
from pallas_kernels.lightning_indexer.validate import check_at_least, check_indexer, check_visibility
from tests import oracle_dsa as oracle

IMPLEMENTATIONS = ("reference", "xla")
# Everything at once; a few queries and 16 keys at a time; one query and one key at a time.
BUDGETS = (DEFAULT_BUDGET_BYTES, 8192, 1)


def make(spec: IndexerSpec, *, kind: str = "integers", seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs with small integers, so that every product is exact and scores tie a lot, or with normal numbers."""
    rng = np.random.default_rng(seed)
    draw = (lambda *s: rng.integers(-2, 3, s)) if kind == "integers" else (lambda *s: rng.standard_normal(s))
    q, k, w = (draw(*spec.arguments()[name].shape).astype(np.float32) for name in ("q", "k", "w"))
    positions = np.tile(np.arange(spec.keys - spec.queries, spec.keys), (spec.batch, 1))
    positions[-1, -3:] = -1
    positions[0, 1] = spec.keys - 1
    return {"q": q, "k": k, "w": w, "q_positions": positions}


def run(inputs: dict[str, Any], **options: Any) -> np.ndarray:
    arrays = {name: jnp.asarray(x) for name, x in inputs.items()}
    run = partial(lightning_indexer, **options)
    if options.get("implementation") == "reference":  # the others compile themselves, once for equal shapes and options
        run = jax.jit(run)
    return np.asarray(run(**arrays))


def expected(inputs: dict[str, np.ndarray], top_k: int, segments: np.ndarray | None = None) -> np.ndarray:
    arrays = (inputs[name] for name in ("q", "k", "w"))
    return oracle.padded(oracle.selections(*arrays, top_k, inputs["q_positions"], segments), top_k)


@pytest.mark.parametrize(
    ("implementation", "spec", "budget"),
    [
        *(("reference", spec, BUDGETS[0]) for spec in TINY),
        *(("xla", TINY[1], budget) for budget in BUDGETS),
        *(("xla", spec, BUDGETS[1]) for spec in (TINY[0], TINY[2])),
    ],
    ids=lambda x: getattr(x, "name", None) or str(x),
)
def test_tied_scores_go_to_the_lowest_position(implementation: str, spec: IndexerSpec, budget: int) -> None:
    inputs = make(spec)
    indices = run(inputs, top_k=spec.top_k, budget_bytes=budget, implementation=implementation)
    assert indices.dtype == np.int32
    np.testing.assert_array_equal(indices, expected(inputs, spec.top_k))


@pytest.mark.parametrize("top_k", [1, 39, 41])
def test_top_k_around_the_number_of_keys(top_k: int) -> None:
    inputs = make(TINY[0], seed=1)
    np.testing.assert_array_equal(run(inputs, top_k=top_k, budget_bytes=8192), expected(inputs, top_k))


def test_bfloat16_inputs_are_scored_in_float32() -> None:
    # Exact in bfloat16 one by one, but their scores (up to 16 heads x 8 x 8) are not.
    rng = np.random.default_rng(2)
    q, k, w = (rng.integers(-7, 8, s).astype(np.float32) for s in ((1, 30, 16, 8), (1, 30, 8), (1, 30, 16)))
    inputs = {"q": q, "k": k, "w": w, "q_positions": np.arange(30)[None]}
    low = inputs | {"q": jnp.bfloat16(q), "k": jnp.bfloat16(k)}
    scores = index_scores(jnp.bfloat16(q), jnp.bfloat16(k), jnp.asarray(w), jnp.arange(30)[None])
    assert scores.dtype == jnp.float32
    np.testing.assert_array_equal(run(low, top_k=6), expected(inputs, 6))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_float64_selects_the_oracles_sets_from_random_numbers(implementation: str) -> None:
    with jax.enable_x64(True):
        inputs = {
            k: x.astype(np.float64 if x.dtype == np.float32 else x.dtype)
            for k, x in make(TINY[1], kind="normal").items()
        }
        got = run(inputs, top_k=5, budget_bytes=8192, implementation=implementation)
        scores = index_scores(*(jnp.asarray(x) for x in inputs.values()), implementation=implementation)
    np.testing.assert_array_equal(got, expected(inputs, 5))
    exact = oracle.scores(inputs["q"], inputs["k"], inputs["w"])
    seen = np.arange(53) <= inputs["q_positions"][..., None]
    np.testing.assert_allclose(scores, np.where(seen, exact, -np.inf), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_index_scores_in_float32(implementation: str) -> None:
    inputs = make(TINY[1], kind="normal")
    scores = index_scores(*(jnp.asarray(x) for x in inputs.values()), implementation=implementation, budget_bytes=8192)
    exact = oracle.scores(inputs["q"], inputs["k"], inputs["w"])
    seen = np.arange(53) <= inputs["q_positions"][..., None]
    np.testing.assert_allclose(scores, np.where(seen, exact, -np.inf), rtol=1e-5, atol=1e-5)


def select_rows(rows: list[list[float]], top_k: int) -> list[list[int]]:
    scores = jnp.asarray(rows, jnp.float32)[None]
    return np.asarray(jax.jit(lambda x: selected_indices(select(x, top_k), top_k))(scores))[0].tolist()


def test_zeros_of_either_sign_tie() -> None:
    assert select_rows([[-0.0, 0.0, -0.0, 1.0, 0.0, -1.0], [0.0, -0.0, 0.0, -1.0, -0.0, -1.0]], 3) == [
        [0, 1, 3],
        [0, 1, 2],
    ]


def test_extreme_scores_are_ordered() -> None:
    top, tiny, low = 3e38, 1e-45, float(np.finfo(np.float32).min)
    rows = [[low, top, np.inf, -top, 0.0, -np.inf], [-np.inf, low, -np.inf, -np.inf, -np.inf, -np.inf]]
    assert select_rows(rows, 2) == [[1, 2], [1, -1]]
    assert select_rows([[-tiny, -1e-30, -1.0, -1e30, low, 1e-30]], 4) == [[0, 1, 2, 5]]


def test_a_plateau_of_zeros_fills_from_the_left() -> None:
    # Negative keys against positive queries: ReLU clips all but two keys of each row to exactly 0 for any weights.
    k = -np.ones((1, 600, 4), np.float32)
    k[0, [500, 590]] = 1
    q, w = np.ones((1, 600, 3, 4), np.float32), np.ones((1, 600, 3), np.float32)
    got = run({"q": q, "k": k, "w": w, "q_positions": np.arange(600)[None]}, top_k=7, budget_bytes=1 << 16)[0]
    np.testing.assert_array_equal(got[450], np.arange(7))
    np.testing.assert_array_equal(got[550], [0, 1, 2, 3, 4, 5, 500])
    np.testing.assert_array_equal(got[599], [0, 1, 2, 3, 4, 500, 590])
    np.testing.assert_array_equal(
        run({"q": q, "k": k, "w": -w, "q_positions": np.full((1, 600), 599)}, top_k=7)[0, 0], np.arange(7)
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nan_scores_lose_and_stay_in_range(implementation: str) -> None:
    inputs = make(TINY[0], kind="normal")
    inputs["k"][0, [3, 20]] = np.nan
    inputs["q"][1, 30] = np.nan
    got = run(inputs, top_k=8, implementation=implementation)
    for t in (2, 5, 25, 39):
        row = got[0, t][got[0, t] >= 0]
        seen = inputs["q_positions"][0, t] + 1
        assert len(row) == min(seen, 8)
        assert len(set(row)) == len(row)
        assert row.max() < seen
        assert not ({3, 20} & set(row.tolist())) or seen < 10
    np.testing.assert_array_equal(got[1, 30], np.arange(8))  # every score NaN: all tie


def test_keys_that_nobody_sees_may_hold_nan() -> None:
    inputs = make(TINY[1])
    inputs["q_positions"] = np.minimum(inputs["q_positions"], 40)
    clean = run(inputs, top_k=5)
    inputs["k"][:, 41:] = np.nan
    np.testing.assert_array_equal(run(inputs, top_k=5), clean)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_selection_stays_inside_the_segment(implementation: str) -> None:
    inputs = make(TINY[0])
    inputs["q_positions"] = np.tile(np.arange(40), (2, 1))
    segments = np.stack([np.repeat([0, 1, 2, -1], [13, 1, 20, 6]), np.repeat([4, 0, 7, 7], 10)])
    got = run(inputs, top_k=8, segment_ids=jnp.asarray(segments), implementation=implementation, budget_bytes=8192)
    np.testing.assert_array_equal(got, expected(inputs, 8, segments))
    assert (got[0, 34:] == -1).all()


def test_later_tokens_and_other_rows_change_nothing() -> None:
    inputs = make(TINY[0], kind="normal")
    inputs["q_positions"] = np.tile(np.arange(40), (2, 1))
    before = run(inputs, top_k=8)
    changed = {name: x.copy() for name, x in inputs.items()}
    for name in ("q", "k", "w"):
        changed[name][0, 21:] = 9.0
        changed[name][1] *= -3
    np.testing.assert_array_equal(run(changed, top_k=8)[0, :21], before[0, :21])


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_real_shapes_trace(spec: IndexerSpec) -> None:
    out = jax.eval_shape(lambda kwargs: lightning_indexer(**kwargs, top_k=spec.top_k), spec.arguments())
    assert out.shape == (spec.batch, spec.queries, spec.top_k)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_working_memory_at_64k_stays_within_the_budget(dtype: str) -> None:
    arguments = {
        name: jax.ShapeDtypeStruct(x.shape, dtype if name in "qk" else x.dtype) for name, x in LONG.arguments().items()
    }
    compiled = jax.jit(lambda kwargs: lightning_indexer(**kwargs, top_k=LONG.top_k)).lower(arguments).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= DEFAULT_BUDGET_BYTES


def test_unknown_kernels_say_why() -> None:
    inputs = make(TINY[2])
    with pytest.raises(UnsupportedImplementationError, match="it runs on NVIDIA Hopper GPUs"):
        run(inputs, top_k=3, implementation="gpu")
    with pytest.raises(UnsupportedImplementationError, match="index_scores has no TPU kernel yet"):
        index_scores(*(jnp.asarray(x) for x in inputs.values()), implementation="tpu")


def test_arguments_are_checked_with_sentences() -> None:
    q, k, w = jnp.zeros((1, 4, 2, 8)), jnp.zeros((1, 6, 8)), jnp.zeros((1, 4, 2))
    positions = jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(ValueError, match=r"top_k=0; it must be an integer of at least 1"):
        lightning_indexer(q, k, w, top_k=0, q_positions=positions)
    with pytest.raises(ValueError, match=r"budget_bytes=-5; it must be an integer of at least 1"):
        lightning_indexer(q, k, w, top_k=1, q_positions=positions, budget_bytes=-5)
    with pytest.raises(TypeError, match=r"w has dtype bfloat16; it must be float32 or float64"):
        lightning_indexer(q, k, w.astype(jnp.bfloat16), top_k=1, q_positions=positions)
    with pytest.raises(ValueError, match=r"with 4 queries and 6 keys; packed sequences need as many queries"):
        lightning_indexer(q, k, w, top_k=1, q_positions=positions, segment_ids=positions)
    # The import hook of the tests sees wrong ranks and dtypes first, so the checks behind it are called by themselves.
    with pytest.raises(ValueError, match=r"op: k has shape \[1, 6, 7\]; it must be \[B, S, K\] = \[1, any, 8\]"):
        check_indexer("op", q, k[..., :7], w)
    with pytest.raises(ValueError, match=r"op: w has shape \[1, 3, 2\]; it must be \[B, T, H\] = \[1, 4, 2\]"):
        check_indexer("op", q, k, w[:, :3])
    with pytest.raises(ValueError, match=r"op: k has shape \[1, 0, 8\]"):
        check_indexer("op", q, k[:, :0], w)
    with pytest.raises(TypeError, match=r"op: q has dtype int32; it must be a floating point type"):
        check_indexer("op", q.astype(jnp.int32), k, w)
    with pytest.raises(TypeError, match=r"op: q_positions has dtype float32; it must be an integer type"):
        check_visibility("op", jnp.zeros((1, 4)), None, 1, 4, 6)
    with pytest.raises(ValueError, match=r"op: top_k=True; it must be an integer"):
        check_at_least("op", 1, top_k=True)
    with pytest.raises((ValueError, jaxtyping.TypeCheckError)):
        lightning_indexer(q, k[0], w, top_k=1, q_positions=positions)


@pytest.mark.parametrize("digit_bits", [1, 2, 4])
def test_the_kth_largest_is_what_sorting_finds(digit_bits: int) -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(5, 300)).astype(np.float32)
    scores[0, :250] = -np.inf
    scores[1] = 0
    scores[1, ::2] = -0.0
    scores[2] = -np.abs(scores[2])
    scores[3, :3] = np.finfo(np.float32).min
    scores[4] = np.round(scores[4])
    for k in (1, 2, 51, 299, 300):
        found = kth_largest(jnp.asarray(scores[None]), k, digit_bits)[0]
        np.testing.assert_array_equal(found, -np.sort(-scores, axis=1)[:, k - 1])
