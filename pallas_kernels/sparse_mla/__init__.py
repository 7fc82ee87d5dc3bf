"""Multi-head latent attention over the keys that an indexer selected, or over all of them."""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, UnsupportedImplementationError, always, choose
from pallas_kernels.fp8_latent import Fp8Latent
from pallas_kernels.lightning_indexer.two_stage import TwoStage
from pallas_kernels.lightning_indexer.validate import (
    check_at_least,
    check_floating,
    check_indexer,
    check_integers,
    check_scale,
    check_shape,
    check_visibility,
)
from pallas_kernels.manual_axes import align
from pallas_kernels.mxfp8 import Mxfp8
from pallas_kernels.sparse_mla import dense, gpu, gpu_backward, kernel_dsa, kl, reference, tpu, xla
from pallas_kernels.target import platform

__all__ = [
    "default_budget_bytes",
    "dense_mla",
    "dsa_mla",
    "indexer_kl",
    "latent_mla",
    "paged_sparse_mla",
    "sparse_mla",
]


def default_budget_bytes() -> int:
    """Working memory of an operation that isn't told a bound: 256 MiB on a CPU, 2 GiB on an accelerator."""
    return 2**28 if platform() == "cpu" else 2**31


def sparse_mla(
    q: Float[Array, "B T H LR"],
    latent: Float[Array, "B S LR"] | Fp8Latent,
    indices: Int[Array, "B T C"],
    *,
    latent_width: int,
    scale: float,
    budget_bytes: int | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B T H {latent_width}"], Float[Array, "B T H"]]:
    """Attention of each query over the keys that it names, in the absorbed form.

    p = softmax_c(scale * q . latent[indices[c]]); o = sum_c p_c * latent[indices[c], :latent_width]. The softmax is
    float32 or better; probabilities are rounded to the dtype of `q` before the value product, and FP8 latents, one row at
    a time, before both products. Gradients reach `q` and array latents; FP8 ones are constants.
    The Hopper kernel's gradient adds those of latents up in float32, 4 · (L + R) bytes a row of the cache beside the budget,
    in no fixed order: last bits differ between runs. Inside `jax.shard_map` it needs check_vma=False. With FP8 latents the
    gradient of `q` is that of "xla".

    Args:
        q: queries with the key projection absorbed: [latent part | rope slot].
        latent: the cache, [normed latent | shared rope slot]; rows that nobody names may hold anything.
        indices: positions into S, any order; negative and too large ones are skipped, repeated ones count twice.
        latent_width: L, the leading channels of the latent that are the value.
        scale: multiplies the scores, (N + R) ** -0.5 in the Kimi models.
        budget_bytes: bound on working memory; None: `default_budget_bytes()`.
        implementation: "gpu" (NVIDIA Hopper, the Kimi models' widths, bfloat16), "tpu" (values in multiples
            of 128 channels, a cache of a multiple of 32 rows, float32, bfloat16 or FP8), "xla", "reference", or None for
            the best one.

    Returns:
        o in the dtype of `q`, and the natural log-sum-exp of the scaled scores, float32 or better. A query without keys
        gives o = 0 and -inf.

    Raises:
        ValueError: shapes disagree, or a number is out of range.
        TypeError: a dtype is wrong.
        UnsupportedImplementationError: the named implementation can't run.

    Source: DeepSeek-V3.2 technical report; FlashMLA's sparse prefill contract, except for -inf where it has +inf.
    """
    operation = "sparse_mla"
    budget_bytes = default_budget_bytes() if budget_bytes is None else budget_bytes
    check_shape(operation, "q", q, "[B, T, H, L + R]", (None, None, None, None))
    _check_latent(operation, latent, "[B, S, L + R]", (q.shape[0], None, q.shape[3]), latent_width)
    check_shape(operation, "indices", indices, "[B, T, top_k]", (*q.shape[:2], None))
    check_floating(operation, q=q)
    check_integers(operation, indices=indices)
    check_at_least(operation, 1, latent_width=latent_width, budget_bytes=budget_bytes)
    check_scale(operation, scale)
    if latent_width > q.shape[3]:
        raise ValueError(f"{operation}: latent_width={latent_width}; it must be at most the key width {q.shape[3]}.")
    q, latent, indices = align(q, latent, indices.astype(jnp.int32))
    chosen = _choose(
        operation,
        implementation,
        lambda: gpu.obstacle(q.shape[3], q.dtype, latent, latent_width),
        lambda: tpu.obstacle(q.shape, q.dtype, latent, latent_width, named=implementation == "tpu"),
    )
    if chosen == "reference":
        return reference.sparse_mla(q, latent, indices, latent_width=latent_width, scale=scale)
    if chosen == "tpu":
        return tpu.sparse_mla(q, latent, indices, latent_width, scale, budget_bytes)
    if chosen == "gpu":
        return gpu_backward.sparse_mla(q, latent, indices, latent_width, scale, budget_bytes)
    return xla.sparse_mla(q, latent, indices, latent_width=latent_width, scale=scale, budget_bytes=budget_bytes)


def paged_sparse_mla(
    q: Float[Array, "B T H LR"],
    pages: Float[Array, "P page LR"] | Fp8Latent,
    indices: Int[Array, "B T C"],
    *,
    page_table: Int[Array, "B N"] | None = None,
    latent_width: int,
    scale: float,
    budget_bytes: int | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B T H {latent_width}"], Float[Array, "B T H"]]:
    """`sparse_mla` over a pool of pages that all sequences share.

    With a page table, position s of sequence b is row s mod page of page page_table[b, floor(s / page)]. Without one,
    indices are physical: page * page size + row, as FlashMLA's decode takes them.

    Args:
        q: as in `sparse_mla`.
        pages: [P, page, L + R], latents or FP8 latents; rows that nobody names may hold anything.
        indices: positions, or physical rows; negative and too large ones are skipped.
        page_table: pages of each sequence, negative where there's none: such positions are skipped.
        latent_width: as in `sparse_mla`.
        scale: as in `sparse_mla`.
        budget_bytes: as in `sparse_mla`.
        implementation: as in `sparse_mla`.

    Returns:
        As `sparse_mla`.

    Raises:
        ValueError: shapes disagree, or a number is out of range.
        TypeError: a dtype is wrong.
        UnsupportedImplementationError: the named implementation can't run.
    """
    operation = "paged_sparse_mla"
    check_shape(operation, "q", q, "[B, T, H, L + R]", (None, None, None, None))
    _check_latent(operation, pages, "[P, page, L + R]", (None, None, q.shape[3]), latent_width)
    check_shape(operation, "indices", indices, "[B, T, top_k]", (*q.shape[:2], None))
    check_integers(operation, indices=indices)
    batch, tokens, heads, width = q.shape
    num_pages, size, _ = pages.shape
    rows = indices.astype(jnp.int32)
    if page_table is not None:
        check_shape(operation, "page_table", page_table, "[B, N]", (batch, None))
        check_integers(operation, page_table=page_table)
        page_table = page_table.astype(jnp.int32)
        inside = (rows >= 0) & (rows < page_table.shape[1] * size)
        places = jnp.where(inside, rows, 0)
        page = jnp.take_along_axis(page_table, (places // size).reshape(batch, -1), axis=1).reshape(rows.shape)
        rows = jnp.where(inside & (page >= 0) & (page < num_pages), page * size + places % size, -1)
    pool = pages.reshape(1, num_pages * size) if isinstance(pages, Fp8Latent) else pages.reshape(1, -1, width)
    o, lse = sparse_mla(
        q.reshape(1, batch * tokens, heads, width),
        pool,
        rows.reshape(1, batch * tokens, -1),
        latent_width=latent_width,
        scale=scale,
        budget_bytes=budget_bytes,
        implementation=implementation,
    )
    return o.reshape(batch, tokens, heads, latent_width), lse.reshape(batch, tokens, heads)


def latent_mla(
    q: Float[Array, "B T H LR"],
    latent: Float[Array, "B S LR"] | Fp8Latent,
    *,
    q_positions: Int[Array, "B T"],
    latent_width: int,
    scale: float,
    budget_bytes: int | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B T H {latent_width}"], Float[Array, "B T H"]]:
    """Attention of each query over every key that it sees, in the absorbed form: `sparse_mla` without a selection.

    p = softmax_s(scale * q . latent[s]) over s <= q_positions; o = sum_s p_s * latent[s, :latent_width]. With the
    log-sum-exp, results over parts of the keys can be merged. Not differentiable.

    Args:
        q: queries with the key projection absorbed: [latent part | rope slot].
        latent: the cache, [normed latent | shared rope slot], also in FP8; rows that nobody sees may hold anything.
        q_positions: the last key that each query sees; -1: none.
        latent_width: L, the leading channels of the latent that are the value.
        scale: multiplies the scores, (N + R) ** -0.5 in the Kimi models.
        budget_bytes: bound on working memory; None: `default_budget_bytes()`.
        implementation: "xla", "reference", or None for the best one.

    Returns:
        o in the dtype of `q`, and the natural log-sum-exp of the scaled scores, float32 or better. A query without keys
        gives o = 0 and -inf.

    Raises:
        ValueError: shapes disagree, or a number is out of range.
        TypeError: a dtype is wrong.
        UnsupportedImplementationError: the named implementation can't run.
    """
    operation = "latent_mla"
    budget_bytes = default_budget_bytes() if budget_bytes is None else budget_bytes
    check_shape(operation, "q", q, "[B, T, H, L + R]", (None, None, None, None))
    _check_latent(operation, latent, "[B, S, L + R]", (q.shape[0], None, q.shape[3]), latent_width)
    check_floating(operation, q=q)
    check_visibility(operation, q_positions, None, q.shape[0], q.shape[1], latent.shape[1])
    check_at_least(operation, 1, latent_width=latent_width, budget_bytes=budget_bytes)
    check_scale(operation, scale)
    if latent_width > q.shape[3]:
        raise ValueError(f"{operation}: latent_width={latent_width}; it must be at most the key width {q.shape[3]}.")
    q_positions = q_positions.astype(jnp.int32)
    if _choose(operation, implementation) == "reference":
        return reference.latent_mla(q, latent, q_positions=q_positions, latent_width=latent_width, scale=scale)
    return dense.latent_mla(
        q, latent, q_positions=q_positions, latent_width=latent_width, scale=scale, budget_bytes=budget_bytes
    )


def dsa_mla(
    index_q: Float[Array, "B T HI KI"] | Mxfp8,
    index_k: Float[Array, "B S KI"] | Mxfp8,
    index_w: Float[Array, "B T HI"],
    q: Float[Array, "B T H NR"],
    latent: Float[Array, "B S LR"] | Fp8Latent,
    w_uk: Float[Array, "H N L"],
    w_uv: Float[Array, "H V L"],
    *,
    top_k: int,
    q_positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None = None,
    key_segment_ids: Int[Array, "B S"] | None = None,
    scale: float,
    form: Literal["gather", "mask"] | None = None,
    two_stage: TwoStage | None = None,
    budget_bytes: int | None = None,
    return_indices: bool = False,
    implementation: Implementation | None = None,
) -> Float[Array, "B T H V"] | tuple[Float[Array, "B T H V"], Int[Array, "B T {top_k}"]]:
    """DeepSeek sparse attention: indexer, selection and MLA in one, a block of queries at a time.

    Each query attends the `top_k` visible keys with the best index scores (see `lightning_indexer`), with
    key_h = [w_uk[h] c | slot] and value_h = w_uv[h] c for the latent [c | slot]. No rotation is applied to the slot.
    Nothing of size T x S exists. When S <= top_k the result is `dense_mla`. Gradients reach q, latent, w_uk and w_uv,
    as those of `sparse_mla` do; the index arguments get zero.

    Args:
        index_q: index queries, also in MXFP8.
        index_k: index keys, also in MXFP8.
        index_w: index head weights, float32 or float64.
        q: queries, [nope | rope slot], not absorbed.
        latent: the cache, [normed latent | shared rope slot]. Rows that nobody sees may hold anything. FP8 latents are
            dequantised a tile or the selected rows at a time, to the dtype of `q`, and are constants.
        w_uk: key projection of each head.
        w_uv: value projection of each head.
        top_k: number of keys a query attends at most.
        q_positions: each query's own position among the keys; -1 marks a padding row, whose output is 0.
        segment_ids: ids of the queries' packed sequences, -1 for padding; without key_segment_ids T must equal S.
            Selection stays inside a segment.
        key_segment_ids: those of the keys, where queries are only some of the tokens. None: the same.
        scale: multiplies the scores, (N + R) ** -0.5 in the Kimi models.
        form: "gather" attends copies of the selected rows, "mask" attends all keys and drops those not selected, which
            is faster for few heads while S is a few times top_k; None chooses. Both attend the same keys.
        two_stage: of the selection (see `lightning_indexer`); goes with form="gather" only, which it then chooses.
        budget_bytes: bound on working memory beyond arguments and results; None: `default_budget_bytes()`. The
            smallest block is one query of every batch row.
        return_indices: also return the selection.
        implementation: "gpu" (NVIDIA Hopper) and "tpu": `lightning_indexer`, then the kernel of `sparse_mla`; "xla",
            "reference", or None for the best one, which on TPUs is "tpu" for long rows only.

    Returns:
        The attention output in the dtype of `q`; with `return_indices` also int32 positions, ascending, padded with -1.

    Raises:
        ValueError: shapes disagree, or a number is out of range.
        TypeError: a dtype is wrong.
        UnsupportedImplementationError: the named implementation can't run.

    Source: DeepSeek-V3.2 technical report, section 2.1.
    """
    operation = "dsa_mla"
    budget_bytes = default_budget_bytes() if budget_bytes is None else budget_bytes
    check_indexer(operation, index_q, index_k, index_w, ("index_q", "index_k", "index_w"))
    _check_mla(operation, q, latent, w_uk, w_uv, q_positions, segment_ids, key_segment_ids, scale)
    key_segment_ids = segment_ids if key_segment_ids is None else key_segment_ids
    check_shape(operation, "q", q, "[B, T, H, N + R]", (*index_q.shape[:2], *q.shape[2:]))
    check_shape(operation, "latent", latent, "[B, S, L + R]", (*index_k.shape[:2], latent.shape[2]))
    check_at_least(operation, 1, top_k=top_k, budget_bytes=budget_bytes)
    _check_form(operation, form, ("gather", "mask"))
    if two_stage is not None and form == "mask":
        raise ValueError(
            f"{operation}: form='mask' with two_stage; it must be 'gather' or None, for scores of all keys "
            "don't exist then."
        )
    q_positions = q_positions.astype(jnp.int32)
    indices: jax.Array | None
    chosen = _choose(
        operation,
        implementation,
        lambda: kernel_dsa.gpu_obstacle(index_k, q, latent, w_uk, top_k=top_k, form=form),
        lambda: kernel_dsa.tpu_obstacle(
            index_q,
            index_k,
            index_w,
            q,
            latent,
            w_uk,
            top_k=top_k,
            form=form,
            two_stage=two_stage,
            named=implementation == "tpu",
        ),
    )
    if chosen in ("gpu", "tpu"):
        out, indices = kernel_dsa.dsa_mla(
            *align(index_q, index_k, index_w, q, latent, w_uk, w_uv),
            kernel="gpu" if chosen == "gpu" else "tpu",
            top_k=top_k,
            q_positions=q_positions,
            segment_ids=segment_ids,
            key_segment_ids=key_segment_ids,
            scale=scale,
            two_stage=two_stage,
            budget_bytes=budget_bytes,
            return_indices=return_indices,
        )
    elif chosen == "reference":
        if two_stage is not None:
            raise UnsupportedImplementationError(f"the reference of {operation} is exact; leave two_stage out.")
        out, indices = reference.dsa_mla(
            index_q,
            index_k,
            index_w,
            q,
            latent,
            w_uk,
            w_uv,
            top_k=top_k,
            q_positions=q_positions,
            segment_ids=segment_ids,
            key_segment_ids=key_segment_ids,
            scale=scale,
        )
    else:
        out, indices = xla.dsa_mla(
            index_q,
            index_k,
            index_w,
            q,
            latent,
            w_uk,
            w_uv,
            top_k=top_k,
            q_positions=q_positions,
            segment_ids=segment_ids,
            key_segment_ids=key_segment_ids,
            scale=scale,
            form=form,
            two_stage=two_stage,
            budget_bytes=budget_bytes,
            return_indices=return_indices,
        )
    return out if indices is None or not return_indices else (out, indices)


def dense_mla(
    q: Float[Array, "B T H NR"],
    latent: Float[Array, "B S LR"] | Fp8Latent,
    w_uk: Float[Array, "H N L"],
    w_uv: Float[Array, "H V L"],
    *,
    q_positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None = None,
    key_segment_ids: Int[Array, "B S"] | None = None,
    scale: float,
    form: Literal["naive", "absorbed"] | None = None,
    budget_bytes: int | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T H V"]:
    """Causal multi-head latent attention over every visible key.

    key_h = [w_uk[h] c | slot], value_h = w_uv[h] c for the latent [c | slot]; no rotation is applied to the slot. Key s
    is visible to query t iff s <= q_positions[t] and, with segments, key_segment_ids[s] == segment_ids[t] >= 0.

    Args:
        q: queries, [nope | rope slot].
        latent: the cache, [normed latent | shared rope slot], also in FP8: dequantised a block at a time to the dtype of
            `q`, and a constant.
        w_uk: key projection of each head.
        w_uv: value projection of each head.
        q_positions: each query's own position among the keys; -1 marks a padding row, whose output is 0.
        segment_ids: ids of the queries' packed sequences, -1 for padding; without key_segment_ids T must equal S.
        key_segment_ids: those of the keys, where queries are only some of the tokens. None: the same.
        scale: multiplies the scores, (N + R) ** -0.5 in the Kimi models.
        form: "naive" expands keys and values, group of heads by group of heads, and wins for many queries; "absorbed"
            moves w_uk to the queries and w_uv to the output, and wins for few. None chooses by the number of
            multiplications.
        budget_bytes: bound on working memory beyond arguments and results; None: `default_budget_bytes()`. The
            smallest block is one query of every batch row.
        implementation: "xla", "reference", or None for the best one.

    Returns:
        The attention output in the dtype of `q`.

    Raises:
        ValueError: shapes disagree, a number is out of range, or form="naive" can't hold one head within the budget.
        TypeError: a dtype is wrong.
        UnsupportedImplementationError: the named implementation can't run.
    """
    operation = "dense_mla"
    budget_bytes = default_budget_bytes() if budget_bytes is None else budget_bytes
    _check_mla(operation, q, latent, w_uk, w_uv, q_positions, segment_ids, key_segment_ids, scale)
    key_segment_ids = segment_ids if key_segment_ids is None else key_segment_ids
    check_at_least(operation, 1, budget_bytes=budget_bytes)
    _check_form(operation, form, ("naive", "absorbed"))
    q_positions = q_positions.astype(jnp.int32)
    if _choose(operation, implementation) == "reference":
        return reference.dense_mla(
            q,
            latent,
            w_uk,
            w_uv,
            q_positions=q_positions,
            segment_ids=segment_ids,
            key_segment_ids=key_segment_ids,
            scale=scale,
        )
    return dense.dense_mla(
        q,
        latent,
        w_uk,
        w_uv,
        q_positions=q_positions,
        segment_ids=segment_ids,
        key_segment_ids=key_segment_ids,
        scale=scale,
        form=form,
        budget_bytes=budget_bytes,
    )


def indexer_kl(
    index_q: Float[Array, "B T HI KI"],
    index_k: Float[Array, "B S KI"],
    index_w: Float[Array, "B T HI"],
    q: Float[Array, "B T H NR"],
    latent: Float[Array, "B S LR"],
    w_uk: Float[Array, "H N L"],
    *,
    top_k: int | None,
    q_positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None = None,
    key_segment_ids: Int[Array, "B S"] | None = None,
    scale: float,
    budget_bytes: int | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T"]:
    """How far the indexer is from the attention it selects for: KL(p || softmax(I)), in nats.

    p_s is the mean over heads of softmax_s(scale q_h . key_hs), I the index scores (see `lightning_indexer`); both
    softmaxes run over all visible keys, or with `top_k` over those that the indexer selects. Gradients reach index_q,
    index_k and index_w; p is a constant, and so is the selection.

    Args:
        index_q: index queries.
        index_k: index keys.
        index_w: index head weights.
        q: queries of the attention, [nope | rope slot], not absorbed.
        latent: keys of the attention, [normed latent | shared rope slot].
        w_uk: key projection of each head.
        top_k: number of keys that the indexer selects, or None for all visible ones.
        q_positions: each query's own position among the keys; -1 marks a padding row.
        segment_ids: ids of the queries' packed sequences, -1 for padding; without key_segment_ids T must equal S.
        key_segment_ids: those of the keys, where queries are only some of the tokens. None: the same.
        scale: multiplies the attention's scores.
        budget_bytes: bound on working memory beyond arguments and results; None: `default_budget_bytes()`. The
            smallest block is one query of every batch row.
        implementation: "gpu" (NVIDIA Hopper, bfloat16, the Kimi models' widths, with `top_k`), "xla", "reference", or None
            for the best one.

    Returns:
        Nats of each query, float32 or better; 0 for one that sees no key.

    Raises:
        ValueError: shapes disagree, or a number is out of range.
        TypeError: a dtype is wrong.
        UnsupportedImplementationError: the named implementation can't run.

    Source: DeepSeek-V3.2 technical report, section 2.1: the dense warm-up's loss, and the sparse stage's with `top_k`.
    """
    operation = "indexer_kl"
    budget_bytes = default_budget_bytes() if budget_bytes is None else budget_bytes
    check_indexer(operation, index_q, index_k, index_w, ("index_q", "index_k", "index_w"))
    _check_keys(operation, q, latent, w_uk, q_positions, segment_ids, key_segment_ids, scale)
    key_segment_ids = segment_ids if key_segment_ids is None else key_segment_ids
    check_shape(operation, "q", q, "[B, T, H, N + R]", (*index_q.shape[:2], *q.shape[2:]))
    check_shape(operation, "latent", latent, "[B, S, L + R]", (*index_k.shape[:2], latent.shape[2]))
    check_at_least(operation, 1, budget_bytes=budget_bytes, **({} if top_k is None else {"top_k": top_k}))
    arguments = index_q, index_k, index_w, q, latent, w_uk
    q_positions = q_positions.astype(jnp.int32)
    chosen = _choose(operation, implementation, lambda: kl.gpu_obstacle(index_k, q, latent, w_uk, top_k))
    if chosen == "reference":
        return reference.indexer_kl(
            *arguments,
            top_k=top_k,
            q_positions=q_positions,
            segment_ids=segment_ids,
            key_segment_ids=key_segment_ids,
            scale=scale,
        )
    return kl.indexer_kl(
        *arguments,
        top_k=top_k,
        q_positions=q_positions,
        segment_ids=segment_ids,
        key_segment_ids=key_segment_ids,
        scale=scale,
        budget_bytes=budget_bytes,
        form="kernels" if chosen == "gpu" else "mask",
    )


def _check_mla(
    operation: str,
    q: jax.Array,
    latent: jax.Array | Fp8Latent,
    w_uk: jax.Array,
    w_uv: jax.Array,
    q_positions: jax.Array,
    segment_ids: jax.Array | None,
    key_segment_ids: jax.Array | None,
    scale: float,
) -> None:
    _check_keys(operation, q, latent, w_uk, q_positions, segment_ids, key_segment_ids, scale)
    check_shape(operation, "w_uv", w_uv, "[H, V, L]", (q.shape[2], None, w_uk.shape[2]))
    check_floating(operation, w_uv=w_uv)


def _check_keys(
    operation: str,
    q: jax.Array,
    latent: jax.Array | Fp8Latent,
    w_uk: jax.Array,
    q_positions: jax.Array,
    segment_ids: jax.Array | None,
    key_segment_ids: jax.Array | None,
    scale: float,
) -> None:
    check_shape(operation, "q", q, "[B, T, H, N + R]", (None, None, None, None))
    check_shape(operation, "w_uk", w_uk, "[H, N, L]", (q.shape[2], None, None))
    _check_latent(operation, latent, "[B, S, L + R]", (q.shape[0], None, None), w_uk.shape[2])
    check_floating(operation, q=q, w_uk=w_uk)
    query_slot, key_slot = q.shape[3] - w_uk.shape[1], latent.shape[2] - w_uk.shape[2]
    if query_slot != key_slot or query_slot < 0:
        raise ValueError(
            f"{operation}: q leaves {query_slot} channels beside the {w_uk.shape[1]} of w_uk and latent leaves "
            f"{key_slot} beside its {w_uk.shape[2]}; both must be the width of the rope slot."
        )
    check_visibility(operation, q_positions, segment_ids, q.shape[0], q.shape[1], latent.shape[1], key_segment_ids)
    check_scale(operation, scale)


def _check_form(operation: str, form: str | None, legal: tuple[str, str]) -> None:
    if form is not None and form not in legal:
        raise ValueError(f"{operation}: form={form!r}; it must be {legal[0]!r}, {legal[1]!r} or None.")


def _check_latent(
    operation: str,
    latent: jax.Array | Fp8Latent,
    dims: str,
    sizes: tuple[int | None, ...],
    latent_width: int,
) -> None:
    if not isinstance(latent, Fp8Latent):
        check_shape(operation, "latent", latent, dims, sizes)
        check_floating(operation, latent=latent)
        return
    latent.check(f"{operation}: latent")
    legal = latent.ndim == len(sizes) and all(
        want is None or have == want for have, want in zip(latent.shape, sizes, strict=True)
    )
    if not legal or latent.latent_width != latent_width:
        raise ValueError(
            f"{operation}: latent is an Fp8Latent of shape {latent.shape} with {latent.latent_width} latent channels; it "
            f"must be {dims} with latent_width={latent_width}."
        )


def _choose(
    operation: str,
    implementation: Implementation | None,
    no_gpu: Callable[[], str | None] | None = None,
    no_tpu: Callable[[], str | None] | None = None,
) -> Implementation:
    return choose(
        operation,
        implementation,
        {
            "tpu": no_tpu or (lambda: f"{operation} has no TPU kernel yet."),
            "gpu": no_gpu or (lambda: f"{operation} has no GPU kernel yet."),
            "xla": always,
            "reference": always,
        },
    ).name
