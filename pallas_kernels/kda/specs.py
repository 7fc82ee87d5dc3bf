"""Real shapes of KDA, for tests, benchmarks and ahead-of-time compilation."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

KIMI_LINEAR_HEADS = 32
K3_HEADS = 96


@dataclass(frozen=True)
class KdaSpec:
    """One call of `kda`; K = V = `width`.

    Attributes:
        name: unique.
        batch: rows B.
        tokens: tokens T of a row.
        heads: heads H on one device.
        gate_lower_bound: of the model's gate.
        segments: tokens of the packed sequences of a row; empty if the rows aren't packed.
        width: of keys and values.
        dtype: of q, k, v and o. The decay, beta and the states are float32.
    """

    name: str
    batch: int
    tokens: int
    heads: int
    gate_lower_bound: float | None = -5.0
    segments: tuple[int, ...] = ()
    width: int = 128
    dtype: DTypeLike = jnp.bfloat16

    def arguments(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the array arguments of `kda`, by name, with a state carried in."""
        token = (self.batch, self.tokens, self.heads)
        wide = (*token, self.width)
        state = (self.batch, *((len(self.segments),) if self.segments else ()), self.heads, self.width, self.width)
        arguments = {name: jax.ShapeDtypeStruct(wide, self.dtype) for name in "qkv"}
        arguments["g"] = jax.ShapeDtypeStruct(wide, jnp.float32)
        arguments["beta"] = jax.ShapeDtypeStruct(token, jnp.float32)
        arguments["initial_state"] = jax.ShapeDtypeStruct(state, jnp.float32)
        if self.segments:
            arguments["segment_ids"] = jax.ShapeDtypeStruct(token[:2], jnp.int32)
        return arguments

    def options(self) -> dict[str, float | int | None]:
        """The arguments of `kda` that aren't arrays, by name."""
        return {"gate_lower_bound": self.gate_lower_bound, "num_segments": len(self.segments) or None}


# The packed lengths are those of FlashKDA's public benchmark.
MIXED = (1300, 547, 2048, 963, 271, 3063)

SPECS: tuple[KdaSpec, ...] = (
    KdaSpec("kimi_linear_prefill_8k", 1, 8192, KIMI_LINEAR_HEADS, gate_lower_bound=None),
    KdaSpec("kimi_linear_decode_64", 64, 1, KIMI_LINEAR_HEADS, gate_lower_bound=None),
    KdaSpec("k3_prefill_2k", 1, 2048, K3_HEADS),
    KdaSpec("k3_prefill_8k", 1, 8192, K3_HEADS),
    KdaSpec("k3_prefill_32k", 1, 32768, K3_HEADS),
    KdaSpec("k3_prefill_8k_tp8", 1, 8192, K3_HEADS // 8),
    KdaSpec("k3_prefill_128k_tp8", 1, 131072, K3_HEADS // 8),
    KdaSpec("k3_packed_mixed", 1, sum(MIXED), K3_HEADS, segments=MIXED),
    KdaSpec("k3_packed_8x1024", 1, 8192, K3_HEADS, segments=(1024,) * 8),
    KdaSpec("k3_packed_mixed_tp8", 1, sum(MIXED), K3_HEADS // 8, segments=MIXED),
    KdaSpec("k3_decode_1", 1, 1, K3_HEADS),
    KdaSpec("k3_decode_64", 64, 1, K3_HEADS),
    KdaSpec("k3_decode_256_tp8", 256, 1, K3_HEADS // 8),
    KdaSpec("k3_verify_8", 64, 8, K3_HEADS),
)
