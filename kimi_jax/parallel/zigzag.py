"""The order of tokens that gives every device the same share of causal work.

A row of c devices is cut into 2c blocks of equal length. In contiguous order device j has blocks 2j and 2j+1, in zigzag
order it has blocks j and 2c-1-j: an early one, whose queries see few keys, and a late one, whose queries see many.

Block b lies on device b // 2 in one order and on z(b) = b or 2c-1-b, whichever is below c, in the other. The even
blocks go to devices that are all different, and so do the odd ones: two permutations move everything once.
"""

from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Layout = Literal["contiguous", "zigzag"]
Tree = TypeVar("Tree")
AxisName = str | tuple[str, ...]
"""A mesh axis, or several that count as one, the last one fastest."""


def to_zigzag(tree: Tree, axis: AxisName) -> Tree:
    """Moves contiguous parts into zigzag order; inside `jax.shard_map`.

    Args:
        tree: of arrays [B, T, ...], every device's T consecutive tokens.
        axis: mesh axis that splits the tokens; with size 1 nothing happens.

    Returns:
        The tree in zigzag order: T / 2 tokens of the early block, then those of the late one. Two permutations an array.

    Raises:
        ValueError: T is odd.
    """
    size = jax.lax.axis_size(axis)
    if size == 1:
        return tree
    routes = [[(_contiguous(block), _zigzag(block, size)) for block in range(odd, 2 * size, 2)] for odd in (0, 1)]
    even_rank = jax.lax.axis_index(axis) % 2 == 0

    def move(x: jax.Array) -> jax.Array:
        even, odd = (jax.lax.ppermute(half, axis, route) for half, route in zip(halves(x), routes, strict=True))
        # Device r's early block is r, its late one 2c-1-r: one of them is even, the other odd.
        return jnp.concatenate([jnp.where(even_rank, even, odd), jnp.where(even_rank, odd, even)], axis=1)

    return jax.tree.map(move, tree)


def from_zigzag(tree: Tree, axis: AxisName) -> Tree:
    """The inverse of `to_zigzag`, with the same arguments and errors."""
    size = jax.lax.axis_size(axis)
    if size == 1:
        return tree
    routes = [[(_zigzag(block, size), _contiguous(block)) for block in range(odd, 2 * size, 2)] for odd in (0, 1)]
    even_rank = jax.lax.axis_index(axis) % 2 == 0

    def move(x: jax.Array) -> jax.Array:
        early, late = halves(x)
        blocks = jnp.where(even_rank, early, late), jnp.where(even_rank, late, early)
        return jnp.concatenate(
            [jax.lax.ppermute(block, axis, route) for block, route in zip(blocks, routes, strict=True)], axis=1
        )

    return jax.tree.map(move, tree)


def halves(tree: Tree) -> tuple[Tree, Tree]:
    """The early and the late block of arrays [B, T, ...] in zigzag order; the two blocks of a device in any order.

    Raises:
        ValueError: T is odd.
    """
    for x in jax.tree.leaves(tree):
        if x.ndim < 2 or x.shape[1] % 2:
            raise ValueError(
                f"zigzag order: an array has shape {x.shape} on each device; it must be [B, T, ...] with an even T."
            )
    first, second = (jax.tree.map(lambda x, i=i: jnp.split(x, 2, axis=1)[i], tree) for i in (0, 1))
    return first, second


def index_work(length: int, devices: int, layout: Layout, tokens: int | None = None) -> np.ndarray:
    """Pairs of a query and a key that it sees, for every device: what scoring all visible keys costs.

    Args:
        length: tokens of the row that count; token t sees t + 1 keys.
        devices: c, the size of the axis that splits the row.
        layout: order of the queries.
        tokens: length of the row with its padding; None: `length` rounded up to a multiple of 128 · c.

    Returns:
        [c] int64.

    Raises:
        ValueError: `tokens` isn't a multiple of 2c of at least `length`, or the layout is unknown.
    """
    check_layout(layout)
    tokens = -(-length // (128 * devices)) * 128 * devices if tokens is None else tokens
    if tokens % (2 * devices) or tokens < length:
        raise ValueError(f"tokens={tokens}; it must be a multiple of {2 * devices} of at least length={length}.")
    block = tokens // (2 * devices)
    edges = np.minimum(np.arange(2 * devices + 1, dtype=np.int64) * block, length)
    pairs = np.diff(edges * (edges + 1) // 2)
    owners = [_contiguous(b) if layout == "contiguous" else _zigzag(b, devices) for b in range(2 * devices)]
    work = np.zeros(devices, np.int64)
    np.add.at(work, owners, pairs)
    return work


def check_layout(layout: str) -> None:
    """Raises ValueError unless `layout` is the name of one."""
    if layout not in ("contiguous", "zigzag"):
        raise ValueError(f"layout={layout!r}; it must be 'contiguous' or 'zigzag'.")


def _contiguous(block: int) -> int:
    return block // 2


def _zigzag(block: int, size: int) -> int:
    return min(block, 2 * size - 1 - block)
