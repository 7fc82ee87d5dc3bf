"""Subcommands of `kimi-jax`, one module each.

A module has `HELP`, a line; `add_arguments(parser)`; and `run(arguments) -> int`, the exit status. It imports what it
needs inside `run`, so that `--help` is quick, and gets its entry in `kimi_jax.cli.COMMANDS`.
"""
