"""Plain JAX: two passes over the bank forward (scores, mixture) and three backward, without joining bank and partial.

Rows past `num_rows` are read but masked by selection, never by multiplication: they may hold NaN.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.precision import at_least_float32, einsum

# A CPU doesn't fuse the conversion to float32 into a reduction: it would hold a float32 copy of all of the bank, so a
# bank of more elements than this goes row by row there.
LARGEST_BANK_AT_ONCE_ON_CPU = 1 << 22


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def attn_res(
    partial: Float[Array, "B T D"],
    bank: Float[Array, "R B T D"],
    num_rows: Int[Array, ""],
    query: Float[Array, "D"],
    norm_weight: Float[Array, "D"],
    eps: float,
) -> Float[Array, "B T D"]:
    """See `pallas_kernels.attn_res.attn_res`."""
    dtype = at_least_float32(partial, bank, query, norm_weight)
    key = query.astype(dtype) * norm_weight.astype(dtype)

    def score(rows: Array) -> Array:
        return _score(rows.astype(dtype), key, eps)[0]

    weights = _softmax(_over_rows(score, bank), score(partial), _is_there(bank, num_rows))
    result = weights[-1][..., None] * partial.astype(dtype)
    return jax.lax.platform_dependent(
        result, weights, bank, num_rows, cpu=_add_rows_one_by_one, default=_add_rows_at_once
    ).astype(partial.dtype)


def _add_rows_at_once(
    result: Float[Array, "B T D"], weights: Float[Array, "W B T"], bank: Float[Array, "R B T D"], num_rows: Array
) -> Float[Array, "B T D"]:
    terms = weights[:-1, ..., None] * bank.astype(result.dtype)
    return result + jnp.sum(jnp.where(_is_there(bank, num_rows)[..., None], terms, 0), axis=0)


def _add_rows_one_by_one(
    result: Float[Array, "B T D"], weights: Float[Array, "W B T"], bank: Float[Array, "R B T D"], num_rows: Array
) -> Float[Array, "B T D"]:
    """For CPUs: XLA of jaxlib 0.10 is a hundred times slower there at a sum over a leading axis."""

    def add(row: Array, result: Array) -> Array:
        tied, row = jax.lax.optimization_barrier((bank, row))
        values = jax.lax.dynamic_index_in_dim(tied, row, keepdims=False).astype(result.dtype)
        return result + jax.lax.dynamic_index_in_dim(weights, row, keepdims=False)[..., None] * values

    return jax.lax.fori_loop(0, num_rows, add, result)


def _forward(
    partial: Array, bank: Array, num_rows: Array, query: Array, norm_weight: Array, eps: float
) -> tuple[Array, tuple[Array, Array, Array, Array, Array]]:
    # The arguments alone are kept: everything else costs one pass over the bank that the backward makes anyway.
    return attn_res(partial, bank, num_rows, query, norm_weight, eps), (partial, bank, num_rows, query, norm_weight)


def backward(
    eps: float, arguments: tuple[Array, Array, Array, Array, Array], d_result: Array
) -> tuple[Array, Array, None, Array, Array]:
    """Gradients of result = Σ_r w_r v_r, w = softmax(s), s_r = ρ_r v_r·key, ρ_r = (mean v_r² + eps)^(−1/2).

    ds_r = w_r (d_result·v_r − Σ_k w_k d_result·v_k)
    dv_r = w_r d_result + ds_r ρ_r key − (ds_r s_r ρ_r² / D) v_r
    dkey = Σ_r ds_r ρ_r v_r, over all tokens
    """
    partial, bank, num_rows, query, norm_weight = arguments
    dtype = at_least_float32(partial, bank, query, norm_weight)
    key = query.astype(dtype) * norm_weight.astype(dtype)
    d_result = d_result.astype(dtype)

    def statistics(rows: Array) -> tuple[Array, Array, Array]:
        rows = rows.astype(dtype)
        return *_score(rows, key, eps), einsum("...btd,btd->...bt", rows, d_result)

    there = _is_there(bank, num_rows)
    of_bank, of_partial = _over_rows(statistics, bank), statistics(partial)
    weights = _softmax(of_bank[0], of_partial[0], there)
    # Statistics of a row that isn't there are replaced, since w_r = 0 doesn't remove a NaN from a product.
    scores, rho, d_weights = (
        jnp.concatenate([jnp.where(there, first, 0), last[None]])
        for first, last in zip(of_bank, of_partial, strict=True)
    )
    d_scores = weights * (d_weights - jnp.sum(weights * d_weights, axis=0))
    on_key = d_scores * rho
    on_row = -d_scores * scores * rho**2 / partial.shape[-1]

    def d_row(rows: Array, weight: Array, on_key: Array, on_row: Array) -> Array:
        return weight[..., None] * d_result + on_key[..., None] * key + on_row[..., None] * rows.astype(dtype)

    def d_key(rows: Array, on_key: Array) -> Array:
        return einsum("...bt,...btd->...d", on_key, rows.astype(dtype))

    d_partial = d_row(partial, weights[-1], on_key[-1], on_row[-1]).astype(partial.dtype)
    d_bank = d_row(bank, weights[:-1], on_key[:-1], on_row[:-1])
    d_bank = jnp.where(there[..., None], d_bank, 0).astype(bank.dtype)
    of_bank = jnp.where(there[:, :, 0], _over_rows(d_key, bank, on_key[:-1]), 0)
    d_key_total = jnp.sum(of_bank, axis=0) + d_key(partial, on_key[-1])
    d_query = (d_key_total * norm_weight).astype(query.dtype)
    d_norm_weight = (d_key_total * query).astype(norm_weight.dtype)
    return d_partial, d_bank, None, d_query, d_norm_weight


attn_res.defvjp(_forward, backward)


def _score(
    rows: Float[Array, "... D"], key: Float[Array, "D"], eps: float
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """The scores and ρ. Products go through einsum, which a CPU does faster than a multiplication and a sum."""
    rho = jax.lax.rsqrt(jnp.sum(rows * rows, axis=-1) / rows.shape[-1] + eps)
    return einsum("...d,d->...", rows, key) * rho, rho


def _is_there(bank: Float[Array, "R B T D"], num_rows: Int[Array, ""]) -> Bool[Array, "R 1 1"]:
    return (jnp.arange(bank.shape[0]) < num_rows)[:, None, None]


def _softmax(
    bank: Float[Array, "R B T"], partial: Float[Array, "B T"], there: Bool[Array, "R 1 1"]
) -> Float[Array, "R+1 B T"]:
    scores = jnp.concatenate([jnp.where(there, bank, -jnp.inf), partial[None]])
    return jax.nn.softmax(scores, axis=0)


def _over_rows(function: Callable[..., Any], *arrays: Array) -> Any:
    """function(*arrays), which treats a leading axis of rows as a batch: all rows at once, or on CPU one by one."""
    if arrays[0].size <= LARGEST_BANK_AT_ONCE_ON_CPU:
        return function(*arrays)

    def one_by_one(*arrays: Array) -> Any:
        def of_row(row: Array) -> Any:
            # Tied to the trip, or XLA:CPU of jaxlib 0.10 hoists a float32 copy of a bfloat16 bank out of the loop.
            tied, row = jax.lax.optimization_barrier((arrays, row))
            return function(*(jax.lax.dynamic_index_in_dim(array, row, keepdims=False) for array in tied))

        return jax.lax.map(of_row, jnp.arange(arrays[0].shape[0]))

    return jax.lax.platform_dependent(*arrays, cpu=one_by_one, default=function)
