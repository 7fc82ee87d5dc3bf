"""The best `top_k` keys of eight queries on a TPU, exactly, whose scores lie in VMEM as integers in their order.

A register holds 128 keys of eight queries. Three steps, and all queries take them together:

1. The k-th largest score, by bisection between the smallest and the largest one: a pass over VMEM counts what is at or
   above the middle. It ends early once every query has found a number with exactly k scores at or above it.
2. Bits of what is selected, 32 keys a word, so that the last step meets a thirty-second of the registers. The matrix unit
   sums up powers of two. Where more scores equal the k-th than there is room for, ties beyond it lose their bits, the
   highest positions first.
3. Positions. Ranks are sums of the words' numbers of bits. A lane of the result searches for the word that holds its rank,
   by gathers within a register, and then for the bit within the word, by counting bits.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES, SUBLANES, WORD = 128, 8, 32
TILE = LANES * WORD
"""Keys of which a register holds the bits."""

INVISIBLE = np.int32(-(2**31))
_LOWEST_FINITE = np.int32(-0x7F800000)
_INFINITE = np.int32(0x7F800000)
_HALF, _WORDS = WORD // 2, LANES // WORD
_WORD_BITS, _LANE_BITS = WORD.bit_length() - 1, LANES.bit_length() - 1  # shifts, because division is slow


class Places(NamedTuple):
    """Where the selection of eight queries works; references to VMEM.

    Attributes:
        orders: [tiles, 32, 8, 128] int32, of scores, `INVISIBLE` where a query sees no key.
        bits: [tiles, 8, 128] int32, scratch.
        found: [ceil(top_k / 128), 8, 128] int32 positions, the result.
    """

    orders: Any
    bits: Any
    found: Any


def order(scores: jax.Array) -> jax.Array:
    """Float32 scores as integers of the same order; NaN and -inf become the lowest finite number, -0.0 becomes +0.0."""
    bits = jax.lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.int32)
    turned = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return jnp.where(turned > _INFINITE, _LOWEST_FINITE, jnp.maximum(turned, _LOWEST_FINITE))


def select(places: Places, tiles: Any, top_k: int) -> None:
    """Fills `places.found` with the ascending positions of the best keys among the first `tiles`, -1 behind the last."""
    threshold, reached = _kth_largest(places.orders, tiles, top_k)
    _pack(places.orders, places.bits, tiles, threshold)

    @pl.when(_highest(reached) > top_k)
    def drop_ties() -> None:
        above = _sum_over(tiles, lambda tile: _at_least(places.orders[tile], threshold + 1))
        # A query with enough room keeps all its ties: their number isn't above what is wanted.
        wanted = jnp.where(reached > top_k, top_k - _across(jnp.add, above), reached)
        _cut(places.orders, places.bits, tiles, threshold, wanted)

    _emit(places.bits, places.found, tiles)


def _across(combine: Any, x: jax.Array) -> jax.Array:
    """Every lane with the combination of all lanes."""
    shift = LANES // 2
    while shift:
        x = combine(x, pltpu.roll(x, shift, 1))
        shift //= 2
    return x


def _at_least(orders: jax.Array, bound: jax.Array) -> jax.Array:
    """How many of a tile's keys reach `bound`, lane by lane."""
    return jnp.sum(jnp.where(orders >= bound, 1, 0), axis=0)


def _sum_over(tiles: Any, count: Any) -> jax.Array:
    def add(tile: Any, total: jax.Array) -> jax.Array:
        return total + count(tile)

    return jax.lax.fori_loop(0, tiles, add, jnp.zeros((SUBLANES, LANES), jnp.int32))


def _kth_largest(orders: Any, tiles: Any, top_k: int) -> tuple[jax.Array, jax.Array]:
    """A bound that at least top_k scores reach, and how many do; above it fewer than top_k are left unless exactly top_k do.

    Where a query sees at most top_k keys, everything visible reaches the bound.
    """

    def extremes(tile: Any, so_far: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        lowest, highest, seen = so_far
        scores = orders[tile]
        visible = scores > INVISIBLE
        lowest = jnp.minimum(lowest, jnp.min(jnp.where(visible, scores, _INFINITE), axis=0))
        highest = jnp.maximum(highest, jnp.max(scores, axis=0))
        return lowest, highest, seen + jnp.sum(jnp.where(visible, 1, 0), axis=0)

    shape = SUBLANES, LANES
    empty = jnp.full(shape, _INFINITE), jnp.full(shape, INVISIBLE), jnp.zeros(shape, jnp.int32)
    lowest, highest, seen = jax.lax.fori_loop(0, tiles, extremes, empty)
    low, reached = _across(jnp.minimum, lowest), _across(jnp.add, seen)
    high = jnp.where(reached <= top_k, low + 1, _across(jnp.maximum, highest) + 1)

    def wide(state: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        low, high, _ = state
        return jnp.max(jnp.where(high != low + 1, 1.0, 0.0)) > 0

    def halve(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        low, high, reached = state
        middle = (low & high) + ((low ^ high) >> 1)
        count = _across(jnp.add, _sum_over(tiles, lambda tile: _at_least(orders[tile], middle)))
        narrow = high == low + 1
        enough = (count >= top_k) & ~narrow
        high = jnp.where(narrow, high, jnp.where(enough, jnp.where(count == top_k, middle + 1, high), middle))
        return jnp.where(enough, middle, low), high, jnp.where(enough, count, reached)

    low, _, reached = jax.lax.while_loop(wide, halve, (low, high, reached))
    return low, reached


def _packer() -> Any:
    """A function from what is chosen of a tile to its bits: bit b of lane l stands for key 32 l + b."""
    # Lane l of 128 keys belongs to their word l / 32, which all lanes of the product with that remainder by 4 get. Of
    # those, register c of a tile is to fill the lanes 4 c to 4 c + 3.
    key, word = (jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), axis) for axis in range(2))
    mine, place = key >> _WORD_BITS == word & (_WORDS - 1), key & (WORD - 1)
    halves = [
        jnp.where(mine & (place >> (_WORD_BITS - 1) == half), (1 << (place & (_HALF - 1))).astype(jnp.float32), 0.0)
        for half in range(2)
    ]
    powers = jnp.concatenate(halves, axis=1).astype(jnp.bfloat16)
    number = jax.lax.broadcasted_iota(jnp.int32, (WORD, SUBLANES, LANES), 0)
    filled = number == jax.lax.broadcasted_iota(jnp.int32, number.shape, 2) >> (_LANE_BITS - _WORD_BITS)

    def pack(chosen: jax.Array) -> jax.Array:
        ones = jnp.where(chosen, 1.0, 0.0).reshape(-1, LANES).astype(jnp.bfloat16)
        sums = jnp.dot(ones, powers, preferred_element_type=jnp.float32).reshape(WORD, SUBLANES, 2 * LANES)
        low, high = (
            jnp.sum(jnp.where(filled, sums[..., half * LANES : (half + 1) * LANES], 0.0), axis=0).astype(jnp.int32)
            for half in range(2)
        )
        return low | (high << _HALF)

    return pack


def _ranker() -> Any:
    """A function from numbers of bits to (their sums up to each lane, their sum in all lanes)."""
    lane, upto = (jax.lax.broadcasted_iota(jnp.int32, (LANES, 2 * LANES), axis) for axis in range(2))
    ones = jnp.where(lane <= upto, 1.0, 0.0).astype(jnp.bfloat16)

    def rank(counts: jax.Array) -> tuple[jax.Array, jax.Array]:
        sums = jnp.dot(counts.astype(jnp.float32).astype(jnp.bfloat16), ones, preferred_element_type=jnp.float32)
        sums = sums.astype(jnp.int32)
        return sums[:, :LANES], sums[:, LANES:]

    return rank


def _place_of_bit(bits: jax.Array, rank: jax.Array) -> jax.Array:
    """The place of the set bit that has `rank` set ones below it, which there must be."""
    place, width = jnp.zeros_like(bits), WORD // 2
    while width:
        below = jax.lax.population_count((bits >> place) & ((1 << width) - 1))
        beyond = rank >= below
        rank = jnp.where(beyond, rank - below, rank)
        place = jnp.where(beyond, place + width, place)
        width //= 2
    return place


def _pack(orders: Any, bits: Any, tiles: Any, threshold: jax.Array) -> None:
    """Bits of the keys whose order reaches `threshold`."""
    pack = _packer()

    def one(tile: Any, carry: Any) -> Any:
        bits[tile] = pack(orders[tile] >= threshold)
        return carry

    jax.lax.fori_loop(0, tiles, one, 0)


def _cut(orders: Any, bits: Any, tiles: Any, threshold: jax.Array, wanted: jax.Array) -> None:
    """Takes the bits of the keys whose order is `threshold`, but of the first `wanted`."""
    pack, rank = _packer(), _ranker()

    def one(tile: Any, before: jax.Array) -> jax.Array:
        ties = pack(orders[tile] == threshold)
        counts = jax.lax.population_count(ties)
        upto, total = rank(counts)
        room = jnp.maximum(wanted - (before + upto - counts), 0)
        kept = (1 << _place_of_bit(ties, room)) - 1
        bits[tile] = jnp.where(room < counts, bits[tile] & (~ties | kept), bits[tile])
        return before + total

    jax.lax.fori_loop(0, tiles, one, jnp.zeros((SUBLANES, LANES), jnp.int32))


def _emit(bits: Any, found: Any, tiles: Any) -> None:
    """Positions of the bits that are set."""
    rank = _ranker()
    lane = jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 1)

    def clear(block: Any, carry: Any) -> Any:
        found[block] = jnp.full((SUBLANES, LANES), -1)
        return carry

    def one(tile: Any, before: jax.Array) -> jax.Array:
        words = bits[tile]
        upto, total = rank(jax.lax.population_count(words))
        first, last = _lowest(before) >> _LANE_BITS, _highest(before + total - 1) >> _LANE_BITS

        def fill(block: Any, carry: Any) -> Any:
            wanted = block * LANES + lane - before
            owner, step = jnp.zeros_like(lane), LANES // 2
            while step:
                passed = _gather(upto, owner + (step - 1)) <= wanted
                owner = jnp.where(passed, owner + step, owner)
                step //= 2
            word = _gather(words, owner)
            behind = _gather(upto, owner) - jax.lax.population_count(word)
            position = tile * TILE + owner * WORD + _place_of_bit(word, wanted - behind)
            found[block] = jnp.where((wanted >= 0) & (wanted < total), position, found[block])
            return carry

        jax.lax.fori_loop(first, jnp.minimum(last + 1, found.shape[0]), fill, 0)
        return before + total

    jax.lax.fori_loop(0, found.shape[0], clear, 0)
    jax.lax.fori_loop(0, tiles, one, jnp.zeros((SUBLANES, LANES), jnp.int32))


def _gather(x: jax.Array, lanes: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, lanes, axis=1, mode="promise_in_bounds")


def _lowest(counts: jax.Array) -> jax.Array:
    return jnp.min(counts.astype(jnp.float32)).astype(jnp.int32)


def _highest(counts: jax.Array) -> jax.Array:
    return jnp.max(counts.astype(jnp.float32)).astype(jnp.int32)
