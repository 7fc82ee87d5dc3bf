"""What a conversion needs of the machine, and whether the machine has it."""

import ctypes
import os
import re
import shutil
from pathlib import Path

from kimi_jax.checkpoint.errors import CheckpointError
from kimi_jax.checkpoint.progress import amount

BASE_MEMORY = 2**30
"""Memory of a conversion besides its arrays: the interpreter, JAX, records, buffers of files."""

ARRAYS_IN_MEMORY = 5
"""Bound on the copies of the largest array at one time: read ahead, being written, and in TensorStore's hands."""

# Arrays that may be added before memory is looked at again: one in TensorStore's hands, and what it makes of it.
_ROOM = 2
# Of the GNU C library; others give memory back by themselves.
_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)

# Records and the names of chunks, for each byte of data and for each file.
_OVERHEAD, _SMALL_FILES = 0.002, 16 * 2**20


def memory_needed(largest_array: int) -> int:
    """Bound on the memory of a conversion whose largest array has this many bytes."""
    return BASE_MEMORY + ARRAYS_IN_MEMORY * largest_array


def keep_memory(largest_array: int) -> None:
    """Gives freed memory back to the system when what this process holds leaves no room for another array within bounds.

    The C library keeps what TensorStore's threads free, for each thread apart, so that several arrays that are long gone
    would count as memory of this process. Getting memory anew takes time, so it's only done when it's needed.
    """
    if _resident() > memory_needed(largest_array) - _ROOM * largest_array and _TRIM is not None:
        _TRIM(0)


def disk_needed(size: int) -> int:
    """Disk space for this many bytes of tensors."""
    return int(size * (1 + _OVERHEAD)) + _SMALL_FILES


def check_resources(directory: Path, disk: int, memory: int) -> str:
    """Says what is needed and what there is.

    Raises:
        CheckpointError: there is too little of something.
    """
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    available = available_memory()
    has_memory = "unknown" if available is None else amount(available)
    summary = (
        f"needs {amount(disk)} of disk at {directory} ({amount(free)} free) and at most {amount(memory)} of memory "
        f"({has_memory} available)"
    )
    if disk > free:
        raise CheckpointError(f"This {summary}. Free some space, or choose another destination; nothing was written.")
    if available is not None and memory > available:
        raise CheckpointError(f"This {summary}. Free some memory, or ask for smaller arrays; nothing was written.")
    return summary


def available_memory() -> int | None:
    """Bytes that this process may still use, or None where the system doesn't say."""
    found = []
    try:
        match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        if match:
            found.append(int(match[1]) * 1024)
    except OSError:
        pass
    try:
        # Containers see the memory of the whole machine; their own limit is here. Cached files can be given back.
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            used = int(Path("/sys/fs/cgroup/memory.current").read_text())
            cached = re.search(r"^file (\d+)", Path("/sys/fs/cgroup/memory.stat").read_text(), re.MULTILINE)
            found.append(max(0, int(limit) - used + (int(cached[1]) if cached else 0)))
    except (OSError, ValueError):
        pass
    return min(found, default=None)


def _resident() -> int:
    """Bytes of memory that this process holds, or 0 where the system doesn't say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
