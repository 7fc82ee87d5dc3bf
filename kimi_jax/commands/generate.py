"""Continues a text, and prints what is new as it comes."""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from kimi_jax.commands import model_arguments

HELP = "continue a text"

if TYPE_CHECKING:
    from kimi_jax import Generation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    model_arguments.add_arguments(parser)
    parser.add_argument("prompt", nargs="?", help="the text; - or nothing reads it from standard input")
    parser.add_argument("--token-ids", metavar="N,N,...", help="a prompt of token ids in place of a text")
    parser.add_argument("--top-logprobs", type=int, metavar="N", help="with --json: this many a token")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")


def run(arguments: argparse.Namespace) -> int:
    """Generates."""
    changes = model_arguments.sampling_changes(arguments)
    if arguments.top_logprobs is not None and not arguments.json:
        raise ValueError("--top-logprobs is printed with --json only.")
    if arguments.json:
        changes |= {"logprobs": True, "top_logprobs": arguments.top_logprobs or 0}
    prompt = read_prompt(arguments)
    with model_arguments.memory_explained():
        return generate(arguments, prompt, changes)


def generate(arguments: argparse.Namespace, prompt: Any, changes: dict[str, Any]) -> int:
    """Loads the model and generates."""
    model = model_arguments.load(arguments)
    output = model_arguments.Output(sys.stdout)
    result = None
    for piece in model.stream(prompt, **changes):
        result = piece.result
        if not arguments.json:
            output.write(str(piece) if piece.text is not None else "".join(f"{token} " for token in piece.token_ids))
    assert result is not None
    if arguments.json:
        import json

        output.write(json.dumps(as_json(result), ensure_ascii=False))
    output.end_line()
    if not arguments.quiet:
        print(f"kimi-jax: {summary(result)}", file=sys.stderr)
    return 0


def read_prompt(arguments: argparse.Namespace) -> Any:
    """The prompt: text or token ids.

    Raises:
        ValueError: there is none, there are two, or the ids aren't numbers.
    """
    if arguments.token_ids is not None:
        if arguments.prompt is not None:
            raise ValueError("there are a prompt and --token-ids; give one of them.")
        parts = [part.strip() for part in arguments.token_ids.split(",")]
        if not all(part.isascii() and part.isdigit() for part in parts):
            raise ValueError(f"--token-ids {arguments.token_ids!r} must be whole numbers with commas between them.")
        return [int(part) for part in parts]
    if arguments.prompt not in (None, "-"):
        return arguments.prompt
    if arguments.prompt is None and sys.stdin.isatty():
        raise ValueError("there is no prompt: give it as an argument, or on standard input.")
    return sys.stdin.read()


def summary(result: "Generation") -> str:
    """One line about how it went."""
    timings = result.timings
    line = f"{len(result.token_ids)} new tokens after {result.prompt_tokens} of the prompt, ended by "
    line += "max_new_tokens" if result.finish_reason == "length" else f"{result.stopped_by!r}"
    if timings is not None:
        line += f"; first token after {timings.prefill_seconds:.3f} s"
        line += "" if timings.tokens_per_second is None else f", then {timings.tokens_per_second:,.1f} tokens/s"
        line += f"; compiling took {timings.compile_seconds:.1f} s" if timings.compile_seconds else ""
    return line


def as_json(result: "Generation") -> dict[str, Any]:
    """A result as JSON values."""
    from dataclasses import asdict

    return asdict(result)
