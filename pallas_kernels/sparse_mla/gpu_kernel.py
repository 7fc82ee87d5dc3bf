"""The Hopper kernel: keys and value channels on the matrix instruction's 64-row side, heads on its other side.

A block of threads attends some heads of one query over some of its keys, 64 of them at a time: scores [keys, heads] =
K Qᵀ, probabilities P by an online softmax down the columns, sums [channels, heads] += Vᵀ Pᵀ. Heads are columns, so any
multiple of 8 of them goes without padding, and the value is the first 512 channels of the key, read from the same place in
shared memory.

One warpgroup gathers rows, a chunk of 64 channels at a time, into the places that products free one by one. In the plain
form one more warpgroup scores the next tile while two sum the last one, 256 channels each. Sums of 96 heads leave no
registers for that: there the two score 48 heads each before they sum, and lay some sums aside meanwhile.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.sparse_mla import gpu_plain, gpu_threads
from pallas_kernels.sparse_mla.gpu import TILE, VALUE, WIDTH, Tuning
from pallas_kernels.sparse_mla.gpu_threads import CHUNK, SWIZZLED

_CHUNKS = WIDTH // CHUNK
_HALF = VALUE // CHUNK // 2
# Chunks in the order in which they become free: the one that is no value first, then those of the two warpgroups in turn.
_ORDER = (8, 0, 4, 1, 5, 2, 6, 3, 7)
# Those of FP8, of which 128 channels share a scale, in pairs.
_ORDER_OF_PAIRS = (8, 0, 1, 4, 5, 2, 3, 6, 7)


def attend_rows(
    q: Float[Array, "N H K"],
    latent: Shaped[Array, "R width"],
    indices: Int[Array, " NC"],
    *,
    batch: int,
    scale: float,
    tuning: Tuning,
    interpret: Any = None,
) -> tuple[Float[Array, "P L"], Float[Array, " P"]]:
    """Attention of N queries over C keys each; `batch` equal parts of them share equal parts of the R rows.

    Returns rows [split, query, head] of values and log-sum-exps.
    """
    threads: Any = gpu_threads if interpret is None else gpu_plain
    queries, all_heads, _ = q.shape
    heads, splits, doubled, parked = tuning.heads, tuning.splits, tuning.doubled, tuning.parked
    copiers = tuning.copiers
    pieces, tiles = all_heads // heads, indices.shape[0] // queries // TILE
    num_rows, per_batch = latent.shape[0] // batch, queries // batch
    slots, copier = _CHUNKS + doubled, 2 if tuning.paired else 3
    packed = latent.dtype == jnp.uint8
    order = _ORDER_OF_PAIRS if packed else _ORDER
    share = heads // 2 if tuning.paired else heads  # heads that a warpgroup scores
    scorers, turns = 2 if tuning.paired else 1, tuning.turns
    early = packed  # numbers of rows are loaded before a tile is scored, not after

    def slot_of(place: int, tile: Any) -> Any:
        """Where a tile's chunk lies: the first `doubled` of them have two places in turn."""
        return jnp.int32(place) if place >= doubled else place + _CHUNKS * lax.rem(tile, 2)

    def turn_of(tile: Any) -> Any:
        """Where a tile's probabilities lie."""
        return lax.rem(tile, turns) if turns > 1 else jnp.int32(0)

    def kernel(q: Any, latent: Any, indices: Any, out: Any, lse: Any, **m: Any) -> None:
        group = lax.axis_index("warpgroup")
        item, split = lax.axis_index("item"), lax.axis_index("split")
        query, piece = lax.div(item, pieces), lax.rem(item, pieces)
        begin = lax.div(split * tiles, splits)
        count = lax.div((split + 1) * tiles, splits) - begin
        keys_from = query * (tiles * TILE) + begin * TILE
        first_row = lax.div(query, per_batch) * num_rows
        out_row = (split * queries + query) * all_heads + piece * heads
        threads.start_barriers(m["full"], slots, copiers)

        def wait_for_place(place: int, tile: Any) -> None:
            if place:
                plgpu.barrier_wait(m["empty"].at[slot_of(place, tile)])
            else:
                plgpu.barrier_wait(m["scored"].at[lax.rem(tile, 2) if doubled else 0])

        def until_free(place: int, tile: Any) -> Any:
            pl.when(tile >= (2 if place < doubled else 1))(lambda: wait_for_place(place, tile))
            return slot_of(place, tile)

        def copy() -> None:
            plgpu.set_max_registers(tuning.registers[2], action="decrease")
            part = group - copier

            @pl.when(part == 0)
            def _() -> None:
                for place, chunk in enumerate(order):
                    source = q.at[query, pl.ds(piece * heads, heads), pl.ds(chunk * CHUNK, CHUNK)]
                    plgpu.copy_gmem_to_smem(source, m["queries"].at[place], m["asked"])

            def rows_of(tile: Any) -> Any:
                base = keys_from + jnp.minimum(tile, count - 1) * TILE
                return threads.rows_to_gather(indices, base, part, copiers)

            def gather(rows: Any, tile: Any, place: int, begin: int) -> None:
                slot = until_free(place, tile)
                threads.gather(
                    latent,
                    rows,
                    first_row,
                    m["keys"].at[slot],
                    m["full"],
                    slot,
                    part,
                    parts=copiers,
                    num_rows=num_rows,
                    begin=begin,
                )

            (copy_packed if packed else copy_plain)(part, rows_of, gather)
            for place in range(_CHUNKS):  # barriers must be even
                if place < doubled:
                    pl.when(count > 1)(functools.partial(wait_for_place, place, count))
                wait_for_place(place, count - 1)

        def copy_plain(part: Any, rows_of: Callable[[Any], Any], gather: Callable[..., None]) -> None:
            del part

            def one(tile: Any, carry: tuple[Any]) -> tuple[Any]:
                following = rows_of(tile + 1)
                for place, chunk in enumerate(order):
                    gather(carry[0], tile, place, 2 * CHUNK * chunk)
                return (following,)

            lax.fori_loop(0, count, one, (rows_of(0),))

        def copy_packed(part: Any, rows_of: Callable[[Any], Any], gather: Callable[..., None]) -> None:
            """All codes of a tile are on their way before the first are turned into values."""
            pairs = [(place, order[place] // 2) for place in range(1, _CHUNKS, 2)]

            def one(tile: Any, carry: tuple[Any]) -> tuple[Any]:
                (rows,) = carry
                following = rows_of(tile + 1)
                scales = m["scales"].at[lax.rem(tile, 2)]
                gather(rows, tile, 0, VALUE + VALUE // 32)
                slots = []
                for place, pair in pairs:
                    slots.append((until_free(place, tile), until_free(place + 1, tile)))
                    threads.copy_codes(
                        latent,
                        rows,
                        first_row,
                        m["keys"].at[slots[-1][1]],
                        scales,
                        part,
                        parts=copiers,
                        num_rows=num_rows,
                        begin=2 * CHUNK * pair,
                        scale=VALUE if place == 1 else None,
                    )
                for number, (_, pair) in enumerate(pairs):
                    threads.unpack_codes(
                        (m["keys"].at[slots[number][0]], m["keys"].at[slots[number][1]]),
                        scales,
                        m["full"],
                        slots[number],
                        part,
                        parts=copiers,
                        scale=pair,
                        pending=len(pairs) - 1 - number,
                    )
                # Nothing waits for the copying warpgroup now.
                threads.expect(latent, following, first_row, parts=copiers, num_rows=num_rows)
                return (following,)

            lax.fori_loop(0, count, one, (rows_of(0),))

        def score(tile: Any, which: int) -> Array:
            """Scores of the heads of warpgroup `which`, in registers."""
            columns, odd = pl.ds(which * share, share), lax.rem(tile, 2)

            def all_chunks(scores: Any) -> Array:
                def one(place: Any, slot: Any, parity: Any, shown: bool) -> None:
                    threads.wait(m["full"], slot, parity, shown=shown)
                    threads.multiply(scores, m["keys"].at[slot], m["queries"].at[place, columns])

                if tuning.paired:  # a loop takes fewer registers; where it ends mustn't be known, or it is unrolled

                    def step(place: Any, carry: tuple[()]) -> tuple[()]:
                        twice = place < doubled
                        slot = jnp.where(twice, place + odd * _CHUNKS, place)
                        one(place, slot, jnp.where(twice, lax.rem(lax.div(tile, 2), 2), odd), packed)
                        return carry

                    if packed:
                        one(0, slot_of(0, tile), lax.rem(lax.div(tile, 2), 2) if doubled else odd, False)
                    lax.fori_loop(int(packed), _CHUNKS + lax.div(item, 1 << 30), step, ())
                else:
                    for place in range(_CHUNKS):
                        parity = lax.rem(lax.div(tile, 2), 2) if place < doubled else odd
                        one(place, slot_of(place, tile), parity, packed and place > 0)
                threads.until_added(0)
                return scores[...]

            scores = threads.accumulate(all_chunks, [share], m, group, 5)
            plgpu.barrier_arrive(m["scored"].at[odd if doubled else 0])
            return scores

        def score_and_weigh(tile: Any, which: int, warpgroup: int) -> Any:
            """Probabilities of a tile, once all have read those that lay there; returns parts of their sums."""
            base = keys_from + tile * TILE
            rows = threads.rows_to_score(indices, base) if early else None
            scores = score(tile, which)
            rows = rows if early else threads.rows_to_score(indices, base)

            turn = turn_of(tile)
            pl.when(tile >= turns)(lambda: plgpu.barrier_wait(m["taken"].at[turn]))

            parts = threads.softmax(
                scores,
                rows,
                m["state"].at[which],
                m["changed"].at[pl.ds(turn * scorers + which, 1)],
                m["weights"].at[turn, pl.ds(which * share, share)],
                turn,
                heads=share,
                num_rows=num_rows,
                scale=scale,
                warpgroup=warpgroup,
            )
            plgpu.barrier_arrive(m["given"].at[turn])
            return parts

        def add(tile: Any, which: int, blocks: list[tuple[int, int, int]], sums: tuple[Any, ...]) -> None:
            """Adds a tile's products to the sums of a warpgroup's channels."""
            turn = turn_of(tile)
            plgpu.barrier_wait(m["given"].at[turn])
            # In the other forms this warpgroup, when it scored, or who wrote values has shown them to the matrix unit.
            if not (tuning.paired or packed):
                threads.fence()
            if parked:
                sums[-1][...] = threads.take_back(m["aside"].at[which], parked)
            for part in range(scorers):

                @pl.when(m["changed"][turn * scorers + part] != 0)
                def _(part: int = part) -> None:
                    state = m["state"].at[part]
                    for (_, column, _), total in zip(blocks, sums, strict=True):
                        total[...] = threads.scale_down(
                            total[...], state, turn, heads=share, begin=part * share, column=column
                        )

            places = [order.index(which * _HALF + i) for i in range(_HALF)]
            for (i, column, size), total in zip(blocks, sums, strict=True):
                values, weights = m["keys"].at[slot_of(places[i], tile)], m["weights"].at[turn, pl.ds(column, size)]
                threads.multiply_turned(total, values, weights)
                if i and not column:
                    threads.until_added(1)  # all but the one just issued
                    plgpu.barrier_arrive(m["empty"].at[slot_of(places[i - 1], tile)])
            threads.until_added(0)
            plgpu.barrier_arrive(m["empty"].at[slot_of(places[-1], tile)])
            plgpu.barrier_arrive(m["taken"].at[turn])

        def until_taken() -> None:
            if turns > 1:
                pl.when(count > 1)(lambda: plgpu.barrier_wait(m["taken"].at[turn_of(count)]))
            plgpu.barrier_wait(m["taken"].at[turn_of(count - 1)])

        def finish(which: int, blocks: list[tuple[int, int, int]], sums: tuple[Any, ...]) -> None:
            plgpu.barrier_wait(m["done"])
            for (i, column, _), total in zip(blocks, sums, strict=True):
                first, value = jnp.int32((which * _HALF + i) * CHUNK), total[...]
                for part in range(scorers):
                    threads.store(
                        value,
                        m["state"].at[part],
                        out,
                        out_row,
                        first,
                        heads=share,
                        width=VALUE,
                        begin=part * share,
                        column=column,
                    )

        def score_only() -> None:
            plgpu.set_max_registers(tuning.registers[1], action="decrease")
            threads.softmax_start(m["state"].at[0], heads, 2)
            plgpu.barrier_wait(m["asked"])

            def one(tile: Any, carry: tuple[()]) -> tuple[()]:
                threads.softmax_add(score_and_weigh(tile, 0, 2), m["state"].at[0], heads=heads)
                return carry

            lax.fori_loop(0, count, one, ())
            threads.softmax_end(m["state"].at[0], lse, out_row, heads=heads, warpgroup=2)
            plgpu.barrier_arrive(m["done"])
            until_taken()

        def sum_up(which: int) -> None:
            plgpu.set_max_registers(tuning.registers[0], action="increase")
            state = m["state"].at[which if tuning.paired else 0]
            # Sums: (64 of the warpgroup's channels, first head, heads).
            blocks = [(i, 0, heads) for i in range(_HALF)]
            if parked:
                blocks[-1:] = [(_HALF - 1, 0, heads - parked), (_HALF - 1, heads - parked, parked)]
            if tuning.paired:
                threads.softmax_start(state, share, which)
                plgpu.barrier_wait(m["asked"])

            def all_tiles(*sums: Any) -> None:
                def one(tile: Any, carry: tuple[()]) -> tuple[()]:
                    if tuning.paired:
                        if parked:
                            threads.put_aside(sums[-1][...], m["aside"].at[which])
                        threads.softmax_add(score_and_weigh(tile, which, which), state, heads=share)
                    add(tile, which, blocks, sums)
                    return carry

                lax.fori_loop(0, count, one, ())
                if tuning.paired:
                    threads.softmax_end(state, lse, out_row + which * share, heads=share, warpgroup=which)
                    plgpu.barrier_arrive(m["done"])
                    until_taken()
                finish(which, blocks, sums)

            threads.accumulate(all_tiles, [size for _, _, size in blocks], m, group, 0)

        pl.when(group >= copier)(copy)
        for which in range(2):
            pl.when(group == which)(functools.partial(sum_up, which))
        if not tuning.paired:
            pl.when(group == 2)(score_only)

    scratch: dict[str, Any] = {
        "keys": plgpu.SMEM((slots, TILE, CHUNK), jnp.bfloat16, transforms=SWIZZLED),
        "queries": plgpu.SMEM((_CHUNKS, heads, CHUNK), jnp.bfloat16, transforms=SWIZZLED),
        "weights": plgpu.SMEM((turns, heads, TILE), jnp.bfloat16, transforms=SWIZZLED),
        "state": plgpu.SMEM((scorers, threads.state_size(share)), jnp.float32),
        "changed": plgpu.SMEM((turns * scorers,), jnp.int32),
        "full": threads.full_barriers(slots, copiers),
        "empty": plgpu.Barrier(num_arrivals=1, num_barriers=slots),
        "scored": plgpu.Barrier(num_arrivals=scorers, num_barriers=2),
        "asked": plgpu.Barrier(num_arrivals=_CHUNKS),
        "given": plgpu.Barrier(num_arrivals=scorers, num_barriers=turns),
        "taken": plgpu.Barrier(num_arrivals=2, num_barriers=turns),
        "done": plgpu.Barrier(num_arrivals=scorers),
        **threads.more_scratch(heads),
    }
    if packed:
        scratch["scales"] = plgpu.SMEM((2, TILE, 4), jnp.float32)
    if parked:
        scratch["aside"] = plgpu.SMEM((2, CHUNK * parked), jnp.float32)
    rows = splits * queries * all_heads
    return plgpu.kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct((rows, VALUE), jnp.bfloat16), jax.ShapeDtypeStruct((rows,), jnp.float32)),
        grid=(queries * pieces, splits),
        grid_names=("item", "split"),
        num_threads=copier + copiers,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        **({} if interpret is None else {"interpret": interpret}),
    )(q, latent, indices)
