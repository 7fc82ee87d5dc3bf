"""KDA's kernels against the recurrence in float64, on one GPU: each law of their numerics, passed or failed.

    python -m benchmarks.kda_check [--json FILE] [--only WORD ...] [--implementation xla]

Errors are root mean squares relative to what is wanted; the bounds are 0.005 for outputs and states, 0.008 for the gradients
of q, k, v and the first state, 0.02 for those of the decay and of beta. Different gates are different heads of one call.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.versions import versions
from pallas_kernels.kda import gate, kda, kda_decode, kda_from_raw, l2_normalize

WIDTH, SCALE, BOUND = 128, 128**-0.5, -5.0
OUTPUT, VECTOR, DECAY = 0.005, 0.008, 0.02
BOUNDS = {"o": OUTPUT, "state": OUTPUT, "q": VECTOR, "k": VECTOR, "v": VECTOR, "first": VECTOR} | dict.fromkeys(
    ("g", "beta", "A_log", "dt_bias"), DECAY
)
Arrays = dict[str, Any]
BF16 = jnp.bfloat16


class Law(NamedTuple):
    """What was found: passes if `value` is at most `bound`."""

    name: str
    value: float
    bound: float

    @property
    def passes(self) -> bool:
        """NaN doesn't."""
        return self.value <= self.bound


# --- In float64 ------------------------------------------------------------------------------------------------------


def recurrence(x: Arrays, d_o: Any = None, d_state: Any = None) -> tuple[np.ndarray, np.ndarray, Arrays]:
    """(o, state, gradients) of one sequence: q, k, v, g [T, H, *], beta [T, H], first [H, K, V], token by token."""
    q, k, v, g, beta, state = (np.asarray(x[name], np.float64) for name in ("q", "k", "v", "g", "beta", "first"))
    states, outputs = [state], []
    for t in range(q.shape[0]):
        state = np.exp(g[t])[..., None] * state
        u = beta[t, :, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t, :, :, None] * u[:, None]
        outputs.append(SCALE * np.einsum("hkv,hk->hv", state, q[t]))
        states.append(state)
    o = np.stack(outputs) if outputs else np.zeros(v.shape)
    if d_o is None:
        return o, state, {}
    d_o, d_state = np.asarray(d_o, np.float64), np.asarray(d_state, np.float64)
    found = {name: np.zeros(np.shape(x[name])) for name in ("q", "k", "v", "g", "beta")}
    for t in reversed(range(q.shape[0])):
        decayed = np.exp(g[t])[..., None] * states[t]
        wrong = v[t] - np.einsum("hkv,hk->hv", decayed, k[t])
        u = beta[t, :, None] * wrong
        found["q"][t] = SCALE * np.einsum("hkv,hv->hk", states[t + 1], d_o[t])
        d_state = d_state + SCALE * q[t, :, :, None] * d_o[t, :, None]
        d_u = np.einsum("hkv,hk->hv", d_state, k[t])
        found["beta"][t] = np.sum(d_u * wrong, axis=-1)
        found["v"][t] = beta[t, :, None] * d_u
        found["k"][t] = np.einsum("hkv,hv->hk", d_state, u) - np.einsum("hkv,hv->hk", decayed, found["v"][t])
        d_state = d_state - k[t, :, :, None] * found["v"][t][:, None]
        found["g"][t] = np.sum(d_state * decayed, axis=-1)
        d_state = np.exp(g[t])[..., None] * d_state
    return o, state, found | {"first": d_state}


def projected(x: Arrays) -> Arrays:
    """What the recurrence takes, of what a layer's projections give."""
    wide = {name: np.asarray(value, np.float64) for name, value in x.items()}
    for name in "qk":
        wide[name] = wide[name] / np.sqrt(np.sum(wide[name] ** 2, axis=-1, keepdims=True) + 1e-6)
    z = wide["g"] + wide["dt_bias"]
    wide["g"] = BOUND / (1 + np.exp(-np.exp(wide["A_log"])[:, None] * z))
    wide["beta"] = 1 / (1 + np.exp(-wide["beta"]))
    return wide


def through_projections(x: Arrays, found: Arrays) -> Arrays:
    """From the recurrence's gradients to those of what a layer's projections give."""
    unit = projected(x)
    wide = {name: np.asarray(value, np.float64) for name, value in x.items()}
    result = dict(found)
    for name in "qk":
        size = np.sqrt(np.sum(wide[name] ** 2, axis=-1, keepdims=True) + 1e-6)
        along = np.sum(unit[name] * found[name], axis=-1, keepdims=True)
        result[name] = (found[name] - unit[name] * along) / size
    rate, z = np.exp(wide["A_log"])[:, None], wide["g"] + wide["dt_bias"]
    s = 1 / (1 + np.exp(-rate * z))
    slope = found["g"] * BOUND * s * (1 - s) * rate
    result |= {"g": slope, "dt_bias": slope.sum(axis=0), "A_log": (slope * z).sum(axis=(0, 2))}
    result["beta"] = found["beta"] * unit["beta"] * (1 - unit["beta"])
    return result


def error(actual: Any, wanted: Any) -> float:
    """NaN if anything isn't finite."""
    actual, wanted = np.asarray(actual, np.float64), np.asarray(wanted, np.float64)
    size = float(np.sum(wanted**2))
    return float(np.sqrt(np.sum((actual - wanted) ** 2) / size)) if size else float(np.max(np.abs(actual), initial=0))


def bits(x: Any) -> np.ndarray:
    """As whole numbers."""
    x = np.asarray(x)
    return x.view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def differing(a: Any, b: Any) -> float:
    """How many numbers differ in a bit."""
    return float(np.sum(bits(a) != bits(b)))


# --- Inputs ----------------------------------------------------------------------------------------------------------


def draw(rng: np.random.Generator, *token: int, states: tuple[int, ...] = (), raw: bool = False) -> Arrays:
    """Of `kda`, or of `kda_from_raw`; the decay is left out of the former. In NumPy."""

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape)

    x: Arrays = {name: normal(*token, WIDTH) for name in "qkv"}
    for name in "" if raw else "qk":
        x[name] /= np.linalg.norm(x[name], axis=-1, keepdims=True)
    x = {name: value.astype(BF16) for name, value in x.items()}
    heads = token[-1]
    if raw:
        x |= {"g": normal(*token, WIDTH).astype(BF16), "beta": normal(*token).astype(BF16)}
        x |= {"A_log": rng.uniform(0, 1, heads), "dt_bias": rng.uniform(-2, 1, (heads, WIDTH))}
    else:
        x["beta"] = rng.uniform(0, 1, token)
    x["first"] = 0.1 * normal(*states, heads, WIDTH, WIDTH)
    return {name: value if value.dtype == BF16 else value.astype(np.float32) for name, value in x.items()}


def call(how: Arrays, x: Arrays, **integers: Any) -> tuple[jax.Array, jax.Array]:
    """(o, state) of the kernels."""
    order = ("q", "k", "v", "g", "beta", *(("A_log", "dt_bias") if "A_log" in x else ()))
    run: Callable[..., Any] = kda_from_raw if "A_log" in x else kda
    return run(*(x[name] for name in order), initial_state=x["first"], **integers, **how)[:2]


def with_gradients(how: Arrays, x: Arrays, d_o: Any, d_state: Any, **integers: Any) -> Any:
    (o, state), pull = jax.vjp(lambda x: call(how, x, **integers), x)
    return o, state, pull((d_o, d_state))[0]


GATES = {"g=-0.01": -0.01, "g=-1": -1.0, "g=-2.5": -2.5, "g=-3": -3.0, "g=-5": -5.0, "g in [-5, 0]": None, "g=0": 0.0}
PACKED = ((63, 65, 0), (1, 127, 0), (64, 64, 0), (127, 1, 0), (5, 3, 120), (64, 0, 64), (0, 0, 0), (40, 0, 50))
LENGTHS = (0, 1, 2, 63, 64, 65, 127, 129)
CUTS = (1, 15, 16, 17, 64, 65, 100, 129)
RAW = {"random": None, "slow": -7.0, "none": -40.0, "g=-5": 3.0, "mixed": 20.0, "alike, slow": -8.0}
ROWS, LONG = 130, 131072
# Of the last state's gradient: as large as what one token's output gives a state. Were it much larger, all of a strongly
# decaying head's gradient would be that of its last token, and that of its beta one sum of 128 numbers, which may cancel.
_LAST = 0.02


def raw_heads(rng: np.random.Generator, tokens: int, **shapes: Any) -> Arrays:
    """Two heads for each of `RAW`."""
    x = draw(rng, tokens, 2 * len(RAW), raw=True, **shapes)
    for index, (name, value) in enumerate(RAW.items()):
        here = slice(2 * index, 2 * index + 2)
        if name == "mixed":
            x["g"][:, here] = (20 * x["g"][:, here].astype(np.float32)).astype(BF16)
        elif name.startswith("alike"):
            for other, shift in (("q", 2), ("k", 2), ("g", -8)):
                x[other][:, here] = (x[other][:, here].astype(np.float32) + shift).astype(BF16)
        elif value is not None:
            x["g"][:, here] = value
            x["A_log"][here], x["dt_bias"][here] = 0, 0
    return x


class Program(NamedTuple):
    """A function, and arrays of the shapes that it will be called with."""

    run: Callable[..., Any]
    arrays: tuple[Any, ...]
    options: Arrays


Compiled = Callable[[str], Callable[..., Any]]


# --- Laws ------------------------------------------------------------------------------------------------------------


def gates(compiled: Compiled, inputs: Arrays) -> Iterator[Law]:
    """Forward and gradients under each gate, by a kernel with a bound and by one without."""
    x, d_o, d_state = inputs["gates"]
    row = {name: value if name == "first" else value[0] for name, value in x.items()} | {"first": x["first"][0]}
    o, state, wanted = recurrence(row, d_o[0], d_state[0])
    for form in ("bounded", "unbounded"):
        got_o, got_state, got = compiled(f"gates_{form}")(x, d_o, d_state)
        pairs = {"o": (got_o[0], o), "state": (got_state[0], state)}
        pairs |= {name: (got[name][0], wanted[name]) for name in ("q", "k", "v", "g", "beta", "first")}
        for index, gate_name in enumerate(GATES):
            here = slice(2 * index, 2 * index + 2)
            for name, (a, b) in pairs.items():
                a, b = (np.asarray(y, np.float64) for y in (a, b))
                axis = 0 if name in ("state", "first") else 1
                mine = [np.take(y, range(here.start, here.stop), axis=axis) for y in (a, b)]
                yield Law(f"gates {form} {gate_name} {name}", error(*mine), BOUNDS[name])


def packed(compiled: Compiled, inputs: Arrays) -> Iterator[Law]:
    """Sequences in a row, empty ones among them; NaN behind them; none knows of another."""
    x = inputs["packed"]
    for sizes in PACKED:
        ids = np.repeat([0, 1, 2, -1], [*sizes, 128 - sum(sizes)])[None].astype(np.int32)
        filled = dict(x)
        for name in ("q", "k", "v", "g", "beta"):
            filled[name] = x[name].copy()
            filled[name][ids < 0] = np.nan
        o, state = (np.asarray(y) for y in compiled("packed")(filled, segment_ids=ids))
        errors: dict[str, list[float]] = {"o": [], "state": []}
        for sequence in range(3):
            mine = ids[0] == sequence
            part = {name: x[name][0, mine] for name in ("q", "k", "v", "g", "beta")} | {
                "first": x["first"][0, sequence]
            }
            wanted, last, _ = recurrence(part)
            if mine.any():
                errors["o"].append(error(o[0, mine], wanted))
            errors["state"].append(error(state[0, sequence], last))
        for name, found in errors.items():
            yield Law(f"packed {sizes} {name}", float(np.max(found, initial=0)), OUTPUT)  # NaN stays NaN
        yield Law(f"packed {sizes} padding", float(np.sum(o[ids < 0].astype(np.float32) != 0)), 0)
        if sizes[0]:
            changed = {name: value.copy() for name, value in filled.items()}
            for name in ("q", "k", "v"):
                changed[name][ids == 0] = changed[name][ids == 0][::-1]
            other, other_state = compiled("packed")(changed, segment_ids=ids)
            count = differing(o[ids > 0], np.asarray(other)[ids > 0]) + differing(state[:, 1:], other_state[:, 1:])
            yield Law(f"packed {sizes} bits of the others", count, 0)


def lengths(compiled: Compiled, inputs: Arrays) -> Iterator[Law]:
    """Rows of odd lengths with NaN behind them, then eight tokens each in the decoding kernel, in a pool full of NaN."""
    x, more = inputs["rows"], inputs["more"]
    filled = {name: value.copy() for name, value in x.items()}
    for row, length in enumerate(LENGTHS):
        for name in ("q", "k", "v", "g", "beta"):
            filled[name][row, length:] = np.nan
    counts = np.asarray(LENGTHS, np.int32)
    before = np.maximum(counts - 1, 0)
    slots = np.asarray([3, 0, 8, 5, 9, 1, 7, 4], np.int32)
    for form in ("bounded", "unbounded"):
        run = compiled(f"rows_{form}")
        o, state = (np.asarray(y) for y in run(filled, lengths=counts))
        earlier = np.asarray(run(filled, lengths=before)[1])
        pool = np.full((10, *state.shape[1:]), np.nan, np.float32)
        pool[slots] = state
        step, held, decoded = compiled("decode"), pool, []
        for t in range(8):
            out, held = step(*(more[name][:, t] for name in ("q", "k", "v", "g", "beta")), held, slots)
            decoded.append(np.asarray(out))
        pool[slots] = earlier
        last = np.maximum(counts - 1, 0)
        rows = np.arange(len(counts))
        token = [x[name][rows, last] for name in ("q", "k", "v", "g", "beta")]
        joined = np.asarray(step(*token, pool, np.where(counts > 0, slots, -1))[1])[slots]
        for row, length in enumerate(LENGTHS):
            part = {name: x[name][row, :length] for name in ("q", "k", "v", "g", "beta")} | {"first": x["first"][row]}
            wanted, state_wanted, _ = recurrence(part)
            name = f"length {length} {form}"
            if length:
                yield Law(f"{name} o", error(o[row, :length], wanted), OUTPUT)
                yield Law(f"{name} = length {length - 1} and a token", error(joined[row], state[row]), OUTPUT)
            yield Law(f"{name} state", error(state[row], state_wanted), OUTPUT)
            yield Law(f"{name} padding", float(np.sum(o[row, length:].astype(np.float32) != 0)), 0)
            part = {n: more[n][row] for n in ("q", "k", "v", "g", "beta")} | {"first": state_wanted}
            following, _, _ = recurrence(part)
            yield Law(f"{name} then 8 decoded", error(np.stack([y[row] for y in decoded]), following), OUTPUT)
        idle = [slot for slot in range(len(pool)) if slot not in slots]
        yield Law(f"unused slots {form}", float(np.sum(~np.isnan(np.asarray(held)[idle]))), 0)
    skipped = np.where(np.arange(len(slots)) % 2, slots, -1)
    held = np.full(pool.shape, 1.0, np.float32)
    out, after = (np.asarray(y) for y in step(*(more[n][:, 0] for n in ("q", "k", "v", "g", "beta")), held, skipped))
    yield Law("null slots give 0", float(np.sum(out[::2].astype(np.float32) != 0)), 0)
    untouched = [slot for slot in range(len(pool)) if slot not in skipped]
    yield Law("null slots write nothing", differing(after[untouched], held[untouched]), 0)


def bit_laws(compiled: Compiled, inputs: Arrays) -> Iterator[Law]:
    """Bits that depend neither on other rows nor on later tokens, and that come back."""
    x = inputs["rows"]
    whole = np.full(len(LENGTHS), ROWS, np.int32)
    for form in ("bounded", "unbounded"):
        run = compiled(f"rows_{form}")
        o, state = (np.asarray(y) for y in run(x, lengths=whole))
        again = [run(x, lengths=whole) for _ in range(20)]
        yield Law(f"repeats {form}", sum(differing(o, other) + differing(state, last) for other, last in again), 0)
        for row in (0, 5):
            changed = {name: value.copy() for name, value in x.items()}
            others = np.arange(len(LENGTHS)) != row
            for name in ("q", "k", "v", "g", "beta", "first"):
                changed[name][others] = np.roll(changed[name], 1, axis=0)[others]
            other, last = (np.asarray(y) for y in run(changed, lengths=np.where(others, 77, ROWS).astype(np.int32)))
            yield Law(
                f"other rows {form}, row {row}", differing(o[row], other[row]) + differing(state[row], last[row]), 0
            )
        changed = {name: value.copy() for name, value in x.items()}
        for row, cut in enumerate(CUTS):
            for name in ("q", "k", "v", "g", "beta"):
                changed[name][row, cut:] = changed[name][row, cut:][::-1] * (0.5 if name != "g" else 1)
        other = np.asarray(run(changed, lengths=whole)[0])
        for row, cut in enumerate(CUTS):
            yield Law(f"causal {form}, {cut} tokens before", differing(o[row, :cut], other[row, :cut]), 0)


def gradients(compiled: Compiled, inputs: Arrays) -> Iterator[Law]:
    """Of what a layer's projections give: all kinds of decay, one row and packed; the same bits 20 times."""
    x, d_o, d_state = inputs["raw"]
    o, state, got = (jax.tree.map(np.asarray, y) for y in compiled("raw")(x, d_o, d_state))
    heads = {name: value if name in ("A_log", "dt_bias") else value[0] for name, value in x.items()}
    wanted_o, wanted_state, found = recurrence(projected(heads), d_o[0], d_state[0])
    wanted = through_projections(heads, found)
    for index, kind in enumerate(RAW):
        here = range(2 * index, 2 * index + 2)
        pairs = {"o": (o[0], wanted_o, 1), "state": (state[0], wanted_state, 0)}
        for name, value in wanted.items():
            of_heads = name in ("A_log", "dt_bias", "first")
            pairs[name] = (got[name] if name in ("A_log", "dt_bias") else got[name][0], value, 0 if of_heads else 1)
        if kind == "none":  # gradients of 1e-17
            pairs = {name: pair for name, pair in pairs.items() if name not in ("g", "A_log", "dt_bias")}
        for name, (a, b, axis) in pairs.items():
            a, b = (np.take(np.asarray(y, np.float64), here, axis=axis) for y in (a, b))
            yield Law(f"gradient, decay {kind}: {name}", error(a, b), BOUNDS[name])
    count = 0.0
    for _ in range(20):
        *_, other = compiled("raw")(x, d_o, d_state)
        count += sum(differing(got[name], other[name]) for name in got)
    yield Law("gradient repeats", count, 0)

    x, d_o, d_state, ids = inputs["raw_packed"]
    filled = dict(x)
    d_filled = np.where((ids < 0)[..., None, None], np.nan, d_o.astype(np.float32)).astype(BF16)
    for name in ("q", "k", "v", "g", "beta"):
        filled[name] = x[name].copy()
        filled[name][ids < 0] = np.nan
    o, state, got = (
        jax.tree.map(np.asarray, y) for y in compiled("raw_packed")(filled, d_filled, d_state, segment_ids=ids)
    )
    wanted = {name: np.zeros(np.shape(value)) for name, value in x.items()}
    states = []
    for sequence in range(x["first"].shape[1]):
        mine = ids[0] == sequence
        part = {name: x[name] if name in ("A_log", "dt_bias") else x[name][0, mine] for name in x if name != "first"}
        part["first"] = x["first"][0, sequence]
        _, last, found = recurrence(projected(part), d_o[0, mine], d_state[0, sequence])
        states.append(error(state[0, sequence], last))
        for name, value in through_projections(part, found).items():
            if name in ("A_log", "dt_bias"):
                wanted[name] += value
            elif name == "first":
                wanted[name][0, sequence] = value
            else:
                wanted[name][0, mine] = value
    for name, value in wanted.items():
        yield Law(f"gradient, packed: {name}", error(got[name], value), BOUNDS[name])
    yield Law("gradient, packed: states", float(np.max(states)), OUTPUT)
    tokens = ("q", "k", "v", "g", "beta")
    yield Law("gradient, packed: padding", sum(float(np.sum(np.abs(got[n][ids < 0].astype(float)))) for n in tokens), 0)


def one_token(compiled: Compiled, inputs: Arrays) -> Iterator[Law]:
    """T = 1."""
    x = inputs["one"]
    o, state = compiled("one")(x)
    for row in range(len(x["q"])):
        wanted, last, _ = recurrence({name: value[row] for name, value in x.items()})
        yield Law(f"one token, row {row} o", error(o[row], wanted), OUTPUT)
        yield Law(f"one token, row {row} state", error(state[row], last), OUTPUT)


def long(compiled: Compiled, inputs: Arrays) -> Iterator[Law]:
    """131072 tokens that hardly decay, against the recurrence in float32, whose own error is some 1e-5."""
    x = inputs["long"]
    wanted_o, wanted = compiled("long_recurrence")(x)
    o, state = compiled("long")(x)
    yield Law("131072 slow tokens: state", float(ratio(state, wanted)), OUTPUT)
    yield Law("131072 slow tokens: o", float(ratio(o, wanted_o)), OUTPUT)


@jax.jit
def ratio(actual: jax.Array, wanted: jax.Array) -> jax.Array:
    actual, wanted = actual.astype(jnp.float32), wanted.astype(jnp.float32)
    return jnp.sqrt(jnp.sum((actual - wanted) ** 2) / jnp.sum(wanted**2))


def token_by_token(x: Arrays) -> tuple[jax.Array, jax.Array]:
    g = gate(x["g"], x["A_log"], x["dt_bias"], BOUND)
    wide = (l2_normalize(x["q"]), l2_normalize(x["k"]), x["v"], g, jax.nn.sigmoid(x["beta"].astype(jnp.float32)))

    def step(state: jax.Array, token: Any) -> tuple[jax.Array, jax.Array]:
        q, k, v, g, beta = token
        state = state * jnp.exp(g)[..., None]
        wrong = beta[..., None] * (v - jnp.sum(state * k[..., None], axis=-2))
        state = state + k[..., None] * wrong[..., None, :]
        return state, SCALE * jnp.sum(state * q[..., None], axis=-2)

    xs = tuple(jnp.moveaxis(y, 1, 0).astype(jnp.float32) for y in wide)
    state, o = jax.lax.scan(step, x["first"], xs, unroll=8)
    return jnp.moveaxis(o, 0, 1), state


LAWS = {
    "gates": gates,
    "packed": packed,
    "lengths": lengths,
    "bits": bit_laws,
    "gradients": gradients,
    "one": one_token,
    "long": long,
}
NEEDS = {
    "gates": ("gates_bounded", "gates_unbounded"),
    "packed": ("packed",),
    "lengths": ("rows_bounded", "rows_unbounded", "decode"),
    "bits": ("rows_bounded", "rows_unbounded"),
    "gradients": ("raw", "raw_packed"),
    "one": ("one",),
    "long": ("long", "long_recurrence"),
}


def prepare(implementation: Any) -> tuple[Arrays, dict[str, Program]]:
    """(inputs, programs)."""
    rng = np.random.default_rng(time.time_ns())
    x = draw(rng, 1, 128, 2 * len(GATES), states=(1,))
    decays = [np.full(WIDTH, -1.0) if value is None else np.full(WIDTH, value) for value in GATES.values()]
    x["g"] = np.repeat(np.stack(decays), 2, axis=0) * np.ones((1, 128, 1, 1))
    where = 2 * list(GATES.values()).index(None)
    x["g"][:, :, where : where + 2] = rng.uniform(-5, 0, (1, 128, 2, WIDTH))
    x["g"] = x["g"].astype(np.float32)
    cotangents = draw(rng, 1, 128, 2 * len(GATES), states=(1,))
    inputs: Arrays = {"gates": (x, cotangents["v"], 10 * _LAST * cotangents["first"])}
    bounded, unbounded = ({"gate_lower_bound": bound, "implementation": implementation} for bound in (BOUND, None))
    programs = {
        f"gates_{name}": Program(partial(with_gradients, how), inputs["gates"], {})
        for name, how in (("bounded", bounded), ("unbounded", unbounded))
    }

    x = draw(rng, 1, 128, 16, states=(1, 3))
    x["g"] = rng.uniform(-5, -4, (1, 128, 16, WIDTH)).astype(np.float32)
    inputs["packed"] = x
    programs["packed"] = Program(
        partial(call, bounded | {"num_segments": 3}), (x,), {"segment_ids": np.zeros((1, 128), np.int32)}
    )

    batch = len(LENGTHS)
    x, more = draw(rng, batch, ROWS, 2, states=(batch,)), draw(rng, batch, 8, 2)
    for y in (x, more):
        shape = (*y["beta"].shape, WIDTH)
        y["g"] = -np.exp(rng.uniform(np.log(1e-3), np.log(5), shape)).astype(np.float32)
    inputs |= {"rows": x, "more": more}
    counts = np.zeros(batch, np.int32)
    for name, how in (("bounded", bounded), ("unbounded", unbounded)):
        programs[f"rows_{name}"] = Program(partial(call, how), (x,), {"lengths": counts})
    token = tuple(more[name][:, 0] for name in ("q", "k", "v", "g", "beta"))
    pool = np.zeros((10, 2, WIDTH, WIDTH), np.float32)
    programs["decode"] = Program(
        lambda *y: tuple(kda_decode(*y, implementation=implementation)), (*token, pool, counts), {}
    )

    x = {name: value if name in ("A_log", "dt_bias") else value[None] for name, value in raw_heads(rng, 333).items()}
    heads = x["A_log"].size
    d_state = (_LAST * rng.standard_normal(x["first"].shape)).astype(np.float32)
    inputs["raw"] = (x, draw(rng, 1, 333, heads)["v"], d_state)
    programs["raw"] = Program(partial(with_gradients, bounded), inputs["raw"], {})
    sizes = (63, 65, 1, 0, 130)
    ids = np.repeat([0, 1, 2, 3, 4, -1], [*sizes, 41])[None].astype(np.int32)
    x = raw_heads(rng, ids.size, states=(5,))
    x = {name: value if name in ("A_log", "dt_bias") else value[None] for name, value in x.items()}
    d_state = (_LAST * rng.standard_normal(x["first"].shape)).astype(np.float32)
    inputs["raw_packed"] = (x, draw(rng, 1, ids.size, heads)["v"], d_state, ids)
    programs["raw_packed"] = Program(
        partial(with_gradients, bounded | {"num_segments": 5}), inputs["raw_packed"][:3], {"segment_ids": ids}
    )

    x = draw(rng, 4, 1, 8, states=(4,))
    x["g"] = -rng.uniform(0, 5, (4, 1, 8, WIDTH)).astype(np.float32)
    inputs["one"] = x
    programs["one"] = Program(partial(call, bounded), (x,), {})

    x = draw(rng, 1, LONG, 8, states=(1,), raw=True)
    x["g"] = (0.5 * x["g"].astype(np.float32) - 11).astype(BF16)  # decays of some 8e-5
    x["A_log"], x["dt_bias"] = np.zeros(8, np.float32), np.zeros((8, WIDTH), np.float32)
    inputs["long"] = jax.tree.map(jnp.asarray, x)
    programs["long"] = Program(partial(call, bounded), (x,), {})
    programs["long_recurrence"] = Program(token_by_token, (x,), {})
    return inputs, programs


def laws_of(groups: Sequence[str], implementation: Any) -> Iterator[tuple[str, list[Law]]]:
    """(group, what was found), as each is done; all compile at once."""
    inputs, programs = prepare(implementation)
    needed = dict.fromkeys(name for group in groups for name in NEEDS[group])

    def compile_one(program: Program) -> Any:
        return jax.jit(program.run).lower(*program.arrays, **program.options).compile()

    with ThreadPoolExecutor() as pool:
        pending = {name: pool.submit(compile_one, programs[name]) for name in needed}
        for group in groups:
            yield group, list(LAWS[group](lambda name: pending[name].result(), inputs))


def main() -> None:
    """Prints a line for each group of laws, and what fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", default=list(LAWS), choices=list(LAWS))
    parser.add_argument("--implementation", default="gpu", choices=["gpu", "tpu", "xla", "reference"])
    options = parser.parse_args()
    began = time.perf_counter()
    result = versions() | {"implementation": options.implementation, "groups": {}}
    print(
        f"{result['device']}, {result['date']}, jax {result['jax']}, implementation {options.implementation!r}",
        flush=True,
    )
    failures = holding = 0
    for group, found in laws_of(options.only, options.implementation):
        failed = [law for law in found if not law.passes]
        failures, holding = failures + len(failed), holding + len(found) - len(failed)
        result["groups"][group] = {
            "passed": len(found) - len(failed),
            "failed": [law.name for law in failed],
            "laws": {law.name: float(f"{law.value:.4g}") for law in found},
        }
        nearest = max((law for law in found if law.bound), key=lambda law: law.value / law.bound, default=None)
        words = "" if nearest is None else f"; nearest its bound: {nearest.name} {nearest.value:.4f} of {nearest.bound}"
        verdict, seconds = "FAIL" if failed else "pass", time.perf_counter() - began
        print(f"{verdict} {group}: {len(found) - len(failed)} of {len(found)}{words} [{seconds:.0f} s]", flush=True)
        for law in failed:
            print(f"     {law.name}: {law.value:.5g}, at most {law.bound:g}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{'FAIL' if failures else 'PASS'}: {holding} laws hold, {failures} don't")
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
