"""Memory of the TPU kernels' programs, from compiling them for TPUs that aren't there.

    python -m benchmarks.tpu_memory [--only k3_prefill] [--topologies v5e:2x2 tpu7x:2x2x1] [--json FILE]

Every named shape, for one device of each topology. Bytes are what the compiled program takes, with the padding of its
layouts; temporaries are what it takes beside its arguments and results. Needs libtpu, but no TPU. In the file, rows of
programs that weren't compiled this time stay if the versions are the same.
"""

import argparse
import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout

from kimi_jax.planning import topology_devices
from kimi_jax.planning.topology import versions
from pallas_kernels.fp8_latent import Fp8Latent, bytes_per_token
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul import specs as grouped_specs
from pallas_kernels.kda import kda
from pallas_kernels.kda import specs as kda_specs
from pallas_kernels.lightning_indexer import TwoStage, lightning_indexer
from pallas_kernels.lightning_indexer import specs as indexer_specs
from pallas_kernels.mxfp4 import BLOCK, Mxfp4
from pallas_kernels.mxfp8 import BLOCK as MXFP8_BLOCK
from pallas_kernels.mxfp8 import Mxfp8
from pallas_kernels.sparse_mla import sparse_mla
from pallas_kernels.sparse_mla import specs as mla_specs

TOPOLOGIES = ("v5e:2x2", "v5p:2x2x2", "v6e:2x2", "tpu7x:2x2x1")
MIB = 2**20


HEADS = (96, 12)  # all of them, and a shard's over 8 devices
Shape = jax.ShapeDtypeStruct


def programs() -> Iterator[tuple[str, Any, dict[str, Any], bool]]:
    """(name, function, arguments by name, whether they lie in memory in the order of their axes).

    Where they need not, XLA chooses, as it does for any program's own arguments.
    """
    for spec in kda_specs.SPECS:
        yield f"kda/{spec.name}", partial(kda, **spec.options(), implementation="tpu"), spec.arguments(), False
    product = partial(grouped_matmul, implementation="tpu")
    for spec in grouped_specs.SPECS:
        yield f"grouped_matmul/{spec.name}", product, experts(spec), False
    for packed in (False, True):
        for spec in (*mla_specs.PREFILL, *mla_specs.DECODE):
            if spec.heads not in HEADS[: 1 if packed else 2]:
                continue
            attend = partial(sparse_mla, latent_width=spec.latent, scale=spec.scale, implementation="tpu")
            name = f"sparse_mla{'_fp8' if packed else ''}/{spec.name}"
            yield name, attend, spec.sparse_arguments() | (packed_latent(spec) if packed else {}), True
    for quantised in (False, True):
        for spec in (*indexer_specs.PREFILL, *indexer_specs.DECODE, *indexer_specs.PAGED, indexer_specs.LONG):
            select = partial(lightning_indexer, top_k=spec.top_k, implementation="tpu")
            name = f"lightning_indexer{'_mxfp8' if quantised else ''}/{spec.name}"
            yield name, select, spec.arguments() | (quantised_vectors(spec) if quantised else {}), True
        for spec in (indexer_specs.PREFILL[-1], *indexer_specs.MILLION):
            select = partial(lightning_indexer, top_k=spec.top_k, two_stage=TwoStage(), implementation="tpu")
            name = f"two_stage{'_mxfp8' if quantised else ''}/{spec.name}"
            yield name, select, spec.arguments() | (quantised_vectors(spec) if quantised else {}), False


def experts(spec: grouped_specs.GroupedMatmulSpec) -> dict[str, Any]:
    """Abstract arguments of `grouped_matmul`."""
    shape = (spec.groups, spec.out_width)
    weights: Any = Shape((*shape, spec.width), jnp.dtype("bfloat16"))
    if spec.weights == "mxfp4":
        parts = (Shape((*shape, spec.width // part), jnp.dtype("uint8")) for part in (2, BLOCK))
        weights = Mxfp4(*parts)
    return {
        "rows": Shape((spec.rows, spec.width), jnp.dtype("bfloat16")),
        "weights": weights,
        "group_sizes": Shape((spec.groups,), jnp.dtype("int32")),
    }


def packed_latent(spec: mla_specs.MlaSpec) -> dict[str, Any]:
    size = bytes_per_token(spec.latent, spec.slot)
    packed = Shape((spec.batch, spec.keys, size), jnp.dtype("uint8"))
    return {"latent": Fp8Latent(packed, spec.latent, spec.slot)}


def quantised_vectors(spec: indexer_specs.IndexerSpec) -> dict[str, Any]:
    """Queries and keys of the indexer in MXFP8."""

    def quantised(shape: tuple[int, ...]) -> Mxfp8:
        scale = (*shape[:-1], shape[-1] // MXFP8_BLOCK)
        return Mxfp8(Shape(shape, jnp.dtype("float8_e4m3fn")), Shape(scale, jnp.dtype("uint8")))

    arrays = spec.arguments()
    return {name: quantised(tuple(arrays[name].shape)) for name in ("q", "k")}


def measure(function: Any, arguments: dict[str, Any], by_row: bool, topology: str) -> dict[str, float]:
    """Sizes in MiB and the time to trace and compile in seconds."""
    sharding = jax.sharding.SingleDeviceSharding(topology_devices(topology)[0])

    def place(x: Shape) -> Shape:
        where = Format(Layout(tuple(range(x.ndim))), sharding) if by_row else sharding
        return Shape(x.shape, x.dtype, sharding=where)

    placed = jax.tree.map(place, arguments)
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
    print(f"{'program':62} {'chip':6} {'arguments':>10} {'results':>10} {'temporary':>10}  MiB  compile s")
    for name, function, arrays, by_row in programs():
        if arguments.only not in name:
            continue
        for topology in arguments.topologies:
            row = measure(function, arrays, by_row, topology)
            rows.append({"program": name, "topology": topology, **{key: round(x, 3) for key, x in row.items()}})
            print(
                f"{name:62} {topology.split(':')[0]:6} {row['arguments_mib']:10.1f} {row['results_mib']:10.1f} "
                f"{row['temporaries_mib']:10.1f} {row['compile_s']:15.1f}",
                flush=True,
            )
    if arguments.json:
        if arguments.json.exists() and (found := json.loads(arguments.json.read_text()))["versions"] == versions():
            new = {(row["program"], row["topology"]) for row in rows}
            rows = [row for row in found["rows"] if (row["program"], row["topology"]) not in new] + rows
        arguments.json.write_text(json.dumps({"versions": versions(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
