"""Lightning indexer: scores every visible key with a few small heads and selects the best `top_k` of each query."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, always, choose
from pallas_kernels.lightning_indexer import reference, xla
from pallas_kernels.lightning_indexer.validate import check_at_least, check_indexer, check_visibility

__all__ = ["DEFAULT_BUDGET_BYTES", "index_scores", "lightning_indexer"]

DEFAULT_BUDGET_BYTES = 256 * 2**20


def lightning_indexer(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S K"],
    w: Float[Array, "B T H"],
    *,
    top_k: int,
    q_positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None = None,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    implementation: Implementation | None = None,
) -> Int[Array, "B T {top_k}"]:
    """Positions of the `top_k` keys with the largest scores, exactly.

    score(t, s) = sum_h w[t, h] * relu(q[t, h] . k[s]), in float32 or better up to the selection. Key s is visible to
    query t iff s <= q_positions[t] and, with segments, segment_ids[s] == segment_ids[t] >= 0. Equal scores (-0.0 equals
    +0.0) go to the lowest position; a NaN score loses against every other visible key. Carries no gradient.

    Args:
        q: index queries.
        k: one index key per position, shared by the heads. Keys that nobody sees may hold anything, NaN included.
        w: head weights, float32 or float64, of either sign.
        top_k: number of keys to select; it may exceed S.
        q_positions: each query's own position among the keys; -1 marks a padding row, which selects nothing.
        segment_ids: ids of packed sequences, -1 for padding; then T must equal S.
        budget_bytes: bound on working memory; queries run in blocks that respect it.
        implementation: "xla", "reference", or None for the best one.

    Returns:
        int32 positions, ascending, padded with -1 at the end where a query sees fewer than `top_k` keys.

    Raises:
        ValueError: shapes disagree, `top_k` or `budget_bytes` is below 1, or segments come with T != S.
        TypeError: a dtype is wrong.
        UnsupportedImplementationError: the named implementation can't run.

    Source: DeepSeek-V3.2 technical report, section 2.1.
    """
    operation = "lightning_indexer"
    check_indexer(operation, q, k, w)
    check_visibility(operation, q_positions, segment_ids, q.shape[0], q.shape[1], k.shape[1])
    check_at_least(operation, 1, top_k=top_k, budget_bytes=budget_bytes)
    q_positions = q_positions.astype(jnp.int32)
    if _choose(operation, implementation) == "reference":
        return reference.lightning_indexer(q, k, w, top_k=top_k, q_positions=q_positions, segment_ids=segment_ids)
    return xla.lightning_indexer(
        q, k, w, top_k=top_k, q_positions=q_positions, segment_ids=segment_ids, budget_bytes=budget_bytes
    )


def index_scores(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S K"],
    w: Float[Array, "B T H"],
    q_positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None = None,
    *,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    implementation: Implementation | None = None,
) -> Float[Array, "B T S"]:
    """All scores, float32 or better, -inf where a key is invisible: for inspection, since it keeps T x S numbers.

    Arguments and errors are those of `lightning_indexer`.
    """
    operation = "index_scores"
    check_indexer(operation, q, k, w)
    check_visibility(operation, q_positions, segment_ids, q.shape[0], q.shape[1], k.shape[1])
    check_at_least(operation, 1, budget_bytes=budget_bytes)
    q_positions = q_positions.astype(jnp.int32)
    if _choose(operation, implementation) == "reference":
        return reference.index_scores(q, k, w, q_positions=q_positions, segment_ids=segment_ids)
    return xla.index_scores(q, k, w, q_positions=q_positions, segment_ids=segment_ids, budget_bytes=budget_bytes)


def _choose(operation: str, implementation: Implementation | None) -> Implementation:
    return choose(
        operation,
        implementation,
        {
            "tpu": lambda: f"{operation} has no TPU kernel yet.",
            "gpu": lambda: f"{operation} has no GPU kernel yet.",
            "xla": always,
            "reference": always,
        },
    ).name
