"""Saying how far a long operation is."""

import io
import sys
import threading
import time
from typing import Any

_SECONDS_BETWEEN_LINES = 5.0
_SECONDS_BETWEEN_UPDATES = 0.2


class Progress:
    """Counts tensors and bytes, and prints both with the rate and the time left.

    On a terminal one line is rewritten; elsewhere a plain line is printed every few seconds. The last line is always
    printed, so a log shows that the end was reached.
    """

    def __init__(
        self, what: str, tensors: int, size: int, *, show: bool = True, stream: io.TextIOBase | None = None
    ) -> None:
        """Starts at zero of `tensors` tensors and `size` bytes; `show` false prints nothing."""
        self.what = what
        self.tensors = tensors
        self.size = size
        self.done_tensors = 0
        self.done_bytes = 0
        self._show = show
        self._stream: Any = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._began = self._printed = time.monotonic()
        self._skipped = 0
        self._lock = threading.Lock()

    def skip(self, tensors: int, size: int) -> None:
        """Counts what an earlier run did, which says nothing about the rate."""
        with self._lock:
            self._skipped += size
        self.add(tensors, size)

    def add(self, tensors: int, size: int) -> None:
        """Counts what has just been done; any thread may call it."""
        with self._lock:
            self.done_tensors += tensors
            self.done_bytes += size
            now = time.monotonic()
            pause = _SECONDS_BETWEEN_UPDATES if self._terminal else _SECONDS_BETWEEN_LINES
            if now - self._printed < pause:
                return
            self._printed = now
            self._print(end="\r" if self._terminal else "\n")

    def finish(self) -> None:
        """Prints the last line."""
        with self._lock:
            self._print(end="\n")

    def message(self, text: str) -> None:
        """Prints a line of its own."""
        if self._show:
            print(f"kimi_jax: {text}", file=self._stream, flush=True)

    def line(self) -> str:
        """The present state in words."""
        elapsed = time.monotonic() - self._began
        rate = (self.done_bytes - self._skipped) / elapsed if elapsed > 0 else 0.0
        left = self.size - self.done_bytes
        if left <= 0:
            remaining = f"took {duration(elapsed)}"
        else:
            remaining = f"{duration(left / rate)} left" if rate > 0 else "time left unknown"
        return (
            f"kimi_jax: {self.what} {self.done_tensors:,}/{self.tensors:,} tensors, "
            f"{amount(self.done_bytes)} of {amount(self.size)}, {amount(int(rate))}/s, {remaining}"
        )

    def _print(self, end: str) -> None:
        if self._show:
            # Spaces wipe what a longer line left.
            print(self.line().ljust(100 if self._terminal else 0), end=end, file=self._stream, flush=True)


def amount(size: int) -> str:
    """Bytes in a unit that keeps the number short."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size} B"


def duration(seconds: float) -> str:
    """A time in a unit that keeps the number short."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
