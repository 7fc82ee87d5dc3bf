"""Lightning indexer: scores every visible key with a few small heads and selects the best `top_k` of each query."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt8

from pallas_kernels.dispatch import Implementation, always, choose
from pallas_kernels.lightning_indexer import gpu, reference, tpu, tpu_two_stage, xla
from pallas_kernels.lightning_indexer.pages import PagedKeys, last_held, paged_keys
from pallas_kernels.lightning_indexer.select import select
from pallas_kernels.lightning_indexer.two_stage import TwoStage, recall
from pallas_kernels.lightning_indexer.two_stage import index_candidates as two_stage_candidates
from pallas_kernels.lightning_indexer.validate import check_at_least, check_indexer, check_visibility
from pallas_kernels.mxfp8 import Mxfp8

__all__ = [
    "DEFAULT_BUDGET_BYTES",
    "Candidates",
    "TwoStage",
    "best_candidates",
    "index_candidates",
    "index_scores",
    "lightning_indexer",
    "recall",
    "two_stage_recall",
]

DEFAULT_BUDGET_BYTES = 64 * 2**20


class Candidates(NamedTuple):
    """The best keys of one part of the keys, with what it takes to compare them with those of other parts.

    Attributes:
        indices: [B, T, top_k] int32 positions in that part, ascending, padded with -1 at the end.
        scores: [B, T, top_k] their scores, float32 or better, never NaN: a visible key's NaN or -inf is the lowest
            finite number. -inf at the padding.
    """

    indices: Int[Array, "B T C"]
    scores: Float[Array, "B T C"]


def lightning_indexer(
    q: Float[Array, "B T H K"] | Mxfp8,
    k: Float[Array, "_ _ K"] | Mxfp8 | UInt8[Array, "P bytes"],
    w: Float[Array, "B T H"],
    *,
    top_k: int,
    q_positions: Int[Array, "B T"],
    page_table: Int[Array, "B N"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    key_segment_ids: Int[Array, "B S"] | None = None,
    two_stage: TwoStage | None = None,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    implementation: Implementation | None = None,
) -> Int[Array, "B T {top_k}"]:
    """Positions of the `top_k` keys with the largest scores, exactly.

    score(t, s) = sum_h w[t, h] * relu(q[t, h] . k[s]), in float32 or better up to the selection. Key s is visible to
    query t iff s <= q_positions[t] and, with segments, key_segment_ids[s] == segment_ids[t] >= 0. Equal scores (-0.0 equals
    +0.0) go to the lowest position; a NaN score loses against every other visible key. Carries no gradient.

    Args:
        q: index queries, also in MXFP8.
        k: [B, S, K], one index key per position, shared by the heads, also in MXFP8; with a page table [P, page, K], or
            MXFP8 as the bytes of `mxfp8.to_page`. Keys that nobody sees may hold anything, NaN included.
        w: head weights, float32 or float64, of either sign.
        top_k: number of keys to select; it may exceed S.
        q_positions: each query's own position among the keys; -1 marks a padding row, which selects nothing.
        page_table: pages of each sequence in a pool that all share: position s of sequence b is row s mod page of page
            page_table[b, floor(s / page)], so S = N * page. A sequence ends before its first number that is no page.
        segment_ids: ids of the queries' packed sequences, -1 for padding; without key_segment_ids T must equal S.
        key_segment_ids: those of the keys, where queries are only some of the tokens. None: the same.
        two_stage: score only the keys of promising blocks, and but for coarse="bound" miss some that belong (see
            `TwoStage`, `two_stage_recall`). None: all keys.
        budget_bytes: bound on working memory; queries run in blocks that respect it.
        implementation: "tpu", "gpu" (NVIDIA Hopper), "xla", "reference", or None for the best one. "gpu" takes no notice
            of the budget: up to 1048576 keys a row it needs at most 61 MiB, and padded copies of q and k where T or S isn't a
            multiple of 8. "tpu" needs none of it: scores stay on the chip. Both read pages where they lie.

    Returns:
        int32 positions in the sequence, ascending, padded with -1 at the end where a query sees fewer than `top_k` keys.

    Raises:
        ValueError: shapes disagree, `top_k` or `budget_bytes` is below 1, segments that name both come with T != S,
            or two stages with pages.
        TypeError: a dtype is wrong.
        UnsupportedImplementationError: the named implementation can't run.

    Source: DeepSeek-V3.2 technical report, section 2.1.
    """
    operation = "lightning_indexer"
    check_indexer(operation, q, k if page_table is None else None, w)
    keys: Any = k if page_table is None else paged_keys(operation, q, k, page_table)
    check_visibility(operation, q_positions, segment_ids, q.shape[0], q.shape[1], keys.shape[1], key_segment_ids)
    key_segment_ids = segment_ids if key_segment_ids is None else key_segment_ids
    check_at_least(operation, 1, top_k=top_k, budget_bytes=budget_bytes)
    q_positions = q_positions.astype(jnp.int32)
    if isinstance(keys, PagedKeys) and two_stage is not None:
        raise ValueError(f"{operation}: two_stage with a page_table; its first stage takes keys [B, S, K] only.")
    two_stage = _useful(two_stage, keys, top_k)

    def tpu_obstacle() -> str | None:
        obstacle = tpu.obstacle(q, keys, w, top_k, named=implementation is not None)
        return obstacle or (None if two_stage is None else tpu_two_stage.unfit(keys, two_stage, top_k))

    def gpu_obstacle() -> str | None:
        obstacle = gpu.obstacle(q, keys, w, top_k, segment_ids is not None)
        if two_stage is not None:
            obstacle = obstacle or gpu.unfit_stages(two_stage)
        return obstacle or (gpu.unproved(q, keys, top_k, two_stage) if implementation is None else None)

    notes: dict[Implementation, Callable[[], str | None]] = {"gpu": lambda: gpu.single_stage(q, keys, two_stage)}
    chosen = _choose(operation, implementation, gpu_obstacle, two_stage, tpu_obstacle, notes)
    if isinstance(keys, PagedKeys):
        q_positions = jnp.minimum(q_positions, last_held(keys))
    if chosen == "gpu":
        return gpu.lightning_indexer(q, keys, w, top_k=top_k, q_positions=q_positions, two_stage=two_stage)
    if chosen == "tpu" and two_stage is not None:
        return tpu_two_stage.lightning_indexer(
            q,
            k,
            w,
            top_k=top_k,
            q_positions=q_positions,
            segment_ids=segment_ids,
            key_segment_ids=key_segment_ids,
            two_stage=two_stage,
            budget_bytes=budget_bytes,
        )
    if two_stage is not None:
        return two_stage_candidates(
            q,
            keys,
            w,
            top_k=top_k,
            q_positions=q_positions,
            segment_ids=segment_ids,
            key_segment_ids=key_segment_ids,
            budget_bytes=budget_bytes,
            settings=two_stage,
        )[0]
    if chosen == "tpu":
        return tpu.lightning_indexer(
            q,
            keys,
            w,
            top_k=top_k,
            q_positions=q_positions,
            segment_ids=segment_ids,
            key_segment_ids=key_segment_ids,
        )
    if chosen == "reference":
        return reference.lightning_indexer(
            q,
            keys,
            w,
            top_k=top_k,
            q_positions=q_positions,
            segment_ids=segment_ids,
            key_segment_ids=key_segment_ids,
        )
    return xla.lightning_indexer(
        q,
        keys,
        w,
        top_k=top_k,
        q_positions=q_positions,
        segment_ids=segment_ids,
        key_segment_ids=key_segment_ids,
        budget_bytes=budget_bytes,
    )


def index_candidates(
    q: Float[Array, "B T H K"] | Mxfp8,
    k: Float[Array, "B S K"] | Mxfp8,
    w: Float[Array, "B T H"],
    *,
    top_k: int,
    q_positions: Int[Array, "B T"],
    two_stage: TwoStage | None = None,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    implementation: Implementation | None = None,
) -> Candidates:
    """`lightning_indexer` that also returns the scores of what it selects, for keys that are spread over devices.

    A key among the best `top_k` of all is among the best `top_k` of its part, so `best_candidates` of the joined parts
    are the exact selection. Arguments and errors are those of `lightning_indexer`.
    """
    operation = "index_candidates"
    check_indexer(operation, q, k, w)
    check_visibility(operation, q_positions, None, q.shape[0], q.shape[1], k.shape[1])
    check_at_least(operation, 1, top_k=top_k, budget_bytes=budget_bytes)
    q_positions = q_positions.astype(jnp.int32)
    two_stage = _useful(two_stage, k, top_k)
    chosen = _choose(operation, implementation, None, two_stage)
    if two_stage is not None:
        found = two_stage_candidates(
            q,
            k,
            w,
            top_k=top_k,
            q_positions=q_positions,
            segment_ids=None,
            key_segment_ids=None,
            budget_bytes=budget_bytes,
            settings=two_stage,
        )
        return Candidates(*found)
    if chosen == "reference":
        return Candidates(*reference.index_candidates(q, k, w, top_k=top_k, q_positions=q_positions))
    return Candidates(*xla.index_candidates(q, k, w, top_k=top_k, q_positions=q_positions, budget_bytes=budget_bytes))


def best_candidates(scores: Float[Array, "B T C"], *, top_k: int) -> Bool[Array, "B T C"]:
    """Which candidates of each query are among its `top_k` best; equal scores (-0.0 equals +0.0) go to the first one.

    Args:
        scores: of the candidates in ascending order of their positions, without NaN; -inf where there is none, which is
            never among the best.
        top_k: how many to keep at most.

    Raises:
        ValueError: `top_k` is below 1.
    """
    check_at_least("best_candidates", 1, top_k=top_k)
    return select(jax.lax.stop_gradient(scores), top_k).tile(jnp.int32(0), scores.shape[-1])


def two_stage_recall(
    q: Float[Array, "B T H K"] | Mxfp8,
    k: Float[Array, "B S K"] | Mxfp8,
    w: Float[Array, "B T H"],
    *,
    top_k: int,
    q_positions: Int[Array, "B T"],
    two_stage: TwoStage,
    segment_ids: Int[Array, "B T"] | None = None,
    key_segment_ids: Int[Array, "B S"] | None = None,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    implementation: Implementation | None = None,
) -> Float[Array, "B T"]:
    """The part of each query's exact selection that two stages find, |found ∩ exact| / |exact|; 1 if it sees no key.

    Arguments and errors are those of `lightning_indexer`, which runs twice.
    """

    def selected(stage: TwoStage | None) -> jax.Array:
        return lightning_indexer(
            q,
            k,
            w,
            top_k=top_k,
            q_positions=q_positions,
            segment_ids=segment_ids,
            key_segment_ids=key_segment_ids,
            two_stage=stage,
            budget_bytes=budget_bytes,
            implementation=implementation,
        )

    return recall(selected(two_stage), selected(None))


def index_scores(
    q: Float[Array, "B T H K"] | Mxfp8,
    k: Float[Array, "B S K"] | Mxfp8,
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
        return reference.index_scores(
            q, k, w, q_positions=q_positions, segment_ids=segment_ids, key_segment_ids=segment_ids
        )
    return xla.index_scores(
        q,
        k,
        w,
        q_positions=q_positions,
        segment_ids=segment_ids,
        key_segment_ids=segment_ids,
        budget_bytes=budget_bytes,
    )


def _useful(two_stage: TwoStage | None, k: jax.Array | Mxfp8 | PagedKeys, top_k: int) -> TwoStage | None:
    """None where a first stage would leave nothing out."""
    return None if two_stage is None or two_stage.keeps_all(k.shape[1], top_k) else two_stage


def _choose(
    operation: str,
    implementation: Implementation | None,
    gpu_obstacle: Callable[[], str | None] | None = None,
    two_stage: TwoStage | None = None,
    tpu_obstacle: Callable[[], str | None] | None = None,
    notes: Mapping[Implementation, Callable[[], str | None]] | None = None,
) -> Implementation:
    definition = f"the reference of {operation} is the exact selection; leave two_stage out."
    return choose(
        operation,
        implementation,
        {
            "tpu": tpu_obstacle or (lambda: f"{operation} has no TPU kernel yet."),
            "gpu": gpu_obstacle or (lambda: f"{operation} has no GPU kernel yet."),
            "xla": always,
            "reference": always if two_stage is None else lambda: definition,
        },
        notes,
    ).name
