"""Pallas for TPUs: a block of tokens stays in VMEM while its rows of the bank pass by, each once.

The grid is (blocks of tokens, rows); the last row is the current sum. A row is scored as it arrives and joins the mixture
with the softmax's running maximum. Rows that aren't there name the block that is there already, which isn't fetched again.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.attn_res import xla
from pallas_kernels.manual_axes import align, axes_left_to_xla
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.target import platform

LANES = 128
_SUBLANES = {2: 16, 4: 8}  # rows of a tile, by the bytes of a number
_VMEM = 10 * 2**20  # bytes of a block of tokens: its mixture, and two of each of bank, current sum and result


def obstacle(partial: Float[Array, "B T D"], bank: Float[Array, "R B T D"], named: bool) -> str | None:
    """Why the kernel can't run for this call, or None. Off a TPU it is taken for programs traced for one, or by name."""
    for name, x in {"partial": partial, "bank": bank}.items():
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            return f"{name} has dtype {x.dtype}; the TPU kernel takes float32 and bfloat16."
    if partial.dtype != bank.dtype:
        return f"partial has dtype {partial.dtype} and bank {bank.dtype}; the TPU kernel takes one dtype."
    width = partial.shape[-1]
    if width % LANES:
        return f"rows are {width} wide; the TPU kernel takes multiples of {LANES}."
    if bank.shape[0] == 0:
        return "the bank has no rows."
    if (left := axes_left_to_xla()) is not None:
        return left
    if platform() != "tpu" and not (named and isinstance(partial, Tracer)):
        return f"the TPU kernel needs a TPU, and the platform is {platform()!r}."
    return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def attn_res(
    partial: Float[Array, "B T D"],
    bank: Float[Array, "R B T D"],
    num_rows: Int[Array, ""],
    query: Float[Array, "D"],
    norm_weight: Float[Array, "D"],
    eps: float,
    interpret: Any = False,
) -> Float[Array, "B T D"]:
    """See `pallas_kernels.attn_res.attn_res`. Its gradient is that of `xla`."""
    return mix(partial, bank, num_rows, query, norm_weight, eps, interpret=interpret)


def _forward(
    partial: Array, bank: Array, num_rows: Array, query: Array, norm_weight: Array, eps: float, interpret: Any
) -> tuple[Array, tuple[Array, ...]]:
    arguments = partial, bank, num_rows, query, norm_weight
    return mix(*arguments, eps, interpret=interpret), arguments


def _backward(eps: float, interpret: Any, arguments: Any, d_result: Array) -> Any:
    del interpret
    return xla.backward(eps, arguments, d_result)


attn_res.defvjp(_forward, _backward)


@functools.partial(jax.jit, static_argnames=("eps", "out_eps", "interpret"))
def mix(
    partial: Float[Array, "B T D"],
    bank: Float[Array, "R B T D"],
    num_rows: Int[Array, ""],
    query: Float[Array, "D"],
    norm_weight: Float[Array, "D"],
    eps: float,
    out_weight: Float[Array, "D"] | None = None,
    out_eps: float = 0.0,
    interpret: Any = False,
) -> Float[Array, "B T D"]:
    """The mixture, normalised and weighted by `out_weight` if there is one; `interpret` is Pallas's."""
    shape, dtype = partial.shape, partial.dtype
    width, rows = shape[-1], bank.shape[0]
    tokens = partial.size // width
    block = _block(tokens, width, dtype.itemsize)
    key = (query.astype(jnp.float32) * norm_weight.astype(jnp.float32))[None]
    weights = [] if out_weight is None else [out_weight.astype(dtype)[None]]
    operands = align(
        jnp.asarray(num_rows, jnp.int32).reshape(1),
        key,
        partial.reshape(tokens, width),
        bank.reshape(rows, tokens, width),
        *weights,
    )
    vector = pl.BlockSpec((1, width), lambda block, row, _: (0, 0))
    once = pl.BlockSpec((block, width), lambda block, row, _: (block, 0))
    each = pl.BlockSpec(
        (None, block, width), lambda block, row, count: (jnp.clip(row, 0, jnp.maximum(count[0] - 1, 0)), block, 0)
    )
    varying = jax.typeof(operands[2]).manual_axis_type
    result = pl.pallas_call(
        functools.partial(_kernel, eps=eps, out_eps=out_eps),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(-(-tokens // block), rows + 1),
            in_specs=[vector, once, each, *(vector for _ in weights)],
            out_specs=once,
            scratch_shapes=[
                pltpu.VMEM((block, width), jnp.float32),
                pltpu.VMEM((block, LANES), jnp.float32),
                pltpu.VMEM((block, LANES), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((tokens, width), dtype, manual_axis_type=varying),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=7 * (rows + 1) * partial.size,
            transcendentals=3 * (rows + 1) * tokens,
            bytes_accessed=(rows + 2) * partial.size * dtype.itemsize,
        ),
        name="attn_res",
        interpret=interpret,
    )(*operands)
    return result.reshape(shape)


def _block(tokens: int, width: int, size: int) -> int:
    """Tokens of a block: whole tiles of them, or all."""
    tile = _SUBLANES[size]
    most = max(_VMEM // (width * (4 + 6 * size)) // tile, 1) * tile
    return tokens if tokens <= most else most


def _kernel(count: Any, key: Any, current: Any, banked: Any, *refs: Any, eps: float, out_eps: float) -> None:
    *weight, out, mixture, highest, mass = refs
    row, last = pl.program_id(1), pl.num_programs(1) - 1

    @pl.when(row == 0)
    def _() -> None:
        mixture[...] = jnp.zeros(mixture.shape, mixture.dtype)
        highest[...] = jnp.full(highest.shape, -jnp.inf, highest.dtype)
        mass[...] = jnp.zeros(mass.shape, mass.dtype)

    def add(rows: Any) -> None:
        values = rows[...].astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(values * values, axis=-1, keepdims=True) + eps)
        score = jnp.sum(values * key[...], axis=-1, keepdims=True) * scale
        before = highest[:, :1]
        above = jnp.maximum(before, score)
        kept, new = jnp.exp(before - above), jnp.exp(score - above)
        mixture[...] = mixture[...] * kept + values * new
        mass[...] = jnp.broadcast_to(mass[:, :1] * kept + new, mass.shape)
        highest[...] = jnp.broadcast_to(above, highest.shape)

    @pl.when(row < jnp.minimum(count[0], last))
    def _() -> None:
        add(banked)

    @pl.when(row == last)
    def _() -> None:
        add(current)
        result = (mixture[...] / mass[:, :1]).astype(out.dtype)
        out[...] = rms_norm(result, weight[0][...], out_eps) if weight else result
