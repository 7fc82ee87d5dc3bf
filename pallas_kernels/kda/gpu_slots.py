"""KDA on slots of a pool on Hopper GPUs: which calls the kernels take, how they are cut, and one token of `kda`."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda import xla
from pallas_kernels.kda.gate import gate, l2_normalize
from pallas_kernels.manual_axes import align, axes_left_to_xla
from pallas_kernels.target import platform

WIDTH = 128
TAPS = 4
MOST_TOKENS, MOST_RECORDS = 16, 16

Records = tuple[jax.Array, jax.Array, jax.Array]


def obstacle(
    vectors: Mapping[str, jax.Array],
    floats: Mapping[str, jax.Array | None],
    pool: jax.Array | jax.ShapeDtypeStruct,
    *,
    named: bool,
    unproved: Mapping[str, bool] | None = None,
    taps: int | None = None,
    capacity: int | None = None,
    tokens: int = 1,
) -> str | None:
    """Why the kernels can't take a call, or None.

    Args:
        vectors: arrays in float32 or bfloat16, by name.
        floats: the arrays that are float32, by name.
        pool: of states.
        named: whether the caller asks for the GPU kernel.
        unproved: what no card has run yet, and whether the call has it; it's left to callers by name.
        taps: of the convolution, if there is one.
        capacity: records of a slot, if there are any.
        tokens: of a window.
    """
    if platform() != "gpu":
        return f"its kernels run on NVIDIA Hopper GPUs, and the platform is {platform()!r}."
    if capability() != "9.0":
        return f"its kernels are compiled for compute capability 9.0 (Hopper), and this device has {capability()}."
    if any(jax.typeof(x).manual_axis_type.varying for x in vectors.values()):
        return "JAX writes no array in place that varies over a mesh axis; call jax.shard_map with check_vma=False."
    found = axes_left_to_xla() or unfit(vectors, floats, pool, taps=taps, capacity=capacity, tokens=tokens)
    if found is not None or named:
        return found
    new = {"other vectors than bfloat16": any(x.dtype != jnp.bfloat16 for x in vectors.values())} | dict(unproved or {})
    what = " and ".join(name for name, there in new.items() if there)
    return f"its kernels haven't run on a card with {what}; they do when they are named." if what else None


def unfit(
    vectors: Mapping[str, jax.Array],
    floats: Mapping[str, jax.Array | None],
    pool: jax.Array | jax.ShapeDtypeStruct,
    *,
    taps: int | None = None,
    capacity: int | None = None,
    tokens: int = 1,
) -> str | None:
    """Why no Hopper GPU could take this call, or None."""
    width, values = pool.shape[-2:]
    if (width, values) != (WIDTH, WIDTH):
        return f"there is no Hopper kernel for K={width} and V={values}; both must be {WIDTH}."
    for name, x in vectors.items():
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            return f"{name} has dtype {x.dtype}; the Hopper kernels take float32 and bfloat16."
    for name, wide in floats.items():
        if wide is not None and wide.dtype != jnp.float32:
            return f"{name} has dtype {wide.dtype}; the Hopper kernels compute in float32."
    if taps not in (None, TAPS):
        return f"the convolution has {taps} taps; the Hopper kernel has {TAPS}."
    if tokens > MOST_TOKENS:
        return f"the window has {tokens} tokens; the Hopper kernel takes up to {MOST_TOKENS}."
    if capacity is not None and (capacity % 8 or capacity > MOST_RECORDS):
        return f"a slot has {capacity} records; the Hopper kernels take multiples of 8 up to {MOST_RECORDS}."
    return None


def obstacle_of_one(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    floats: Mapping[str, jax.Array | None],
    *,
    named: bool,
    raw: jax.Array | None = None,
    gate_lower_bound: float | None = None,
) -> str | None:
    """Why the kernel can't take a call of `kda`, or of `kda_from_raw`, with one token; or None."""
    vectors = {"q": q, "k": k, "v": v} | ({} if raw is None else {"raw": raw})
    state = jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[3], v.shape[3]), jnp.float32)
    return obstacle(vectors, floats, state, named=named, unproved=gate_unproved(raw is not None, gate_lower_bound))


def gate_unproved(inside: bool, lower_bound: float | None) -> dict[str, bool]:
    """Of a kernel that computes the gate or doesn't."""
    return {"a gate that has no bound": inside and lower_bound is None}


def capability() -> str:
    """Of the first device."""
    return getattr(jax.devices()[0], "compute_capability", "unknown")


def processors() -> int:
    """Multiprocessors of the GPU; an H200's where there is none."""
    return getattr(jax.devices()[0], "core_count", None) or 132


def columns_of(states: int) -> int:
    """How many value channels of a state a warpgroup takes, of `states` pairs of a slot and a head.

    64 keep enough bytes on their way with four warpgroups to a multiprocessor. Fewer where 64 would leave some without.
    """
    return 64 if states > 2 * processors() else 32


# Kernels are imported late: Mosaic takes a second, which nobody should wait for who has no such GPU.


def decode(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    A_log: jax.Array | None,
    dt_bias: jax.Array | None,
    pool: jax.Array,
    slots: jax.Array,
    *,
    scale: float,
    gate_lower_bound: float | None,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.kda.decode.kda_decode`."""
    from pallas_kernels.kda import gpu_decode

    return gpu_decode.decode(
        q,
        k,
        v,
        g,
        beta,
        A_log,
        dt_bias,
        pool,
        slots,
        front=None if A_log is None else gpu_decode.Front(gate_lower_bound),
        scale=scale,
        columns=columns_of(q.shape[0] * q.shape[1]),
    )


def conv_decode(
    x: jax.Array,
    weight: jax.Array,
    raw: jax.Array,
    beta_logits: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    tails: jax.Array,
    pool: jax.Array,
    slots: jax.Array,
    *,
    scale: float,
    gate_lower_bound: float | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `pallas_kernels.kda.decode.kda_conv_decode`; returns (o, tails, pool)."""
    from pallas_kernels.kda import gpu_decode

    return gpu_decode.conv_decode(
        x,
        weight,
        raw,
        beta_logits,
        A_log,
        dt_bias,
        tails,
        pool,
        slots,
        front=gpu_decode.Front(gate_lower_bound),
        scale=scale,
        columns=columns_of(raw.shape[0] * raw.shape[1]),
    )


def verify(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    pool: jax.Array,
    recorded: Records,
    slots: jax.Array,
    committed: jax.Array | None,
    *,
    scale: float,
) -> tuple[jax.Array, Records]:
    """See `pallas_kernels.kda.decode.kda_verify`."""
    from pallas_kernels.kda import gpu_verify

    return gpu_verify.verify(q, k, v, g, beta, pool, recorded, slots, committed, scale=scale, blocks=2 * processors())


def commit(pool: jax.Array, recorded: Records, slots: jax.Array, counts: jax.Array) -> jax.Array:
    """See `pallas_kernels.kda.decode.kda_commit`."""
    from pallas_kernels.kda import gpu_commit

    return gpu_commit.commit(pool, recorded, slots, counts, columns=columns_of(slots.shape[0] * pool.shape[1]))


class _One(NamedTuple):
    """Of one token of a row; A_log and dt_bias are None where g and beta come computed and q and k normalised."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array
    A_log: jax.Array | None
    dt_bias: jax.Array | None
    state: jax.Array | None


def one_token(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    A_log: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    *,
    initial_state: jax.Array | None,
    lengths: jax.Array | None,
    scale: float,
    gate_lower_bound: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One token of `pallas_kernels.kda.kda` or, with A_log, of `kda_from_raw`; returns (o, final_state).

    The state is written where it is if nobody needs it afterwards, and copied first if somebody does. Its gradient runs
    `xla` forward again and then backward.
    """
    one, lengths = align(_One(q, k, v, g, beta, A_log, dt_bias, initial_state), lengths)
    return _one_token(scale, gate_lower_bound, one, lengths)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _one_token(
    scale: float, gate_lower_bound: float | None, one: _One, lengths: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    from pallas_kernels.kda import gpu_decode

    batch, _, heads, width = one.q.shape
    state = one.state
    if state is None:
        state = jnp.zeros((batch, heads, width, one.v.shape[-1]), jnp.float32)
    rows = jnp.arange(batch, dtype=jnp.int32)
    o, state = gpu_decode.decode(
        one.q[:, 0],
        one.k[:, 0],
        one.v[:, 0],
        one.g[:, 0],
        one.beta[:, 0],
        one.A_log,
        one.dt_bias,
        state,
        rows if lengths is None else jnp.where(lengths > 0, rows, -1),
        front=None if one.A_log is None else gpu_decode.Front(gate_lower_bound),
        scale=scale,
        columns=columns_of(batch * heads),
    )
    return o[:, None], state


def _forward(scale: float, gate_lower_bound: float | None, one: _One, lengths: jax.Array | None) -> Any:
    return _one_token(scale, gate_lower_bound, one, lengths), (one, lengths)


def _backward(scale: float, gate_lower_bound: float | None, saved: Any, cotangents: Any) -> tuple[_One, None]:
    one, lengths = saved

    def again(one: _One) -> tuple[jax.Array, jax.Array]:
        q, k, v, g, beta, A_log, dt_bias, state = one
        if A_log is not None and dt_bias is not None:
            q, k = l2_normalize(q), l2_normalize(k)
            g, beta = gate(g, A_log, dt_bias, gate_lower_bound), jax.nn.sigmoid(beta.astype(jnp.float32))
        o, state, _ = xla.kda(
            q,
            k,
            v,
            g,
            beta,
            initial_state=state,
            lengths=lengths,
            segment_ids=None,
            num_segments=None,
            state_positions=None,
            scale=scale,
            gate_lower_bound=gate_lower_bound,
            chunk_size=None,
            chunk_scan="sequential",
        )
        return o, state

    return jax.vjp(again, one)[1](cotangents)[0], None


_one_token.defvjp(_forward, _backward)
