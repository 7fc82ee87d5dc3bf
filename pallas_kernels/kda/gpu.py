"""KDA on Hopper GPUs: which calls the prefill kernels take, and their gradient."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda import xla
from pallas_kernels.kda.gate import gate, l2_normalize
from pallas_kernels.manual_axes import align, axes_left_to_xla
from pallas_kernels.target import platform

WIDTH = 128
CHUNK = 64

Gradient = Literal["xla", "kernels"]


class _How(NamedTuple):
    num_segments: int | None
    scale: float
    gate_lower_bound: float | None
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


def obstacle(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    floats: Mapping[str, jax.Array | None],
    *,
    segment_ids: jax.Array | None,
    num_segments: int | None,
    state_positions: jax.Array | None = None,
    chunk_size: int | None = None,
    chunk_scan: xla.ChunkScan | None = None,
    named: bool = False,
) -> str | None:
    """Why the kernels can't take a call of `pallas_kernels.kda.kda` or `kda_from_raw`, or None.

    `floats` are the other arrays of numbers, by name. Calls with a computed decay, "g", are taken only if `named`: that form
    has been interpreted, but hasn't run on a card yet.
    """
    if platform() != "gpu":
        return f"its kernels run on NVIDIA Hopper GPUs, and the platform is {platform()!r}."
    capability = getattr(jax.devices()[0], "compute_capability", "unknown")
    if capability != "9.0":
        return f"its kernels are compiled for compute capability 9.0 (Hopper), and this device has {capability}."
    if "g" in floats and not named:
        return (
            "the Hopper kernels haven't run on a card yet with a decay computed beforehand and have to be named for it; "
            "kda_from_raw takes them by itself."
        )
    return axes_left_to_xla() or unfit(
        q,
        k,
        v,
        floats,
        segment_ids=segment_ids,
        num_segments=num_segments,
        state_positions=state_positions,
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
    state_positions: jax.Array | None = None,
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
    if state_positions is not None:
        return "the Hopper kernels don't report states at state_positions."
    if chunk_size not in (None, CHUNK):
        return f"chunk_size is {chunk_size}; the Hopper kernels have {CHUNK}."
    if chunk_scan not in (None, "sequential"):
        return f"chunk_scan is {chunk_scan!r}; the Hopper kernels go through the chunks one after the other."
    return None


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
    gradient: Gradient = "xla",
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.kda.kda` and, with A_log, `pallas_kernels.kda.kda_from_raw`; returns (o, final_state).

    The gradient keeps the inputs alone. "xla" runs `xla` forward again and then backward; "kernels" has Hopper kernels of its
    own, which want the gate bounded from -5.5 up. They aren't the default because on a card the gradient of a slow decay came
    out with an error of 5 % that the interpreter doesn't show. `interpret` is what Pallas takes to run without a GPU.

    Raises:
        ValueError: gradient="kernels" without such a bound.
    """
    if gradient == "kernels" and not (gate_lower_bound is not None and gate_lower_bound >= xla.LOWEST_SINGLE_REFERENCE):
        raise ValueError(
            f"kda: gradient='kernels' with gate_lower_bound={gate_lower_bound}; the kernels of the gradient want a bound of "
            f"at least {xla.LOWEST_SINGLE_REFERENCE}, and gradient='xla' takes any."
        )
    how = _How(num_segments, scale, gate_lower_bound, gradient, interpret)
    arrays = _Floats(q, k, v, g, beta, A_log, dt_bias, initial_state), _Integers(lengths, segment_ids)
    return _kda(how, *align(*arrays))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kda(how: _How, floats: _Floats, integers: _Integers) -> tuple[jax.Array, jax.Array]:
    # Imported late: Mosaic takes a second, which nobody should wait for who has no such GPU.
    from pallas_kernels.kda import gpu_prefill

    result = gpu_prefill.kda(
        *floats[:-1],
        initial_state=floats.initial_state,
        **integers._asdict(),
        num_segments=how.num_segments,
        scale=how.scale,
        gate_lower_bound=how.gate_lower_bound,
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
        *cotangents,
        **integers._asdict(),
        num_segments=how.num_segments,
        scale=how.scale,
        gate_lower_bound=how.gate_lower_bound,
        interpret=how.interpret,
    )
    return align(_Floats(*found), floats)[0], None


def _again(how: _How, integers: _Integers, floats: _Floats) -> tuple[jax.Array, jax.Array]:
    """The same in plain JAX."""
    q, k, v, g, beta, A_log, dt_bias, initial_state = floats
    if A_log is not None and dt_bias is not None:
        q, k = l2_normalize(q), l2_normalize(k)
        g, beta = gate(g, A_log, dt_bias, how.gate_lower_bound), jax.nn.sigmoid(beta.astype(jnp.float32))
    o, state, _ = xla.kda(
        q,
        k,
        v,
        g,
        beta,
        initial_state=initial_state,
        **integers._asdict(),
        num_segments=how.num_segments,
        state_positions=None,
        scale=how.scale,
        gate_lower_bound=how.gate_lower_bound,
        chunk_size=None,
        chunk_scan=xla.best_chunk_scan(q.shape[0] * q.shape[2]),
    )
    return o, state


_kda.defvjp(_forward, _backward)
