"""The records that tell a finished checkpoint of ours from a half-written one, and what each of its arrays holds.

`kimi_jax.json` stands at the top of a directory. It is written first with `complete` false and replaced, last of all,
by one with `complete` true; both times by renaming a finished file. A converted directory has one record a piece
besides, `pieces/NNNNNN.json`, written when the piece's arrays are on disk.
"""

import json
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np

from kimi_jax import strict_json
from kimi_jax.checkpoint.boxes import Box
from kimi_jax.checkpoint.errors import CheckpointError
from kimi_jax.checkpoint.reader import is_file_name
from kimi_jax.checkpoint.safetensors_format import DTYPES

MARKER = "kimi_jax.json"
PIECES = "pieces"
ARRAYS = "arrays"
VERSION = 1

Format = Literal["orbax", "huggingface"]
Part = Literal["values", "packed", "scale", "tensor"]

_LARGEST_MARKER = 256 * 2**20
_LARGEST_PIECE = 64 * 2**20
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PIECE_NAME = re.compile(r"\d{6}")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a Hugging Face checkpoint, or the rows of it that one array holds.

    Attributes:
        name: its name there.
        shape: its shape there, padding included.
        file: which of the original files held it.
        checksum: CRC-32 of its bytes in the array, or None before they were read.
    """

    name: str
    shape: tuple[int, ...]
    file: int
    checksum: int | None = None


@dataclass(frozen=True)
class StoredArray:
    """One array of a converted checkpoint: part of one parameter of one layer, or of a tensor outside the decoder.

    Attributes:
        key: its name in the piece.
        param: dotted path of the parameter, or None for a tensor that the decoder doesn't use.
        part: `values`; `packed` or `scale` of MXFP4; `tensor` for one outside the decoder.
        layer: place in the parameter's stack of layers, or None.
        box: where the array lies in the parameter (in its part, without the layer axis).
        dtype: of the elements.
        stack: leading axes of the box that count tensors.
        tensors: the tensors in it, in row-major order of those axes.
    """

    key: str
    param: str | None
    part: Part
    layer: int | None
    box: Box
    dtype: np.dtype
    stack: int
    tensors: tuple[StoredTensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return self.box.size * self.dtype.itemsize

    def to_json(self) -> dict[str, Any]:
        """As it stands in a record."""
        return {
            "key": self.key,
            "param": self.param,
            "part": self.part,
            "layer": self.layer,
            "start": list(self.box.start),
            "shape": list(self.box.shape),
            "dtype": _DTYPE_NAMES[self.dtype],
            "stack": self.stack,
            "tensors": [[tensor.name, list(tensor.shape), tensor.file, tensor.checksum] for tensor in self.tensors],
        }


@dataclass(frozen=True)
class EmptyTensor:
    """A tensor without elements, of which there is nothing to store."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    file: int


@dataclass(frozen=True)
class Piece:
    """Arrays that are written together, and the sizes of the files that they became."""

    name: str
    arrays: tuple[StoredArray, ...]
    files: Mapping[str, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def num_tensors(self) -> int:
        """Tensors whose first elements are in the piece, so that one in several pieces counts once."""
        return sum(len(array.tensors) for array in self.arrays if not any(array.box.start[array.stack :]))


@dataclass(frozen=True)
class Marker:
    """What `kimi_jax.json` says.

    Attributes:
        format: of the directory.
        complete: whether writing has finished.
        random: whether the weights are random numbers, made for tests.
        source: what the directory is made from; a run that continues must find the same.
        array_bytes: largest array of a converted checkpoint.
        pieces: number of pieces of a converted checkpoint.
        files: names of the safetensors files: of the original for a converted checkpoint, else its own.
        metadata: what every one of those files carries besides tensors.
        empty: tensors without elements.
        checksums: CRC-32 of each tensor of a finished Hugging Face directory, by name.
    """

    format: Format
    complete: bool
    random: bool = False
    source: str = ""
    array_bytes: int = 0
    pieces: int = 0
    files: tuple[str, ...] = ()
    metadata: tuple[Mapping[str, str], ...] = ()
    empty: tuple[EmptyTensor, ...] = ()
    checksums: Mapping[str, int] = field(default_factory=dict)

    def write(self, directory: Path) -> None:
        """Replaces the directory's marker, which takes effect all at once."""
        tree: dict[str, Any] = {
            "kimi_jax": VERSION,
            "format": self.format,
            "complete": self.complete,
            "random": self.random,
            "source": self.source,
            "files": list(self.files),
            "metadata": [dict(metadata) for metadata in self.metadata],
        }
        if self.format == "orbax":
            tree |= {
                "array_bytes": self.array_bytes,
                "pieces": self.pieces,
                "empty": [[t.name, list(t.shape), _DTYPE_NAMES[t.dtype], t.file] for t in self.empty],
            }
        else:
            tree["checksums"] = dict(self.checksums)
        write_json(directory / MARKER, tree)


def read_marker(directory: Path) -> Marker | None:
    """The directory's marker, or None when it has none.

    Raises:
        CheckpointError: the file isn't one that this version writes.
    """
    path = directory / MARKER
    tree = _read(path, _LARGEST_MARKER)
    if tree is None:
        return None
    check = _Checker(path, tree)
    version = check.get("kimi_jax", int)
    if version != VERSION:
        raise CheckpointError(f"{path} is of version {version}; this release reads version {VERSION}.")
    kind = check.get("format", str)
    if kind not in ("orbax", "huggingface"):
        raise check.wrong("format", "'orbax' or 'huggingface'")
    files = check.strings("files")
    if any(not is_plain_name(name) or not name.endswith(".safetensors") for name in files):
        raise check.wrong("files", "names of safetensors files")
    metadata = check.get("metadata", list)
    if len(metadata) != len(files) or not all(
        isinstance(one, dict) and all(isinstance(value, str) for value in one.values()) for one in metadata
    ):
        raise check.wrong("metadata", "one object of strings for each file")
    common: dict[str, Any] = {
        "format": kind,
        "complete": check.get("complete", bool),
        "random": check.get("random", bool),
        "source": check.get("source", str),
        "files": files,
        "metadata": tuple(metadata),
    }
    if kind == "huggingface":
        checksums = check.get("checksums", dict)
        if not all(_is_count(value) for value in checksums.values()):
            raise check.wrong("checksums", "an object of whole numbers")
        return Marker(**common, checksums=checksums)
    empty = tuple(
        EmptyTensor(
            name, check.shape("empty", shape), check.dtype("empty", dtype), check.count("empty", file, len(files))
        )
        for name, shape, dtype, file in check.rows("empty", 4)
    )
    return Marker(
        **common,
        array_bytes=check.count("array_bytes", tree.get("array_bytes"), 2**63),
        pieces=check.count("pieces", tree.get("pieces"), 10**6),
        empty=empty,
    )


def write_piece(directory: Path, piece: Piece) -> None:
    """Records that a piece's arrays are on disk, checksums included."""
    write_json(
        directory / PIECES / f"{piece.name}.json",
        {"arrays": [array.to_json() for array in piece.arrays], "files": dict(piece.files)},
    )


def read_piece(directory: Path, name: str, files: int) -> Piece | None:
    """The record of a piece, or None when there is none; `files` is how many files the original had.

    Raises:
        CheckpointError: the record isn't one that this version writes.
    """
    assert _PIECE_NAME.fullmatch(name)
    path = directory / PIECES / f"{name}.json"
    tree = _read(path, _LARGEST_PIECE)
    if tree is None:
        return None
    check = _Checker(path, tree)
    sizes = check.get("files", dict)
    if not all(_is_count(size) and _is_inside(file) for file, size in sizes.items()):
        raise check.wrong("files", "an object of sizes by relative path")
    arrays = tuple(_read_array(path, entry, files) for entry in check.get("arrays", list))
    return Piece(name, arrays, sizes)


def piece_name(number: int) -> str:
    """Folder and record of a piece."""
    return f"{number:06d}"


def is_plain_name(name: str) -> bool:
    """Whether a string from a file names something in a directory, and nothing above or below it."""
    return bool(name) and name not in (".", "..") and not set(name) & {"/", "\\"} and is_file_name(name)


def write_json(path: Path, tree: Mapping[str, Any]) -> None:
    """Writes a file that appears complete or not at all, also after a loss of power."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("x", encoding="utf-8") as file:
            json.dump(tree, file, separators=(",", ":"))
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Brings the names in a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Checker:
    """Reads fields of a record that nobody has vouched for."""

    def __init__(self, path: Path, tree: Mapping[str, Any]) -> None:
        self.path = path
        self.tree = tree

    def wrong(self, key: str, legal: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {key!r} must be {legal}. The file is damaged.")

    def get(self, key: str, kind: type) -> Any:
        value = self.tree.get(key)
        if type(value) is not kind:
            raise self.wrong(
                key, {int: "a whole number", str: "a string", bool: "true or false"}.get(kind, kind.__name__)
            )
        return value

    def count(self, key: str, value: Any, limit: int) -> int:
        if not _is_count(value) or value >= limit:
            raise self.wrong(key, f"a whole number below {limit}")
        return value

    def strings(self, key: str) -> tuple[str, ...]:
        values = self.get(key, list)
        if not all(isinstance(value, str) for value in values):
            raise self.wrong(key, "a list of strings")
        return tuple(values)

    def rows(self, key: str, width: int) -> list[list[Any]]:
        rows = self.get(key, list)
        if not all(isinstance(row, list) and len(row) == width and isinstance(row[0], str) for row in rows):
            raise self.wrong(key, f"a list of lists of {width} that start with a name")
        return rows

    def shape(self, key: str, value: Any) -> tuple[int, ...]:
        if (
            not isinstance(value, list)
            or len(value) > 32
            or not all(_is_count(size) and size < 2**48 for size in value)
        ):
            raise self.wrong(key, "a list of sizes")
        return tuple(value)

    def dtype(self, key: str, value: Any) -> np.dtype:
        dtype = DTYPES.get(value) if isinstance(value, str) else None
        if dtype is None:
            raise self.wrong(key, f"one of {', '.join(DTYPES)}")
        return dtype


def _read_array(path: Path, entry: Any, files: int) -> StoredArray:
    if not isinstance(entry, dict):
        raise _Checker(path, {}).wrong("arrays", "a list of objects")
    check = _Checker(path, entry)
    param, part, layer = entry.get("param"), check.get("part", str), entry.get("layer")
    if part not in ("values", "packed", "scale", "tensor") or (part == "tensor") != (param is None):
        raise check.wrong("part", "'values', 'packed' or 'scale' of a parameter, or 'tensor' without one")
    if not isinstance(param, str | None) or not (layer is None or _is_count(layer)):
        raise check.wrong("param", "a dotted path, and 'layer' a whole number")
    box = Box(check.shape("start", entry.get("start")), check.shape("shape", entry.get("shape")))
    key = check.get("key", str)
    if len(box.start) != len(box.shape) or not box.size or not is_plain_name(key):
        raise check.wrong("shape", "positive sizes, as many as 'start', and 'key' a plain name")
    stack = check.count("stack", entry.get("stack"), len(box.shape) + 1)
    tensors = tuple(
        StoredTensor(
            name,
            check.shape("tensors", shape),
            check.count("tensors", file, files),
            check.count("tensors", checksum, 2**32),
        )
        for name, shape, file, checksum in check.rows("tensors", 4)
    )
    if len(tensors) != Box(box.start[:stack], box.shape[:stack]).size:
        raise check.wrong("tensors", "one for each place of the stack axes")
    return StoredArray(key, param, part, layer, box, check.dtype("dtype", entry.get("dtype")), stack, tensors)


def _read(path: Path, largest: int) -> dict[str, Any] | None:
    try:
        tree = strict_json.load(path, largest=largest)
    except FileNotFoundError:
        return None
    except strict_json.StrictJsonError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path} doesn't hold a JSON object. The file is damaged.")
    return tree


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts and is_file_name(name)
