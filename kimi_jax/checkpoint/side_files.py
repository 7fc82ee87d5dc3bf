"""The small files beside the weights: which ones travel with a checkpoint, and copying them."""

import os
import shutil
from pathlib import Path

from kimi_jax.checkpoint.errors import CheckpointError
from kimi_jax.checkpoint.manifest import MARKER, sync_directory
from kimi_jax.checkpoint.reader import INDEX_NAME, link_target

CONFIG = "config.json"
# Text and data. Code (.py) and pickles (.bin, .pt, .pkl) are neither read nor copied.
SUFFIXES = (".json", ".jsonl", ".jinja", ".md", ".model", ".tiktoken", ".txt")
LARGEST = 256 * 2**20


def side_files(directory: Path) -> list[Path]:
    """Files that belong to a checkpoint besides its weights, its config last.

    Raises:
        CheckpointError: one of them is a link that leads out of the directory, or is too large to be what it claims.
    """
    found = []
    for path in sorted(directory.iterdir()):
        if path.name.startswith(".") or path.name in (MARKER, INDEX_NAME, CONFIG):
            continue
        if not (path.suffix in SUFFIXES or path.name.upper().startswith("LICENSE")) or not path.is_file():
            continue
        found.append(path)
    config = directory / CONFIG
    found += [config] if config.is_file() else []
    for path in found:
        _, obstacle = link_target(directory, path.name)
        if obstacle is not None:
            raise CheckpointError(f"{path} is {obstacle}.")
        if path.stat().st_size > LARGEST:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes; at most {LARGEST} are copied.")
    return found


def copy_side_files(source: Path, destination: Path) -> None:
    """Copies them; each appears complete or not at all, the config last.

    Raises:
        CheckpointError: as `side_files`.
        OSError: one can't be written.
    """
    for path in side_files(source):
        partial = destination / f".{path.name}.partial"
        shutil.copyfile(path, partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(destination / path.name)
    sync_directory(destination)
