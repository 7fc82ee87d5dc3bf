"""Writes a checkpoint with random weights in the released layout, for trying things out; it is marked as random."""

import argparse

HELP = "write a checkpoint with random weights"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.add_argument("config", help="config.json, or a directory with one (whose tokenizer is copied too)")
    parser.add_argument("directory", help="new or empty directory")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers (default: 0)")
    parser.add_argument("--shard-mib", type=int, default=4096, metavar="N", help="largest file in MiB (default: 4096)")
    parser.add_argument("--quiet", action="store_true", help="print errors only")


def run(arguments: argparse.Namespace) -> int:
    """Writes the checkpoint."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    from kimi_jax.checkpoint.random_weights import init_random

    init_random(
        arguments.config,
        arguments.directory,
        seed=arguments.seed,
        shard_bytes=arguments.shard_mib * 2**20,
        progress=not arguments.quiet,
    )
    return 0
