"""The short convolution against a double loop in NumPy float64 with an explicit buffer."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from pallas_kernels.dispatch import UnsupportedImplementationError
from pallas_kernels.short_conv import short_conv
from pallas_kernels.short_conv.specs import SPECS
from tests import oracle_kda as oracle

IMPLEMENTATIONS = ("xla", "reference")
WIDTH, CHANNELS = 4, 6


def make(batch: int, length: int, width: int = WIDTH, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = (batch, length, CHANNELS), (CHANNELS, width), (batch, width - 1, CHANNELS)
    x, weight, tail = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return x, weight, tail


def run(x: Any, weight: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
    options = {name: jnp.asarray(value) if isinstance(value, np.ndarray) else value for name, value in options.items()}
    return short_conv(jnp.asarray(x), jnp.asarray(weight), **options)


@partial(jax.jit, static_argnames="implementation")
def gradient_of(arrays: dict[str, Any], d_y: Any, d_tail: Any, implementation: str, **options: Any) -> dict[str, Any]:
    def loss(arrays: dict[str, Any]) -> jax.Array:
        y, tail = short_conv(**arrays, **options, implementation=implementation)
        return jnp.sum(y * d_y) + jnp.sum(tail * d_tail)

    return jax.grad(loss)(arrays)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("length", "width"), [(1, 4), (2, 4), (3, 4), (4, 4), (20, 4), (5, 1), (5, 2)])
def test_equals_the_double_loop(length: int, width: int, implementation: str) -> None:
    x, weight, tail = make(2, length, width)
    y, new_tail = run(x, weight, tail=tail, implementation=implementation)
    fresh, _ = run(x, weight, implementation=implementation)
    for row in range(2):
        expected, expected_tail = oracle.conv(x[row], weight, tail[row])
        np.testing.assert_allclose(y[row], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(new_tail[row], expected_tail)
        expected, _ = oracle.conv(x[row], weight, np.zeros_like(tail[row]))
        np.testing.assert_allclose(fresh[row], expected, rtol=1e-5, atol=1e-6)


def test_the_last_weight_meets_the_current_token() -> None:
    x, weight = np.zeros((1, 6, 1), np.float32), np.array([[1.0, 2.0, 3.0, 4.0]], np.float32)
    x[0, 1] = 1.0
    y, tail = run(x, weight)
    expected = np.array([0.0, 4.0, 3.0, 2.0, 1.0, 0.0])
    np.testing.assert_allclose(y[0, :, 0], expected / (1 + np.exp(-expected)), rtol=1e-6)
    np.testing.assert_array_equal(tail[0, :, 0], x[0, 3:, 0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_any_split_of_a_sequence(implementation: str) -> None:
    x, weight, tail = make(1, 53)
    y, last = oracle.conv(x[0], weight, tail[0])
    for split in ((37, 16), (37, *(1,) * 16), (37, 5, 11), (37, 3, 3, 10)):
        state, begin = jnp.asarray(tail), 0
        for count in split:
            piece, state = run(x[:, begin : begin + count], weight, tail=state, implementation=implementation)
            np.testing.assert_allclose(piece[0], y[begin : begin + count], rtol=1e-5, atol=1e-6)
            begin += count
        np.testing.assert_array_equal(state[0], last)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_reaches_nothing(implementation: str) -> None:
    lengths = np.array([0, 1, 2, 3, 9, 12], np.int32)
    x, weight, tail = make(6, 12)
    padding = np.arange(12) >= lengths[:, None]
    d_y, d_tail = np.ones_like(x), np.ones_like(tail)

    def outcome(filler: float) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
        filled = np.where(padding[..., None], np.float32(filler), x)
        arrays = {"x": filled, "weight": weight, "tail": tail}
        gradient = gradient_of(arrays, d_y, d_tail, implementation, lengths=lengths)
        return *run(filled, weight, tail=tail, lengths=lengths, implementation=implementation), gradient

    y, new_tail, gradient = outcome(0.0)
    for row, length in enumerate(lengths):
        expected, expected_tail = oracle.conv(x[row, :length], weight, tail[row])
        np.testing.assert_allclose(y[row, :length], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(new_tail[row], expected_tail)
    for filler in (np.nan, 1e30):
        other = outcome(filler)
        jax.tree.map(np.testing.assert_array_equal, other, (y, new_tail, gradient))
        assert not np.any(np.asarray(other[0])[padding])
        assert not np.any(np.asarray(other[2]["x"])[padding])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("lengths", [(5, 1, 2, 4), (1, 11), (12,), (2, 2), (1, 1, 1)])
def test_taps_stop_at_packed_sequences(lengths: tuple[int, ...], implementation: str) -> None:
    x, weight, tail = make(1, 12)
    ids = np.repeat(np.arange(len(lengths)), lengths)
    ids = np.concatenate([ids, np.full(12 - len(ids), -1)])[None].astype(np.int32)
    x[ids < 0] = np.nan
    y, new_tail = run(x, weight, segment_ids=ids, implementation=implementation)
    begin = 0
    for length in lengths:
        expected, expected_tail = oracle.conv(x[0, begin : begin + length], weight, np.zeros_like(tail[0]))
        np.testing.assert_allclose(y[0, begin : begin + length], expected, rtol=1e-5, atol=1e-6)
        begin += length
    assert not np.any(y[0, begin:])
    np.testing.assert_array_equal(new_tail[0], expected_tail)


def test_a_packed_sequence_does_not_touch_the_others() -> None:
    x, weight, _ = make(1, 12)
    ids = np.array([[0, 0, 0, 0, 0, 1, 2, 2, 2, 2, 2, -1]], np.int32)
    before, _ = run(x, weight, segment_ids=ids)
    for changed in range(3):
        other = np.where((ids == changed)[..., None], np.float32(np.nan), x)
        after, _ = run(other, weight, segment_ids=ids)
        np.testing.assert_array_equal(after[ids != changed], before[ids != changed])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("ids", [None, [0] * 3 + [1] + [2] * 4 + [-1]])
def test_gradients_equal_central_differences(ids: list[int] | None, implementation: str) -> None:
    x, weight, tail = make(1, 9)
    rng = np.random.default_rng(1)
    d_y, d_tail = rng.standard_normal(x.shape), rng.standard_normal(tail.shape)
    arrays = {"x": x, "weight": weight} | ({"tail": tail} if ids is None else {})
    options = {} if ids is None else {"segment_ids": np.array([ids], np.int32)}
    gradient = gradient_of(arrays, np.float32(d_y), np.float32(d_tail), implementation, **options)

    def value(x: np.ndarray, weight: np.ndarray, tail: np.ndarray = tail) -> float:
        total = 0.0
        for segment in sorted(set(ids or [0]) - {-1}):
            where = np.ones(9, bool) if ids is None else np.array(ids) == segment
            y, last = oracle.conv(x[0, where], weight, tail[0] if ids is None else np.zeros_like(tail[0]))
            total += np.sum(y * d_y[0, where])
        return total + np.sum(last * d_tail[0])

    for name in arrays:

        def values(copies: np.ndarray, name: str = name) -> np.ndarray:
            return np.array([value(**(arrays | {name: copy})) for copy in copies])

        expected = oracle.central_differences(values, arrays[name])
        np.testing.assert_allclose(gradient[name], expected, rtol=1e-4, atol=1e-5)


def test_a_token_changes_no_bit_of_the_past() -> None:
    x, weight, tail = make(1, 40)
    before, _ = run(x, weight, tail=tail)
    for t in (0, 1, 5, 39):
        changed = x.copy()
        changed[:, t] += 1
        after, _ = run(changed, weight, tail=tail)
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert np.all(np.asarray(after[:, t]) != np.asarray(before[:, t]))


def test_bfloat16_in_float32_inside() -> None:
    x, weight, tail = make(1, 30)
    half = jnp.bfloat16
    y, new_tail = run(jnp.asarray(x, half), weight, tail=jnp.asarray(tail, half))
    assert y.dtype == new_tail.dtype == half
    rounded = [np.asarray(jnp.asarray(array, half), np.float64) for array in (x, tail)]
    expected, expected_tail = oracle.conv(rounded[0][0], weight, rounded[1][0])
    np.testing.assert_array_equal(y[0], jnp.asarray(np.float32(expected), half))
    np.testing.assert_array_equal(np.float64(new_tail[0]), expected_tail)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_float64_to_its_own_precision(implementation: str) -> None:
    x, weight, tail = (np.float64(array) for array in make(1, 30))
    with jax.enable_x64(True):
        y, new_tail = run(x, weight, tail=tail, implementation=implementation)
        assert y.dtype == new_tail.dtype == jnp.float64
        np.testing.assert_allclose(y[0], oracle.conv(x[0], weight, tail[0])[0], rtol=1e-13)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_inside_shard_map(implementation: str) -> None:
    """Rows over a mesh axis, with a weight that all devices share: it traces, gradient included."""
    x, weight, _ = make(1, 9)
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = jax.sharding.PartitionSpec("rows"), jax.sharding.PartitionSpec()

    @partial(jax.shard_map, mesh=mesh, in_specs=(rows, whole), out_specs=rows)
    def sharded(x: jax.Array, weight: jax.Array) -> jax.Array:
        return short_conv(x, weight, implementation=implementation)[0]

    gradient = jax.eval_shape(jax.grad(lambda x, weight: jnp.sum(sharded(x, weight)), argnums=1), x, weight)
    assert gradient.shape == weight.shape


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Without the shape checks that tests switch on: a user doesn't have them."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


BAD_CALLS = {
    "x has shape": (ValueError, {"x": jnp.ones((2, 8))}),
    "weight has shape": (ValueError, {"weight": jnp.ones((5, 4))}),
    "tail has shape": (ValueError, {"tail": jnp.ones((2, 4, 6))}),
    "lengths has shape": (ValueError, {"lengths": jnp.ones((2, 1), jnp.int32)}),
    "segment_ids has shape": (ValueError, {"segment_ids": jnp.ones((2,), jnp.int32)}),
    "x has dtype": (TypeError, {"x": jnp.ones((2, 8, 6), jnp.int32)}),
    "lengths has dtype": (TypeError, {"lengths": jnp.ones((2,))}),
    "tail can't be given": (ValueError, {"segment_ids": jnp.ones((2, 8), jnp.int32), "tail": jnp.ones((2, 3, 6))}),
    "lengths can't be given": (
        ValueError,
        {"segment_ids": jnp.ones((2, 8), jnp.int32), "lengths": jnp.ones((2,), jnp.int32)},
    ),
    "no TPU kernel": (UnsupportedImplementationError, {"implementation": "tpu"}),
    "no GPU kernel": (UnsupportedImplementationError, {"implementation": "gpu"}),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("message", BAD_CALLS)
def test_bad_calls_are_refused(message: str) -> None:
    error, change = BAD_CALLS[message]
    arguments: dict[str, Any] = {"x": jnp.ones((2, 8, 6)), "weight": jnp.ones((6, 4))}
    with pytest.raises(error, match=message):
        short_conv(**(arguments | change))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_real_shapes_trace(spec: Any) -> None:
    y, tail = jax.eval_shape(
        short_conv, spec.arguments()["x"], spec.arguments()["weight"], tail=spec.arguments()["tail"]
    )
    assert (y.shape, y.dtype) == ((spec.batch, spec.tokens, spec.channels), spec.dtype)
    assert (tail.shape, tail.dtype) == ((spec.batch, spec.width - 1, spec.channels), spec.dtype)
