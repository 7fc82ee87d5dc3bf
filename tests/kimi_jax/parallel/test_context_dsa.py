"""Attention over new tokens whose queries and keys are split over devices, against the operations on one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.parallel.context_dsa import dense_context, dsa_context
from kimi_jax.parallel.sharded_decode import write_context_keys
from tests.kimi_jax.parallel.context_mesh import AXIS, SIZES, TOKENS, WHOLE, assert_close, over_context
from tests.kimi_jax.parallel.dsa_numbers import (
    HEADS,
    KEYS,
    LENGTHS,
    PLACES,
    QUERIES,
    ROWS,
    SCALE,
    VALUES,
    WEIGHTS,
    alone,
    broken_behind,
    dense_arguments,
    numbers,
    positions_of,
    specs,
)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("size", SIZES)
def test_prefill_of_new_tokens(size: int, layout: Any) -> None:
    """Rows of different lengths, with NaN behind them; the same selection, the same output."""

    def on_device(x: dict[str, Any], positions: jax.Array) -> Any:
        return dsa_context(
            **x, axis=AXIS, q_positions=positions, top_k=16, scale=SCALE, layout=layout, return_indices=True
        )

    run = over_context(on_device, size, specs(TOKENS), TOKENS)
    for seed, lengths in enumerate((LENGTHS, np.array([304, 2, 38, 77], np.int32))):
        x = numbers(seed, PLACES)
        expected, selected = alone(x, positions_of(lengths, PLACES), 16)
        broken = {name: broken_behind(value, lengths) if name in KEYS else value for name, value in x.items()}
        out, indices = run(broken, positions_of(lengths, PLACES))
        np.testing.assert_array_equal(indices, selected)
        assert_close(out, expected, 1e-5)
        assert np.all(np.asarray(out)[positions_of(lengths, PLACES) < 0] == 0)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("size", [1, 4])
def test_prefill_of_packed_sequences(size: int, dense: bool) -> None:
    """A query sees its own sequence, wherever its keys are."""
    ids = np.full((ROWS, PLACES), -1, np.int32)
    for row, lengths in enumerate(([304], [76, 76, 152], [75, 2, 100, 60], [10])):
        ids[row, : sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
    x = numbers(2, PLACES)
    positions = np.where(ids >= 0, np.arange(PLACES, dtype=np.int32), -1)

    def on_device(x: dict[str, Any], positions: jax.Array, ids: jax.Array) -> Any:
        options: dict[str, Any] = {"axis": AXIS, "q_positions": positions, "segment_ids": ids, "scale": SCALE}
        return dense_context(*dense_arguments(x), **options) if dense else dsa_context(**x, top_k=16, **options)

    out = over_context(on_device, size, (*specs(TOKENS), TOKENS), TOKENS)(x, positions, ids)
    expected = alone(x, positions, None if dense else 16, segment_ids=jnp.asarray(ids))
    assert_close(out, expected if dense else expected[0], 1e-5)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_prefill_behind_a_cached_prefix(layout: Any) -> None:
    """New keys go to the owners of their places; queries see prefix and new keys by place."""
    size, new = 4, 64
    starts, lengths = np.array([0, 3, 75, 200], np.int32), np.array([64, 1, 40, 57], np.int32)
    x = numbers(3, new)
    positions = np.where(np.arange(new) < lengths[:, None], starts[:, None] + np.arange(new), -1).astype(np.int32)
    cache = {name: broken_behind(x[name], starts) for name in KEYS}
    rows = np.arange(ROWS)[:, None]
    fresh = {name: broken_behind(x[name][rows, np.maximum(positions, 0)], lengths) for name in KEYS}

    def on_device(queries: dict[str, jax.Array], weights: Any, cache: Any, fresh: Any, positions: jax.Array) -> Any:
        cache = write_context_keys(cache, fresh, positions, AXIS)
        options: dict[str, Any] = {"axis": AXIS, "q_positions": positions, "scale": SCALE, "layout": layout}
        everything = queries | weights | cache
        selected = dsa_context(**everything, top_k=16, num_keys=260, return_indices=True, **options)
        return cache, *selected, dense_context(*dense_arguments(everything), **options)

    run = over_context(on_device, size, (TOKENS, WHOLE, TOKENS, TOKENS, TOKENS), TOKENS)
    queries, weights = {name: x[name] for name in QUERIES}, {name: x[name] for name in WEIGHTS}
    written, out, indices, dense = run(queries, weights, cache, fresh, positions)
    for name in KEYS:
        np.testing.assert_array_equal(written[name], broken_behind(x[name], starts + lengths))
    expected, selected = alone(x, positions, 16)
    np.testing.assert_array_equal(indices, selected)
    assert_close(out, expected, 1e-5)
    assert_close(dense, alone(x, positions, None), 1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 2e-5), (jnp.bfloat16, 2e-2)])
def test_gradient_of_prefill(dtype: Any, tolerance: float) -> None:
    """Through the gathered latents and the zigzag order; the indexer gets none."""
    x = {
        name: jnp.asarray(value, jnp.float32 if "index" in name else dtype)
        for name, value in numbers(4, PLACES).items()
    }
    positions = positions_of(LENGTHS, PLACES)
    d_out = np.random.default_rng(5).standard_normal((ROWS, PLACES, HEADS, VALUES)).astype(np.float32)

    def on_device(x: dict[str, Any], positions: jax.Array) -> Any:
        return dsa_context(**x, axis=AXIS, q_positions=positions, top_k=16, scale=SCALE)

    run = over_context(on_device, 4, specs(TOKENS), TOKENS)
    actual = jax.jit(jax.grad(lambda x: jnp.sum(run(x, positions) * d_out)))(x)
    expected = jax.jit(jax.grad(lambda x: jnp.sum(alone(x, positions, 16)[0] * d_out)))(x)
    for name in x:
        assert_close(actual[name], expected[name], tolerance, name)
    assert np.all(np.asarray(actual["index_k"]) == 0)


@pytest.mark.usefixtures("unchecked")
def test_unknown_layout_and_bad_sizes_are_refused() -> None:
    x = numbers(0, 8, places=16)
    positions = positions_of(np.full(ROWS, 8), 8)

    def attempt(**options: Any) -> None:
        def on_device(x: dict[str, Any], positions: jax.Array) -> Any:
            return dsa_context(**x, axis=AXIS, q_positions=positions, top_k=4, scale=SCALE, **options)

        jax.eval_shape(over_context(on_device, 2, specs(TOKENS), TOKENS), x, positions)

    with pytest.raises(ValueError, match="num_keys=0"):
        attempt(num_keys=0)
    with pytest.raises(ValueError, match="layout='striped'; it must be 'contiguous' or 'zigzag'"):
        attempt(layout="striped")
    with pytest.raises(ValueError, match="4 queries and 8 keys on each device"):
        attempt(segment_ids=jnp.zeros((ROWS, 4), jnp.int32))
