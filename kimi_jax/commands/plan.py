"""Chooses a mesh for a model on devices that needn't be there, compiles its programs for them, and says what they need.

The exit status is 1 when something doesn't fit. Nothing is run and no weights are read. Topologies of TPUs are written
KIND:CHIPS along each dimension (v5e:4x4, v6e:2x2, v5p:8x8x8, tpu7x:4x4x4), GPUs of one host KIND:NUMBER (h200:8); for
these only estimates exist. Without any phase's options, a prefill and a decode step of usual sizes are planned.
"""

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kimi_jax.config import KimiConfig
    from kimi_jax.planning.step_cost import Workload

HELP = "choose a mesh and compile for devices that aren't there: memory and time of each step"

PREFILL_TOKENS, DECODE_SLOTS, TRAIN_ROWS, TRAIN_TOKENS = 32768, 16, 64, 4096
"""What is planned where options don't say."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.add_argument("config", help="config.json, a directory with one, or a name such as kimi-k31-pro")
    parser.add_argument("--topology", required=True, metavar="KIND:SHAPE", help="such as v5p:8x8x8, v5e:4x4 or h200:8")
    parser.add_argument(
        "--mesh", default="auto", metavar="AXIS=N,...", help="such as context=4,expert=16,tensor=8 (default: auto)"
    )
    parser.add_argument(
        "--phases", metavar="NAME,...", help="of prefill, decode and train (default: those whose options are given)"
    )
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument("--prefill-tokens", type=int, metavar="N", help=f"of each prompt (default: {PREFILL_TOKENS})")
    sizes.add_argument(
        "--prefill-pieces", type=int, metavar="N", help="steps that a prompt takes, a piece of it each (default: 1)"
    )
    sizes.add_argument("--prefill-rows", type=int, metavar="N", help="prompts at once (default: 1)")
    sizes.add_argument("--decode-slots", type=int, metavar="N", help=f"rows decoded at once (default: {DECODE_SLOTS})")
    sizes.add_argument("--context", type=int, metavar="N", help="places of each slot (default: those of a prompt)")
    sizes.add_argument("--train-rows", type=int, metavar="N", help=f"rows of a batch (default: {TRAIN_ROWS})")
    sizes.add_argument("--train-tokens", type=int, metavar="N", help=f"of each row (default: {TRAIN_TOKENS})")
    sizes.add_argument("--kv-cache", choices=("bfloat16", "fp8"), help="what latents are kept in (default: bfloat16)")
    sizes.add_argument(
        "--index-cache", choices=("bfloat16", "mxfp8"), help="what index keys are kept in (default: bfloat16)"
    )
    parser.add_argument("--estimate", action="store_true", help="choose only; compile nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report as JSON")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also write a picture of the memory")
    parser.add_argument("--quiet", action="store_true", help="print the report and errors only")


def run(arguments: argparse.Namespace) -> int:
    """Plans, and prints what was found."""
    import json
    import sys

    import jax

    jax.config.update("jax_platforms", "cpu")
    from kimi_jax.planning.chips import CHIPS
    from kimi_jax.planning.configs import find_config
    from kimi_jax.planning.strategy import plan_mesh
    from kimi_jax.planning.topology import parse_topology
    from kimi_jax.sharding import parse_mesh
    from kimi_jax.startup import cache_in_words

    name, config = find_config(arguments.config)
    works = workloads(arguments, config)
    mesh = None if arguments.mesh == "auto" else parse_mesh(arguments.mesh)
    switches = "|".join(kind for kind, chip in CHIPS.items() if chip.fabric == "switch")
    gpus = re.fullmatch(rf"({switches}):([1-9][0-9]{{0,3}})", arguments.topology)
    topology = None if gpus else parse_topology(arguments.topology)
    if arguments.svg is not None and (topology is None or arguments.estimate):
        raise ValueError("--svg needs compiled programs; leave out --estimate, and name a TPU topology.")
    if topology is None and gpus is not None:
        plan = plan_mesh(config, CHIPS[gpus[1]], works, devices=int(gpus[2]), mesh=mesh)
    else:
        assert topology is not None
        plan = plan_mesh(config, topology, works, mesh=mesh)
    print(f"{name} on {arguments.topology}\n{plan}", flush=True)
    if any(work.context for work in works):
        cached = next(work.format for work in works if work.context)
        print(f"  Caches: {cache_in_words(config, 'bfloat16', cached)}.", flush=True)
    found, fits = {"strategy": plan.to_dict()}, plan.chosen.fits
    picture = None
    if topology is None or arguments.estimate:
        if topology is None:
            print("  Programs aren't compiled: that needs a TPU topology, or the GPUs themselves.")
    else:
        from kimi_jax.planning.compile import compile_plan

        def progress(line: str) -> None:
            if not arguments.quiet:
                print(f"kimi_jax: {line}", file=sys.stderr, flush=True)

        report = compile_plan(plan, topology, name, progress=progress)
        print(f"\n{report}")
        found, fits, picture = report.to_dict() | found, report.fits, report.to_svg()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")
    if arguments.svg is not None and picture is not None:
        arguments.svg.write_text(picture)
    return 0 if fits else 1


def workloads(arguments: argparse.Namespace, config: "KimiConfig") -> "list[Workload]":
    """The phases that the arguments ask for.

    Raises:
        ValueError: an unknown phase, an option of a phase that isn't planned, or a size that isn't legal.
    """
    from kimi_jax.planning.step_cost import Workload

    options = {
        "prefill": ("prefill_tokens", "prefill_pieces", "prefill_rows"),
        "decode": ("decode_slots", "context"),
        "train": ("train_rows", "train_tokens"),
    }
    given = {phase: [o for o in names if getattr(arguments, o) is not None] for phase, names in options.items()}
    if arguments.phases is None:
        phases = [phase for phase, names in given.items() if names] or ["prefill", "decode"]
    else:
        phases = [part.strip() for part in arguments.phases.split(",")]
        unknown = [phase for phase in phases if phase not in options]
        if unknown or len(set(phases)) < len(phases):
            raise ValueError(f"--phases {arguments.phases!r}; it must name some of {', '.join(options)}, each once.")
        unused = [o for phase, names in given.items() if phase not in phases for o in names]
        if unused:
            raise ValueError(f"--{unused[0].replace('_', '-')} has no effect with --phases {arguments.phases}.")
    for option in (o for names in given.values() for o in names):
        if getattr(arguments, option) < 1:
            raise ValueError(f"--{option.replace('_', '-')} {getattr(arguments, option)}; it must be 1 or more.")

    def sized(option: str, default: int) -> int:
        value = getattr(arguments, option)
        return default if value is None else int(value)

    prompt = sized("prefill_tokens", min(PREFILL_TOKENS, config.max_position_embeddings))
    pieces = sized("prefill_pieces", 1)
    if prompt % pieces:
        raise ValueError(f"--prefill-pieces {pieces}; it must divide the {prompt} tokens of a prompt.")
    kept: dict[str, Any] = {"kv_cache": arguments.kv_cache, "index_cache": arguments.index_cache}
    if phases == ["train"] and any(kept.values()):
        raise ValueError("--kv-cache and --index-cache have no effect on a training step, which has no caches.")
    every = {
        "prefill": lambda: Workload("prefill", sized("prefill_rows", 1), prompt // pieces, prompt, **kept),
        "decode": lambda: Workload("decode", sized("decode_slots", DECODE_SLOTS), 1, sized("context", prompt), **kept),
        "train": lambda: Workload("train", sized("train_rows", TRAIN_ROWS), sized("train_tokens", TRAIN_TOKENS), 0),
    }
    works = [every[phase]() for phase in phases]
    for work in works:
        work.check(config)
    return works
