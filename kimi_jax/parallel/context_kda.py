"""KDA over sequences that are split into contiguous parts over the devices of a mesh axis.

A part of a sequence acts on the state S that enters it as an affine map, and so does its output (arXiv 2510.26692):

    S' = M S + B,    o_t = (o_0)_t + Sᵀ r_t,

with B and o_0 the end state and the output from a zero state, M the product of the part's transitions and r_t the
query that S sees through the transitions up to t. Every device finds its own (B, M, o_0, r) without waiting for the
state, one pair (B, M) a head and device is gathered, and everyone folds the pairs from the left.

All four come out of a single call of the operation, for M and r are nothing but more value columns: those of a state
that starts as the identity and has no values to write. For K = V = 128 in chunks of 64 this takes 1.9 times the
multiplications of a plain call, in one pass over the chunks. Finding (B, M) first and running the part again from the
state that enters takes 2.0 times, in two passes one after the other, and the second waits for the other devices.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_jax.parallel.zigzag import AxisName
from pallas_kernels.dispatch import Implementation
from pallas_kernels.kda import gate, kda, kda_from_raw, l2_normalize, raw_obstacle
from pallas_kernels.kda.xla import FORGET
from pallas_kernels.manual_axes import align
from pallas_kernels.precision import at_least_float32, einsum
from pallas_kernels.short_conv import short_conv


def kda_sharded(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    *,
    axis: AxisName,
    initial_state: Float[Array, "B H K V"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    scale: float | None = None,
    gate_lower_bound: float | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """`kda` of rows of which every device of `axis` holds T consecutive tokens, inside `jax.shard_map`.

    Device r holds the tokens r·T to (r+1)·T - 1 of each row. Float arguments and dtypes are those of
    `pallas_kernels.kda.kda`; o_0, r and everything exchanged are float32 or better, and o is rounded once. Reverse mode
    goes through the exchange. What is exchanged is K · (K + V) numbers a head and device.

    Args:
        q: queries of this device's tokens, L2-normalised, not scaled.
        k: keys, L2-normalised.
        v: values.
        g: log decay.
        beta: strength of the write.
        axis: mesh axis that splits the tokens; of any size.
        initial_state: the state before the first token of the whole row, the same on all devices. None: zeros. Not with
            segment_ids.
        lengths: tokens of the whole row that count, 0 to size · T, the same on all devices. None: all. Not with
            segment_ids.
        segment_ids: this device's part of the ids of packed sequences: they don't decrease along the whole row, then -1
            for padding. A sequence may go on from one device to the next. A NaN in a sequence reaches those after it.
        scale: of q; None: K^(-1/2).
        gate_lower_bound: a promise that g is at least this.
        implementation: of `kda`; None takes the best that can run.

    Returns:
        (o of this device's tokens, the state after the whole row's last token that counts, on every device).

    Raises:
        ValueError: sizes that don't fit, or arguments that contradict each other.
        TypeError: dtypes that don't fit.
        UnsupportedImplementationError: the implementation named can't run.
    """
    _check_kda(q, v, initial_state, lengths, segment_ids)
    size, rank = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    if size == 1:
        alone = kda(
            q,
            k,
            v,
            g,
            beta,
            initial_state=initial_state,
            lengths=lengths,
            segment_ids=segment_ids,
            scale=scale,
            gate_lower_bound=gate_lower_bound,
            implementation=implementation,
        )
        return alone.o, alone.final_state

    length = q.shape[1]
    dtype = at_least_float32(q, k, v, g, beta, *(() if initial_state is None else (initial_state,)))
    counts = None if lengths is None else jnp.clip(lengths - rank * length, 0, length)
    if segment_ids is not None:
        # A decay to nothing separates sequences, and undoes M and r where a sequence starts with this device's part.
        counts = jnp.sum(segment_ids >= 0, axis=1)
        begins = jnp.diff(segment_ids, axis=1, prepend=_previous(segment_ids[:, -1:], axis, first=-1)) != 0
        g, gate_lower_bound = jnp.where(begins[..., None, None], FORGET, g), None

    o, seen, ending = _further_columns(
        q,
        k,
        v,
        g,
        beta,
        dtype,
        lengths=counts,
        scale=scale,
        gate_lower_bound=gate_lower_bound,
        implementation=implementation,
    )
    return _fold(o, seen, ending, initial_state, counts, axis, v.dtype)


def kda_from_raw_sharded(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    raw: Float[Array, "B T H K"],
    beta_logits: Float[Array, "B T H"],
    A_log: Float[Array, " H"],
    dt_bias: Float[Array, "H K"],
    *,
    axis: AxisName,
    initial_state: Float[Array, "B H K V"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    scale: float | None = None,
    gate_lower_bound: float | None = None,
    implementation: Implementation | None = None,
    as_heads: bool | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """`kda_from_raw` of rows of which every device of `axis` holds T consecutive tokens, inside `jax.shard_map`.

    A kernel whose heads have one width, and which computes gate and norms itself, takes the identity's columns as heads of
    their own; o_0 and r are then rounded to the dtype of `v`. Otherwise this is `kda_sharded` of what `kda` takes.

    Args:
        q: as in `pallas_kernels.kda.kda_from_raw`, this device's tokens.
        k: likewise.
        v: likewise.
        raw: likewise.
        beta_logits: likewise.
        A_log: of the gate.
        dt_bias: of the gate.
        axis: as in `kda_sharded`; so is everything that follows.
        initial_state: the state before the whole row.
        lengths: tokens of the whole row that count.
        segment_ids: this device's part of the ids of packed sequences.
        scale: of q.
        gate_lower_bound: of the gate.
        implementation: of `kda_from_raw` or `kda`.
        as_heads: whether the identity's columns are heads, which K = V and no segment_ids allow. None: where a kernel
            takes the call so.

    Returns:
        As `kda_sharded`.

    Raises:
        ValueError: sizes that don't fit, or arguments that contradict each other.
        TypeError: dtypes that don't fit.
        UnsupportedImplementationError: the implementation named can't run.
    """
    options: dict[str, Any] = {"scale": scale, "implementation": implementation, "gate_lower_bound": gate_lower_bound}
    allowed = q.shape[-1] == v.shape[-1] and segment_ids is None
    if as_heads is None:
        as_heads = implementation == "gpu" or (
            implementation is None and raw_obstacle(q, k, v, raw, beta_logits, A_log, dt_bias, initial_state) is None
        )
    as_heads = allowed and as_heads
    if jax.lax.axis_size(axis) == 1 or not as_heads:
        return kda_sharded(
            l2_normalize(q),
            l2_normalize(k),
            v,
            gate(raw, A_log, dt_bias, gate_lower_bound),
            jax.nn.sigmoid(beta_logits.astype(at_least_float32(beta_logits))),
            axis=axis,
            initial_state=initial_state,
            lengths=lengths,
            segment_ids=segment_ids,
            **options,
        )
    _check_kda(q, v, initial_state, lengths, segment_ids)
    dtype = at_least_float32(q, k, v, raw, beta_logits, *(() if initial_state is None else (initial_state,)))
    counts = None
    if lengths is not None:
        counts = jnp.clip(lengths - jax.lax.axis_index(axis) * q.shape[1], 0, q.shape[1])
    found = _columns_as_heads(q, k, v, raw, beta_logits, A_log, dt_bias, dtype, lengths=counts, **options)
    return _fold(*found, initial_state, counts, axis, v.dtype)


def _fold(
    o: jax.Array,
    seen: jax.Array,
    ending: jax.Array,
    initial_state: jax.Array | None,
    counts: jax.Array | None,
    axis: AxisName,
    dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """(o, final state) from every device's o_0, r and (B, M) side by side."""
    size, rank = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    batch, length, heads, values = o.shape
    width = seen.shape[-1]
    parts = jax.lax.all_gather(ending, axis)
    if initial_state is None:
        initial_state = jnp.zeros((batch, heads, width, values), ending.dtype)

    def fold(
        carry: tuple[jax.Array, jax.Array], of_device: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        (state, entering), (device, part) = carry, of_device
        entering = jnp.where(device == rank, state, entering)
        state = einsum("bhkj,bhjv->bhkv", part[..., values:], state) + part[..., :values]
        return (state, entering), None

    state, parts, rank = align(initial_state.astype(ending.dtype), parts, rank)
    (state, entering), _ = jax.lax.scan(fold, (state, state), (jnp.arange(size), parts))
    o = o + einsum("bthk,bhkv->bthv", seen, entering)
    if counts is not None:
        o = jnp.where((jnp.arange(length) < counts[:, None])[..., None, None], o, 0)
    return o.astype(dtype), state


def _further_columns(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, dtype: Any, **options: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(o_0, r, B and M side by side): the identity's columns come after those of v."""
    (batch, _, heads, width), values = q.shape, v.shape[-1]
    state = jnp.eye(width, values + width, k=values, dtype=dtype)
    part = kda(
        q,
        k,
        jnp.concatenate([v.astype(dtype), jnp.zeros((*v.shape[:-1], width), dtype)], axis=-1),
        g,
        beta,
        initial_state=jnp.broadcast_to(state, (batch, heads, width, values + width)),
        **options,
    )
    o, seen = jnp.split(part.o, [values], axis=-1)
    return o, seen, part.final_state


def _columns_as_heads(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    raw: jax.Array,
    beta_logits: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    dtype: Any,
    **options: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The same from what a layer's projections give: the identity's columns are heads of their own."""
    batch, heads, width = q.shape[0], q.shape[2], q.shape[3]

    def twice(x: jax.Array, axis: int = 2) -> jax.Array:
        return jnp.concatenate([x, x], axis=axis)

    start = jnp.stack([jnp.zeros((width, width), dtype), jnp.eye(width, dtype=dtype)])
    start = jnp.broadcast_to(start[None, :, None], (batch, 2, heads, width, width)).reshape(batch, -1, width, width)
    part = kda_from_raw(
        twice(q),
        twice(k),
        jnp.concatenate([v, jnp.zeros_like(v)], axis=2),
        twice(raw),
        twice(beta_logits),
        twice(A_log, 0),
        twice(dt_bias, 0),
        initial_state=start,
        **options,
    )
    o, seen = jnp.split(part.o.astype(dtype), 2, axis=2)
    return o, seen, jnp.concatenate(jnp.split(part.final_state, 2, axis=1), axis=-1)


def short_conv_sharded(
    x: Float[Array, "B T X"],
    weight: Float[Array, "X W"],
    *,
    axis: AxisName,
    tail: Float[Array, "B W-1 X"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B T X"], Float[Array, "B W-1 X"]]:
    """`short_conv` of rows of which every device of `axis` holds T consecutive tokens, inside `jax.shard_map`.

    A device receives the last W-1 inputs of the one before it. Differentiable.

    Args:
        x: inputs of this device's tokens, channels last.
        weight: taps of every channel, oldest first.
        axis: mesh axis that splits the tokens; of any size.
        tail: the last W-1 inputs before the first token of the whole row, the same on all devices. None: zeros. Not
            with segment_ids.
        lengths: tokens of the whole row that count, 0 to size · T, the same on all devices. None: all. Not with
            segment_ids.
        segment_ids: this device's part of the ids of packed sequences: they don't decrease along the whole row, then -1
            for padding.
        implementation: of `short_conv`; None takes the best that can run.

    Returns:
        (y of this device's tokens, the W-1 inputs up to the whole row's last token that counts, on every device). The
        inputs begin with the old tail where the row has fewer, and with zeros before the row's last packed sequence.

    Raises:
        ValueError: sizes that don't fit, arguments that contradict each other, or several devices with fewer than W-1
            tokens each.
        TypeError: dtypes that don't fit.
        UnsupportedImplementationError: the implementation named can't run.
    """
    size, rank = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    _check_conv(x, weight, tail, lengths, segment_ids, axis, size)
    (batch, length, channels), history = x.shape, weight.shape[1] - 1
    if size == 1 or history == 0:
        counts = lengths if lengths is None else jnp.clip(lengths - rank * length, 0, length)
        return short_conv(x, weight, tail=tail, lengths=counts, segment_ids=segment_ids, implementation=implementation)

    if segment_ids is None:
        counts = jnp.full(batch, length) if lengths is None else jnp.clip(lengths - rank * length, 0, length)
        total = jnp.full(batch, size * length) if lengths is None else lengths
        # Padding that reached the next device as history would spoil the gradients of what it meets there.
        inputs = x if lengths is None else jnp.where((jnp.arange(length) < counts[:, None])[..., None], x, 0)
        before = jnp.zeros((batch, history, channels), x.dtype) if tail is None else tail
        before = jnp.where(rank == 0, before, _previous(inputs[:, -history:], axis).astype(before.dtype))
        y, last = short_conv(
            x,
            weight,
            tail=before,
            lengths=None if lengths is None else counts,
            implementation=implementation,
        )
    else:
        valid = segment_ids >= 0
        total = jax.lax.psum(jnp.sum(valid, axis=1), axis)
        inputs = jnp.where(valid[..., None], x, 0)
        # The history comes with the ids it has on its own device, so it counts for the sequence that goes on and no
        # other. Ids move up by one: the first device's zeros get 0, an id that nobody has.
        ids = jnp.where(valid, segment_ids + 1, -1)
        before = _previous(inputs[:, -history:], axis)
        ids_before = _previous(ids[:, -history:], axis)
        y, last = short_conv(
            jnp.concatenate([before, inputs], axis=1),
            weight,
            segment_ids=jnp.concatenate([ids_before, ids], axis=1),
            implementation=implementation,
        )
        y = y[:, history:]

    # The device with the row's last valid token knows the tail; of a row without any, the first one does.
    owner = jnp.maximum((total - 1) // length, 0)
    return y, jax.lax.all_gather(last, axis)[owner, jnp.arange(batch)]


def _previous(x: jax.Array, axis: AxisName, first: int = 0) -> jax.Array:
    """What the device before this one has; `first` on the first one."""
    received = jax.lax.ppermute(x, axis, [(i, i + 1) for i in range(jax.lax.axis_size(axis) - 1)])
    return received if first == 0 else jnp.where(jax.lax.axis_index(axis) == 0, first, received)


def _check_kda(
    q: jax.Array,
    v: jax.Array,
    initial_state: jax.Array | None,
    lengths: jax.Array | None,
    segment_ids: jax.Array | None,
) -> None:
    """What `kda` can't check, because it gets other arguments."""
    if q.ndim != 4 or v.ndim != 4:
        raise ValueError(
            f"kda_sharded: q has shape {q.shape} and v {v.shape}; they must be [B, T, H, K] and [B, T, H, V]."
        )
    if v.shape[:3] != q.shape[:3]:
        raise ValueError(f"kda_sharded: v has shape {v.shape}; it must be {(*q.shape[:3], 'V')}.")
    if not jnp.issubdtype(v.dtype, jnp.floating):
        raise TypeError(f"kda_sharded: v has dtype {v.dtype}; it must be a floating point type.")
    if segment_ids is not None and initial_state is not None:
        raise ValueError(
            "kda_sharded: initial_state can't be given with segment_ids; packed sequences begin in their row."
        )
    shape = (q.shape[0], *q.shape[2:], v.shape[3])
    if initial_state is not None and initial_state.shape != shape:
        raise ValueError(f"kda_sharded: initial_state has shape {initial_state.shape}; it must be {shape}.")
    _check_rows("kda_sharded", q.shape[:2], lengths, segment_ids)


def _check_conv(
    x: jax.Array,
    weight: jax.Array,
    tail: jax.Array | None,
    lengths: jax.Array | None,
    segment_ids: jax.Array | None,
    axis: AxisName,
    size: int,
) -> None:
    """What `short_conv` can't check, because it gets other arguments."""
    if x.ndim != 3 or weight.ndim != 2:
        raise ValueError(
            f"short_conv_sharded: x has shape {x.shape} and weight {weight.shape}; they must be [B, T, X] and [X, W]."
        )
    (batch, length, channels), history = x.shape, weight.shape[1] - 1
    if segment_ids is not None and tail is not None:
        raise ValueError(
            "short_conv_sharded: tail can't be given with segment_ids; packed sequences begin in their row."
        )
    if tail is not None and tail.shape != (batch, history, channels):
        raise ValueError(f"short_conv_sharded: tail has shape {tail.shape}; it must be {(batch, history, channels)}.")
    _check_rows("short_conv_sharded", (batch, length), lengths, segment_ids)
    if size > 1 and length < history:
        raise ValueError(
            f"short_conv_sharded: x holds {length} tokens on each of the {size} devices of axis {axis!r}; it must hold "
            f"at least W - 1 = {history}, so that a token's history lies on at most two devices."
        )


def _check_rows(
    operation: str, shape: tuple[int, ...], lengths: jax.Array | None, segment_ids: jax.Array | None
) -> None:
    if lengths is not None and segment_ids is not None:
        raise ValueError(f"{operation}: lengths can't be given with segment_ids; mark the padding with -1 there.")
    for name, x, expected in (("lengths", lengths, shape[:1]), ("segment_ids", segment_ids, shape)):
        if x is not None and x.shape != expected:
            raise ValueError(f"{operation}: {name} has shape {x.shape}; it must be {expected}.")
        if x is not None and not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"{operation}: {name} has dtype {x.dtype}; it must be an integer type.")
