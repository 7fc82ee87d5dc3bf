"""Attention Residuals against the formula in NumPy float64."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels.attn_res import attn_res, specs, xla
from pallas_kernels.dispatch import Implementation

B, T, D, R = 2, 5, 24, 3
EPS = 1e-5
FORMS = ("reference", "at once", "row by row")
TOLERANCE = {"float32": 2e-6, "bfloat16": 2**-8}


def oracle(partial: np.ndarray, bank: np.ndarray, num_rows: int, query: np.ndarray, norm_weight: np.ndarray):
    rows = np.concatenate([bank[:num_rows], partial[None]]).astype(np.float64)
    result = np.zeros(partial.shape)
    for b in range(partial.shape[0]):
        for t in range(partial.shape[1]):
            v = rows[:, b, t]
            scores = np.array([np.sum(r / np.sqrt(np.mean(r**2) + EPS) * norm_weight * query) for r in v])
            weights = np.exp(scores - scores.max())
            result[b, t] = weights / weights.sum() @ v
    return result


def inputs(num_rows: int, seed: int = 0, dtype: str = "float64") -> list[np.ndarray]:
    """partial, bank (NaN where there is no row), query, norm_weight."""
    rng = np.random.default_rng(seed)
    partial = 3 * rng.standard_normal((B, T, D))
    bank = rng.standard_normal((R, B, T, D)) * np.array([0.1, 1, 30])[:, None, None, None]
    partial, bank = (x.astype(jnp.dtype(dtype)).astype(np.float64) for x in (partial, bank))
    bank[num_rows:] = np.nan
    return [partial, bank, rng.standard_normal(D), 1 + 0.3 * rng.standard_normal(D)]


@cache
def compiled(form: str):
    def run(partial, bank, num_rows, query, norm_weight):
        implementation: Implementation = "reference" if form == "reference" else "xla"
        return attn_res(partial, bank, num_rows, query, norm_weight, eps=EPS, implementation=implementation)

    return jax.jit(run)


@pytest.fixture(params=FORMS)
def form(request, monkeypatch) -> str:
    if request.param == "row by row":
        monkeypatch.setattr(xla, "LARGEST_BANK_AT_ONCE_ON_CPU", 0)
    return request.param


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_the_formula_whatever_unused_rows_hold(form: str, dtype: str) -> None:
    for num_rows in range(R + 1):
        partial, bank, query, norm_weight = inputs(num_rows, dtype=dtype)
        got = compiled(form)(
            jnp.asarray(partial, dtype),
            jnp.asarray(bank, dtype),
            jnp.int32(num_rows),
            jnp.asarray(query, jnp.float32),
            jnp.asarray(norm_weight, jnp.float32),
        )
        assert got.dtype == jnp.dtype(dtype)
        want = oracle(partial, bank, num_rows, query, norm_weight)
        np.testing.assert_allclose(
            np.asarray(got).astype(np.float64), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * np.abs(want).max()
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_rows_gives_the_partial_sum_exactly(form: str, dtype: str) -> None:
    partial, bank, query, norm_weight = (jnp.asarray(x, dtype) for x in inputs(0))
    got = compiled(form)(partial, bank, jnp.int32(0), query, norm_weight)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(partial))


def test_by_hand(form: str) -> None:
    # Both rows have a root mean square of 1/sqrt(2), so the scores are sqrt(2) q_r: log 3 and 0.
    bank = jnp.array([1.0, 0.0]).reshape(1, 1, 1, 2)
    query = jnp.array([np.log(3) / np.sqrt(2), 0.0], jnp.float32)
    got = compiled(form)(jnp.array([[[0.0, 1.0]]]), bank, jnp.int32(1), query, jnp.ones(2))
    np.testing.assert_allclose(np.asarray(got)[0, 0], [0.75, 0.25], rtol=1e-4)  # eps moves the scores a little


def test_a_zero_query_averages_the_raw_rows(form: str) -> None:
    partial, bank, _, norm_weight = inputs(2)
    arrays = (jnp.asarray(x, jnp.float32) for x in (partial, bank))
    got = compiled(form)(*arrays, jnp.int32(2), jnp.zeros(D), jnp.asarray(norm_weight, jnp.float32))
    np.testing.assert_allclose(np.asarray(got), (bank[0] + bank[1] + partial) / 3, rtol=1e-5, atol=1e-5)


def test_huge_scores_pick_one_row(form: str) -> None:
    partial, bank, query, norm_weight = inputs(R)
    arrays = [jnp.asarray(x, jnp.float32) for x in (partial, bank)]
    got = compiled(form)(*arrays, jnp.int32(R), jnp.asarray(1e4 * query, jnp.float32), jnp.asarray(norm_weight))
    want = oracle(partial, bank, R, 1e4 * query, norm_weight)
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-4, atol=1e-4)


def test_a_token_depends_on_itself_alone(form: str) -> None:
    partial, bank, query, norm_weight = (jnp.asarray(x, jnp.float32) for x in inputs(2))
    before = compiled(form)(partial, bank, jnp.int32(2), query, norm_weight)
    others = (jnp.arange(T) != 3)[:, None]
    partial, bank = (jnp.where(others, x * 2 - 1, x) for x in (partial, bank))
    after = compiled(form)(partial, bank, jnp.int32(2), query, norm_weight)
    np.testing.assert_array_equal(np.asarray(before)[:, 3], np.asarray(after)[:, 3])
    assert (np.asarray(before)[:, 2] != np.asarray(after)[:, 2]).any()


def test_gradients_equal_finite_differences(form: str) -> None:
    num_rows = 2
    arguments = inputs(num_rows)
    rng = np.random.default_rng(1)
    weights = rng.standard_normal((B, T, D))
    with jax.enable_x64(True):

        def loss(partial, bank, query, norm_weight):
            return jnp.sum(compiled(form)(partial, bank, jnp.int32(num_rows), query, norm_weight) * weights)

        gradients = [np.asarray(g) for g in jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*map(jnp.asarray, arguments))]
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    assert not gradients[1][num_rows:].any()
    for which, gradient in enumerate(gradients):
        direction = rng.standard_normal(gradient.shape)
        if which == 1:
            direction[num_rows:] = 0
        losses = []
        for step in (1e-5, -1e-5):
            moved = list(arguments)
            moved[which] = arguments[which] + step * direction
            partial, bank, query, norm_weight = moved
            losses.append(np.sum(oracle(partial, bank, num_rows, query, norm_weight) * weights))
        np.testing.assert_allclose(np.sum(gradient * direction), (losses[0] - losses[1]) / 2e-5, rtol=1e-7)


def test_bfloat16_gradients_keep_dtypes_and_ignore_unused_rows(form: str) -> None:
    arguments = [jnp.asarray(x, dtype) for x, dtype in zip(inputs(1), ["bfloat16"] * 2 + ["float32"] * 2, strict=True)]

    def loss(partial, bank, query, norm_weight):
        return jnp.sum(compiled(form)(partial, bank, jnp.int32(1), query, norm_weight).astype(jnp.float32) ** 2)

    gradients = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*arguments)
    for argument, gradient in zip(arguments, gradients, strict=True):
        assert gradient.dtype == argument.dtype
        assert np.isfinite(np.asarray(gradient, np.float32)).all()
    assert not np.asarray(gradients[1])[1:].astype(np.float32).any()


@pytest.mark.parametrize("tokens", [512, 640])  # one below, one above the size that is reduced at once
def test_bank_is_never_copied(tokens: int) -> None:
    shapes = [(1, tokens, 1024), (8, 1, tokens, 1024), (), (1024,), (1024,)]
    dtypes = [jnp.float32, jnp.float32, jnp.int32, jnp.float32, jnp.float32]
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    stats = jax.jit(lambda *arguments: attn_res(*arguments)).lower(*arguments).compile().memory_analysis()
    assert stats is not None
    assert stats.temp_size_in_bytes < 2.1 * tokens * 1024 * 4


def test_inside_shard_map() -> None:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    data = PartitionSpec("data")
    mixed = jax.shard_map(
        lambda partial, bank, query, norm_weight: attn_res(partial, bank, 2, query, norm_weight),
        mesh=mesh,
        in_specs=(data, PartitionSpec(None, "data"), PartitionSpec(), PartitionSpec()),
        out_specs=data,
    )

    def alone(partial, bank, query, norm_weight):
        return compiled("at once")(partial, bank, jnp.int32(2), query, norm_weight)

    def gradients(mix):
        arguments = [jnp.asarray(x, jnp.float32) for x in inputs(2)]
        return jax.jit(jax.grad(lambda *arguments: jnp.sum(mix(*arguments) ** 2), (0, 1, 2, 3)))(*arguments)

    for one, other in zip(gradients(mixed), gradients(alone), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-4, atol=1e-4)


def test_real_shapes_are_accepted() -> None:
    for spec in specs.SPECS:
        partial = jax.ShapeDtypeStruct((spec.batch, spec.tokens, spec.width), jnp.bfloat16)
        bank = jax.ShapeDtypeStruct((spec.rows, *partial.shape), jnp.bfloat16)
        vector = jax.ShapeDtypeStruct((spec.width,), jnp.float32)
        result = jax.eval_shape(attn_res, partial, bank, jax.ShapeDtypeStruct((), jnp.int32), vector, vector)
        assert (result.shape, result.dtype) == (partial.shape, partial.dtype)


def test_what_does_not_fit_is_refused() -> None:
    partial, bank, query, norm_weight = (jnp.asarray(x, jnp.float32) for x in inputs(R))
    with pytest.raises(ValueError, match="num_rows is 4; the bank has room for 0 to 3 rows"):
        attn_res(partial, bank, 4, query, norm_weight)
