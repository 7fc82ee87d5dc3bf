"""KDA on slots of a pool on TPUs: which calls the kernels take."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from pallas_kernels.kda import tpu_decode, tpu_verify
from pallas_kernels.kda.tpu import LANES, WIDEST
from pallas_kernels.manual_axes import axes_left_to_xla
from pallas_kernels.target import platform

commit = tpu_verify.commit
decode = tpu_decode.decode
verify = tpu_verify.verify

MOST_TOKENS = 32


def obstacle(
    vectors: Mapping[str, Any],
    floats: Mapping[str, jax.Array | None],
    pool: jax.Array,
    *,
    named: bool,
    tokens: int = 1,
) -> str | None:
    """Why the kernels can't take a call, or None.

    Args:
        vectors: arrays in float32 or bfloat16, by name.
        floats: the arrays that are float32, by name.
        pool: of states.
        named: whether the caller asks for a TPU kernel; then it is traced where there is no TPU.
        tokens: of a window.
    """
    heads, width, values = pool.shape[1:]
    if width % LANES or values % LANES or max(width, values) > WIDEST:
        return f"there is no TPU kernel for K={width} and V={values}; both must be a multiple of {LANES}, at most {WIDEST}."
    if not tpu_decode.fits(heads, width, values):
        return f"blocks of {heads} heads of {width} x {values} states don't fit in VMEM; a multiple of 8 heads would."
    for name, x in vectors.items():
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            return f"{name} has dtype {x.dtype}; the TPU kernel takes float32 and bfloat16."
    for name, wide in floats.items():
        if wide is not None and wide.dtype != jnp.float32:
            return f"{name} has dtype {wide.dtype}; the TPU kernel computes in float32."
    if tokens > MOST_TOKENS:
        return f"the window has {tokens} tokens; the TPU kernel takes up to {MOST_TOKENS}."
    if platform() != "tpu" and not (named and isinstance(pool, Tracer)):
        return f"the TPU kernel needs a TPU, and the platform is {platform()!r}."
    return axes_left_to_xla()
