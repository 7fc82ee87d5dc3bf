"""Facts about raw values: NaN without floating-point arithmetic, checksums, FP8 blocks, aligned memory."""

import math
import zlib

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

FP8_BLOCK = 128
"""Rows and columns of a tile that shares one scale in FP8 checkpoints."""

_PAGE = 4096

NAN_SCALE = 255
"""The MXFP4 scale byte that is NaN."""

ALIGNMENT = 64
"""Bytes of a cache line, which is also what the CPU backend needs in order to take an array over without a copy."""


def is_float(dtype: np.dtype) -> bool:
    """Whether values are floating-point numbers, those of ml_dtypes included."""
    return bool(jnp.issubdtype(dtype, jnp.floating))


def empty(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """An uninitialised array that starts on a cache line."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    offset = -raw.ctypes.data % ALIGNMENT
    return raw[offset : offset + size].view(dtype).reshape(shape)


def touch(array: np.ndarray) -> None:
    """Makes the system provide the memory of a new C-contiguous array, in this thread.

    Clearing pages costs more than reading files does. TensorStore would leave it to the few threads that copy.
    """
    bytes_of(array)[::_PAGE] = 0


def bytes_of(array: np.ndarray) -> np.ndarray:
    """The bytes of a C-contiguous array, as a flat view."""
    return array.reshape(-1).view(np.uint8)


def checksum(array: np.ndarray, before: int = 0) -> int:
    """CRC-32 of a C-contiguous array's bytes; `before` is that of the bytes that precede them."""
    return zlib.crc32(bytes_of(array).data, before)


def has_nan(array: np.ndarray) -> bool:
    """Whether a C-contiguous float array holds NaN.

    A float with its sign bit cleared is NaN iff its bits exceed those of infinity. The largest integer of either sign
    decides, which needs no copy and, for bfloat16, a fraction of the time of `numpy.isnan`.
    """
    if not array.size:
        return False
    if array.dtype.itemsize == 1:
        with np.errstate(invalid="ignore"):
            return bool(np.isnan(array).any())
    infinity = int(np.array(np.inf, array.dtype).view(f"u{array.dtype.itemsize}"))
    sign = 1 << (8 * array.dtype.itemsize - 1)
    positive = int(array.view(f"i{array.dtype.itemsize}").max())
    return positive > infinity or int(array.view(f"u{array.dtype.itemsize}").max()) > infinity + sign


def dequantize_fp8(value: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """float32 of an FP8 matrix whose 128 x 128 tiles each have a factor in `scale`."""
    factors = scale.astype(np.float32)
    for axis, size in enumerate(value.shape):
        factors = np.repeat(factors, FP8_BLOCK, axis=axis).take(np.arange(size), axis=axis)
    return value.astype(np.float32) * factors
