"""Sparse MLA on one GPU: the Hopper kernel beside the operations that nothing can avoid.

    python -m benchmarks.sparse_mla [--seconds 90] [--json FILE] [--only NAME ...]

Each case draws fresh queries, latents and indices, checks the results of some queries against float64 on the host, then
times calls. "kernels" is the time of a call's kernels on the device, merging included: medians of a profiler's trace of
calls. "launches" is what a call takes of 21 that are launched one after the other. "chain" is the median of seven chains of
calls inside one program, each of which needs the one before, divided by their length: it has XLA's loop in it, a write to the
queries and some 20 us. The rate is of the first and counts 2 * queries * heads * top_k * (576 + 512) operations, of the heads
that exist; the floor is those at 790 TFLOP/s, a large bfloat16 product's rate on an H200.
"""

import argparse
import glob
import json
import statistics
import tempfile
import time
from collections import defaultdict
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.fp8_latent import Fp8Latent
from pallas_kernels.sparse_mla import gpu, sparse_mla

FLOPS = 790e12
WIDTH, VALUE, SCALE = 576, 512, 192**-0.5


@dataclass(frozen=True)
class Case:
    """One call: `batch` sequences with `keys` cached tokens and `queries` queries each."""

    name: str
    batch: int
    queries: int
    keys: int
    heads: int
    fp8: bool = False
    top_k: int = 2048
    calls: int = 5


CASES = (
    *(Case(f"prefill-4096x32768-h{heads}", 1, 4096, 32768, heads) for heads in (96, 128, 64, 48, 32, 12)),
    Case("prefill-4096x8192-h96", 1, 4096, 8192, 96),
    Case("prefill-4096x131072-h96", 1, 4096, 131072, 96),
    Case("prefill-4096x32768-h96-fp8", 1, 4096, 32768, 96, True),
    *(Case(f"decode-128x1-h{heads}-fp8", 128, 1, 8192, heads, True, calls=20) for heads in (96, 128, 64, 12)),
    *(Case(f"decode-{batch}x1-h96-fp8", batch, 1, 8192, 96, True, calls=20) for batch in (64, 16, 1)),
    Case("decode-128x1-h96", 128, 1, 8192, 96, calls=20),
    *(
        Case(f"verify-{batch}x{tokens}-h96-fp8", batch, tokens, 8192, 96, True, calls=20)
        for batch, tokens in ((64, 4), (1, 16))
    ),
)


def draw(case: Case, seed: Any) -> tuple[Any, Any, Any]:
    """Queries, latents and indices; a tenth of the last query's indices is -1."""
    keys = jax.random.split(jax.random.key(seed), 3)
    q = jax.random.normal(keys[0], (case.batch, case.queries, case.heads, WIDTH), jnp.bfloat16)
    latent: Any = jax.random.normal(keys[1], (case.batch, case.keys, WIDTH), jnp.bfloat16)
    latent = Fp8Latent.quantize(latent, VALUE) if case.fp8 else latent
    indices = jax.random.randint(keys[2], (case.batch, case.queries, case.top_k), 0, case.keys)
    return q, latent, indices.at[-1, -1, : case.top_k // 10].set(-1)


def run(q: Any, latent: Any, indices: Any) -> Any:
    return sparse_mla(q, latent, indices, latent_width=VALUE, scale=SCALE, implementation="gpu")


def chained(q: Any, latent: Any, indices: Any, count: Any) -> Any:
    """`count` calls, each of which needs the one before."""

    def one(_: Any, q: Any) -> Any:
        o, lse = run(q, latent, indices)
        return q.at[0, 0, 0, 0].set((o[0, 0, 0, 0] + lse[0, 0, 0].astype(o.dtype)).astype(q.dtype))

    return jax.lax.fori_loop(0, count, one, q)[0, 0, 0, 0]


def sampled(case: Case, q: Any, latent: Any, indices: Any, o: Any, lse: Any) -> Any:
    """Queries, rows, indices and results of up to eight queries, the first and the last among them."""
    total = case.batch * case.queries
    places = [divmod(int(n), case.queries) for n in np.unique(np.linspace(0, total - 1, 8).astype(int))]

    def rows(b: int, t: int) -> Any:
        chosen = jnp.maximum(indices[b, t], 0)
        if isinstance(latent, Fp8Latent):
            return Fp8Latent(latent.packed[b][chosen], VALUE, WIDTH - VALUE).dequantize(jnp.bfloat16)
        return latent[b][chosen]

    parts = [(q[b, t], rows(b, t), indices[b, t], o[b, t], lse[b, t]) for b, t in places]
    return [jnp.stack(part).astype(jnp.float32) for part in zip(*parts, strict=True)]


def error(found: Any) -> dict[str, float]:
    """Relative error of values and absolute error of log-sum-exps of what `sampled` returns."""
    wrong = right = worst = 0.0
    for query, keys, indices, o, lse in zip(*[np.asarray(part, np.float64) for part in found], strict=True):
        keys = keys[indices >= 0]
        scores = SCALE * query @ keys.T
        top = scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores - top)
        sums = weights.sum(axis=-1, keepdims=True)
        want = weights / sums @ keys[:, :VALUE]
        wrong, right = wrong + np.sum((o - want) ** 2), right + np.sum(want**2)
        worst = max(worst, np.abs(lse - (top + np.log(sums))[:, 0]).max())
    return {"error": float(np.sqrt(wrong / right)), "lse_error": float(worst)}


class Prepared(NamedTuple):
    """A case and its programs, being compiled."""

    case: Case
    tuning: gpu.Tuning
    draw: Future[Any]
    run: Future[Any]
    chained: Future[Any]
    sampled: Future[Any]


def prepare(case: Case, compiler: Executor) -> Prepared:
    """Traces a case's programs; another thread compiles them."""
    seed = jax.ShapeDtypeStruct((), jnp.int32)
    shapes = jax.eval_shape(partial(draw, case), seed)
    results = jax.eval_shape(run, *shapes)
    lowered = (
        jax.jit(partial(draw, case)).lower(seed),
        jax.jit(run).lower(*shapes),
        jax.jit(chained).lower(*shapes, jax.ShapeDtypeStruct((), jnp.int32)),
        jax.jit(partial(sampled, case)).lower(*shapes, *results),
    )
    tuning = gpu.tuned(case.batch * case.queries, case.heads, -(-case.top_k // gpu.TILE), case.fp8)
    return Prepared(case, tuning, *[compiler.submit(program.compile) for program in lowered])


def seconds(chain: Any, arguments: tuple[Any, Any, Any], count: int) -> float:
    """Median of seven chains of `count` + 1 calls, less a chain of one."""
    one, many = jnp.int32(1), jnp.int32(count + 1)
    jax.block_until_ready(chain(*arguments, many))
    found = []
    for _ in range(7):
        began = time.perf_counter()
        jax.block_until_ready(chain(*arguments, one))
        middle = time.perf_counter()
        jax.block_until_ready(chain(*arguments, many))
        found.append((time.perf_counter() - middle - (middle - began)) / count)
    return statistics.median(found)


def kernel_seconds(call: Any, arguments: tuple[Any, Any, Any], times: int) -> float:
    """Time of a call's kernels on the device: the sum of each kernel's median in a trace of `times` calls."""
    out: Any = None
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(times):
                out = call(*arguments)
            jax.block_until_ready(out)
        [path] = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        found: dict[str, list[float]] = defaultdict(list)
        for plane in jax.profiler.ProfileData.from_file(path).planes:
            for line in plane.lines if plane.name.startswith("/device:GPU") else ():
                for event in line.events if line.name.startswith("Stream") else ():
                    found[event.name].append(event.duration_ns / 1e9)
    return sum(statistics.median(each) * (len(each) / times) for each in found.values())


def launched_seconds(call: Any, arguments: tuple[Any, Any, Any]) -> float:
    """Median of nine times 21 calls launched one after the other, less one call, divided by 20."""

    def run(times: int) -> float:
        began, out = time.perf_counter(), None
        for _ in range(times):
            out = call(*arguments)
        jax.block_until_ready(out)
        return time.perf_counter() - began

    run(21)
    return statistics.median((run(21) - run(1)) / 20 for _ in range(9))


def measure(prepared: Prepared) -> dict[str, Any]:
    """One line of the table."""
    case, call = prepared.case, prepared.run.result()
    arguments = prepared.draw.result()(jnp.int32(time.time_ns() % 2**31))
    found = error(prepared.sampled.result()(*arguments, *call(*arguments)))
    taken = kernel_seconds(call, arguments, 4 * case.calls)
    launched = launched_seconds(call, arguments)
    chain = seconds(prepared.chained.result(), arguments, case.calls)
    operations = 2 * case.batch * case.queries * case.heads * case.top_k * (WIDTH + VALUE)
    line = {"ms": taken * 1e3, "tflops": operations / taken / 1e12, "launches_ms": launched * 1e3}
    line["chain_ms"] = chain * 1e3
    line["floor_ms"] = operations / FLOPS * 1e3
    return {**asdict(case), **line, **found, "tuning": str(prepared.tuning)}


def show(line: dict[str, Any]) -> None:
    """Prints a line of the table."""
    print(
        f"{line['name']:30s} {line['ms']:9.4f} ms {line['tflops']:5.0f} TFLOP/s "
        f"launches {line['launches_ms']:.4f} ms chain {line['chain_ms']:.4f} ms "
        f"floor {line['floor_ms']:.4f} ms error {line['error']:.1e} lse {line['lse_error']:.1e}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90, help="begin no case after this time")
    parser.add_argument("--json", type=Path, help="write every line here")
    parser.add_argument("--only", nargs="*", help="cases whose names hold one of these")
    options = parser.parse_args()
    began, lines = time.monotonic(), []
    print(
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}; a call's kernels, their rate; a call launched, in a chain"
    )
    cases = [case for case in CASES if not options.only or any(part in case.name for part in options.only)]
    with ThreadPoolExecutor(8) as compiler:
        for prepared in [prepare(case, compiler) for case in cases]:
            if time.monotonic() - began > options.seconds:
                print(f"{prepared.case.name}: no time left")
                continue
            lines.append(measure(prepared))
            show(lines[-1])
            if options.json is not None:
                options.json.write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()
