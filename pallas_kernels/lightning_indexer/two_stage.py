"""The indexer in two stages: blocks of keys by a coarse score, then the keys of the best blocks by their own.

Sources: HISA (arXiv 2603.28458) for mean-pooled blocks; the elementwise bound is this library's own.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.lightning_indexer.blocks import in_blocks, pinned, plan
from pallas_kernels.lightning_indexer.linear import linear_queries
from pallas_kernels.lightning_indexer.select import (
    plain,
    score_dtype,
    score_keys,
    select,
    selected_indices,
    tile_scores,
)
from pallas_kernels.lightning_indexer.visibility import Visibility
from pallas_kernels.lightning_indexer.xla import score_rows, score_tile, scoring_bytes
from pallas_kernels.mxfp8 import Mxfp8
from pallas_kernels.precision import einsum
from pallas_kernels.target import platform

Coarse = Literal["linear", "mean", "bound"]
"""What a block of keys is chosen by: its keys' products with one vector, its mean, or the largest and the smallest number
of every channel."""


@dataclass(frozen=True)
class TwoStage:
    """How the first stage leaves keys out.

    A query that sees n blocks of keys scores those of max(⌈kept_fraction · n⌉, ⌈top_k / block_size⌉ + 2) of them: the
    first one, the newest, every block of which it sees only a part, and then those with the largest coarse scores. A
    query that sees no more blocks than that selects exactly what the exact indexer does.

    The defaults are the ones that miss next to nothing of kimi-tiny's keys (`python -m benchmarks.two_stage` measures it);
    blocks of several keys are for models whose selected keys lie close together.

    Attributes:
        block_size: keys of a block.
        kept_fraction: of the blocks that a query sees.
        coarse: "linear" takes the largest of a block's (Σ_h a_h w_h q_h) · k, where a_h is the part of a sample of keys
            that head h's product is positive for: every key at 1/H of its score's cost. It misses little where heads are
            positive for almost all keys or almost none. "mean" takes Σ_h w_h · relu(q_h · mean of the keys), which is no
            bound and misses some keys. "bound" takes Σ_h max(w_h, 0) · relu(Σ_c max(q_hc · max k_c, q_hc · min k_c)),
            which no key of the block exceeds: where a block that was left out could hold a key that belongs, its queries
            are scored against all keys, so the selection is exact.

    Raises:
        ValueError: a number is out of range, or `coarse` is something else.
    """

    block_size: int = 1
    kept_fraction: float = 0.01
    coarse: Coarse = "linear"

    def __post_init__(self) -> None:
        size, kept = self.block_size, self.kept_fraction
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"TwoStage: block_size={size!r}; it must be an integer of at least 1.")
        if isinstance(kept, bool) or not isinstance(kept, int | float) or not 0 < kept <= 1:
            raise ValueError(f"TwoStage: kept_fraction={kept!r}; it must be a number above 0 and at most 1.")
        if self.coarse not in get_args(Coarse):
            raise ValueError(f"TwoStage: coarse={self.coarse!r}; it must be 'linear', 'mean' or 'bound'.")

    def fewest(self, top_k: int) -> int:
        """Blocks that are scored however few are asked for: those of top_k keys, the first and the newest."""
        return -(-top_k // self.block_size) + 2

    def most(self, num_keys: int, top_k: int) -> int:
        """Blocks that a query scores which sees `num_keys`."""
        seen = -(-num_keys // self.block_size)
        return min(seen, max(math.ceil(self.kept_fraction * seen), self.fewest(top_k)))

    def keeps_all(self, num_keys: int, top_k: int) -> bool:
        """Whether nothing would be left out of so many keys."""
        return self.most(num_keys, top_k) * self.block_size >= num_keys


def recall(found: Int[Array, "B T C"], wanted: Int[Array, "B T D"]) -> Float[Array, "B T"]:
    """The part of each query's `wanted` positions that is among those `found`: 1 where none is wanted.

    Both are positions padded with -1, as `lightning_indexer` returns them; `wanted` is ascending.
    """
    last = jnp.iinfo(jnp.int32).max
    ordered = jnp.sort(jnp.where(found < 0, last, found), axis=-1)
    place = jnp.vectorize(jnp.searchsorted, signature="(c),(d)->(d)")(ordered, jnp.maximum(wanted, 0))
    there = jnp.take_along_axis(ordered, jnp.minimum(place, ordered.shape[-1] - 1), axis=-1) == wanted
    count = jnp.sum(wanted >= 0, axis=-1)
    hits = jnp.sum(there & (wanted >= 0), axis=-1)
    return jnp.where(count == 0, 1.0, hits / jnp.maximum(count, 1)).astype(jnp.float32)


@partial(jax.jit, static_argnames=("top_k", "budget_bytes", "settings"))
def index_candidates(
    q: Float[Array, "B T H K"] | Mxfp8,
    k: Float[Array, "B S K"] | Mxfp8,
    w: Float[Array, "B T H"],
    *,
    top_k: int,
    q_positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None,
    key_segment_ids: Int[Array, "B S"] | None,
    budget_bytes: int,
    settings: TwoStage,
) -> tuple[Int[Array, "B T C"], Float[Array, "B T C"]]:
    """Indices of the selected keys and their scores."""
    q, k, w = jax.lax.stop_gradient((q, k, w))
    stage = Stage.of(k, settings, top_k, budget_bytes)

    def block(sliced: tuple, keys: jax.Array | Mxfp8, constants: tuple[Any, Any]) -> tuple[jax.Array, jax.Array]:
        block_q, block_w, positions, segments, vectors = sliced
        key_segments, coarse = constants[1]
        return stage.block(block_q, keys, block_w, Visibility(positions, segments, key_segments), coarse, vectors)

    blocks = plan(1, q.shape[1], fits=budget_bytes // (q.shape[0] * stage.query_bytes(q, k)), wanted=score_rows())
    linear = settings.coarse == "linear"
    vectors = linear_queries(q, k, w, q_positions) if linear else None
    whole = key_segment_ids, None if linear else stage.pooled(k)
    return in_blocks(block, blocks, (q, w, q_positions, segment_ids, vectors), k, ((), whole))


@dataclass(frozen=True)
class Stage:
    """One call: its settings, and how it is cut.

    Attributes:
        settings: what is left out.
        top_k: keys to select.
        tile: keys scored together where all are.
        kept: blocks that a query scores at most.
        chunk: of them, how many are gathered at a time.
        budget_bytes: bound on working memory.
    """

    settings: TwoStage
    top_k: int
    tile: int
    kept: int
    chunk: int
    budget_bytes: int

    @classmethod
    def of(cls, k: jax.Array | Mxfp8, settings: TwoStage, top_k: int, budget_bytes: int) -> "Stage":
        """For keys [B, S, K]."""
        kept = settings.most(k.shape[1], top_k)
        wanted = (2**21 if platform() == "cpu" else 2**25) // (
            settings.block_size * k.shape[2] * score_dtype(k).itemsize
        )
        chunks = -(-kept // max(1, min(kept, wanted)))
        return cls(settings, top_k, score_tile(k, budget_bytes), kept, -(-kept // chunks), budget_bytes)

    def query_bytes(self, q: jax.Array | Mxfp8, k: jax.Array | Mxfp8) -> int:
        """Working memory of one query: all scores, since some blocks of queries need them, and gathered keys."""
        gathered = self.chunk * self.settings.block_size * (k.shape[2] + 2 * q.shape[2])
        return scoring_bytes(q, k, self.tile) + 2 * gathered * score_dtype(q, k).itemsize

    def pooled(self, k: jax.Array | Mxfp8) -> jax.Array:
        """[B, N, K] means of the blocks, or [B, N, 2 K] largest and smallest numbers of each channel."""
        blocked = self._blocked(k)
        batch, width = k.shape[0], k.shape[2]
        count, size = -(-k.shape[1] // self.settings.block_size), self.settings.block_size
        dtype = score_dtype(k)

        def pool(_: Any, __: Any, constants: tuple[Any, Any]) -> jax.Array:
            keys = plain(constants[0])
            if self.settings.coarse == "bound":
                return jnp.concatenate([jnp.max(keys, axis=2), jnp.min(keys, axis=2)], axis=-1)
            return jnp.mean(keys, axis=2, dtype=dtype).astype(keys.dtype)

        fits = self.budget_bytes // (8 * batch * size * width * dtype.itemsize)
        return in_blocks(pool, plan(1, count, fits=fits, wanted=-(-4096 // size)), (), (), (blocked, ()))

    def block(
        self,
        q: jax.Array | Mxfp8,
        k: jax.Array | Mxfp8,
        w: jax.Array,
        visibility: Visibility,
        coarse: jax.Array | None,
        vectors: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        """Positions that a block of queries selects, and their scores; a block that sees few keys scores them all."""
        few = visibility.end(k.shape[1]) <= self.settings.fewest(self.top_k) * self.settings.block_size

        def everything() -> tuple[jax.Array, jax.Array]:
            scores = score_keys(q, k, w, visibility, self.tile, rankable=True)
            return chosen(scores, self.top_k, None)

        return jax.lax.cond(few, everything, lambda: self._in_two(q, k, w, visibility, coarse, vectors, everything))

    def _in_two(
        self,
        q: Any,
        k: Any,
        w: jax.Array,
        visibility: Visibility,
        coarse: jax.Array | None,
        vectors: jax.Array | None,
        everything: Any,
    ) -> tuple[jax.Array, jax.Array]:
        scores, seen = self._coarse_scores(q, k, w, visibility, coarse, vectors)
        best, blocks = jax.lax.top_k(scores, self.kept)
        count = jnp.sum(seen, axis=-1, dtype=jnp.int32)
        most = jnp.maximum(
            jnp.ceil(self.settings.kept_fraction * count).astype(jnp.int32), self.settings.fewest(self.top_k)
        )
        kept = (jnp.arange(self.kept) < most[..., None]) & (best > -jnp.inf)
        num_blocks = scores.shape[-1]
        ordered = jnp.sort(jnp.where(kept, blocks, num_blocks), axis=-1)
        found, positions = self.score_blocks(q, k, w, visibility, ordered)
        result = chosen(found, self.top_k, positions)
        if self.settings.coarse != "bound":
            return result
        taken = jnp.put_along_axis(
            jnp.zeros((*scores.shape[:-1], num_blocks + 1), bool), ordered, True, axis=-1, inplace=False
        )[..., :num_blocks]
        largest_left = jnp.max(jnp.where(seen & ~taken, scores, -jnp.inf), axis=-1)
        # Equal to the last that was selected is not enough: the key might be at a lower position.
        least = jnp.min(jnp.where(result[0] < 0, -jnp.inf, result[1]), axis=-1)
        proved = (largest_left == -jnp.inf) | (largest_left < least)
        return jax.lax.cond(jnp.all(proved), lambda: result, everything)

    def _coarse_scores(
        self,
        q: Any,
        k: Any,
        w: jax.Array,
        visibility: Visibility,
        coarse: jax.Array | None,
        vectors: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        """[B, T, N] coarse scores, +inf of blocks that are kept whatever they score, -inf of unseen ones; and who sees."""
        q, dtype = plain(q), score_dtype(q, w)
        num_keys, largest = k.shape[1], jnp.finfo(dtype).max
        if coarse is None:
            assert vectors is not None
            scores = self._linear_scores(vectors, k, visibility)
        elif self.settings.coarse == "bound":
            width = q.shape[-1]
            signed = jnp.concatenate([jnp.maximum(q, 0), jnp.minimum(q, 0)], axis=-1)
            positive = jnp.maximum(w, 0)
            scores = tile_scores(signed, coarse, positive)
            # Sums in another order, of numbers of another size than the scores': what either may be off by.
            sizes = jnp.maximum(jnp.abs(coarse[..., :width]), jnp.abs(coarse[..., width:]))
            terms = einsum("bthk,bsk->bths", jnp.abs(q), sizes)
            terms = einsum("bth,bths->bts", jnp.abs(w), terms)
            scores += 4 * (width + q.shape[2]) * jnp.finfo(dtype).eps * terms
        else:
            scores = tile_scores(q, coarse, w)
        scores = jnp.where(jnp.isnan(scores), largest, jnp.clip(scores, -largest, largest))
        counts = self._visible_counts(visibility, num_keys, scores.shape[-1])
        seen = counts > 0
        places = jnp.arange(scores.shape[-1])
        first = jnp.argmax(seen, axis=-1)[..., None]
        newest = jnp.max(jnp.where(seen, places, -1), axis=-1)[..., None]
        forced = (counts < self.settings.block_size) | (places == first) | (places == newest)
        return jnp.where(seen, jnp.where(forced, jnp.inf, scores), -jnp.inf), seen

    def _linear_scores(self, vectors: jax.Array, k: Any, visibility: Visibility) -> jax.Array:
        """[B, T, N] largest of each block's products, a tile of keys at a time; keys that are invisible count as -inf."""
        size, num_keys = self.settings.block_size, k.shape[1]
        tile, dtype = min(self.tile, num_keys), vectors.dtype

        def step(i: jax.Array, scores: jax.Array) -> jax.Array:
            start = jnp.minimum(i * tile, num_keys - tile)
            keys = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, tile, axis=1), pinned(k, i))
            part = einsum("btk,bsk->bts", vectors, plain(keys), out=dtype)
            part = jnp.where(visibility.tile(start, tile), part, -jnp.inf)
            return jax.lax.dynamic_update_slice_in_dim(scores, part, start, axis=2)

        scores = jnp.full((*vectors.shape[:2], num_keys), -jnp.inf, dtype)
        tiles = (visibility.end(num_keys) + tile - 1) // tile
        scores = jax.lax.fori_loop(0, tiles, step, scores)
        if size == 1:
            return scores
        scores = jnp.pad(scores, ((0, 0), (0, 0), (0, -num_keys % size)), constant_values=-jnp.inf)
        return jnp.max(scores.reshape(*scores.shape[:2], -1, size), axis=-1)

    def _visible_counts(self, visibility: Visibility, num_keys: int, num_blocks: int) -> jax.Array:
        """[B, T, N]: keys of each block that a query sees."""
        size = self.settings.block_size
        if visibility.key_segments is None:
            last = jnp.minimum(visibility.q_positions + 1, num_keys)[..., None]
            return jnp.clip(last - jnp.arange(num_blocks) * size, 0, size)
        mask = visibility.tile(jnp.int32(0), num_keys)
        mask = jnp.pad(mask, ((0, 0), (0, 0), (0, num_blocks * size - num_keys)))
        return jnp.sum(mask.reshape(*mask.shape[:2], num_blocks, size), axis=-1, dtype=jnp.int32)

    def score_blocks(
        self,
        q: Any,
        k: Any,
        w: jax.Array,
        visibility: Visibility,
        blocks: jax.Array,
        gather: Callable[[jax.Array], jax.Array] | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Scores of the keys of the named blocks, -inf where invisible, and their positions: both [B, T, kept · size].

        `gather` finds blocks [B, T, N, size, K] by their numbers [B, T, N], all of which exist.
        """
        size, num_keys = self.settings.block_size, k.shape[1]
        q, dtype = plain(q), score_dtype(q, k, w)
        num_blocks = -(-num_keys // size)
        padding = -blocks.shape[-1] % self.chunk
        blocks = jnp.pad(blocks, ((0, 0), (0, 0), (0, padding)), constant_values=num_blocks)
        blocked = self._blocked(k)
        gather = gather or (
            lambda index: plain(jax.tree.map(lambda x: jax.vmap(lambda row, i: row[i])(x, index), blocked))
        )
        lowest = jnp.finfo(dtype).min
        shape = *blocks.shape[:2], blocks.shape[2] * size

        def visible(positions: jax.Array) -> jax.Array:
            mask = positions <= jnp.minimum(visibility.q_positions, num_keys - 1)[..., None]
            if visibility.key_segments is None or visibility.q_segments is None:
                return mask
            pick = jax.vmap(lambda segments, chosen: segments[chosen])
            segments = pick(visibility.key_segments, jnp.minimum(positions, num_keys - 1))
            return mask & (segments == visibility.q_segments[..., None]) & (segments >= 0)

        def step(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            scores, positions = carry
            chosen = jax.lax.dynamic_slice_in_dim(blocks, i * self.chunk, self.chunk, axis=2)
            inside = jnp.minimum(chosen, num_blocks - 1)
            keys = gather(inside).reshape(*chosen.shape[:2], self.chunk * size, -1)
            dots = einsum("bthk,btsk->bths", q, keys)
            dots = jnp.where(dots <= 0, 0, dots)
            part = einsum("bth,bths->bts", w, dots)
            places = (chosen[..., None] * size + jnp.arange(size)).reshape(*chosen.shape[:2], -1)
            part = jnp.where(part > lowest, part, lowest)
            part = jnp.where(visible(places), part, -jnp.inf)
            start = i * self.chunk * size
            return (
                jax.lax.dynamic_update_slice_in_dim(scores, part, start, axis=2),
                jax.lax.dynamic_update_slice_in_dim(positions, places.astype(jnp.int32), start, axis=2),
            )

        empty = jnp.full(shape, -jnp.inf, dtype), jnp.zeros(shape, jnp.int32)
        return jax.lax.fori_loop(0, blocks.shape[2] // self.chunk, step, empty)

    def _blocked(self, k: Any) -> Any:
        """Keys as [B, N, size, K], zeros behind the last."""
        size = self.settings.block_size
        count = -(-k.shape[1] // size)

        def cut(x: jax.Array) -> jax.Array:
            padding = count * size - x.shape[1]
            x = jnp.pad(x, ((0, 0), (0, padding), (0, 0))) if padding else x
            return x.reshape(x.shape[0], count, size, x.shape[2])

        return jax.tree.map(cut, k)


def chosen(scores: jax.Array, top_k: int, positions: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The positions of the best scores, ascending, -1 at the end, and these scores."""
    indices = selected_indices(select(scores, top_k), top_k)
    best = jnp.take_along_axis(scores, jnp.maximum(indices, 0), axis=-1)
    if positions is not None:
        indices = jnp.where(indices < 0, -1, jnp.take_along_axis(positions, jnp.maximum(indices, 0), axis=-1))
    return indices, jnp.where(indices < 0, -jnp.inf, best)
