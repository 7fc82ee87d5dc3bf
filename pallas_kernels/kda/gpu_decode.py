"""One token of KDA for many sequences on a Hopper GPU, with their states in a pool that is read once and written in place.

A warpgroup takes some value channels of one state, which know nothing of the others: it reads them into registers, sums
over their rows what the key and the query see of them, and writes them back with the token. What Sᵀ q becomes by the
write is known beforehand, q·k times u, so an entry passes through once. Several warpgroups share a multiprocessor, and
while one computes the others' bytes are on their way: a ring of shared-memory slots that the copy engine fills, the
obvious alternative, was measured to take longer.

All arithmetic is float32 on the CUDA cores, a few operations an entry, and hides behind the bytes.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda.gate import L2_EPS, log_decay
from pallas_kernels.kda.gpu_registers import CHANNELS, WIDTH, Registers, layouts, sigmoid, softplus, store

TAPS = 4
_KEEP, _KEY, _QUERY = range(3)  # vectors over a state's rows


class Front(NamedTuple):
    """What the kernel does to a token's vectors first: L2 norm of q and k, decay gate, σ of beta."""

    lower_bound: float | None


def decode(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    A_log: jax.Array | None,
    dt_bias: jax.Array | None,
    pool: jax.Array,
    slots: jax.Array,
    *,
    front: Front | None,
    scale: float,
    columns: int,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """(o [B, H, V], pool); a warpgroup takes `columns` value channels."""
    operands: dict[str, Any] = {"slots": slots, "q": q, "k": k, "v": v, "g": g, "beta": beta}
    if front is not None:
        operands |= {"A_log": A_log, "dt_bias": dt_bias}
    o, held = _call(operands, {"pool": pool}, front, scale, columns, interpret)
    return o, held["pool"]


def conv_decode(
    x: jax.Array,
    weight: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    tails: jax.Array,
    pool: jax.Array,
    slots: jax.Array,
    *,
    front: Front,
    scale: float,
    columns: int,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(o [B, H, V], tails, pool), from x [B, 3·H·K] before the convolution; tails [P, 3, 3·H·K], weight [3·H·K, 4]."""
    batch, heads, _ = g.shape
    shape = tails.shape
    operands = {
        "slots": slots,
        "x": x.reshape(batch, 3, heads, WIDTH),
        "weight": weight.astype(jnp.float32).reshape(3, heads, WIDTH, TAPS),
        "g": g,
        "beta": beta,
        "A_log": A_log,
        "dt_bias": dt_bias,
    }
    held = {"tails": tails.reshape(*shape[:2], 3, heads, WIDTH), "pool": pool}
    o, held = _call(operands, held, front, scale, columns, interpret)
    return o, held["tails"].reshape(shape), held["pool"]


@partial(jax.jit, static_argnames=("front", "scale", "columns", "interpret"))
def _call(
    operands: dict[str, Any],
    held: dict[str, Any],
    front: Front | None,
    scale: float,
    columns: int,
    interpret: Any,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(o, held): `operands` are read, `held` is written."""
    pool = held["pool"]
    batch, heads = operands["beta"].shape
    values = pool.shape[-1]
    convolved = "x" in operands
    vectors_dtype = operands["x" if convolved else "v"].dtype
    pieces = values // columns
    # A tail is written in place when all have read it that need it: the warpgroups of one block.
    groups = pieces if convolved else 1
    operands = operands | {"slots": operands["slots"].astype(jnp.int32)}
    piece, keys = layouts(columns), layouts(WIDTH).column
    rows = piece.rows
    parts = [pl.ds(part * rows, rows) for part in range(WIDTH // rows)]
    registers = Registers(interpret)
    load = registers.load

    def over_columns(x: Any) -> Any:
        return registers.spread(x, (rows, columns), (0,), piece.block)

    def over_rows(x: Any) -> Any:
        return registers.spread(x, (rows, columns), (1,), piece.block)

    scratch: dict[str, Any] = {
        "row_vectors": plgpu.SMEM((groups, 3, WIDTH), jnp.float32),
        "sums": plgpu.SMEM((groups, 2, rows, columns), jnp.float32),
    }
    if convolved:
        scratch["mixed"] = plgpu.SMEM((groups, 3, WIDTH), jnp.float32)
    if groups > 1:
        scratch["tails_read"] = plgpu.Barrier(num_arrivals=groups)

    def kernel(*refs: Any) -> None:
        *places, o = refs
        source = dict(zip((*operands, *held), places, strict=True))
        pl.run_scoped(partial(advance_one, source, o), collective_axes="warpgroup" if groups > 1 else (), **scratch)

    def advance_one(source: dict[str, Any], o: Any, **place: Any) -> None:
        group = lax.axis_index("warpgroup") if groups > 1 else 0
        unit = lax.axis_index("block")
        row = lax.div(unit, heads * (pieces // groups))
        head = lax.rem(lax.div(unit, pieces // groups), heads)
        share: Any = group if convolved else lax.rem(unit, pieces)
        first = pl.multiple_of(columns * share, columns)
        mine = pl.ds(first, columns)
        row_vectors = place["row_vectors"].at[group]
        slot = source["slots"][row]
        # What doesn't need the slot is asked for before it is known.
        strength = source["beta"][row, head].astype(jnp.float32)
        decay = load(source["g"].at[row, head], keys).astype(jnp.float32)
        rate = bias = None
        if front is not None:
            rate = jnp.exp(source["A_log"][head])
            bias = load(source["dt_bias"].at[head], keys)
        vectors: tuple[Any, ...] = ()
        if not convolved:
            vectors = (
                load(source["q"].at[row, head], keys),
                load(source["k"].at[row, head], keys),
                load(source["v"].at[row, head, mine], piece.column),
            )

        def convolve() -> tuple[Any, ...]:
            """SiLU of the convolution, by way of `mixed`; a thread has one channel of each of q, k and v."""
            mixed, tails = place["mixed"].at[group], source["tails"]
            windows = []
            for which in range(3):
                window = [load(tails.at[slot, tap, which, head], CHANNELS) for tap in range(TAPS - 1)]
                windows.append([*window, load(source["x"].at[row, which, head], CHANNELS)])
            for which, window in enumerate(windows):
                y = None
                for tap, entry in enumerate(window):
                    weighted = load(source["weight"].at[which, head, :, tap], CHANNELS) * entry.astype(jnp.float32)
                    y = weighted if y is None else y + weighted
                store(mixed.at[which], (y * sigmoid(y)).astype(vectors_dtype).astype(jnp.float32))
            plgpu.commit_smem()
            if groups > 1:
                plgpu.barrier_arrive(place["tails_read"])
                plgpu.barrier_wait(place["tails_read"])
            for which, window in enumerate(windows):

                @pl.when(group == which % groups)
                def _(which: int = which, window: Any = window) -> None:
                    for tap, entry in enumerate(window[1:]):
                        store(tails.at[slot, tap, which, head], entry)

            return load(mixed.at[0], keys), load(mixed.at[1], keys), load(mixed.at[2, mine], piece.column)

        def advance() -> None:
            state = [load(source["pool"].at[slot, head, here, mine], piece.block) for here in parts]
            query, key, value = (x.astype(jnp.float32) for x in (convolve() if convolved else vectors))
            log, beta = decay, strength
            if front is not None:
                query = query * lax.rsqrt(jnp.sum(query * query) + L2_EPS)
                key = key * lax.rsqrt(jnp.sum(key * key) + L2_EPS)
                log = log_decay(decay + bias, rate, front.lower_bound, softplus, sigmoid)
                beta = sigmoid(strength)
            overlap = jnp.sum(query * key)
            for which, vector in {_KEEP: jnp.exp(log), _KEY: key, _QUERY: query}.items():
                store(row_vectors.at[which], vector)
            plgpu.commit_smem()

            by_key: Any = None
            by_query: Any = None
            for part, here in enumerate(parts):
                keep, key, query = (over_columns(load(row_vectors.at[which, here], piece.row)) for which in range(3))
                state[part] = keep * state[part]
                by_key = key * state[part] if by_key is None else by_key + key * state[part]
                by_query = query * state[part] if by_query is None else by_query + query * state[part]
            # Over the rows of a block, which different threads have.
            for which, total in enumerate((by_key, by_query)):
                store(place["sums"].at[group, which], total)
            plgpu.commit_smem()
            lines = [
                [load(place["sums"].at[group, which, line], piece.column) for line in range(rows)] for which in range(2)
            ]
            by_key, by_query = (sum(entries[1:], entries[0]) for entries in lines)
            u = beta * (value - by_key)
            store(o.at[row, head, mine], (scale * (by_query + overlap * u)).astype(o.dtype))
            written = over_rows(u)
            for entries, here in zip(state, parts, strict=True):
                key = over_columns(load(row_vectors.at[_KEY, here], piece.row))
                store(source["pool"].at[slot, head, here, mine], entries + key * written)

        def leave() -> None:
            store(o.at[row, head, mine], registers.cast(jnp.zeros((columns,), o.dtype), piece.column))

        pl.when(slot >= 0)(advance)
        pl.when(slot < 0)(leave)

    threads: dict[str, Any] = {"num_threads": groups, "thread_name": "warpgroup"} if groups > 1 else {}
    run: Any = pl.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct((batch, heads, values), vectors_dtype)],
        mesh=plgpu.Mesh(grid=(batch * heads * (pieces // groups),), grid_names=("block",), **threads),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            # Barriers stand where vectors change hands; one around each of the stores isn't needed.
            unsafe_no_auto_barriers=True,
        ),
        interpret=interpret or False,
        name="kda_decode",
    )
    places = {name: jax.new_ref(x, memory_space=plgpu.GMEM) for name, x in held.items()}
    [o] = run(*operands.values(), *places.values())
    return o, {name: jax.freeze(place) for name, place in places.items()}
