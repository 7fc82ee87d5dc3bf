"""The indexer in two stages: what it misses of kimi-tiny's own keys, and what it saves on a GPU.

    python -m benchmarks.two_stage recall [--folder DIR] [--longest 32768] [--json FILE]
    python -m benchmarks.two_stage speed [--keys 1048576] [--kept 0.005 0.01] [--format mxfp8|bfloat16] [--json FILE]
    python -m benchmarks.two_stage speed --slots 16 --queries 8 [--keys 1048576] [--kept 0.01] [--json FILE]

Recall of a query is |found ∩ exact| / |exact|, with the positions that `lightning_indexer` returns with and without
`two_stage`; the table has the mean and the worst query of the last 256 of a long text, by layer, from the model's own q, k
and w (bfloat16 caches). Text is that of `benchmarks.cache_quality`.

Speed is that of the last queries of rows of random keys, 32 heads of 128, top-2048: all kinds in one run, the median of
single calls that are waited for, and, from a trace, of the kernels' device times of a call; of random keys the recall of 32
queries (heads of random keys are positive half of the time, which suits the linear form least), and of positive numbers, where
the linear form is the score but for its rounding, how many of 32 queries get the exact selection. On a GPU only.
"""

import argparse
import glob
import json
import statistics
import tempfile
import time
from collections.abc import Callable
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


def draw(
    slots: int, keys: int, queries: int, packed: bool, seed: int, form: Callable[[jax.Array], jax.Array]
) -> dict[str, Any]:
    """`form` of normal numbers on the device."""
    from pallas_kernels.mxfp8 import Mxfp8

    @jax.jit
    def drawn(key: jax.Array) -> dict[str, Any]:
        parts = jax.random.split(key, 3)
        q = form(jax.random.normal(parts[0], (slots, queries, 32, 128), jnp.bfloat16))
        k = form(jax.random.normal(parts[1], (slots, keys, 128), jnp.bfloat16))
        return {
            "q": Mxfp8.quantize(q) if packed else q,
            "k": Mxfp8.quantize(k) if packed else k,
            "w": jax.random.normal(parts[2], (slots, queries, 32), jnp.float32) / 64,
            "q_positions": jnp.broadcast_to(jnp.arange(keys - queries, keys, dtype=jnp.int32), (slots, queries)),
        }

    return drawn(jax.random.key(seed))


def device_ms(run: Callable[[], Any], calls: int = 3) -> float:
    """Device time of a call's kernels."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                jax.block_until_ready(run())
        [path] = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        planes = jax.profiler.ProfileData.from_file(path).planes
        lines = [line for plane in planes if "GPU" in plane.name for line in plane.lines if "Stream" in line.name]
        return sum(event.duration_ns for line in lines for event in line.events) / 1e6 / calls


def speeds(
    keys: int, kept: list[float], *, slots: int = 1, queries: int = 4096, top_k: int = 2048, packed: bool = True
) -> list[dict[str, Any]]:
    """One line for the exact indexer, one for each kept fraction."""
    seed = time.time_ns() % 2**31
    given = draw(slots, keys, queries, packed, seed, lambda x: x)
    fractions: list[float | None] = [None, *kept]

    def compiled(fraction: float | None) -> Any:
        stage = None if fraction is None else TwoStage(1, fraction, "linear")
        call: Any = jax.jit(partial(lightning_indexer, top_k=top_k, two_stage=stage, implementation="gpu"))
        return call.lower(**given).compile()

    with ThreadPoolExecutor() as pool:
        calls = list(pool.map(compiled, fractions))
    lines: list[dict[str, Any]] = []
    for fraction, call in zip(fractions, calls, strict=True):
        jax.block_until_ready(call(**given))
        spent = []
        for _ in range(7):
            began = time.perf_counter()
            jax.block_until_ready(call(**given))
            spent.append(1e3 * (time.perf_counter() - began))
        line: dict[str, Any] = {"kept": fraction, "ms": statistics.median(spent)}
        line["device_ms"] = device_ms(partial(call, **given))
        line["temporary_mib"] = call.memory_analysis().temp_size_in_bytes / 2**20
        line["times"] = lines[0]["ms"] / line["ms"] if lines else 1.0
        lines.append(line)
    some = max(1, slots * queries // 32)
    for what, form in (("recall", lambda x: x), ("positive", jnp.abs)):
        del given
        given = draw(slots, keys, queries, packed, seed, form)
        found = [call(**given).reshape(1, -1, top_k)[:, ::some] for call in calls]
        for line, chosen in zip(lines, found, strict=True):
            hits = recall(chosen, found[0])
            line[what] = float(hits.mean()) if what == "recall" else f"{int((hits == 1).sum())} of {hits.size}"
    for line in lines:
        name = "exact" if line["kept"] is None else f"{line['kept']:.2%} kept"
        print(
            f"| {name} | {line['ms']:.2f} | {line['device_ms']:.2f} | {line['times']:.2f} | {line['recall']:.3f} | "
            f"{line['positive']} | {line['temporary_mib']:.0f} |",
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
    parser.add_argument("--kept", type=float, nargs="+", default=[0.005, 0.01])
    parser.add_argument("--slots", type=int, default=1, help="rows of keys")
    parser.add_argument("--queries", type=int, default=4096, help="of each row")
    parser.add_argument("--format", choices=("mxfp8", "bfloat16"), default="mxfp8", help="of keys and queries")
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
        name = f"{options.slots} x {options.queries} queries, {options.keys:,} keys, {options.format}"
        print(
            f"| {name} | ms | device ms | times faster | recall | positive, exact | MiB |\n|---|---|---|---|---|---|---|"
        )
        result["case"] = name
        result["lines"] = speeds(
            options.keys,
            options.kept,
            slots=options.slots,
            queries=options.queries,
            packed=options.format == "mxfp8",
        )
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
