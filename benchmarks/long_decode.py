"""Time per token of kimi-tiny's decoding as its context grows: a constant and the indexer's linear term.

    python -m benchmarks.long_decode [--longest 32768] [--json FILE] [--plot FILE]

Attention stops growing at the indexer's top-k and KDA doesn't grow, but the exact indexer scores every earlier token. One
row is decoded at several lengths of the context; the medians are fitted by constant + slope · length. A CPU's times are
printed relative to the constant.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax import Kimi
from kimi_jax.cache import Cache
from kimi_jax.model import Decoder

CHUNK = 2048


def measure(longest: int, steps: int, lengths: list[int]) -> list[dict[str, Any]]:
    """Median seconds of a decoding step at each length."""
    model = Kimi.from_pretrained("kimi-tiny", dtype="float32", progress=False)
    decoder = Decoder(model.config)
    prefill = jax.jit(decoder.prefill, donate_argnums=2)
    decode = jax.jit(decoder.decode, donate_argnums=2)
    tokens = np.asarray(model.tokenizer.encode("It was the best of times, it was the worst of times. " * 4000))
    cache = Cache.allocate(model.config, 1, longest + CHUNK, jnp.dtype("float32"))
    found, filled = [], 0
    for length in lengths:
        while filled + CHUNK <= length:
            piece = jnp.asarray(tokens[filled % 20000 : filled % 20000 + CHUNK][None], jnp.int32)
            _, cache = prefill(model.params, piece, cache)
            filled += CHUNK
        seconds = []
        for _ in range(steps + 3):
            began = time.perf_counter()
            logits, cache = decode(model.params, jnp.asarray(tokens[:1], jnp.int32), cache)
            jax.block_until_ready(logits)
            seconds.append(time.perf_counter() - began)
            filled += 1
        found.append({"length": filled - steps // 2, "seconds": statistics.median(seconds[3:])})
        print(f"  {found[-1]['length']:6d} tokens", flush=True)
    return found


def fit(rows: list[dict[str, Any]]) -> tuple[float, float, float]:
    """(constant, slope, R²) of seconds over length."""
    x = np.array([row["length"] for row in rows], float)
    y = np.array([row["seconds"] for row in rows])
    slope, constant = np.polyfit(x, y, 1)
    residual = y - constant - slope * x
    return float(constant), float(slope), float(1 - residual.var() / y.var())


def main() -> None:
    """Measures, fits, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longest", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    lengths = [n for n in (2048, 4096, 8192, 12288, 16384, 20480, 24576, 28672, 32768) if n <= arguments.longest]
    rows = measure(arguments.longest, arguments.steps, lengths)
    constant, slope, quality = fit(rows)
    for row in rows:
        row["relative"] = round(row["seconds"] / constant, 3)
    print("context  time per token, in units of the constant")
    for row in rows:
        print(f"{row['length']:7d}  {row['relative']:.3f}")
    print(f"time = constant · (1 + {1e3 * slope / constant:.4f} per 1000 tokens); R² = {quality:.4f}")
    result = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "rows": rows, "r_squared": quality}
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.plot:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 3), layout="constrained")
        panel = figure.subplots()
        ends = np.array([0, lengths[-1]])
        panel.plot([row["length"] for row in rows], [row["relative"] for row in rows], "o", label="measured")
        panel.plot(ends, 1 + slope / constant * ends, label="constant + slope · length")
        panel.set(xlabel="tokens of context", ylabel="time per token / constant", ylim=(0, None))
        panel.legend()
        figure.savefig(arguments.plot)


if __name__ == "__main__":
    main()
