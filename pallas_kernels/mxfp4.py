"""MXFP4: 4-bit floats with one power-of-two scale for every 32 of them, as the checkpoints store routed experts.

Source: OCP Microscaling Formats (MX) specification 1.0; the packing is that of the public Kimi K3 checkpoint.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

BLOCK = 32
"""Consecutive input elements that share a scale."""

SMALLEST_EXACT_SCALE, LARGEST_EXACT_SCALE = 2, 252
"""Scale bytes between which every product of a code and a scale is a normal bfloat16."""

_NAN_SCALE = 255
# Twice the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 of the codes 0..7, one nibble each: a table that needs no gather.
_TWICE_MAGNITUDE = 0xC8643210
# Between neighbouring magnitudes. A tie belongs to the even code, so it goes up from an odd code only.
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mxfp4:
    """An array [..., out, in] of w = e2m1(code) · 2^(scale − 127).

    Codes 0..7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign. Input elements 2i and 2i+1 are the low and the high
    nibble of byte i. Scale byte j belongs to input elements 32j..32j+31.

    Attributes:
        packed: uint8 [..., out, in/2], a JAX or NumPy array.
        scale: uint8 [..., out, in/32].
    """

    # Any, because a pytree of this type also holds shapes, shardings or anything else that jax.tree.map puts there.
    packed: Any
    scale: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., out, in] of the array that this one stands for."""
        return (*self.packed.shape[:-1], 2 * self.packed.shape[-1])

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.packed.shape)

    @property
    def nbytes(self) -> int:
        """Bytes held: 4.25 bits for each element."""
        return self.packed.size + self.scale.size

    def check(self, name: str = "Mxfp4") -> None:
        """Raises ValueError, with `name` in it, unless the two parts fit each other."""
        for part, array in (("packed", self.packed), ("scale", self.scale)):
            if array.dtype != np.uint8:
                raise ValueError(f"{name}.{part} has dtype {array.dtype}; MXFP4 is stored as uint8.")
        *outer, half = self.packed.shape
        if 2 * half % BLOCK:
            raise ValueError(f"{name}.packed holds {2 * half} input elements a row; a multiple of {BLOCK} is needed.")
        expected = (*outer, 2 * half // BLOCK)
        if tuple(self.scale.shape) != expected:
            raise ValueError(
                f"{name}.scale has shape {tuple(self.scale.shape)}; packed of shape {tuple(self.packed.shape)} needs "
                f"{expected}, one byte for each {BLOCK} input elements."
            )

    def __getitem__(self, index: Any) -> "Mxfp4":
        """Indexes any axis but the last, whose elements share bytes and scales."""
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) >= self.ndim or any(part is Ellipsis or part is None for part in parts):
            raise IndexError(
                f"Mxfp4 of shape {self.shape} is indexed with {index!r}; only its first {self.ndim - 1} axes can be "
                "indexed, without None or an ellipsis."
            )
        return Mxfp4(self.packed[index], self.scale[index])

    def dequantize(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """The array [..., out, in] itself.

        Exact for scale bytes 2..252. Bytes 0 and 1 give zeros on every backend (their products are subnormal in part),
        253 and 254 overflow to infinity where a product does, 255 gives NaN.

        Args:
            dtype: bfloat16, float32 or float64; narrower exponents can't hold the scales.

        Raises:
            ValueError: another dtype, or parts that don't fit each other.
        """
        dtype = _legal(dtype, "dequantize")
        self.check()
        packed, scale = jnp.asarray(self.packed, jnp.uint16), jnp.asarray(self.scale, jnp.uint32)
        # Both nibbles of a byte become the bytes of a 16-bit word, low one first: a third of the time, on CPU, of
        # interleaving two arrays or of shifting a repeated one.
        codes = jax.lax.bitcast_convert_type(packed & 0xF | packed >> 4 << 8, jnp.uint8).astype(jnp.uint32)
        twice = (jnp.uint32(_TWICE_MAGNITUDE) >> (codes & 7) * 4 & 15).astype(jnp.int32).astype(jnp.float32)
        # Half the scale makes up for the doubled codes; it is a normal number down to byte 2, where 2^(s-127) / 2 is
        # the smallest one, and is built from its bits because exp2 is an approximation on some backends.
        half = _power_of_two(jnp.maximum(scale, 1) - 1)
        half = jnp.where(scale == _NAN_SCALE, jnp.nan, half)
        values = jnp.where(codes >= 8, -twice, twice).reshape(*scale.shape, BLOCK) * half[..., None]
        return values.reshape(self.shape).astype(dtype)

    def even_odd(self, dtype: DTypeLike) -> tuple[Float[Array, "... half"], Float[Array, "... half"]]:
        """Elements 0, 2, 4, ... and 1, 3, 5, ... of the last axis, each [..., out, in/2]: no element changes its place.

        Scales reach their sixteen elements of each half by a product with ones and zeros, which is exact, so nothing has
        axes of 2 or 32 elements, for which a TPU would set aside 128 lanes. Values are those of `dequantize`, but that a
        scale byte of 255 makes all of its row NaN.

        Args:
            dtype: bfloat16, float32 or float64.

        Raises:
            ValueError: as `dequantize`.
        """
        dtype = _legal(dtype, "even_odd")
        self.check()
        packed, scale = jnp.asarray(self.packed, jnp.uint32), jnp.asarray(self.scale, jnp.uint32)
        half = jnp.where(scale == _NAN_SCALE, jnp.nan, _power_of_two(jnp.maximum(scale, 1) - 1)).astype(jnp.bfloat16)
        block = jax.lax.broadcasted_iota(jnp.int32, (scale.shape[-1], packed.shape[-1]), 0)
        place = jax.lax.broadcasted_iota(jnp.int32, block.shape, 1)
        spread = (place // (BLOCK // 2) == block).astype(jnp.bfloat16)
        scales = jnp.matmul(half, spread, preferred_element_type=jnp.float32).astype(jnp.bfloat16)

        def values(codes: jax.Array) -> jax.Array:
            twice = (jnp.uint32(_TWICE_MAGNITUDE) >> (codes & 7) * 4 & 15).astype(jnp.int32).astype(jnp.float32)
            return (jnp.where(codes >= 8, -twice, twice) * scales.astype(jnp.float32)).astype(dtype)

        return values(packed & 0xF), values(packed >> 4)

    @classmethod
    def quantize(cls, values: Float[Array, "... D"]) -> "Mxfp4":
        """The nearest MXFP4 array under the OCP rule for scales.

        scale = 2^(⌊log2 max|v|⌋ − 2) over 32 consecutive input elements, kept within bytes 2..252. Elements go to the
        nearest code, ties to the even one, and saturate at ±6 scales.

        Raises:
            ValueError: the last axis isn't a multiple of 32.
        """
        *outer, width = values.shape
        if width % BLOCK:
            raise ValueError(f"Mxfp4.quantize: the last axis has {width} elements; a multiple of {BLOCK} is needed.")
        blocks = values.astype(jnp.float32).reshape(*outer, width // BLOCK, BLOCK)
        _, exponent = jnp.frexp(jnp.max(jnp.abs(blocks), axis=-1))
        scale = jnp.clip(exponent - 1 - 2 + 127, SMALLEST_EXACT_SCALE, LARGEST_EXACT_SCALE).astype(jnp.uint32)
        scaled = blocks * _power_of_two(254 - scale)[..., None]
        codes = jnp.where(jnp.signbit(scaled), jnp.uint8(8), jnp.uint8(0))
        for lower, midpoint in enumerate(_MIDPOINTS):
            above = jnp.abs(scaled) >= midpoint if lower % 2 else jnp.abs(scaled) > midpoint
            codes = codes + above.astype(jnp.uint8)
        codes = codes.reshape(*outer, width // 2, 2)
        return cls(codes[..., 0] | codes[..., 1] << 4, scale.astype(jnp.uint8))


def find_invalid_scales(scale: UInt8[np.ndarray, "..."]) -> np.ndarray:
    """Indices [n, axes] of the scale bytes that are 255 (NaN), which no valid checkpoint holds; runs on the host."""
    return np.argwhere(scale == _NAN_SCALE)


def _legal(dtype: DTypeLike, method: str) -> np.dtype:
    dtype = jnp.dtype(dtype)
    if dtype not in (jnp.bfloat16, jnp.float32, jnp.float64):
        raise ValueError(f"Mxfp4.{method}: dtype is {dtype}; it must be bfloat16, float32 or float64.")
    return dtype


def _power_of_two(biased_exponent: jax.Array) -> jax.Array:
    """2^(biased_exponent - 127) in float32 for uint32 exponents 1..254; 0 for exponent 0."""
    return jax.lax.bitcast_convert_type(biased_exponent << 23, jnp.float32)
