"""MXFP8: 8-bit floats with one power-of-two scale for every 32 of them, as index keys and queries are kept.

Source: OCP Microscaling Formats (MX) specification 1.0 for the format and the "floor" rule; the "round_up" rule is that
of DeepGEMM and FlashMLA (public code).
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

BLOCK = 32
"""Consecutive elements that share a scale."""

Rule = Literal["round_up", "floor"]
"""How a scale follows from its elements."""

LARGEST = 448.0
"""Largest finite element."""

SMALLEST_MAXIMUM = 1e-4
"""Blocks of smaller numbers take the scale of a block with this maximum: a block of zeros needs some scale."""

_NAN_SCALE = 255


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mxfp8:
    """An array [..., D] of x = e4m3(element) · 2^(scale − 127).

    Scale byte j of a row belongs to elements 32j..32j+31: D + D/32 bytes a row, 132 for index keys of 128.

    Attributes:
        elements: float8_e4m3fn [..., D], a JAX or NumPy array.
        scale: uint8 [..., D/32]; 255 is NaN.
    """

    # Any, because a pytree of this type also holds shapes, shardings or anything else that jax.tree.map puts there.
    elements: Any
    scale: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., D] of the array that this one stands for."""
        return tuple(self.elements.shape)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.elements.shape)

    @property
    def nbytes(self) -> int:
        """Bytes held: 8.25 bits for each element."""
        return self.elements.size + self.scale.size

    def check(self, name: str = "Mxfp8") -> None:
        """Raises ValueError, with `name` in it, unless the two parts fit each other."""
        if self.elements.dtype != jnp.float8_e4m3fn:
            raise ValueError(f"{name}.elements has dtype {self.elements.dtype}; MXFP8 is stored as float8_e4m3fn.")
        if self.scale.dtype != np.uint8:
            raise ValueError(f"{name}.scale has dtype {self.scale.dtype}; MXFP8 has scales of uint8.")
        *outer, width = self.shape
        if width % BLOCK:
            raise ValueError(f"{name}.elements has rows of {width}; a multiple of {BLOCK} is needed.")
        expected = (*outer, width // BLOCK)
        if tuple(self.scale.shape) != expected:
            raise ValueError(
                f"{name}.scale has shape {tuple(self.scale.shape)}; elements of shape {self.shape} need {expected}, one "
                f"byte for each {BLOCK} elements."
            )

    def __getitem__(self, index: Any) -> "Mxfp8":
        """Indexes any axis but the last, whose elements share scales."""
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) >= self.ndim or any(part is Ellipsis or part is None for part in parts):
            raise IndexError(
                f"Mxfp8 of shape {self.shape} is indexed with {index!r}; only its first {self.ndim - 1} axes can be "
                "indexed, without None or an ellipsis."
            )
        return Mxfp8(self.elements[index], self.scale[index])

    def dequantize(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """The array [..., D] itself.

        Exact in float32 and float64 up to the largest float32, and in bfloat16 too, whose significand holds an
        element's. Where a backend flushes subnormal numbers, so does this; scale byte 255 gives NaN.

        Args:
            dtype: bfloat16, float32 or float64; narrower exponents can't hold the scales.

        Raises:
            ValueError: another dtype, or parts that don't fit each other.
        """
        dtype = jnp.dtype(dtype)
        if dtype not in (jnp.bfloat16, jnp.float32, jnp.float64):
            raise ValueError(f"Mxfp8.dequantize: dtype is {dtype}; it must be bfloat16, float32 or float64.")
        self.check()
        scale = jnp.asarray(self.scale, jnp.uint32)
        # Elements are halved and scales doubled, because 2^-127 is subnormal, but the last one, whose double is too large.
        factor = jax.lax.bitcast_convert_type(jnp.minimum(scale + 1, 254) << 23, jnp.float32)
        factor = jnp.where(scale == _NAN_SCALE, jnp.nan, factor)
        halves = jnp.where(scale == 254, 1.0, 0.5).astype(jnp.float32)
        elements = jnp.asarray(self.elements).astype(jnp.float32).reshape(*scale.shape, BLOCK)
        return (elements * halves[..., None] * factor[..., None]).reshape(self.shape).astype(dtype)

    @classmethod
    def quantize(cls, values: Float[Array, "... D"], rule: Rule = "round_up") -> "Mxfp8":
        """MXFP8 numbers near `values`.

        With m = max(|v|, 1e-4) over 32 consecutive elements, scale = 2^⌈log2(m / 448)⌉ ("round_up": no element
        saturates) or 2^(⌊log2 m⌋ − 8) ("floor", the OCP rule: elements above 448 scales saturate there). Elements are
        v / scale rounded to the nearest e4m3 number, ties to even. A block with a NaN has scale byte 255.

        Raises:
            ValueError: the last axis isn't a multiple of 32, or another rule.
        """
        *outer, width = values.shape
        if width % BLOCK:
            raise ValueError(f"Mxfp8.quantize: the last axis has {width} elements; a multiple of {BLOCK} is needed.")
        if rule not in ("round_up", "floor"):
            raise ValueError(f"Mxfp8.quantize: rule={rule!r}; it must be 'round_up' or 'floor'.")
        blocks = values.astype(jnp.float32).reshape(*outer, width // BLOCK, BLOCK)
        largest = jnp.max(jnp.abs(blocks), axis=-1)
        broken = jnp.isnan(largest)
        bits = jax.lax.bitcast_convert_type(jnp.maximum(largest, jnp.float32(SMALLEST_MAXIMUM)), jnp.uint32)
        exponent = (bits >> 23).astype(jnp.int32)
        if rule == "round_up":
            # m / 448 <= 2^e where m's significand is at most 1.75, that of 448 = 1.75 · 2^8. No logarithm, no quotient.
            exponent = exponent - 8 + ((bits & 0x7FFFFF) > 0x600000).astype(jnp.int32)
        else:
            exponent = exponent - 8
        inverse = jax.lax.bitcast_convert_type((254 - exponent).astype(jnp.uint32) << 23, jnp.float32)
        scaled = blocks * inverse[..., None]
        # JAX turns what is far above 448 into NaN.
        elements = jnp.clip(scaled, -LARGEST, LARGEST).astype(jnp.float8_e4m3fn)
        scale = jnp.where(broken, _NAN_SCALE, exponent).astype(jnp.uint8)
        return cls(elements.reshape(values.shape), scale)


def to_page(keys: Mxfp8) -> UInt8[Array, "... bytes"]:
    """Rows [..., S, D] as the bytes of a page [..., S · (D + D/32)]: all elements, then all scales.

    That is the order of DeepGEMM's index-key pages, whose rows of 128 also take 132 bytes.
    """
    *outer, rows, width = keys.shape
    elements = jax.lax.bitcast_convert_type(jnp.asarray(keys.elements), jnp.uint8).reshape(*outer, rows * width)
    scale = jnp.asarray(keys.scale).reshape(*outer, rows * (width // BLOCK))
    return jnp.concatenate([elements, scale], axis=-1)


def from_page(page: UInt8[Array, "... bytes"], width: int) -> Mxfp8:
    """The rows of `to_page`.

    Raises:
        ValueError: the bytes aren't a whole number of rows of this width.
    """
    *outer, size = page.shape
    row = width + width // BLOCK
    if width % BLOCK or size % row:
        raise ValueError(f"from_page: {size} bytes aren't whole rows of width={width}, which take {row} bytes each.")
    rows = size // row
    elements = jax.lax.bitcast_convert_type(page[..., : rows * width], jnp.float8_e4m3fn)
    return Mxfp8(elements.reshape(*outer, rows, width), page[..., rows * width :].reshape(*outer, rows, width // BLOCK))
