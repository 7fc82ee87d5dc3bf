"""The short convolution in plain JAX: one shifted copy of the input a tap, summed in one pass over memory."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.manual_axes import align
from pallas_kernels.precision import at_least_float32, einsum


@jax.jit
def short_conv(
    x: jax.Array,
    weight: jax.Array,
    tail: jax.Array | None,
    lengths: jax.Array | None,
    segment_ids: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.short_conv.short_conv`."""
    batch, length, channels = x.shape
    history = weight.shape[1] - 1
    valid = owner = None
    stop = jnp.full((batch,), length)
    if lengths is not None:
        valid, stop = jnp.arange(length) < lengths[:, None], lengths
    elif segment_ids is not None:
        valid = segment_ids >= 0
        stop = jnp.sum(valid, axis=1)
        owner = jnp.pad(segment_ids, [(0, 0), (history, 0)], constant_values=-1)
    if valid is not None:
        x = jnp.where(valid[..., None], x, 0)
    if tail is None:
        tail = jnp.zeros((batch, history, channels), x.dtype)

    inputs, weight = align(jnp.concatenate([tail, x], axis=1), weight)
    y = jax.nn.silu(_taps(inputs, weight, owner))
    if valid is not None:
        y = jnp.where(valid[..., None], y, 0)

    new_tail = _last(inputs, stop, history)
    if owner is not None:
        # What precedes the last sequence is no history of it.
        recent = _last(owner, stop, history)
        new_tail = jnp.where((recent == recent[:, -1:])[..., None], new_tail, 0)
    return y.astype(x.dtype), new_tail.astype(x.dtype)


def _last(inputs: jax.Array, stop: jax.Array, history: int) -> jax.Array:
    """The `history` entries up to token stop - 1, where inputs begin `history` before token 0."""
    return jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, history))(inputs, stop)


@jax.custom_vjp
def _taps(inputs: jax.Array, weight: jax.Array, owner: jax.Array | None) -> jax.Array:
    """y_t = Σ_j weight_j · inputs_(t+j), T of them from T+W-1 inputs; j only where t+j has the owner of t+W-1.

    The gradient is written out: what reverse mode makes of sums of slices takes ten times longer on a CPU.
    """
    return _weighted(_slices(inputs, weight.shape[1], owner, weight.shape[1] - 1), weight)


def _taps_forward(inputs: jax.Array, weight: jax.Array, owner: jax.Array | None) -> tuple[jax.Array, Any]:
    return _taps(inputs, weight, owner), (inputs, weight, owner)


def _taps_backward(residuals: Any, d_y: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    inputs, weight, owner = residuals
    width = weight.shape[1]
    past = _slices(inputs, width, owner, width - 1)
    d_weight = jnp.stack([einsum("btx,btx->x", x, d_y) for x in past], axis=1)
    # inputs_s reaches y_(s-j): the same sum the other way round, with zeros on both sides of y.
    around = jnp.pad(d_y, [(0, 0), (width - 1, width - 1), (0, 0)])
    if owner is not None:
        owner = jnp.pad(owner, [(0, 0), (0, width - 1)], constant_values=-1)
    d_inputs = _weighted(_slices(around, width, owner, 0), weight[:, ::-1])
    return d_inputs.astype(inputs.dtype), d_weight.astype(weight.dtype), None


_taps.defvjp(_taps_forward, _taps_backward)


def _slices(inputs: jax.Array, width: int, owner: jax.Array | None, own: int) -> list[jax.Array]:
    """inputs_(t+j) for every tap j, 0 where its owner isn't that of input t+own."""
    length = inputs.shape[1] - width + 1
    slices = [inputs[:, tap : tap + length] for tap in range(width)]
    if owner is None:
        return slices
    same = [owner[:, tap : tap + length] == owner[:, own : own + length] for tap in range(width)]
    return [jnp.where(keep[..., None], x, 0) for keep, x in zip(same, slices, strict=True)]


def _weighted(slices: list[jax.Array], weight: jax.Array) -> jax.Array:
    dtype = at_least_float32(slices[0], weight)
    y = jnp.zeros((), dtype)
    for tap, x in enumerate(slices):
        y = y + x.astype(dtype) * weight[:, tap].astype(dtype)
    return y
