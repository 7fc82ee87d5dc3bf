"""KDA over whole sequences on one GPU: the Hopper kernels beside the bytes that nothing can avoid, and beside FLA.

    python -m benchmarks.kda [--json FILE] [--only NAME ...] [--seconds 300]

Inputs are what a layer's projections give: q, k, v, the raw decay and the logits of beta in bfloat16, with gate, norms and
sigmoid inside; the state is float32 in and out. Each case is checked against the token recurrence, then timed as calls
chained inside one program by the state, which leaves out the host. The floor is all inputs and outputs once at 4.3 TB/s.
Cases that end in _gradient are calls and their gradients for every input, on given cotangents; the floor there adds the
gradient's inputs and outputs, and the errors are those of 1024 such tokens: o, and the worst gradient's.
FLA's chunk_kda (safe gate, everything in its kernels) is timed with events in the same process if torch and fla-core are
installed; its first call of a case tunes itself.
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kda import gate, kda_from_raw, l2_normalize
from pallas_kernels.kda.specs import MIXED

BYTES = 4.3e12
WIDTH = 128


@dataclass(frozen=True)
class Case:
    """B = 1.

    Attributes:
        name: unique.
        tokens: T.
        heads: H.
        bound: of the gate.
        segments: tokens of the packed sequences, if any.
        gradient: with the gradients.
    """

    name: str
    tokens: int
    heads: int
    bound: float | None = -5.0
    segments: tuple[int, ...] = ()
    gradient: bool = False

    def floor(self) -> float:
        """Seconds for the bytes of q, k, v, g, beta, o and the states, and of their gradients and what these need again."""
        numbers = 5 * WIDTH + 1 + (9 * WIDTH + 2 if self.gradient else 0)
        states = (5 if self.gradient else 2) * max(1, len(self.segments)) * self.heads
        return (self.tokens * self.heads * numbers * 2 + states * WIDTH * WIDTH * 4) / BYTES


CASES = (
    Case("k3_8k", 8192, 96),
    Case("k3_8k_tp8", 8192, 12),
    Case("128k_32_heads", 131072, 32),
    Case("k3_packed_mixed", 8192, 96, segments=MIXED),
    Case("kimi_linear_8k", 8192, 32, None),
    Case("k3_2k", 2048, 96),
    Case("k3_128k_tp8", 131072, 12),
    Case("32_heads_gradient", 8192, 32, gradient=True),
    Case("packed_gradient", 8192, 32, segments=MIXED, gradient=True),
    Case("k3_gradient", 8192, 96, gradient=True),
)


def draw(case: Case) -> tuple[Any, ...]:
    """(q, k, v, raw, beta logits, A_log, dt_bias, state, segment ids or None)."""
    keys = jax.random.split(jax.random.key(0), 8)
    token = (1, case.tokens, case.heads)
    wide = [jax.random.normal(key, (*token, WIDTH), jnp.bfloat16) for key in keys[:4]]
    logits = jax.random.normal(keys[4], token, jnp.bfloat16)
    a_log, bias = jax.random.uniform(keys[5], token[2:]), jax.random.uniform(keys[6], (case.heads, WIDTH))
    states = (1, *((len(case.segments),) if case.segments else ()), case.heads, WIDTH, WIDTH)
    state = 0.1 * jax.random.normal(keys[7], states)
    ids = jnp.asarray(np.repeat(np.arange(len(case.segments)), case.segments), jnp.int32)[None]
    return *wide, logits, a_log, bias, state, ids if case.segments else None


def run(case: Case, *arrays: Any) -> tuple[jax.Array, jax.Array]:
    """(o, the state after it)."""
    *inputs, state, ids = arrays
    result = kda_from_raw(
        *inputs,
        initial_state=state,
        segment_ids=ids,
        num_segments=len(case.segments) or None,
        gate_lower_bound=case.bound,
    )
    return result.o, result.final_state


def recurrence(case: Case, *arrays: Any) -> tuple[jax.Array, jax.Array]:
    """The same, token by token in float32."""
    q, k, v, raw, logits, a_log, bias, first, ids = arrays
    packed = ids is not None
    sequence = ids[0] if packed else jnp.zeros(case.tokens, jnp.int32)
    begins = jnp.diff(sequence, prepend=-1) != 0
    first = first if packed else first[:, None]
    g, beta = gate(raw, a_log, bias, case.bound), jax.nn.sigmoid(logits.astype(jnp.float32))
    tokens = (l2_normalize(q), l2_normalize(k), v.astype(jnp.float32), g, beta)

    @jax.checkpoint  # a gradient keeps the states, and nothing else
    def step(carry: tuple[jax.Array, jax.Array], xs: Any) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        (state, last), (q, k, v, g, beta, mine, begin) = carry, xs
        state = jnp.where(begin, first[:, mine], state) * jnp.exp(g)[..., None]
        wrong = beta[..., None] * (v - jnp.sum(state * k[..., None], axis=2))
        state = state + k[..., None] * wrong[:, :, None]
        return (state, last.at[:, mine].set(state)), WIDTH**-0.5 * jnp.sum(state * q[..., None], axis=2)

    xs = (*(jnp.moveaxis(x, 1, 0) for x in tokens), sequence, begins)
    (_, last), o = jax.lax.scan(step, (first[:, 0], first), xs)
    return jnp.moveaxis(o, 0, 1), last if packed else last[:, 0]


def error(actual: jax.Array, wanted: jax.Array) -> jax.Array:
    """Root mean square of the error, relative to that of what is wanted."""
    actual, wanted = actual.astype(jnp.float32), wanted.astype(jnp.float32)
    return jnp.sqrt(jnp.sum((actual - wanted) ** 2) / jnp.sum(wanted**2))


def errors(case: Case, *arrays: Any) -> tuple[jax.Array, jax.Array]:
    """Of (o, state)."""
    (o, state), (wanted, last) = run(case, *arrays), recurrence(case, *arrays)
    return error(o, wanted), error(state, last)


def with_gradients(call: Any, *arrays: Any) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    """(o, state) and the gradients of all inputs, where v and the first state stand for the cotangents."""
    *inputs, ids = arrays
    result, pull = jax.vjp(lambda *inputs: call(*inputs, ids), *inputs)
    return result, pull((inputs[2].astype(result[0].dtype), inputs[7].astype(result[1].dtype)))


def gradient_errors(case: Case) -> tuple[jax.Array, jax.Array]:
    """Of o and of the worst gradient, over 1024 tokens."""
    short = replace(case, tokens=1024, segments=())

    def errors(*arrays: Any) -> tuple[jax.Array, jax.Array]:
        exact = [x if x is None else x.astype(jnp.float32) for x in arrays]
        (o, _), found = with_gradients(partial(run, short), *arrays)
        (wanted, _), gradients = with_gradients(partial(recurrence, short), *exact)
        return error(o, wanted), jnp.max(jnp.stack([error(*pair) for pair in zip(found, gradients, strict=True)]))

    return jax.jit(errors)(*draw(short))


def chained(case: Case, count: int, *arrays: Any) -> jax.Array:
    """`count` calls, each of which needs the last one's state and output."""
    *inputs, logits, a_log, bias, state, ids = arrays

    def one(_: Any, state: jax.Array) -> jax.Array:
        nothing = (0 * state.reshape(-1)[0]).astype(logits.dtype)
        call = (*inputs, logits + nothing, a_log, bias, state, ids)
        if case.gradient:
            # Without the barrier XLA would work out one number of each gradient.
            (o, after), found = jax.lax.optimization_barrier(with_gradients(partial(run, case), *call))
            after += sum(0 * x.reshape(-1)[0].astype(after.dtype) for x in found)
        else:
            o, after = run(case, *call)
        return after + 0 * o.reshape(-1)[0].astype(after.dtype)

    return jax.lax.fori_loop(0, count, one, state)


def seconds(case: Case, arrays: tuple[Any, ...]) -> float:
    """Median of a call in seven chains."""
    count = max(2, min(20, round(0.02 / case.floor() / 8)))
    call = jax.jit(partial(chained, case, count))
    jax.block_until_ready(call(*arrays))
    found = []
    for _ in range(7):
        began = time.perf_counter()
        jax.block_until_ready(call(*arrays))
        found.append((time.perf_counter() - began) / count)
    return statistics.median(found)


def fla_seconds(case: Case) -> float | None:
    """Median of FLA's chunk_kda, None where it isn't installed."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
        from fla.ops.kda import chunk_kda  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    torch.manual_seed(0)
    sequences = max(1, len(case.segments))
    shape = (1, case.tokens, case.heads, WIDTH)
    q, k, v, g = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    logits = torch.randn(*shape[:3], device="cuda", dtype=torch.bfloat16)
    ends = torch.tensor(np.cumsum([0, *case.segments]), device="cuda", dtype=torch.int32) if case.segments else None

    def call() -> Any:
        return chunk_kda(
            q,
            k,
            v,
            g,
            logits,
            A_log=a_log,
            dt_bias=bias,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            safe_gate=case.bound is not None,
            lower_bound=case.bound,
            cu_seqlens=ends,
        )

    a_log = torch.rand(case.heads, device="cuda")
    bias = torch.rand(case.heads * WIDTH, device="cuda")
    state = 0.1 * torch.randn(sequences, case.heads, WIDTH, WIDTH, device="cuda")
    cotangents = torch.randn_like(v), torch.randn_like(state)
    if case.gradient:
        for x in (q, k, v, g, logits, a_log, bias, state):
            x.requires_grad_()
    found = []
    with torch.enable_grad() if case.gradient else torch.inference_mode():
        for index in range(25):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            result = call()
            if case.gradient:
                torch.autograd.backward(result, cotangents)
            end.record()
            torch.cuda.synchronize()
            if index >= 5:
                found.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(found)


def main() -> None:
    """Prints a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--seconds", type=float, default=300, help="no case begins later than this")
    options = parser.parse_args()
    began = time.perf_counter()
    lines = []
    print(f"{'case':16} {'ms':>8} {'floor':>7} {'ratio':>6} {'FLA ms':>8} {'error o':>8} {'state':>8}")
    for case in CASES:
        if (options.only and case.name not in options.only) or time.perf_counter() - began > options.seconds:
            continue
        arrays = draw(case)
        line: dict[str, Any] = {"case": case.name, "floor_ms": 1e3 * case.floor()}
        line["ms"] = 1e3 * seconds(case, arrays)
        line["ratio"] = line["ms"] / line["floor_ms"]
        if case.gradient:
            line["error_o"], line["error_gradient"] = (float(x) for x in gradient_errors(case))
        elif case.tokens <= 8192:  # the recurrence takes long
            line["error_o"], line["error_state"] = (float(x) for x in jax.jit(partial(errors, case))(*arrays))
        del arrays
        found = fla_seconds(case)
        line["fla_ms"] = None if found is None else 1e3 * found
        lines.append(line)
        fla = "-" if found is None else f"{1e3 * found:.3f}"
        names = ("error_o", "error_gradient" if case.gradient else "error_state")
        accuracy = " ".join(f"{line[name]:8.5f}" if name in line else f"{'-':>8}" for name in names)
        print(
            f"{case.name:16} {line['ms']:8.3f} {line['floor_ms']:7.3f} {line['ratio']:6.2f} {fla:>8} {accuracy}",
            flush=True,
        )
        if options.json:
            options.json.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
