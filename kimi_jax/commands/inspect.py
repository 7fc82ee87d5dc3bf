"""Says what a checkpoint holds and whether it fits its config; the exit status is 1 when it doesn't."""

import argparse

HELP = "say what a checkpoint holds and whether it fits its config"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.add_argument("directory", help="Hugging Face or converted directory")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--mesh", metavar="AXIS=N,...", help="estimate bytes per device on this mesh, as in expert=8,tensor=4"
    )
    parser.add_argument("--verify", action="store_true", help="also read every tensor and compare its checksum")


def run(arguments: argparse.Namespace) -> int:
    """Inspects, and prints what was found."""
    import json

    import jax

    jax.config.update("jax_platforms", "cpu")
    from kimi_jax.checkpoint.inspection import inspect
    from kimi_jax.checkpoint.opened import open_checkpoint
    from kimi_jax.checkpoint.verify import verify
    from kimi_jax.sharding import parse_mesh

    mesh = None if arguments.mesh is None else parse_mesh(arguments.mesh)
    found = inspect(arguments.directory, mesh=mesh)
    print(json.dumps(found.to_dict(), indent=2) if arguments.json else found)
    if arguments.verify and found.ok:
        verify(open_checkpoint(found.directory))
    return 0 if found.ok else 1
