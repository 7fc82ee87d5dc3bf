"""A window of KDA tokens on a Hopper GPU without writing the state: what verifying drafts needs.

The state S of a slot is read once. With G the decay summed from the state on, over the slot's recorded tokens and then
the window's, token i sees S as (k_i ⊙ exp G_i)ᵀ S, every earlier token j as ⟨k_i, k_j ⊙ exp(G_i - G_j)⟩ u_j, and likewise
with q_i: one product of 2n rows with S, small products between tokens, and a triangular system of n unknowns a value
channel. All of it runs in float32 on the CUDA cores; decays between tokens are taken pair by pair, so no bound is asked
of the gate.

A warpgroup goes through pairs of a slot and a head, two warpgroups to a multiprocessor. States come through a ring of
shared-memory slots, a quarter of a state each, that the copy engine fills with the next state while this one is used.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda.gpu_registers import CHANNELS, WIDTH, Registers, layouts, store, without

Records = tuple[jax.Array, jax.Array, jax.Array]

_EIGHT = 8
_PITCH = WIDTH + 4  # floats from a token's vector to the next one's, so that eight of them meet different banks
_LOG2_E = float(np.log2(np.e))
_QUARTERS = 4
_ROWS = WIDTH // _QUARTERS
_TURN = 4  # blocks of rows that are multiplied without a jump

# Of a tile [8 tokens, 8 tokens, 8 channels], a thread holds a pair of tokens and four channels.
_PAIRS = plgpu.Layout.TILED(plgpu.Tiling(((8, 8, 8), (2, 8, 8), (4,))), (-7,), (-4, -3, -2), -1)


@partial(jax.jit, static_argnames=("scale", "blocks", "interpret"))
def verify(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    pool: jax.Array,
    recorded: Records,
    slots: jax.Array,
    committed: jax.Array | None,
    *,
    scale: float,
    blocks: int,
    interpret: Any = None,
) -> tuple[jax.Array, Records]:
    """(o [B, n, H, V], recorded); `recorded` is (k, u, g), each [P, H, R, ·] with R a multiple of 8.

    `committed` [B] counts the records that precede the window; None: none does. The work is shared by `blocks`
    warpgroups.
    """
    batch, tokens, heads, _ = q.shape
    history = 0 if committed is None else recorded[0].shape[2]
    window = -(-tokens // _EIGHT) * _EIGHT
    lines = 2 * window
    operands = {"slots": slots.astype(jnp.int32), "q": q, "k": k, "v": v, "g": g, "beta": beta, "pool": pool}
    if committed is not None:
        operands["committed"] = committed.astype(jnp.int32)
    held = dict(zip(("past_k", "past_u", "past_g"), recorded, strict=True))
    registers = Registers(interpret)
    load = registers.load
    whole = layouts(WIDTH)
    rows = whole.rows

    scratch = {
        "grown": plgpu.SMEM((history + window, _PITCH), jnp.float32),
        "keys": plgpu.SMEM((history + window, _PITCH), jnp.float32),
        "queries": plgpu.SMEM((window, _PITCH), jnp.float32),
        "seen": plgpu.SMEM((lines, WIDTH), jnp.float32),
        "mixes": plgpu.SMEM((2, window, history + window), jnp.float32),
        "state": plgpu.SMEM((_QUARTERS, _ROWS, WIDTH), jnp.float32),
        "arrived": plgpu.Barrier(num_barriers=_QUARTERS),
        "vectors_arrived": plgpu.Barrier(num_arrivals=3),
        "values_arrived": plgpu.Barrier(),
    }
    scratch |= {name: plgpu.SMEM((tokens, WIDTH), operands[name].dtype) for name in "qkgv"}
    units = batch * heads
    blocks = min(blocks, units)

    def kernel(*refs: Any) -> None:
        *sources, o = refs
        pl.run_scoped(partial(verify_all, dict(zip((*operands, *held), sources, strict=True)), o), **scratch)

    def verify_all(source: dict[str, Any], o: Any, **place: Any) -> None:
        block = lax.axis_index("block")
        count = lax.div(units - block + (blocks - 1), blocks)

        def locate(number: Any) -> tuple[Any, Any]:
            """(row, head) of the block's unit of that number, of its last one for numbers beyond."""
            unit = jnp.minimum(block + number * blocks, units - 1)
            return lax.div(unit, heads), lax.rem(unit, heads)

        def fetch(number: Any, slot: Any, what: Any) -> None:
            """Asks for a quarter of the unit's state, or for its vectors."""
            row, head = locate(number)

            @pl.when((number < count) & (slot >= 0))
            def _() -> None:
                if what == "vectors":
                    for name in "qkg":
                        plgpu.copy_gmem_to_smem(source[name].at[row, :, head], place[name], place["vectors_arrived"])
                elif what == "values":
                    plgpu.copy_gmem_to_smem(source["v"].at[row, :, head], place["v"], place["values_arrived"])
                else:
                    quarter = source["pool"].at[slot, head, pl.ds(what * _ROWS, _ROWS)]
                    plgpu.copy_gmem_to_smem(quarter, place["state"].at[what], place["arrived"].at[what])

        everything = (*range(_QUARTERS), "vectors", "values")

        def one(number: Any, slot: Any) -> Any:
            row, head = locate(number)
            following = source["slots"][locate(number + 1)[0]]

            @pl.when(slot >= 0)
            def _() -> None:
                verify_one(source, place, row, head, slot, o, lambda what: fetch(number + 1, following, what))

            @pl.when(slot < 0)
            def _() -> None:
                for token in range(tokens):
                    store(o.at[row, token, head], registers.cast(jnp.zeros((WIDTH,), o.dtype), CHANNELS))
                for what in everything:
                    fetch(number + 1, following, what)

            return following

        first = source["slots"][locate(0)[0]]
        for what in ("vectors", *range(_QUARTERS), "values"):
            fetch(0, first, what)
        lax.fori_loop(0, count, one, first)

    def verify_one(
        source: dict[str, Any], place: dict[str, Any], row: Any, head: Any, slot: Any, o: Any, fetch_next: Any
    ) -> None:
        grown, keys, queries, seen = (place[name] for name in ("grown", "keys", "queries", "seen"))
        past = source["committed"][row] if history else 0
        strengths = [source["beta"][row, token, head] for token in range(tokens)]
        all_channels = pl.ds(0, WIDTH)

        def prepare() -> None:
            """Sums decays in base 2, and spreads vectors out; a thread has a channel."""

            def record(token: Any, total: Any) -> Any:
                total = total + _LOG2_E * load(source["past_g"].at[slot, head, token], CHANNELS)
                store(grown.at[token, all_channels], total)
                key = load(source["past_k"].at[slot, head, token], CHANNELS)
                store(keys.at[token, all_channels], key.astype(jnp.float32))
                return total

            zeros = registers.cast(jnp.zeros((WIDTH,), jnp.float32), CHANNELS)
            total = lax.fori_loop(0, past, record, zeros) if history else zeros
            plgpu.barrier_wait(place["vectors_arrived"])
            for token in range(window):
                if token < tokens:
                    query, key, log = (load(place[name].at[token], CHANNELS) for name in "qkg")
                    store(source["past_k"].at[slot, head, past + token], key)
                    store(source["past_g"].at[slot, head, past + token], log)
                    query, key, total = query.astype(jnp.float32), key.astype(jnp.float32), total + _LOG2_E * log
                else:
                    query = key = zeros
                decay = jnp.exp2(total)
                store(grown.at[history + token, all_channels], total)
                store(keys.at[history + token, all_channels], key)
                store(queries.at[token, all_channels], query)
                store(seen.at[token], key * decay)
                store(seen.at[window + token], query * decay)

        def mix(first: int) -> None:
            """Products of the window's keys and queries with the keys of eight tokens, decayed in between."""
            shape, own, other = (window, _EIGHT, _EIGHT), without(_PAIRS, 1), without(_PAIRS, 0)
            by_key: Any = None
            by_query: Any = None
            for part in range(WIDTH // _EIGHT):
                channels = pl.ds(part * _EIGHT, _EIGHT)

                def of_window(ref: Any, start: int, channels: Any = channels) -> Any:
                    return registers.spread(load(ref.at[pl.ds(start, window), channels], own), shape, (0, 2), _PAIRS)

                def of_eight(ref: Any, channels: Any = channels) -> Any:
                    return registers.spread(load(ref.at[pl.ds(first, _EIGHT), channels], other), shape, (1, 2), _PAIRS)

                # Above the diagonal this overflows, in entries that nobody reads.
                decayed = of_eight(keys) * jnp.exp2(of_window(grown, history) - of_eight(grown))
                key, query = of_window(keys, history) * decayed, of_window(queries, 0) * decayed
                by_key = key if by_key is None else by_key + key
                by_query = query if by_query is None else by_query + query
            for which, entries in enumerate((by_key, by_query)):
                store(place["mixes"].at[which, :, pl.ds(first, _EIGHT)], jnp.sum(entries, axis=2))

        def read_state() -> list[Any]:
            """The products of `seen` with the state; a thread has a value channel."""
            zeros = registers.cast(jnp.zeros((rows, WIDTH), jnp.float32), whole.block)
            sums = (zeros,) * lines
            for quarter in range(_QUARTERS):
                state = place["state"].at[quarter]
                plgpu.barrier_wait(place["arrived"].at[quarter])

                def multiply(turn: Any, sums: Any, state: Any = state, quarter: int = quarter) -> Any:
                    for part in range(_TURN):
                        here = pl.ds((turn * _TURN + part) * rows, rows)
                        there = pl.ds((quarter * (_ROWS // rows) + turn * _TURN + part) * rows, rows)
                        entries = load(state.at[here], whole.block)
                        sums = tuple(
                            total
                            + registers.spread(load(seen.at[line, there], whole.row), (rows, WIDTH), (0,), whole.block)
                            * entries
                            for line, total in enumerate(sums)
                        )
                    return sums

                sums = lax.fori_loop(0, _ROWS // rows // _TURN, multiply, sums)
                plgpu.commit_smem()
                fetch_next(quarter)
            # `seen` has served, and takes the four threads' sums of some lines at a time.
            read: list[Any] = []
            for first in range(0, lines, lines // rows):
                some = sums[first : first + lines // rows]
                for line, total in enumerate(some):
                    store(seen.at[pl.ds(line * rows, rows)], total)
                plgpu.commit_smem()
                for line in range(len(some)):
                    entries = [load(seen.at[line * rows + part], CHANNELS) for part in range(rows)]
                    read.append(sum(entries[1:], entries[0]))
                plgpu.commit_smem()
            return read

        def solve(read: list[Any]) -> None:
            """Finds u and o; a thread has a value channel."""
            mixes = place["mixes"]

            def add_record(token: Any, read: Any) -> Any:
                u = load(source["past_u"].at[slot, head, token], CHANNELS)
                return tuple(total + mixes[line // window, line % window, token] * u for line, total in enumerate(read))

            if history:
                read = list(lax.fori_loop(0, past, add_record, tuple(read)))
            written: list[Any] = []
            for token in range(tokens):
                expected, result = read[token], read[window + token]
                for earlier, u in enumerate(written):
                    expected = expected + mixes[0, token, history + earlier] * u
                    result = result + mixes[1, token, history + earlier] * u
                value = load(place["v"].at[token], CHANNELS).astype(jnp.float32)
                u = strengths[token] * (value - expected)
                written.append(u)
                store(source["past_u"].at[slot, head, past + token], u)
                result = scale * (result + mixes[1, token, history + token] * u)
                store(o.at[row, token, head], result.astype(o.dtype))

        prepare()
        plgpu.commit_smem()
        fetch_next("vectors")
        for first in range(0, history, _EIGHT):
            pl.when(past > first)(partial(mix, first))
        for first in range(history, history + window, _EIGHT):
            mix(first)
        read = read_state()
        plgpu.barrier_wait(place["values_arrived"])
        solve(read)
        plgpu.commit_smem()
        fetch_next("values")

    run: Any = pl.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct((batch, tokens, heads, WIDTH), v.dtype)],
        mesh=plgpu.Mesh(grid=(blocks,), grid_names=("block",)),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,  # exp2 to the last two bits
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,  # barriers stand where something changes hands
        ),
        interpret=interpret or False,
        name="kda_verify",
    )
    places = {name: jax.new_ref(x, memory_space=plgpu.GMEM) for name, x in held.items()}
    [o] = run(*operands.values(), *places.values())
    after = [jax.freeze(place) for place in places.values()]
    return o, (after[0], after[1], after[2])
