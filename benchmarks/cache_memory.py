"""What the caches of the full models take on a device: bytes a token, and of one row of a million tokens on several meshes.

    python -m benchmarks.cache_memory [--rows 1] [--context 1048576] [--json FILE]

Prints tables in Markdown. Nothing is allocated; the figures are those of the shapes that `MeshDecoder.allocate` makes.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kimi_jax.cache_format import CacheFormat, row_bytes
from kimi_jax.config import KimiConfig
from kimi_jax.parallel.decoder import axes_of
from kimi_jax.planning.chips import CHIPS
from kimi_jax.planning.configs import find_config
from kimi_jax.planning.step_cost import StepModel, Workload

MODELS = ("kimi-linear-48b-a3b", "kimi-k3", "kimi-k31-pro")
MESHES: tuple[Mapping[str, int], ...] = (
    {},
    {"tensor": 8},
    {"context": 8},
    {"expert": 16, "tensor": 8},
    {"context": 8, "expert": 4, "tensor": 8},
    {"context": 4, "expert": 16, "tensor": 8},
)
PLAIN = CacheFormat("bfloat16", "bfloat16")
SMALL = CacheFormat("fp8", "mxfp8")
GIB = 2**30


def formats(config: KimiConfig) -> tuple[CacheFormat, CacheFormat]:
    """Bfloat16 and the smallest; models without an indexer keep no index keys."""
    return (PLAIN, SMALL) if config.dsa is not None else (CacheFormat("bfloat16"), CacheFormat("fp8"))


def of_device(
    config: KimiConfig, mesh: Mapping[str, int], rows: int, context: int, format: CacheFormat
) -> dict[str, int]:
    """Bytes of one device's cache by field."""
    work = Workload("decode", rows, 1, context, format.kv_cache, format.index_cache)
    return StepModel(config, next(iter(CHIPS.values()))).cache_bytes(mesh, work)


def per_token() -> tuple[list[str], dict[str, Any]]:
    """The table of bytes a token and a row, and the same as plain values."""
    lines = [
        "| model | latents, bfloat16 | latents, FP8 | index keys, bfloat16 | index keys, MXFP8 | states and tails of a row |",
        "|---|---|---|---|---|---|",
    ]
    found: dict[str, Any] = {}
    for name in MODELS:
        config = find_config(name)[1]
        plain, small = (kind.token_bytes(config) for kind in formats(config))
        row = row_bytes(config)
        found[name] = {"bfloat16": vars(plain), "small": vars(small), "row": row}
        cells = [plain.latent, small.latent, plain.index_key, small.index_key]
        shown = [f"{size:,} B ({size / 2**10:.1f} KiB)" if size else "-" for size in cells]
        lines.append(f"| {name} | {' | '.join(shown)} | {row / 2**20:,.1f} MiB |")
    return lines, found


def on_meshes(name: str, rows: int, context: int) -> tuple[list[str], list[dict[str, Any]]]:
    """The table of one model's caches on a device of each mesh, and the same as plain values."""
    config = find_config(name)[1]
    lines = [
        f"| mesh | devices | places of a row split over | states | bfloat16: latents + index keys | "
        f"{SMALL.kv_cache} + {SMALL.index_cache} | in all, bfloat16 | in all, small |",
        "|---|---|---|---|---|---|---|---|",
    ]
    found = []
    for mesh in MESHES:
        devices = 1
        for size in mesh.values():
            devices *= size
        parts = [f"{axis}={mesh[axis]}" for axis in axes_of(rows, mesh)[1] if mesh.get(axis, 1) > 1]
        plain, small = (of_device(config, mesh, rows, context, kind) for kind in formats(config))
        states = plain["kda_state"] + plain["conv_tail"]
        keys = [size["latent"] + size.get("index_key", 0) for size in (plain, small)]
        cells = [states, *keys, states + keys[0], states + keys[1]]
        shown = " | ".join(f"{size / GIB:,.2f} GiB" for size in cells)
        written = " ".join(f"{axis}={size}" for axis, size in mesh.items()) or "one device"
        lines.append(f"| {written} | {devices} | {' x '.join(parts) or '-'} | {shown} |")
        found.append({"mesh": dict(mesh), "bfloat16": plain, "small": small})
    return lines, found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cache_memory", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--context", type=int, default=2**20, help="tokens of each row")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    lines, tokens = per_token()
    print("\n".join(lines), end="\n\n")
    lines, meshes = on_meshes("kimi-k31-pro", options.rows, options.context)
    rows = f"{options.rows} row{'s' if options.rows > 1 else ''}"
    print(f"kimi-k31-pro, {rows} of {options.context:,} tokens, bytes of one device:\n")
    print("\n".join(lines))
    if options.json:
        options.json.write_text(json.dumps({"token": tokens, "meshes": meshes}, indent=1) + "\n")


if __name__ == "__main__":
    main()
