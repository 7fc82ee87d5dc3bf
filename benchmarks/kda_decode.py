"""KDA on slots of a pool, on one GPU: a token, a window of drafts and a commit beside the bytes that nothing can avoid.

    python -m benchmarks.kda_decode [--only decode verify ...] [--json FILE]

Every case draws fresh inputs, checks the kernel against `xla` in float32, then runs it in a chain: 20 calls inside one
program, each on the pool that the last one left and on other slots, so no state comes from the cache. Times are those of
the kernels alone, the median of a profiler's trace; `chain` is wall time of a call in the chain, with what XLA adds. The
floor is the bytes that are read and written, over 4.3 TB/s.
"""

import argparse
import glob
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kda import KdaRecords, kda_commit, kda_conv_decode, kda_decode, kda_verify

BYTES = 4.3e12
WIDTH, TAPS, CALLS = 128, 4, 20
SHOWN = ("us", "chain_us", "floor_us", "ratio", "error", "failed")


@dataclass(frozen=True)
class Case:
    """One call: `slots` rows of `heads` states, out of a pool of `pool` slots."""

    name: str
    slots: int
    heads: int
    pool: int
    tokens: int = 1
    capacity: int = 8
    committed: bool = False


CASES = (
    Case("decode_64x96", 64, 96, 64),
    Case("decode_1x96", 1, 96, 16),
    Case("decode_16x96", 16, 96, 64),
    Case("decode_64x12", 64, 12, 256),
    Case("decode_256x12", 256, 12, 256),
    Case("raw_64x96", 64, 96, 64),
    Case("conv_64x96", 64, 96, 64),
    Case("conv_1x96", 1, 96, 16),
    Case("verify_8_64x96", 64, 96, 64, 8),
    Case("verify_8_1x96", 1, 96, 16, 8),
    Case("verify_4_behind_4_64x96", 64, 96, 64, 4, committed=True),
    Case("verify_16_64x96", 64, 96, 64, 16, 16),
    Case("commit_8_64x96", 64, 96, 64, 8),
)


def unit(x: jax.Array) -> jax.Array:
    return (x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(jnp.bfloat16)


def draw(case: Case) -> tuple[Callable[..., Any], tuple[Any, ...], Any, float]:
    """(call of read arrays, places, slots and an implementation; read arrays; places; bytes that it has to move)."""
    keys = iter(jax.random.split(jax.random.key(time.time_ns() % 2**31), 20))
    kind = case.name.split("_")[0]
    token = (case.slots, case.heads) if kind != "verify" else (case.slots, case.tokens, case.heads)

    def normal(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
        return jax.random.normal(next(keys), shape, dtype)

    def decays(*shape: int) -> jax.Array:
        return -jnp.exp(normal(*shape) - 3)

    pool = normal(case.pool, case.heads, WIDTH, WIDTH)
    states = 4 * case.slots * case.heads * WIDTH * WIDTH
    vectors = unit(normal(*token, WIDTH)), unit(normal(*token, WIDTH)), normal(*token, WIDTH, dtype=jnp.bfloat16)
    gate = normal(case.heads), normal(case.heads, WIDTH)
    raw, logits = normal(*token, WIDTH, dtype=jnp.bfloat16), normal(*token, dtype=jnp.bfloat16)
    number = case.slots * case.heads * WIDTH
    if kind == "decode":
        given = (*vectors, decays(*token, WIDTH), jax.nn.sigmoid(normal(*token)))

        def decode(given: Any, places: Any, slots: Any, implementation: Any) -> Any:
            o, pool = kda_decode(*given, places, slots, implementation=implementation)
            return o, pool

        return decode, given, pool, 2 * states + 12 * number
    if kind == "raw":
        given = (*vectors, raw, logits, *gate)

        def from_raw(given: Any, places: Any, slots: Any, implementation: Any) -> Any:
            *token, A_log, dt_bias = given
            options = {"A_log": A_log, "dt_bias": dt_bias, "gate_lower_bound": -5.0, "implementation": implementation}
            o, pool = kda_decode(*token, places, slots, **options)
            return o, pool

        return from_raw, given, pool, 2 * states + 10 * number
    if kind == "conv":
        channels = 3 * case.heads * WIDTH
        x = normal(case.slots, channels, dtype=jnp.bfloat16)
        given = (x, normal(channels, TAPS), raw, logits, *gate)
        tails = normal(case.pool, TAPS - 1, channels, dtype=jnp.bfloat16)

        def convolved(given: Any, places: Any, slots: Any, implementation: Any) -> Any:
            o, pool, tails = kda_conv_decode(
                *given, *places, slots, gate_lower_bound=-5.0, implementation=implementation
            )
            return o, (pool, tails)

        return convolved, given, (pool, tails), 2 * states + (10 + 2 * 3 * 6) * number
    recorded = case.pool, case.heads, case.capacity, WIDTH
    records = KdaRecords(unit(normal(*recorded)), normal(*recorded), decays(*recorded))
    if kind == "verify":
        given = (*vectors, decays(*token, WIDTH), jax.nn.sigmoid(normal(*token)), pool)
        room = case.capacity - case.tokens
        past = np.random.default_rng(time.time_ns()).integers(0, room + 1, case.slots)
        committed = jnp.asarray(past, jnp.int32) if case.committed else None

        def verified(given: Any, places: Any, slots: Any, implementation: Any) -> Any:
            o, records = kda_verify(*given, places, slots, committed=committed, implementation=implementation)
            return o, records

        old = 10 * number * float(np.mean(past)) if case.committed else 0
        return verified, given, records, states + 22 * number * case.tokens + old
    counts = jnp.full(case.slots, case.tokens, jnp.int32)

    def committed_into(given: Any, places: Any, slots: Any, implementation: Any) -> Any:
        pool = kda_commit(places, KdaRecords(*given), slots, counts, implementation=implementation)
        return pool[:1, :1, :1], pool

    return committed_into, tuple(records), pool, 2 * states + 10 * number * case.tokens


def durations(run: Callable[[], Any], name: str) -> list[float]:
    """Microseconds of the kernels of that name, from a trace of one run."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        [path] = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        planes = jax.profiler.ProfileData.from_file(path).planes
        lines = [line for plane in planes if "GPU" in plane.name for line in plane.lines if "Stream" in line.name]
        return [event.duration_ns / 1e3 for line in lines for event in line.events if name in event.name]


@jax.jit
def difference(got: Any, want: Any) -> jax.Array:
    """Largest ||got - want|| / ||want|| of the arrays."""

    def one(got: jax.Array, want: jax.Array) -> jax.Array:
        got, want = got.astype(jnp.float32), want.astype(jnp.float32)
        return jnp.linalg.norm((got - want).ravel()) / jnp.linalg.norm(want.ravel())

    return jnp.max(jnp.stack(jax.tree.leaves(jax.tree.map(one, got, want))))


class Prepared(NamedTuple):
    """A case with its inputs drawn and its programs compiled."""

    compiled: list[Any]  # a chain of calls; a call and one of `xla` if it is checked
    given: Any
    places: Any
    slots: jax.Array
    size: float


def prepare(case: Case, checked: bool = True) -> Prepared:
    """Draws and compiles."""
    call, given, places, size = draw(case)
    slots = jnp.asarray(np.random.default_rng(time.time_ns()).permutation(case.pool)[: case.slots], jnp.int32)
    single = jax.jit(partial(call, implementation="gpu"))

    def chain(given: Any, places: Any, slots: Any) -> Any:
        def one(number: Any, carry: Any) -> Any:
            places, total = carry
            o, places = call(given, places, (slots + number * case.slots) % case.pool, "gpu")
            return places, total + o.ravel()[0].astype(jnp.float32)

        return jax.lax.fori_loop(0, CALLS, one, (places, jnp.float32(0)))

    chained = jax.jit(chain, donate_argnums=1)
    plain = jax.jit(partial(call, implementation="xla"))
    with ThreadPoolExecutor() as pool:
        runs = (chained, single, plain) if checked else (chained,)
        compiled = list(pool.map(lambda run: run.lower(given, places, slots).compile(), runs))
    return Prepared(compiled, given, places, slots, size)


def measure(case: Case, prepared: Prepared | None = None) -> dict[str, Any]:
    """Times, floor and error of one case."""
    compiled, given, places, slots, size = prepared or prepare(case)
    line: dict[str, Any] = {"case": case.name, "floor_us": 1e6 * size / BYTES}
    if len(compiled) > 1:
        expected = compiled[2](given, places, slots)
        line["error"] = float(difference(compiled[1](given, places, slots), expected))
        del expected
    state = {"places": places}

    def run() -> Any:
        state["places"], total = compiled[0](given, state["places"], slots)
        return total

    jax.block_until_ready(run())
    found = []
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready(run())
        found.append(1e6 * (time.perf_counter() - began) / CALLS)
    line["chain_us"] = statistics.median(found)
    line["us"] = statistics.median(durations(run, "kda_"))
    line["ratio"] = line["us"] / line["floor_us"]
    return line


def main() -> None:
    """Prints a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="cases whose name begins with one of these")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    lines = []
    print(f"{'case':26}" + "".join(f"{name:>11}" for name in SHOWN[:-1]))
    for case in CASES:
        if not case.name.startswith(tuple(options.only)):
            continue
        try:
            line = measure(case)
        except Exception as failure:
            line = {"case": case.name, "failed": f"{type(failure).__name__}: {failure}"[:500]}
        lines.append(line)
        shown = "".join(f"{line[name]:11.3g}" if name in line else "" for name in SHOWN[:-1])
        print(f"{case.name:26}{shown}{line.get('failed', '')}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
