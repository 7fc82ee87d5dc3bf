"""From Orbax back to a Hugging Face directory, tensor by tensor, byte for byte."""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

from kimi_jax.checkpoint import fingerprint
from kimi_jax.checkpoint.boxes import Box
from kimi_jax.checkpoint.converted import ConvertedCheckpoint
from kimi_jax.checkpoint.destination import check_apart, state, writing
from kimi_jax.checkpoint.errors import CheckpointError
from kimi_jax.checkpoint.layout import tensor_shape
from kimi_jax.checkpoint.locate import locate, raise_if
from kimi_jax.checkpoint.manifest import StoredArray
from kimi_jax.checkpoint.marks import RANDOM
from kimi_jax.checkpoint.progress import Progress, amount
from kimi_jax.checkpoint.reader import CheckpointReader
from kimi_jax.checkpoint.resources import check_resources, disk_needed, keep_memory, memory_needed
from kimi_jax.checkpoint.safetensors_format import TensorInfo
from kimi_jax.checkpoint.side_files import copy_side_files, side_files
from kimi_jax.checkpoint.to_orbax import Done
from kimi_jax.checkpoint.values import checksum, empty
from kimi_jax.checkpoint.verify import huggingface_checksum
from kimi_jax.checkpoint.writer import PartialFile, write_index
from kimi_jax.config import KimiConfig
from kimi_jax.model import Decoder
from kimi_jax.params import ParamSpec, named_specs

JOURNAL = ".kimi_jax.journal"
# Each copy holds one array.
_COPIES = 2


def to_huggingface(source: Path, destination: Path, show: bool) -> Done:
    """Converts back; see `convert`.

    Raises:
        CheckpointError: see `convert`.
    """
    check_apart(source, destination)
    config = KimiConfig.from_directory(source)
    checkpoint = ConvertedCheckpoint(source)
    tree = Decoder(config).specs
    locate(checkpoint, tree)
    checkpoint.check_parameters(tree)
    specs = named_specs(tree)
    side_files(source)
    marker = checkpoint.marker
    mark = fingerprint.of_converted(source, marker)
    begun = state(destination, "huggingface", mark)
    contents = _contents(checkpoint)
    size = sum(info.nbytes for tensors in contents.values() for info in tensors.values())
    done = Done(len(checkpoint.names()), size, 0)
    if begun is not None and begun.complete:
        _compare(CheckpointReader(destination), contents)
        return done
    metadata = dict(zip(marker.files, marker.metadata, strict=True))
    files = [PartialFile(destination / name, contents[name], metadata[name]) for name in marker.files]
    finished = _read_journal(destination) if begun is not None and all(file.begun for file in files) else set()
    pending = [piece for piece in checkpoint.pieces if piece.name not in finished]
    left = sum(piece.nbytes for piece in pending)
    largest = max((array.nbytes for piece in checkpoint.pieces for array in piece.arrays), default=0)
    # Files that were begun have their full size but not yet all of their blocks.
    summary = check_resources(destination, disk_needed(left), memory_needed(largest))
    progress = Progress("convert", len(checkpoint.names()), sum(p.nbytes for p in checkpoint.pieces), show=show)
    progress.message(f"{source} to {destination}: reads {amount(left)}, writes {amount(left)}; {summary}.")
    if finished:
        progress.message(f"continues an earlier run, which did {len(finished)} of {len(checkpoint.pieces)} pieces.")
        for piece in checkpoint.pieces:
            if piece.name in finished:
                progress.skip(piece.num_tensors, piece.nbytes)

    with writing(destination) as lock, ExitStack() as opened:
        if state(destination, "huggingface", mark) != begun:
            raise CheckpointError(
                f"destination {destination} was written to by another process; run the command again."
            )
        replace(marker, format="huggingface", complete=False, source=str(mark)).write(destination)
        if not finished:
            (destination / JOURNAL).unlink(missing_ok=True)
        for file in files:
            if not file.published:
                file.open()
                opened.callback(file.close)
        problems: list[str] = []
        with ThreadPoolExecutor(_COPIES) as pool:
            for piece in pending:
                jobs = [pool.submit(_copy, checkpoint, specs, piece.name, array, files) for array in piece.arrays]
                found = [problem for job in jobs for problem in job.result()]
                problems += found
                if not found:
                    for number in {tensor.file for array in piece.arrays for tensor in array.tensors}:
                        files[number].sync()
                    _append_journal(destination, piece.name)
                keep_memory(largest)
                lock.touch()
                progress.add(piece.num_tensors, piece.nbytes)
        raise_if(problems, f"{source} can't be converted")
        for file in files:
            file.publish()
        index_metadata = {RANDOM: "true"} if marker.random else {}
        write_index(destination, contents, index_metadata)
        checksums = _checksums(CheckpointReader(destination), checkpoint)
        copy_side_files(source, destination)
        replace(marker, format="huggingface", complete=True, source=str(mark), checksums=checksums).write(destination)
        (destination / JOURNAL).unlink(missing_ok=True)
    progress.finish()
    return replace(done, written=left)


def _contents(checkpoint: ConvertedCheckpoint) -> dict[str, dict[str, TensorInfo]]:
    """The tensors of each file of the original."""
    contents: dict[str, dict[str, TensorInfo]] = {file: {} for file in checkpoint.marker.files}
    numbers = {tensor.name: tensor.file for tensor in checkpoint.marker.empty}
    for name in checkpoint.names():
        shares = checkpoint.shares(name)
        file = checkpoint.marker.files[shares[0].tensor.file if shares else numbers[name]]
        contents[file][name] = TensorInfo(checkpoint.dtype(name), checkpoint.shape(name))
    return contents


def _copy(
    checkpoint: ConvertedCheckpoint,
    specs: Mapping[str, ParamSpec],
    piece: str,
    array: StoredArray,
    files: list[PartialFile],
) -> list[str]:
    """Writes what one array holds to the files; returns what is wrong with it."""
    values = empty(array.box.shape, array.dtype)
    checkpoint.read_array(piece, array, Box.whole(array.box.shape), values)
    problems = []
    rows = array.box.tail(array.stack)
    for place, tensor in zip(np.ndindex(*array.box.shape[: array.stack]), array.tensors, strict=True):
        part = values[(*place, ...)]
        if checksum(part) == tensor.checksum:
            files[tensor.file].write(tensor.name, rows.first(tensor_shape(specs, array, tensor)), part)
        else:
            problems.append(
                f"{checkpoint.file_of(tensor.name)}: {tensor.name} doesn't have the checksum that was recorded; the "
                "data is damaged."
            )
    return problems


def _checksums(reader: CheckpointReader, checkpoint: ConvertedCheckpoint) -> dict[str, int]:
    """Of whole tensors: as recorded, or computed where a record covers some rows or leaves out padding."""
    checksums = {}
    for name in reader.names():
        shares = checkpoint.shares(name)
        recorded = shares[0].tensor.checksum if shares else None
        whole = len(shares) == 1 and Box.whole(shares[0].box.shape).size == int(np.prod(reader.shape(name)))
        checksums[name] = recorded if whole and recorded is not None else huggingface_checksum(reader, name)
    return checksums


def _compare(reader: CheckpointReader, contents: dict[str, dict[str, TensorInfo]]) -> None:
    """Checks a finished destination's files against what they should hold.

    Raises:
        CheckpointError: they hold something else.
    """
    wanted = {name: info for tensors in contents.values() for name, info in tensors.items()}
    if {name: TensorInfo(reader.dtype(name), reader.shape(name)) for name in reader.names()} != wanted:
        raise CheckpointError(f"{reader.directory} doesn't hold the tensors that were converted. Remove it.")


def _read_journal(destination: Path) -> set[str]:
    """Pieces whose bytes are in the files; a line that was cut off doesn't count."""
    try:
        text = (destination / JOURNAL).read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        return set()
    return set(text.split("\n")[:-1])


def _append_journal(destination: Path, piece: str) -> None:
    descriptor = os.open(destination / JOURNAL, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, f"{piece}\n".encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
