"""Prints the meshes that the planner chooses for the full models, as the table of `docs/parallelism.md`; compiles nothing.

python -m benchmarks.plans
"""

import jax

from kimi_jax.planning.chips import GIB, chip_named
from kimi_jax.planning.configs import find_config
from kimi_jax.planning.step_cost import Workload
from kimi_jax.planning.strategy import PlanError, plan_mesh

PLACES: tuple[tuple[str, int], ...] = (
    ("h100", 8),
    ("h200", 8),
    ("v6e", 4),
    ("v5e", 16),
    ("v5p", 128),
    ("v6e", 256),
    ("v5p", 512),
    ("tpu7x", 128),
)
MODELS = ("kimi-linear-48b-a3b", "kimi-k3", "kimi-k31-pro")
PROMPT, SLOTS, CONTEXT = 32768, 16, 32768


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    print(f"| model | devices | mesh | prefill of {PROMPT:,} | decode of {SLOTS} slots at {CONTEXT:,} | GiB a device |")
    print("|---|---|---|---|---|---|")
    works = [Workload("prefill", 1, PROMPT, PROMPT), Workload("decode", SLOTS, 1, CONTEXT)]
    for name in MODELS:
        config = find_config(name)[1]
        for kind, count in PLACES:
            try:
                plan = plan_mesh(config, chip_named(kind), works, devices=count)
            except PlanError:
                continue
            if name == MODELS[0] and count > 16:
                continue
            mesh = ", ".join(f"{axis}={size}" for axis, size in plan.sizes.items() if size > 1)
            prefill, decode = (step.seconds * 1e3 for step in plan.chosen.steps)
            print(
                f"| {name} | {count} {kind} | {mesh} | {prefill:.3g} ms | {decode:.3g} ms | "
                f"{plan.chosen.peak / GIB:.1f} of {plan.chosen.limit / GIB:.1f} |"
            )


if __name__ == "__main__":
    main()
