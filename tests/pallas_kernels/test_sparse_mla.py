"""Sparse and dense MLA against NumPy float64, query by query, in every form, block size and precision."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from pallas_kernels.dispatch import UnsupportedImplementationError
from pallas_kernels.lightning_indexer.validate import check_scale
from pallas_kernels.sparse_mla import default_budget_bytes, dense_mla, dsa_mla, sparse_mla
from pallas_kernels.sparse_mla.specs import DENSE, LONG, SPECS, TINY, MlaSpec
from tests import oracle_dsa as oracle

INDEX = ("index_q", "index_k", "index_w")
MAIN = ("q", "latent", "w_uk", "w_uv")
# Everything at once; several blocks of queries, tiles of keys and groups of heads; one query and one key at a time.
BUDGETS = (default_budget_bytes(), 30_000, 1)


def make(spec: MlaSpec, dtype: Any = np.float64, *, seed: int = 0) -> dict[str, np.ndarray]:
    """Normal numbers for attention; small integers for the indexer, whose scores are then exact and tie a lot."""
    rng = np.random.default_rng(seed)
    inputs: dict[str, np.ndarray] = {}
    for name, x in spec.dsa_arguments().items():
        if name in INDEX:
            inputs[name] = rng.integers(-2, 3, x.shape).astype(np.float32)
        elif name != "q_positions":
            inputs[name] = rng.standard_normal(x.shape).astype(dtype)
    positions = np.tile(np.arange(spec.keys - spec.queries, spec.keys), (spec.batch, 1))
    positions[-1, -3:] = -1
    return inputs | {"q_positions": positions}


def call(fn: Callable[..., Any], inputs: dict[str, Any], **options: Any) -> Any:
    names = (*INDEX, *MAIN) if fn is dsa_mla else MAIN
    arrays = {name: jnp.asarray(inputs[name]) for name in (*names, "q_positions")}
    run = partial(fn, **options)
    if options.get("implementation") == "reference":  # the others compile themselves, once for equal shapes and options
        run = jax.jit(run)
    return jax.tree.map(np.asarray, run(**arrays))


def chosen(inputs: dict[str, np.ndarray], top_k: int, segments: np.ndarray | None = None) -> list[list[list[int]]]:
    return oracle.selections(*(inputs[name] for name in INDEX), top_k, inputs["q_positions"], segments)


def attended(inputs: dict[str, np.ndarray], rows: list[list[list[int]]], scale: float) -> np.ndarray:
    return oracle.mla(*(inputs[name] for name in MAIN), rows, scale)


def dense_rows(inputs: dict[str, np.ndarray], segments: np.ndarray | None = None) -> list[list[list[int]]]:
    return oracle.everything(inputs["latent"].shape[1], inputs["q_positions"], segments)


# --- Values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "spec"),
    [
        *(("reference", spec) for spec in TINY),
        *(("gather", spec) for spec in TINY),
        ("mask", TINY[0]),
    ],
    ids=lambda x: getattr(x, "name", None) or str(x),
)
def test_dsa_in_float64(form: Any, spec: MlaSpec) -> None:
    options = {"implementation": "reference"} if form == "reference" else {"form": form}
    inputs = make(spec)
    with jax.enable_x64(True):
        out, indices = call(
            dsa_mla, inputs, top_k=spec.top_k, scale=spec.scale, return_indices=True, budget_bytes=30_000, **options
        )
    rows = chosen(inputs, spec.top_k or 0)
    np.testing.assert_array_equal(indices, oracle.padded(rows, spec.top_k or 0))
    np.testing.assert_allclose(out, attended(inputs, rows, spec.scale), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("form", "budget"), [("gather", 30_000), ("gather", 1), ("mask", 30_000)])
def test_dsa_in_float32_for_any_budget(form: Any, budget: int) -> None:
    spec = TINY[0]
    inputs = make(spec, np.float32)
    out = call(dsa_mla, inputs, top_k=8, scale=spec.scale, form=form, budget_bytes=budget)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, attended(inputs, chosen(inputs, 8), spec.scale), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["reference", "naive", "absorbed", None])
def test_dense_in_float64(form: Any) -> None:
    options = {"implementation": "reference"} if form == "reference" else {"form": form}
    spec = TINY[1]
    inputs = make(spec)
    with jax.enable_x64(True):
        out = call(dense_mla, inputs, scale=spec.scale, budget_bytes=60_000, **options)
    np.testing.assert_allclose(out, attended(inputs, dense_rows(inputs), spec.scale), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("form", "budget"), [("naive", BUDGETS[0]), ("absorbed", BUDGETS[0]), ("absorbed", 1)])
def test_dense_in_float32(form: Any, budget: int) -> None:
    spec = TINY[0]
    inputs = make(spec, np.float32)
    out = call(dense_mla, inputs, scale=spec.scale, form=form, budget_bytes=budget)
    np.testing.assert_allclose(out, attended(inputs, dense_rows(inputs), spec.scale), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("form", "queries"),
    [("gather", 1), ("absorbed", 1), *((form, 24) for form in ("gather", "mask", "naive", "absorbed"))],
)
def test_bfloat16(form: Any, queries: int) -> None:
    spec = MlaSpec("", 2, queries, 24, 4, 16, 8, 16, 32, top_k=6, index_heads=4, index_width=8)
    inputs = make(spec)
    low = inputs | {name: jnp.asarray(inputs[name], jnp.bfloat16) for name in MAIN}
    rounded = inputs | {name: np.asarray(low[name], np.float64) for name in MAIN}
    sparse = form in ("gather", "mask")
    options = {"scale": spec.scale, "form": form, "budget_bytes": 60_000}
    out = call(dsa_mla, low, top_k=6, **options) if sparse else call(dense_mla, low, **options)
    assert out.dtype == jnp.bfloat16
    exact = attended(rounded, chosen(inputs, 6) if sparse else dense_rows(inputs), spec.scale)
    assert np.abs(np.asarray(out, np.float64) - exact).max() < 2e-2 * np.abs(exact).max()


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_sparse_mla_skips_what_is_no_index(implementation: Any) -> None:
    rng = np.random.default_rng(0)
    q, latent = rng.standard_normal((2, 7, 3, 13)), rng.standard_normal((2, 19, 13))
    indices = rng.permuted(np.tile(np.arange(19), (2, 7, 1)), axis=2)[..., :6]
    indices[0, 0] = -1
    indices[0, 1, 1:] = -1
    indices[1, 2, [0, 3]] = [19, -7]
    indices[1, 3] = [4, -1, -1, 2**31 - 1, 4, 0]  # a repeated key counts twice
    indices[indices == 8] = -1
    o, lse = oracle.sparse(q, latent, indices, 10, 0.3)
    latent[:, 8] = np.nan
    options = {"latent_width": 10, "scale": 0.3, "implementation": implementation, "budget_bytes": 10_000}
    run = jax.jit(partial(sparse_mla, **options))
    with jax.enable_x64(True):
        got = run(jnp.asarray(q), jnp.asarray(latent), jnp.asarray(indices))
    np.testing.assert_allclose(got[0], o, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(got[1], lse, rtol=1e-12, atol=1e-12)
    assert (np.asarray(got[0])[0, 0] == 0).all()
    assert (np.asarray(got[1])[0, 0] == -np.inf).all()
    low = run(*(jnp.asarray(x, jnp.float32) for x in (q, latent)), jnp.asarray(indices, jnp.int32))
    np.testing.assert_allclose(low[0], o, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(low[1], lse, rtol=1e-5, atol=1e-5)


def test_sparse_over_all_keys_is_dense() -> None:
    spec = TINY[0]
    inputs = make(spec)
    everything = oracle.padded(dense_rows(inputs), spec.keys)
    nope, slot = np.split(inputs["q"], [spec.nope], axis=-1)
    absorbed = np.concatenate([np.einsum("bthn,hnl->bthl", nope, inputs["w_uk"]), slot], axis=-1)
    with jax.enable_x64(True):
        o, _ = sparse_mla(
            jnp.asarray(absorbed),
            jnp.asarray(inputs["latent"]),
            jnp.asarray(everything),
            latent_width=spec.latent,
            scale=spec.scale,
        )
        dense = call(dense_mla, inputs, scale=spec.scale)
        selected = call(dsa_mla, inputs, top_k=spec.keys, scale=spec.scale)
    expanded = np.einsum("bthl,hvl->bthv", o, inputs["w_uv"])
    np.testing.assert_allclose(expanded, dense, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(selected, dense)


@pytest.mark.parametrize("form", ["gather", "mask", "naive", "absorbed"])
def test_segments_don_t_see_each_other(form: Any) -> None:
    spec = TINY[0]
    inputs = make(spec, np.float32)
    inputs["q_positions"] = np.tile(np.arange(40), (2, 1))
    segments = np.stack([np.repeat([0, 1, 2, -1], [13, 1, 20, 6]), np.repeat([4, 0, 7, 7], 10)])
    options = {"scale": spec.scale, "segment_ids": jnp.asarray(segments), "form": form, "budget_bytes": 30_000}
    if form in ("gather", "mask"):
        rows, run = chosen(inputs, 8, segments), partial(call, dsa_mla, top_k=8, **options)
    else:
        rows, run = dense_rows(inputs, segments), partial(call, dense_mla, **options)
    out = run(inputs=inputs)
    np.testing.assert_allclose(out, attended(inputs, rows, spec.scale), rtol=1e-5, atol=1e-5)
    assert (out[0, 34:] == 0).all()
    # Neither does a NaN of one segment reach another, although it runs in the same products.
    inputs["latent"][0, 14:34] = np.nan
    broken = run(inputs=inputs)
    np.testing.assert_array_equal(broken[0, :14], out[0, :14])
    np.testing.assert_array_equal(broken[1], out[1])
    assert np.isnan(broken[0, 15:34]).all()


# --- Short prompts (selection skipped), chunks, decoding --------------------------------------------------------------


@pytest.mark.parametrize("length", [5, 8, 9, 20])
def test_short_prompts_stay_causal(length: int) -> None:
    spec = MlaSpec("", 1, length, length, 3, 6, 3, 5, 10, top_k=8, index_heads=16, index_width=8)
    inputs = make(spec, np.float32, seed=length)
    inputs["q_positions"] = np.arange(length)[None]
    run = partial(call, dsa_mla, top_k=8, scale=spec.scale, return_indices=True)
    out, indices = run(inputs)
    rows = dense_rows(inputs) if length <= 8 else chosen(inputs, 8)
    np.testing.assert_array_equal(indices, oracle.padded(rows, 8))
    np.testing.assert_allclose(out, attended(inputs, rows, spec.scale), rtol=1e-5, atol=1e-5)
    if length <= 8:
        np.testing.assert_array_equal(out, call(dense_mla, inputs, scale=spec.scale))
    last = {name: x.copy() for name, x in inputs.items()}
    for name in (*INDEX, "q", "latent"):
        last[name][:, -1] = 5 - 3 * last[name][:, -1]
    changed, changed_indices = run(last)
    np.testing.assert_array_equal(changed[:, :-1], out[:, :-1])
    np.testing.assert_array_equal(changed_indices[:, :-1], indices[:, :-1])
    assert not np.array_equal(changed[:, -1], out[:, -1])


def test_chunks_and_decoding_across_the_top_k() -> None:
    # One cache of 24 rows, unwritten rows NaN; a chunk of 3, the rest up to 6, then one token at a time past top_k = 8.
    spec = MlaSpec("", 1, 20, 20, 3, 6, 3, 5, 10, top_k=8, index_heads=16, index_width=8)
    inputs = make(spec, np.float32)
    inputs["q_positions"] = np.arange(20)[None]
    whole = attended(inputs, chosen(inputs, 8), spec.scale)
    run = jax.jit(partial(dsa_mla, top_k=8, scale=spec.scale, return_indices=True))
    index_k, latent = np.full((1, 24, 8), np.nan, np.float32), np.full((1, 24, 13), np.nan, np.float32)
    start = 0
    for size in (3, 3, *[1] * 14):
        stop = start + size
        index_k[:, start:stop], latent[:, start:stop] = (
            inputs["index_k"][:, start:stop],
            inputs["latent"][:, start:stop],
        )
        new = {name: jnp.asarray(inputs[name][:, start:stop]) for name in ("index_q", "index_w", "q", "q_positions")}
        weights = {name: jnp.asarray(inputs[name]) for name in ("w_uk", "w_uv")}
        out, indices = run(**new, **weights, index_k=jnp.asarray(index_k), latent=jnp.asarray(latent))
        np.testing.assert_allclose(out, whole[:, start:stop], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(indices, oracle.padded(chosen(inputs, 8), 8)[:, start:stop])
        start = stop


# --- Independence -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["gather", "mask", "naive", "absorbed"])
def test_rows_depend_on_nothing_else_bit_for_bit(form: Any) -> None:
    spec = TINY[0]
    inputs = make(spec, np.float32)
    inputs["q_positions"] = np.tile(np.arange(40), (2, 1))
    fn = partial(dsa_mla, top_k=8) if form in ("gather", "mask") else dense_mla
    names = (*INDEX, *MAIN, "q_positions") if form in ("gather", "mask") else (*MAIN, "q_positions")
    compiled = jax.jit(partial(fn, scale=spec.scale, form=form, budget_bytes=60_000))

    def run(arrays: dict[str, np.ndarray]) -> np.ndarray:
        return np.asarray(compiled(**{name: jnp.asarray(arrays[name]) for name in names}))

    out = run(inputs)
    # Later tokens: other values, then NaN.
    for value in (7.0, np.nan):
        later = {name: x.copy() for name, x in inputs.items()}
        for name in (*INDEX, "q", "latent"):
            later[name][:, 23:] = value
        np.testing.assert_array_equal(run(later)[:, :23], out[:, :23])
    # Another neighbour, shorter, with a NaN; then the rows swapped.
    other = {name: x.copy() for name, x in inputs.items()}
    other["q_positions"][1] = np.where(np.arange(40) < 5, np.arange(40), -1)
    other["latent"][1], other["q"][1] = np.nan, 3.0
    mixed = run(other)
    np.testing.assert_array_equal(mixed[0], out[0])
    assert (mixed[1, 5:] == 0).all()
    swapped = {name: x if name in ("w_uk", "w_uv") else x[::-1].copy() for name, x in inputs.items()}
    np.testing.assert_array_equal(run(swapped), out[::-1])


# --- Gradients --------------------------------------------------------------------------------------------------------


def central_differences(
    fn: Callable[..., np.ndarray], arguments: list[np.ndarray], directions: list[np.ndarray], weight: np.ndarray
) -> list[float]:
    """Derivative of sum(weight * fn) along one direction for each argument."""
    step, slopes = 1e-5, []
    for i, direction in enumerate(directions):
        up, down = list(arguments), list(arguments)
        up[i], down[i] = arguments[i] + step * direction, arguments[i] - step * direction
        slopes.append(float(np.sum(weight * (fn(*up) - fn(*down))) / (2 * step)))
    return slopes


@pytest.mark.parametrize(
    ("form", "budget"),
    [
        ("gather", BUDGETS[0]),
        ("gather", 30_000),  # blocks of 5 of the 13 queries, the last one overlapping
        ("mask", 50_000),
        ("absorbed", 10_000),  # tiles of 11 of the 17 keys
        ("naive", 20_000),  # two groups of two heads
        ("naive", 10_000),  # four of one
        ("reference", 1),
    ],
)
def test_gradients_match_finite_differences(form: Any, budget: int) -> None:
    spec = MlaSpec("", 2, 13, 17, 4, 4, 3, 5, 6, top_k=5, index_heads=3, index_width=4)
    inputs = make(spec)
    rng = np.random.default_rng(1)
    sparse = form in ("gather", "mask", "reference")
    rows = chosen(inputs, 5) if sparse else dense_rows(inputs)
    # Rows of the cache that nobody attends hold NaN, as unwritten ones would.
    inputs["latent"][1, 13:] = np.nan
    inputs["index_k"][1, 13:] = np.nan
    inputs["q_positions"][1] = np.minimum(inputs["q_positions"][1], 12)
    rows = chosen(inputs, 5) if sparse else dense_rows(inputs)
    weight = rng.standard_normal((2, 13, 4, 5))
    arguments = [inputs[name] for name in MAIN]
    directions = [rng.standard_normal(x.shape) for x in arguments]
    slopes = central_differences(lambda *xs: oracle.mla(*xs, rows, spec.scale), arguments, directions, weight)

    options = {"implementation": "reference"} if form == "reference" else {"form": form, "budget_bytes": budget}
    fn = partial(dsa_mla, top_k=5) if sparse else dense_mla

    def loss(main: dict[str, jax.Array], index: dict[str, jax.Array], weight: jax.Array) -> jax.Array:
        positions = jnp.asarray(inputs["q_positions"])
        out = fn(**main, **(index if sparse else {}), q_positions=positions, scale=spec.scale, **options)
        return jnp.sum(weight * out)

    with jax.enable_x64(True):
        main, index = ({name: jnp.asarray(inputs[name]) for name in names} for names in (MAIN, INDEX))
        grads, index_grads = jax.jit(jax.grad(loss, argnums=(0, 1)))(main, index, jnp.asarray(weight))
    for name, direction, slope in zip(MAIN, directions, slopes, strict=True):
        grad = np.asarray(grads[name])
        assert np.isfinite(grad).all(), name
        np.testing.assert_allclose(np.sum(grad * direction), slope, rtol=1e-7, atol=1e-8, err_msg=name)
    assert (np.asarray(grads["q"])[1, -3:] == 0).all()  # padding rows
    assert (np.asarray(grads["latent"])[1, 13:] == 0).all()
    for name in INDEX:
        assert (np.asarray(index_grads[name]) == 0).all()


def test_gradients_of_sparse_mla_and_its_log_sum_exp() -> None:
    rng = np.random.default_rng(0)
    q, latent = rng.standard_normal((2, 7, 3, 13)), rng.standard_normal((2, 19, 13))
    indices = rng.permuted(np.tile(np.arange(1, 12), (2, 7, 1)), axis=2)[..., :6]
    indices[0, 0], indices[1, 2, 3:] = -1, -1
    weight, lse_weight = rng.standard_normal((2, 7, 3, 10)), rng.standard_normal((2, 7, 3))
    directions = [rng.standard_normal(x.shape) for x in (q, latent)]

    def both(q: np.ndarray, latent: np.ndarray) -> np.ndarray:
        o, lse = oracle.sparse(q, latent, indices, 10, 0.3)
        return np.concatenate([o, np.where(np.isfinite(lse), lse, 0)[..., None]], axis=-1)

    slopes = central_differences(
        both, [q, latent], directions, np.concatenate([weight, lse_weight[..., None]], axis=-1)
    )
    latent[:, 12:] = latent[:, 0] = np.nan  # named by nobody, not even by the padding

    def loss(q: jax.Array, latent: jax.Array) -> jax.Array:
        o, lse = sparse_mla(q, latent, jnp.asarray(indices), latent_width=10, scale=0.3, budget_bytes=10_000)
        return jnp.sum(weight * o) + jnp.sum(jnp.where(jnp.isfinite(lse), lse * lse_weight, 0))

    with jax.enable_x64(True):
        grads = jax.jit(jax.grad(loss, argnums=(0, 1)))(jnp.asarray(q), jnp.asarray(latent))
    for grad, direction, slope in zip(grads, directions, slopes, strict=True):
        assert np.isfinite(np.asarray(grad)).all()
        np.testing.assert_allclose(np.sum(np.asarray(grad) * direction), slope, rtol=1e-7, atol=1e-8)
    assert (np.asarray(grads[0])[0, 0] == 0).all()


@pytest.mark.parametrize("form", ["gather", "naive", "absorbed"])
def test_bfloat16_gradients_sum_over_blocks_in_float32(form: Any) -> None:
    # All queries pull on the same few rows: summed block by block in bfloat16 the total would stop growing.
    spec = MlaSpec("", 1, 512, 512, 2, 16, 8, 16, 32, top_k=16, index_heads=2, index_width=8)
    inputs = make(spec, np.float32)
    inputs["q_positions"] = np.arange(512)[None]
    fn = partial(dsa_mla, top_k=16) if form in ("gather", "mask") else dense_mla
    budget = {"gather": 200_000, "naive": 2_000_000, "absorbed": 200_000}[form]

    def gradient(dtype: Any, implementation: Any) -> np.ndarray:
        arrays = {name: jnp.asarray(inputs[name]) for name in (INDEX if form in ("gather", "mask") else ())}
        arrays |= {name: jnp.asarray(inputs[name], jnp.bfloat16).astype(dtype) for name in MAIN}
        positions = jnp.asarray(inputs["q_positions"])
        options = {"form": form, "budget_bytes": budget} if implementation == "xla" else {"implementation": "reference"}

        def loss(latent: jax.Array) -> jax.Array:
            out = fn(**{**arrays, "latent": latent}, q_positions=positions, scale=spec.scale, **options)
            return jnp.sum(out.astype(jnp.float32))

        return np.asarray(jax.jit(jax.grad(loss))(arrays["latent"]), np.float32)

    exact = gradient(jnp.float32, "reference")
    assert np.abs(gradient(jnp.bfloat16, "xla") - exact).max() < 1e-2 * np.abs(exact).max()


# --- Memory and shapes ------------------------------------------------------------------------------------------------


def temporaries(fn: Callable[..., Any], arguments: dict[str, jax.ShapeDtypeStruct]) -> int:
    return jax.jit(lambda kwargs: fn(**kwargs)).lower(arguments).compile().memory_analysis().temp_size_in_bytes


def arguments_of(spec: MlaSpec, dtype: str, sparse: bool) -> dict[str, jax.ShapeDtypeStruct]:
    arrays = spec.dsa_arguments() if sparse else spec.dense_arguments()
    return {
        name: x if name in ("index_w", "q_positions") else jax.ShapeDtypeStruct(x.shape, dtype)
        for name, x in arrays.items()
    }


@pytest.mark.parametrize(
    ("form", "dtype"),
    [("gather", "bfloat16"), ("gather", "float32"), ("mask", "float32"), ("absorbed", "float32"), (None, "bfloat16")],
)
def test_working_memory_at_64k_stays_within_the_budget(form: Any, dtype: str) -> None:
    sparse = form in ("gather", "mask")
    fn = partial(dsa_mla, top_k=2048, form=form) if sparse else partial(dense_mla, form=form)
    used = temporaries(partial(fn, scale=LONG.scale), arguments_of(LONG, dtype, sparse))
    assert used <= default_budget_bytes()


def test_working_memory_of_a_batch_stays_within_the_budget() -> None:
    spec = MlaSpec("", 128, 2, 32768, 12)
    for fn, sparse in ((partial(dsa_mla, top_k=2048), True), (dense_mla, False)):
        assert temporaries(partial(fn, scale=0.1), arguments_of(spec, "float32", sparse)) <= default_budget_bytes()


def test_reverse_mode_memory_doesn_t_grow_with_queries_times_keys() -> None:
    # Beyond the budget: gradients in float32 before they are rounded, once summed and once of a block.
    spec = MlaSpec("", 1, 16384, 16384, 8)
    fn = partial(dsa_mla, top_k=2048, scale=spec.scale, form="gather")

    def loss(**kwargs: jax.Array) -> jax.Array:
        return jnp.sum(fn(**kwargs).astype(jnp.float32))

    arguments = arguments_of(spec, "bfloat16", sparse=True)
    used = temporaries(
        lambda **kwargs: jax.grad(lambda x: loss(**{**kwargs, **x}))({n: kwargs[n] for n in MAIN}), arguments
    )
    sizes = {name: np.prod(arguments[name].shape) for name in MAIN}
    assert used <= default_budget_bytes() + 3 * 4 * sum(sizes.values())


@pytest.mark.parametrize("spec", [x for x in SPECS if x.heads not in (48, 24)], ids=lambda spec: spec.name)
def test_real_shapes_trace(spec: MlaSpec) -> None:
    shape = (spec.batch, spec.queries, spec.heads)
    if spec in DENSE:
        out = jax.eval_shape(lambda kw: dense_mla(**kw, scale=spec.scale), spec.dense_arguments())
    else:
        assert spec.top_k is not None
        run = partial(dsa_mla, top_k=spec.top_k, scale=spec.scale, return_indices=True)
        out, indices = jax.eval_shape(lambda kw: run(**kw), spec.dsa_arguments())
        assert indices.shape == (*shape[:2], spec.top_k)
        o, lse = jax.eval_shape(
            lambda kw: sparse_mla(**kw, latent_width=spec.latent, scale=spec.scale), spec.sparse_arguments()
        )
        assert (o.shape, lse.shape) == ((*shape, spec.latent), shape)
    assert out.shape == (*shape, spec.value)


# --- Refusals ---------------------------------------------------------------------------------------------------------


def test_arguments_are_checked_with_sentences() -> None:
    spec = TINY[0]
    inputs = make(spec, np.float32)
    with pytest.raises(ValueError, match=r"dsa_mla: top_k=0; it must be an integer of at least 1"):
        call(dsa_mla, inputs, top_k=0, scale=0.1)
    with pytest.raises(ValueError, match=r"dense_mla: scale=-1.0; it must be a positive finite number"):
        call(dense_mla, inputs, scale=-1.0)
    with pytest.raises(ValueError, match="scale=nan"):
        check_scale("op", float("nan"))
    with pytest.raises(ValueError, match=r"q leaves 2 channels beside the 6 of w_uk and latent leaves 3 beside its 10"):
        call(dense_mla, inputs | {"q": inputs["q"][..., :-1]}, scale=0.1)
    with pytest.raises(ValueError, match=r"latent_width=14; it must be at most the key width 13"):
        sparse_mla(
            jnp.zeros((1, 2, 3, 13)), jnp.zeros((1, 5, 13)), jnp.zeros((1, 2, 4), jnp.int32), latent_width=14, scale=0.1
        )
    with pytest.raises(ValueError, match=r"budget_bytes=1 is too small for form='naive': one head takes \d+ bytes"):
        call(dense_mla, inputs, scale=0.1, form="naive", budget_bytes=1)
    with pytest.raises(UnsupportedImplementationError, match=r"dsa_mla.*TPU"):
        call(dsa_mla, inputs, top_k=3, scale=0.1, implementation="tpu")
    with pytest.raises((ValueError, jaxtyping.TypeCheckError)):
        call(dense_mla, inputs, scale=0.1, form="gather")
    with pytest.raises((ValueError, jaxtyping.TypeCheckError)):
        call(dense_mla, inputs | {"latent": inputs["latent"][:1]}, scale=0.1)
