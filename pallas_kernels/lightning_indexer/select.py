"""Exact top-k selection without sorting: find each row's k-th largest score, then the last tie that still fits."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.lightning_indexer.blocks import pinned
from pallas_kernels.lightning_indexer.pages import PagedKeys
from pallas_kernels.lightning_indexer.visibility import Visibility
from pallas_kernels.mxfp8 import Mxfp8
from pallas_kernels.precision import at_least_float32, einsum
from pallas_kernels.target import platform


class Selection(NamedTuple):
    """Selected keys: score above the threshold, or equal to it at a position up to the cutoff; never one of -inf."""

    scores: Float[Array, "B T S"]
    threshold: Float[Array, "B T"]
    cutoff: Int[Array, "B T"]

    def tile(self, start: jax.Array, size: int) -> Bool[Array, "B T C"]:
        """Membership of the keys `start .. start + size - 1`."""
        scores = jax.lax.dynamic_slice_in_dim(self.scores, start, size, axis=2)
        threshold, cutoff = self.threshold[..., None], self.cutoff[..., None]
        tie = (scores == threshold) & (start + jnp.arange(size) <= cutoff) & (threshold > -jnp.inf)
        return (scores > threshold) | tie


def tile_scores(
    q: Float[Array, "B T H K"], k: Float[Array, "B S K"], w: Float[Array, "B T H"]
) -> Float[Array, "B T S"]:
    """`sum_h w[t, h] * relu(q[t, h] . k[s])` in float32 or better, all heads of one tile of keys at once."""
    dots = einsum("bthk,bsk->bths", q, k)
    dots = jnp.where(dots <= 0, 0, dots)  # jax.nn.relu turns NaN into 0 on CPUs, but only in some fusions
    # The sum over heads is a product too: as an elementwise sum it takes ten times as long on CPUs.
    return einsum("bth,bths->bts", w, dots)


def plain(array: jax.Array | Mxfp8) -> jax.Array:
    """MXFP8 as bfloat16, which holds it exactly; anything else as it is."""
    return array.dequantize(jnp.bfloat16) if isinstance(array, Mxfp8) else array


def score_dtype(*arrays: jax.Array | Mxfp8 | PagedKeys) -> jnp.dtype:
    """In which scores are summed: float32 or better."""
    kinds = [array.pages if isinstance(array, PagedKeys) and not array.mxfp8 else array for array in arrays]
    return at_least_float32(*(jnp.bfloat16 if isinstance(kind, Mxfp8 | PagedKeys) else kind for kind in kinds))


def score_keys(
    q: Float[Array, "B T H K"] | Mxfp8,
    k: Float[Array, "B S K"] | Mxfp8 | PagedKeys,
    w: Float[Array, "B T H"],
    visibility: Visibility,
    tile: int,
    *,
    rankable: bool,
) -> Float[Array, "B T S"]:
    """Scores of a block of queries, -inf where invisible; key tiles that no query of the block sees aren't computed.

    `rankable` lifts NaN and -inf of a visible key to the lowest finite number: such a key loses against every other
    visible key and still wins against invisible ones.
    """
    num_keys = k.shape[1]
    tile = min(tile, num_keys)
    q, dtype = plain(q), score_dtype(q, k, w)
    lowest = jnp.finfo(dtype).min

    def step(i: jax.Array, scores: jax.Array) -> jax.Array:
        start = jnp.minimum(i * tile, num_keys - tile)
        keys = pinned(k, i)
        if isinstance(keys, PagedKeys):
            keys = keys.tile(start, tile)
        else:
            keys = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, tile, axis=1), keys)
        block = tile_scores(q, plain(keys), w)
        if rankable:
            block = jnp.where(block > lowest, block, lowest)
        block = jnp.where(visibility.tile(start, tile), block, -jnp.inf)
        return jax.lax.dynamic_update_slice_in_dim(scores, block, start, axis=2)

    scores = jnp.full((*q.shape[:2], num_keys), -jnp.inf, dtype)
    tiles = (visibility.end(num_keys) + tile - 1) // tile
    with jax.named_scope(f"scored_tiles_of_{tile}_keys"):
        return jax.lax.fori_loop(0, tiles, step, scores)


def select(scores: Float[Array, "B T S"], top_k: int) -> Selection:
    """The `top_k` largest scores of each row, ties to the lowest position; -0.0 and +0.0 tie; no NaN in `scores`."""
    num_keys = scores.shape[-1]
    no_cutoff = jnp.full(scores.shape[:-1], num_keys - 1, jnp.int32)
    if num_keys <= top_k:
        return Selection(scores, jnp.full(scores.shape[:-1], -jnp.inf, scores.dtype), no_cutoff)

    threshold = kth_largest(scores, top_k, 1 if platform() == "cpu" else 4)
    above = _count(scores > threshold[..., None])
    wanted = top_k - above
    tied = (threshold > -jnp.inf) & (_count(scores == threshold[..., None]) > wanted)

    def search_cutoff() -> jax.Array:
        positions = jnp.arange(num_keys)

        def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            low, high = bounds
            middle = (low + high) // 2
            ties = _count((scores == threshold[..., None]) & (positions <= middle[..., None]))
            enough = ties >= wanted
            return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

        steps = (num_keys - 1).bit_length()
        return jax.lax.fori_loop(0, steps, halve, (jnp.zeros_like(no_cutoff), no_cutoff))[1]

    # More ties than places is rare outside the plateau of exact zeros: the search for the cutoff is usually skipped.
    return Selection(scores, threshold, jax.lax.cond(jnp.any(tied), search_cutoff, lambda: no_cutoff))


def select_block(
    q: Float[Array, "B T H K"] | Mxfp8,
    k: Float[Array, "B S K"] | Mxfp8 | PagedKeys,
    w: Float[Array, "B T H"],
    visibility: Visibility,
    top_k: int,
    tile: int,
) -> Selection:
    """Scores and selects for one block of queries; a block that sees at most `top_k` keys is not scored."""
    num_keys = k.shape[1]

    def everything() -> Selection:
        scores = jnp.where(visibility.tile(jnp.int32(0), num_keys), 0, -jnp.inf).astype(score_dtype(q, k, w))
        return select(scores, num_keys)

    if num_keys <= top_k:
        return everything()
    return jax.lax.cond(
        visibility.end(num_keys) <= top_k,
        everything,
        lambda: select(score_keys(q, k, w, visibility, tile, rankable=True), top_k),
    )


def selected_indices(selection: Selection, top_k: int) -> Int[Array, "B T C"]:
    """Positions of the selected keys, ascending, padded with -1 to width `top_k`."""
    num_keys = selection.scores.shape[-1]
    counts = jnp.cumsum(selection.tile(jnp.int32(0), num_keys), axis=-1, dtype=jnp.int32)
    width = min(top_k, num_keys)
    nth = jnp.arange(1, width + 1, dtype=jnp.int32)
    find = jnp.vectorize(lambda row: jnp.searchsorted(row, nth).astype(jnp.int32), signature="(s)->(k)")
    indices = jnp.where(nth <= counts[..., -1:], find(counts), -1)
    return jnp.pad(indices, ((0, 0), (0, 0), (0, top_k - width)), constant_values=-1)


def kth_largest(scores: Float[Array, "B T S"], k: int, digit_bits: int) -> Float[Array, "B T"]:
    """The k-th largest number of each row, -inf where fewer than k are above it; no NaN in `scores`.

    Numbers are ordered like the unsigned integers that their bits become, and those of the answer are found from the
    highest down, `digit_bits` (a divisor of the width) in a pass that counts once for each digit but 0. A GPU reads the
    scores from its memory in each pass and counts for nothing; a CPU has them in its cache and pays for counting.
    """
    width = jnp.finfo(scores.dtype).bits
    unsigned = jnp.dtype(f"uint{width}")
    sign = jnp.array(1, unsigned) << (width - 1)
    digits = [jnp.array(digit, unsigned) for digit in range(1, 2**digit_bits)]

    def order() -> jax.Array:
        bits = jax.lax.bitcast_convert_type(jnp.where(scores == 0, 0, scores), unsigned)  # one zero, not two
        return jnp.where(bits & sign, ~bits, bits | sign)

    def find_digit(step: jax.Array, found: jax.Array) -> jax.Array:
        shift = (width - digit_bits * (step + 1)).astype(unsigned)
        above = [_count(order() >= (found | (digit << shift))[..., None]) >= k for digit in digits]
        return found | (_count(jnp.stack(above, axis=-1)).astype(unsigned) << shift)

    found = jax.lax.fori_loop(0, width // digit_bits, find_digit, jnp.zeros(scores.shape[:-1], unsigned))
    return jax.lax.bitcast_convert_type(jnp.where(found & sign, found ^ sign, ~found), scores.dtype)


def _count(mask: jax.Array) -> jax.Array:
    return jnp.sum(mask, axis=-1, dtype=jnp.int32)
