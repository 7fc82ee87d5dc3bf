"""Attention of few new tokens over caches that are split over devices, against the operations on one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.parallel.sharded_decode import dense_decode_sharded, dsa_decode_sharded, owned_places, write_keys_sharded
from tests.kimi_jax.parallel.context_mesh import AXIS, SIZES, TOKENS, WHOLE, assert_close, collectives, over_context
from tests.kimi_jax.parallel.dsa_numbers import (
    INDEX_HEADS,
    KEYS,
    NOPE,
    ROWS,
    SCALE,
    VALUES,
    alone,
    broken_behind,
    dense_arguments,
    numbers,
    specs,
)


@pytest.mark.parametrize(("size", "top_k"), [(1, 16), (2, 16), (4, 16), (8, 16), (2, 200), (8, 100)])
def test_decode_over_sharded_caches(size: int, top_k: int) -> None:
    """Rows shorter than top_k, devices that own nothing visible, padding, ties across devices, NaN in unused places."""
    tokens = 3

    def on_device(x: dict[str, Any], positions: jax.Array) -> Any:
        options: dict[str, Any] = {"axis": AXIS, "q_positions": positions, "scale": SCALE}
        out, indices = dsa_decode_sharded(**x, top_k=top_k, return_indices=True, **options)
        return out, indices, dense_decode_sharded(*dense_arguments(x), **options)

    run = over_context(on_device, size, specs(WHOLE), WHOLE)
    first = np.array([[0, 36, 37, 38], [5, 15, 16, 98], [74, 75, 150, 299], [301, 151, 152, 200]], np.int32)
    for seed, starts in enumerate(first):
        x = numbers(seed, tokens)
        positions = starts[:, None] + np.arange(tokens, dtype=np.int32)
        positions[seed % ROWS, 1:] = -1
        broken = {
            name: broken_behind(value, positions.max(axis=1) + 1) if name in KEYS else value
            for name, value in x.items()
        }
        out, indices, dense = run(broken, positions)
        expected, selected = alone(x, positions, top_k)
        np.testing.assert_array_equal(indices, selected)
        assert_close(out, expected, 1e-5)
        assert_close(dense, alone(x, positions, None), 1e-5)
        assert np.all(np.asarray(out)[positions < 0] == 0)
        assert np.all(np.asarray(dense)[positions < 0] == 0)


def test_every_row_may_be_padding() -> None:
    x = numbers(0, 1)

    def on_device(x: dict[str, Any], positions: jax.Array) -> Any:
        options: dict[str, Any] = {"axis": AXIS, "q_positions": positions, "scale": SCALE}
        return dsa_decode_sharded(**x, top_k=16, **options), dense_decode_sharded(*dense_arguments(x), **options)

    run = over_context(on_device, 2, specs(WHOLE), WHOLE)
    broken = {name: np.full_like(value, np.nan) if name in KEYS else value for name, value in x.items()}
    for out in run(broken, np.full((ROWS, 1), -1, np.int32)):
        assert np.all(np.asarray(out) == 0)


def test_ties_and_broken_scores_across_devices() -> None:
    """Equal scores go to the lowest places whoever owns them; a NaN score loses against every other visible one."""
    x = numbers(6, 1)
    x["index_q"][:], x["index_w"][:] = 1, 1
    x["index_k"][:] = 0
    x["index_k"][0, 200] = 1  # one winner, then places in order
    x["index_k"][1, [10, 100, 290]] = [[1], [2], [2]]
    x["index_k"][2, :150] = np.nan
    x["index_k"][3, ::2] = -0.0

    def on_device(x: dict[str, Any], positions: jax.Array) -> Any:
        return dsa_decode_sharded(**x, axis=AXIS, q_positions=positions, top_k=6, scale=SCALE, return_indices=True)

    positions = np.full((ROWS, 1), 299, np.int32)
    for size in (2, 8):
        indices = np.asarray(over_context(on_device, size, specs(WHOLE), WHOLE)(x, positions)[1])[:, 0]
        expected = [[0, 1, 2, 3, 4, 200], [0, 1, 2, 10, 100, 290], list(range(150, 156)), list(range(6))]
        np.testing.assert_array_equal(indices, expected)


def test_decode_moves_no_keys() -> None:
    """What travels is a score for each candidate and one partial output for each query head."""
    size, rows, places, top_k, heads, latent, slot = 8, 2, 4096, 64, 4, 32, 8
    shapes = {
        "index_q": (rows, 1, INDEX_HEADS, 16),
        "index_k": (rows, size * places, 16),
        "index_w": (rows, 1, INDEX_HEADS),
        "q": (rows, 1, heads, NOPE + slot),
        "latent": (rows, size * places, latent + slot),
        "w_uk": (heads, NOPE, latent),
        "w_uv": (heads, VALUES, latent),
    }
    arguments = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32 if name == "index_w" else jnp.bfloat16)
        for name, shape in shapes.items()
    }

    def on_device(x: dict[str, Any], positions: jax.Array) -> Any:
        return dsa_decode_sharded(**x, axis=AXIS, q_positions=positions, top_k=top_k, scale=SCALE)

    positions = jax.ShapeDtypeStruct((rows, 1), jnp.int32)
    compiled = over_context(on_device, size, specs(WHOLE), WHOLE).lower(arguments, positions).compile()
    moved = collectives(compiled)
    assert {operation for operation, _ in moved} == {"all-gather", "all-reduce"}
    candidates = 4 * rows * size * top_k
    outputs = 4 * rows * heads * (latent + 2)
    assert 0 < sum(size for _, size in moved) <= candidates + outputs
    assert candidates + outputs < 2 * rows * places * latent / 50


def test_keys_are_written_by_the_owner_of_their_place() -> None:
    cache = np.full((2, 16, 1), -1.0, np.float32)
    positions = np.array([[3, 4, 15, -1], [0, 8, 7, 12]], np.int32)
    new = np.arange(8, dtype=np.float32).reshape(2, 4, 1)
    expected = cache.copy()
    for row, token in np.argwhere(positions >= 0):
        expected[row, positions[row, token]] = new[row, token]
    for size in SIZES:
        write = over_context(
            lambda cache, new, positions: write_keys_sharded(cache, new, positions, AXIS),
            size,
            (TOKENS, WHOLE, WHOLE),
            TOKENS,
        )
        np.testing.assert_array_equal(write(cache, new, positions), expected)
    owned = over_context(lambda positions: owned_places(positions, 4, AXIS), 4, WHOLE, TOKENS)(positions)
    np.testing.assert_array_equal(owned[0], [3, -1, -1, -1, -1, 0, -1, -1, -1, -1, -1, -1, -1, -1, 3, -1])
