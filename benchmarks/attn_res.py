"""Attention Residuals on one GPU: the kernel beside XLA's program and the bytes that nothing can avoid.

    python -m benchmarks.attn_res [--json FILE]

Mixture and the norm that follows, for the sizes of Kimi K3. One number of each call's query depends on the last
call's result, all inside one program, which leaves out the host. The floor is every row read once and the result written,
at 4.3 TB/s.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attn_res import attn_res
from pallas_kernels.attn_res.specs import SPECS, AttnResSpec
from pallas_kernels.dispatch import Implementation

BYTES = 4.3e12


def draw(spec: AttnResSpec) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(time.time_ns() % 2**31), 5)
    token = (spec.batch, spec.tokens, spec.width)
    bank = jax.jit(lambda key: jax.random.normal(key, (spec.rows, *token), jnp.bfloat16))(keys[0])
    vectors = [jax.random.normal(key, (spec.width,), jnp.bfloat16) for key in keys[2:]]
    return [jax.random.normal(keys[1], token, jnp.bfloat16), bank, vectors[0] / 64, *vectors[1:]]


def floor(spec: AttnResSpec) -> float:
    """Seconds to read every row once and to write the result."""
    return 2 * (spec.rows + 2) * spec.batch * spec.tokens * spec.width / BYTES


def mix(implementation: Implementation, partial: Any, bank: Any, query: Any, norm: Any, after: Any) -> jax.Array:
    options = {"out_norm_weight": after, "implementation": implementation}
    return attn_res(partial, bank, jnp.int32(bank.shape[0]), query, norm, **options)


def chained(count: int, implementation: Implementation) -> Callable[..., jax.Array]:
    def calls(partial: Any, bank: Any, query: Any, *norms: Any) -> jax.Array:
        def one(_: Any, query: Any) -> Any:
            # Through the query: a number of the current sum would cost a copy of it.
            mixed = jax.lax.optimization_barrier(mix(implementation, partial, bank, query, *norms))
            zero = jnp.where(mixed[0, 0, 0] > 1e30, 1, 0)
            return query.at[0].add(zero.astype(query.dtype))

        return jax.lax.fori_loop(0, count, one, query)[0]

    return jax.jit(calls)


def seconds(implementation: Implementation, arrays: list[jax.Array], count: int) -> float:
    call = chained(count, implementation)
    jax.block_until_ready(call(*arrays))
    found = []
    for _ in range(7):
        began = time.perf_counter()
        jax.block_until_ready(call(*arrays))
        found.append((time.perf_counter() - began) / count)
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    lines: list[dict[str, Any]] = []
    for spec in SPECS:
        arrays = draw(spec)
        tokens = spec.batch * spec.tokens
        got, want = (jax.jit(mix, static_argnums=0)(name, *arrays).astype(jnp.float32) for name in ("gpu", "reference"))
        error = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
        assert error < 5e-3, error
        line: dict[str, Any] = {"case": spec.name, "floor_us": 1e6 * floor(spec), "error": error}
        for name in ("gpu", "xla"):
            line[f"{name}_us"] = 1e6 * seconds(name, arrays, 50 if tokens > 100 else 500)
        lines.append(line)
        print(
            f"{spec.name:30} kernel {line['gpu_us']:8.1f} us  xla {line['xla_us']:8.1f}  floor {line['floor_us']:8.1f}  "
            f"error {error:.1e}",
            flush=True,
        )
    if arguments.json:
        device = jax.devices()[0].device_kind
        arguments.json.write_text(
            json.dumps({"jax": jax.__version__, "device": device, "lines": lines}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
