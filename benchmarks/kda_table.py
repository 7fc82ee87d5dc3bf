"""KDA on one GPU: every case that has an aim, by device time, beside FLA, the floor and the aim.

    python -m benchmarks.kda_table [--json FILE] [--only NAME ...] [--fla-configs FOLDER] [--seconds 600]

Times are those of all kernels of a call, from a profiler's trace: the median of ten calls, or of twenty calls in one program
where the call is one kernel (decode, verify), each on states that no cache holds. FLA's chunk_kda and fused_recurrent_kda
(`benchmarks.kda_fla`) are timed in the same way; FLA has no verification that leaves the state alone, so eight recurrent tokens
that write it stand in for it. Without FLA its column says so. Each case of ours and of FLA's compiles in a process of its own,
all at once, and is then timed alone. The floor is all inputs and outputs once at 4.3 TB/s, or the recurrence's products at 790
TFLOP/s if that's more. `benchmarks.kda_check` has the errors.
"""

import argparse
import glob
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import kda, kda_decode
from benchmarks.versions import versions

FLOPS = 790e12
CALLS = 10


@dataclass(frozen=True)
class Row:
    """A case of `benchmarks.kda` or `benchmarks.kda_decode`.

    Attributes:
        name: of it there.
        least: milliseconds that it has to reach; None: FLA's.
        aim: milliseconds; None: half of FLA's.
        with_fla: FLA has it.
    """

    name: str
    least: float | None
    aim: float | None
    with_fla: bool = True

    def case(self) -> kda.Case | kda_decode.Case:
        """Of either benchmark."""
        return next(case for case in (*kda.CASES, *kda_decode.CASES) if case.name == self.name)


ROWS = (
    Row("k3_8k", 1.20, 0.60),
    Row("k3_8k_tp8", 0.40, 0.12),
    Row("128k_32_heads", 7.5, 3.0),
    Row("k3_packed_mixed", 1.2, 0.6),
    Row("32_heads_gradient", None, None),
    Row("decode_64x96", 0.215, 0.200),
    Row("conv_64x96", 0.225, 0.208, with_fla=False),
    Row("decode_1x96", 0.008, 0.004),
    Row("verify_8_64x96", 0.300, 0.130),
)


def for_fla(case: kda.Case | kda_decode.Case) -> dict[str, Any]:
    """What `benchmarks.kda_fla` reads."""
    if isinstance(case, kda_decode.Case):
        return {"slots": case.slots, "heads": case.heads, "tokens": case.tokens}
    size = {"tokens": case.tokens, "heads": case.heads, "segments": case.segments, "gradient": case.gradient}
    return {"slots": 0, **size}


class Worker:
    """A process that compiles a case, says so, waits to be told, times it and says what it took."""

    def __init__(self, *command: str, environment: dict[str, str] | None = None):
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | (environment or {}),
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.said: dict[str, Any] = {}

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self._lines.put(line)
        self._lines.put(json.dumps({"failed": "its process ended"}))

    def _hear(self, seconds: float) -> dict[str, Any]:
        try:
            return json.loads(self._lines.get(timeout=max(0.1, seconds)))
        except queue.Empty:
            return {"failed": "not done in the time given"}

    def wait(self, seconds: float) -> None:
        """Until it has compiled."""
        self.said = self._hear(seconds)

    def go(self, seconds: float = 60) -> dict[str, Any]:
        """What it measures, or why it doesn't."""
        if "ready" not in self.said:
            return self.said
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return {"failed": "its process ended"}
        return self._hear(seconds)

    def close(self) -> None:
        """Ends it."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


def device_milliseconds(run: Callable[[], Any]) -> float:
    """Median over calls of the time of all their kernels."""
    jax.block_until_ready(run())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(CALLS):
                result = run()
            jax.block_until_ready(result)
        [path] = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        planes = jax.profiler.ProfileData.from_file(path).planes
        lines = [line for plane in planes if "GPU" in plane.name for line in plane.lines if "Stream" in line.name]
        events = sorted((event.start_ns, event.duration_ns / 1e6) for line in lines for event in line.events)
    times = [duration for _, duration in events]
    if len(times) % CALLS:
        return sum(times) / CALLS
    return float(np.median(np.reshape(times, (CALLS, -1)).sum(axis=1)))


def prepare(case: kda.Case | kda_decode.Case) -> Any:
    """Draws inputs and compiles."""
    if isinstance(case, kda_decode.Case):
        return kda_decode.prepare(case, checked=False)
    arrays = kda.draw(case)
    run = partial(kda.run, case)
    call = jax.jit(partial(kda.with_gradients, run) if case.gradient else run)
    return call.lower(*arrays).compile(), arrays


def measure(case: kda.Case | kda_decode.Case, prepared: Any) -> dict[str, float]:
    """Milliseconds and floor."""
    if isinstance(case, kda_decode.Case):
        line = kda_decode.measure(case, prepared)
        return {"ms": line["us"] / 1e3, "floor_ms": line["floor_us"] / 1e3}
    call, arrays = prepared
    products = (18 if case.gradient else 6) * kda.WIDTH**2 * case.tokens * case.heads
    return {
        "ms": device_milliseconds(lambda: call(*arrays)),
        "floor_ms": 1e3 * max(case.floor(), products / FLOPS),
        "floor_is_products": float(products / FLOPS > case.floor()),
    }


def judge(row: Row, line: dict[str, Any]) -> str:
    """What has been reached."""
    fla = line.get("fla_ms")
    least = row.least if row.least is not None else fla
    aim = row.aim if row.aim is not None else fla and fla / 2
    if least is None or aim is None:
        return "nothing to hold it against"
    line["least_ms"], line["aim_ms"] = least, aim
    return "aim" if line["ms"] <= aim else "at least" if line["ms"] <= least else "MISSED"


def work(case: kda.Case | kda_decode.Case) -> None:
    """What a process of ours does."""
    try:
        prepared = prepare(case)
        print(json.dumps({"ready": versions()}), flush=True)
        if sys.stdin.readline():
            print(json.dumps(measure(case, prepared)), flush=True)
    except Exception as failure:
        print(json.dumps({"failed": f"{type(failure).__name__}: {failure}"[:300]}), flush=True)
        raise


def in_line(line: dict[str, Any]) -> str:
    """A row of the table."""
    if "ms" not in line:
        return f"{line['case']:18} {line.get('failed')}"
    other = line.get("fla_ms")
    numbers = [f"{line['ms']:8.4f}", f"{line['floor_ms']:8.4f}", f"{line['ratio']:6.2f}"]
    numbers += [f"{other:8.4f}", f"{other / line['ms']:6.2f}"] if other else [f"{'-':>8}", f"{'-':>6}"]
    numbers += [f"{line[name]:8.3f}" if name in line else f"{'-':>8}" for name in ("least_ms", "aim_ms")]
    return f"{line['case']:18} {' '.join(numbers)} {line['reached']}{'' if other else ' (' + line['fla'] + ')'}"


def main() -> None:
    """Prints a line for each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", help="names of rows")
    parser.add_argument(
        "--fla-configs", type=Path, help="of `benchmarks.kda_fla --tune`; FLA tunes itself without them"
    )
    parser.add_argument("--seconds", type=float, default=600, help="for compiling")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(next(row for row in ROWS if row.name == options.worker).case())
        return
    began = time.perf_counter()
    rows = [row for row in ROWS if not options.only or row.name in options.only]
    configs = {"FLA_CACHE_MODE": "full", "FLA_CONFIG_DIR": str(options.fla_configs)} if options.fla_configs else {}
    ours = {row.name: Worker("benchmarks.kda_table", "--worker", row.name) for row in rows}
    theirs = {
        row.name: Worker("benchmarks.kda_fla", "--worker", json.dumps(for_fla(row.case())), environment=configs)
        for row in rows
        if row.with_fla
    }
    result: dict[str, Any] = {"times": "device time of all kernels of a call, medians, ms", "rows": []}
    try:
        for worker in (*ours.values(), *theirs.values()):
            worker.wait(options.seconds - (time.perf_counter() - began))
            result |= worker.said.get("ready", {})
        print(", ".join(f"{name} {value}" for name, value in result.items() if name not in ("times", "rows")))
        print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)
        print(f"{'case':18} {'ms':>8} {'floor':>8} {'ratio':>6} {'FLA ms':>8} {'times':>6} {'at least':>8} {'aim':>8}")
        for row in rows:
            line: dict[str, Any] = {"case": row.name} | ours[row.name].go()
            beside = theirs[row.name].go() if row.with_fla else {"missing": "FLA has no such kernel"}
            line["fla"] = beside.pop("missing", None) or beside.pop("failed", None) or "chunk_kda"
            line |= beside
            if "ms" in line:
                line["ratio"] = line["ms"] / line["floor_ms"]
                line["reached"] = judge(row, line)
            print(in_line(line), flush=True)
            result["rows"].append(line)
            if options.json:
                options.json.write_text(json.dumps(result, indent=1) + "\n")
    finally:
        for worker in (*ours.values(), *theirs.values()):
            worker.close()


if __name__ == "__main__":
    main()
