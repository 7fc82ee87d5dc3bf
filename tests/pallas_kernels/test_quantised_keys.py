"""Index keys in MXFP8 and latents in FP8, read by every operation: against oracles on what the bytes stand for."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.fp8_latent import Fp8Latent
from pallas_kernels.lightning_indexer import index_scores, lightning_indexer
from pallas_kernels.mxfp8 import BLOCK, Mxfp8
from pallas_kernels.sparse_mla import dense_mla, dsa_mla, latent_mla
from tests import oracle_dsa as oracle

LATENT, SLOT, NOPE, VALUE = 128, 32, 24, 16
BATCH, QUERIES, KEYS, HEADS, TOP_K = 2, 12, 150, 3, 16
SCALE = (NOPE + SLOT) ** -0.5


def simulated(values: np.ndarray) -> np.ndarray:
    """What MXFP8 makes of numbers, in float64: round-up scales, e4m3 elements by another library's conversion."""
    blocks = values.astype(np.float64).reshape(*values.shape[:-1], -1, BLOCK)
    largest = np.maximum(np.abs(blocks).max(-1, keepdims=True), 1e-4)
    scale = 2.0 ** np.ceil(np.log2(largest / 448))
    elements = (blocks / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return (elements * scale).reshape(values.shape)


def far(found: np.ndarray, want: np.ndarray) -> float:
    """DeepGEMM's distance of two arrays: 1 - 2 x.y / (x.x + y.y)."""
    x, y = found.astype(np.float64).ravel(), want.astype(np.float64).ravel()
    return float(1 - 2 * (x @ y) / (x @ x + y @ y))


@cache
def gaussian() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(q, k, w, scores that two 8-bit sides give, scores in full): 32 heads of 128, 32768 keys."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 4, 32, 128)).astype(np.float32)
    k = rng.standard_normal((1, 32768, 128)).astype(np.float32)
    w = rng.standard_normal((1, 4, 32)).astype(np.float32)
    scored = jax.jit(lambda q, k, w, at: index_scores(Mxfp8.quantize(q), Mxfp8.quantize(k), w, at))
    return q, k, w, np.asarray(scored(q, k, w, np.full((1, 4), 32767))), oracle.scores(q, k, w)


def test_scores_are_those_of_the_simulated_quantisation() -> None:
    q, k, w, found, _ = gaussian()
    want = oracle.scores(simulated(q), simulated(k), w)
    np.testing.assert_allclose(found, want, rtol=0, atol=5e-6 * np.abs(want).max())
    assert far(found, want) < 5e-6


def test_scores_are_close_to_those_of_full_precision() -> None:
    *_, found, exact = gaussian()
    assert far(found, exact) < 1e-3


def test_most_of_the_selection_is_that_of_full_precision() -> None:
    """Gaussian keys, the hardest case: 2048 of 32768 share 96 % (95 % in the other works)."""
    *_, found, exact = gaussian()
    for ours, theirs in zip(found[0], exact[0], strict=True):
        chosen = [set(np.argsort(-scores, kind="stable")[:2048].tolist()) for scores in (ours, theirs)]
        assert len(chosen[0] & chosen[1]) >= 0.95 * 2048


def make(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    positions = rng.integers(0, KEYS, (BATCH, QUERIES)).astype(np.int32)
    positions[0, :3] = -1, 0, KEYS - 1
    return {
        "index_q": Mxfp8.quantize(draw(BATCH, QUERIES, 4, 32)),
        "index_k": Mxfp8.quantize(draw(BATCH, KEYS, 32)),
        "index_w": draw(BATCH, QUERIES, 4),
        "q": draw(BATCH, QUERIES, HEADS, NOPE + SLOT),
        "latent": Fp8Latent.quantize(draw(BATCH, KEYS, LATENT + SLOT), LATENT),
        "w_uk": draw(HEADS, NOPE, LATENT) / 8,
        "w_uv": draw(HEADS, VALUE, LATENT) / 8,
        "q_positions": jnp.asarray(positions),
    }


def wide(array: Any) -> np.ndarray:
    return np.asarray(array.dequantize(jnp.float32) if isinstance(array, Mxfp8 | Fp8Latent) else array, np.float64)


def selected(inputs: dict[str, Any]) -> list[list[list[int]]]:
    arrays = (wide(inputs[name]) for name in ("index_q", "index_k", "index_w"))
    return oracle.selections(*arrays, TOP_K, np.asarray(inputs["q_positions"]))


def attended(inputs: dict[str, Any], chosen: list[list[list[int]]]) -> np.ndarray:
    return oracle.mla(*(wide(inputs[name]) for name in ("q", "latent", "w_uk", "w_uv")), chosen, SCALE)


@pytest.mark.parametrize(
    ("form", "budget"), [("gather", 2**28), ("gather", 2**17), ("mask", 2**28), ("mask", 2**17), (None, 2**28)]
)
def test_sparse_attention_over_quantised_caches(form: Any, budget: int) -> None:
    inputs = make()
    out, indices = dsa_mla(**inputs, top_k=TOP_K, scale=SCALE, form=form, budget_bytes=budget, return_indices=True)
    chosen = selected(inputs)
    np.testing.assert_array_equal(indices, oracle.padded(chosen, TOP_K))
    np.testing.assert_allclose(out, attended(inputs, chosen), rtol=0, atol=5e-6)


def test_few_keys_are_all_attended() -> None:
    inputs = make(1)
    found = dsa_mla(**inputs, top_k=KEYS, scale=SCALE)
    everything = oracle.everything(KEYS, np.asarray(inputs["q_positions"]))
    np.testing.assert_allclose(found, attended(inputs, everything), rtol=0, atol=5e-6)


@pytest.mark.parametrize(
    ("form", "budget"), [("naive", 2**28), ("naive", 2**18), ("absorbed", 2**28), ("absorbed", 2**17)]
)
def test_dense_attention_over_fp8_latents(form: Any, budget: int) -> None:
    inputs = make(2)
    given = {name: inputs[name] for name in ("q", "latent", "w_uk", "w_uv", "q_positions")}
    found = dense_mla(**given, scale=SCALE, form=form, budget_bytes=budget)
    everything = oracle.everything(KEYS, np.asarray(inputs["q_positions"]))
    np.testing.assert_allclose(found, attended(inputs, everything), rtol=0, atol=5e-6)
    reference = dense_mla(**given, scale=SCALE, implementation="reference")
    np.testing.assert_allclose(found, reference, rtol=0, atol=5e-6)


@pytest.mark.parametrize("budget", [2**28, 2**17])
def test_absorbed_attention_and_its_log_sum_exp(budget: int) -> None:
    inputs = make(3)
    rng = np.random.default_rng(3)
    q = jnp.asarray(rng.standard_normal((BATCH, QUERIES, HEADS, LATENT + SLOT)), jnp.float32)
    o, lse = latent_mla(
        q,
        inputs["latent"],
        q_positions=inputs["q_positions"],
        latent_width=LATENT,
        scale=0.1,
        budget_bytes=budget,
    )
    everything = oracle.padded(oracle.everything(KEYS, np.asarray(inputs["q_positions"])), KEYS)
    want, want_lse = oracle.sparse(wide(q), wide(inputs["latent"]), everything, LATENT, 0.1)
    np.testing.assert_allclose(o, want, rtol=0, atol=5e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=0, atol=5e-6)


def test_bfloat16_queries_meet_latents_in_bfloat16() -> None:
    """FlashMLA's tolerances of sparse attention over FP8 rows, against the same rows dequantised: 1e-3 and cosine 5e-6."""
    inputs = make(4)
    for name in ("q", "w_uk", "w_uv"):
        inputs[name] = inputs[name].astype(jnp.bfloat16)
    rows = {**inputs, "latent": inputs["latent"].dequantize(jnp.bfloat16)}
    found, same = (np.asarray(dsa_mla(**x, top_k=TOP_K, scale=SCALE), np.float32) for x in (inputs, rows))
    np.testing.assert_allclose(found, same, rtol=2.01 / 128, atol=1e-3)
    assert far(found, same) < 5e-6
    assert far(found, attended(inputs, selected(inputs))) < 1e-4


def test_gradients_pass_fp8_latents_by() -> None:
    """Queries and projections learn beside a quantised cache, which is a constant, as beside the same numbers."""
    inputs = make(5)
    rows = inputs | {"latent": inputs["latent"].dequantize(jnp.float32)}
    for operation, names in (
        (lambda **x: dsa_mla(**x, top_k=TOP_K, scale=SCALE, form="gather", budget_bytes=2**18), ()),
        (lambda **x: dsa_mla(**x, top_k=TOP_K, scale=SCALE, form="mask", budget_bytes=2**18), ()),
        (lambda **x: dense_mla(**x, scale=SCALE, form="naive"), ("index_q", "index_k", "index_w")),
    ):

        def loss(learned: dict[str, Any], fixed: dict[str, Any], operation: Any = operation) -> jax.Array:
            return jnp.sum(operation(**learned, **fixed) ** 2)

        learned = {name: inputs[name] for name in ("q", "w_uk", "w_uv")}
        found, want = (
            jax.grad(loss)(learned, {name: x for name, x in given.items() if name not in (*learned, *names)})
            for given in (inputs, rows)
        )
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, want)


def test_a_step_of_decoding_never_holds_a_whole_cache_in_bfloat16() -> None:
    """65536 places: 8.5 MB of latents and keys are 23 MB in bfloat16; temporaries stay below a fraction of either."""
    places, shape = 65536, jax.ShapeDtypeStruct
    f32 = jnp.dtype("float32")
    arguments = {
        "index_q": jax.eval_shape(Mxfp8.quantize, shape((1, 1, 4, 32), f32)),
        "index_k": jax.eval_shape(Mxfp8.quantize, shape((1, places, 32), f32)),
        "index_w": shape((1, 1, 4), f32),
        "q": shape((1, 1, HEADS, NOPE + SLOT), jnp.dtype("bfloat16")),
        "latent": jax.eval_shape(lambda: Fp8Latent.zeros((1, places), LATENT, SLOT)),
        "w_uk": shape((HEADS, NOPE, LATENT), jnp.dtype("bfloat16")),
        "w_uv": shape((HEADS, VALUE, LATENT), jnp.dtype("bfloat16")),
        "q_positions": shape((1, 1), jnp.dtype("int32")),
    }
    sparse = jax.jit(lambda **x: dsa_mla(**x, top_k=64, scale=SCALE, budget_bytes=2**22))
    given = {name: value for name, value in arguments.items() if not name.startswith("index")}
    dense = jax.jit(lambda **x: dense_mla(**x, scale=SCALE, budget_bytes=2**22))
    for program in (sparse.lower(**arguments).compile(), dense.lower(**given).compile()):
        assert program.memory_analysis().temp_size_in_bytes < 3 * 2**20


def test_widths_that_do_not_fit_are_refused() -> None:
    inputs = make()
    other = {**inputs, "w_uk": inputs["w_uk"][..., :96], "w_uv": inputs["w_uv"][..., :96]}
    with pytest.raises(
        ValueError, match=r"dsa_mla: latent is an Fp8Latent .* with 128 latent channels; .*latent_width=96"
    ):
        dsa_mla(**other, top_k=TOP_K, scale=SCALE)
    with pytest.raises(ValueError, match=r"lightning_indexer: k has shape \[2, 150, 32\]"):
        lightning_indexer(
            Mxfp8.quantize(jnp.zeros((BATCH, QUERIES, 4, 64))),
            inputs["index_k"],
            inputs["index_w"],
            top_k=4,
            q_positions=inputs["q_positions"],
        )
