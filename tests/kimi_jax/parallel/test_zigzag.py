"""The zigzag order: what it moves, and how evenly it shares causal work."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.parallel.zigzag import from_zigzag, halves, index_work, to_zigzag
from tests.kimi_jax.parallel.context_mesh import AXIS, SIZES, TOKENS, over_context


@pytest.mark.parametrize("size", SIZES)
def test_each_device_gets_an_early_and_a_late_block(size: int) -> None:
    block = 3
    places = np.arange(2 * size * block).reshape(1, -1)
    tree = {"places": jnp.asarray(places), "wide": jnp.asarray(places[..., None] * np.array([1.0, -0.5]), jnp.bfloat16)}
    moved = over_context(lambda tree: to_zigzag(tree, AXIS), size, (TOKENS,), TOKENS)(tree)
    blocks = places.reshape(2 * size, block)
    expected = [np.concatenate([blocks[r], blocks[2 * size - 1 - r]]) for r in range(size)]
    np.testing.assert_array_equal(moved["places"][0], np.concatenate(expected))
    np.testing.assert_array_equal(moved["wide"][0, :, 1], jnp.asarray(-0.5 * np.concatenate(expected), jnp.bfloat16))
    back = over_context(lambda tree: from_zigzag(tree, AXIS), size, (TOKENS,), TOKENS)(moved)
    jax.tree.map(np.testing.assert_array_equal, back, tree)


@pytest.mark.parametrize("size", SIZES[1:])
def test_everything_moves_once_in_two_permutations(size: int) -> None:
    x = jnp.zeros((2, size * 6, 5))
    for move in (to_zigzag, from_zigzag):
        program = str(jax.make_jaxpr(over_context(lambda x, move=move: move(x, AXIS), size, (TOKENS,), TOKENS))(x))
        operands = re.findall(r"f32\[([\d,]+)\] = ppermute", program)
        assert operands == ["2,3,5", "2,3,5"]
        assert "all_gather" not in program


def test_gradient_travels_back() -> None:
    x = np.random.default_rng(0).standard_normal((1, 16, 2)).astype(np.float32)
    there = over_context(lambda x: to_zigzag(x, AXIS), 4, (TOKENS,), TOKENS)
    weight = np.arange(16, dtype=np.float32)[:, None]
    gradient = jax.grad(lambda x: jnp.sum(there(x) * weight))(jnp.asarray(x))
    np.testing.assert_array_equal(there(gradient)[0], np.broadcast_to(weight, (16, 2)))


def test_odd_parts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(1, 3\) on each device; it must be .* an even T"):
        over_context(lambda x: to_zigzag(x, AXIS), 2, (TOKENS,), TOKENS)(jnp.zeros((1, 6)))
    with pytest.raises(ValueError, match="even T"):
        halves(jnp.zeros((1, 3)))


@pytest.mark.parametrize(("size", "contiguous"), [(2, 1.5), (4, 1.75), (8, 1.875)])
def test_index_work_is_even(size: int, contiguous: float) -> None:
    """The scored pairs of a device against the mean."""
    for length in (128 * size, 1024 * size, 2**20):
        zigzag = index_work(length, size, "zigzag")
        assert zigzag.sum() == length * (length + 1) // 2
        assert zigzag.max() / zigzag.mean() <= 1.02
        plain = index_work(length, size, "contiguous")
        assert plain.sum() == zigzag.sum()
        assert plain.max() / plain.mean() == pytest.approx(contiguous, rel=0.01)


def test_index_work_with_padding() -> None:
    """A row that doesn't fill its blocks is uneven, but no device works longer than for the row that does."""
    for size in (2, 4, 8):
        for length in (128 * size + 1, 200 * size, 256 * size - 1, 5000):
            full = -(-length // (128 * size)) * 128 * size
            assert index_work(length, size, "zigzag").max() <= index_work(full, size, "zigzag").mean()
            finer = -(-length // (2 * size)) * 2 * size
            work = index_work(length, size, "zigzag", tokens=finer)
            assert work.sum() == length * (length + 1) // 2
            assert work.max() / work.mean() <= 1.05
    np.testing.assert_array_equal(index_work(5, 2, "zigzag", tokens=8), [1 + 2, 3 + 4 + 5])
    np.testing.assert_array_equal(index_work(5, 2, "contiguous", tokens=8), [1 + 2 + 3 + 4, 5])
    np.testing.assert_array_equal(index_work(5, 1, "zigzag"), [15])
    with pytest.raises(ValueError, match="tokens=6; it must be a multiple of 4 of at least length=5"):
        index_work(5, 2, "zigzag", tokens=6)
