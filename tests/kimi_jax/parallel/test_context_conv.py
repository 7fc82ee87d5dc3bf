"""The convolution over several devices does what it does on one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.parallel.context_kda import short_conv_sharded
from pallas_kernels.short_conv import short_conv
from tests import oracle_kda as oracle
from tests.kimi_jax.parallel.context_mesh import AXIS, SIZES, TOKENS, WHOLE, assert_close, over_context, trace
from tests.kimi_jax.parallel.rows import IDS, LENGTHS, ROWS, SEQUENCES, TOKENS_IN_ALL, padded

CHANNELS, TAPS = 6, 4


@pytest.mark.parametrize("size", SIZES)
def test_convolution_of_rows_of_any_length(size: int) -> None:
    rng = np.random.default_rng(5)
    x = rng.standard_normal((ROWS, TOKENS_IN_ALL, CHANNELS)).astype(np.float32)
    weight = rng.standard_normal((CHANNELS, TAPS)).astype(np.float32)
    tail = rng.standard_normal((ROWS, TAPS - 1, CHANNELS)).astype(np.float32)

    def on_device(x: jax.Array, weight: jax.Array, tail: jax.Array, lengths: jax.Array) -> Any:
        return short_conv_sharded(x, weight, axis=AXIS, tail=tail, lengths=lengths)

    run = over_context(on_device, size, (TOKENS, WHOLE, WHOLE, WHOLE), (TOKENS, WHOLE))
    for start in (tail, np.zeros_like(tail)):
        y, last = run(padded(x, LENGTHS), weight, start, LENGTHS)
        for row, length in enumerate(LENGTHS):
            expected_y, expected_last = oracle.conv(x[row, :length], weight, start[row])
            assert np.all(np.asarray(y[row, length:]) == 0)
            np.testing.assert_allclose(y[row, :length], expected_y, atol=2e-6)
            np.testing.assert_array_equal(last[row], expected_last.astype(np.float32))


@pytest.mark.parametrize("size", SIZES)
def test_convolution_of_packed_sequences(size: int) -> None:
    rng = np.random.default_rng(6)
    x = rng.standard_normal((ROWS, TOKENS_IN_ALL, CHANNELS)).astype(np.float32)
    weight = rng.standard_normal((CHANNELS, TAPS)).astype(np.float32)

    def on_device(x: jax.Array, weight: jax.Array, ids: jax.Array) -> Any:
        return short_conv_sharded(x, weight, axis=AXIS, segment_ids=ids)

    run = over_context(on_device, size, (TOKENS, WHOLE, TOKENS), (TOKENS, WHOLE))
    y, last = run(padded(x, np.sum(IDS >= 0, axis=1)), weight, IDS)
    for row, lengths in enumerate(SEQUENCES):
        begin, expected_last = 0, np.zeros((TAPS - 1, CHANNELS))
        for length in lengths:
            expected, expected_last = oracle.conv(
                x[row, begin : begin + length], weight, np.zeros((TAPS - 1, CHANNELS))
            )
            np.testing.assert_allclose(y[row, begin : begin + length], expected, atol=2e-6)
            begin += length
        np.testing.assert_array_equal(last[row], expected_last.astype(np.float32))
        assert np.all(np.asarray(y[row, begin:]) == 0)


@pytest.mark.parametrize("packed", [False, True])
def test_gradient_of_the_convolution(packed: bool) -> None:
    """A row's gradient crosses to the device before it; NaN in padding stays where it is."""
    rng = np.random.default_rng(7)
    ids = IDS[[1, 2, 3, 10]] if packed else None
    lengths = np.sum(ids >= 0, axis=1) if ids is not None else np.array([1, 77, 78, 152], np.int32)
    x = padded(rng.standard_normal((4, TOKENS_IN_ALL, CHANNELS)).astype(np.float32), lengths)
    weight = rng.standard_normal((CHANNELS, TAPS)).astype(np.float32)
    tail = None if packed else rng.standard_normal((4, TAPS - 1, CHANNELS)).astype(np.float32)
    d_y = rng.standard_normal(x.shape).astype(np.float32)
    d_last = rng.standard_normal((4, TAPS - 1, CHANNELS)).astype(np.float32)
    counts = None if packed else lengths

    def on_device(x: jax.Array, weight: jax.Array, tail: Any, lengths: Any, ids: Any) -> Any:
        return short_conv_sharded(x, weight, axis=AXIS, tail=tail, lengths=lengths, segment_ids=ids)

    run = over_context(on_device, 4, (TOKENS, WHOLE, WHOLE, WHOLE, TOKENS), (TOKENS, WHOLE))

    def sharded(x: jax.Array, weight: jax.Array, tail: Any) -> jax.Array:
        y, last = run(x, weight, tail, counts, ids)
        return jnp.sum(y * d_y) + jnp.sum(last * d_last)

    def alone(x: jax.Array, weight: jax.Array, tail: Any) -> jax.Array:
        y, last = short_conv(
            x,
            weight,
            tail=tail,
            lengths=None if counts is None else jnp.asarray(counts),
            segment_ids=None if ids is None else jnp.asarray(ids),
        )
        return jnp.sum(y * d_y) + jnp.sum(last * d_last)

    arguments = jax.tree.map(jnp.asarray, (x, weight, tail))
    actual, expected = (jax.tree.leaves(jax.jit(jax.grad(f, (0, 1, 2)))(*arguments)) for f in (sharded, alone))
    for a, b in zip(actual, expected, strict=True):
        assert_close(a, b, 2e-6)


SEVERAL = jnp.ones((1, 4), jnp.int32)
BAD_CONV = {
    "x has shape": (ValueError, {"x": jnp.ones((4, CHANNELS))}),
    "x holds 2 tokens on each of the 2 devices of axis 'context'; it must hold at least W - 1 = 3": (
        ValueError,
        {"x": jnp.ones((1, 2, CHANNELS))},
    ),
    "tail has shape": (ValueError, {"tail": jnp.ones((1, TAPS, CHANNELS))}),
    "tail can't be given": (ValueError, {"tail": jnp.ones((1, TAPS - 1, CHANNELS)), "segment_ids": SEVERAL}),
    "segment_ids has shape": (ValueError, {"segment_ids": jnp.ones((1, 5), jnp.int32)}),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("message", BAD_CONV)
def test_bad_calls_of_the_convolution(message: str) -> None:
    good = {"x": jnp.ones((1, 4, CHANNELS)), "weight": jnp.ones((CHANNELS, TAPS))}
    error, changes = BAD_CONV[message]
    with pytest.raises(error, match=message):
        trace(short_conv_sharded, good | changes)


def test_one_device_needs_no_history() -> None:
    """Decoding goes on with one token where a single device has the whole row."""
    x, weight = jnp.ones((1, 1, CHANNELS)), jnp.ones((CHANNELS, TAPS))
    run = over_context(lambda x: short_conv_sharded(x, weight, axis=AXIS), 1, TOKENS, (TOKENS, WHOLE))
    np.testing.assert_allclose(run(x)[0], jax.nn.silu(x))
