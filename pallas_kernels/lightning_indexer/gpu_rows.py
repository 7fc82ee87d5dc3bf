"""The Hopper kernel that selects among rows of scores in memory: a block of 16 warps a row.

The top_k-th highest of the highest scores of disjoint groups of keys is a lower bound of the top_k-th best score, and a
close one. Each warp gathers what isn't below it from its 16th of the row, as in `gpu_select`; then all together find the
exact threshold among the few thousand that are left, and write positions in order.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from pallas_kernels.lightning_indexer.gpu_select import (
    COLUMNS,
    COUNT,
    INVISIBLE,
    STATE,
    THRESHOLD,
    Room,
    begin,
    cut_slowly,
    stays,
)

WARPS, GROUP = 16, 16
BOUND_ROWS = 16
"""Group maxima that each lane keeps at most; larger groups are made where there are more."""

_NEAR, _FEW = 32, 8


def row_room(top_k: int) -> Room:
    """Candidates of a warp: about a 16th of top_k as a rule, all of them at worst."""
    most = 32 * GROUP  # of a step
    size = -(-(top_k + 2 * most) // most) * most
    return Room(top_k, size, min(COLUMNS, max(8, top_k // 16)))


def row_bytes(num_keys: int) -> int:
    """Working memory of a row: orders and group maxima."""
    return 4 * (num_keys + num_keys // GROUP)


def block_bytes(top_k: int) -> int:
    """Working memory of a block of threads: candidates of its warps."""
    return WARPS * 2 * 4 * row_room(top_k).size


def select_rows(
    orders: Int[Array, "R S"],
    highest: Int[Array, "R G"],
    limits: Int[Array, " R"],
    top_k: int,
    *,
    blocks: int = 132,
    interpret: Any = None,
) -> Int[Array, "R C"]:
    """Positions of each row's best top_k up to its limit, ascending, -1 after the last."""
    rows = orders.shape[0]
    if interpret is not None:
        return _interpreted(orders, limits, top_k, interpret)
    blocks = min(blocks, rows)
    room = row_room(top_k)

    def kernel(orders: Any, highest: Any, limits: Any, out: Any, candidates: Any, *, shared: Any) -> None:
        me = lax.axis_index("block")

        def one(number: Array, carry: tuple[()]) -> tuple[()]:
            _emit(orders, highest, limits, out, candidates, shared, me + number * blocks, me, room)
            return carry

        lax.fori_loop(0, lax.div(rows - me + (blocks - 1), blocks), one, ())

    out, _ = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((rows, top_k), jnp.int32),
            jax.ShapeDtypeStruct((blocks, WARPS, 2, room.size), jnp.int32),
        ),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=WARPS // 4,
        thread_name="warpgroup",
        scratch_types={"shared": plgpu.SMEM((WARPS * STATE + 4 * WARPS,), jnp.int32)},
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(orders, highest, limits)
    return out


def select_row(
    warp: Any,
    orders: Any,
    highest: Any,
    limit: Any,
    out: Any,
    candidates: Any,
    states: Any,
    shared: Any,
    room: Room,
    num_groups: int,
) -> None:
    """One row, in the words of `gpu_warp.Warp`; all warps of the block call it.

    Args:
        warp: the words.
        orders: place of the row's orders.
        highest: place of its group maxima, `num_groups` of them.
        limit: last visible position.
        out: place of its positions.
        candidates: place of this warp's candidates.
        states: place of the states of all warps.
        shared: place of 4 numbers a warp in shared memory.
        room: of a warp's candidates.
        num_groups: of GROUP keys.
    """
    state = warp.offset(states, warp.mul(warp.of_block, STATE))
    seen = warp.add(limit, 1)
    warp.meet_all()
    bound = lower_bound(warp, highest, seen, shared, room.top_k, num_groups)
    begin(warp, state, limit)
    # What equals the bound passes as well: perhaps there are only just enough.
    threshold = warp.select(warp.compare("eq", bound, INVISIBLE), INVISIBLE, warp.sub(bound, 1))
    warp.store(state, warp.integer(THRESHOLD), threshold, warp.compare("eq", warp.lane, 0))
    warp.meet()

    # A lane takes a whole group, if its highest score is high enough.
    groups = warp.shift_down(warp.add(seen, GROUP - 1), 4)
    rows = warp.shift_down(warp.add(groups, 32 * WARPS - 1), 9)
    first_group = warp.add(warp.mul(warp.mul(warp.of_block, rows), 32), warp.lane)
    last_group = warp.larger(warp.sub(groups, 1), 0)

    def best_of(row: Any) -> Any:
        group = warp.add(first_group, warp.mul(row, 32))
        value = warp.load(highest, warp.smaller(group, last_group))
        return warp.select(warp.compare("lt", group, groups), value, INVISIBLE)

    def take(row: Any, best: Any) -> list[Any]:
        following = best_of(warp.add(row, 1))
        threshold = warp.load(state, warp.integer(THRESHOLD))
        good = warp.compare("gt", best, threshold)
        warp.when(warp.compare("ne", warp.ballot(good), 0), lambda: gather(row, good, threshold))
        return [following]

    def gather(row: Any, good: Any, threshold: Any) -> None:
        group = warp.smaller(warp.add(first_group, warp.mul(row, 32)), last_group)
        start = warp.mul(group, GROUP)
        passes = warp.integer(0)
        for part in range(GROUP // 4):
            for i, value in enumerate(warp.load_four(orders, warp.add(start, 4 * part), good)):
                inside = warp.both(warp.compare("gt", value, threshold), good)
                passes = warp.either(passes, warp.select(inside, 1 << 4 * part + i, 0))
        mine = warp.ones(passes)
        upto = warp.upto(mine)
        count = warp.load(state, warp.integer(COUNT))

        def more(left: Any, at: Any) -> Any:
            del at
            return warp.compare("ne", warp.ballot(warp.compare("ne", left, 0)), 0)

        def put(left: Any, at: Any) -> list[Any]:
            """Each lane's first key that is left; it is still in the first cache."""
            some = warp.compare("ne", left, 0)
            position = warp.add(start, warp.first_one(warp.select(some, left, 1)))
            warp.store(candidates, at, warp.load(orders, position), some)
            warp.store(candidates, warp.add(at, room.size), position, some)
            return [warp.both(left, warp.sub(left, 1)), warp.add(at, 1)]

        warp.repeat(more, put, [passes, warp.add(count, warp.sub(upto, mine))])
        count = warp.add(count, warp.total(mine))
        warp.meet()
        warp.store(state, warp.integer(COUNT), count, warp.compare("eq", warp.lane, 0))
        warp.meet()
        full = warp.compare("gt", count, room.size - 32 * GROUP)
        warp.when(full, lambda: cut_slowly(warp, state, candidates, room, room.slack))

    warp.loop(rows, take, [best_of(warp.integer(0))])
    finish_together(warp, state, candidates, out, states, shared, room, bound)


def lower_bound(warp: Any, highest: Any, seen: Any, shared: Any, top_k: int, num_groups: int) -> Any:
    """A number that at least top_k keys reach; INVISIBLE where groups are too few."""
    per_row = 32 * WARPS
    fold = -(-num_groups // (BOUND_ROWS * per_row))
    rows = -(-num_groups // (fold * per_row))
    groups = warp.shift_down(warp.add(seen, GROUP - 1), 4)
    mine = []
    for row in range(rows):
        best = warp.integer(INVISIBLE)
        for part in range(fold):
            at = warp.add(warp.add(warp.mul(warp.of_block, 32), warp.lane), (row * fold + part) * per_row)
            value = warp.load(highest, warp.smaller(at, num_groups - 1))
            best = warp.larger(best, warp.select(warp.compare("lt", at, groups), value, INVISIBLE))
        mine.append(best)
    top = mine[0]
    for value in mine[1:]:
        top = warp.larger(top, value)
    high = warp.add(over_block(warp, warp.largest(top), shared, warp.largest, INVISIBLE), 1)

    def counts_from(middles: list[Any]) -> list[Any]:
        return [_sum(warp, [warp.count_of(warp.compare("ge", value, middle)) for value in mine]) for middle in middles]

    low = warp.integer(INVISIBLE)
    return search_together(warp, counts_from, low, high, warp.integer(2**30), shared, top_k, _NEAR)[0]


def _sum(warp: Any, values: list[Any]) -> Any:
    total = values[0]
    for value in values[1:]:
        total = warp.add(total, value)
    return total


def search_together(
    warp: Any,
    counts_from: Callable[[list[Any]], list[Any]],
    low: Any,
    high: Any,
    at_low: Any,
    shared: Any,
    top_k: int,
    slack: int,
) -> tuple[Any, Any]:
    """`gpu_select.search` over the whole block: a step splits the interval in four, since meeting takes longest.

    Args:
        warp: the words.
        counts_from: how many numbers of this lane are at or above each of three.
        low: at least top_k are at or above it; at_low of them.
        high: fewer than top_k are at or above it.
        at_low: see `low`.
        shared: place of 4 numbers a warp.
        top_k: see above.
        slack: see above.
    """

    def going(low: Any, high: Any, at_low: Any, at_high: Any, side: Any) -> Any:
        del at_high, side
        apart = warp.compare("gt", high, warp.add(low, 1))
        return warp.both(apart, warp.compare("gt", at_low, top_k + slack))

    def between(low: Any, high: Any) -> Any:
        return warp.add(warp.both(low, high), warp.halve(warp.differ(low, high)))

    def narrow(low: Any, high: Any, at_low: Any, at_high: Any, side: Any) -> list[Any]:
        # At most one of the three equals `low`, which changes nothing.
        middle = between(low, high)
        middles = [between(low, middle), middle, between(middle, high)]
        first, second, third = (warp.total(count) for count in counts_from(middles))
        # Two counts of a warp share a word, if they are small; sides alternate, so that one meeting is enough.
        place = warp.offset(shared, warp.mul(side, 2 * WARPS))
        number = warp.compare("eq", warp.lane, 0)
        warp.store(place, warp.of_block, warp.either(first, warp.shift_up(second, 16)), number)
        warp.store(place, warp.add(warp.of_block, WARPS), third, number)
        warp.meet_all()
        pairs = warp.load(place, warp.both(warp.lane, WARPS - 1))
        thirds = warp.load(place, warp.add(warp.both(warp.lane, WARPS - 1), WARPS))
        real = warp.compare("lt", warp.lane, WARPS)
        counts = [warp.both(pairs, 0xFFFF), warp.shift_down(pairs, 16), thirds]
        numbers = [warp.total(warp.select(real, count, 0)) for count in counts]
        for edge, count in zip(middles, numbers, strict=True):
            enough = warp.both(warp.compare("ge", count, top_k), warp.compare("gt", edge, low))
            low, at_low = warp.select(enough, edge, low), warp.select(enough, count, at_low)
        for edge, count in zip(reversed(middles), reversed(numbers), strict=True):
            few = warp.both(warp.compare("lt", count, top_k), warp.compare("lt", edge, high))
            high, at_high = warp.select(few, edge, high), warp.select(few, count, at_high)
        return [low, high, at_low, at_high, warp.differ(side, 1)]

    zero = warp.integer(0)
    low, _, at_low, at_high, _ = warp.repeat(going, narrow, [low, high, at_low, zero, zero])
    warp.meet_all()
    return low, warp.select(warp.compare("lt", at_low, top_k + slack + 1), 2**30, warp.sub(top_k, at_high))


def over_block(warp: Any, value: Any, shared: Any, combine: Any, nothing: int) -> Any:
    """`combine` of one value of each warp of the block."""
    warp.store(shared, warp.of_block, value, warp.compare("eq", warp.lane, 0))
    warp.meet_all()
    other = warp.load(shared, warp.both(warp.lane, WARPS - 1))
    found = combine(warp.select(warp.compare("lt", warp.lane, WARPS), other, nothing))
    warp.meet_all()
    return found


def finish_together(
    warp: Any, state: Any, candidates: Any, out: Any, states: Any, shared: Any, room: Room, bound: Any
) -> None:
    """Finds the exact threshold of all warps' candidates and writes the positions of the best top_k."""
    top_k = room.top_k
    warp.meet_all()
    count = warp.load(state, warp.integer(COUNT))
    everyone = warp.load(states, warp.add(warp.mul(warp.both(warp.lane, WARPS - 1), STATE), COUNT))
    everyone = warp.select(warp.compare("lt", warp.lane, WARPS), everyone, 0)
    total, most = warp.total(everyone), warp.largest(everyone)

    def finish(rows: Any, value_of: Callable[[Any], Any], sum_over: Callable[..., Any]) -> None:
        """With what is needed to go over this warp's candidates a row at a time."""
        highest = sum_over(warp.larger, lambda value: value, INVISIBLE)
        high = warp.add(over_block(warp, warp.largest(highest), shared, warp.largest, INVISIBLE), 1)

        def count_from(how: str, number: Any) -> Any:
            return sum_over(warp.add, lambda value: warp.count_of(warp.compare(how, value, number)), 0)

        def count(how: str, number: Any) -> Any:
            return warp.total(count_from(how, number))

        def counts_from(middles: list[Any]) -> list[Any]:
            return [count_from("ge", middle) for middle in middles]

        lowest = warp.larger(bound, INVISIBLE + 1)  # all candidates reach it
        low, ties = search_together(warp, counts_from, lowest, high, total, shared, top_k, 0)
        first_lane = warp.compare("eq", warp.lane, 0)
        warp.store(shared, warp.of_block, count("gt", low), first_lane)
        warp.store(shared, warp.add(warp.of_block, WARPS), count("eq", low), first_lane)
        warp.meet_all()
        lane = warp.both(warp.lane, WARPS - 1)
        before = warp.both(warp.compare("lt", warp.lane, WARPS), warp.compare("lt", warp.lane, warp.of_block))
        above = warp.total(warp.select(before, warp.load(shared, lane), 0))
        seen = warp.total(warp.select(before, warp.load(shared, warp.add(lane, WARPS)), 0))

        def write(row: Any, kept: Any, seen: Any) -> list[Any]:
            stay, seen = stays(warp, value_of(row), low, ties, seen)
            ballot = warp.ballot(stay)
            at = warp.add(kept, warp.ones(warp.both(ballot, warp.below)))
            position = warp.load(candidates, warp.add(warp.add(warp.mul(row, 32), warp.lane), room.size))
            warp.store(out, at, position, stay)
            return [warp.add(kept, warp.ones(ballot)), seen]

        # Of those that equal the threshold the first ones stay, and warps have their candidates in order.
        state = [warp.add(above, warp.smaller(seen, ties)), seen]
        if isinstance(rows, int):
            for row in range(rows):
                state = write(warp.integer(row), *state)
        else:
            warp.loop(rows, write, state)

    def read(row: Any) -> Any:
        place = warp.add(warp.mul(row, 32), warp.lane)
        return warp.select(warp.compare("lt", place, count), warp.load(candidates, place), INVISIBLE)

    def from_registers() -> None:
        mine = [read(warp.integer(row)) for row in range(_FEW)]

        def sum_over(combine: Any, part: Any, nothing: int) -> Any:
            found = warp.integer(nothing)
            for value in mine:
                found = combine(found, part(value))
            return found

        at = iter(mine)
        finish(_FEW, lambda row: next(at), sum_over)

    def from_memory() -> None:
        rows = warp.shift_down(warp.add(count, 31), 5)

        def sum_over(combine: Any, part: Any, nothing: int) -> Any:
            return warp.loop(rows, lambda row, found: [combine(found, part(read(row)))], [warp.integer(nothing)])[0]

        finish(rows, read, sum_over)

    warp.when(warp.compare("lt", most, 32 * _FEW + 1), from_registers)
    warp.when(warp.compare("gt", most, 32 * _FEW), from_memory)

    def pad(row: Any) -> tuple[()]:
        at = warp.add(warp.add(warp.mul(row, 32 * WARPS), warp.mul(warp.of_block, 32)), warp.lane)
        missing = warp.both(warp.compare("lt", at, top_k), warp.compare("ge", at, total))
        warp.store(out, at, warp.integer(-1), missing)
        return ()

    warp.loop(warp.integer(-(-top_k // (32 * WARPS))), pad, ())
    warp.meet_all()


def _emit(
    orders: Any,
    highest: Any,
    limits: Any,
    out: Any,
    candidates: Any,
    shared: Any,
    row: Array,
    me: Array,
    room: Room,
) -> None:
    num_keys, num_groups = orders.shape[1], highest.shape[1]

    def emit(
        context: Any, orders: Any, highest: Any, limits: Any, out: Any, candidates: Any, shared: Any, row: Any, me: Any
    ) -> None:
        from pallas_kernels.lightning_indexer.gpu_warp import Warp, place_of

        del context
        warp = Warp()
        row, me = row.registers.item(), me.registers.item()
        mine = warp.mul(warp.add(warp.mul(me, WARPS), warp.of_block), 2 * room.size)
        place = place_of(shared)
        select_row(
            warp,
            warp.offset(place_of(orders), warp.mul(row, num_keys)),
            warp.offset(place_of(highest), warp.mul(row, num_groups)),
            warp.load(place_of(limits), row),
            warp.offset(place_of(out), warp.mul(row, room.top_k)),
            warp.offset(place_of(candidates), mine),
            place,
            warp.offset(place, warp.integer(WARPS * STATE)),
            room,
            num_groups,
        )

    ref, scalar = plgpu.RefType(), plgpu.Layout.WG_SPLAT(())
    plgpu.inline_mgpu(arg_types=(ref, ref, ref, ref, ref, ref, scalar, scalar), return_type=None)(emit)(
        orders, highest, limits, out, candidates, shared, row, me
    )


def _interpreted(orders: Array, limits: Array, top_k: int, interpret: Any) -> Int[Array, "R C"]:
    """The same selection for the interpreter, a row at a time."""
    rows, num_keys = orders.shape

    def kernel(orders: Any, limits: Any, out: Any) -> None:
        row = lax.axis_index("block")
        seen = jnp.arange(num_keys) <= limits[row]
        value = jnp.where(seen, orders[row], INVISIBLE)
        best = jnp.argsort(~value, stable=True)[:top_k]
        positions = jnp.sort(jnp.where(seen[best], best, num_keys).astype(jnp.int32))
        positions = jnp.where(positions == num_keys, -1, positions)
        out[row] = jnp.pad(positions, (0, top_k - positions.shape[0]), constant_values=-1)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((rows, top_k), jnp.int32),
        grid=(rows,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )(orders, limits)
