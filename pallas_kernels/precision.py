"""One place that decides in which precision a contraction runs."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def at_least_float32(*values: jax.Array | DTypeLike) -> jnp.dtype:
    """The dtype for arithmetic that the models require in float32: float32, or float64 where an operand is float64."""
    return jnp.promote_types(jnp.result_type(*values), jnp.float32)


def einsum(spec: str, *operands: jax.Array, out: DTypeLike | None = None) -> jax.Array:
    """`jnp.einsum` that accumulates in float32 or better.

    float32 operands are multiplied in full float32 (accelerators would otherwise round them to tf32 or bfloat16);
    bfloat16 operands are multiplied as they are.

    Args:
        spec: subscripts.
        *operands: arrays, promoted to a common dtype.
        out: dtype of the result; None keeps the accumulator's.
    """
    common = jnp.result_type(*operands)
    precision = jax.lax.Precision.HIGHEST if jnp.finfo(common).bits >= 32 else None
    accumulator = at_least_float32(common)
    result = jnp.einsum(
        spec, *(x.astype(common) for x in operands), precision=precision, preferred_element_type=accumulator
    )
    return result if out is None else result.astype(out)
