"""Tokens per second of a training step of kimi-tiny, by stage and row length.

    python -m benchmarks.training [--tokens 65536] [--lengths 2048,8192] [--steps 5] [--trace]

Rows hold packed examples of random tokens. `--trace` adds the operations that take most of an accelerator's time.
Prints a table; `--json FILE` writes it too.
"""

import argparse
import gzip
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kimi_jax.config import KimiConfig
from kimi_jax.model import Decoder
from kimi_jax.train import (
    Batch,
    Example,
    OptimizerConfig,
    StepConfig,
    init_params,
    init_state,
    make_optimizer,
    make_train_step,
    pack,
    wsd_schedule,
)

CONFIG = Path(__file__).parents[1] / "recipes" / "kimi_tiny" / "config.json"
STAGES = {
    "dense": (True, StepConfig()),
    "indexer warm-up": (True, StepConfig(indexer="dense", language=False, balance=0.0)),
    "sparse": (False, StepConfig(indexer="sparse")),
}


def random_batch(rng: np.random.Generator, rows: int, length: int, vocab: int) -> Batch:
    """Examples of 50 to 2000 tokens, and in each row's middle one that is as long as half a row."""

    def examples() -> Iterator[Example]:
        while True:
            size = int(rng.integers(50, 2000)) if rng.random() < 0.9 else length // 2
            size = min(size, length)
            yield Example(rng.integers(0, vocab, size), np.ones(size, bool))

    return pack(examples(), rows, length)


def top_operations(folder: str, count: int = 40) -> list[tuple[float, int, str]]:
    """(milliseconds, calls, name) of what ran on the device, from a profiler's trace."""
    time_of: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for path in Path(folder).rglob("*.trace.json.gz"):
        trace = json.loads(gzip.decompress(path.read_bytes()))
        names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e.get("name") == "process_name"}
        for event in trace["traceEvents"]:
            if event.get("ph") == "X" and "GPU" in names.get(event["pid"], "") and "hlo_op" in event.get("args", {}):
                name = event["args"]["hlo_op"]
                time_of[name] += event["dur"]
                calls[name] += 1
    return [(micro / 1e3, calls[name], name) for name, micro in time_of.most_common(count)]


def measure(config: KimiConfig, stage: str, rows: int, length: int, steps: int, trace: bool) -> dict[str, Any]:
    """Times one stage at one shape."""
    dense, step_config = STAGES[stage]
    decoder = Decoder(config, dense_attention=dense)
    optimizer = make_optimizer(decoder, OptimizerConfig(1e-3), wsd_schedule(1000, warmup=10, decay=10))
    state = init_state(init_params(decoder), optimizer)
    train_step = make_train_step(decoder, optimizer, step_config)
    batch = random_batch(np.random.default_rng(0), rows, length, config.vocab_size)
    began = time.perf_counter()
    compiled = train_step.lower(state, batch).compile()  # type: ignore[attr-defined]
    compile_seconds = time.perf_counter() - began
    seconds = []
    for _ in range(steps + 1):
        began = time.perf_counter()
        state, metrics = compiled(state, batch)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds[1:])
    memory = compiled.memory_analysis()
    result = {
        "stage": stage,
        "rows": rows,
        "length": length,
        "compile_s": round(compile_seconds, 1),
        "step_ms": round(median * 1e3, 1),
        "tokens_per_s": round(rows * length / median),
        "temporaries_GiB": round(memory.temp_size_in_bytes / 2**30, 2),
        "loss": round(float(metrics["loss"]), 4),
    }
    print("  ".join(f"{name} {value}" for name, value in result.items()), flush=True)
    if trace:
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                state, metrics = compiled(state, batch)
                jax.block_until_ready(state)
            result["operations"] = top_operations(folder)
        text = compiled.as_text()
        for milliseconds, calls, name in result["operations"]:
            source = next((line for line in text.splitlines() if f"%{name} " in line or f" {name} = " in line), "")
            where = source.split("op_name=")[-1].split('"')[1][-110:] if "op_name=" in source else ""
            print(f"  {milliseconds:8.2f} ms {calls:6d} x {name:40s} {where}")
    return result


def main() -> None:
    """Measures what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536, help="tokens a step")
    parser.add_argument("--lengths", default="2048,8192", help="row lengths")
    parser.add_argument("--stages", default=",".join(STAGES), help="stages")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--trace", action="store_true", help="print what takes the device's time")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    config = KimiConfig.from_dict(json.loads(CONFIG.read_text()))
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {arguments.tokens} tokens a step")
    results = []
    for stage in arguments.stages.split(","):
        for length in map(int, arguments.lengths.split(",")):
            rows = max(1, arguments.tokens // length)
            results.append(measure(config, stage, rows, length, arguments.steps, arguments.trace))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
