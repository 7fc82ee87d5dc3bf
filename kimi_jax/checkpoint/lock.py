"""One writer at a time for a destination."""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from kimi_jax.checkpoint.errors import CheckpointError

LOCK = ".kimi_jax.lock"

# A writer on another machine proves that it lives by touching its lock; silence for this long means that it's gone.
SILENCE_SECONDS = 600.0


class Lock:
    """A held lock; `touch` it every now and then."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    def touch(self) -> None:
        """Shows other machines that the holder is alive."""
        os.utime(self._descriptor)


@contextlib.contextmanager
def hold(directory: Path) -> Iterator[Lock]:
    """Keeps other converters out of `directory` while the block runs.

    The file is locked by the operating system, which lets go when the holder dies however it dies. Where the file
    system doesn't lock (or not between machines), the file's content decides: a holder that isn't running any more, or
    that is on another machine and hasn't touched its lock for ten minutes, is gone.

    Raises:
        CheckpointError: another process is writing there; it is named.
    """
    path = directory / LOCK
    descriptor = _acquire(path)
    try:
        yield Lock(path, descriptor)
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(descriptor)


def _acquire(path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            locked = _try_lock(descriptor)
            holder = _read(descriptor)
            if not locked:
                raise _busy(path, holder)
            if _is_same_file(path, descriptor):
                if _is_alive(holder, os.fstat(descriptor).st_mtime):
                    raise _busy(path, holder)
                content = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "started": _start(os.getpid())})
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, content.encode(), 0)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        # Its last holder removed the file between our opening and locking it.
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
    return True


def _is_same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _is_alive(holder: dict[str, object], touched: float) -> bool:
    """Whether the process that the file names still runs, as far as can be told from here."""
    pid, host = holder.get("pid"), holder.get("host")
    if not isinstance(pid, int) or pid < 1:
        return False
    if host != socket.gethostname():
        return time.time() - touched < SILENCE_SECONDS
    if pid == os.getpid():
        # Two threads of one process: the operating system's lock has already told them apart.
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    # Numbers of processes are used again; the time of the start tells whether this is the same one.
    return _start(pid) == holder.get("started")


def _start(pid: int) -> str | None:
    """When a process started, in the system's own words, or None where it doesn't say."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def _read(descriptor: int) -> dict[str, object]:
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


def _busy(path: Path, holder: dict[str, object]) -> CheckpointError:
    return CheckpointError(
        f"{path.parent} is being written by process {holder.get('pid', '(unknown)')} on "
        f"{holder.get('host', '(unknown)')}. Wait for it to end; if it isn't running any more, remove {path}."
    )
