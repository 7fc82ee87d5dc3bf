"""Memory of the TPU kernels' programs, from compiling them for TPUs that aren't there.

    python -m benchmarks.tpu_memory [--only k3_prefill] [--topologies v5e:2x2 tpu7x:2x2x1] [--json FILE]

Every named shape, for one device of each topology. Bytes are what the compiled program takes, with the padding of its
layouts; temporaries are what it takes beside its arguments and results. Needs libtpu, but no TPU.
"""

import argparse
import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax

from kimi_jax.planning import topology_devices
from kimi_jax.planning.topology import versions
from pallas_kernels.kda import kda
from pallas_kernels.kda.specs import SPECS

TOPOLOGIES = ("v5e:2x2", "v5p:2x2x2", "v6e:2x2", "tpu7x:2x2x1")
MIB = 2**20


def programs() -> Iterator[tuple[str, Any, dict[str, jax.ShapeDtypeStruct]]]:
    """(name, function, array arguments by name)."""
    for spec in SPECS:
        yield f"kda/{spec.name}", partial(kda, **spec.options(), implementation="tpu"), spec.arguments()


def measure(function: Any, arguments: dict[str, jax.ShapeDtypeStruct], topology: str) -> dict[str, float]:
    """Sizes in MiB and the time to trace and compile in seconds."""
    sharding = jax.sharding.SingleDeviceSharding(topology_devices(topology)[0])
    placed = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for name, x in arguments.items()}
    began = time.perf_counter()
    memory = jax.jit(function).lower(**placed).compile().memory_analysis()
    seconds = time.perf_counter() - began
    assert memory is not None
    return {
        "arguments_mib": memory.argument_size_in_bytes / MIB,
        "results_mib": memory.output_size_in_bytes / MIB,
        "temporaries_mib": memory.temp_size_in_bytes / MIB,
        "compile_s": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="programs whose name contains this")
    parser.add_argument("--topologies", nargs="+", default=TOPOLOGIES)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    print(f"{'program':30} {'chip':6} {'arguments':>10} {'results':>10} {'temporary':>10}  MiB  compile s")
    for name, function, arrays in programs():
        if arguments.only not in name:
            continue
        for topology in arguments.topologies:
            row = measure(function, arrays, topology)
            rows.append({"program": name, "topology": topology, **{key: round(x, 3) for key, x in row.items()}})
            print(
                f"{name:30} {topology.split(':')[0]:6} {row['arguments_mib']:10.1f} {row['results_mib']:10.1f} "
                f"{row['temporaries_mib']:10.1f} {row['compile_s']:15.1f}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps({"versions": versions(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
