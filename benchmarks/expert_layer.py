"""A layer of routed experts on one GPU: sort, gather, both products, activation and weighted sum; router beside it.

    python -m benchmarks.expert_layer [--only NAME ...] [--trace] [--json FILE]

Each case draws fresh tokens, weights and a routing, and checks the result against float32 sums on chosen tokens. Times
are medians of five chains of calls inside one program, tied to each other through one number. With --trace, the time of
every kernel of a call beside it. The floor is the larger of the products' operations over 790 TFLOP/s and bytes over
4.3 TB/s, counting only experts that have rows.
"""

import argparse
import glob
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax.modules.experts import ExpertStack, Routing, run_experts
from kimi_jax.modules.mlp import GatedActivation
from pallas_kernels.mxfp4 import Mxfp4

FLOPS, BYTES = 790e12, 4.3e12


@dataclass(frozen=True)
class Case:
    """A layer: tokens, experts and experts a token, width, expert width, how weights are stored, activation."""

    name: str
    tokens: int
    experts: int
    per_token: int
    width: int
    inner: int
    weights: Literal["bfloat16", "mxfp4"]
    activation: GatedActivation


SWIGLU = GatedActivation()
SITU = GatedActivation(4.0, 25.0)
CASES = (
    Case("48b_prefill_8192", 8192, 256, 8, 2304, 1024, "bfloat16", SWIGLU),
    Case("48b_decode_32", 32, 256, 8, 2304, 1024, "bfloat16", SWIGLU),
    # One of eight devices has 112 of K3's experts and an eighth of the rows.
    Case("k3_prefill_8192_of_8_devices", 8192, 112, 2, 3584, 3072, "mxfp4", SITU),
    Case("k3_prefill_8192_of_8_devices_bfloat16", 8192, 112, 2, 3584, 3072, "bfloat16", SITU),
    Case("k3_decode_64_of_8_devices", 64, 112, 2, 3584, 3072, "mxfp4", SITU),
    Case("k3_decode_64_of_8_devices_bfloat16", 64, 112, 2, 3584, 3072, "bfloat16", SITU),
)


def draw(case: Case) -> tuple[Any, Routing, Any, Any]:
    """Tokens, a routing and both stacks of weights, all new."""
    keys = jax.random.split(jax.random.key(time.time_ns() % 2**31), 7)
    x = jax.random.normal(keys[0], (case.tokens, case.width), jnp.bfloat16)

    def scores(key: Any) -> Any:
        found = jax.random.uniform(key, (case.tokens, case.experts))
        weights, experts = jax.lax.top_k(found, case.per_token)
        return Routing(experts, weights / weights.sum(-1, keepdims=True) * 2.446, found)

    def stack(out: int, width: int, bits: Any, scale: Any) -> Any:
        shape = (case.experts, out, width)
        if case.weights == "bfloat16":
            return jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16) * width**-0.5)(bits)
        packed = jax.jit(partial(jax.random.bits, shape=(*shape[:2], width // 2), dtype=jnp.uint8))(bits)
        scales = jax.jit(partial(jax.random.bits, shape=(*shape[:2], width // 32), dtype=jnp.uint8))(scale)
        return Mxfp4(packed, scales % 3 + 118)

    return (
        x,
        jax.jit(scores)(keys[1]),
        stack(2 * case.inner, case.width, keys[2], keys[3]),
        stack(case.width, case.inner, keys[4], keys[5]),
    )


def floor(case: Case, hit: int) -> float:
    """Seconds that no program can beat: rows gathered, hidden rows and outputs are not counted as bytes."""
    bits = 4.25 if case.weights == "mxfp4" else 16
    moved = hit * 3 * case.width * case.inner * bits / 8 + 4 * case.tokens * case.width
    return max(moved / BYTES, 6 * case.tokens * case.per_token * case.width * case.inner / FLOPS)


def layer(case: Case, implementation: Any, x: Any, routing: Routing, gate_up: Any, down: Any) -> Any:
    valid = jnp.ones(case.tokens, bool)
    stack = ExpertStack(gate_up, down, 0)
    return run_experts(x, routing, valid, stack, case.experts, case.activation, implementation)


def chained(count: int, call: Callable[..., Any]) -> Any:
    """`count` calls, each of which needs one number of the one before."""

    def calls(x: Any, routing: Routing, *weights: Any) -> Any:
        def one(_: Any, carry: Any) -> Any:
            # The barrier keeps XLA from summing up only the number that is looked at.
            result = jax.lax.optimization_barrier(call(x, routing._replace(experts=carry), *weights))
            zero = jnp.where(result[0, 0] > 1e30, 1, 0)
            return carry.at[0, 0].add(zero)

        return jax.lax.fori_loop(0, count, one, routing.experts)[0, 0]

    return jax.jit(calls)


def exact_sums(case: Case, x: Any, routing: Routing, gate_up: Any, down: Any) -> tuple[Any, np.ndarray]:
    """Some tokens, and their sums in float32."""

    def one(stack: Any, expert: Any) -> Any:
        weight = jax.tree.map(lambda leaf: leaf[expert], stack)
        return weight.dequantize(jnp.float32) if isinstance(weight, Mxfp4) else weight.astype(jnp.float32)

    @jax.jit
    def want(x: Any, routing: Routing, gate_up: Any, down: Any, tokens: Any) -> Any:
        def token(at: Any) -> Any:
            def choice(index: Any) -> Any:
                expert = routing.experts[at, index]
                both = jnp.matmul(one(gate_up, expert), x[at].astype(jnp.float32), precision="highest")
                inner = case.activation(both[: case.inner], both[case.inner :])
                return routing.weights[at, index] * jnp.matmul(one(down, expert), inner, precision="highest")

            return jax.lax.map(choice, jnp.arange(case.per_token)).sum(0)

        return jax.lax.map(token, tokens)

    tokens = jnp.unique(jnp.linspace(0, case.tokens - 1, 24).astype(jnp.int32))
    return tokens, np.asarray(want(x, routing, gate_up, down, tokens), np.float64)


def error(got: Any, tokens: Any, exact: np.ndarray) -> float:
    """||got - exact|| / ||exact|| over chosen tokens."""
    return float(np.linalg.norm(np.asarray(got[tokens], np.float64) - exact) / np.linalg.norm(exact))


def seconds(call: Callable[..., Any], arguments: tuple[Any, ...], count: int) -> float:
    """Median of a call in five chains."""
    jax.block_until_ready(call(*arguments))
    found = []
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready(call(*arguments))
        found.append((time.perf_counter() - began) / count)
    return statistics.median(found)


def kernels(call: Callable[..., Any], arguments: tuple[Any, ...], times: int = 5) -> dict[str, float]:
    """Microseconds of each kernel in a call, by the profiler."""
    jax.block_until_ready(call(*arguments))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(times):
                jax.block_until_ready(call(*arguments))
        [path] = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        total: dict[str, float] = defaultdict(float)
        for plane in jax.profiler.ProfileData.from_file(path).planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    for event in line.events:
                        total[event.name] += event.duration_ns / 1e3 / times
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def measure(case: Case, implementation: Any, trace: bool) -> dict[str, Any]:
    """One case's line."""
    arguments = draw(case)
    hit = len(np.unique(np.asarray(arguments[1].experts)))
    line: dict[str, Any] = asdict(case) | {"floor_ms": 1e3 * floor(case, hit)}
    call = partial(layer, case, implementation)
    began = time.perf_counter()
    single = jax.jit(call).lower(*arguments).compile()
    count = 20
    many = chained(count, call).lower(*arguments).compile()
    line["compile_s"] = time.perf_counter() - began
    if (memory := single.memory_analysis()) is not None:
        line["temporary_MB"] = memory.temp_size_in_bytes / 1e6
    got = single(*arguments)
    line["error"] = error(got, *exact_sums(case, *arguments))
    line["repeat_bits"] = bool(jnp.all(single(*arguments) == got))
    line["ms"] = 1e3 * seconds(many, arguments, count)
    if trace:
        line["kernels_us"] = kernels(single, arguments)
    return line


def main() -> None:
    """Prints a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--implementation")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    lines = []
    for case in CASES:
        if options.only and case.name not in options.only:
            continue
        line = measure(case, options.implementation, options.trace)
        lines.append(line)
        print(
            f"{case.name}: {line['ms']:.3f} ms, floor {line['floor_ms']:.3f} ({line['ms'] / line['floor_ms']:.2f}x), "
            f"error {line['error']:.2e}, repeats bit for bit: {line['repeat_bits']}, temporaries "
            f"{line.get('temporary_MB', float('nan')):.0f} MB, compiled in {line['compile_s']:.0f} s",
            flush=True,
        )
        for name, time_us in list(line.get("kernels_us", {}).items())[:14]:
            print(f"    {time_us:8.1f} us  {name[:70]}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
