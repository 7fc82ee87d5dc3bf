"""Recognising a checkpoint: whether a conversion goes on from what it began with."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from kimi_jax.checkpoint.manifest import PIECES, Marker, piece_name
from kimi_jax.checkpoint.reader import CheckpointReader


@dataclass(frozen=True)
class Fingerprint:
    """What identifies a source.

    Attributes:
        structure: of names, types, shapes, places of all tensors, and of the config.
        times: of when each file was last written; copies differ.
    """

    structure: str
    times: str

    def __str__(self) -> str:
        return f"{self.structure}:{self.times}"

    @staticmethod
    def parse(text: str) -> "Fingerprint":
        """Reads what `str` wrote."""
        structure, _, times = text.partition(":")
        return Fingerprint(structure, times)


def of_huggingface(reader: CheckpointReader) -> Fingerprint:
    """Of a Hugging Face directory, from its headers."""
    structure, times = hashlib.sha256(), hashlib.sha256()
    structure.update((reader.directory / "config.json").read_bytes())
    for file in reader.files:
        entries = [[name, file.dtype(name).name, file.shape(name)] for name in file.names()]
        structure.update(json.dumps([file.path.name, sorted(file.metadata.items()), entries]).encode())
        times.update(str(os.stat(file.path).st_mtime_ns).encode())
    return Fingerprint(structure.hexdigest(), times.hexdigest())


def of_converted(directory: Path, marker: Marker) -> Fingerprint:
    """Of a converted directory, from its records, which hold the checksums of all tensors."""
    structure = hashlib.sha256(marker.source.encode())
    structure.update((directory / "config.json").read_bytes())
    for number in range(marker.pieces):
        structure.update((directory / PIECES / f"{piece_name(number)}.json").read_bytes())
    return Fingerprint(structure.hexdigest(), "")
