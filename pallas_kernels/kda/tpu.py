"""KDA on TPUs: which calls the kernels take, which kernel takes them, and their gradient."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from pallas_kernels.kda import tpu_backward, tpu_decode, tpu_prefill, xla
from pallas_kernels.manual_axes import align, axes_left_to_xla
from pallas_kernels.target import platform

LANES = 128
WIDEST = 256  # the states of a block of heads, twice coming and twice going, share VMEM with the tokens


class _How(NamedTuple):
    num_segments: int | None
    scale: float
    gate_lower_bound: float | None
    chunk_size: int | None
    segments: int
    interpret: Any


class _Floats(NamedTuple):
    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array
    initial_state: jax.Array | None


class _Integers(NamedTuple):
    lengths: jax.Array | None
    segment_ids: jax.Array | None
    state_positions: jax.Array | None


def obstacle(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    initial_state: jax.Array | None,
    chunk_size: int | None,
    chunk_scan: xla.ChunkScan | None,
    named: bool,
) -> str | None:
    """Why the kernels can't take a call of `pallas_kernels.kda.kda`, or None.

    Where there is no TPU they are taken for programs that are traced for one (`pallas_kernels.target`), or by name under
    any trace.
    """
    width, values = q.shape[-1], v.shape[-1]
    if width % LANES or values % LANES or max(width, values) > WIDEST:
        return f"there is no TPU kernel for K={width} and V={values}; both must be a multiple of {LANES}, at most {WIDEST}."
    for name, x in {"q": q, "k": k, "v": v}.items():
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            return f"{name} has dtype {x.dtype}; the TPU kernel takes float32 and bfloat16."
    for name, wide in {"g": g, "beta": beta, "initial_state": initial_state}.items():
        if wide is not None and jnp.promote_types(wide.dtype, jnp.float32) != jnp.float32:
            return f"{name} has dtype {wide.dtype}; the TPU kernel computes in float32."
    if chunk_size not in (None, *tpu_prefill.CHUNKS):
        return f"chunk_size is {chunk_size}; the TPU kernel has {', '.join(map(str, tpu_prefill.CHUNKS))}."
    if chunk_scan not in (None, "sequential"):
        return f"chunk_scan is {chunk_scan!r}; the TPU kernel goes through a segment's chunks one after the other."
    if (left := axes_left_to_xla()) is not None:
        return left
    if platform() != "tpu" and not (named and isinstance(q, Tracer)):
        return f"the TPU kernel needs a TPU, and the platform is {platform()!r}."
    return None


def kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    initial_state: jax.Array | None,
    lengths: jax.Array | None,
    segment_ids: jax.Array | None,
    num_segments: int | None,
    scale: float,
    gate_lower_bound: float | None,
    chunk_size: int | None,
    state_positions: jax.Array | None = None,
    segments: int = 1,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """See `pallas_kernels.kda.kda`; returns (o, final_state, states). `interpret` is Pallas's, for tests.

    Its gradient is a kernel's (`tpu_backward`); with segments, or with states at positions, `xla` runs forward again and
    then backward.
    """
    how = _How(num_segments, scale, gate_lower_bound, chunk_size, segments, interpret)
    # Outside of the rule for gradients, so that devices' gradients of what they share are added up by JAX.
    floats = _Floats(*align(q, k, v, g, beta, initial_state))
    return _kda(how, floats, _Integers(lengths, segment_ids, state_positions))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kda(how: _How, floats: _Floats, integers: _Integers) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    q, k, v, g, beta, state = floats
    heads, width, values = q.shape[2], q.shape[3], v.shape[3]
    whole = integers.segment_ids is None and integers.state_positions is None
    if q.shape[1] == 1 and whole and tpu_decode.fits(heads, width, values):
        valid = None if integers.lengths is None else integers.lengths > 0
        if state is None:
            state = jnp.zeros((q.shape[0], heads, width, values), jnp.float32)
        q, k, v, g, beta = (x[:, 0] for x in (q, k, v, g, beta))
        o, state = tpu_decode.one_token(q, k, v, g, beta, state, valid, scale=how.scale, interpret=how.interpret)
        return o[:, None], state, None
    return tpu_prefill.kda(q, k, v, g, beta, initial_state=state, **integers._asdict(), **how._asdict())


def _forward(how: _How, floats: _Floats, integers: _Integers) -> Any:
    return _kda(how, floats, integers), (floats, integers)


def _backward(how: _How, saved: tuple[_Floats, _Integers], cotangents: Any) -> tuple[_Floats, None]:
    floats, integers = saved
    if how.segments == 1 and integers.state_positions is None:
        given = {name: x for name, x in integers._asdict().items() if name != "state_positions"}
        options = {name: x for name, x in how._asdict().items() if name != "segments"}
        state = floats.initial_state
        found = tpu_backward.gradients(*floats[:5], *cotangents[:2], initial_state=state, **given, **options)
        d_state = None if state is None else found.initial_state.reshape(state.shape).astype(state.dtype)
        return _Floats(found.q, found.k, found.v, found.g, found.beta, d_state), None

    def again(floats: _Floats) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        return xla.kda(
            **floats._asdict(),
            **integers._asdict(),
            num_segments=how.num_segments,
            scale=how.scale,
            gate_lower_bound=how.gate_lower_bound,
            chunk_size=how.chunk_size,
            chunk_scan="sequential",
        )

    return jax.vjp(again, floats)[1](cotangents)[0], None


_kda.defvjp(_forward, _backward)
