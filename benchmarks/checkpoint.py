"""Conversion and loading at the size of real checkpoints: throughput beside `cp -r`, memory, kills, and a long fuzz.

    python -m benchmarks.checkpoint throughput [--directory DIR] [--repeats N]
    python -m benchmarks.checkpoint kills [--directory DIR] [--kills N]
    python -m benchmarks.checkpoint expert-layer [--directory DIR]
    python -m benchmarks.checkpoint fuzz [--seconds N]

`throughput` and `kills` use a synthetic checkpoint of 8 GB: the names of Kimi-Linear-48B, fewer and narrower layers.
`expert-layer` converts 576 packed experts of Kimi K3's size in one layer, 10 GB. All data goes to a temporary folder in
DIR and is removed at the end. Each printed line is also written as JSON with `--output`.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kimi_jax.checkpoint.manifest import MARKER
from kimi_jax.checkpoint.random_weights import init_random

ROOT = Path(__file__).parents[1]
SETTLE_SECONDS = 15
CONVERT = """
import resource, sys, time
began = time.perf_counter()
from kimi_jax.cli import main
status = main(["convert", *sys.argv[1:], "--quiet"])
print(status, time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""
LOAD = """
import resource, sys, time
import jax
from kimi_jax.checkpoint.load import load_params
from kimi_jax.checkpoint.opened import open_checkpoint
from kimi_jax.config import KimiConfig
from kimi_jax.model import Decoder
jax.devices()
began = time.perf_counter()
decoder = Decoder(KimiConfig.from_directory(sys.argv[1]))
params = jax.block_until_ready(load_params(open_checkpoint(sys.argv[1]), decoder, "bfloat16"))
seconds = time.perf_counter() - began
print(sum(leaf.nbytes for leaf in jax.tree.leaves(params)), seconds,
      resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def linear_config() -> dict[str, Any]:
    """About 8 GB in bfloat16: Kimi-Linear-48B with 5 of its 27 layers at two thirds of its width."""
    tree = json.loads((ROOT / "configs" / "kimi-linear-48b-a3b.json").read_text())
    tree |= {"num_hidden_layers": 5, "hidden_size": 1536, "intermediate_size": 6144, "moe_intermediate_size": 704}
    tree["linear_attn_config"] |= {"kda_layers": [1, 2, 3, 5], "full_attn_layers": [4]}
    return tree


def expert_config() -> dict[str, Any]:
    """One layer of 576 experts of Kimi K3's size; everything around them is small."""
    tree = json.loads((ROOT / "configs" / "kimi-k3.json").read_text())
    del tree["vision_config"]
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    tree |= tokens | {"media_placeholder_token_id": 4}
    text = tree["text_config"]
    text |= tokens | {"num_hidden_layers": 2, "num_experts": 576, "vocab_size": 1024, "intermediate_size": 1024}
    text["linear_attn_config"] |= {"kda_layers": [1], "full_attn_layers": [2]}
    return tree


def make(place: Path, config: dict[str, Any]) -> Path:
    """Writes the synthetic checkpoint."""
    file = place / "config.json"
    file.write_text(json.dumps(config))
    return init_random(file, place / "source", shard_bytes=2**30)


def weights(directory: Path) -> int:
    """Bytes of a Hugging Face directory's weights."""
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def child(script: str, *arguments: str | Path) -> list[float]:
    """Runs a script in a process of its own, and returns the numbers that it prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    line = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(line, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return list(map(float, done.stdout.split()))


def forget(directory: Path) -> None:
    """Lets the system forget what it has cached of a directory's files."""
    os.sync()
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def synced(run: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of a run until what it wrote is on the disk, and its result."""
    os.sync()
    began = time.perf_counter()
    result = run()
    os.sync()
    return time.perf_counter() - began, result


def throughput(place: Path, repeats: int) -> Iterator[dict[str, Any]]:
    """Copies, converts and loads the same files in turn, from the disk and from the cache."""
    source = make(place, linear_config())
    size = weights(source)
    copy, orbax = place / "copy", place / "orbax"

    def settle(*directories: Path) -> None:
        # A virtual machine gives memory that has been free for a while back to its host, and waits for it when it's
        # needed again. Every run starts from that state; otherwise the first after a removal would have an advantage.
        for directory in directories:
            forget(directory)
        time.sleep(SETTLE_SECONDS)

    for cold in (True, False):
        rows: list[dict[str, float]] = []
        for _ in range(repeats):
            row: dict[str, float] = {}
            settle(*([source] if cold else []))
            row["copy"], _ = synced(lambda: subprocess.run(["cp", "-r", source, copy], check=True))
            settle(*([source] if cold else []))
            row["convert"], (status, _, row["convert_peak"]) = synced(lambda: child(CONVERT, source, orbax))
            assert status == 0
            shutil.rmtree(copy)
            for name, directory in (("load_orbax", orbax), ("load_huggingface", source)):
                settle(*([directory] if cold else []))
                loaded, row[name], row[f"{name}_peak"] = child(LOAD, directory)
                assert loaded > 0.99 * size
            shutil.rmtree(orbax)
            rows.append(row)
        median = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        result: dict[str, Any] = {"case": "cold" if cold else "warm", "bytes": size, "repeats": repeats}
        for name in ("copy", "convert", "load_orbax", "load_huggingface"):
            result[f"{name}_MB_per_s"] = round(size / median[name] / 1e6)
            result[f"{name}_of_copy"] = round(statistics.median(row["copy"] / row[name] for row in rows), 2)
        result["convert_peak_GiB"] = round(max(row["convert_peak"] for row in rows) / 2**30, 2)
        yield result


def records(directory: Path) -> list[Any]:
    """What a converted directory holds, with every checksum."""
    return [json.loads(path.read_text())["arrays"] for path in sorted((directory / "pieces").iterdir())]


def kills(place: Path, number: int) -> Iterator[dict[str, Any]]:
    """Kills conversions at random moments, and compares the end with an undisturbed run's."""
    source = make(place, linear_config())
    _, seconds, peak = child(CONVERT, source, place / "calm")
    chance = random.Random(0)
    target = place / "killed"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = []
    for _ in range(number):
        arguments = [sys.executable, "-m", "kimi_jax.cli", "convert", str(source), str(target), "--quiet"]
        process = subprocess.Popen(arguments, env=environment, stdout=subprocess.DEVNULL)
        time.sleep(chance.uniform(0, seconds / 4))
        process.kill()
        process.wait()
        done.append(len(list((target / "pieces").glob("*.json"))) if target.exists() else 0)
        marker = target / MARKER
        if marker.exists() and json.loads(marker.read_text())["complete"]:
            # It has come to its end: the remaining kills hit another run from the start.
            assert records(target) == records(place / "calm")
            shutil.rmtree(target)
    child(CONVERT, source, target, "--verify")
    pieces = len(records(place / "calm"))
    yield {
        "case": f"{number} kills",
        "bytes": weights(source),
        "pieces": pieces,
        "pieces_done_at_each_kill": done,
        "identical": records(target) == records(place / "calm"),
        "calm_peak_GiB": round(peak / 2**30, 2),
    }


def expert_layer(place: Path) -> Iterator[dict[str, Any]]:
    """Converts one layer of packed experts of real size, and back."""
    source = make(place, expert_config())
    for mebibytes in ("128", "256", "1024"):
        status, seconds, peak = child(CONVERT, source, place / "orbax", "--array-mib", mebibytes)
        assert status == 0
        status, _, peak_back = child(CONVERT, place / "orbax", place / "back", "--to", "hf")
        assert status == 0
        for name in ("orbax", "back"):
            shutil.rmtree(place / name)
        yield {
            "case": f"K3 expert layer, arrays of at most {mebibytes} MiB",
            "bytes": weights(source),
            "peak_GiB": round(peak / 2**30, 2),
            "peak_back_GiB": round(peak_back / 2**30, 2),
            "MB_per_s": round(weights(source) / seconds / 1e6),
        }


def fuzz(seconds: float) -> Iterator[dict[str, Any]]:
    """Mutated headers, indices and records for a long time."""
    from tests.kimi_jax.checkpoint.fuzz import main

    yield {"case": f"fuzz for {seconds:.0f} s", **dict(sorted(main(seconds, time.time_ns() % 2**32).items()))}


@contextmanager
def folder(parent: Path | None) -> Iterator[Path]:
    """A temporary folder, removed at the end."""
    with tempfile.TemporaryDirectory(dir=parent, prefix="kimi_jax_benchmark_") as place:
        yield Path(place)


def main() -> None:
    parser = argparse.ArgumentParser(description="Checkpoints at real size: throughput, kills, memory, fuzz.")
    parser.add_argument("what", choices=("throughput", "kills", "expert-layer", "fuzz"))
    parser.add_argument("--directory", type=Path, help="where to put the data (40 GB for throughput)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--output", type=Path, help="write the lines as JSON too")
    arguments = parser.parse_args()
    rows = []
    with folder(arguments.directory) as place:
        runs = {
            "throughput": lambda: throughput(place, arguments.repeats),
            "kills": lambda: kills(place, arguments.kills),
            "expert-layer": lambda: expert_layer(place),
            "fuzz": lambda: fuzz(arguments.seconds),
        }
        for row in runs[arguments.what]():
            rows.append(row)
            print(json.dumps(row), flush=True)
    if arguments.output:
        arguments.output.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
