"""Writing safetensors files: at once, or tensor by tensor in any order."""

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kimi_jax.checkpoint.errors import CheckpointError
from kimi_jax.checkpoint.manifest import sync_directory
from kimi_jax.checkpoint.reader import INDEX_NAME
from kimi_jax.checkpoint.safetensors_format import HeaderError, TensorEntry, TensorLike, build_header, parse_header
from kimi_jax.checkpoint.values import bytes_of


def write_safetensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, np.ndarray],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes tensors to a file that appears complete or not at all.

    The bytes go to a file beside `path`, reach the disk, and then take its place, so an interrupted run leaves what was
    there before.

    Args:
        path: the file; an existing one is replaced.
        tensors: arrays by name; bfloat16 and the float8 kinds are those of ml_dtypes.
        metadata: strings that the file carries besides its tensors.

    Raises:
        CheckpointError: the format can't hold a name or a dtype; nothing has been written.
        OSError: the file can't be written; no partial file is left.
    """
    path = Path(path)
    try:
        start, order = build_header(tensors, metadata or {})
    except HeaderError as error:
        raise CheckpointError(f"{path}: {error}") from error
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with partial.open("xb") as file:
            file.write(start)
            for name in order:
                file.write(np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


class PartialFile:
    """A safetensors file that is filled tensor by tensor, also over several runs, and gets its name when it's whole.

    Until then it is `.NAME.partial`, which no reader takes for a checkpoint. What isn't written is zero.

    Attributes:
        path: the name that it will get.
        size: bytes of the whole file.

    Raises:
        CheckpointError: the format can't hold a name or a dtype.
    """

    def __init__(self, path: Path, tensors: Mapping[str, TensorLike], metadata: Mapping[str, str]) -> None:
        self.path = path
        self._partial = path.with_name(f".{path.name}.partial")
        data = sum(tensor.nbytes for tensor in tensors.values())
        try:
            self._start, _ = build_header(tensors, metadata)
            self._entries: dict[str, TensorEntry] = parse_header(self._start[8:], data)[0]
        except HeaderError as error:
            raise CheckpointError(f"{path}: {error}") from error
        self.size = len(self._start) + data
        self._descriptor: int | None = None

    @property
    def published(self) -> bool:
        """Whether the file has its name."""
        return not self._partial.exists() and self.path.exists()

    @property
    def begun(self) -> bool:
        """Whether an earlier run has left the file, whole or partial."""
        existing = self.path if self.published else self._partial
        return existing.is_file() and existing.stat().st_size == self.size

    def open(self) -> None:
        """Creates the file, or opens what an earlier run left of it.

        Raises:
            OSError: it can't be written.
        """
        descriptor = os.open(self._partial, os.O_RDWR | os.O_CREAT, 0o644)
        if os.fstat(descriptor).st_size != self.size or os.pread(descriptor, len(self._start), 0) != self._start:
            os.ftruncate(descriptor, 0)
            os.ftruncate(descriptor, self.size)
            _pwrite(descriptor, memoryview(self._start), 0)
        self._descriptor = descriptor

    def write(self, name: str, first: int, values: np.ndarray) -> None:
        """Writes elements of a tensor from number `first` on, in row-major order.

        Raises:
            OSError: they can't be written.
        """
        assert self._descriptor is not None
        entry = self._entries[name]
        assert values.dtype == entry.dtype
        assert values.flags.c_contiguous
        offset = entry.start + first * entry.dtype.itemsize
        assert offset + values.nbytes <= entry.stop
        _pwrite(self._descriptor, bytes_of(values).data, offset)

    def sync(self) -> None:
        """Brings what was written to the disk."""
        assert self._descriptor is not None
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Ends writing for now."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def publish(self) -> None:
        """Gives the whole file its name."""
        if self._descriptor is not None:
            self.sync()
            self.close()
        if self._partial.exists():
            self._partial.replace(self.path)
            sync_directory(self.path.parent)


def shard_name(number: int, count: int) -> str:
    """Name of file `number` (from 0) of `count`."""
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def write_index(
    directory: Path, files: Mapping[str, Mapping[str, TensorLike]], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes `model.safetensors.index.json`, which appears complete or not at all.

    Args:
        directory: of the checkpoint.
        files: tensors by name, by the name of their file.
        metadata: strings that the index carries besides the total size.
    """
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
    tree = {
        "metadata": {"total_size": total, **(metadata or {})},
        "weight_map": dict(sorted(weight_map.items())),
    }
    path = directory / INDEX_NAME
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(tree, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_directory(directory)


def _pwrite(descriptor: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)
