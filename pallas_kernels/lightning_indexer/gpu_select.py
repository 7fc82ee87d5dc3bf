"""Scores of a warp's query and the running selection among them, in the words of `gpu_warp.Warp`.

A warp owns one query. It keeps candidates (order of score, position) in memory, sorted by position, and a threshold:
at least `top_k` candidates have been at or above it, so a later key must be above it to belong. When the candidates fill
their room they are cut down to about `top_k` and the threshold rises. Nothing that belongs is ever dropped, and equal
scores go to the lowest position because keys come in ascending order.

Scores are ordered as signed integers: a float32's bits, with those of negative numbers turned around.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

INVISIBLE = -(2**31)
"""Order of what isn't there: below every score."""

LOWEST_FINITE, INFINITE = 0x80800000 - 2**32, 0x7F800000
"""Orders of the lowest finite float32, which stands for NaN and -inf, and of +inf."""

THRESHOLD, COUNT, LIMIT, SOON, STATE = 0, 1, 2, 3, 4
"""A query's state in shared memory: threshold, number of candidates, its own position, whether a neighbour is about to
cut, and the size of it all."""

COLUMNS = 128
"""Keys of a tile."""


@dataclass(frozen=True)
class Room:
    """How many candidates a query keeps.

    Attributes:
        top_k: that are wanted.
        size: that fit, a multiple of 32 of at least top_k + slack + 512: two steps of two tiles.
        slack: how many more than top_k may stay when candidates are cut down.
    """

    top_k: int
    size: int
    slack: int


def room_for(top_k: int) -> Room:
    """Candidates that fill at most 112 registers of each lane: a cut reads them once."""
    size = min(3584, -(-(2 * top_k + 1024) // 128) * 128)
    return Room(top_k, size, max(8, min(64, top_k // 16)))


def order(warp: Any, score: Any) -> Any:
    """A float32 score as an integer of the same order; NaN and -inf become the lowest finite number."""
    bits = warp.bits(warp.add_real(score, warp.real(0.0)))  # one zero, not two
    turned = warp.differ(bits, warp.both(warp.sign_mask(bits), 0x7FFFFFFF))
    finite = warp.larger(turned, LOWEST_FINITE)
    return warp.select(warp.compare("gt", turned, INFINITE), LOWEST_FINITE, finite)


def add_heads(warp: Any, dots: Any, weights: Any, totals: dict[tuple[int, int], Any] | None) -> dict:
    """Adds weight times relu(dot) of two heads for the 32 keys that this lane sees.

    Args:
        warp: the words.
        dots: dots[half, block, odd] of head 8 half + lane // 4 and key 8 block + 2 (lane % 4) + odd.
        weights: weights[half] of the same head.
        totals: what to add to, by (block, odd); None is zeros.
    """
    found = {}
    for block in range(COLUMNS // 8):
        for odd in range(2):
            total = warp.real(0.0) if totals is None else totals[block, odd]
            for half in range(2):
                total = warp.multiply_add(weights[half], warp.relu(dots[half, block, odd]), total)
            found[block, odd] = total
    return found


def add_lanes(warp: Any, totals: dict[tuple[int, int], Any]) -> dict[tuple[int, int], Any]:
    """Sums over the lanes that hold other heads of the same keys: lanes 4, 8 and 16 apart.

    In each of three steps they swap half of their keys, so that a lane ends up with 4.

    Returns:
        Scores by (tall, odd) of key 64 tall + 2 lane + odd.
    """
    found = {}
    for odd in range(2):
        sums = {block: totals[block, odd] for block in range(COLUMNS // 8)}
        for bit in (4, 2, 1):
            upper = warp.compare("gt", warp.both(warp.lane, 4 * bit), 0)
            halves = {}
            for block in sums:
                if block & bit:
                    continue
                low, high = sums[block], sums[block | bit]
                mine, theirs = warp.select(upper, high, low), warp.select(upper, low, high)
                halves[block] = warp.add_real(mine, warp.from_lane_xor(theirs, 4 * bit))
            sums = halves
        for tall in range(2):
            found[tall, odd] = sums[8 * tall]
    return found


def make_room(warp: Any, states: Any, candidates: Any, room: Room, tiles: int) -> None:
    """Cuts the candidates when the next `tiles` tiles might not fit.

    The four warps of a warpgroup wait for one another in every product, so they had better cut together: who is almost
    full says so to the others, and whoever hears it cuts as well if that is worth it.

    Args:
        warp: the words.
        states: where the states of the warpgroup's queries are.
        candidates: where this query's candidates are.
        room: how many fit.
        tiles: after which this is asked again.
    """
    state = warp.offset(states, warp.mul(warp.number, STATE))
    count, soon = warp.load(state, warp.integer(COUNT)), warp.load(state, warp.integer(SOON))
    free = warp.sub(room.size, count)
    step = tiles * COLUMNS
    # Who has used half of what it has beyond top_k.
    join = warp.both(warp.compare("ne", soon, 0), warp.compare("gt", count, (room.top_k + room.size) // 2))

    def hear() -> None:
        warp.store(state, warp.integer(SOON), warp.integer(0), warp.compare("eq", warp.lane, 0))

    def say() -> None:
        mine = warp.add(warp.mul(warp.lane, STATE), SOON)
        warp.store(states, mine, warp.integer(1), warp.compare("lt", warp.lane, 4))
        warp.meet()

    warp.when(warp.compare("ne", soon, 0), hear)
    full = warp.either(warp.compare("lt", free, step), join)
    warp.when(full, lambda: cut(warp, state, candidates, room, room.slack))
    warp.when(warp.both(warp.compare("lt", free, 2 * step), warp.compare("eq", soon, 0)), say)


def append(
    warp: Any,
    orders: dict[tuple[int, int], Any],
    positions: dict[tuple[int, int], Any],
    state: Any,
    candidates: Any,
    room: Room,
) -> None:
    """Appends the keys of a tile that are above the threshold; there must be room for all of them.

    Args:
        warp: the words.
        orders: by (tall, odd), of the tile's key 64 tall + 2 lane + odd; INVISIBLE where the query doesn't see the key.
        positions: of the same keys, ascending.
        state: where the query's state is.
        candidates: where its candidates are: orders, then positions.
        room: how many fit.
    """
    threshold = warp.load(state, warp.integer(THRESHOLD))
    passes = {key: warp.compare("gt", value, threshold) for key, value in orders.items()}
    ballots = {key: warp.ballot(value) for key, value in passes.items()}
    some = warp.either(warp.either(ballots[0, 0], ballots[0, 1]), warp.either(ballots[1, 0], ballots[1, 1]))

    def put() -> None:
        count = warp.load(state, warp.integer(COUNT))
        for tall in range(2):
            even, odd = ballots[tall, 0], ballots[tall, 1]
            at = warp.add(
                count, warp.add(warp.ones(warp.both(even, warp.below)), warp.ones(warp.both(odd, warp.below)))
            )
            for which in range(2):
                warp.store(candidates, at, orders[tall, which], passes[tall, which])
                warp.store(candidates, warp.add(at, room.size), positions[tall, which], passes[tall, which])
                at = warp.add(at, warp.count_of(passes[tall, 0]))
            count = warp.add(count, warp.add(warp.ones(even), warp.ones(odd)))
        warp.meet()
        warp.store(state, warp.integer(COUNT), count, warp.compare("eq", warp.lane, 0))
        warp.meet()

    warp.when(warp.compare("ne", some, 0), put)


def cut(warp: Any, state: Any, candidates: Any, room: Room, slack: int) -> None:
    """Leaves the best top_k .. top_k + slack of more than top_k candidates, and raises the threshold to the lowest.

    Candidates stay in registers while they are counted.
    """
    rows = room.size // 32
    count = warp.load(state, warp.integer(COUNT))
    places = [warp.add(warp.lane, 32 * row) for row in range(rows)]
    mine = [_read(warp, candidates, place, count) for place in places]
    highest = mine[0]
    for value in mine[1:]:
        highest = warp.larger(highest, value)

    def number_from(middle: Any) -> Any:
        found = [warp.integer(0) for _ in range(4)]
        for row, value in enumerate(mine):
            found[row % 4] = warp.add(found[row % 4], warp.count_of(warp.compare("ge", value, middle)))
        return warp.total(warp.add(warp.add(found[0], found[1]), warp.add(found[2], found[3])))

    low = warp.load(state, warp.integer(THRESHOLD))  # what stayed in an earlier cut may equal it
    high = warp.add(warp.largest(highest), 1)
    low, ties = search(warp, number_from, low, high, count, room.top_k, slack)
    kept, seen = warp.integer(0), warp.integer(0)
    batches = [range(first, min(first + 8, rows)) for first in range(0, rows, 8)]
    positions: dict[int, Any] = {}
    for number in range(-2, len(batches)):
        # Two batches ahead: they come from the second cache. What stays never moves past what was read.
        for row in batches[number + 2] if number + 2 < len(batches) else ():
            positions[row] = warp.load(candidates, warp.add(places[row], room.size))
        if number < 0:
            continue
        warp.meet()
        for row in batches[number]:
            kept, seen = _keep(warp, candidates, room, mine[row], positions[row], low, ties, kept, seen)
    _settle(warp, state, low, kept)


def cut_slowly(warp: Any, state: Any, candidates: Any, room: Room, slack: int) -> None:
    """`cut` with few registers: candidates are read from memory each time they are counted."""
    count = warp.load(state, warp.integer(COUNT))
    rows = warp.shift_down(warp.add(count, 31), 5)

    def row_of(row: Any) -> Any:
        return warp.add(warp.mul(row, 32), warp.lane)

    def number_from(middle: Any) -> Any:
        def step(row: Any, found: Any) -> list[Any]:
            value = _read(warp, candidates, row_of(row), count)
            return [warp.add(found, warp.count_of(warp.compare("ge", value, middle)))]

        return warp.total(warp.loop(rows, step, [warp.integer(0)])[0])

    def highest_of(row: Any, highest: Any) -> list[Any]:
        return [warp.larger(highest, _read(warp, candidates, row_of(row), count))]

    low = warp.load(state, warp.integer(THRESHOLD))
    high = warp.add(warp.largest(warp.loop(rows, highest_of, [warp.integer(INVISIBLE)])[0]), 1)
    low, ties = search(warp, number_from, low, high, count, room.top_k, slack)

    def keep(row: Any, kept: Any, seen: Any) -> list[Any]:
        place = row_of(row)
        value = _read(warp, candidates, place, count)
        position = warp.load(candidates, warp.add(place, room.size))
        warp.meet()
        kept, seen = _keep(warp, candidates, room, value, position, low, ties, kept, seen)
        warp.meet()
        return [kept, seen]

    kept, _ = warp.loop(rows, keep, [warp.integer(0), warp.integer(0)])
    _settle(warp, state, low, kept)


def search(
    warp: Any, number_from: Callable[[Any], Any], low: Any, high: Any, at_low: Any, top_k: int, slack: int
) -> tuple[Any, Any]:
    """Halves [low, high) until the numbers from `low` on are top_k .. top_k + slack, or `low` alone is left.

    Args:
        warp: the words.
        number_from: how many numbers are at or above one.
        low: at least top_k are at or above it; at_low of them.
        high: fewer than top_k are at or above it.
        at_low: see `low`.
        top_k: see above.
        slack: see above.

    Returns:
        The last `low`, and how many of the numbers that equal it still belong to the best.
    """

    def going(low: Any, high: Any, at_low: Any, at_high: Any) -> Any:
        del at_high
        apart = warp.compare("gt", high, warp.add(low, 1))
        return warp.both(apart, warp.compare("gt", at_low, top_k + slack))

    def halve(low: Any, high: Any, at_low: Any, at_high: Any) -> list[Any]:
        middle = warp.add(warp.both(low, high), warp.halve(warp.differ(low, high)))
        number = number_from(middle)
        enough = warp.compare("ge", number, top_k)
        return [
            warp.select(enough, middle, low),
            warp.select(enough, high, middle),
            warp.select(enough, number, at_low),
            warp.select(enough, at_high, number),
        ]

    low, _, at_low, at_high = warp.repeat(going, halve, [low, high, at_low, warp.integer(0)])
    return low, warp.select(warp.compare("lt", at_low, top_k + slack + 1), 2**30, warp.sub(top_k, at_high))


def stays(warp: Any, value: Any, low: Any, ties: Any, seen: Any) -> tuple[Any, Any]:
    """Which lanes' numbers are above `low`, or equal it and are among the first `ties`; and how many equal it by now."""
    equal = warp.compare("eq", value, low)
    equals = warp.ballot(equal)
    rank = warp.add(seen, warp.ones(warp.both(equals, warp.below)))
    stay = warp.either(warp.compare("gt", value, low), warp.both(equal, warp.compare("lt", rank, ties)))
    return stay, warp.add(seen, warp.ones(equals))


def _read(warp: Any, candidates: Any, place: Any, count: Any) -> Any:
    return warp.select(warp.compare("lt", place, count), warp.load(candidates, place), INVISIBLE)


def _keep(
    warp: Any, candidates: Any, room: Room, value: Any, position: Any, low: Any, ties: Any, kept: Any, seen: Any
) -> tuple[Any, Any]:
    stay, seen = stays(warp, value, low, ties, seen)
    ballot = warp.ballot(stay)
    at = warp.add(kept, warp.ones(warp.both(ballot, warp.below)))
    warp.store(candidates, at, value, stay)
    warp.store(candidates, warp.add(at, room.size), position, stay)
    return warp.add(kept, warp.ones(ballot)), seen


def _settle(warp: Any, state: Any, threshold: Any, count: Any) -> None:
    first_lane = warp.compare("eq", warp.lane, 0)
    warp.meet()
    warp.store(state, warp.integer(THRESHOLD), threshold, first_lane)
    warp.store(state, warp.integer(COUNT), count, first_lane)
    warp.meet()


def begin(warp: Any, state: Any, limit: Any) -> None:
    """An empty selection of a query that sees positions up to `limit`."""
    first_lane = warp.compare("eq", warp.lane, 0)
    warp.meet()
    warp.store(state, warp.integer(THRESHOLD), warp.integer(INVISIBLE), first_lane)
    warp.store(state, warp.integer(COUNT), warp.integer(0), first_lane)
    warp.store(state, warp.integer(LIMIT), limit, first_lane)
    warp.store(state, warp.integer(SOON), warp.integer(0), first_lane)
    warp.meet()


def finish(warp: Any, state: Any, candidates: Any, out: Any, room: Room) -> None:
    """Writes the positions of the best top_k candidates, ascending, with -1 after the last."""
    count = warp.load(state, warp.integer(COUNT))
    warp.when(warp.compare("gt", count, room.top_k), lambda: cut(warp, state, candidates, room, 0))
    count = warp.load(state, warp.integer(COUNT))

    rows = -(-room.top_k // 32)
    batch = min(8, rows)

    def write(step: Any) -> tuple[()]:
        places = [warp.add(warp.mul(step, 32 * batch), warp.add(warp.lane, 32 * row)) for row in range(batch)]
        positions = [warp.load(candidates, warp.add(warp.smaller(at, room.size - 1), room.size)) for at in places]
        for at, position in zip(places, positions, strict=True):
            position = warp.select(warp.compare("lt", at, count), position, -1)
            warp.store(out, at, position, warp.compare("lt", at, room.top_k))
        return ()

    warp.loop(warp.integer(-(-rows // batch)), write, ())
