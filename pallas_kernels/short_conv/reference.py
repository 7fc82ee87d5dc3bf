"""The short convolution token by token, with an explicit window of inputs: the definition."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.manual_axes import align
from pallas_kernels.precision import at_least_float32


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
    dtype = at_least_float32(x, weight, *(() if tail is None else (tail,)))
    if tail is None:
        tail = jnp.zeros((batch, weight.shape[1] - 1, channels), x.dtype)
    valid = jnp.ones((batch, length), bool)
    begins = jnp.zeros((batch, length), bool)
    if lengths is not None:
        valid = jnp.arange(length) < lengths[:, None]
    elif segment_ids is not None:
        valid = segment_ids >= 0
        begins = valid & (jnp.diff(segment_ids, axis=1, prepend=-1) != 0)

    def step(tail: Any, token: Any) -> Any:
        x, valid, begins = (entry[:, None, None] if entry.ndim == 1 else entry[:, None] for entry in token)
        window = jnp.concatenate([jnp.where(begins, 0, tail), x], axis=1)
        y = jax.nn.silu(jnp.sum(window * weight.astype(dtype).T, axis=1))
        return jnp.where(valid, window[:, 1:], tail), jnp.where(valid[:, 0], y, 0)

    # Padding may hold anything; masked only afterwards, its gradient would be 0 · NaN.
    inputs = jnp.where(valid[..., None], x.astype(dtype), 0)
    start, inputs, weight = align(tail.astype(dtype), inputs, weight)
    by_time = tuple(jnp.moveaxis(entry, 1, 0) for entry in (inputs, valid, begins))
    end, y = jax.lax.scan(step, start, by_time)
    return jnp.moveaxis(y, 0, 1).astype(x.dtype), end.astype(x.dtype)
