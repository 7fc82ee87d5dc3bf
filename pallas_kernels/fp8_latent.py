"""Latents in FP8: eight bits for each channel of a value, with a scale for every 128, and bfloat16 for the slot.

One token of the Kimi models takes 656 bytes instead of 1152: 512 e4m3 numbers, four little-endian float32 scales and 64
bfloat16 numbers, in this order. Source: the V3.2 cache layout of FlashMLA (`tests/quant.py` there), which vLLM calls
fp8_ds_mla.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

TILE = 128
"""Channels that share a scale."""

LARGEST = 448.0
"""Largest e4m3 number."""

SMALLEST_PEAK = 1e-4
"""A tile's largest magnitude counts as at least this, so that a tile of zeros has a scale."""


def bytes_per_token(latent_width: int, slot_width: int) -> int:
    """Bytes of one token: one for each latent channel, four for each scale, two for each channel of the slot.

    Raises:
        ValueError: `latent_width` isn't a positive multiple of 128, or `slot_width` is negative.
    """
    if latent_width < 1 or latent_width % TILE or slot_width < 0:
        raise ValueError(
            f"latent_width={latent_width}, slot_width={slot_width}: FP8 latents need a latent width that is a positive "
            f"multiple of {TILE}, channels that share a scale, and a slot width of at least 0."
        )
    return latent_width + 4 * (latent_width // TILE) + 2 * slot_width


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Fp8Latent:
    """An array [..., L + R]: channels c < L are e4m3(byte c) · scale(⌊c / 128⌋), the others are bfloat16.

    Attributes:
        packed: uint8 [..., L + 4 (L / 128) + 2 R], a JAX or NumPy array.
        latent_width: L, a multiple of 128.
        slot_width: R.
    """

    # Any, because a pytree of this type also holds shapes, shardings or anything else that jax.tree.map puts there.
    packed: Any
    latent_width: int = field(metadata={"static": True})
    slot_width: int = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., L + R] of the array that this one stands for."""
        return (*self.packed.shape[:-1], self.latent_width + self.slot_width)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.packed.shape)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.packed.size

    def check(self, name: str = "Fp8Latent") -> None:
        """Raises ValueError, with `name` in it, unless the bytes fit the widths."""
        size = bytes_per_token(self.latent_width, self.slot_width)
        if self.packed.dtype != np.uint8 or self.packed.shape[-1:] != (size,):
            raise ValueError(
                f"{name}.packed is {self.packed.dtype}{list(self.packed.shape)}; {self.latent_width} latent channels and "
                f"a slot of {self.slot_width} take uint8[..., {size}]."
            )

    def __getitem__(self, index: Any) -> "Fp8Latent":
        """Indexes any axis but the last."""
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) >= self.ndim or any(part is Ellipsis or part is None for part in parts):
            raise IndexError(
                f"Fp8Latent of shape {self.shape} is indexed with {index!r}; only its first {self.ndim - 1} axes can be "
                "indexed, without None or an ellipsis."
            )
        return Fp8Latent(self.packed[index], self.latent_width, self.slot_width)

    def reshape(self, *shape: int) -> "Fp8Latent":
        """The same tokens with other leading axes."""
        return Fp8Latent(self.packed.reshape(*shape, self.packed.shape[-1]), self.latent_width, self.slot_width)

    @classmethod
    def zeros(cls, shape: tuple[int, ...], latent_width: int, slot_width: int) -> "Fp8Latent":
        """Bytes of zero, which stand for zeros: [*shape, L + R] of them."""
        size = bytes_per_token(latent_width, slot_width)
        return cls(jnp.zeros((*shape, size), jnp.uint8), latent_width, slot_width)

    @classmethod
    def quantize(
        cls, values: Float[Array, "*axes W"], latent_width: int, *, power_of_two_scales: bool = False
    ) -> "Fp8Latent":
        """Quantises; do it once, when a token is written, and let every reader have the same bytes.

        scale = max(max|v|, 1e-4) / 448 over 128 channels; bytes = e4m3(v / scale), to the nearest, ties to even. What
        division pushes beyond ±448 saturates, because conversion would make some of it NaN. NaN stays NaN.

        Args:
            values: [..., L + R], latent channels first. Quotients are computed in float32.
            latent_width: L, a multiple of 128.
            power_of_two_scales: round scales up to powers of two, as FlashMLA's tests do; products are then exact.

        Raises:
            ValueError: the widths don't fit.
        """
        slot_width = values.shape[-1] - latent_width
        bytes_per_token(latent_width, slot_width)
        latent, slot = values[..., :latent_width].astype(jnp.float32), values[..., latent_width:].astype(jnp.bfloat16)
        tiles = latent.reshape(*latent.shape[:-1], latent_width // TILE, TILE)
        scale = jnp.maximum(jnp.max(jnp.abs(tiles), axis=-1), SMALLEST_PEAK) / LARGEST
        if power_of_two_scales:
            scale = _up_to_power_of_two(scale)
        codes = jnp.clip(tiles / scale[..., None], -LARGEST, LARGEST).astype(jnp.float8_e4m3fn)
        parts = (codes.reshape(latent.shape), scale, slot)
        return cls(jnp.concatenate([_bytes(part) for part in parts], axis=-1), latent_width, slot_width)

    def parts(self) -> tuple[Shaped[Array, "*axes L"], Float[Array, "*axes N"], Float[Array, "*axes R"]]:
        """(e4m3 [..., L], float32 scales [..., L / 128], bfloat16 slot [..., R]) of the same bytes."""
        self.check()
        packed = jnp.asarray(self.packed)
        ends = self.latent_width, self.latent_width + 4 * (self.latent_width // TILE)
        codes, scale, slot = packed[..., : ends[0]], packed[..., ends[0] : ends[1]], packed[..., ends[1] :]
        return (
            jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn),
            jax.lax.bitcast_convert_type(scale.reshape(*scale.shape[:-1], -1, 4), jnp.float32),
            jax.lax.bitcast_convert_type(slot.reshape(*slot.shape[:-1], -1, 2), jnp.bfloat16),
        )

    def dequantize(self, dtype: DTypeLike) -> Float[Array, "*axes W"]:
        """The array [..., L + R] itself: products in float32 or better, rounded once to `dtype`."""
        dtype = jnp.dtype(dtype)
        codes, scale, slot = self.parts()
        wide = jnp.promote_types(dtype, jnp.float32)
        tiles = codes.astype(wide).reshape(*codes.shape[:-1], -1, TILE) * scale.astype(wide)[..., None]
        return jnp.concatenate([tiles.reshape(codes.shape).astype(dtype), slot.astype(dtype)], axis=-1)


def _bytes(array: jax.Array) -> jax.Array:
    """The last axis as bytes, in memory's order."""
    split = jax.lax.bitcast_convert_type(array, jnp.uint8)
    return split.reshape(*array.shape[:-1], -1)


def _up_to_power_of_two(scale: jax.Array) -> jax.Array:
    """The least power of two that isn't less; by bits, because a logarithm misrounds at exact powers."""
    bits = jax.lax.bitcast_convert_type(scale, jnp.uint32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).astype(jnp.uint32)
    power = jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)
    return jnp.where(jnp.isfinite(scale), power, scale)
