"""Time to trace, lower and compile the K3.1 layer structure at tiny widths, 13 and 93 layers.

    python -m benchmarks.compile_time

Each depth runs in a process of its own, in turn; processor time, so that other work on the machine counts less.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

DEPTHS = (13, 93)


def one(depth: int, what: str) -> dict[str, float]:
    from tests.kimi_jax import test_depth

    began, wall = time.process_time(), time.perf_counter()
    lowered = test_depth.lowered(depth, what)
    compiled = lowered.compile()
    return {
        "cpu_s": time.process_time() - began,
        "wall_s": time.perf_counter() - wall,
        "lines": lowered.as_text().count("\n"),
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", nargs=2, metavar=("DEPTH", "WHAT"))
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(one(int(arguments.one[0]), arguments.one[1])))
        return
    for what in ("prefill", "gradient"):
        results: dict[int, list[dict[str, float]]] = {depth: [] for depth in DEPTHS}
        for _ in range(arguments.repeats):
            for depth in DEPTHS:
                command = [sys.executable, "-m", "benchmarks.compile_time", "--one", str(depth), what]
                results[depth].append(json.loads(subprocess.check_output(command, text=True).splitlines()[-1]))
        medians = {
            depth: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            for depth, runs in results.items()
        }
        for depth, median in medians.items():
            print(
                f"{what:9} {depth:3} layers: {median['cpu_s']:6.1f} s of processor, {median['wall_s']:6.1f} s of wall, "
                f"{median['lines']:.0f} lines, {median['temporary_bytes'] / 2**20:.1f} MiB of temporaries"
            )
        print(f"{what:9} ratio {medians[93]['cpu_s'] / medians[13]['cpu_s']:.2f}", flush=True)


if __name__ == "__main__":
    main()
