"""Which mesh to run on, and what a program would need on devices that aren't there.

`strategy` chooses a mesh from shapes and published peaks, `compile` compiles its programs ahead of time, the rest counts
what they do and sets it against the peaks. `kimi-jax plan` does all of it.

mesh = topology_mesh("v5p:8x8x8", {"data": 1, "context": 4, "expert": 16, "tensor": 8})
with jax.set_mesh(mesh):
    compiled = jax.jit(step).lower(*abstract_arguments).compile()
print(report_program("decode", compiled, mesh, {"parameters": ...}, tokens_per_step=64, chip=chip_named("v5p")))
"""

from kimi_jax.planning.chips import CHIPS, Chip, chip_named
from kimi_jax.planning.counting import Collective, Counts, UnknownLoop, collectives_of, counts_of
from kimi_jax.planning.report import (
    CollectiveRow,
    FailedProgram,
    Memory,
    PlanReport,
    ProgramReport,
    memory_of,
    peak_rss_bytes,
    render,
    report_failure,
    report_program,
)
from kimi_jax.planning.roofline import Estimate, estimate
from kimi_jax.planning.topology import (
    Topology,
    TopologyError,
    num_devices,
    parse_topology,
    topology_devices,
    topology_mesh,
    versions,
)

__all__ = [
    "CHIPS",
    "Chip",
    "Collective",
    "CollectiveRow",
    "Counts",
    "Estimate",
    "FailedProgram",
    "Memory",
    "PlanReport",
    "ProgramReport",
    "Topology",
    "TopologyError",
    "UnknownLoop",
    "chip_named",
    "collectives_of",
    "counts_of",
    "estimate",
    "memory_of",
    "num_devices",
    "parse_topology",
    "peak_rss_bytes",
    "render",
    "report_failure",
    "report_program",
    "topology_devices",
    "topology_mesh",
    "versions",
]
