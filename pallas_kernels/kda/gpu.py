"""KDA on Hopper GPUs: which calls the prefill kernels take, and their gradient."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda import segments as segments_by_time
from pallas_kernels.kda import xla
from pallas_kernels.kda.gate import gate, l2_normalize
from pallas_kernels.manual_axes import align, axes_left_to_xla
from pallas_kernels.target import platform

WIDTH = 128
CHUNK = 64
PROCESSORS = 132  # of an H200, where there is none to ask

Gradient = Literal["xla", "kernels"]


class _How(NamedTuple):
    num_segments: int | None
    scale: float
    gate_lower_bound: float | None
    segments: int
    gradient: Gradient
    interpret: Any


class _Floats(NamedTuple):
    """As in the call; A_log and dt_bias are None where g and beta come computed and q and k normalised."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array
    A_log: jax.Array | None
    dt_bias: jax.Array | None
    initial_state: jax.Array | None


class _Integers(NamedTuple):
    lengths: jax.Array | None
    segment_ids: jax.Array | None
    state_positions: jax.Array | None


def obstacle(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    floats: Mapping[str, jax.Array | None],
    *,
    segment_ids: jax.Array | None,
    num_segments: int | None,
    chunk_size: int | None = None,
    chunk_scan: xla.ChunkScan | None = None,
) -> str | None:
    """Why the kernels can't take a call of `pallas_kernels.kda.kda` or `kda_from_raw`, or None.

    `floats` are the other arrays of numbers, by name.
    """
    if platform() != "gpu":
        return f"its kernels run on NVIDIA Hopper GPUs, and the platform is {platform()!r}."
    capability = getattr(jax.devices()[0], "compute_capability", "unknown")
    if capability != "9.0":
        return f"its kernels are compiled for compute capability 9.0 (Hopper), and this device has {capability}."
    return axes_left_to_xla() or unfit(
        q,
        k,
        v,
        floats,
        segment_ids=segment_ids,
        num_segments=num_segments,
        chunk_size=chunk_size,
        chunk_scan=chunk_scan,
    )


def unfit(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    floats: Mapping[str, jax.Array | None],
    *,
    segment_ids: jax.Array | None,
    num_segments: int | None,
    chunk_size: int | None = None,
    chunk_scan: xla.ChunkScan | None = None,
) -> str | None:
    """Why no Hopper GPU could take this call, or None."""
    width, values = q.shape[-1], v.shape[-1]
    if (width, values) != (WIDTH, WIDTH):
        return f"there is no Hopper kernel for K={width} and V={values}; both must be {WIDTH}."
    for name, x in {"q": q, "k": k, "v": v}.items():
        if x.dtype != jnp.bfloat16:
            return f"{name} has dtype {x.dtype}; the Hopper kernels multiply bfloat16, which rounds more than that."
    for name, wide in floats.items():
        if wide is not None and jnp.promote_types(wide.dtype, jnp.float32) != jnp.float32:
            return f"{name} has dtype {wide.dtype}; the Hopper kernels compute in float32."
    if segment_ids is not None and num_segments is None:
        return "the Hopper kernels take segment_ids only with num_segments."
    if chunk_size not in (None, CHUNK):
        return f"chunk_size is {chunk_size}; the Hopper kernels have {CHUNK}."
    if chunk_scan not in (None, "sequential"):
        return f"chunk_scan is {chunk_scan!r}; the Hopper kernels go through a segment's chunks one after the other."
    return None


def best_segments(q: jax.Array, num_segments: int | None = None) -> int:
    """Into how many segments each sequence is cut if nothing else is asked for."""
    batch, length, heads, _ = q.shape
    sequences = batch * (num_segments or 1)
    processors = getattr(jax.devices()[0], "core_count", PROCESSORS)
    return segments_by_time.best(sequences, heads, -(-batch * length // (CHUNK * sequences)), processors)


def in_words(q: jax.Array, num_segments: int | None, segments: int | None) -> str:
    """How sequences will be cut, for people."""
    count = segments or best_segments(q, num_segments)
    origin = "as the caller says" if segments else "by the model of their time"
    return f"{f'{count} segments of a sequence side by side' if count > 1 else 'sequences in one segment'}, {origin}"


def gradient_obstacle(gate_lower_bound: float | None, states: bool) -> str | None:
    """Why the gradient of a call that the kernels take can't be theirs as well, or None; `states`: at state_positions."""
    if gate_lower_bound is None or gate_lower_bound < xla.LOWEST_SINGLE_REFERENCE:
        return (
            f"gate_lower_bound is {gate_lower_bound}; the kernels of the gradient want a bound of at least "
            f"{xla.LOWEST_SINGLE_REFERENCE}."
        )
    if states:
        return "the kernels of the gradient know no states at state_positions."
    return None


def gradient_unproved(gate_lower_bound: float | None, states: bool, raw: bool) -> str | None:
    """Why nobody should get the kernels' gradient who doesn't ask for it, or None; `raw`: of what a layer projects."""
    obstacle = gradient_obstacle(gate_lower_bound, states)
    if obstacle is None and not raw:
        return (
            "with decays computed beforehand the kernels of the gradient have been interpreted, and not run on a card."
        )
    return obstacle


def gradient_in_words(gate_lower_bound: float | None, states: bool, raw: bool) -> str:
    """What the gradient will be, for people."""
    obstacle = gradient_unproved(gate_lower_bound, states, raw)
    return "the gradient has kernels, too" if obstacle is None else f"the gradient is that of xla: {obstacle}"


def kda(
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
    segment_ids: jax.Array | None,
    num_segments: int | None,
    scale: float,
    gate_lower_bound: float | None,
    segments: int | None = None,
    gradient: Gradient | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """`kda_with_states` without state_positions; returns (o, final_state)."""
    return kda_with_states(
        q,
        k,
        v,
        g,
        beta,
        A_log,
        dt_bias,
        initial_state=initial_state,
        lengths=lengths,
        segment_ids=segment_ids,
        num_segments=num_segments,
        state_positions=None,
        scale=scale,
        gate_lower_bound=gate_lower_bound,
        segments=segments,
        gradient=gradient,
        interpret=interpret,
    )[:2]


def kda_with_states(
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
    segment_ids: jax.Array | None,
    num_segments: int | None,
    state_positions: jax.Array | None,
    scale: float,
    gate_lower_bound: float | None,
    segments: int | None = None,
    gradient: Gradient | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """See `pallas_kernels.kda.kda` and, with A_log, `pallas_kernels.kda.kda_from_raw`; returns (o, final_state, states).

    The gradient keeps the inputs alone. "kernels" has Hopper kernels of its own, "xla" runs `xla` forward again and then
    backward; None takes the kernels where `gradient_unproved` has nothing against them. `interpret` is what Pallas takes to
    run without a GPU.

    Raises:
        ValueError: gradient="kernels" where they can't run.
    """
    obstacle = gradient_obstacle(gate_lower_bound, state_positions is not None)
    if gradient == "kernels" and obstacle is not None:
        raise ValueError(f"kda: gradient='kernels' can't be had: {obstacle} gradient='xla' takes any.")
    if gradient is None:
        unproved = gradient_unproved(gate_lower_bound, state_positions is not None, A_log is not None)
        gradient = "kernels" if unproved is None else "xla"
    if segments is None:
        segments = best_segments(q, num_segments)
    how = _How(num_segments, scale, gate_lower_bound, segments, gradient, interpret)
    arrays = (
        _Floats(q, k, v, g, beta, A_log, dt_bias, initial_state),
        _Integers(lengths, segment_ids, state_positions),
    )
    return _kda(how, *align(*arrays))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kda(how: _How, floats: _Floats, integers: _Integers) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    # Imported late: Mosaic takes a second, which nobody should wait for who has no such GPU.
    from pallas_kernels.kda import gpu_prefill

    result = gpu_prefill.kda(
        *floats[:-1],
        initial_state=floats.initial_state,
        **integers._asdict(),
        num_segments=how.num_segments,
        scale=how.scale,
        gate_lower_bound=how.gate_lower_bound,
        segments=how.segments,
        interpret=how.interpret,
    )
    # What a kernel returns is taken for the same on all devices.
    return align(result, floats)[0]


def _forward(how: _How, floats: _Floats, integers: _Integers) -> Any:
    return _kda(how, floats, integers), (floats, integers)


def _backward(how: _How, saved: tuple[_Floats, _Integers], cotangents: Any) -> tuple[_Floats, None]:
    floats, integers = saved
    if how.gradient == "xla" or how.gate_lower_bound is None:
        return jax.vjp(partial(_again, how, integers), floats)[1](cotangents)[0], None
    from pallas_kernels.kda import gpu_backward

    found = gpu_backward.gradients(
        gpu_backward.Inputs(*floats),
        *cotangents[:2],
        lengths=integers.lengths,
        segment_ids=integers.segment_ids,
        num_segments=how.num_segments,
        scale=how.scale,
        gate_lower_bound=how.gate_lower_bound,
        interpret=how.interpret,
    )
    return align(_Floats(*found), floats)[0], None


def _again(how: _How, integers: _Integers, floats: _Floats) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The same in plain JAX."""
    q, k, v, g, beta, A_log, dt_bias, initial_state = floats
    if A_log is not None and dt_bias is not None:
        q, k = l2_normalize(q), l2_normalize(k)
        g, beta = gate(g, A_log, dt_bias, how.gate_lower_bound), jax.nn.sigmoid(beta.astype(jnp.float32))
    return xla.kda(
        q,
        k,
        v,
        g,
        beta,
        initial_state=initial_state,
        **integers._asdict(),
        num_segments=how.num_segments,
        scale=how.scale,
        gate_lower_bound=how.gate_lower_bound,
        chunk_size=None,
        chunk_scan=xla.best_chunk_scan(q.shape[0] * q.shape[2]),
    )


_kda.defvjp(_forward, _backward)
