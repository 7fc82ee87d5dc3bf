"""The command line: parses, calls the library, prints."""

import argparse
import importlib
import sys
from collections.abc import Sequence

COMMANDS = ("demo", "generate", "chat", "convert", "inspect", "init", "plan")
"""Modules of `kimi_jax.commands`, in the order in which help lists them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `kimi-jax`; returns the exit status: 0, 1 for a failure that was explained, 130 when it was interrupted."""
    parser = argparse.ArgumentParser(
        prog="kimi-jax", description="Kimi K3, Kimi K3.1 Pro and Kimi-Linear-48B in JAX: checkpoints and text."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules = {}
    for name in COMMANDS:
        module = modules[name] = importlib.import_module(f"kimi_jax.commands.{name}")
        module.add_arguments(commands.add_parser(name, help=module.HELP, description=module.__doc__))
    parsed = parser.parse_args(arguments)
    try:
        return modules[parsed.command].run(parsed)
    except KeyboardInterrupt:
        print("kimi-jax: interrupted.", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        # What the library raises on purpose: full sentences that name what is wrong.
        print(f"kimi-jax: error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
