"""How far every golden family on a mesh is from the same on one device, for many meshes of eight CPU devices.

    python -m benchmarks.meshes [--families NAME,...] [--output benchmarks/results/meshes.json]

Rows of 1 to 300 tokens come in three chunks (two split over the devices, one not) and one more token is decoded; packed
rows are run as a whole. Where two experts' or keys' scores are so close that rounding decides which is chosen, and it was
decided otherwise, the row is compared up to there. Results are written after every mesh, and those that are there are not
measured again.
"""

import argparse
import json
import time
from pathlib import Path

import jax

from tests.golden_data import FAMILIES
from tests.mesh_cases import EXACT, MESHES, allowed, alone, differences

SHOWN = ("logits", "decoded", "packed", "kda_state", "conv_tail", "layer_out", "final_hidden")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.meshes", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/meshes.json"))
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    kept = json.loads(options.output.read_text()) if options.output.exists() else {}
    kept |= {"jax": jax.__version__, "date": time.strftime("%Y-%m-%d"), "device": "8 virtual CPU devices, float32"}
    results = kept.setdefault("differences", {})
    for family in options.families.split(","):
        for mesh in MESHES:
            name = " ".join(f"{axis}={size}" for axis, size in mesh.items())
            if name in results.setdefault(family, {}) or not allowed(alone(family).decoder.config, mesh):
                continue
            found = results[family][name] = differences(family, mesh)
            worst = max(value for key, value in found.items() if key not in (*EXACT, "tokens"))
            wrong = sum(value for key, value in found.items() if key in EXACT)
            said = (
                f"largest difference {worst:.1e}, sets that differ {wrong:.0f}, {found['tokens']:.0f} tokens compared"
            )
            print(f"{family:22s} {name:32s} {said}", flush=True)
            options.output.parent.mkdir(exist_ok=True)
            options.output.write_text(json.dumps(kept, indent=1) + "\n")
            jax.clear_caches()


if __name__ == "__main__":
    main()
