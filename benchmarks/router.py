"""The router on one GPU: product and scores, the choice of experts, and the sort of assignments, beside XLA's programs.

    python -m benchmarks.router [--json FILE]

Each part alone, in a chain of calls inside one program, of which one number depends on the last call's result: that leaves
out most of the host; a kernel that takes less than some 15 us is still hidden behind its launch there, and shows its own time
only in a graph of launches, such as a decoding step. Experts and orders of both implementations are
compared first, and must be the same.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dispatch import Implementation
from pallas_kernels.router import expert_scores, gpu, select_experts, sort_by_expert

COUNT = 100


class Size(NamedTuple):
    """Tokens, experts, how many a token takes, and the width that the router reads."""

    name: str
    tokens: int
    experts: int
    top_k: int
    width: int


SIZES = (
    Size("two_gpus_decode_64", 64, 128, 8, 2048),
    Size("48b_decode_64", 64, 256, 8, 2304),
    Size("k3_decode_64", 64, 896, 16, 7168),
    Size("k3_decode_512", 512, 896, 16, 7168),
    Size("48b_prefill_8192", 8192, 256, 8, 2304),
    Size("k3_prefill_8192", 8192, 896, 16, 7168),
)


def seconds(run: Callable[..., Any], *arrays: jax.Array) -> float:
    """Of one call: the median of five chains."""

    def chain(first: jax.Array, *others: jax.Array) -> jax.Array:
        def one(_: Any, first: jax.Array) -> jax.Array:
            found = jax.tree.leaves(run(first, *others))[-1].reshape(-1)[0]
            # Nothing that the compiler knows to be zero.
            return first.at[0, 0].add(jnp.where(found.astype(jnp.float32) > 1e30, 1, 0).astype(first.dtype))

        return jax.lax.fori_loop(0, COUNT, one, first)[0, 0]

    call = jax.jit(chain)
    jax.block_until_ready(call(*arrays))
    found = []
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready(call(*arrays))
        found.append((time.perf_counter() - began) / COUNT)
    return statistics.median(found)


def measure(size: Size) -> list[dict[str, Any]]:
    """Rows of the table."""
    keys = jax.random.split(jax.random.key(time.time_ns() % 2**31), 4)
    x = jax.random.normal(keys[0], (size.tokens, size.width), jnp.bfloat16)
    weight = jax.random.normal(keys[1], (size.experts, size.width), jnp.bfloat16) / size.width**0.5
    bias = 0.1 * jax.random.normal(keys[2], (size.experts,))
    valid = jax.random.uniform(keys[3], (size.tokens,)) < 0.9
    scores = jax.jit(expert_scores)(x, weight)
    chosen: dict[str, list[np.ndarray]] = {}
    rows: list[dict[str, Any]] = [
        {"part": "product", "xla": seconds(expert_scores, x, weight)},
        {"part": "choice"},
        {"part": "sort"},
    ]
    both: tuple[Implementation, ...] = ("xla", "gpu")
    for implementation in both:
        choice = partial(select_experts, top_k=size.top_k, implementation=implementation)
        experts, _ = jax.jit(choice)(scores, bias)
        rows[1][implementation] = seconds(choice, scores, bias)
        if implementation == "gpu" and gpu.sort_unfit(experts, size.experts) is not None:
            chosen[implementation] = [np.asarray(experts)]
            continue
        sort = partial(sort_by_expert, num_experts=size.experts, implementation=implementation)
        run = jax.jit(lambda experts, valid, sort=sort: sort(experts, valid=valid))
        chosen[implementation] = [np.asarray(array) for array in (experts, *run(experts, valid))]
        rows[2][implementation] = seconds(run, experts, valid)
    for one, other in zip(*chosen.values(), strict=False):  # the kernel sorts not as many as XLA
        np.testing.assert_array_equal(one, other)
    return [{"size": size.name} | row for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for size in SIZES:
        for row in measure(size):
            rows.append(row)
            times = "  ".join(f"{name} {1e6 * row[name]:8.1f} us" for name in ("xla", "gpu") if name in row)
            print(f"{row['size']:20} {row['part']:8} {times}", flush=True)
    if arguments.json:
        device = jax.devices()[0].device_kind
        arguments.json.write_text(json.dumps({"jax": jax.__version__, "device": device, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
