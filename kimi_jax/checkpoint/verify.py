"""Comparing a checkpoint's bytes with the checksums that were recorded when it was written."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from kimi_jax.checkpoint.boxes import Box
from kimi_jax.checkpoint.converted import ConvertedCheckpoint, verify_share
from kimi_jax.checkpoint.errors import CheckpointError
from kimi_jax.checkpoint.locate import raise_if
from kimi_jax.checkpoint.manifest import MARKER, read_marker
from kimi_jax.checkpoint.progress import Progress
from kimi_jax.checkpoint.reader import CheckpointReader
from kimi_jax.checkpoint.values import checksum, empty

_READERS = 4


def verify(
    checkpoint: ConvertedCheckpoint | CheckpointReader, *, part: int = 0, parts: int = 1, show: bool = True
) -> None:
    """Reads tensors and compares their checksums with the recorded ones.

    Args:
        checkpoint: a converted directory, or a Hugging Face one that this library has written.
        part: which share of the tensors to read; processes that load together take one each.
        parts: number of shares.
        show: print progress.

    Raises:
        CheckpointError: listing every damaged tensor, or there are no checksums.
    """
    checks: list[tuple[Callable[[], str | None], int]] = []
    if isinstance(checkpoint, ConvertedCheckpoint):
        names = list(checkpoint.names())[part::parts]
        for name in names:
            for share in checkpoint.shares(name):
                size = share.box.size * share.array.dtype.itemsize
                checks.append((partial(verify_share, checkpoint, share), size))
    else:
        marker = read_marker(checkpoint.directory)
        if marker is None or not marker.checksums:
            raise CheckpointError(
                f"{checkpoint.directory} has no recorded checksums ({MARKER}); only checkpoints that kimi-jax has "
                "written can be verified."
            )
        if absent := sorted(set(checkpoint.names()) ^ set(marker.checksums)):
            raise CheckpointError(
                f"{checkpoint.directory}: {MARKER} and the files don't hold the same tensors: {absent[0]}."
            )
        names = list(checkpoint.names())[part::parts]
        for name in names:
            size = int(np.prod(checkpoint.shape(name))) * checkpoint.dtype(name).itemsize
            checks.append((partial(_verify_tensor, checkpoint, name, marker.checksums[name]), size))
    progress = Progress("verify", len(checks), sum(size for _, size in checks), show=show)

    def run(check: tuple[Callable[[], str | None], int]) -> str | None:
        problem = check[0]()
        progress.add(1, check[1])
        return problem

    with ThreadPoolExecutor(_READERS) as pool:
        problems = [problem for problem in pool.map(run, checks) if problem is not None]
    raise_if(problems, f"{checkpoint.directory} isn't what was written")
    progress.finish()


def huggingface_checksum(reader: CheckpointReader, name: str) -> int:
    """CRC-32 of a tensor of a Hugging Face directory, read in parts."""
    shape, found = reader.shape(name), 0
    for box in Box.whole(shape).split(max(1, 2**24 // reader.dtype(name).itemsize)):
        part = empty(box.shape, reader.dtype(name))
        reader.read_box(name, box, part)
        found = checksum(part, found)
    return found


def _verify_tensor(reader: CheckpointReader, name: str, recorded: int) -> str | None:
    try:
        found = huggingface_checksum(reader, name)
    except CheckpointError as error:
        return str(error)
    if found == recorded:
        return None
    return f"{reader.file_of(name)}: {name} has checksum {found:08x}; {recorded:08x} was recorded. The data is damaged."
