"""Real shapes of the short convolution, for tests, benchmarks and ahead-of-time compilation."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


@dataclass(frozen=True)
class ShortConvSpec:
    """One call of `short_conv`.

    Attributes:
        name: unique.
        batch: rows B.
        tokens: tokens T of a row.
        channels: X, those of q, k and v together.
        width: taps W.
        dtype: of x, y and the tail. The weight is float32.
    """

    name: str
    batch: int
    tokens: int
    channels: int
    width: int = 4
    dtype: DTypeLike = jnp.bfloat16

    def arguments(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the array arguments of `short_conv`, by name, with a tail carried in."""
        return {
            "x": jax.ShapeDtypeStruct((self.batch, self.tokens, self.channels), self.dtype),
            "weight": jax.ShapeDtypeStruct((self.channels, self.width), jnp.float32),
            "tail": jax.ShapeDtypeStruct((self.batch, self.width - 1, self.channels), self.dtype),
        }


KIMI_LINEAR_CHANNELS = 3 * 32 * 128
K3_CHANNELS = 3 * 96 * 128

SPECS: tuple[ShortConvSpec, ...] = (
    ShortConvSpec("kimi_linear_prefill_8k", 1, 8192, KIMI_LINEAR_CHANNELS),
    ShortConvSpec("kimi_linear_decode_64", 64, 1, KIMI_LINEAR_CHANNELS),
    ShortConvSpec("k3_prefill_8k", 1, 8192, K3_CHANNELS),
    ShortConvSpec("k3_prefill_8k_tp8", 1, 8192, K3_CHANNELS // 8),
    ShortConvSpec("k3_decode_64", 64, 1, K3_CHANNELS),
    ShortConvSpec("k3_verify_8", 64, 8, K3_CHANNELS),
)
