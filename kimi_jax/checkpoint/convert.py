"""Converting checkpoints between Hugging Face safetensors and Orbax: streaming, resumable, exact."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kimi_jax.checkpoint.hub import resolve
from kimi_jax.checkpoint.layout import ARRAY_BYTES
from kimi_jax.checkpoint.opened import open_checkpoint
from kimi_jax.checkpoint.to_huggingface import to_huggingface
from kimi_jax.checkpoint.to_orbax import to_orbax
from kimi_jax.checkpoint.verify import verify as verify_checkpoint

SMALLEST_ARRAY_BYTES, LARGEST_ARRAY_BYTES = 2**16, 2**30


@dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    Attributes:
        directory: the finished checkpoint.
        tensors: number of its tensors.
        nbytes: their bytes.
        written: bytes that this run wrote: fewer when it continued an earlier one, 0 when that one had finished.
        seconds: time that it took.
        verified: whether the result was read again and compared with its checksums.
    """

    directory: Path
    tensors: int
    nbytes: int
    written: int
    seconds: float
    verified: bool


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    to: Literal["orbax", "hf"] = "orbax",
    verify: bool = False,
    array_bytes: int = ARRAY_BYTES,
    progress: bool = True,
) -> Conversion:
    """Converts a checkpoint, exactly: every tensor keeps its type and bits in both directions.

    Memory doesn't depend on the size of the checkpoint: at most 1 GiB plus five times the largest array. A run that was
    interrupted, at whatever moment, is continued by the same call. A finished destination is checked and left as it is.
    Nothing in the source is executed, and a destination can't be loaded before it's whole.

    Args:
        source: a Hugging Face directory (or an id on the hub, with the `hub` extra) for `to="orbax"`; a converted
            directory for `to="hf"`.
        destination: a new or empty directory, or one that an interrupted run has left.
        to: the format to write.
        verify: read the result again and compare checksums.
        array_bytes: largest array of the converted checkpoint, 64 KiB to 1 GiB.
        progress: say on standard error what is needed and how far it is.

    Raises:
        ConfigError: config.json isn't one of the family.
        CheckpointError: the source is incomplete, damaged, or doesn't fit its config (everything that is wrong with it
            is listed, and the destination doesn't load); the destination can't be written, is full, holds something
            else, or is being written by another process.
        ValueError: an illegal argument.
    """
    if to not in ("orbax", "hf"):
        raise ValueError(f"to={to!r} is no format; legal are 'orbax' and 'hf'.")
    if not SMALLEST_ARRAY_BYTES <= array_bytes <= LARGEST_ARRAY_BYTES:
        raise ValueError(
            f"array_bytes={array_bytes} must lie between {SMALLEST_ARRAY_BYTES} (64 KiB) and {LARGEST_ARRAY_BYTES} "
            "(1 GiB)."
        )
    began = time.monotonic()
    origin, target = resolve(source, progress=progress), Path(destination)
    if to == "orbax":
        done = to_orbax(origin, target, array_bytes, progress)
    else:
        done = to_huggingface(origin, target, progress)
    if verify:
        verify_checkpoint(open_checkpoint(target), show=progress)
    return Conversion(target, done.tensors, done.nbytes, done.written, time.monotonic() - began, verify)
