"""Arrays on disk: one Orbax checkpoint (zarr arrays in an OCDBT database) for each piece.

Pieces are whole Orbax checkpoints and not parts of one, because Orbax's partial save ends with a merge of all parts
that isn't safe against a kill and takes time that grows with the square of their number. `orbax.checkpoint` loads a
piece like any checkpoint of NumPy arrays. We read through TensorStore, the library under Orbax, because a process needs
boxes of stacked arrays and Orbax's interface gives whole arrays.

Nothing is compressed: weights hardly shrink, and chunks are then read at the disk's speed.
"""

import contextlib
import functools
import logging
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import tensorstore as ts

from kimi_jax.checkpoint.boxes import Box
from kimi_jax.checkpoint.errors import CheckpointError
from kimi_jax.checkpoint.manifest import ARRAYS, sync_directory

_ITEM = "state"
# A read takes whole chunks, so they're smaller than what a device of a large mesh holds of a matrix; small arrays are
# cut too, but not so far that their names outweigh them.
_LARGEST_CHUNK, _SMALLEST_CHUNK, _CHUNKS = 2**20, 2**11, 16
# Bytes that gather in memory before they're written as one file.
_FILE_BYTES = 2**25
_NAME_CACHE_BYTES = 64 * 2**20
_WRITE_TIMEOUT_SECONDS = 24 * 60 * 60


def piece_directory(directory: Path, piece: str) -> Path:
    """Where a piece's Orbax checkpoint lies."""
    return directory / ARRAYS / piece


def save_piece(
    directory: Path, piece: str, arrays: Mapping[str, np.ndarray], stack: Mapping[str, int]
) -> dict[str, int]:
    """Writes arrays as one Orbax checkpoint, replacing what an interrupted run left there.

    Args:
        directory: of the converted checkpoint.
        piece: name of the piece.
        arrays: by key.
        stack: how many leading axes of each array count tensors, which are never stored in one chunk.

    Returns:
        Sizes of the files written, by path relative to `directory`; they're on the disk.

    Raises:
        CheckpointError: they can't be written.
    """
    target = piece_directory(directory, piece)
    try:
        for rest in target.parent.glob(f"{piece}*"):
            shutil.rmtree(rest)
        target.parent.mkdir(parents=True, exist_ok=True)
        with _context(arrays, stack), _quiet():
            ocp.save(str(target.absolute()), dict(arrays))
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{target} can't be written: {_reason(error)}") from error
    # TensorStore has synchronised the files' contents, not their names.
    for folder in [target, *(path for path in target.rglob("*") if path.is_dir())]:
        sync_directory(folder)
    sync_directory(target.parent)
    return {str(path.relative_to(directory)): path.stat().st_size for path in target.rglob("*") if path.is_file()}


class ArrayStore:
    """The arrays of a converted checkpoint, opened when they're first read."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # Names of chunks are kept, chunks aren't: each is needed once.
        self._context = ts.Context(
            {"cache_pool": {"total_bytes_limit": 0}, "cache_pool#names": {"total_bytes_limit": _NAME_CACHE_BYTES}}
        )
        self._bytes_before = _file_bytes_read()
        self._open = functools.lru_cache(maxsize=1024)(self._open_array)

    @property
    def bytes_read(self) -> int:
        """Bytes that TensorStore has read from files in this process since this store was made."""
        return _file_bytes_read() - self._bytes_before

    def read(self, piece: str, key: str, expected: tuple[tuple[int, ...], np.dtype], box: Box, out: np.ndarray) -> None:
        """Copies a box of an array into `out`, which has the box's shape.

        Args:
            piece: name of the piece.
            key: of the array.
            expected: shape and dtype that the records give for it.
            box: the part to read.
            out: a writable array; when its dtype differs, values are converted.

        Raises:
            CheckpointError: the array isn't there, isn't as expected, or can't be read.
        """
        where = f"{piece_directory(self.directory, piece)}, array {key}"
        try:
            array = self._open(piece, key)
            found = (tuple(array.shape), array.dtype.numpy_dtype)
            if found != expected:
                raise CheckpointError(
                    f"{where} is {found[1]} {list(found[0])}; its record says {expected[1]} {list(expected[0])}."
                )
            part = array[box.slices] if box.shape else array
            if out.dtype == found[1]:
                ts.array(out).write(part).result()
            else:
                out[...] = part.read().result()
        except (OSError, ValueError, RuntimeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{where} can't be read: {_reason(error)}") from error

    def _open_array(self, piece: str, key: str) -> Any:
        base = piece_directory(self.directory, piece).absolute() / _ITEM
        spec = {
            "driver": "zarr3",
            "kvstore": {
                "driver": "ocdbt",
                "base": {"driver": "file", "path": f"{base}/"},
                "path": f"{key}/",
                "cache_pool": "cache_pool#names",
            },
            "recheck_cached_metadata": False,
            "recheck_cached_data": False,
        }
        return ts.open(spec, read=True, open=True, context=self._context).result()


@contextlib.contextmanager
def _context(arrays: Mapping[str, np.ndarray], stack: Mapping[str, int]) -> Iterator[None]:
    def storage(key: Any, value: Any) -> ocp.options.ArrayOptions.Saving.StorageOptions:
        name = key[-1].key
        size = value.nbytes // max(1, int(np.prod(value.shape[: stack[name]])))
        chunk = min(_LARGEST_CHUNK, max(_SMALLEST_CHUNK, size // _CHUNKS))
        return ocp.options.ArrayOptions.Saving.StorageOptions(
            # A vector is loaded whole by everyone.
            chunk_byte_size=chunk if value.ndim - stack[name] > 1 else None,
            shard_axes=tuple(range(stack[name])) or None,
        )

    context = ocp.Context()
    saving = context.array.saving
    saving.use_ocdbt = True
    saving.use_zarr3 = True
    saving.use_compression = False
    saving.ocdbt_target_data_file_size = _FILE_BYTES
    saving.enable_post_merge_validation = False
    saving.enable_write_sharding_file = False
    saving.scoped_storage_options_creator = storage
    context.memory.deepcopy_host_arrays = False
    context.asynchronous.timeout_secs = _WRITE_TIMEOUT_SECONDS
    # Otherwise a folder that can't be made leaves threads waiting for it, and the process can't end.
    context.asynchronous.create_directories_asynchronously = False
    # One process converts, also when others run beside it.
    process = jax.process_index()
    context.multiprocessing.primary_host = process
    context.multiprocessing.active_processes = {process}
    context.multiprocessing.barrier_sync_key_prefix = f"kimi_jax_{process}"
    with context:
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps Orbax's log, which repeats a failure once a thread, out of ours: failures are raised."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _reason(error: BaseException) -> str:
    # TensorStore's messages end with specifications and source locations in brackets.
    text = str(error).split(" [tensorstore_spec=")[0].split(" [source locations=")[0].strip() or type(error).__name__
    return text if len(text) <= 500 else f"{text[:500]}..."


def _file_bytes_read() -> int:
    metrics = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(int(value["value"]) for metric in metrics for value in metric["values"])
