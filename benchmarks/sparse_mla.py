"""Sparse MLA on one GPU: the Hopper kernel beside the operations that nothing can avoid.

    python -m benchmarks.sparse_mla [--seconds 90] [--json FILE] [--only NAME ...]

Each case draws fresh queries, latents and indices, checks the results of some queries against float64 on the host, then
times calls chained inside one program (each call's query depends on the last call's result), which leaves out the host.
Printed is the median of seven chains, divided by their length. The rate counts 2 * queries * heads * top_k * (576 + 512)
operations, of the heads that exist; the floor is those at 790 TFLOP/s, a large bfloat16 product's rate on an H200.
"""

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

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


def draw(case: Case) -> tuple[Any, Any, Any]:
    """Queries, latents and indices on the device; a tenth of the last query's indices is -1."""
    keys = jax.random.split(jax.random.key(time.time_ns() % 2**31), 3)
    q = jax.random.normal(keys[0], (case.batch, case.queries, case.heads, WIDTH), jnp.bfloat16)
    latent: Any = jax.random.normal(keys[1], (case.batch, case.keys, WIDTH), jnp.bfloat16)
    if case.fp8:
        latent = jax.jit(partial(Fp8Latent.quantize, latent_width=VALUE))(latent)
    indices = jax.random.randint(keys[2], (case.batch, case.queries, case.top_k), 0, case.keys)
    return q, latent, indices.at[-1, -1, : case.top_k // 10].set(-1)


def run(q: Any, latent: Any, indices: Any) -> Any:
    return sparse_mla(q, latent, indices, latent_width=VALUE, scale=SCALE, implementation="gpu")


@jax.jit
def chained(q: Any, latent: Any, indices: Any, count: Any) -> Any:
    """`count` calls, each of which needs the one before."""

    def one(_: Any, q: Any) -> Any:
        o, lse = run(q, latent, indices)
        return q.at[0, 0, 0, 0].set((o[0, 0, 0, 0] + lse[0, 0, 0].astype(o.dtype)).astype(q.dtype))

    return jax.lax.fori_loop(0, count, one, q)[0, 0, 0, 0]


def error(case: Case, arguments: tuple[Any, Any, Any]) -> dict[str, float]:
    """Relative error of values and absolute error of log-sum-exps of eight queries, the first and the last among them."""
    q, latent, indices = arguments
    o, lse = jax.jit(run)(*arguments)
    wrong = right = worst = 0.0
    total = case.batch * case.queries
    for number in np.unique(np.linspace(0, total - 1, 8).astype(int)):
        b, t = divmod(int(number), case.queries)
        chosen = indices[b, t][indices[b, t] >= 0]
        rows = latent[b].packed[chosen] if isinstance(latent, Fp8Latent) else latent[b][chosen]
        rows = Fp8Latent(rows, VALUE, WIDTH - VALUE).dequantize(jnp.bfloat16) if case.fp8 else rows
        keys, query = (np.asarray(x.astype(jnp.float32), np.float64) for x in (rows, q[b, t]))
        scores = SCALE * query @ keys.T
        top = scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores - top)
        sums = weights.sum(axis=-1, keepdims=True)
        want = weights / sums @ keys[:, :VALUE]
        got = np.asarray(o[b, t].astype(jnp.float32), np.float64)
        wrong, right = wrong + np.sum((got - want) ** 2), right + np.sum(want**2)
        worst = max(worst, np.abs(np.asarray(lse[b, t], np.float64) - (top + np.log(sums))[:, 0]).max())
    return {"error": float(np.sqrt(wrong / right)), "lse_error": float(worst)}


def seconds(arguments: tuple[Any, Any, Any], count: int) -> float:
    """Median of seven chains of `count` + 1 calls, less a chain of one."""
    jax.block_until_ready(chained(*arguments, count + 1))
    found = []
    for _ in range(7):
        began = time.perf_counter()
        jax.block_until_ready(chained(*arguments, 1))
        middle = time.perf_counter()
        jax.block_until_ready(chained(*arguments, count + 1))
        found.append((time.perf_counter() - middle - (middle - began)) / count)
    return statistics.median(found)


def measure(case: Case) -> dict[str, Any]:
    """One line of the table."""
    arguments = draw(case)
    found = error(case, arguments)
    taken = seconds(arguments, case.calls)
    operations = 2 * case.batch * case.queries * case.heads * case.top_k * (WIDTH + VALUE)
    tuning = gpu.tuned(case.batch * case.queries, case.heads, -(-case.top_k // gpu.TILE), case.fp8)
    line = {"ms": taken * 1e3, "tflops": operations / taken / 1e12, "floor_ms": operations / FLOPS * 1e3}
    return {**asdict(case), **line, **found, "tuning": str(tuning)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90, help="begin no case after this time")
    parser.add_argument("--json", type=Path, help="write every line here")
    parser.add_argument("--only", nargs="*", help="cases whose names hold one of these")
    options = parser.parse_args()
    began, lines = time.monotonic(), []
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, chained calls")
    for case in CASES:
        if options.only and not any(part in case.name for part in options.only):
            continue
        if time.monotonic() - began > options.seconds:
            print(f"{case.name}: no time left")
            continue
        line = measure(case)
        lines.append(line)
        print(
            f"{case.name:30s} {line['ms']:9.4f} ms {line['tflops']:5.0f} TFLOP/s floor {line['floor_ms']:.4f} ms "
            f"error {line['error']:.1e} lse {line['lse_error']:.1e}",
            flush=True,
        )
        if options.json is not None:
            options.json.write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()
