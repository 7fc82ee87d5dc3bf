"""Training with sparse attention on one GPU: forward and backward of attention over selected keys, and of the indexer's loss.

    python -m benchmarks.dsa_gradient [--seconds 90] [--json FILE] [--only NAME ...] [--implementation gpu xla]

A case draws fresh arguments, checks results against float64 on the host (gradients of the last queries and of the latents
that only they name; of the last query's loss, index queries and weights), then times calls that are queued one behind the
other, which leaves out the host. Printed is the median of `--repeats`; the temporaries are the compiled program's, by its
memory analysis. The floor is operations at 790 TFLOP/s. Of sparse attention they are 2 * queries * heads * top_k times 1088
forward and 2 * 1088 + 576 backward (scores and dP again, dK and dV, dQ); of the loss, the scores of attention, and of the
indexer three products, over all keys where it is dense and over the selected ones where it is sparse (the selection itself
has to see all).
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.sparse_mla import indexer_kl, sparse_mla

FLOPS = 790e12
WIDTH, VALUE, SCALE = 576, 512, 192**-0.5
NOPE, SLOT, INDEX_HEADS, INDEX_WIDTH = 128, 64, 32, 128
CHECKED = 4


@dataclass(frozen=True)
class Case:
    """Sparse attention over given keys, or (`loss`) the indexer's loss over all keys or over the selected ones."""

    name: str
    heads: int
    queries: int = 4096
    keys: int = 32768
    top_k: int | None = 2048
    loss: bool = False
    ascending: bool = True


def _attention(heads: int, ascending: bool = True) -> Case:
    return Case(f"sparse-attention-4096x32768-h{heads}{'' if ascending else '-unordered'}", heads, ascending=ascending)


def _loss(heads: int, dense: bool = False) -> Case:
    name = f"loss-{'dense' if dense else 'sparse'}-4096x32768-h{heads}"
    return Case(name, heads, top_k=None if dense else Case.top_k, loss=True)


CASES = (
    *map(_attention, (96, 64, 32)),
    _attention(96, ascending=False),
    *map(_loss, (96, 32)),
    _loss(96, dense=True),
    *map(_attention, (48, 16)),
    _attention(32, ascending=False),
    _loss(32, dense=True),
)


def operations(case: Case) -> float:
    """Of forward and backward together."""
    pairs = case.queries * (case.keys if case.top_k is None else case.top_k)
    if case.loss:
        return 2.0 * pairs * (case.heads * WIDTH + 3 * INDEX_HEADS * INDEX_WIDTH)
    return 2.0 * pairs * case.heads * (3 * 1088 + 576)


def draw_attention(case: Case, key: Any) -> tuple[Any, ...]:
    """Queries, latents, indices (ascending, as the indexer gives them), and gradients of values and log-sum-exps."""
    keys = jax.random.split(key, 5)
    assert case.top_k is not None
    q = jax.random.normal(keys[0], (1, case.queries, case.heads, WIDTH), jnp.bfloat16)
    latent = jax.random.normal(keys[1], (1, case.keys, WIDTH), jnp.bfloat16)
    indices = jax.random.randint(keys[2], (1, case.queries, case.top_k), CHECKED, case.keys)
    indices = jnp.sort(indices, axis=-1) if case.ascending else indices
    # The first keys are named by the checked queries only, each by one of them.
    indices = indices.at[0, -CHECKED:, 0].set(jnp.arange(CHECKED))
    indices = indices.at[0, -1, -case.top_k // 16 :].set(-1)
    do = jax.random.normal(keys[3], (1, case.queries, case.heads, VALUE), jnp.bfloat16)
    dlse = jax.random.normal(keys[4], (1, case.queries, case.heads), jnp.float32)
    return q, latent, indices, do, dlse


def attention(implementation: Any) -> Callable[..., Any]:
    """Forward and backward: (o, lse), (dq, dlatent)."""

    def run(q: Any, latent: Any, indices: Any, do: Any, dlse: Any) -> Any:
        options: Any = {"latent_width": VALUE, "scale": SCALE, "implementation": implementation}
        out, pull = jax.vjp(lambda q, latent: sparse_mla(q, latent, indices, **options), q, latent)
        return out, pull((do, dlse))

    return run


def attention_error(case: Case, run: Callable[..., Any], arguments: tuple[Any, ...]) -> dict[str, float]:
    """Relative errors of the queries' and the latents' gradients."""
    q, latent, indices, do, dlse = arguments
    _, (dq, dlatent) = run(*arguments)
    wrong, right = np.zeros(2), np.zeros(2)
    for place in range(CHECKED):
        t = case.queries - CHECKED + place
        chosen = np.asarray(indices[0, t])
        chosen = chosen[chosen >= 0]
        keys, query, grad = map(_float64, (latent[0], q[0, t], do[0, t]))
        keys = keys[chosen]
        scores = SCALE * query @ keys.T
        p = _softmax(scores)
        dp = grad @ keys[:, :VALUE].T
        delta = np.sum(p * dp, axis=-1, keepdims=True) - _float64(dlse[0, t])[:, None]
        ds = SCALE * p * (dp - delta)
        here = np.nonzero(chosen == place)[0]
        dkey = ds[:, here].T @ query
        dkey[:, :VALUE] += p[:, here].T @ grad
        for i, (got, want) in enumerate(((dq[0, t], ds @ keys), (dlatent[0, place], dkey.sum(axis=0)))):
            wrong[i] += np.sum((_float64(got) - want) ** 2)
            right[i] += np.sum(want**2)
    dq_error, dlatent_error = np.sqrt(wrong / right)
    return {"dq_error": float(dq_error), "dlatent_error": float(dlatent_error)}


def draw_loss(case: Case, key: Any) -> tuple[Any, ...]:
    """Index queries, keys and weights, queries and keys of the attention, its key projection and the gradient of the loss."""
    keys = jax.random.split(key, 7)
    bf16 = jnp.bfloat16
    index_q = jax.random.normal(keys[0], (1, case.queries, INDEX_HEADS, INDEX_WIDTH), bf16)
    index_k = jax.random.normal(keys[1], (1, case.keys, INDEX_WIDTH), bf16)
    index_w = jax.random.normal(keys[2], (1, case.queries, INDEX_HEADS), jnp.float32) / INDEX_WIDTH
    q = jax.random.normal(keys[3], (1, case.queries, case.heads, NOPE + SLOT), bf16)
    latent = jax.random.normal(keys[4], (1, case.keys, WIDTH), bf16)
    w_uk = jax.random.normal(keys[5], (case.heads, NOPE, VALUE), bf16) * VALUE**-0.5
    return index_q, index_k, index_w, q, latent, w_uk, jax.random.normal(keys[6], (1, case.queries), jnp.float32)


def loss(case: Case, implementation: Any) -> Callable[..., Any]:
    """Forward and backward: nats, gradients of the indexer's arguments."""
    positions = case.keys - case.queries + jnp.arange(case.queries)[None]

    def run(index_q: Any, index_k: Any, index_w: Any, q: Any, latent: Any, w_uk: Any, grad: Any) -> Any:
        def nats(index_q: Any, index_k: Any, index_w: Any) -> Any:
            options: Any = {"top_k": case.top_k, "scale": SCALE, "implementation": implementation}
            return indexer_kl(index_q, index_k, index_w, q, latent, w_uk, q_positions=positions, **options)

        out, pull = jax.vjp(nats, index_q, index_k, index_w)
        return out, pull(grad)

    return run


def loss_error(case: Case, run: Callable[..., Any], arguments: tuple[Any, ...]) -> dict[str, float]:
    """Relative errors of the last query's loss and of the gradients of its index queries and weights."""
    nats, (dindex_q, _, dindex_w) = run(*arguments)
    t = case.queries - 1
    index_q, index_w, q, grad = (_float64(arguments[i][0, t]) for i in (0, 2, 3, 6))
    index_k, latent, w_uk = _float64(arguments[1][0]), _float64(arguments[4][0]), _float64(arguments[5])
    dots = np.maximum(index_q @ index_k.T, 0)
    scores = index_w @ dots
    chosen = np.arange(case.keys) if case.top_k is None else np.sort(np.argsort(-scores, kind="stable")[: case.top_k])
    keys, dots, scores = latent[chosen], dots[:, chosen], scores[chosen]
    absorbed = np.concatenate([np.einsum("hn,hnl->hl", q[:, :NOPE], w_uk), q[:, NOPE:]], axis=1)
    target = np.mean(_softmax(SCALE * absorbed @ keys.T), axis=0)
    share = _softmax(scores)
    slopes = grad * (share - target)
    want_q = (index_w[:, None] * (dots > 0) * slopes) @ index_k[chosen]
    found = {"nats": (nats[0, t], np.sum(target * np.log(target / share)))}
    found |= {"dindex_q": (dindex_q[0, t], want_q), "dindex_w": (dindex_w[0, t], dots @ slopes)}
    errors = {}
    for name, (got, want) in found.items():
        difference = _float64(got) - want
        errors[f"{name}_error"] = float(np.linalg.norm(difference) / np.linalg.norm(want))
    return errors


def _float64(x: Any) -> np.ndarray:
    return np.asarray(x, np.float32).astype(np.float64)


def _softmax(scores: np.ndarray) -> np.ndarray:
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


@dataclass(frozen=True)
class Programs:
    """What a case runs, compiled: its arguments and one call; and how the call is checked."""

    draw: Any
    call: Any
    check: Callable[..., dict[str, float]]


def build(case: Case, implementation: Any) -> Programs:
    """Compiles a case; many can be at a time."""
    run = loss(case, implementation) if case.loss else attention(implementation)
    draw = partial(draw_loss if case.loss else draw_attention, case)
    key = jax.random.key(0)
    shapes = jax.eval_shape(draw, key)
    check = loss_error if case.loss else attention_error
    return Programs(jax.jit(draw).lower(key).compile(), jax.jit(run).lower(*shapes).compile(), check)


def seconds(call: Any, arguments: tuple[Any, ...], repeats: int) -> float:
    """Median of what three calls, queued one behind the other, take longer than one, by two."""
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(call(*arguments))
        middle = time.perf_counter()
        jax.block_until_ready([call(*arguments) for _ in range(3)])
        found.append((time.perf_counter() - middle - (middle - began)) / 2)
    return statistics.median(found)


def measure(case: Case, implementation: Any, programs: Programs, repeats: int) -> dict[str, Any]:
    """One line of the table."""
    arguments = programs.draw(jax.random.key(time.time_ns() % 2**31))
    errors = programs.check(case, programs.call, arguments)
    taken = seconds(programs.call, arguments, repeats)
    both = operations(case)
    line = {"ms": taken * 1e3, "tflops": both / taken / 1e12, "floor_ms": both / FLOPS * 1e3}
    temporaries = programs.call.memory_analysis().temp_size_in_bytes
    return {**asdict(case), "implementation": implementation, **line, "temporaries": temporaries, **errors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90, help="begin no case after this time")
    parser.add_argument("--json", type=Path, help="write every line here")
    parser.add_argument("--only", nargs="*", help="cases whose names hold one of these")
    parser.add_argument(
        "--implementation", nargs="*", default=[None], help="gpu, xla; what is picked by itself if left out"
    )
    parser.add_argument("--threads", type=int, default=8, help="that compile")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    began, lines = time.monotonic(), []
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, forward and backward")
    wanted = [case for case in CASES if not options.only or any(part in case.name for part in options.only)]
    with ThreadPoolExecutor(options.threads) as pool:
        built = [(case, kind, pool.submit(build, case, kind)) for case in wanted for kind in options.implementation]
        wait(programs for *_, programs in built)  # compiling tries kernels out on the device
        for case, implementation, programs in built:
            if time.monotonic() - began > options.seconds:
                print(f"{case.name}: no time left")
                continue
            line = measure(case, implementation, programs.result(), options.repeats)
            lines.append(line)
            errors = " ".join(f"{name} {value:.1e}" for name, value in line.items() if name.endswith("_error"))
            print(
                f"{case.name:34s} {implementation or 'picked':6s} {line['ms']:9.3f} ms {line['tflops']:5.0f} TFLOP/s "
                f"floor {line['floor_ms']:.2f} ms temporaries {line['temporaries'] / 2**20:.0f} MiB {errors}",
                flush=True,
            )
            if options.json is not None:
                options.json.write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()
