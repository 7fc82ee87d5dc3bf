"""The directory that a conversion writes to: whose it is, how far it is, and who may write there."""

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from kimi_jax.checkpoint.errors import CheckpointError
from kimi_jax.checkpoint.fingerprint import Fingerprint
from kimi_jax.checkpoint.lock import LOCK, Lock, hold
from kimi_jax.checkpoint.manifest import MARKER, Format, Marker, read_marker

_NAMES = {"orbax": "a converted (Orbax)", "huggingface": "a Hugging Face"}


def check_apart(source: Path, destination: Path) -> None:
    """Refuses a destination that is, holds, or lies in the source.

    Raises:
        CheckpointError: naming both.
    """
    a, b = source.resolve(), destination.resolve()
    if a == b or a.is_relative_to(b) or b.is_relative_to(a):
        raise CheckpointError(f"destination {destination} and source {source} must be separate directories.")
    if destination.exists() and not destination.is_dir():
        raise CheckpointError(f"destination {destination} isn't a directory.")


def state(destination: Path, kind: Format, source: Fingerprint | None) -> Marker | None:
    """What an earlier run left: None for a free directory, else its marker, complete or not.

    Raises:
        CheckpointError: the directory holds something else, or the beginning of another conversion.
    """
    marker = read_marker(destination)
    if marker is None:
        rest = [] if not destination.exists() else [p.name for p in destination.iterdir() if not _is_ours(p.name)]
        if rest:
            raise CheckpointError(
                f"destination {destination} isn't empty and holds no conversion: {', '.join(sorted(rest)[:5])}"
                f"{' and more' if len(rest) > 5 else ''}. Choose an empty or a new directory."
            )
        return None
    if marker.format != kind:
        raise CheckpointError(f"destination {destination} already holds {_NAMES[marker.format]} checkpoint.")
    if source is None:
        return marker
    begun = Fingerprint.parse(marker.source)
    same = begun.structure == source.structure if marker.complete else begun == source
    if not same:
        what = "a conversion of another source" if marker.complete else "an unfinished conversion of another source"
        raise CheckpointError(
            f"destination {destination} holds {what}, or of this one before its files changed. Remove it, or choose "
            "another destination."
        )
    return marker


@contextlib.contextmanager
def writing(destination: Path) -> Iterator[Lock]:
    """Makes the directory if needed and keeps others out of it; failures to write become clear errors.

    Raises:
        CheckpointError: it can't be written, is full, or another process is writing to it.
    """
    try:
        destination.mkdir(parents=True, exist_ok=True)
        with hold(destination) as lock:
            yield lock
    except OSError as error:
        raise CheckpointError(f"destination {destination} can't be written: {reason(error)}") from error


def reason(error: OSError) -> str:
    """Why the system refused, with the file it refused."""
    where = f" ({error.filename})" if error.filename else ""
    if error.errno == errno.ENOSPC:
        return f"no space left on the device{where}. Free some and run the same command again; it continues."
    return f"{error.strerror or error}{where}."


def _is_ours(name: str) -> bool:
    """Whether a run that was killed before its first record may have left this."""
    return name == LOCK or (name.startswith(f".{MARKER}.") and name.endswith(".partial"))
