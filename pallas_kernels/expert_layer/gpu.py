"""The Hopper kernels of `expert_mlp`, forward and backward."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.gate import Gate
from pallas_kernels.grouped_matmul import gpu as products
from pallas_kernels.mxfp4 import Mxfp4

_MANY = 2048
"""Rows from which passes over memory count more than launches."""

Weights = Float[Array, "_ _ _"] | Mxfp4


def obstacle(rows: Float[Array, "M D"], gate_up: Weights, down: Weights) -> str | None:
    """Why the kernels can't run for this call, or None."""
    inner = jax.ShapeDtypeStruct((rows.shape[0], down.shape[2]), rows.dtype)
    return products.obstacle(rows, gate_up, rows.dtype) or products.unfit(inner, down, rows.dtype)


def take(x: Float[Array, "T D"], index: Int[Array, " A"], by_kernel: bool) -> Float[Array, "A D"]:
    """x[index], by the copy engine where that is allowed and pays."""
    if by_kernel and _takes(x, index):
        from pallas_kernels.expert_layer.gpu_gather import gather

        return gather(x, index, getattr(jax.devices()[0], "core_count", 132))
    return x.at[index].get(mode="promise_in_bounds")


def _takes(x: Array, index: Array) -> bool:
    rows = index.shape[0]
    return x.dtype == jnp.bfloat16 and x.shape[1] % 256 == 0 and x.shape[1] <= 7040 and rows % 8 == 0 and rows >= _MANY


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def expert_mlp(
    rows: Float[Array, "M D"],
    gate_up: Weights,
    down: Weights,
    group_sizes: Int[Array, " G"],
    group_offset: Int[Array, ""],
    gate: Gate,
    ordered: bool,
) -> Float[Array, "M D"]:
    """See `pallas_kernels.expert_layer.expert_mlp`; `ordered` rows have been through `products.order`."""
    groups = (group_sizes, group_offset)
    if not isinstance(gate_up, Mxfp4):
        return products.by_kernel(products.by_kernel(rows, gate_up, *groups, gate), down, *groups)
    # A pass of its own: two accumulators beside unpacked weights leave room for narrow tiles only, each of which unpacks
    # its expert anew. With a row or two to an expert it was measured to lose as well.
    hidden = products.by_kernel(rows, gate_up, *groups, ordered=ordered)
    packed = isinstance(down, Mxfp4)
    halves = _halves(hidden)
    if rows.shape[0] < _MANY:
        inner = gate(*halves)
    else:
        # By few operations: XLA writes float32 numbers between tanh and the order of columns.
        inner = gate.quickly(*(half.astype(jnp.float32) for half in halves)).astype(rows.dtype)
    inner = products.order(inner) if packed else inner
    return products.by_kernel(inner, down, *groups, ordered=packed)


def _forward(
    rows: Array, gate_up: Weights, down: Weights, group_sizes: Array, group_offset: Array, gate: Gate, ordered: bool
) -> tuple[Array, tuple[Any, ...]]:
    result: Any = expert_mlp(rows, gate_up, down, group_sizes, group_offset, gate, ordered)
    return result, (rows, gate_up, down, group_sizes, group_offset)


def _backward(gate: Gate, ordered: bool, residuals: tuple[Any, ...], d_result: Array) -> tuple[Any, ...]:
    """Gate and up are computed again: keeping them would take as much memory as everything else together."""
    rows, gate_up, down, group_sizes, group_offset = residuals
    groups = (group_sizes, group_offset)
    hidden = products.by_kernel(rows, gate_up, *groups, ordered=ordered)
    inner, pull_gate = jax.vjp(gate, *_halves(hidden))
    d_inner, d_down = products.gradients(inner, down, *groups, d_result)
    # Side by side in one pass; the gradient of taking a half would be a sum of padded arrays.
    d_hidden = jnp.concatenate(pull_gate(d_inner), axis=1)
    d_rows, d_gate_up = products.gradients(rows, gate_up, *groups, d_hidden)
    d_rows = products.order(d_rows) if ordered else d_rows
    return d_rows, d_gate_up, d_down, None, None


def _halves(hidden: Float[Array, "M G"]) -> tuple[Float[Array, "M F"], Float[Array, "M F"]]:
    width = hidden.shape[1] // 2
    return hidden[:, :width], hidden[:, width:]


expert_mlp.defvjp(_forward, _backward)
