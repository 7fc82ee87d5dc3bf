"""Sharded experts to which rows move: a ragged all-to-all, a window of rows at a time, and back."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_jax.parallel.expert_forms import Block, Form, Stack, in_window, loop
from pallas_kernels.manual_axes import align
from pallas_kernels.precision import at_least_float32, einsum
from pallas_kernels.router import sort_by_expert


class _Routes(NamedTuple):
    """Which rows go where. s, d, i: devices that send, that receive, this one; e: experts of this one.

    A device's rows are numbered in the order of their experts, which is that of the experts' owners. Rows that a device
    receives arrive in the order of the senders, then of their experts.

    Attributes:
        order: [M·k] assignment of each of this device's rows.
        place: [M, k] row of each assignment.
        sends: [d] rows from i to d.
        sent_from: [d] the first of them on i.
        sent_to: [d] its arrival number on d.
        receives: [s] rows from s to i.
        received_from: [s] the first of them on s.
        received_at: [s] its arrival number on i.
        runs: [s, e] rows from s to expert e of i.
        fullest: rows that the device receives that receives most.
    """

    order: Int[Array, " A"]
    place: Int[Array, "M k"]
    sends: Int[Array, " n"]
    sent_from: Int[Array, " n"]
    sent_to: Int[Array, " n"]
    receives: Int[Array, " n"]
    received_from: Int[Array, " n"]
    received_at: Int[Array, " n"]
    runs: Int[Array, "n E"]
    fullest: Int[Array, ""]


def _routes(form: Form, block: Block, device: Int[Array, ""]) -> _Routes:
    order, sizes, place = sort_by_expert(block.experts, form.num_experts, block.valid)
    counts = jax.lax.all_gather(sizes, form.axes).reshape(form.size, form.size, form.own)
    between = counts.sum(2)
    starts = jnp.cumsum(between, axis=1) - between
    arrivals = jnp.cumsum(between, axis=0) - between
    return _Routes(
        order,
        place,
        between[device],
        starts[device],
        arrivals[device],
        between[:, device],
        starts[:, device],
        arrivals[:, device],
        counts[:, device],
        jnp.max(between.sum(0)),
    )


class _Window(NamedTuple):
    """The rows that every device receives at once.

    Attributes:
        out: offsets and sizes for sending rows.
        back: the same for returning them.
        by_expert: [R] arrival place of each row in the order of experts.
        by_arrival: [R] place in the order of experts of each row as it arrived.
        sizes: [E] rows of each expert.
    """

    out: tuple[Int[Array, " n"], ...]
    back: tuple[Int[Array, " n"], ...]
    by_expert: Int[Array, " R"]
    by_arrival: Int[Array, " R"]
    sizes: Int[Array, " E"]


def _open(form: Form, routes: _Routes, low: Int[Array, ""]) -> _Window:
    window = form.window

    def part(arrival: Array, count: Array) -> tuple[Array, Array, Array]:
        """What of each run is in the window: how much comes before, how much is in it, where it begins there."""
        skipped = jnp.clip(low - arrival, 0, count)
        return skipped, jnp.clip(low + window - arrival, 0, count) - skipped, jnp.clip(arrival - low, 0, window)

    skipped, sent, target = part(routes.sent_to, routes.sends)
    missed, received, begin = part(routes.received_at, routes.receives)
    out = (routes.sent_from + skipped, sent, target, received)
    back = (begin, received, routes.received_from + missed, sent)

    flat = routes.runs.reshape(-1)
    ends = jnp.cumsum(flat).reshape(routes.runs.shape)
    runs = in_window(ends, routes.runs, low, window)
    arrival = jnp.clip(ends - routes.runs - low, 0, window)
    columns = runs.T.reshape(-1)
    sorted_ends = jnp.cumsum(columns)
    sorted_at = (sorted_ends - columns).reshape(runs.T.shape)
    by_expert = _follow(sorted_ends, columns, arrival.T.reshape(-1), window)
    rows = runs.reshape(-1)
    by_arrival = _follow(jnp.cumsum(rows), rows, sorted_at.T.reshape(-1), window)
    return _Window(out, back, by_expert, by_arrival, runs.sum(0))


def _follow(ends: Int[Array, " n"], sizes: Int[Array, " n"], to: Int[Array, " n"], count: int) -> Int[Array, " R"]:
    """Where 0..count−1, in runs one after the other, go when each run begins at `to`; anywhere legal past the last."""
    number = jnp.arange(count, dtype=jnp.int32)
    run = jnp.minimum(jnp.searchsorted(ends, number, side="right"), ends.size - 1)
    return jnp.clip(to[run] + number - (ends - sizes)[run], 0, count - 1)


def _exchange(form: Form, rows: Array, target: Array, places: tuple[Array, ...]) -> Array:
    rows, target = align(rows, target)
    return form.ragged_all_to_all(rows, target, *places, axis_name=form.axes)


def _receive(form: Form, rows: Array, at: _Window) -> Array:
    """This device's rows of a window, in the order of experts; anything past the last."""
    empty = jnp.zeros((form.window, *rows.shape[1:]), rows.dtype)
    return _exchange(form, rows, empty, at.out)[at.by_expert]


def _return(form: Form, rows: Array, at: _Window, target: Array) -> Array:
    return _exchange(form, rows[at.by_arrival], target, at.back)


def ragged_forward(form: Form, block: Block, stack: Stack, device: Int[Array, ""]) -> Float[Array, "M D"]:
    """Σ_e w_e · E_e(x) of this device's tokens, whose rows go to the owners of their experts and come back."""
    routes = _routes(form, block, device)
    rows = block.x[routes.order // block.experts.shape[1]]

    def step(index: Array, results: Array) -> Array:
        at = _open(form, routes, index * form.window)
        outputs = form.experts(_receive(form, rows, at), stack.gate_up, stack.down, at.sizes, stack.offset)
        return _return(form, outputs, at, results)

    results = loop(-(-routes.fullest // form.window), step, jnp.zeros_like(rows), (block, stack))
    weights = jnp.where(block.valid[:, None], block.weights, 0)
    return einsum("mkd,mk->md", results[routes.place].astype(weights.dtype), weights, out=block.x.dtype)


def ragged_backward(
    form: Form, block: Block, d_result: Float[Array, "M D"], stack: Stack, device: Int[Array, ""], total: Any
) -> tuple[Float[Array, "M D"], Float[Array, "M k"], Any]:
    """By the tokens, by their weights, and added to `total`, by this device's experts."""
    routes = _routes(form, block, device)
    token = routes.order // block.experts.shape[1]
    rows, d_rows = block.x[token], d_result[token]
    accumulator = at_least_float32(block.x, block.weights)
    weights = block.weights.reshape(-1, 1)[routes.order].astype(accumulator)

    def step(index: Array, carry: tuple[Array, Array, Any]) -> tuple[Array, Array, Any]:
        d_sent, d_weight, total = carry
        at = _open(form, routes, index * form.window)
        used = jnp.arange(form.window, dtype=jnp.int32) < at.sizes.sum()
        d_received = jnp.where(used[:, None], _receive(form, d_rows, at), 0)
        factor = jnp.where(used, _receive(form, weights, at)[:, 0], 0)
        received = _receive(form, rows, at)
        d_window, d_part, total = form.gradients(received, factor, d_received, stack, at.sizes, total)
        return _return(form, d_window, at, d_sent), _return(form, d_part[:, None], at, d_weight), total

    carry = (jnp.zeros_like(rows), jnp.zeros_like(weights), total)
    d_sent, d_weight, total = loop(-(-routes.fullest // form.window), step, carry, (block, stack, d_result))
    d_x = jnp.sum(d_sent[routes.place].astype(accumulator), axis=1)
    return d_x, d_weight[:, 0][routes.place], total
