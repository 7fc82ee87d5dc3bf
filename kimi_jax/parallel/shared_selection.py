"""Sparse attention of devices that split the heads: the keys that queries attend are selected by one device a query.

The indexer has no heads to split: every query's keys are the same for all heads of the attention. Devices of `tensor`
would all read all index keys; here each selects for its part of the rows, or of the tokens of a row, and positions travel.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_jax.parallel.zigzag import AxisName
from pallas_kernels.dispatch import Implementation
from pallas_kernels.fp8_latent import Fp8Latent
from pallas_kernels.lightning_indexer import lightning_indexer
from pallas_kernels.mxfp8 import Mxfp8
from pallas_kernels.sparse_mla import sparse_mla
from pallas_kernels.sparse_mla.absorbed import absorb, expand

SHARED_FROM = 2**26
"""Elements of keys that queries see, K each, from which half of the selection takes longer than starting a collective does:
at 4 TB/s reading half of them takes 16 µs."""

MOST_QUERIES = 8192
"""Queries whose selections and absorbed forms exist at once."""

PAGE = 32
"""What a row of keys has to be a multiple of, for kernels to take it as a page."""


def split_of(batch: int, tokens: int, keys: int, devices: int) -> int | None:
    """Which dimension of [B, T] devices split: rows where these divide and are pages, else tokens; None: neither divides."""
    if batch and batch % devices == 0 and keys % PAGE == 0:
        return 0
    return 1 if tokens and tokens % devices == 0 else None


def shares_selection(batch: int, tokens: int, keys: int, width: int, *, devices: int, top_k: int) -> bool:
    """Whether so many devices should share the selection among `keys` keys of that width, for so many tokens of each row."""
    if devices == 1 or keys <= top_k or batch * tokens > MOST_QUERIES:
        return False
    return split_of(batch, tokens, keys, devices) is not None and batch * tokens * keys * width >= SHARED_FROM


def dsa_shared(
    index_q: Float[Array, "B T HI KI"] | Mxfp8,
    index_k: Float[Array, "B S KI"] | Mxfp8,
    index_w: Float[Array, "B T HI"],
    q: Float[Array, "B T H NR"],
    latent: Float[Array, "B S LR"] | Fp8Latent,
    w_uk: Float[Array, "H N L"],
    w_uv: Float[Array, "H V L"],
    *,
    axis: AxisName,
    top_k: int,
    q_positions: Int[Array, "B T"],
    scale: float,
    return_indices: bool = False,
    implementation: Implementation | None = None,
) -> Float[Array, "B T H V"] | tuple[Float[Array, "B T H V"], Int[Array, "B T C"]]:
    """`dsa_mla` of this device's heads, with a selection that the devices of `axis` share; not differentiable.

    Rows are split where their number divides, and a device reads only its rows' keys; else the tokens of each row are, dealt
    out one by one, since later ones see more keys. 4 · top_k bytes a query travel.

    Args:
        index_q: index queries, the same on all devices of `axis`, as are all operands but the heads'.
        index_k: index keys.
        index_w: index head weights.
        q: queries of this device's heads, [nope | rope slot], not absorbed.
        latent: [normed latent | shared rope slot].
        w_uk: key projection of each of these heads.
        w_uv: value projection of each.
        axis: mesh axis that splits the heads; divides B, where S is a multiple of `PAGE`, or T.
        top_k: number of keys a query attends at most.
        q_positions: each query's own place among the keys; -1 for padding, whose output is 0.
        scale: multiplies the scores.
        return_indices: also return the selection.
        implementation: of the attention, and of the selection unless it is a kernel's, as in `dsa_mla`; None takes the
            best that can run.

    Returns:
        The output of these heads in the dtype of `q`; with `return_indices` also int32 positions, ascending, padded with -1.

    Raises:
        ValueError: shapes disagree, a number is out of range, or the devices divide neither rows nor tokens.
        TypeError: a dtype is wrong.
        UnsupportedImplementationError: the implementation named can't run.
    """
    devices, rank = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    (batch, tokens), num_keys = q.shape[:2], index_k.shape[1]
    dimension = split_of(batch, tokens, num_keys, devices)
    if dimension is None:
        raise ValueError(
            f"dsa_shared: {devices} devices of axis {axis!r} divide neither B={batch} rows, of S={num_keys} keys, nor T={tokens} "
            f"tokens; one of them must be a multiple, rows with keys that are a multiple of {PAGE}."
        )
    rows = batch // devices if dimension == 0 else batch

    def mine(x: Array) -> Array:
        if dimension == 0:
            return jax.lax.dynamic_slice_in_dim(x, rank * rows, rows)
        dealt = x.reshape(batch, tokens // devices, devices, *x.shape[2:])
        return jax.lax.dynamic_index_in_dim(dealt, rank, axis=2, keepdims=False)

    # A row is a page: a slice of the cache would be a copy.
    pages = rank * rows + jnp.arange(rows, dtype=jnp.int32)
    selected = lightning_indexer(
        jax.tree.map(mine, index_q),
        index_k,
        mine(index_w),
        page_table=pages[:, None] if dimension == 0 else None,
        top_k=top_k,
        q_positions=mine(q_positions),
        implementation=None if implementation in ("gpu", "tpu") else implementation,
    )
    if dimension == 0:
        indices = jax.lax.all_gather(selected, axis, tiled=True)
    else:
        indices = jax.lax.all_gather(selected, axis, axis=2).reshape(batch, tokens, -1)
    out, _ = sparse_mla(
        absorb(q, w_uk),
        latent,
        indices,
        latent_width=w_uk.shape[2],
        scale=scale,
        implementation=implementation,
    )
    out = expand(out, w_uv, q.dtype)
    return (out, indices) if return_indices else out
