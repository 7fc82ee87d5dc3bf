"""What a warp does to choose a token's experts, and warps together to sort assignments, in the words of `gpu_warp.Warp`."""

from collections.abc import Sequence
from typing import Any

LANES = 32

_NOTHING = -(2**31)
"""Below the order of every score."""


def order(warp: Any, score: Any) -> Any:
    """A float32 as an integer of the same order: the bits, with those of negative numbers turned around."""
    bits = warp.bits(warp.add_real(score, warp.real(0.0)))  # one zero, not two
    return warp.differ(bits, warp.both(warp.sign_mask(bits), 0x7FFFFFFF))


def select(
    warp: Any,
    token: Any,
    scores: Any,
    bias: Any,
    experts: Any,
    weights: Any,
    *,
    num_experts: int,
    top_k: int,
    renormalize: bool,
    scale: float,
    biased_weights: bool,
) -> None:
    """Chooses a token's experts, best first, the lower of two equal ones, and weighs them.

    Lane i holds the scores of experts i, i + 32, ... Each step takes the best of all lanes' best and takes it away.

    Args:
        warp: the words.
        token: its number.
        scores: place of [M, E].
        bias: place of [E].
        experts: place of [M, k] to fill.
        weights: place of [M, k] to fill.
        num_experts: E.
        top_k: k, at most 32.
        renormalize: whether weights are divided by their sum.
        scale: what they're multiplied with then.
        biased_weights: whether they include the bias.
    """
    line = warp.offset(scores, warp.mul(token, num_experts))
    orders = []
    for first in range(0, num_experts, LANES):
        mine = warp.add(warp.lane, first)
        there = warp.compare("lt", mine, num_experts)
        safe = mine if first + LANES <= num_experts else warp.smaller(mine, num_experts - 1)
        biased = warp.add_real(warp.load_real(line, safe), warp.load_real(bias, safe))
        orders.append(warp.select(there, order(warp, biased), _NOTHING))

    def step(index: Any, chosen: Any, *orders: Any) -> Sequence[Any]:
        best, expert = orders[0], warp.lane
        for number, value in enumerate(orders[1:], 1):
            # Ascending experts: an equal one doesn't replace an earlier one.
            above = warp.compare("gt", value, best)
            best = warp.larger(best, value)
            expert = warp.select(above, warp.add(warp.lane, number * LANES), expert)
        top = warp.largest(best)
        lowest = warp.sub(0, warp.largest(warp.select(warp.compare("eq", best, top), warp.sub(0, expert), _NOTHING)))
        chosen = warp.select(warp.compare("eq", warp.lane, index), lowest, chosen)
        left = [
            warp.select(warp.compare("eq", warp.add(warp.lane, number * LANES), lowest), _NOTHING, value)
            for number, value in enumerate(orders)
        ]
        return [chosen, *left]

    chosen, *_ = warp.loop(warp.integer(top_k), step, [warp.integer(0), *orders])
    counted = warp.compare("lt", warp.lane, top_k)
    weight = warp.load_real(line, chosen)
    if biased_weights:
        weight = warp.add_real(weight, warp.load_real(bias, chosen))
    if renormalize:
        total = warp.select(counted, weight, warp.real(0.0))
        for distance in (16, 8, 4, 2, 1):
            total = warp.add_real(total, warp.from_lane_xor(total, distance))
        weight = warp.ratio(weight, warp.add_real(total, warp.real(1e-20)))
    at = warp.add(warp.mul(token, top_k), warp.lane)
    warp.store(experts, at, chosen, counted)
    warp.store_real(weights, at, warp.mul_real(weight, warp.real(scale)), counted)


def chunks_of(num_experts: int) -> int:
    """Groups of 32 buckets: one for each expert, one for what has none, one for what isn't there."""
    return -(-(num_experts + 2) // LANES)


def room_for(num_experts: int, warps: int) -> int:
    """int32 numbers in shared memory that `sort` needs."""
    chunks = chunks_of(num_experts)
    return (warps + 1) * chunks * LANES + chunks


def sort(
    warp: Any,
    experts: Any,
    valid: Any,
    first: Any,
    order: Any,
    sizes: Any,
    place: Any,
    room: Any,
    *,
    count: int,
    per_token: int,
    num_experts: int,
    warps: int,
) -> None:
    """Sorts assignments by expert, those of an expert in their own order; the warps of a block together.

    Each warp counts the experts of its share, then finds each assignment's place from what comes before: experts below,
    the same expert in earlier warps' shares, in its own share so far, and in lower lanes.

    Args:
        warp: the words.
        experts: place of [A].
        valid: place of [A / k] int32; 0 where a token's assignments have no expert.
        first: place of [1]: the expert that is counted as number 0.
        order: place of [A] to fill: assignments by expert.
        sizes: place of [E] to fill: how many each expert has.
        place: place of [A] to fill: where each assignment is in `order`.
        room: `room_for` numbers of shared memory.
        count: A.
        per_token: k.
        num_experts: E, at most 1022. Anything outside 0..E−1 is no expert, and comes last.
        warps: of the block.
    """
    chunks = chunks_of(num_experts)
    buckets = chunks * LANES
    mine = warp.offset(room, warp.mul(warp.of_block, buckets))
    starts = warp.offset(room, warp.integer(warps * buckets))
    sums = warp.offset(room, warp.integer((warps + 1) * buckets))
    steps = -(-count // (LANES * warps))
    zeroth = warp.load(first, warp.integer(0))
    begin = warp.mul(warp.of_block, steps * LANES)

    def clear(chunk: Any) -> Sequence[Any]:
        warp.store(mine, warp.add(warp.mul(chunk, LANES), warp.lane), warp.integer(0))
        return []

    warp.loop(warp.integer(chunks), clear, [])
    warp.meet()

    def look(step: Any) -> tuple[Any, Any, Any, Any]:
        """This lane's assignment, its bucket, and how many of it this warp has seen before it."""
        number = warp.add(warp.add(begin, warp.mul(step, LANES)), warp.lane)
        there = warp.compare("lt", number, count)
        safe = warp.smaller(number, count - 1)
        expert = warp.sub(warp.load(experts, safe), zeroth)
        known = warp.both(warp.compare("ge", expert, 0), warp.compare("lt", expert, num_experts))
        known = warp.both(known, warp.compare("ne", warp.load(valid, warp.quotient(safe, per_token)), 0))
        bucket = warp.select(there, warp.select(known, expert, num_experts), num_experts + 1)
        same = warp.alike(bucket)
        before = warp.ones(warp.both(same, warp.below))
        seen = warp.load(mine, bucket)
        warp.meet()
        warp.store(mine, bucket, warp.add(seen, warp.ones(same)), warp.compare("eq", before, 0))
        warp.meet()
        return number, there, bucket, warp.add(seen, before)

    def tally(step: Any) -> Sequence[Any]:
        look(step)
        return []

    warp.loop(warp.integer(steps), tally, [])
    warp.meet_all()

    def each_chunk(act: Any) -> None:
        def step(index: Any) -> Sequence[Any]:
            chunk = warp.add(warp.mul(index, warps), warp.of_block)
            warp.when(warp.compare("lt", chunk, chunks), lambda: act(chunk))
            return []

        warp.loop(warp.integer(-(-chunks // warps)), step, [])

    def add_up(chunk: Any) -> None:
        """Where each warp's share of a bucket begins in it, and where buckets begin in their chunk."""
        bucket = warp.add(warp.mul(chunk, LANES), warp.lane)

        def step(number: Any, total: Any) -> Sequence[Any]:
            at = warp.add(warp.mul(number, buckets), bucket)
            share = warp.load(room, at)
            warp.store(room, at, total)
            return [warp.add(total, share)]

        [total] = warp.loop(warp.integer(warps), step, [warp.integer(0)])
        upto = warp.upto(total)
        warp.store(starts, bucket, warp.sub(upto, total))
        warp.store(sizes, bucket, total, warp.compare("lt", bucket, num_experts))
        warp.store(sums, chunk, upto, warp.compare("eq", warp.lane, LANES - 1))

    each_chunk(add_up)
    warp.meet_all()

    def shift(chunk: Any) -> None:
        """Adds what earlier chunks hold."""
        bucket = warp.add(warp.mul(chunk, LANES), warp.lane)
        earlier = warp.compare("lt", warp.lane, chunk)
        other = warp.load(sums, warp.smaller(warp.lane, chunks - 1))
        warp.store(starts, bucket, warp.add(warp.load(starts, bucket), warp.total(warp.select(earlier, other, 0))))

    each_chunk(shift)
    warp.meet_all()

    def put(step: Any) -> Sequence[Any]:
        number, there, bucket, before = look(step)
        at = warp.add(warp.load(starts, bucket), before)
        warp.store(place, number, at, there)
        warp.store(order, at, number, there)
        return []

    warp.loop(warp.integer(steps), put, [])
