"""Tokens to rows sorted by expert, and results back to their tokens, with gradients that gather as well.

The gradient of a gather is a sum by index, for which XLA scatters: on GPUs in whatever order atomic additions take. Both
directions of a permutation are known here, so each is the other's gradient, in one order.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.expert_layer import gpu
from pallas_kernels.precision import at_least_float32, einsum


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def spread(
    x: Float[Array, "M D"], order: Int[Array, " A"], place: Int[Array, "M k"], by_kernel: bool
) -> Float[Array, "A D"]:
    """Row i is the token of assignment order[i]; `place` is the other direction."""
    return gpu.take(x, order // place.shape[1], by_kernel)


def _spread_forward(x: Array, order: Array, place: Array, by_kernel: bool) -> tuple[Array, Int[Array, "M k"]]:
    return spread(x, order, place, by_kernel), place


def _spread_backward(
    by_kernel: bool, place: Int[Array, "M k"], d_rows: Float[Array, "A D"]
) -> tuple[Float[Array, "M D"], None, None]:
    by_token = _by_token(d_rows, place).astype(at_least_float32(d_rows))
    return jnp.sum(by_token, axis=1).astype(d_rows.dtype), None, None


spread.defvjp(_spread_forward, _spread_backward)


@jax.custom_vjp
def combine(
    outputs: Float[Array, "A D"], weights: Float[Array, "M k"], order: Int[Array, " A"], place: Int[Array, "M k"]
) -> Float[Array, "M D"]:
    """Σ_j weights[m, j] · outputs[place[m, j]], summed in the dtype of `weights`, in the outputs' dtype."""
    return einsum("mkd,mk->md", _by_token(outputs, place).astype(weights.dtype), weights, out=outputs.dtype)


def _combine_forward(
    outputs: Array, weights: Array, order: Array, place: Array
) -> tuple[Array, tuple[Array, Array, Array, Array]]:
    return combine(outputs, weights, order, place), (outputs, weights, order, place)


def _combine_backward(
    residuals: tuple[Array, Array, Array, Array], d_result: Float[Array, "M D"]
) -> tuple[Float[Array, "A D"], Float[Array, "M k"], None, None]:
    outputs, weights, order, place = residuals
    d_result = d_result.astype(weights.dtype)
    of_row = weights.reshape(-1).at[order].get(mode="promise_in_bounds")[:, None]
    d_outputs = of_row * d_result.at[order // place.shape[1]].get(mode="promise_in_bounds")
    d_weights = einsum("mkd,md->mk", _by_token(outputs, place).astype(weights.dtype), d_result, out=weights.dtype)
    return d_outputs.astype(outputs.dtype), d_weights, None, None


combine.defvjp(_combine_forward, _combine_backward)


def _by_token(rows: Float[Array, "A D"], place: Int[Array, "M k"]) -> Float[Array, "M k D"]:
    found = rows.at[place.reshape(-1)].get(mode="promise_in_bounds", unique_indices=True)
    return found.reshape(*place.shape, rows.shape[1])
