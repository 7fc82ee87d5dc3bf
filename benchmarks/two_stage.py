"""The indexer in two stages: what it misses of kimi-tiny's own keys, and what it saves on a GPU.

    python -m benchmarks.two_stage recall [--folder DIR] [--longest 32768] [--json FILE]
    python -m benchmarks.two_stage speed [--keys 1048576] [--kept 0.005 0.01 0.02] [--json FILE]

Recall of a query is |found ∩ exact| / |exact|, with the positions that `lightning_indexer` returns with and without
`two_stage`; the table has the mean and the worst query of the last 256 of a long text, by layer, from the model's own q, k
and w (bfloat16 caches). Text is that of `benchmarks.cache_quality`.

Speed is that of the last 4096 queries of a row of random keys, 32 heads of 128, top-2048, MXFP8: all kinds in one run, the
median of single calls that are waited for, and of random keys the recall of 32 queries (heads of random keys are positive half
of the time, which suits the linear form least). On a GPU only.
"""

import argparse
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.lightning_indexer import TwoStage, lightning_indexer, recall, two_stage_recall

QUERIES = 256
STAGES = (
    *(TwoStage(1, kept, "linear") for kept in (0.004, 0.005, 0.0075, 0.01, 0.02)),
    *(TwoStage(8, kept, "linear") for kept in (0.02, 0.05)),
    *(TwoStage(8, kept, "mean") for kept in (0.05, 0.25, 0.5, 0.75)),
)


def recalls(text: list[int], stages: tuple[TwoStage, ...] = STAGES) -> dict[TwoStage, list[np.ndarray]]:
    """Recall of the last queries of a text, by layer."""
    from benchmarks.cache_quality import index_inputs, tiny

    config = tiny().config
    assert config.dsa is not None
    layers, top_k = index_inputs(text), config.dsa.top_k
    positions = jnp.arange(len(text) - QUERIES, len(text), dtype=jnp.int32)[None]

    @partial(jax.jit, static_argnames="stage")
    def one(q: Any, k: Any, w: Any, stage: TwoStage) -> Any:
        return two_stage_recall(q, k, w, top_k=top_k, q_positions=positions, two_stage=stage)

    return {
        stage: [np.asarray(one(q[:, -QUERIES:], k, w[:, -QUERIES:], stage=stage)[0]) for q, k, w in layers]
        for stage in stages
    }


def draw(keys: int, queries: int, seed: int) -> dict[str, Any]:
    """Normal numbers in MXFP8 on the device."""
    from pallas_kernels.mxfp8 import Mxfp8

    parts = jax.random.split(jax.random.key(seed), 3)
    q = jax.random.normal(parts[0], (1, queries, 32, 128), jnp.bfloat16)
    k = jax.random.normal(parts[1], (1, keys, 128), jnp.bfloat16)
    return {
        "q": Mxfp8.quantize(q),
        "k": Mxfp8.quantize(k),
        "w": jax.random.normal(parts[2], (1, queries, 32), jnp.float32) / 64,
        "q_positions": jnp.arange(keys - queries, keys, dtype=jnp.int32)[None],
    }


def speeds(keys: int, kept: list[float], queries: int = 4096, top_k: int = 2048) -> list[dict[str, Any]]:
    """One line for the exact indexer, one for each kept fraction."""
    given = draw(keys, queries, time.time_ns() % 2**31)
    fractions: list[float | None] = [None, *kept]

    def compiled(fraction: float | None) -> Any:
        stage = None if fraction is None else TwoStage(1, fraction, "linear")
        call: Any = jax.jit(partial(lightning_indexer, top_k=top_k, two_stage=stage, implementation="gpu"))
        return call.lower(**given).compile()

    with ThreadPoolExecutor() as pool:
        calls = list(pool.map(compiled, fractions))
    lines: list[dict[str, Any]] = []
    rows = slice(None, None, queries // 32)
    exact = None
    for fraction, call in zip(fractions, calls, strict=True):
        found = jax.block_until_ready(call(**given))
        exact = found if exact is None else exact
        spent = []
        for _ in range(7):
            began = time.perf_counter()
            jax.block_until_ready(call(**given))
            spent.append(1e3 * (time.perf_counter() - began))
        line: dict[str, Any] = {"kept": fraction, "ms": statistics.median(spent)}
        line["temporary_mib"] = call.memory_analysis().temp_size_in_bytes / 2**20
        line["recall"] = float(recall(found[:, rows], exact[:, rows]).mean())
        line["times"] = lines[0]["ms"] / line["ms"] if lines else 1.0
        lines.append(line)
        name = "exact" if fraction is None else f"{fraction:.2%} kept"
        print(
            f"| {name} | {line['ms']:.2f} | {line['times']:.2f} | {line['recall']:.3f} | {line['temporary_mib']:.0f} |",
            flush=True,
        )
    return lines


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.two_stage", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("recall", "speed"))
    parser.add_argument("--folder", type=Path, help="work folder of recipes.kimi_tiny, for a text of held-out books")
    parser.add_argument("--longest", type=int, default=32768, help="tokens of the text")
    parser.add_argument("--keys", type=int, default=1048576)
    parser.add_argument("--kept", type=float, nargs="+", default=[0.005, 0.01, 0.02])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {"jax": jax.__version__, "device": str(jax.devices()[0].device_kind)}
    if options.what == "recall":
        from benchmarks.cache_quality import long_text

        text = long_text(options.folder, options.longest)
        print(f"| two stages, {len(text):,} keys | kept | mean recall by layer | worst query |\n|---|---|---|---|")
        for stage, found in recalls(text).items():
            means, worst = ([float(getattr(layer, what)()) for layer in found] for what in ("mean", "min"))
            name = f"blocks of {stage.block_size}, {stage.coarse}"
            cells = [" ".join(f"{value:.4f}" for value in values) for values in (means, worst)]
            print(f"| {name} | {stage.kept_fraction:.2%} | {' | '.join(cells)} |", flush=True)
            result[f"{name}, {stage.kept_fraction}"] = {"mean": means, "worst": worst}
    else:
        print(f"| 4096 queries, {options.keys:,} keys | ms | times faster | recall | MiB |\n|---|---|---|---|---|")
        result["lines"] = speeds(options.keys, options.kept)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
