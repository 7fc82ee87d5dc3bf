"""Sharded experts whose tokens every device holds, or gathers before."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_jax.parallel.expert_forms import Block, Form, Stack, in_window, loop
from pallas_kernels.precision import at_least_float32, einsum
from pallas_kernels.router import sort_by_expert


class _Mine(NamedTuple):
    """A device's own assignments of tokens to experts, numbered by expert.

    Attributes:
        token: [M·k] of each assignment, by number.
        ends: [E] the number after each expert's last.
        sizes: [E] assignments of each expert.
        place: [M, k] number of each of a token's assignments; after all numbers where the expert isn't this device's.
        sorted_place: [M, k] the same, ascending.
        sorted_weights: [M, k] beside it.
        weight: [M·k] of each assignment, by number.
    """

    token: Int[Array, " A"]
    ends: Int[Array, " E"]
    sizes: Int[Array, " E"]
    place: Int[Array, "M k"]
    sorted_place: Int[Array, "M k"]
    sorted_weights: Float[Array, "M k"]
    weight: Float[Array, " A"]


def _mine(form: Form, block: Block, device: Int[Array, ""]) -> _Mine:
    tokens, per_token = block.experts.shape
    first = device.astype(jnp.int32) * form.own
    mine = block.valid[:, None] & (block.experts >= first) & (block.experts < first + form.own)
    order, sizes, place = sort_by_expert(block.experts, form.own, block.valid, first=first)
    place = jnp.where(mine, place, tokens * per_token)
    ascending, beside = jax.lax.sort((place, block.weights), dimension=1, num_keys=1)
    return _Mine(
        order // per_token, jnp.cumsum(sizes), sizes, place, ascending, beside, block.weights.reshape(-1)[order]
    )


def _add_up(
    total: Float[Array, "M D"],
    outputs: Float[Array, "R D"],
    mine: _Mine,
    low: Int[Array, ""],
    weights: Float[Array, "M k"] | None,
) -> Float[Array, "M D"]:
    """Adds each token's rows of a window to its sum, by ascending expert, whatever the windows are."""
    place, window = mine.sorted_place, outputs.shape[0]
    before = jnp.sum(place < low, axis=1, dtype=jnp.int32)
    count = jnp.sum((place >= low) & (place < jnp.minimum(low + window, mine.ends[-1])), axis=1, dtype=jnp.int32)

    def add(index: Array, total: Array) -> Array:
        at = jnp.minimum(before + index, place.shape[1] - 1)[:, None]
        row = jnp.clip(jnp.take_along_axis(place, at, axis=1)[:, 0] - low, 0, window - 1)
        part = outputs[row].astype(total.dtype)
        if weights is not None:
            part = jnp.take_along_axis(weights, at, axis=1).astype(total.dtype) * part
        return total + jnp.where((index < count)[:, None], part, 0)

    return loop(jnp.max(count), add, total, (outputs, place, total), "expert_sums")


def local_forward(form: Form, block: Block, stack: Stack, device: Int[Array, ""]) -> Float[Array, "M D"]:
    """Σ_e w_e · E_e(x) over this device's experts, float32 or better."""
    window = min(form.window, block.experts.size)
    if window == block.experts.size:
        return _all_at_once(form, block, stack, device)
    mine = _mine(form, block, device)

    def step(index: Array, total: Array) -> Array:
        low = index * window
        number = jnp.minimum(low + jnp.arange(window, dtype=jnp.int32), mine.token.size - 1)
        rows = block.x[mine.token[number]]
        sizes = in_window(mine.ends, mine.sizes, low, window)
        outputs = form.experts(rows, stack.gate_up, stack.down, sizes, stack.offset)
        return _add_up(total, outputs, mine, low, mine.sorted_weights)

    zeros = jnp.zeros(block.x.shape, at_least_float32(block.x, block.weights))
    return loop(-(-mine.ends[-1] // window), step, zeros, (block, stack))


def _all_at_once(form: Form, block: Block, stack: Stack, device: Int[Array, ""]) -> Float[Array, "M D"]:
    """The same of one window that holds every assignment, each token's sum in the order in which it names its experts."""
    tokens, per_token = block.experts.shape
    first = device.astype(jnp.int32) * form.own
    mine = block.valid[:, None] & (block.experts >= first) & (block.experts < first + form.own)
    order, sizes, place = sort_by_expert(block.experts, form.own, block.valid, first=first)
    rows = block.x.at[order // per_token].get(mode="promise_in_bounds")
    outputs = form.experts(rows, stack.gate_up, stack.down, sizes, stack.offset)
    # Rows of other devices' experts come last and are 0.
    found = outputs.at[place.reshape(-1)].get(mode="promise_in_bounds", unique_indices=True)
    dtype = at_least_float32(block.x, block.weights)
    weights = jnp.where(mine, block.weights, 0).astype(dtype)
    return einsum("mkd,mk->md", found.reshape(tokens, per_token, -1).astype(dtype), weights)


def local_backward(
    form: Form, block: Block, d_result: Float[Array, "M D"], stack: Stack, device: Int[Array, ""], total: Any
) -> tuple[Float[Array, "M D"], Float[Array, "M k"], Any]:
    """By the tokens, by their weights, and added to `total`, by the experts: this device's part of each sum."""
    mine = _mine(form, block, device)
    numbers = mine.token.size
    window = min(form.window, numbers)

    def step(index: Array, carry: tuple[Array, Array, Any]) -> tuple[Array, Array, Any]:
        d_x, d_weight, total = carry
        low = index * window
        number = low + jnp.arange(window, dtype=jnp.int32)
        used = number < mine.ends[-1]
        number = jnp.minimum(number, numbers - 1)
        token = mine.token[number]
        sizes = in_window(mine.ends, mine.sizes, low, window)
        weights = jnp.where(used, mine.weight[number], 0).astype(d_x.dtype)
        d_rows = jnp.where(used[:, None], d_result[token], 0)
        d_window, d_part, total = form.gradients(block.x[token], weights, d_rows, stack, sizes, total)
        d_weight = jax.lax.dynamic_update_slice_in_dim(d_weight, d_part, low, axis=0)
        return _add_up(d_x, d_window, mine, low, None), d_weight, total

    accumulator = at_least_float32(block.x, block.weights)
    # The last window may reach past the last number.
    carry = (jnp.zeros(block.x.shape, accumulator), jnp.zeros(numbers + window, accumulator), total)
    d_x, d_weight, total = loop(-(-mine.ends[-1] // window), step, carry, (block, stack, d_result))
    is_mine = mine.place < mine.ends[-1]
    return d_x, jnp.where(is_mine, d_weight[jnp.where(is_mine, mine.place, 0)], 0), total


def _gather(form: Form, *arrays: Array) -> list[Array]:
    return [jax.lax.all_gather(array, form.axes, tiled=True) for array in arrays]


def _gather_block(form: Form, block: Block) -> Block:
    experts = jnp.where(block.valid[:, None], block.experts, -1)
    x, weights, experts = _gather(form, block.x, block.weights, experts)
    return Block(x, weights, experts, experts[:, 0] >= 0)


def _scatter(form: Form, sums: Array) -> Array:
    return jax.lax.psum_scatter(sums, form.axes, tiled=True)


def gathered_forward(form: Form, block: Block, stack: Stack, device: Int[Array, ""]) -> Float[Array, "M D"]:
    """Σ_e w_e · E_e(x) of this device's tokens, which all devices hold meanwhile."""
    return _scatter(form, local_forward(form, _gather_block(form, block), stack, device)).astype(block.x.dtype)


def gathered_backward(
    form: Form, block: Block, d_result: Float[Array, "M D"], stack: Stack, device: Int[Array, ""], total: Any
) -> tuple[Float[Array, "M D"], Float[Array, "M k"], Any]:
    """By this device's tokens, by their weights, and added to `total`, by its experts."""
    (everyones,) = _gather(form, d_result)
    d_x, d_weights, total = local_backward(form, _gather_block(form, block), everyones, stack, device, total)
    return _scatter(form, d_x), _scatter(form, d_weights), total
