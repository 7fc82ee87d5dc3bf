"""Products over experts, whole expert layers and Attention Residuals on one Hopper GPU, beside what JAX brings along.

    python -m benchmarks.experts_table [--json FILE] [--seconds 95] [--only ROW ...]

One line for each case and each way to compute it: the kernel that `None` picks, `jax.lax.ragged_dot`, the best of some
tilings of JAX's own Hopper kernel (`jax.experimental.pallas.ops.gpu.ragged_dot_mgpu`), or plain XLA. Every line has a process
of its own, so that one that fails says so and takes nothing along; they compile side by side, and when all have, they use
the device one after the other.

Inputs, weights and routings are drawn anew. "chain" is the median of chains of dependent calls in one program, divided by
their number; "kernels" is the time that the profiler finds kernels on the device during a chain, divided likewise. The
floor is the larger of operations over 790 TFLOP/s and bytes over 4.3 TB/s, counting only experts that have rows. Relative
errors are against float32 sums.
"""

import argparse
import datetime
import fcntl
import importlib.metadata
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

Run = Callable[..., Any]


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        case: name among the specs of `area`.
        area: what is timed: a product, a layer, or Attention Residuals.
        way: how it is computed.
        wanted: milliseconds to stay within, and those that are aimed at; None where no one has said.
        calls: in a chain; starting one takes half a millisecond, which is no call's.
    """

    case: str
    area: str
    way: str
    wanted: tuple[float, float] | None = None
    calls: int = 100

    @property
    def name(self) -> str:
        """Unique."""
        return f"{self.area}/{self.case}/{self.way}"


def _rows() -> tuple[Row, ...]:
    prefill, decode = "k3_prefill_8192_up_of_8_devices", "k3_decode_64_up_of_8_devices"
    products = {
        "48b_prefill_8192_up": (0.62, 0.52),
        "48b_decode_32_up": (0.26, 0.19),
        f"{prefill}_bfloat16": (0.90, 0.65),
        prefill: (0.90, 0.72),
        f"{decode}_bfloat16": (0.50, 0.41),
        decode: (0.18, 0.12),
    }
    slow = {"48b_prefill_8192_up": 1, f"{prefill}_bfloat16": 2}
    found = []
    for case, wanted in products.items():
        calls = 40 if "prefill" in case else 100
        found.append(Row(case, "product", "ours", wanted, calls))
        if case not in (prefill, decode):  # packed weights are nobody else's
            found.append(Row(case, "product", "mosaic", calls=calls))
            found.append(Row(case, "product", "lax", calls=slow.get(case, 20)))
    found.append(Row("48b_prefill_8192", "layer", "ours", (2.6, 1.7), 20))
    for case in ("48b_decode_32", "k3_prefill_8192_of_8_devices"):
        found.append(Row(case, "layer", "ours", calls=20))
    for case in ("k3_decode_64_of_8_devices", "k3_decode_64_of_8_devices_bfloat16"):
        found.append(Row(case, "layer", "ours"))
    found += [Row("k3_prefill_8192", "attn_res", "ours", (0.36, 0.30)), Row("k3_prefill_8192", "attn_res", "xla")]
    return tuple(found)


ROWS = _rows()
COMPILED, GO, LAST = ".compiled", "go", "last"
LAST_START = 0.8
"""Part of the time after which lines that compile still aren't waited for."""
TILINGS = {
    # block_m, block_n, block_k, max_concurrent_steps, grid_block_n: those that were fast on an H200.
    "prefill": ((128, 128, 64, 4, 1), (128, 128, 64, 4, 8), (64, 128, 64, 6, 8)),
    "decode": ((64, 128, 64, 6, 1), (64, 64, 64, 6, 1)),
}


# --- one line, in a process of its own -------------------------------------------------------------------------------


@contextmanager
def turn(lock: Path, alone: bool) -> Iterator[None]:
    """Work on the device: alone, or beside others that don't time anything either."""
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


def measure(row: Row, lock: Path, wait: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """The fields of a line; `wait` returns when it is time to use the device."""
    import jax
    import jax.numpy as jnp

    from benchmarks import attn_res, expert_layer, grouped_matmul

    began = time.perf_counter()
    forms: dict[str, Run]
    check: Callable[[Any], float]
    if row.area == "product":
        [spec] = [spec for spec in grouped_matmul.SPECS if spec.name == row.case]
        with turn(lock, alone=False):
            arguments, host = _product_inputs(spec, row.way)
        bound = grouped_matmul.floor(spec, host)
        forms = _product_forms(spec, row.way)
        check = partial(_product_error, arguments, host, row.way)
        chained: Run = grouped_matmul.chained
    elif row.area == "layer":
        [case] = [case for case in expert_layer.CASES if case.name == row.case]
        with turn(lock, alone=False):
            arguments = jax.block_until_ready(expert_layer.draw(case))
            tokens, exact = expert_layer.exact_sums(case, *arguments)
        bound = expert_layer.floor(case, len(set(jax.device_get(arguments[1].experts).reshape(-1).tolist())))
        forms = {"": partial(expert_layer.layer, case, None)}
        check = partial(expert_layer.error, tokens=tokens, exact=exact)
        chained = expert_layer.chained
    else:
        [shape] = [spec for spec in attn_res.SPECS if spec.name == row.case]
        with turn(lock, alone=False):
            arguments = tuple(jax.block_until_ready(attn_res.draw(shape)))
        bound = attn_res.floor(shape)
        form: Any = "gpu" if row.way == "ours" else "xla"
        forms = {"": partial(attn_res.mix, form)}
        check = partial(_mixture_error, arguments)
        chained = partial(_chained_mixtures, form)
    with turn(lock, alone=False):
        # Once for nothing, so that nothing is compiled while the device is ours alone.
        check(jnp.zeros_like(jax.eval_shape(next(iter(forms.values())), *arguments)))
    line: dict[str, Any] = {"floor_ms": 1e3 * bound}
    built: dict[str, Any] = {}
    for name, call in forms.items():
        try:
            program = jax.jit(partial(_chain_and_one, call, chained(row.calls, call))).lower(*arguments)
            built[name] = program.compile()
        except Exception as failure:
            line.setdefault("left_out", {})[name] = f"{type(failure).__name__}: {failure}"[:300]
    line["compile_s"] = time.perf_counter() - began
    wait()
    calls = row.calls + 1
    best = None
    for name, run in built.items():
        with turn(lock, alone=True):
            _, got = jax.block_until_ready(run(*arguments))
            times = []
            for _ in range(5 if row.calls > 2 else 3):
                start = time.perf_counter()
                jax.block_until_ready(run(*arguments))
                times.append((time.perf_counter() - start) / calls)
            found: dict[str, Any] = {"ms": 1e3 * statistics.median(times)}
            if best is None or found["ms"] < best["ms"]:
                kernels = {name: us / calls for name, us in expert_layer.kernels(run, arguments, 1).items()}
                memory = run.memory_analysis()
                found |= {
                    "kernels_ms": sum(kernels.values()) / 1e3,
                    "kernels_us": dict(list(kernels.items())[:8]),
                    "temporary_MB": memory.temp_size_in_bytes / 1e6 if memory is not None else None,
                    "error": check(got),
                }
                best = found | ({"tiling": name} if name else {})
    if best is None:
        raise RuntimeError(str(line.get("left_out")))
    return line | best


def _chain_and_one(call: Run, chain: Run, *arguments: Any) -> tuple[Any, Any]:
    """A chain, and one more call whose result is looked at; in one program a kernel is translated once."""
    return chain(*arguments), call(*arguments)


def _product_inputs(spec: Any, way: str) -> tuple[tuple[Any, ...], Any]:
    import jax
    import jax.numpy as jnp

    from benchmarks import grouped_matmul

    rows, weights, sizes, host = grouped_matmul.draw(spec)
    if way == "lax":
        # [E, in, out], the orientation that it is named for.
        weights = jax.jit(lambda array: jnp.swapaxes(array, 1, 2), donate_argnums=0)(weights)
    return jax.block_until_ready((rows, weights, sizes)), host


def _product_forms(spec: Any, way: str) -> dict[str, Run]:
    import jax

    if way == "ours":
        from pallas_kernels.grouped_matmul import grouped_matmul

        return {"": grouped_matmul}
    if way == "lax":
        return {"": jax.lax.ragged_dot}
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    names = ("block_m", "block_n", "block_k", "max_concurrent_steps", "grid_block_n")

    def product(tiling: dict[str, Any], rows: Any, weights: Any, sizes: Any) -> Any:
        return ragged_dot(rows, weights, group_sizes=sizes, transpose_rhs=True, **tiling)

    tilings = TILINGS["prefill" if spec.rows >= 4096 else "decode"]
    return {str(tiling): partial(product, dict(zip(names, tiling, strict=True))) for tiling in tilings}


def _product_error(arguments: tuple[Any, ...], host: Any, way: str, got: Any) -> float:
    import jax.numpy as jnp
    import numpy as np

    from benchmarks import grouped_matmul

    rows, weights, _ = arguments
    group = np.repeat(np.arange(len(host)), host)
    # Some rows of all, and of groups' first and last ones.
    ends = np.cumsum(host)[host > 0]
    borders = np.unique(np.concatenate([ends - 1, ends - host[host > 0]]))
    shuffled = np.random.default_rng(0).permutation
    chosen = np.concatenate([shuffled(len(group))[:64], shuffled(borders)[:64]])
    if way == "lax":
        # Only what is compared is turned back.
        experts, place = np.unique(group[chosen], return_inverse=True)
        weights = jnp.swapaxes(weights[jnp.asarray(experts)], 1, 2)
        group = np.zeros_like(group)
        group[chosen] = place
    return float(grouped_matmul.error(got, rows, weights, jnp.asarray(group), jnp.asarray(chosen))[0])


def _chained_mixtures(form: Any, count: int, _: Run) -> Run:
    from benchmarks import attn_res

    return attn_res.chained(count, form)


def _mixture_error(arguments: tuple[Any, ...], got: Any) -> float:
    import jax
    import jax.numpy as jnp

    from benchmarks import attn_res

    want = jax.jit(attn_res.mix, static_argnums=0)("reference", *arguments).astype(jnp.float32)
    return float(jnp.linalg.norm(got.astype(jnp.float32) - want) / jnp.linalg.norm(want))


def one(name: str, lock: Path, answer: Path) -> None:
    """Writes a line's fields, or why there are none."""
    [row] = [row for row in ROWS if row.name == name]

    def wait() -> None:
        answer.with_suffix(COMPILED).touch()
        # What may take tens of milliseconds a call goes last.
        while not lock.with_name(LAST if row.way == "lax" else GO).exists():
            time.sleep(0.05)

    try:
        line = measure(row, lock, wait)
    except Exception as failure:
        line = {"failed": f"{type(failure).__name__}: {failure}"[:500]}
    answer.write_text(json.dumps(line))


# --- all of them -----------------------------------------------------------------------------------------------------


def shown(row: Row, line: dict[str, Any]) -> str:
    """A line of the printed table."""
    start = f"{row.area:8} {row.case:40} {row.way:7}"
    if "failed" in line:
        return f"{start} failed: {line['failed'][:150]}"
    verdict = ""
    if row.wanted is not None:
        bound, aim = row.wanted
        met = "aim met" if line["ms"] <= aim else "met" if line["ms"] <= bound else "MISSED"
        verdict = f"  at least {bound:.2f}, aim {aim:.2f}: {met}"
    return (
        f"{start} {line['ms']:9.4f} {line['kernels_ms']:9.4f} {line['floor_ms']:8.4f} "
        f"{line['ms'] / line['floor_ms']:7.2f}x  {line['error']:.1e}{verdict}"
    )


def _start(row: Row) -> int:
    """What needs most of the memory first, then what takes longest to compile."""
    if row.way == "lax" and "prefill" in row.case:
        return 0
    many = "prefill" in row.case and row.way == "ours"
    return (1 if row.area == "layer" else 2) if many else 3


def run_all(rows: list[Row], limit: float, tell: Callable[[Row, dict[str, Any]], None]) -> None:
    """Starts a process a line, lets them use the device when all are ready, and tells each line when it is there."""
    began = time.perf_counter()
    running: list[tuple[Row, subprocess.Popen[bytes], Path]] = []
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "3"}
    # Trying out products would take the large ones' operands once more, of which there is no room for two. Without it
    # the small ones take 24 and 30 ms.
    untried = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()}
    with tempfile.TemporaryDirectory() as folder:
        for row in sorted(rows, key=_start):
            answer = Path(folder, row.name.replace("/", "+"))
            command = [sys.executable, "-m", "benchmarks.experts_table", "--one", row.name, "--answer", str(answer)]
            log = answer.with_suffix(".log").open("wb")
            process = subprocess.Popen(
                [*command, "--lock", str(Path(folder, "lock"))],
                env=environment | (untried if row.way == "lax" and "prefill" in row.case else {}),
                stdout=log,
                stderr=log,
            )
            running.append((row, process, answer))
        while running:
            late = time.perf_counter() - began > limit
            compiled = all(answer.with_suffix(COMPILED).exists() for _, _, answer in running)
            if compiled or time.perf_counter() - began > LAST_START * limit:
                Path(folder, GO).touch()
                if all(row.way == "lax" for row, _, _ in running):
                    Path(folder, LAST).touch()
            for entry in list(running):
                row, process, answer = entry
                if process.poll() is None:
                    if not late:
                        continue
                    process.kill()
                    process.wait()
                running.remove(entry)
                if answer.exists():
                    tell(row, json.loads(answer.read_text()))
                else:
                    said = answer.with_suffix(".log").read_text(errors="replace").strip().splitlines()
                    why = "no time left" if late else f"exit code {process.returncode}: {' '.join(said[-2:])[-300:]}"
                    tell(row, {"failed": why})
            time.sleep(0.05)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=95)
    parser.add_argument("--only", nargs="*", help="lines whose name contains one of these")
    for name in ("--one", "--answer", "--lock"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(options.one, Path(options.lock), Path(options.answer))
        return
    began, described = time.perf_counter(), _where_and_when()
    lines: dict[str, dict[str, Any]] = {}
    wanted = [row for row in ROWS if not options.only or any(part in row.name for part in options.only)]
    print(f"{'':57} {'chain ms':>9} {'kernels':>9} {'floor':>8} {'ratio':>8}  error", flush=True)

    def tell(row: Row, line: dict[str, Any]) -> None:
        lines[row.name] = {"area": row.area, "case": row.case, "way": row.way, "wanted_ms": row.wanted, **line}
        print(shown(row, line), f"({time.perf_counter() - began:.0f} s)", flush=True)
        if options.json:
            found = [lines[row.name] for row in wanted if row.name in lines]
            options.json.write_text(json.dumps({**described, "lines": found}, indent=1) + "\n")

    run_all(wanted, options.seconds, tell)
    print("\nIn order:")
    for row in wanted:
        print(shown(row, lines[row.name]))


def _where_and_when() -> dict[str, Any]:
    found: dict[str, Any] = {"date": datetime.datetime.now(datetime.UTC).date().isoformat()}
    found |= {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    found["device"] = None
    if shutil.which("nvidia-smi"):  # a process that asks JAX would keep memory of the device
        asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        found["device"] = subprocess.run(asked, capture_output=True, text=True).stdout.partition("\n")[0]
    return found


if __name__ == "__main__":
    main()
