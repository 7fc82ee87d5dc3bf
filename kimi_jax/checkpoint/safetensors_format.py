"""The safetensors header: parsing it, and refusing one that doesn't describe its file exactly.

A file is eight bytes with the header's length (little-endian), the header as a JSON object, and the tensors' bytes.
Each entry of the header gives a dtype, a shape and the range of bytes relative to the end of the header. Ranges must
follow one another without overlap or gap and end where the file ends, so no byte of a file is unaccounted for.

Source: https://github.com/huggingface/safetensors (format description in its README).
"""

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import ml_dtypes
import numpy as np

from kimi_jax import strict_json

DTYPES: Mapping[str, np.dtype] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "BOOL": np.bool_,
        "U8": np.uint8,
        "I8": np.int8,
        "U16": np.uint16,
        "I16": np.int16,
        "U32": np.uint32,
        "I32": np.int32,
        "U64": np.uint64,
        "I64": np.int64,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F32": np.float32,
        "F64": np.float64,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    }.items()
}
METADATA = "__metadata__"
LENGTH_BYTES = 8
LARGEST_HEADER = 100_000_000
_MOST_DIMENSIONS = 32
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}


class TensorEntry(NamedTuple):
    """One tensor of a file: its type, and its bytes counted from the start of the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@runtime_checkable
class TensorLike(Protocol):
    """What a header needs to know of a tensor."""

    @property
    def dtype(self) -> np.dtype:
        """Element type."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        ...


class TensorInfo(NamedTuple):
    """A tensor that isn't there yet."""

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize


class HeaderError(ValueError):
    """A header is malformed; the message doesn't name the file."""


def shown(value: object) -> str:
    """A name or value from a file, short enough for a message whatever the file holds."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def parse_header(header: bytes, data_size: int) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Parses a header whose file holds `data_size` bytes after it.

    Returns:
        The tensors by name, in the order of their bytes, and the metadata.

    Raises:
        HeaderError: the header isn't an object of well-formed entries that cover the data exactly.
    """
    try:
        tree = strict_json.loads(header)
    except strict_json.StrictJsonError as error:
        raise HeaderError(f"The header is damaged. {error}") from error
    if not isinstance(tree, dict):
        raise HeaderError("The header isn't a JSON object.")
    metadata = tree.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise HeaderError(f"{METADATA} must be an object of strings.")
    base = LENGTH_BYTES + len(header)
    entries = sorted(
        ((name, _entry(name, entry, base, data_size)) for name, entry in tree.items()),
        key=lambda named: (named[1].start, named[1].stop),
    )
    end = base
    previous = "the header"
    for name, entry in entries:
        if entry.start != end:
            what = "overlaps" if entry.start < end else f"leaves a gap of {entry.start - end} bytes after"
            raise HeaderError(f"Tensor {shown(name)} {what} {previous}.")
        end, previous = entry.stop, shown(name)
    if end != base + data_size:
        raise HeaderError(f"{base + data_size - end} bytes after the last tensor belong to no tensor.")
    return dict(entries), metadata


def _entry(name: str, entry: Any, base: int, data_size: int) -> TensorEntry:
    # JSON can spell half of a surrogate pair, which no encoding can write again.
    if any("\ud800" <= character <= "\udfff" for character in name):
        raise HeaderError(f"The name of tensor {shown(name)} isn't valid Unicode.")
    if not isinstance(entry, dict) or set(entry) != _ENTRY_KEYS:
        raise HeaderError(f"Tensor {shown(name)} must be described by exactly {', '.join(sorted(_ENTRY_KEYS))}.")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise HeaderError(f"Tensor {shown(name)} has dtype {shown(entry['dtype'])}; known are {', '.join(DTYPES)}.")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_counts(shape) or len(shape) > _MOST_DIMENSIONS:
        raise HeaderError(
            f"Tensor {shown(name)} has shape {shown(shape)}; it must be a list of at most {_MOST_DIMENSIONS} "
            "non-negative integers."
        )
    if not _are_counts(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= data_size:
        raise HeaderError(
            f"Tensor {shown(name)} has data_offsets {shown(offsets)}; they must be two integers, ascending, from 0 to "
            f"the {data_size} bytes of data that the file holds."
        )
    size = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != size:
        raise HeaderError(
            f"Tensor {shown(name)} has {offsets[1] - offsets[0]} bytes; {entry['dtype']} of shape {shown(shape)} "
            f"needs {size}."
        )
    return TensorEntry(dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values
    )


def build_header(tensors: Mapping[str, TensorLike], metadata: Mapping[str, str]) -> tuple[bytes, list[str]]:
    """The first bytes of a file with these tensors, header included, and their names in the order of their bytes.

    Wide elements come first, and spaces end the header at a multiple of eight bytes, so every tensor is aligned.

    Raises:
        HeaderError: the format can't hold a name or a dtype, or the header is too large.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    for name, tensor in tensors.items():
        if name == METADATA:
            raise HeaderError(f"{METADATA} can't be the name of a tensor.")
        if tensor.dtype not in names:
            raise HeaderError(f"Tensor {shown(name)} has dtype {tensor.dtype}; known are {', '.join(map(str, names))}.")
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    tree: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        tree[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header = json.dumps(tree, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % LENGTH_BYTES)
    if len(header) > LARGEST_HEADER:
        raise HeaderError(f"The header would have {len(header)} bytes; the format allows {LARGEST_HEADER}.")
    return len(header).to_bytes(LENGTH_BYTES, "little") + header, order
