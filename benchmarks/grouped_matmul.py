"""Products over experts on one GPU: the Hopper kernel beside the bytes and operations that nothing can avoid.

    python -m benchmarks.grouped_matmul [--seconds 90] [--json FILE] [--only NAME ...]

Each case draws fresh rows, weights and a routing, checks the kernel's result, then times calls chained inside one
program (each call's group sizes depend on the last call's result), which leaves out the host. The floor is the
larger of operations over 790 TFLOP/s and bytes over 4.3 TB/s, counting only experts that have rows.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_matmul import gpu
from pallas_kernels.grouped_matmul.gpu_tiles import Tuning
from pallas_kernels.grouped_matmul.specs import SPECS, GroupedMatmulSpec
from pallas_kernels.mxfp4 import Mxfp4

FLOPS, BYTES = 790e12, 4.3e12


WIDE = (8, 32, 64, 96, 128, 160, 192, 256)
NARROW = (8, 16, 32)
SHARED = Tuning((16, *WIDE[1:]), 3, cluster=2)  # two blocks of threads read a tile's rows once
OTHERS = {
    "48b_prefill_8192_up": (SHARED, Tuning(WIDE[:5], 5)),
    "48b_decode_32_up": (Tuning(NARROW, 8),),
    "k3_decode_64_up_of_8_devices": (Tuning(NARROW[:2], 10, 128),),
    "k3_prefill_8192_up_of_8_devices_bfloat16": (SHARED,),
    "k3_prefill_8192_up_of_8_devices": (),
    "k3_decode_64_up_of_8_devices_bfloat16": (Tuning(NARROW, 8),),
}
"""Cases, and ways to cut them beside the one that `gpu.tuned` picks."""

SHOWN = ("ms", "floor_ms", "error", "worst_row", "same_bits", "repeat_bits", "compile_s", "first_run_s", "failed")


def draw(case: GroupedMatmulSpec) -> tuple[Any, Any, Any, np.ndarray]:
    """Rows, weights and sizes on the device, and the sizes here."""
    keys = jax.random.split(jax.random.key(time.time_ns() % 2**31), 3)
    seed = int(time.time_ns() % 2**31)
    sizes = np.random.default_rng(seed).multinomial(case.rows, np.full(case.groups, 1 / case.groups))
    rows = jax.random.normal(keys[0], (case.rows, case.width), jnp.bfloat16)
    shape = (case.groups, case.out_width, case.width)
    if case.weights == "mxfp4":
        bits = jax.jit(partial(jax.random.bits, shape=(*shape[:2], case.width // 2), dtype=jnp.uint8))(keys[1])
        scale = jax.jit(partial(jax.random.bits, shape=(*shape[:2], case.width // 32), dtype=jnp.uint8))(keys[2])
        weights: Any = Mxfp4(bits, scale % 12 + 112)
    else:
        weights = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))(keys[1])
    return rows, weights, jnp.asarray(sizes, jnp.int32), sizes


def floor(case: GroupedMatmulSpec, sizes: np.ndarray) -> float:
    """Seconds that no kernel can beat."""
    bits = 4.25 if case.weights == "mxfp4" else 16
    moved = np.count_nonzero(sizes) * case.width * case.out_width * bits / 8
    moved += 2 * case.rows * (case.width + case.out_width)
    return max(moved / BYTES, 2 * case.rows * case.width * case.out_width / FLOPS)


def run(tuning: Tuning, rows: Any, weights: Any, sizes: Any) -> Any:
    return gpu.product(rows, weights, sizes, jnp.int32(0), rows.dtype, tuning)


def chained(count: int, product: Callable[..., Any]) -> Any:
    """`count` calls, each of which needs the one before."""

    def calls(rows: Any, weights: Any, sizes: Any) -> Any:
        def one(_: Any, carry: Any) -> Any:
            # Not through the rows: a loop that changes one of them copies all.
            result = jax.lax.optimization_barrier(product(rows, weights, carry))
            return carry + jnp.where(result[0, 0] > 1e30, 1, 0)

        return jax.lax.fori_loop(0, count, one, sizes)[0]

    return jax.jit(calls)


@jax.jit
def error(got: Any, rows: Any, weights: Any, group: Any, chosen: Any) -> Any:
    """||got - exact|| / ||exact|| over chosen rows, one expert at a time in float32."""

    def one(row: Any) -> Any:
        weight = jax.tree.map(lambda leaf: leaf[group[row]], weights)
        weight = weight.dequantize(jnp.float32) if isinstance(weight, Mxfp4) else weight.astype(jnp.float32)
        want = jnp.matmul(weight, rows[row].astype(jnp.float32), precision="highest")
        return jnp.sum((got[row].astype(jnp.float32) - want) ** 2), jnp.sum(want**2)

    wrong, right = jax.lax.map(one, chosen)
    return jnp.sqrt(jnp.sum(wrong) / jnp.sum(right)), jnp.max(wrong / right)


def seconds(call: Callable[..., Any], arguments: tuple[Any, ...], count: int) -> float:
    """Median of a call in five chains."""
    jax.block_until_ready(call(*arguments))
    found = []
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready(call(*arguments))
        found.append((time.perf_counter() - began) / count)
    return statistics.median(found)


def measure(case: GroupedMatmulSpec, limit: float, began: float) -> list[dict[str, Any]]:
    """A line for each tuning."""
    rows, weights, sizes, host = draw(case)
    group = np.repeat(np.arange(case.groups), host)
    ends = np.cumsum(host)
    borders = (ends[host > 0] - 1, (ends - host)[host > 0])
    chosen = np.unique(np.concatenate([*borders, np.arange(0, case.rows, 61)]))
    chosen = np.random.default_rng(0).permutation(chosen)[:384]
    count = 20
    lower_bound = floor(case, host)
    arguments = (rows, weights, sizes)
    tunings = (
        gpu.tuned(case.rows, case.groups, case.width, case.out_width, case.weights == "mxfp4"),
        *OTHERS[case.name],
    )
    results = []

    def build(tuning: Tuning) -> Any:
        start = time.perf_counter()
        single = jax.jit(partial(run, tuning)).lower(*arguments).compile()
        many = chained(count, partial(run, tuning)).lower(*arguments).compile()
        return single, many, time.perf_counter() - start

    def guarded(tuning: Tuning) -> Any:
        try:
            return build(tuning)
        except Exception as failure:
            return failure

    with ThreadPoolExecutor(4) as pool:
        built = list(pool.map(guarded, tunings))
    full = None
    for tuning, found in zip(tunings, built, strict=True):
        line: dict[str, Any] = {"case": case.name, "tuning": asdict(tuning), "floor_ms": 1e3 * lower_bound}
        results.append(line)
        try:
            if isinstance(found, Exception):
                raise found
            if time.perf_counter() - began > limit:
                raise TimeoutError("no time left")
            single, many, line["compile_s"] = found
            start = time.perf_counter()
            got = jax.block_until_ready(single(*arguments))
            line["first_run_s"] = time.perf_counter() - start
            mean, worst = error(got, rows, weights, jnp.asarray(group), jnp.asarray(chosen))
            line["error"], line["worst_row"] = float(mean), float(worst) ** 0.5
            if full is None:
                full = got
            else:
                line["same_bits"] = bool(jnp.all(full == got))
            line["repeat_bits"] = bool(jnp.all(single(*arguments) == got))
            line["ms"] = 1e3 * seconds(many, arguments, count)
        except Exception as failure:
            line["failed"] = f"{type(failure).__name__}: {failure}"[:1500]
        shown = {name: line[name] for name in SHOWN if name in line}
        print(case.name, tuning, json.dumps(shown), f"{time.perf_counter() - began:.0f}s", flush=True)
    return results


def check_unpacking() -> None:
    """Every byte of codes with every scale that is exact, bit for bit, and what NaN scales do."""
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scale = np.tile(np.arange(256, dtype=np.uint8)[:, None], (1, 16))
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(256, 512)
    exact = np.where(nibbles & 8, -1.0, 1.0) * magnitudes[nibbles & 7] * 2.0 ** (np.arange(256.0)[:, None] - 127)
    weights = Mxfp4(jnp.asarray(codes)[None], jnp.asarray(scale)[None])
    rows = jnp.eye(512, dtype=jnp.bfloat16)
    for count in (512, 8, 16, 32, 64, 128):  # tiles of several widths
        tuning = gpu.tuned(count, 1, 512, 256, packed=True)
        got = run(tuning, rows[:count], weights, jnp.full(1, count, jnp.int32))
        got = np.asarray(got.astype(jnp.float32), np.float64).T
        assert np.array_equal(got[2:253], exact[2:253, :count])
        assert np.all(got[:2] == 0)
        assert np.all(np.isnan(got[255]))
    print("MXFP4: all 256 code bytes with scale bytes 2 to 252 are unpacked bit for bit")


def main() -> None:
    """Prints a line for each case and tuning."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*")
    options = parser.parse_args()
    began = time.perf_counter()
    lines: list[dict[str, Any]] = []
    check_unpacking()
    for case in sorted((spec for spec in SPECS if spec.name in OTHERS), key=lambda spec: list(OTHERS).index(spec.name)):
        if options.only and case.name not in options.only:
            continue
        if time.perf_counter() - began < options.seconds:
            lines += measure(case, options.seconds, began)
            if options.json:
                options.json.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
