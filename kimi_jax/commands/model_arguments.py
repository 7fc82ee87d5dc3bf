"""What the commands that run a model have in common: its options, sampling, loading, and writing to a terminal."""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kimi_jax import Kimi
    from kimi_jax.model import Indexing

# What a shell reports for a process that the signal of a closed pipe has ended.
_BROKEN_PIPE = 141

SAMPLING: dict[str, tuple[type, str]] = {
    "max_new_tokens": (int, "most new tokens"),
    "temperature": (float, "0 takes the most probable token (default: 0)"),
    "top_k": (int, "choose among so many most probable tokens"),
    "top_p": (float, "choose among the most probable tokens that have this probability together"),
    "min_p": (float, "leave out tokens below this fraction of the most probable one"),
    "repetition_penalty": (float, "above 1: less of what is there already"),
    "presence_penalty": (float, "above 0: less of what the answer has already"),
    "seed": (int, "the same seed gives the same tokens"),
}
"""Sampling parameters that have an option, its type and its help."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the model, how it is run, and sampling."""
    parser.add_argument(
        "model",
        help="Hugging Face or converted directory, kimi-tiny (which comes with the package), or owner/name on the "
        "Hugging Face hub",
    )
    run = parser.add_argument_group("running")
    run.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="of weights and activations (default: the model's)"
    )
    run.add_argument("--implementation", choices=("reference", "xla", "tpu", "gpu"), help="of every operation")
    run.add_argument(
        "--kv-cache", choices=("bfloat16", "fp8"), help="what latents are kept in (default: the dtype of activations)"
    )
    run.add_argument(
        "--index-cache",
        choices=("bfloat16", "mxfp8"),
        help="what index keys are kept in, of models with an indexer (default: the dtype of activations)",
    )
    run.add_argument(
        "--indexer",
        choices=("exact", "two_stage"),
        default="exact",
        help="two_stage scores the keys of promising blocks only (default: exact)",
    )
    run.add_argument("--index-block-size", type=int, metavar="N", help="keys of a block, with --indexer two_stage")
    run.add_argument("--index-kept-fraction", type=float, metavar="X", help="of the blocks that a query sees, likewise")
    run.add_argument(
        "--index-coarse",
        choices=("linear", "mean", "bound"),
        help="what a block is chosen by, likewise: bound is slower and misses nothing (default: linear)",
    )
    run.add_argument(
        "--mesh",
        metavar="AXIS=N,...",
        help="spread the model over devices, as in expert=4,tensor=2; auto lets the planner decide",
    )
    run.add_argument(
        "--hosts",
        metavar="auto|ADDRESS:PORT,COUNT,NUMBER",
        help="this is one of several processes that run the model together; auto finds the others (TPU pods, SLURM, "
        "Open MPI, Kubernetes)",
    )
    cache = run.add_mutually_exclusive_group()
    cache.add_argument(
        "--compilation-cache",
        metavar="DIR",
        help="where compiled programs are kept (default: kimi_jax/xla in the user's cache folder)",
    )
    cache.add_argument("--no-compilation-cache", action="store_true", help="don't keep compiled programs")
    run.add_argument("--quiet", action="store_true", help="print nothing but the answer, warnings and errors")
    sampling = parser.add_argument_group("sampling")
    for name, (kind, text) in SAMPLING.items():
        sampling.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N" if kind is int else "X", help=text)
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")


def sampling_changes(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given.

    Raises:
        ValueError, TypeError: one is illegal.
    """
    from kimi_jax import SamplingParams

    given = {name: getattr(arguments, name) for name in (*SAMPLING, "stop")}
    changes = {name: value for name, value in given.items() if value is not None}
    SamplingParams.of(None, changes)
    return changes


def connect(arguments: argparse.Namespace) -> None:
    """Joins the other processes, before anything asks for a device; only the first one goes on to print.

    Raises:
        ValueError: `--hosts` has another form, or comes without `--mesh`.
    """
    if arguments.hosts is None:
        return
    from kimi_jax.parallel import hosts

    if arguments.mesh is None:
        raise ValueError("--hosts without --mesh: say how the model is spread over their devices, or --mesh auto.")
    hosts.connect(*hosts.parse_hosts(arguments.hosts))
    if not hosts.is_first():
        arguments.quiet = True
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends


def indexing(arguments: argparse.Namespace) -> "Indexing":
    """How keys are selected.

    Raises:
        ValueError: a number is out of range, or is given without two stages.
    """
    from pallas_kernels.lightning_indexer import TwoStage

    names = {"block_size": "index_block_size", "kept_fraction": "index_kept_fraction", "coarse": "index_coarse"}
    found = {name: getattr(arguments, option) for name, option in names.items()}
    given: dict[str, Any] = {name: value for name, value in found.items() if value is not None}
    if arguments.indexer == "two_stage":
        return TwoStage(**given)
    if given:
        raise ValueError(f"--{names[next(iter(given))].replace('_', '-')} has no effect without --indexer two_stage.")
    return "exact"


def load(arguments: argparse.Namespace) -> "Kimi":
    """Loads the model."""
    connect(arguments)
    from kimi_jax import Kimi
    from kimi_jax.sharding import parse_mesh

    model = Kimi.from_pretrained(
        arguments.model,
        dtype=arguments.dtype,
        mesh=arguments.mesh if arguments.mesh in (None, "auto") else parse_mesh(arguments.mesh),
        implementation=arguments.implementation,
        kv_cache=arguments.kv_cache,
        index_cache=arguments.index_cache,
        indexer=indexing(arguments),
        compilation_cache=arguments.compilation_cache or not arguments.no_compilation_cache,
        progress=not arguments.quiet,
    )
    if model.is_random:
        print("kimi-jax: the weights are random numbers, so what the model says is noise.", file=sys.stderr)
    return model


@contextmanager
def memory_explained() -> Iterator[None]:
    """Turns a device's running out of memory into a sentence.

    Raises:
        ValueError: it did.
    """
    import jax

    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        first = str(error).strip().splitlines()[0]
        raise ValueError(
            f"the device has too little memory for this model, prompt or --max-new-tokens: {first}"
        ) from None


class Output:
    """Writes what a model says, so that it can't do anything to the terminal but be shown.

    Attributes:
        is_terminal: whether somebody is looking.
    """

    def __init__(self, stream: Any):
        self._stream = stream
        self.is_terminal = stream.isatty()
        self._styled = self.is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._at_line_start = True
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            # A character that the terminal's encoding lacks is no reason to stop.
            reconfigure(errors="replace")

    def write(self, text: str, *, dim: bool = False) -> None:
        """Writes text at once; `dim` only shows on a terminal."""
        if not text:
            return
        self._at_line_start = text.endswith("\n")
        text = _harmless(text) if self.is_terminal else text
        try:
            self._stream.write(f"\x1b[2m{text}\x1b[0m" if dim and self._styled else text)
            self._stream.flush()
        except BrokenPipeError:
            # Nobody reads any more (as behind `| head`), which is no error. Python's own flush at the end must not
            # find the closed pipe again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            raise SystemExit(_BROKEN_PIPE) from None

    def end_line(self) -> None:
        """Begins a new line, unless that has just been done."""
        if not self._at_line_start:
            self.write("\n")

    def line(self, text: str, *, dim: bool = False) -> None:
        """Writes text on a line of its own."""
        self.end_line()
        self.write(f"{text}\n", dim=dim)


def _harmless(text: str) -> str:
    """Control characters as their pictures: a terminal would obey them, and a model may be told to write them."""
    return text.translate(_PICTURES)


_PICTURES = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
_PICTURES |= {0x7F: "\u2421"} | {code: "\ufffd" for code in range(0x80, 0xA0)}
