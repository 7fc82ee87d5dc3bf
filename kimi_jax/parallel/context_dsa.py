"""Attention of many new tokens whose queries and keys are split over the devices of a mesh axis.

Queries stay where they are, or trade places for equal work; the rows that all heads share, latents and index keys, are
gathered: about a ninth of the hidden states' bytes in the public models. They are gathered in contiguous order, so that a
key's place among all keys is its index, and what the indexer selects needs no translation.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_jax.parallel.zigzag import AxisName, Layout, check_layout, from_zigzag, halves, to_zigzag
from pallas_kernels.dispatch import Implementation
from pallas_kernels.fp8_latent import Fp8Latent
from pallas_kernels.lightning_indexer import TwoStage
from pallas_kernels.mxfp8 import Mxfp8
from pallas_kernels.precision import at_least_float32
from pallas_kernels.sparse_mla import dense_mla, dsa_mla

Tree = TypeVar("Tree")


def gather_tokens(tree: Tree, axis: AxisName) -> Tree:
    """All devices' tokens of every array [B, T, ...] of a tree, in contiguous order; inside `jax.shard_map`.

    Whatever has tokens on its second axis can be gathered, codes and scales of quantised rows too. Gradients are summed
    over devices in float32 or better.
    """
    if jax.lax.axis_size(axis) == 1:
        return tree

    def gather(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return _all(x, axis)
        if x.dtype.itemsize > 1:
            return _gather(x, axis)
        # Codes aren't differentiated, and not every backend sends numbers of eight bits.
        return jax.lax.bitcast_convert_type(_all(jax.lax.bitcast_convert_type(x, jnp.uint8), axis), x.dtype)

    return jax.tree.map(gather, tree)


def _all(x: jax.Array, axis: AxisName) -> jax.Array:
    return jax.lax.all_gather(x, axis, axis=1, tiled=True)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather(x: jax.Array, axis: AxisName) -> jax.Array:
    return _all(x, axis)


def _gather_forward(x: jax.Array, axis: AxisName) -> tuple[jax.Array, None]:
    return _all(x, axis), None


def _gather_backward(axis: AxisName, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    wide = gradient.astype(at_least_float32(gradient))
    return (jax.lax.psum_scatter(wide, axis, scatter_dimension=1, tiled=True).astype(gradient.dtype),)


_gather.defvjp(_gather_forward, _gather_backward)


def dsa_context(
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
    segment_ids: Int[Array, "B T"] | None = None,
    scale: float,
    layout: Layout = "zigzag",
    num_keys: int | None = None,
    form: Literal["gather", "mask"] | None = None,
    two_stage: TwoStage | None = None,
    budget_bytes: int | None = None,
    return_indices: bool = False,
    implementation: Implementation | None = None,
) -> Float[Array, "B T H V"] | tuple[Float[Array, "B T H V"], Int[Array, "B T {top_k}"]]:
    """`dsa_mla` with T queries and S keys of each row on every device of `axis`; inside `jax.shard_map`.

    Device r holds the keys at places r·S to (r+1)·S - 1: its own new tokens when nothing came before them (S = T), or
    its part of a cache that new keys were written to (`write_context_keys`). Every query is on one device.

    With layout "zigzag" queries, head weights and positions travel to zigzag order, and the outputs back: a row of new
    tokens is then the same work for all devices (see `index_work`). In contiguous order the last one of c has up to
    2 - 1/c times the mean. The layout changes no result by more than rounding.

    Args:
        index_q: index queries of this device's tokens, which are consecutive.
        index_k: index keys at this device's places.
        index_w: index head weights of this device's tokens.
        q: queries, [nope | rope slot], not absorbed.
        latent: [normed latent | shared rope slot] at this device's places. Rows that nobody sees may hold anything.
        w_uk: key projection of each head.
        w_uv: value projection of each head.
        axis: mesh axis that splits queries and keys; of any size.
        top_k: number of keys a query attends at most.
        q_positions: each query's own place among all keys; -1 for padding, whose output is 0.
        segment_ids: this device's part of the ids of packed sequences, -1 for padding; then the keys are those of the
            same tokens (S = T). None: every row is one sequence.
        scale: multiplies the scores, (N + R) ** -0.5 in the Kimi models.
        layout: order in which the queries run.
        num_keys: places from this one on are seen by nobody, and cost nothing. None: all may be seen.
        form: of `dsa_mla`.
        two_stage: of `dsa_mla`.
        budget_bytes: bound on working memory of `dsa_mla`; the gathered rows come on top.
        return_indices: also return the selection, as places among all keys.
        implementation: of `dsa_mla`; None takes the best that can run.

    Returns:
        Outputs of this device's tokens in the dtype of `q`; with `return_indices` also int32 places, ascending, padded
        with -1.

    Raises:
        ValueError: sizes that don't fit, a number out of range, or an odd T with zigzag order.
        TypeError: a dtype is wrong.
        UnsupportedImplementationError: the implementation named can't run.
    """
    _check_segments("dsa_context", segment_ids, q, latent)
    keys, latents, key_segments = _first_places(gather_tokens((index_k, latent, segment_ids), axis), num_keys)

    def attend(queries: tuple[Any, ...]) -> Any:
        index_q, index_w, q, positions, segments = queries
        return dsa_mla(
            index_q,
            keys,
            index_w,
            q,
            latents,
            w_uk,
            w_uv,
            top_k=top_k,
            q_positions=positions,
            segment_ids=segments,
            key_segment_ids=key_segments,
            scale=scale,
            form=form,
            two_stage=two_stage,
            budget_bytes=budget_bytes,
            return_indices=return_indices,
            implementation=implementation,
        )

    return _in_layout(attend, (index_q, index_w, q, q_positions, segment_ids), axis, layout)


def dense_context(
    q: Float[Array, "B T H NR"],
    latent: Float[Array, "B S LR"] | Fp8Latent,
    w_uk: Float[Array, "H N L"],
    w_uv: Float[Array, "H V L"],
    *,
    axis: AxisName,
    q_positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None = None,
    scale: float,
    layout: Layout = "zigzag",
    num_keys: int | None = None,
    budget_bytes: int | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T H V"]:
    """`dense_mla` with T queries and S keys of each row on every device of `axis`; inside `jax.shard_map`.

    Arguments, layouts and errors are those of `dsa_context`.
    """
    _check_segments("dense_context", segment_ids, q, latent)
    latents, key_segments = _first_places(gather_tokens((latent, segment_ids), axis), num_keys)

    def attend(queries: tuple[Any, ...]) -> jax.Array:
        q, positions, segments = queries
        return dense_mla(
            q,
            latents,
            w_uk,
            w_uv,
            q_positions=positions,
            segment_ids=segments,
            key_segment_ids=key_segments,
            scale=scale,
            budget_bytes=budget_bytes,
            implementation=implementation,
        )

    return _in_layout(attend, (q, q_positions, segment_ids), axis, layout)


def _in_layout(attend: Callable[[Tree], Any], queries: Tree, axis: AxisName, layout: Layout) -> Any:
    check_layout(layout)
    if layout == "contiguous" or jax.lax.axis_size(axis) == 1:
        return attend(queries)
    # The halves run apart: a block with queries of both would go through all the keys that the late ones see.
    early, late = (attend(half) for half in halves(to_zigzag(queries, axis)))
    return from_zigzag(jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), early, late), axis)


def _check_segments(operation: str, segment_ids: jax.Array | None, q: jax.Array, latent: jax.Array | Fp8Latent) -> None:
    if segment_ids is not None and q.shape[1] != latent.shape[1]:
        raise ValueError(
            f"{operation}: segment_ids were given with {q.shape[1]} queries and {latent.shape[1]} keys on each device; "
            "packed sequences need the keys of the same tokens."
        )


def _first_places(tree: Tree, num_keys: int | None) -> Tree:
    if num_keys is not None and num_keys < 1:
        raise ValueError(f"num_keys={num_keys}; it must be at least 1, or None for all places.")
    return tree if num_keys is None else jax.tree.map(lambda x: x[:, :num_keys], tree)
