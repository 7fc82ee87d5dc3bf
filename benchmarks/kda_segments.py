"""KDA on one GPU by the number of segments of a sequence: the time of each stage, and what the cut does to the results.

    python -m benchmarks.kda_segments [--json FILE] [--heads 12 24 32] [--tokens 8192 131072] [--segments 1 2 4 8] [--slow]

Inputs are those of `benchmarks.kda`, a row of tokens, with gate, norms and sigmoid inside. Times are medians over five calls of
each kernel in a profiler's trace, in microseconds; beside them stands what the model of `pallas_kernels.kda.segments` says of
everything behind the chunks' own stage, and the number of segments that it takes. Errors are relative root mean squares of o and
of the state: from the result of one segment, and, up to 8192 tokens, from `xla` in float32. With --slow the decay is slow, so
that what enters a segment matters to its end. The last line says whether a row keeps its bits when another row changes.
"""

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.kda import kda_from_raw
from pallas_kernels.kda import segments as segments_by_time

BOUND, CHUNK, WIDTH = -5.0, 64, 128
STAGES = {"chunks": "kda_chunks", "summarise": "kda_summarise", "combine": "kda_combine", "pass": "kda_pass"}


def draw(batch: int, tokens: int, heads: int, slow: bool, seed: int = 0) -> tuple[jax.Array, ...]:
    """(q, k, v, raw, beta logits, A_log, dt_bias, state)."""
    keys = jax.random.split(jax.random.key(seed), 8)
    token = (batch, tokens, heads)
    wide = [jax.random.normal(key, (*token, WIDTH), jnp.bfloat16) for key in keys[:4]]
    logits = jax.random.normal(keys[4], token, jnp.bfloat16)
    bias = jax.random.uniform(keys[6], (heads, WIDTH)) - (7 if slow else 0)
    state = 0.1 * jax.random.normal(keys[7], (batch, heads, WIDTH, WIDTH))
    return *wide, logits, jax.random.uniform(keys[5], (heads,)), bias, state


def run(segments: int, *arrays: jax.Array, **options: Any) -> tuple[jax.Array, jax.Array]:
    """(o, final state) of the Hopper kernels."""
    *inputs, state = arrays
    how: dict[str, Any] = {"gate_lower_bound": BOUND, "implementation": "gpu", "segments": segments} | options
    result = kda_from_raw(*inputs, initial_state=state, **how)
    return result.o, result.final_state


def exactly(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same by `xla` in float32."""
    *inputs, state = (x.astype(jnp.float32) for x in arrays)
    result = kda_from_raw(*inputs, initial_state=state, gate_lower_bound=BOUND, implementation="xla")
    return result.o, result.final_state


@jax.jit
def _error(got: jax.Array, want: jax.Array) -> jax.Array:
    got, want = (x.astype(jnp.float32) for x in (got, want))
    return jnp.sqrt(jnp.sum((got - want) ** 2) / jnp.sum(want**2))


def error(got: jax.Array, want: jax.Array) -> float:
    """Relative root mean square."""
    return float(_error(got, want))


def kernels(call: Callable[..., Any], arguments: tuple[Any, ...], times: int = 5) -> dict[str, float]:
    """Microseconds of a call's kernels by stage, medians; what is in no stage comes as "other"."""
    jax.block_until_ready(call(*arguments))
    found: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(times):
                jax.block_until_ready(call(*arguments))
        [path] = Path(folder).rglob("*.xplane.pb")
        for name, duration in _events(path):
            found[name].append(duration)
    total = dict.fromkeys((*STAGES, "other"), 0.0)
    for name, durations in found.items():
        stage = next((stage for stage, part in STAGES.items() if part in name), "other")
        total[stage] += statistics.median(durations) * max(1, round(len(durations) / times))
    return total


def _events(path: Path) -> Iterator[tuple[str, float]]:
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if plane.name.startswith("/device:GPU"):
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    yield from ((event.name, event.duration_ns / 1e3) for event in line.events)


def compiled(jobs: dict[int, Callable[..., Any]], arrays: tuple[jax.Array, ...]) -> dict[int, Any]:
    """Programs, compiled side by side."""

    def program(call: Callable[..., Any]) -> Any:
        return jax.jit(call).lower(*arrays).compile()

    with ThreadPoolExecutor() as pool:
        return dict(zip(jobs, pool.map(program, jobs.values()), strict=True))


def neighbours_matter(segments: int) -> bool:
    """Whether a row's bits change when another row, its length included, does."""
    arrays, others = (draw(2, 2048, 4, True, seed) for seed in (3, 4))
    mixed = [jnp.concatenate([a[:1], b[1:]]) if a.shape[0] == 2 else a for a, b in zip(arrays, others, strict=True)]
    call = jax.jit(partial(run, segments))
    before = call(*arrays, lengths=jnp.asarray([2048, 1500]))
    after = call(*mixed, lengths=jnp.asarray([2048, 77]))
    return any(bool(jnp.any(x[0] != y[0])) for x, y in zip(before, after, strict=True))


def main() -> None:
    """Prints a line for each shape and number of segments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--heads", nargs="*", type=int, default=[12, 24, 32])
    parser.add_argument("--tokens", nargs="*", type=int, default=[8192, 131072])
    parser.add_argument("--segments", nargs="*", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--slow", action="store_true")
    options = parser.parse_args()
    processors = jax.devices()[0].core_count
    lines: list[dict[str, Any]] = []
    print(
        "tokens heads segments   chunks summarise combine    pass   other   total    model   from one: o, state   from xla"
    )
    for tokens in options.tokens:
        for heads in options.heads:
            arrays = draw(1, tokens, heads, options.slow)
            chunks = -(-tokens // CHUNK)
            taken = segments_by_time.best(1, heads, chunks, processors)
            jobs = {n: partial(run, n) for n in sorted({1, taken, *options.segments})}
            calls = compiled(jobs | ({0: exactly} if tokens <= 8192 else {}), arrays)
            one, exact = calls[1](*arrays), calls[0](*arrays) if 0 in calls else None
            for segments in jobs:
                times = kernels(calls[segments], arrays)
                line: dict[str, Any] = {"tokens": tokens, "heads": heads, "segments": segments, "us": times}
                line["taken"] = segments == taken
                line["model_us"] = 1e6 * segments_by_time.seconds(segments, 1, heads, chunks, processors)
                got = calls[segments](*arrays)
                line["from_one"] = [error(x, y) for x, y in zip(got, one, strict=True)]
                line["from_xla"] = exact and [error(x, y) for x, y in zip(got, exact, strict=True)]
                del got
                lines.append(line)
                shown = " ".join(f"{x:8.5f}" for x in (*line["from_one"], *(line["from_xla"] or ())))
                print(
                    f"{tokens:6} {heads:5} {segments:7}{'*' if line['taken'] else ' '} "
                    + " ".join(f"{times[stage]:8.1f}" for stage in (*STAGES, "other"))
                    + f" {sum(times.values()):8.1f} {line['model_us']:8.1f} {shown}",
                    flush=True,
                )
                if options.json:
                    options.json.write_text(json.dumps(lines, indent=1) + "\n")
            del arrays, one, exact
    print("a row keeps its bits when another changes, 1 and 4 segments:", [not neighbours_matter(n) for n in (1, 4)])


if __name__ == "__main__":
    main()
