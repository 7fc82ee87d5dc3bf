"""From a Hugging Face directory to Orbax, piece by piece."""

import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kimi_jax.checkpoint import fingerprint
from kimi_jax.checkpoint.boxes import Box
from kimi_jax.checkpoint.converted import ConvertedCheckpoint, missing_files
from kimi_jax.checkpoint.destination import check_apart, state, writing
from kimi_jax.checkpoint.errors import CheckpointError
from kimi_jax.checkpoint.layout import Layout, lay_out, tensor_shape
from kimi_jax.checkpoint.locate import check_padding, is_padded, locate, raise_if
from kimi_jax.checkpoint.manifest import (
    ARRAYS,
    PIECES,
    Marker,
    Piece,
    StoredArray,
    StoredTensor,
    read_piece,
    write_piece,
)
from kimi_jax.checkpoint.opened import is_random
from kimi_jax.checkpoint.progress import Progress, amount
from kimi_jax.checkpoint.reader import CheckpointReader
from kimi_jax.checkpoint.resources import check_resources, disk_needed, keep_memory, memory_needed
from kimi_jax.checkpoint.side_files import copy_side_files, side_files
from kimi_jax.checkpoint.store import save_piece
from kimi_jax.checkpoint.values import ALIGNMENT, NAN_SCALE, checksum, empty, has_nan, is_float
from kimi_jax.checkpoint.writer import shard_name
from kimi_jax.config import KimiConfig
from kimi_jax.model import Decoder
from kimi_jax.params import ParamSpec, named_specs

_READERS = 4


@dataclass(frozen=True)
class _Loaded:
    """A piece in memory: its record with checksums, its arrays, and what is wrong with its values."""

    piece: Piece
    arrays: dict[str, np.ndarray]
    problems: list[str]


@dataclass(frozen=True)
class Done:
    """What a conversion did.

    Attributes:
        tensors: tensors of the checkpoint.
        nbytes: their bytes.
        written: bytes that this run wrote; less than `nbytes` when it continued an earlier one.
    """

    tensors: int
    nbytes: int
    written: int


def to_orbax(source: Path, destination: Path, array_bytes: int, show: bool) -> Done:
    """Converts; see `convert`.

    Raises:
        CheckpointError: see `convert`.
    """
    check_apart(source, destination)
    config = KimiConfig.from_directory(source)
    reader = CheckpointReader(source)
    specs = Decoder(config).specs
    located = locate(reader, specs)
    side_files(source)
    mark = fingerprint.of_huggingface(reader)
    begun = state(destination, "orbax", mark)
    if begun is not None and begun.complete:
        _compare(reader, ConvertedCheckpoint(destination), same_times=begun.source == str(mark), show=show)
        return _done(reader, 0)
    layout = lay_out(reader, specs, located, array_bytes if begun is None else begun.array_bytes)
    pending, finished = _pending(destination, layout, len(reader.files)) if begun else (list(layout.pieces), [])
    size = sum(piece.nbytes for piece in pending)
    largest = max((array.nbytes for piece in layout.pieces for array in piece.arrays), default=0)
    summary = check_resources(destination, disk_needed(size), memory_needed(largest))
    progress = Progress("convert", len(reader.names()), sum(piece.nbytes for piece in layout.pieces), show=show)
    progress.message(f"{source} to {destination}: reads {amount(size)}, writes {amount(size)}; {summary}.")
    if finished:
        done = sum(piece.nbytes for piece in finished)
        progress.message(f"continues an earlier run, which did {len(finished)} of {len(layout.pieces)} pieces.")
        progress.skip(sum(piece.num_tensors for piece in finished), done)

    problems: list[str] = []
    with writing(destination) as lock:
        # Whoever held the lock before may have finished, or gone on, since the state was read.
        if state(destination, "orbax", mark) != begun:
            raise CheckpointError(
                f"destination {destination} was written to by another process; run the command again."
            )
        marker = begun or Marker(
            format="orbax",
            complete=False,
            random=is_random(reader),
            source=str(mark),
            array_bytes=array_bytes,
            pieces=len(layout.pieces),
            files=_file_names(reader),
            metadata=tuple(file.metadata for file in reader.files),
            empty=layout.empty,
        )
        (destination / PIECES).mkdir(exist_ok=True)
        (destination / ARRAYS).mkdir(exist_ok=True)
        marker.write(destination)
        _sweep(destination, finished)
        for loaded in _load_ahead(reader, named_specs(specs), pending):
            problems += loaded.problems
            if not loaded.problems:
                stack = {array.key: array.stack for array in loaded.piece.arrays}
                files = save_piece(destination, loaded.piece.name, loaded.arrays, stack)
                write_piece(destination, replace(loaded.piece, files=files))
            keep_memory(largest)
            lock.touch()
            progress.add(loaded.piece.num_tensors, loaded.piece.nbytes)
        raise_if(problems, f"{source} can't be converted")
        copy_side_files(source, destination)
        replace(marker, complete=True).write(destination)
    progress.finish()
    return _done(reader, size)


def _done(reader: CheckpointReader, written: int) -> Done:
    sizes = (int(np.prod(reader.shape(name))) * reader.dtype(name).itemsize for name in reader.names())
    return Done(len(reader.names()), sum(sizes), written)


def _file_names(reader: CheckpointReader) -> tuple[str, ...]:
    """Names of the files, which get new ones when they were told apart by folders."""
    names = tuple(file.path.name for file in reader.files)
    if len(set(names)) == len(names):
        return names
    return tuple(shard_name(number, len(names)) for number in range(len(names)))


def _pending(destination: Path, layout: Layout, files: int) -> tuple[list[Piece], list[Piece]]:
    """Pieces to do, and those that an earlier run has finished."""
    pending: list[Piece] = []
    finished: list[Piece] = []
    for piece in layout.pieces:
        found = read_piece(destination, piece.name, files)
        whole = found is not None and _without_checksums(found) == piece and not missing_files(destination, found)
        (finished if whole else pending).append(piece)
    return pending, finished


def _without_checksums(piece: Piece) -> Piece:
    arrays = tuple(
        replace(array, tensors=tuple(replace(tensor, checksum=None) for tensor in array.tensors))
        for array in piece.arrays
    )
    return Piece(piece.name, arrays)


def _sweep(destination: Path, finished: list[Piece]) -> None:
    """Removes what a killed run left half-done."""
    keep = {piece.name for piece in finished}
    for path in (destination / ARRAYS).iterdir():
        if path.name not in keep:
            shutil.rmtree(path)
    for path in [*(destination / PIECES).iterdir(), *destination.glob(".*.partial")]:
        if path.stem not in keep:
            path.unlink()


def _load_ahead(reader: CheckpointReader, specs: dict[str, ParamSpec], pieces: list[Piece]) -> Iterator[_Loaded]:
    """Reads each piece while the caller works on the one before, whose arrays are gone once the next is asked for."""
    size = max(map(_room, pieces), default=0)
    with ThreadPoolExecutor(1) as ahead, ThreadPoolExecutor(_READERS) as readers:
        # Two buffers in turn: memory that is taken anew for every piece would cost a page fault for each 4 KiB.
        buffers = [empty((size,), np.uint8) for _ in pieces[:2]]
        following: Future[_Loaded] | None = None
        try:
            for number in range(len(pieces)):
                if following is None:
                    following = ahead.submit(_load, reader, specs, pieces[number], buffers[number % 2], readers)
                loaded, following = following.result(), None
                if number + 1 < len(pieces):
                    following = ahead.submit(
                        _load, reader, specs, pieces[number + 1], buffers[(number + 1) % 2], readers
                    )
                yield loaded
        finally:
            if following is not None:
                following.cancel()


def _room(piece: Piece) -> int:
    """Bytes for the arrays of a piece, each aligned."""
    return sum(-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in piece.arrays)


def _load(
    reader: CheckpointReader,
    specs: dict[str, ParamSpec],
    piece: Piece,
    buffer: np.ndarray,
    readers: ThreadPoolExecutor,
) -> _Loaded:
    arrays: dict[str, np.ndarray] = {}
    jobs = []
    begin = 0
    for array in piece.arrays:
        out = arrays[array.key] = buffer[begin : begin + array.nbytes].view(array.dtype).reshape(array.box.shape)
        begin += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        places = np.ndindex(*array.box.shape[: array.stack])
        jobs.append(
            [
                readers.submit(_load_tensor, reader, specs, array, tensor, out[(*place, ...)])
                for place, tensor in zip(places, array.tensors, strict=True)
            ]
        )
    recorded, problems = [], []
    for array, futures in zip(piece.arrays, jobs, strict=True):
        tensors = []
        for tensor, future in zip(array.tensors, futures, strict=True):
            found, problem = future.result()
            tensors.append(replace(tensor, checksum=found))
            problems += [] if problem is None else [problem]
        recorded.append(replace(array, tensors=tuple(tensors)))
    return _Loaded(Piece(piece.name, tuple(recorded)), arrays, problems)


def _load_tensor(
    reader: CheckpointReader, specs: dict[str, ParamSpec], array: StoredArray, tensor: StoredTensor, out: np.ndarray
) -> tuple[int, str | None]:
    """Reads what an array holds of a tensor; returns the checksum and what is wrong with the values."""
    name = tensor.name
    shape = tensor_shape(specs, array, tensor)
    spec = None if array.param is None else specs[array.param]
    if spec is not None and is_padded(spec, tensor.shape):
        whole = np.empty(tensor.shape, array.dtype)
        reader.read_box(name, Box.whole(tensor.shape), whole)
        try:
            check_padding(spec, whole, name)
        except CheckpointError as error:
            return 0, f"{reader.file_of(name)}: {error}"
        out[...] = whole[: out.size]
    else:
        reader.read_box(name, array.box.tail(array.stack), out, shape)
    return checksum(out), value_problem(reader, name, array, out)


def value_problem(reader: CheckpointReader, name: str, array: StoredArray, values: np.ndarray) -> str | None:
    """What is wrong with the values of a tensor, or None."""
    if array.part == "scale" and bool((values == NAN_SCALE).any()):
        return f"{reader.file_of(name)}: {name} holds the scale byte 255, which is NaN."
    if is_float(array.dtype) and has_nan(values):
        return f"{reader.file_of(name)}: {name} holds NaN."
    return None


def _compare(reader: CheckpointReader, checkpoint: ConvertedCheckpoint, *, same_times: bool, show: bool) -> None:
    """Checks that a finished destination is this source's; reads the source when its files are newer or copies.

    Raises:
        CheckpointError: it isn't.
    """

    def what(table: CheckpointReader | ConvertedCheckpoint) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        return {name: (table.shape(name), table.dtype(name)) for name in table.names()}

    if what(reader) != what(checkpoint):
        raise CheckpointError(f"destination {checkpoint.directory} holds a conversion of another source. Remove it.")
    checkpoint.check_parameters(Decoder(KimiConfig.from_directory(checkpoint.directory)).specs)
    if same_times:
        return
    specs = named_specs(Decoder(KimiConfig.from_directory(reader.directory)).specs)
    progress = Progress("compare", len(reader.names()), sum(piece.nbytes for piece in checkpoint.pieces), show=show)
    progress.message(f"{checkpoint.directory} is finished; the source's files were written since, so they're compared.")
    plain = [_without_checksums(piece) for piece in checkpoint.pieces]
    differing = []
    for before, now in zip(checkpoint.pieces, _load_ahead(reader, specs, plain), strict=True):
        pairs = zip(_tensors(before), _tensors(now.piece), strict=True)
        differing += [f"{a.name} has changed." for a, b in pairs if a.checksum != b.checksum]
        progress.add(before.num_tensors, before.nbytes)
    raise_if(
        differing, f"destination {checkpoint.directory} was converted from other weights than {reader.directory} holds"
    )
    progress.finish()


def _tensors(piece: Piece) -> list[StoredTensor]:
    return [tensor for array in piece.arrays for tensor in array.tensors]
