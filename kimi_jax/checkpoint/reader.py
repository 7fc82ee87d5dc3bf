"""Reading safetensors files, one or a sharded directory of them: mapped tensors, or just the bytes of parts."""

import contextlib
import itertools
import math
import mmap
import os
import re
import stat
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable, KeysView, Mapping
from pathlib import Path, PurePosixPath

import numpy as np

from kimi_jax import strict_json
from kimi_jax.checkpoint.boxes import Box
from kimi_jax.checkpoint.errors import CheckpointError
from kimi_jax.checkpoint.safetensors_format import (
    LARGEST_HEADER,
    LENGTH_BYTES,
    HeaderError,
    TensorEntry,
    parse_header,
    shown,
)

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_LARGEST_INDEX = 512 * 2**20
_MOST_PROBLEMS = 40
_MOST_NAMES = 20
# A part whose rows aren't adjacent is read row by row, unless rows are so short and so many that the calls would cost
# more than the bytes between them.
_SHORTEST_ROW, _MOST_ROWS = 512, 4096
_NUMBERED = re.compile(r"(?P<stem>.*)-(?P<number>\d{1,9})-of-(?P<total>\d{1,9})\.safetensors")


class SafetensorsFile:
    """One safetensors file. Opening it reads and checks the header; tensors are read when they're asked for.

    Attributes:
        path: the file.
        metadata: strings that the file carries besides its tensors.
        bytes_read: bytes that `read_box` has taken from the file.

    Raises:
        CheckpointError: the file can't be read, or its header doesn't describe it exactly: length, JSON, dtypes,
            shapes, and byte ranges that cover the data without overlap, gap or rest.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        # Only views keep the mapping alive, so that pages of tensors that are done with don't add up.
        self._mapping: weakref.ref[mmap.mmap] | None = None
        self._entries: dict[str, TensorEntry]
        self._opened: int | None = None
        self._lock = threading.Lock()
        self.bytes_read = 0
        self.metadata: dict[str, str]
        try:
            if not stat.S_ISREG(self.path.stat().st_mode):
                raise CheckpointError(f"{self.path} isn't a regular file.")
            with self.path.open("rb") as file:
                self._size = os.fstat(file.fileno()).st_size
                start = file.read(LENGTH_BYTES)
                if len(start) < LENGTH_BYTES:
                    raise CheckpointError(f"{self.path} has {self._size} bytes, too few for a safetensors file.")
                length = int.from_bytes(start, "little")
                largest = min(LARGEST_HEADER, self._size - LENGTH_BYTES)
                if length > largest:
                    raise CheckpointError(
                        f"{self.path} announces a header of {length} bytes; a file of {self._size} bytes can have at "
                        f"most {largest}. It's damaged, incomplete or not a safetensors file."
                    )
                header = file.read(length)
        except OSError as error:
            raise CheckpointError(f"{self.path} can't be read: {error.strerror or error}.") from error
        try:
            self._entries, self.metadata = parse_header(header, self._size - LENGTH_BYTES - len(header))
        except HeaderError as error:
            raise CheckpointError(f"{self.path}: {error}") from error

    def names(self) -> KeysView[str]:
        """Names of the tensors, in the order of their bytes."""
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._entry(name).shape

    def dtype(self, name: str) -> np.dtype:
        """Element type of a tensor; bfloat16 and the float8 kinds are those of ml_dtypes."""
        return self._entry(name).dtype

    def tensor(self, name: str) -> np.ndarray:
        """A tensor as a read-only view of the mapped file; its bytes are read when they're touched.

        Raises:
            CheckpointError: there is no such tensor, the file has changed size since it was opened, or a BOOL tensor
                holds bytes other than 0 and 1.
        """
        entry = self._entry(name)
        if entry.start == entry.stop:
            empty = np.empty(entry.shape, entry.dtype)
            empty.flags.writeable = False
            return empty
        raw = np.frombuffer(self._mapped(), np.uint8, entry.stop - entry.start, entry.start)
        if entry.dtype == np.bool_ and int(raw.max()) > 1:
            raise CheckpointError(f"{self.path}: tensor {shown(name)} is BOOL but holds bytes other than 0 and 1.")
        return raw.view(entry.dtype).reshape(entry.shape)

    def read_box(self, name: str, box: Box, out: np.ndarray, shape: tuple[int, ...] | None = None) -> None:
        """Copies part of a tensor into `out`, reading the bytes of that part; any number of threads may call it.

        Nothing is mapped, so what has been read doesn't count as memory of this process.

        Args:
            name: the tensor.
            box: the part, in a tensor of `shape`.
            out: C-contiguous array of the box's shape and the tensor's dtype.
            shape: row-major shape in which the tensor is seen; it may cover only the first elements. None: its own.

        Raises:
            CheckpointError: there is no such tensor, or the file can't be read or has changed size since it was opened.
        """
        entry = self._entry(name)
        shape = entry.shape if shape is None else shape
        assert math.prod(shape) <= math.prod(entry.shape)
        assert (out.shape, out.dtype) == (box.shape, entry.dtype)
        assert out.flags.c_contiguous
        if not out.size:
            return
        # Axes after `axis` are whole, so one row of bytes holds everything from `axis` on.
        axis = max((i for i in range(len(shape)) if box.shape[i] != shape[i]), default=0)
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        rows = math.prod(box.shape[:axis])
        row = math.prod(box.shape[axis:])
        if rows > _MOST_ROWS and row * entry.dtype.itemsize < _SHORTEST_ROW:
            # The caller bounds the box, so the rows between which gaps are short fit in memory.
            wider = Box((*box.start[:axis], *(0 for _ in shape[axis:])), (*box.shape[:axis], *shape[axis:]))
            whole = np.empty(wider.shape, entry.dtype)
            self.read_box(name, wider, whole, shape)
            out[...] = whole[box.within(wider).slices]
            return
        flat = out.reshape(-1).view(np.uint8).data
        length = row * entry.dtype.itemsize
        inner = sum(a * stride for a, stride in zip(box.start[axis:], strides[axis:], strict=True))
        for number, index in enumerate(np.ndindex(*box.shape[:axis])):
            outer = sum((a + i) * stride for a, i, stride in zip(box.start, index, strides, strict=False))
            offset = entry.start + (outer + inner) * entry.dtype.itemsize
            self._pread(flat[number * length : (number + 1) * length], offset)

    def _pread(self, buffer: memoryview, offset: int) -> None:
        with self._lock:
            if self._opened is None:
                self._opened = self._open_descriptor()
            self.bytes_read += len(buffer)
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._opened, [buffer[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(f"{self.path} can't be read: {error.strerror or error}.") from error
            if count == 0:
                raise CheckpointError(f"{self.path} had {self._size} bytes when it was opened and is shorter now.")
            done += count

    def _open_descriptor(self) -> int:
        try:
            descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            size = os.fstat(descriptor).st_size
        except OSError as error:
            raise CheckpointError(f"{self.path} can't be read: {error.strerror or error}.") from error
        weakref.finalize(self, _close, descriptor)
        if size != self._size:
            raise CheckpointError(f"{self.path} had {self._size} bytes when it was opened and has {size} now.")
        return descriptor

    def _entry(self, name: str) -> TensorEntry:
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path} holds no tensor {shown(name)}.")
        return entry

    def _mapped(self) -> mmap.mmap:
        mapping = None if self._mapping is None else self._mapping()
        if mapping is not None:
            return mapping
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                # Touching a mapped page past the end of a file would end the process.
                if size != self._size:
                    raise CheckpointError(f"{self.path} had {self._size} bytes when it was opened and has {size} now.")
                mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{self.path} can't be mapped: {error.strerror or error}.") from error
        self._mapping = weakref.ref(mapping)
        return mapping


class CheckpointReader:
    """The tensors of a directory: those of `model.safetensors.index.json`, else `model.safetensors`, else all files.

    Opening it reads every header, so what is missing is known before any tensor is read.

    Attributes:
        directory: the directory.

    Raises:
        CheckpointError: listing everything that is wrong: no files, missing files, paths that leave the directory,
            damaged headers, tensors that the index and the files don't agree on, a tensor in two files.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self._files: dict[str, SafetensorsFile] = {}
        if not self.directory.is_dir():
            raise CheckpointError(f"{self.directory} isn't a directory.")
        problems: list[str] = []
        index = self.directory / INDEX_NAME
        # lexists: an index behind a broken link is a damaged checkpoint, not one without an index.
        if os.path.lexists(index):
            self._open_indexed(_read_index(index), problems)
        else:
            self._open_all(problems)
        if problems:
            raise CheckpointError(_report(f"{self.directory} can't be read as a checkpoint", problems))

    def names(self) -> KeysView[str]:
        """Names of all tensors."""
        return self._files.keys()

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._file(name).path

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._file(name).shape(name)

    def dtype(self, name: str) -> np.dtype:
        """Element type of a tensor; bfloat16 and the float8 kinds are those of ml_dtypes."""
        return self._file(name).dtype(name)

    def read(self, name: str) -> np.ndarray:
        """A tensor as a read-only view of its file, as `SafetensorsFile.tensor`."""
        return self._file(name).tensor(name)

    def read_box(self, name: str, box: Box, out: np.ndarray, shape: tuple[int, ...] | None = None) -> None:
        """Copies part of a tensor into `out`, as `SafetensorsFile.read_box`."""
        self._file(name).read_box(name, box, out, shape)

    @property
    def files(self) -> tuple[SafetensorsFile, ...]:
        """The files that hold tensors, by name."""
        return tuple(sorted(set(self._files.values()), key=lambda file: file.path))

    @property
    def bytes_read(self) -> int:
        """Bytes that `read_box` has taken from the files."""
        return sum(file.bytes_read for file in self.files)

    def _file(self, name: str) -> SafetensorsFile:
        file = self._files.get(name)
        if file is None:
            raise CheckpointError(f"{self.directory} holds no tensor {shown(name)}.")
        return file

    def _open_indexed(self, weight_map: Mapping[str, str], problems: list[str]) -> None:
        by_file: defaultdict[str, list[str]] = defaultdict(list)
        for name, file in weight_map.items():
            by_file[file].append(name)
        opened = self._open(sorted(by_file), INDEX_NAME, problems)
        for file, contents in opened.items():
            listed, held = set(by_file[file]), contents.names()
            if absent := sorted(listed - held):
                problems.append(f"{file} lacks tensors that {INDEX_NAME} says it holds: {_names(absent)}.")
            if extra := sorted(held - listed):
                problems.append(f"{file} holds tensors that {INDEX_NAME} doesn't say it holds: {_names(extra)}.")
            self._files.update(dict.fromkeys(listed & held, contents))

    def _open_all(self, problems: list[str]) -> None:
        files = [SINGLE_NAME]
        if not os.path.lexists(self.directory / SINGLE_NAME):
            files = sorted(path.name for path in self.directory.glob("*.safetensors"))
            if not files:
                problems.append(f"There is no {INDEX_NAME} and no *.safetensors file.")
            problems.extend(_missing_numbers(files))
        for file, contents in self._open(files, "the directory", problems).items():
            if repeated := sorted(contents.names() & self._files.keys()):
                others = {self._files[name].path.name for name in repeated}
                problems.append(f"{file} and {', '.join(sorted(others))} both hold: {_names(repeated)}.")
            self._files.update(dict.fromkeys(contents.names(), contents))

    def _open(self, files: Iterable[str], listed_in: str, problems: list[str]) -> dict[str, SafetensorsFile]:
        opened: dict[str, SafetensorsFile] = {}
        missing: list[str] = []
        for file in files:
            if obstacle := self._leaves_directory(file):
                problems.append(f"{listed_in} names {shown(file)}, {obstacle}.")
            elif not os.path.exists(self.directory / file):
                missing.append(file)
            else:
                try:
                    opened[file] = SafetensorsFile(self.directory / file)
                except CheckpointError as error:
                    problems.append(str(error))
        if missing:
            problems.insert(0, f"{listed_in} names files that don't exist: {_names(missing)}.")
        return opened

    def _leaves_directory(self, file: str) -> str | None:
        """Why a path isn't followed, or None when it stays in the directory."""
        path = PurePosixPath(file)
        if path.suffix != ".safetensors" or not is_file_name(file):
            return "which isn't a safetensors file"
        if path.is_absolute() or ".." in path.parts or "\\" in file or re.match("[A-Za-z]:", file):
            return "which isn't a path inside the directory"
        return link_target(self.directory, file)[1]


def is_file_name(text: str) -> bool:
    """Whether a string from a file could be a relative path at all: encodable, without NUL, of a legal length."""
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        return False
    return b"\0" not in encoded and len(encoded) < 4096 and all(len(part) < 256 for part in encoded.split(b"/"))


def link_target(directory: Path, file: str) -> tuple[Path, str | None]:
    """Where a file of a directory really is, and why it isn't followed there, or None when it may be."""
    root = directory.resolve()
    roots = [root]
    if root.parent.name == "snapshots":
        # The Hugging Face cache keeps snapshots of links into the blobs of the same repository.
        roots.append(root.parent.parent / "blobs")
    try:
        target = (root / file).resolve()
    except (OSError, RuntimeError):
        return root / file, "a link that leads nowhere"
    if not any(target.is_relative_to(allowed) for allowed in roots):
        return target, f"a link to {target}, outside the directory"
    return target, None


def _close(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.close(descriptor)


def _read_index(path: Path) -> dict[str, str]:
    try:
        tree = strict_json.load(path, largest=_LARGEST_INDEX)
    except (strict_json.StrictJsonError, FileNotFoundError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    weight_map = tree.get("weight_map") if isinstance(tree, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map, an object from tensor names to file names.")
    wrong = [name for name, file in weight_map.items() if not isinstance(file, str)]
    if wrong:
        raise CheckpointError(f"{path}: weight_map gives no file name for {_names(wrong)}.")
    return weight_map


def _missing_numbers(files: Iterable[str]) -> list[str]:
    """What is missing from files named stem-number-of-total.safetensors."""
    families: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for file in files:
        if match := _NUMBERED.fullmatch(file):
            families[match["stem"], match["total"]].add(int(match["number"]))
    problems = []
    for (stem, total), numbers in families.items():
        absent = (number for number in range(1, int(total) + 1) if number not in numbers)
        if first := list(itertools.islice(absent, _MOST_NAMES)):
            listed = ", ".join(map(str, first))
            problems.append(f"Of {total} files named {stem}-NUMBER-of-{total}.safetensors these are missing: {listed}.")
    return problems


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(shown(name) for name in names[:_MOST_NAMES]) + more


def _report(heading: str, problems: list[str]) -> str:
    lines = [f"{heading} ({len(problems)} {'problem' if len(problems) == 1 else 'problems'}):"]
    lines += problems[:_MOST_PROBLEMS]
    if len(problems) > _MOST_PROBLEMS:
        lines.append(f"... and {len(problems) - _MOST_PROBLEMS} more.")
    return "\n  ".join(lines)
