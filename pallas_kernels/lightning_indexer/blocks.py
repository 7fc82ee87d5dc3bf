"""Running a function over blocks of its arguments: memory follows the block, in reverse mode too."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.precision import at_least_float32

Tree = Any  # a pytree of arrays


def pinned(tree: Tree, index: jax.Array) -> Tree:
    """`tree`, made to look different in every step of the loop that `index` counts.

    Otherwise a backend that slices bfloat16 by way of float32 converts the whole array ahead of the loop, and keeps it.
    """
    return jax.lax.optimization_barrier((tree, index))[0]


class Plan(NamedTuple):
    """Blocks of `size` along `axis` of every sliced argument and of every output."""

    axis: int
    size: int
    length: int

    @property
    def blocks(self) -> int:
        """Number of blocks; the last one overlaps its predecessor when `size` doesn't divide `length`."""
        return -(-self.length // self.size)

    def start(self, block: jax.Array) -> jax.Array:
        """First row of a block."""
        return jnp.minimum(block * self.size, self.length - self.size)

    def take(self, tree: Tree, start: jax.Array) -> Tree:
        """The rows of one block."""
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, self.size, self.axis), pinned(tree, start))

    def put(self, tree: Tree, block: Tree, start: jax.Array) -> Tree:
        """`tree` with the rows of one block replaced."""
        return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, start, self.axis), tree, block)

    def whole(self, tree: Tree) -> Tree:
        """Zeros for all blocks, given the abstract values of one."""
        return jax.tree.map(
            lambda x: jnp.zeros((*x.shape[: self.axis], self.length, *x.shape[self.axis + 1 :]), x.dtype), tree
        )


def plan(axis: int, length: int, *, fits: int, wanted: int) -> Plan:
    """Blocks of `wanted` rows, or fewer where only `fits` fit in memory; evenly sized."""
    size = max(1, min(length, fits, wanted))
    count = -(-length // size)
    return Plan(axis, -(-length // count), length)


def in_blocks(fn: Callable[..., Tree], plan: Plan, sliced: Tree, shared: Tree, constants: tuple[Tree, Tree]) -> Tree:
    """`fn(sliced, shared, constants)`, block by block.

    Args:
        fn: a function whose output rows depend on the same rows of its sliced arguments only.
        plan: the blocks.
        sliced: arguments cut along `plan.axis`.
        shared: arguments that every block sees whole.
        constants: a sliced and a shared tree without gradient.

    Returns:
        The outputs of all blocks joined along `plan.axis`. Reverse mode runs each block again instead of keeping what
        it computed, and sums the gradients of `shared` over blocks in float32 or better, whatever their dtype.
    """
    if plan.blocks == 1:
        return fn(sliced, shared, constants)
    return _in_blocks(fn, plan, sliced, shared, constants)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _in_blocks(fn: Callable[..., Tree], plan: Plan, sliced: Tree, shared: Tree, constants: tuple[Tree, Tree]) -> Tree:
    rows, whole = constants

    def run(start: jax.Array) -> Tree:
        return fn(plan.take(sliced, start), pinned(shared, start), (plan.take(rows, start), pinned(whole, start)))

    def step(block: jax.Array, out: Tree) -> Tree:
        start = plan.start(block)
        return plan.put(out, run(start), start)

    return jax.lax.fori_loop(0, plan.blocks, step, plan.whole(jax.eval_shape(run, 0)))


def _forward(fn: Callable[..., Tree], plan: Plan, *args: Any) -> tuple[Tree, Tree]:
    return _in_blocks(fn, plan, *args), args


def _backward(fn: Callable[..., Tree], plan: Plan, args: Any, out_grad: Tree) -> tuple[Tree, Tree, None]:
    sliced, shared, (rows, whole) = args

    def step(block: jax.Array, grads: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
        start = plan.start(block)
        fresh = start + jnp.arange(plan.size) >= block * plan.size  # rows of an overlap count once

        def cut(grad: Any) -> Any:
            if grad.dtype == jax.dtypes.float0:
                return np.zeros((*grad.shape[: plan.axis], plan.size, *grad.shape[plan.axis + 1 :]), grad.dtype)
            grad = plan.take(grad, start)
            return jnp.where(jnp.expand_dims(fresh, [i for i in range(grad.ndim) if i != plan.axis]), grad, 0)

        constants = plan.take(rows, start), pinned(whole, start)
        pull = jax.vjp(lambda x, y: fn(x, y, constants), plan.take(sliced, start), pinned(shared, start))[1]
        of_block, of_shared = pull(jax.tree.map(cut, out_grad))
        of_sliced = plan.put(grads[0], jax.tree.map(jnp.add, plan.take(grads[0], start), of_block), start)
        return of_sliced, jax.tree.map(lambda total, x: total + x.astype(total.dtype), grads[1], of_shared)

    totals = jax.tree.map(lambda x: jnp.zeros(x.shape, at_least_float32(x)), shared)
    of_sliced, of_shared = jax.lax.fori_loop(0, plan.blocks, step, (jax.tree.map(jnp.zeros_like, sliced), totals))
    return of_sliced, jax.tree.map(lambda total, x: total.astype(x.dtype), of_shared, shared), None


_in_blocks.defvjp(_forward, _backward)
