"""Writing one safetensors file."""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kimi_jax.checkpoint.errors import CheckpointError
from kimi_jax.checkpoint.safetensors_format import HeaderError, build_header


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
