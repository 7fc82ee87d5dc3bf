"""Opening a checkpoint of either format."""

import os
from pathlib import Path

from kimi_jax.checkpoint.converted import ConvertedCheckpoint
from kimi_jax.checkpoint.errors import CheckpointError
from kimi_jax.checkpoint.manifest import read_marker
from kimi_jax.checkpoint.marks import RANDOM
from kimi_jax.checkpoint.reader import CheckpointReader

Checkpoint = CheckpointReader | ConvertedCheckpoint


def open_checkpoint(directory: str | os.PathLike[str]) -> Checkpoint:
    """Opens a Hugging Face directory or a converted one.

    Raises:
        CheckpointError: it isn't whole: files are missing or damaged, or writing it hasn't finished.
    """
    directory = Path(directory)
    marker = read_marker(directory) if directory.is_dir() else None
    if marker is not None and not marker.complete:
        raise CheckpointError(
            f"{directory} holds a checkpoint whose writing hasn't finished; run the command that wrote it again, and it "
            "goes on."
        )
    if marker is not None and marker.format == "orbax":
        return ConvertedCheckpoint(directory)
    return CheckpointReader(directory)


def is_random(checkpoint: Checkpoint) -> bool:
    """Whether the weights are random numbers in place of trained ones, as `kimi-jax init` writes them."""
    if isinstance(checkpoint, ConvertedCheckpoint):
        return checkpoint.marker.random
    return any(RANDOM in file.metadata for file in checkpoint.files)
