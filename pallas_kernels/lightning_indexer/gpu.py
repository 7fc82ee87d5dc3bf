"""Pallas Mosaic GPU for Hopper: bfloat16 or MXFP8 keys, scores in float32, an exact selection that never keeps them all."""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.lightning_indexer.pages import PagedKeys
from pallas_kernels.lightning_indexer.select import plain
from pallas_kernels.lightning_indexer.two_stage import TwoStage
from pallas_kernels.manual_axes import align, axes_left_to_xla
from pallas_kernels.mxfp8 import Mxfp8
from pallas_kernels.target import platform

Queries = Float[Array, "B T H K"] | Mxfp8
Keys = Float[Array, "B S K"] | Mxfp8 | PagedKeys

HEADS, WIDTH, MOST = 32, 128, 2048
FEW_QUERIES = 16
"""Queries of a row up to which its keys are read as they are stored, by all blocks of threads together."""

FEWEST_STAGED, FEWEST_STAGED_KEYS, FEWEST_STAGED_TILES = 5, 2**18, 12
"""Queries and keys of a row from which two stages are faster than one, where its queries are few; and how many times up to
8 queries of a row, each of which has one block of threads in the second stage."""

ROWS_BYTES = 58 * 2**20
"""Working memory of few queries: scores and candidates of as many rows at a time as fit."""

WIDE_BYTES = 32 * 2**20
"""Bytes of bfloat16 up to which MXFP8 keys are converted once beforehand, and not by every block of threads again."""

PROVED_KEYS = 1048576
"""Keys of a row up to which the kernels have run on a card."""

MOST_BLOCKS = 32
"""Blocks of rows that a program for few queries a row scores one after the other; it has each of them written out."""

PIECE = 32
"""Keys that are copied together at least: those whose scales fill 128 bytes."""

_TILE, _KEYS_COPIED = 8, 8


def obstacle(q: Queries, k: Keys, w: Float[Array, "B T H"], top_k: int, segmented: bool) -> str | None:
    """Why the kernels can't run for this call, or None."""
    if platform() != "gpu":
        return f"it runs on NVIDIA Hopper GPUs, and the platform is {platform()!r}."
    capability = getattr(jax.devices()[0], "compute_capability", "unknown")
    if capability != "9.0":
        return f"it is compiled for compute capability 9.0 (Hopper), and this device has {capability}."
    return axes_left_to_xla() or unfit(q, k, w, top_k, segmented)


def unfit(q: Queries, k: Keys, w: Float[Array, "B T H"], top_k: int, segmented: bool) -> str | None:
    """Why no Hopper GPU could run this call, or None."""
    for name, array in (("q", q), ("k", k)):
        stored: Any = array.pages if isinstance(array, PagedKeys) else array
        if not _mxfp8(array) and stored.dtype != jnp.bfloat16:
            return f"{name} is {stored.dtype}; its matrix instructions take bfloat16, and MXFP8 turned into it."
    if w.dtype != jnp.float32:
        return f"w is {w.dtype}; it sums in float32."
    if tuple(q.shape[2:]) != (HEADS, WIDTH):
        return f"there are {q.shape[2]} heads of {q.shape[3]}; it takes {HEADS} of {WIDTH}."
    if top_k > MOST:
        return f"top_k={top_k}; it selects at most {MOST}."
    if segmented:
        return "there are segment ids; it takes rows of one sequence each."
    if isinstance(k, PagedKeys):
        if k.page % PIECE:
            return f"pages have {k.page} keys; it copies {PIECE} at a time, and takes pages of multiples of that."
        return None
    if not isinstance(k, Mxfp8) and k.shape[1] % _KEYS_COPIED and 2 * k.size > WIDE_BYTES:
        return f"there are {k.shape[1]} bfloat16 keys a row; where they are many, it takes multiples of {_KEYS_COPIED}."
    return None


def unfit_stages(two_stage: TwoStage) -> str | None:
    """Why no Hopper GPU could leave keys out in this way, or None."""
    if two_stage.coarse != "linear" or two_stage.block_size != 1:
        return (
            f"two stages choose blocks of {two_stage.block_size} by their {two_stage.coarse!r}; it takes single keys "
            "by 'linear'."
        )
    return None


def single_stage(q: Queries, k: Keys, two_stage: TwoStage | None) -> str | None:
    """Why the kernels would score all keys though two stages are asked for, or None."""
    batch, queries = q.shape[:2]
    keys, tiles = k.shape[1], batch * -(-queries // _TILE)
    if two_stage is None or queries > FEW_QUERIES:
        return None
    if queries >= FEWEST_STAGED and keys >= FEWEST_STAGED_KEYS and tiles >= FEWEST_STAGED_TILES:
        return None
    return (
        f"all keys are scored, not those of two stages, which for {batch} rows of {queries} queries and {keys} keys is as "
        f"fast: a first stage reads all keys as well. Two stages begin with {FEWEST_STAGED} queries of {FEWEST_STAGED_KEYS} "
        f"keys, and {FEWEST_STAGED_TILES} times up to {_TILE} queries of a row"
    )


def unproved(q: Queries, k: Keys, top_k: int, two_stage: TwoStage | None = None) -> str | None:
    """Why nobody should get the kernels who doesn't ask for them, or None."""
    (batch, queries), keys = q.shape[:2], k.shape[1]
    if keys > PROVED_KEYS:
        return f"rows of {keys} keys haven't run on a card yet, only up to {PROVED_KEYS}; name it to run it."
    if queries > FEW_QUERIES or (two_stage is not None and single_stage(q, k, two_stage) is None):
        return None
    together = _together(queries)
    blocks = -(-queries // together) * -(-batch // rows_together(batch, together, keys, top_k, _blocks(None)))
    if blocks > MOST_BLOCKS:
        return (
            f"{batch} rows of {queries} queries and {keys} keys are {blocks} blocks, more than {MOST_BLOCKS}, which take "
            "minutes to compile; name it to run it."
        )
    return None


def lightning_indexer(
    q: Queries,
    k: Keys,
    w: Float[Array, "B T H"],
    *,
    top_k: int,
    q_positions: Int[Array, "B T"],
    two_stage: TwoStage | None = None,
    interpret: Any = None,
) -> Int[Array, "B T C"]:
    """See `pallas_kernels.lightning_indexer.lightning_indexer`; `interpret` is what Pallas takes to run it elsewhere."""
    q, k, w, q_positions = align(*jax.lax.stop_gradient((q, k, w)), q_positions)
    q_positions = jnp.minimum(q_positions.astype(jnp.int32), k.shape[1] - 1)
    two_stage = None if single_stage(q, k, two_stage) else two_stage
    many_once = q.shape[1] > FEW_QUERIES and two_stage is None
    if many_once and _mxfp8(k) and 2 * math.prod(k.shape) <= WIDE_BYTES:
        keys = k.whole() if isinstance(k, PagedKeys) else k
        k = plain(keys)
    if not isinstance(k, Mxfp8 | PagedKeys) and k.shape[1] % _KEYS_COPIED:
        k = jnp.pad(k, ((0, 0), (0, -k.shape[1] % _KEYS_COPIED), (0, 0)))
    if two_stage is not None:
        assert not isinstance(k, PagedKeys)
        # Imported late: Mosaic takes a second, which nobody should wait for who has no such GPU.
        from pallas_kernels.lightning_indexer import gpu_two_stage

        return gpu_two_stage.two_stage(
            q,
            k,
            w,
            top_k=top_k,
            q_positions=q_positions,
            settings=two_stage,
            blocks=_blocks(interpret),
            interpret=interpret,
        )
    if q.shape[1] <= FEW_QUERIES:
        return few(q, k, w, q_positions, top_k, interpret)
    return many(q, k, w, q_positions, top_k, interpret)


def many(q: Any, k: Keys, w: Array, q_positions: Array, top_k: int, interpret: Any = None) -> Int[Array, "B T C"]:
    """Blocks of 8 queries."""
    # Imported late: Mosaic takes a second, which nobody should wait for who has no such GPU.
    from pallas_kernels.lightning_indexer.gpu_prefill import prefill
    from pallas_kernels.lightning_indexer.gpu_select import room_for

    num_queries = q.shape[1]
    q, w, q_positions = _padded(q, w, q_positions, -num_queries % _TILE)
    found = prefill(q, k, w, q_positions, room_for(top_k), blocks=_blocks(interpret), interpret=interpret)
    return found[:, :num_queries]


def few(q: Any, k: Keys, w: Array, q_positions: Array, top_k: int, interpret: Any = None) -> Int[Array, "B T C"]:
    """A few queries of each row: scores of some rows at a time in memory, then a selection among them."""
    from pallas_kernels.lightning_indexer.gpu_decode import score_rows
    from pallas_kernels.lightning_indexer.gpu_rows import select_rows

    batch, num_queries = q.shape[:2]
    together = _together(num_queries)
    q, w, q_positions = _padded(q, w, q_positions, -num_queries % together)
    rows = rows_together(batch, together, k.shape[1], top_k, _blocks(interpret))
    groups = 4 if together <= 2 else 2
    found = []
    for first in range(0, q.shape[1], together):
        part = slice(first, first + together)
        blocks = []
        for row in range(0, batch, rows):
            some = slice(row, row + rows)
            keys = replace(k, page_table=k.page_table[some]) if isinstance(k, PagedKeys) else k[some]
            mine = keys, w[some, part], q_positions[some, part]
            orders, highest = score_rows(
                plain(q[some, part]), *mine, blocks=_blocks(interpret), groups=groups, interpret=interpret
            )
            count = orders.shape[0] * together
            chosen = select_rows(
                orders.reshape(count, -1),
                highest.reshape(count, -1),
                q_positions[some, part].reshape(count),
                top_k,
                blocks=_blocks(interpret),
                interpret=interpret,
            )
            blocks.append(chosen.reshape(-1, together, top_k))
        found.append(jnp.concatenate(blocks, axis=0))
    return jnp.concatenate(found, axis=1)[:, :num_queries]


def _together(queries: int) -> int:
    """Queries of a row that are scored together."""
    return min(8, 1 << (queries - 1).bit_length())


def rows_together(batch: int, queries: int, num_keys: int, top_k: int, blocks: int) -> int:
    """Rows of so many queries whose scores, and the candidates of all blocks of threads, fit in `ROWS_BYTES`."""
    from pallas_kernels.lightning_indexer.gpu_rows import block_bytes, row_bytes

    scores, candidates = queries * row_bytes(num_keys), block_bytes(top_k)
    rows = (ROWS_BYTES - blocks * candidates) // scores
    if rows * queries < blocks:  # not every block has a row
        rows = ROWS_BYTES // (scores + queries * candidates)
    elif rows < batch:  # all blocks of threads take as many rows
        rows -= rows % max(1, blocks // queries)
    return max(1, min(batch, rows))


def _mxfp8(x: Queries | Keys) -> bool:
    return x.mxfp8 if isinstance(x, PagedKeys) else isinstance(x, Mxfp8)


def _padded(q: Any, w: Array, q_positions: Array, missing: int) -> tuple[Any, Array, Array]:
    """With more queries, which see nothing."""
    if not missing:
        return q, w, q_positions

    def longer(x: Array, fill: int = 0) -> Array:
        return jnp.pad(x, ((0, 0), (0, missing), *(((0, 0),) * (x.ndim - 2))), constant_values=fill)

    return jax.tree.map(longer, q), longer(w), longer(q_positions, -1)


def _blocks(interpret: Any) -> int:
    return 2 if interpret is not None else getattr(jax.devices()[0], "core_count", 132)
