"""Reading a converted checkpoint: the records, and any box of any parameter or any original tensor."""

import os
from collections import defaultdict
from collections.abc import Iterator, KeysView
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kimi_jax.checkpoint.boxes import Box
from kimi_jax.checkpoint.errors import CheckpointError
from kimi_jax.checkpoint.locate import packed_shapes, raise_if
from kimi_jax.checkpoint.manifest import (
    MARKER,
    EmptyTensor,
    Marker,
    Part,
    Piece,
    StoredArray,
    StoredTensor,
    piece_name,
    read_marker,
    read_piece,
)
from kimi_jax.checkpoint.safetensors_format import shown
from kimi_jax.checkpoint.store import ArrayStore, piece_directory
from kimi_jax.checkpoint.values import checksum, empty
from kimi_jax.params import Params, named_specs


class Share(NamedTuple):
    """What one array holds of a tensor: `box` of the array, which is the tensor itself or some of its rows."""

    piece: str
    array: StoredArray
    tensor: StoredTensor
    box: Box


class ConvertedCheckpoint:
    """A finished directory that `convert` has written.

    Opening it reads the records and checks that every file has its size; arrays are read when they're asked for.

    Attributes:
        directory: the directory.
        marker: what it says about itself.
        pieces: its pieces, in order.

    Raises:
        CheckpointError: the conversion isn't finished, or records or files are missing or damaged; all are listed.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        marker = read_marker(self.directory)
        if marker is None or marker.format != "orbax":
            raise CheckpointError(
                f"{self.directory} holds no converted checkpoint: {MARKER} is missing or says otherwise."
            )
        if not marker.complete:
            raise CheckpointError(
                f"{self.directory} holds a conversion that hasn't finished; run the same command again to continue it."
            )
        self.marker: Marker = marker
        self._store = ArrayStore(self.directory)
        self._shares: dict[str, list[Share]] = defaultdict(list)
        self._arrays: dict[tuple[str, Part, int | None], list[tuple[str, StoredArray]]] = defaultdict(list)
        self._empty: dict[str, EmptyTensor] = {tensor.name: tensor for tensor in marker.empty}
        self.pieces: list[Piece] = []
        problems: list[str] = []
        for number in range(marker.pieces):
            name = piece_name(number)
            piece = read_piece(self.directory, name, len(marker.files))
            if piece is None:
                problems.append(f"the record of piece {name} is missing.")
                continue
            problems += missing_files(self.directory, piece)
            self.pieces.append(piece)
            for array in piece.arrays:
                if array.param is not None:
                    self._arrays[array.param, array.part, array.layer].append((name, array))
                for share in _shares(name, array):
                    self._shares[share.tensor.name].append(share)
        raise_if(problems, f"{self.directory} is damaged")

    # The original tensors.

    def names(self) -> KeysView[str]:
        """Names of the original tensors."""
        return dict.fromkeys([*self._shares, *self._empty]).keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of an original tensor, padding included."""
        return self._empty[name].shape if name in self._empty else self._share(name).tensor.shape

    def dtype(self, name: str) -> np.dtype:
        """Element type of an original tensor."""
        return self._empty[name].dtype if name in self._empty else self._share(name).array.dtype

    def file_of(self, name: str) -> Path:
        """The folder of the piece that holds a tensor (for a large one, its first rows)."""
        return self.directory if name in self._empty else piece_directory(self.directory, self._share(name).piece)

    def shares(self, name: str) -> list[Share]:
        """Where a tensor's bytes are, in order."""
        return self._shares[name]

    def read_share(self, share: Share) -> np.ndarray:
        """What one array holds of a tensor, in the stored type, as the array lays it out."""
        out = empty(share.box.shape[share.array.stack :], share.array.dtype)
        self.read_array(share.piece, share.array, share.box, out.reshape(share.box.shape))
        return out

    def read_tensor(self, name: str) -> np.ndarray:
        """An original tensor, byte for byte.

        Raises:
            CheckpointError: there is no such tensor, or it can't be read.
        """
        if name in self._empty:
            return np.empty(self._empty[name].shape, self._empty[name].dtype)
        shape, dtype = self.shape(name), self.dtype(name)
        flat = np.zeros(int(np.prod(shape)), dtype)
        begin = 0
        for share in self._shares[name]:
            values = self.read_share(share).reshape(-1)
            flat[begin : begin + values.size] = values
            begin += values.size
        return flat.reshape(shape)

    # Parameters.

    def check_parameters(self, specs: Params) -> None:
        """Refuses records whose arrays don't make up every parameter exactly.

        Raises:
            CheckpointError: listing the parameters with gaps, overlaps or parts past their end.
        """
        problems: list[str] = []
        known: set[tuple[str, Part, int | None]] = set()
        for path, spec in named_specs(specs).items():
            rest = spec.shape if spec.layers is None else spec.shape[1:]
            parts: tuple[tuple[Part, tuple[int, ...]], ...] = (("values", rest),)
            layers = [None] if spec.layers is None else list(range(len(spec.layers)))
            if (path, "packed", layers[0]) in self._arrays:
                codes, scales = packed_shapes(rest)
                parts = (("packed", codes), ("scale", scales))
            for layer in layers:
                for part, shape in parts:
                    known.add((path, part, layer))
                    boxes = [array.box for _, array in self._arrays.get((path, part, layer), [])]
                    if not _cover(boxes, shape):
                        problems.append(
                            f"{path}, layer {layer}, {part}: its arrays don't make up {list(shape)} exactly."
                        )
        problems += [f"{param}, layer {layer}, {part}: unknown." for param, part, layer in self._arrays.keys() - known]
        raise_if(problems, f"{self.directory} doesn't fit its config.json")

    def is_packed(self, path: str, layer: int | None) -> bool:
        """Whether a parameter is held as MXFP4."""
        return (path, "packed", layer) in self._arrays

    def stored_dtypes(self, path: str, part: Part, layer: int | None) -> set[np.dtype]:
        """Element types of a parameter's arrays."""
        return {array.dtype for _, array in self._arrays[path, part, layer]}

    def read_box(self, path: str, part: Part, layer: int | None, box: Box, out: np.ndarray) -> None:
        """Copies a box of one layer's parameter into `out`, converting values to its type.

        Raises:
            CheckpointError: an array can't be read.
        """
        for piece, array in self._arrays[path, part, layer]:
            shared = box.intersect(array.box)
            if shared is not None:
                self.read_array(piece, array, shared.within(array.box), out[shared.within(box).slices])

    @property
    def bytes_read(self) -> int:
        """Bytes read from the arrays' files."""
        return self._store.bytes_read

    def read_array(self, piece: str, array: StoredArray, box: Box, out: np.ndarray) -> None:
        """Copies a box of one array, in its own coordinates, into `out`.

        Raises:
            CheckpointError: the array can't be read.
        """
        self._store.read(piece, array.key, (array.box.shape, array.dtype), box, out)

    def _share(self, name: str) -> Share:
        if name not in self._shares:
            raise CheckpointError(f"{self.directory} holds no tensor {shown(name)}.")
        return self._shares[name][0]


def missing_files(directory: Path, piece: Piece) -> list[str]:
    """What is wrong with the files of a piece, by their sizes."""
    problems = []
    for file, size in piece.files.items():
        path = directory / file
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            problems.append(f"{path} {'is missing' if found is None else f'has {found} bytes'}; {size} were written.")
    return problems


def verify_share(checkpoint: ConvertedCheckpoint, share: Share) -> str | None:
    """What is wrong with the bytes of a tensor in one array, or None when they're those that were converted."""
    try:
        found = checksum(checkpoint.read_share(share))
    except CheckpointError as error:
        return str(error)
    if found == share.tensor.checksum:
        return None
    return (
        f"{piece_directory(checkpoint.directory, share.piece)}: {share.tensor.name} has checksum {found:08x}; "
        f"{share.tensor.checksum:08x} was recorded. The data is damaged."
    )


def _shares(piece: str, array: StoredArray) -> Iterator[Share]:
    rest = array.box.shape[array.stack :]
    places = np.ndindex(*array.box.shape[: array.stack])
    for place, tensor in zip(places, array.tensors, strict=True):
        yield Share(piece, array, tensor, Box((*place, *(0 for _ in rest)), (*(1 for _ in place), *rest)))


def _cover(boxes: list[Box], shape: tuple[int, ...]) -> bool:
    """Whether boxes are consecutive runs of an array's elements, in row-major order, from its first to its last."""
    whole = Box.whole(shape)
    if any(len(box.shape) != len(shape) or not box.is_run(shape) for box in boxes):
        return False
    end = 0
    for box in sorted(boxes, key=lambda box: box.start):
        if box.first(shape) != end:
            return False
        end += box.size
    return end == whole.size
