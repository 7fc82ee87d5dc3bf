"""Compiled programs kept on disk, so that the next process doesn't compile them again.

The files are JAX's own persistent compilation cache. What is added: a folder that belongs to the user alone, a checksum
beside every entry (a damaged program is dropped and compiled again, never run), and restraint: the cache is switched on
only while this library compiles, so programs of the caller, and a cache that the caller configured, are left alone.
"""

import hashlib
import logging
import os
import secrets
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from kimi_jax.text.shown import shown

_log = logging.getLogger(__name__)
# JAX's cache is one global; two threads must not point it to two places at once.
_LOCK = threading.Lock()
_ENTRY, _CHECKSUM = "-cache", ".sha256"


def default_folder() -> Path:
    """`kimi_jax/xla` in the user's cache folder: `$XDG_CACHE_HOME`, or `~/.cache`."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    # A relative path is to be ignored, says the XDG specification: it would depend on where the process was started.
    base = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    return base / "kimi_jax" / "xla"


@dataclass
class Outcome:
    """What the cache did for one compilation.

    Attributes:
        hit: the program came from the disk.
        trouble: what JAX had to say about the cache.
    """

    hit: bool = False
    trouble: tuple[str, ...] = ()

    def report(self) -> None:
        """Writes the trouble to the log."""
        for text in self.trouble:
            _log.warning("%s", text)


class CompileCache:
    """The folder that compiled programs are kept in.

    Whoever can write to the folder can make this process run code, so the default one is made with mode 0700 and not
    used when it belongs to someone else or others may write to it. A folder that can't be used costs a warning in the
    log, and nothing else.

    Args:
        choice: True for the default folder, a path for another, False for none.

    Attributes:
        folder: where programs are kept, or None when they aren't.

    Raises:
        TypeError: `choice` is something else.
    """

    def __init__(self, choice: bool | str | os.PathLike[str]):
        if not isinstance(choice, bool | str | os.PathLike):
            raise TypeError(f"compilation_cache={shown(choice)} must be True, False or the path of a folder.")
        self.folder: Path | None = None
        self._verified: set[str] = set()
        if choice is False or _configured_by_caller():
            if not isinstance(choice, bool):
                _log.warning(
                    "compilation_cache=%s isn't used: JAX is configured with the cache %s already.",
                    os.fspath(choice),
                    jax_setting("jax_compilation_cache_dir"),
                )
            return
        try:
            self.folder = _usable(default_folder() if choice is True else Path(choice), private=choice is True)
        except (OSError, RuntimeError) as error:
            _log.warning(
                "The compilation cache can't be used, so programs are compiled anew in every process: %s. "
                "Give another folder as compilation_cache=PATH, or False for none.",
                error,
            )

    def drop_damaged(self, name: str) -> None:
        """Removes entries of a function that aren't as they were written."""
        for entry in self._entries(name):
            if entry.name in self._verified:
                continue
            with suppress(OSError):
                seal = _seal_of(entry)
                sealed = seal.read_text() if seal.exists() else None
                if sealed == _checksum(entry):
                    self._verified.add(entry.name)
                    continue
                # Without a seal, the process that wrote it was interrupted, or is writing still.
                if sealed is not None:
                    _log.warning("%s is damaged; it is removed and compiled again.", entry)
                entry.unlink(missing_ok=True)

    @contextmanager
    def in_use(self, name: str) -> Iterator[Outcome]:
        """Lets the compilation of a function, which happens in the block, use the cache."""
        outcome = Outcome()
        if self.folder is None or _configured_by_caller():
            yield outcome
            return
        with _LOCK, _jax_cache_at(self.folder):
            before = self._entries(name)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                yield outcome
            new = self._entries(name) - before
            for entry in new:
                self._seal(entry)
        # A warning may have been turned into an exception; a damaged cache must not become one.
        trouble = [warning for warning in caught if "persistent compilation cache" in str(warning.message)]
        outcome.trouble = tuple(f"{self.folder}: {warning.message}" for warning in trouble)
        outcome.hit = bool(before) and not new and not trouble
        for warning in caught:
            if warning not in trouble:
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)

    def _entries(self, name: str) -> set[Path]:
        # JAX names an entry after the function and a hash of everything that the program depends on.
        return set() if self.folder is None else set(self.folder.glob(f"jit_{name}-*{_ENTRY}"))

    def _seal(self, entry: Path) -> None:
        with suppress(OSError):
            checksum = _checksum(entry)
            partial = entry.with_name(f".{entry.name}.{secrets.token_hex(8)}")
            partial.write_text(checksum)
            partial.replace(_seal_of(entry))
            self._verified.add(entry.name)


def jax_setting(name: str) -> Any:
    """The value of a setting of JAX; `jax.config.read` refuses those that have a context manager."""
    return getattr(jax.config, name)


def _configured_by_caller() -> bool:
    return bool(jax_setting("jax_compilation_cache_dir")) or not jax_setting("jax_enable_compilation_cache")


def _usable(folder: Path, *, private: bool) -> Path:
    """The folder, made if need be and shown to be writable."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if private and hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        raise PermissionError(f"others may write to {folder}, and could make this process run their code")
    with tempfile.TemporaryFile(dir=folder):
        pass
    return folder


@contextmanager
def _jax_cache_at(folder: Path) -> Iterator[None]:
    settings = {
        "jax_compilation_cache_dir": str(folder),
        # JAX leaves out what compiles in under a second; a start has many of those.
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: jax_setting(name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        # JAX remembers the first folder that it used until it is told to forget.
        jax_cache.reset_cache()
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        jax_cache.reset_cache()


def _seal_of(entry: Path) -> Path:
    return entry.with_name(entry.name + _CHECKSUM)


def _checksum(entry: Path) -> str:
    with entry.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
