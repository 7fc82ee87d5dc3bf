"""The lightning indexer on one GPU: the Hopper kernels beside the bytes and operations that nothing can avoid.

    python -m benchmarks.lightning_indexer [--json FILE] [--only NAME ...] [--xla]

Each case first selects among fresh small integers, whose scores are exact and tie often, and compares every index with
`lax.top_k` of scores that are all kept (of some of the queries, where those would be too many). Then it times calls on
fresh normal numbers, chained inside one program (a call's positions depend on the last call's result), which leaves out
the host: chains of n and 3n calls, their difference over 2n. The floor is the larger of operations over 790 TFLOP/s and
bytes over 4.3 TB/s.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.lightning_indexer import lightning_indexer
from pallas_kernels.mxfp8 import Mxfp8

FLOPS, BYTES = 790e12, 4.3e12
HEADS, WIDTH, TOP_K = 32, 128, 2048


@dataclass(frozen=True)
class Case:
    """The last `queries` positions of `batch` rows of `keys` keys."""

    name: str
    batch: int
    queries: int
    keys: int
    mxfp8: bool = True
    page: int = 0  # keys of a page, which lie in any order; 0: each row's keys are in order

    @property
    def floor(self) -> float:
        """Seconds that no kernel can beat."""
        pairs = self.batch * self.queries * (self.keys - (self.queries - 1) / 2)
        moved = self.batch * self.keys * (WIDTH + WIDTH // 32 if self.mxfp8 else 2 * WIDTH)
        moved += self.batch * self.queries * (HEADS * (2 * WIDTH + 4) + 4 * TOP_K)
        return max(pairs * 2 * HEADS * WIDTH / FLOPS, moved / BYTES)


CASES = (
    Case("prefill-4096x131072", 1, 4096, 131072),
    Case("prefill-4096x131072-bfloat16", 1, 4096, 131072, mxfp8=False),
    Case("prefill-4096x32768", 1, 4096, 32768),
    Case("prefill-4096x1048576", 1, 4096, 1048576),
    Case("prefill-8192x8192", 1, 8192, 8192),
    Case("decode-64x131072", 64, 1, 131072),
    Case("decode-64x32768", 64, 1, 32768),
    Case("decode-1x131072", 1, 1, 131072),
    Case("decode-64x131072-bfloat16", 64, 1, 131072, mxfp8=False),
    Case("verify-64x4x131072", 64, 4, 131072),
    Case("prefill-4096x131072-pages-of-64", 1, 4096, 131072, page=64),
    Case("prefill-4096x131072-bfloat16-pages-of-64", 1, 4096, 131072, mxfp8=False, page=64),
    Case("decode-64x131072-pages-of-64", 64, 1, 131072, page=64),
    Case("decode-64x131072-pages-of-256", 64, 1, 131072, page=256),
    Case("decode-64x131072-bfloat16-pages-of-64", 64, 1, 131072, mxfp8=False, page=64),
)


def draw(case: Case, *, exact: bool, seed: int) -> dict[str, Any]:
    """Inputs on the device."""
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = (case.batch, case.queries, HEADS, WIDTH), (case.batch, case.keys, WIDTH), (case.batch, case.queries, HEADS)
    if exact:
        q, k, w = (jax.random.randint(key, shape, -2, 3) for key, shape in zip(keys, shapes, strict=True))
    else:
        q, k, w = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    q, k = (x.astype(jnp.bfloat16) for x in (q, k))
    if case.mxfp8:
        q, k = Mxfp8.quantize(q), Mxfp8.quantize(k)
    positions = jnp.arange(case.keys - case.queries, case.keys, dtype=jnp.int32)
    paged = {}
    if case.page:
        count = case.batch * case.keys // case.page
        k = jax.tree.map(lambda x: x.reshape(count, case.page, x.shape[-1]), k)
        order = np.random.default_rng(seed).permutation(count).reshape(case.batch, -1)
        paged["page_table"] = jnp.asarray(order, jnp.int32)
    return paged | {
        "q": q,
        "k": k,
        "w": w.astype(jnp.float32) / 64,
        "q_positions": jnp.broadcast_to(positions, (case.batch, case.queries)),
    }


@jax.jit
def wanted(q: Any, k: Any, w: Any, positions: Any) -> Any:
    """Indices of one query by sorting all of its scores."""
    dots = jnp.matmul(q, k.T, preferred_element_type=jnp.float32)
    scores = jnp.sum(w[:, None] * jnp.maximum(dots, 0), axis=0)
    scores = jnp.where(jnp.arange(k.shape[0]) <= positions, scores, -jnp.inf)
    return jnp.sort(jax.lax.top_k(scores, TOP_K)[1])


def wrong_rows(case: Case, select: Callable[..., Any], seed: int) -> int:
    """How many of up to 96 queries were given another set."""
    given = draw(case, exact=True, seed=seed)
    found = np.asarray(select(**given))
    q, k = (x.dequantize(jnp.bfloat16) if isinstance(x, Mxfp8) else x for x in (given["q"], given["k"]))
    if case.page:
        k = k[given["page_table"]].reshape(case.batch, case.keys, WIDTH)
    rows = np.random.default_rng(seed).permutation(case.batch * case.queries)[:96]
    places = [divmod(int(row), case.queries) for row in rows]
    return sum(
        not np.array_equal(found[b, t], wanted(q[b, t], k[b], given["w"][b, t], given["q_positions"][b, t]))
        for b, t in places
    )


def milliseconds(case: Case, select: Callable[..., Any], seed: int) -> float:
    """Median of a call in five pairs of chains."""
    given = draw(case, exact=False, seed=seed)
    count = 3 if case.floor > 1e-3 else 10

    def chain(times: Any, given: dict[str, Any]) -> Any:
        def one(_: Any, positions: Any) -> Any:
            found = select(**given | {"q_positions": positions})
            return given["q_positions"] + jnp.where(found[0, 0, 0] == 123456789, 1, 0)

        return jax.lax.fori_loop(0, times, one, given["q_positions"])

    call = jax.jit(chain)
    jax.block_until_ready(call(1, given))
    found = []
    for _ in range(5):
        spent = []
        for times in (count, 3 * count):
            began = time.perf_counter()
            jax.block_until_ready(call(times, given))
            spent.append(time.perf_counter() - began)
        found.append(1e3 * (spent[1] - spent[0]) / (2 * count))
    return statistics.median(found)


def measure(case: Case, implementation: Any) -> dict[str, Any]:
    """One line of the table."""
    select = jax.jit(partial(lightning_indexer, top_k=TOP_K, implementation=implementation))
    seed = time.time_ns() % 2**31
    memory: Any = select.lower(**draw(case, exact=True, seed=seed)).compile().memory_analysis()
    taken = milliseconds(case, select, seed)
    return {
        "case": case.name,
        "implementation": implementation,
        "ms": taken,
        "floor_ms": 1e3 * case.floor,
        "ratio": taken / (1e3 * case.floor),
        "temporary_mib": memory.temp_size_in_bytes / 2**20,
        "wrong_rows": wrong_rows(case, select, seed),
    }


def main() -> None:
    """Prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES], help="cases to run")
    parser.add_argument("--xla", action="store_true", help="also time implementation='xla'")
    options = parser.parse_args()
    lines = []
    print(f"{'case':40} {'impl':5} {'ms':>9} {'floor':>8} {'ratio':>6} {'MiB':>6} {'wrong':>6}")
    for case in CASES:
        if options.only and case.name not in options.only:
            continue
        for implementation in ("gpu", "xla") if options.xla else ("gpu",):
            line = measure(case, implementation)
            lines.append(line)
            print(
                f"{line['case']:40} {implementation:5} {line['ms']:9.4f} {line['floor_ms']:8.4f} {line['ratio']:6.2f} "
                f"{line['temporary_mib']:6.1f} {line['wrong_rows']:6d}",
                flush=True,
            )
            if options.json:  # after each line, so that a run that is cut off leaves what it has
                device = jax.devices()[0]
                found = {"device": device.device_kind, "jax": jax.__version__, "lines": lines}
                options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
