"""Pallas Mosaic GPU for Hopper: each row of the bank is read once, and no score or weight goes to memory.

A block of 128 threads takes one token after the other. Its rows (the token's banked sums, then the current one) stream
through a ring of shared-memory slots, several rows ahead and across tokens. A row is scored as it arrives and joins the
mixture with the softmax's running maximum, so no row is needed twice. Two blocks share a multiprocessor: one's sums over
threads hide behind the other's arithmetic.

With a norm the mixture is rounded to the rows' dtype and normalised before it leaves, as `kimi_jax.modules.norm` does.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.attn_res import xla
from pallas_kernels.manual_axes import axes_left_to_xla
from pallas_kernels.target import platform

COPIED = 256
"""Elements that the copy engine takes along one axis: rows are seen as [width / COPIED, COPIED]."""
_VECTOR = 8  # bfloat16 numbers that a thread reads at once
_THREADS = 128
_WIDEST = 8192  # each thread holds a row's share of the mixture, the key and a row in registers
_SHARED_BYTES = 110 * 1024  # of a block; two share a multiprocessor
_MOST_STAGES = 6
_FEWEST = 256  # tokens; at 64 XLA's three passes are as fast or faster
_BLOCKS_A_PROCESSOR = 2


def obstacle(partial: Float[Array, "B T D"], bank: Float[Array, "R B T D"], named: bool) -> str | None:
    """Why the kernel can't run for this call, or None."""
    if platform() != "gpu":
        return f"it runs on NVIDIA Hopper GPUs, and the platform is {platform()!r}."
    capability = getattr(jax.devices()[0], "compute_capability", "unknown")
    if capability != "9.0":
        return f"it is compiled for compute capability 9.0 (Hopper), and this device has {capability}."
    tokens = partial.size // partial.shape[-1]
    if tokens < _FEWEST and not named:
        return f"there are {tokens} tokens; a token's rows come one after the other, which XLA beats below {_FEWEST}."
    return axes_left_to_xla() or unfit(partial, bank)


def unfit(partial: Float[Array, "B T D"], bank: Float[Array, "R B T D"]) -> str | None:
    """Why no Hopper GPU could run this call, or None."""
    for name, x in {"partial": partial, "bank": bank}.items():
        if x.dtype != jnp.bfloat16:
            return f"{name} has dtype {x.dtype}; it takes bfloat16."
    step = _THREADS * _VECTOR
    width = partial.shape[-1]
    if width % step or width > _WIDEST:
        return f"rows are {width} wide; it takes multiples of {step} up to {_WIDEST}."
    return "the bank has no rows." if bank.shape[0] == 0 else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def attn_res(
    partial: Float[Array, "B T D"],
    bank: Float[Array, "R B T D"],
    num_rows: Int[Array, ""],
    query: Float[Array, "D"],
    norm_weight: Float[Array, "D"],
    eps: float,
) -> Float[Array, "B T D"]:
    """See `pallas_kernels.attn_res.attn_res`. Its gradient is that of `xla`."""
    return mix(partial, bank, num_rows, query, norm_weight, eps)


def _forward(
    partial: Array, bank: Array, num_rows: Array, query: Array, norm_weight: Array, eps: float
) -> tuple[Array, tuple[Array, ...]]:
    arguments = partial, bank, num_rows, query, norm_weight
    return mix(*arguments, eps), arguments


attn_res.defvjp(_forward, xla.backward)


@functools.partial(jax.jit, static_argnums=(5, 7, 8))
def mix(
    partial: Float[Array, "B T D"],
    bank: Float[Array, "R B T D"],
    num_rows: Int[Array, ""],
    query: Float[Array, "D"],
    norm_weight: Float[Array, "D"],
    eps: float,
    out_weight: Float[Array, "D"] | None = None,
    out_eps: float = 0.0,
    interpret: Any = None,
) -> Float[Array, "B T D"]:
    """The mixture, normalised and weighted by `out_weight` if there is one; `interpret` is Pallas's."""
    # Imported late: Mosaic takes a second, which nobody should wait for who has no such GPU.
    from pallas_kernels.attn_res.gpu_kernel import run

    shape, width = partial.shape, partial.shape[-1]
    tokens = partial.size // width
    folds = (width // COPIED, COPIED)
    key = (query.astype(jnp.float32) * norm_weight.astype(jnp.float32)).reshape(folds)
    weight = None if out_weight is None else out_weight.astype(partial.dtype).reshape(folds)
    processors = getattr(jax.devices()[0], "core_count", 132)
    result = run(
        partial.reshape(tokens, *folds),
        bank.reshape(bank.shape[0], tokens, *folds),
        jnp.asarray(num_rows, jnp.int32).reshape(1),
        key,
        weight,
        eps=eps,
        out_eps=out_eps,
        blocks=min(tokens, _BLOCKS_A_PROCESSOR * processors),
        stages=stages(width, bank.shape[0], partial.dtype),
        interpret=interpret,
    )
    return result.reshape(shape)


def stages(width: int, rows: int, dtype: DTypeLike) -> int:
    """Slots of the ring: at most a token's rows, as many as shared memory leaves beside the result and the weights."""
    row = width * jnp.dtype(dtype).itemsize
    return min(_MOST_STAGES, rows + 1, (_SHARED_BYTES - 2 * row) // row)
