"""Converts a Hugging Face checkpoint to Orbax, or back. The same command continues an interrupted run."""

import argparse
from typing import TYPE_CHECKING

HELP = "convert a Hugging Face checkpoint to Orbax, or back"

if TYPE_CHECKING:
    from kimi_jax.checkpoint.convert import Conversion


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.add_argument("source", help="directory to read, kimi-tiny, or owner/name on the Hugging Face hub")
    parser.add_argument("destination", help="new or empty directory, or one that an interrupted run has left")
    parser.add_argument("--to", choices=("orbax", "hf"), default="orbax", help="format to write (default: orbax)")
    parser.add_argument("--verify", action="store_true", help="read the result again and compare its checksums")
    parser.add_argument(
        "--array-mib",
        type=int,
        default=128,
        metavar="N",
        help="largest array in MiB; memory needed is about 1 GiB plus five times this (default: 128)",
    )
    parser.add_argument("--quiet", action="store_true", help="print errors only")


def run(arguments: argparse.Namespace) -> int:
    """Converts, and says what was done."""
    import jax

    # Converting needs no accelerator, and shouldn't take one from somebody who does.
    jax.config.update("jax_platforms", "cpu")
    from kimi_jax.checkpoint.convert import convert

    result = convert(
        arguments.source,
        arguments.destination,
        to=arguments.to,
        verify=arguments.verify,
        array_bytes=arguments.array_mib * 2**20,
        progress=not arguments.quiet,
    )
    if not arguments.quiet:
        print(describe(result))
    return 0


def describe(result: "Conversion") -> str:
    """One line about a conversion."""
    from kimi_jax.checkpoint.progress import amount, duration

    done = (
        "was finished already"
        if not result.written
        else f"wrote {amount(result.written)} in {duration(result.seconds)}"
    )
    verified = ", every checksum verified" if result.verified else ""
    return f"{result.directory}: {result.tensors:,} tensors, {amount(result.nbytes)}; {done}{verified}."
