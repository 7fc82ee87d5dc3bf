"""What the ways to run sharded experts have in common: `kimi_jax.parallel.experts` chooses among them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.modules.mlp import GatedActivation
from pallas_kernels.dispatch import Implementation
from pallas_kernels.expert_layer import expert_mlp
from pallas_kernels.manual_axes import align
from pallas_kernels.mxfp4 import Mxfp4

Exchange = Literal["replicated", "gathered", "ragged"]
Weights = Float[Array, "_ _ _"] | Mxfp4


@dataclass(frozen=True)
class Form:
    """One way to run, with everything about it that is known before any array is."""

    kind: Exchange
    axes: tuple[str, ...]
    size: int
    num_experts: int
    activation: GatedActivation
    block: int
    window: int
    implementation: Implementation | None
    ragged_all_to_all: Callable[..., Array]

    @property
    def own(self) -> int:
        """Experts of a device."""
        return self.num_experts // self.size

    def experts(
        self,
        rows: Float[Array, "R D"],
        gate_up: Weights,
        down: Weights,
        sizes: Int[Array, " E"],
        offset: Int[Array, ""],
    ) -> Float[Array, "R D"]:
        """Each row, sorted by expert, through its expert; zeros past Σ sizes."""
        run = partial(expert_mlp, group_offset=offset, gate=self.activation, implementation=self.implementation)
        return run(rows, gate_up, down, sizes)

    def gradients(
        self,
        rows: Float[Array, "R D"],
        weights: Float[Array, " R"],
        d_rows: Float[Array, "R D"],
        stack: "Stack",
        sizes: Int[Array, " E"],
        total: Any,
    ) -> tuple[Float[Array, "R D"], Float[Array, " R"], Any]:
        """Of Σ_r w_r · d_r · E(row_r): by the rows, by the weights, and added to `total`, by the stack's arrays."""
        arrays, packed = trainable(stack)

        def run(rows: Array, arrays: dict[str, Array]) -> Array:
            both = arrays | packed
            return self.experts(rows, both["gate_up"], both["down"], sizes, stack.offset)

        outputs, pull = jax.vjp(run, rows, arrays)
        accumulator = weights.dtype
        d_weights = jnp.sum(outputs.astype(accumulator) * d_rows.astype(accumulator), axis=-1)
        weighted = weights[:, None] * d_rows.astype(accumulator)
        d_x, d_arrays = pull(weighted.astype(outputs.dtype))
        return d_x, d_weights, jax.tree.map(lambda sum, more: sum + more.astype(sum.dtype), total, d_arrays)


class Stack(NamedTuple):
    """The experts of this device; `offset`: number of the first of them in the arrays."""

    gate_up: Weights
    down: Weights
    offset: Int[Array, ""]


class Block(NamedTuple):
    """Tokens that are processed at once."""

    x: Float[Array, "M D"]
    weights: Float[Array, "M k"]
    experts: Int[Array, "M k"]
    valid: Bool[Array, " M"]


def trainable(stack: Stack) -> tuple[dict[str, Array], dict[str, Mxfp4]]:
    """What can be differentiated of a stack, and what can't."""
    both = {"gate_up": stack.gate_up, "down": stack.down}
    arrays = {name: part for name, part in both.items() if not isinstance(part, Mxfp4)}
    return arrays, {name: part for name, part in both.items() if isinstance(part, Mxfp4)}


def loop(
    count: Int[Array, ""], step: Callable[[Array, Any], Any], carry: Any, like: Any, name: str = "expert_windows"
) -> Any:
    """A loop of a length that only devices know, with a name by which plans know it."""
    carry, _ = align(carry, like)
    with jax.named_scope(name):
        return jax.lax.fori_loop(0, count, step, carry)


def in_window(ends: Int[Array, "*n"], sizes: Int[Array, "*n"], low: Int[Array, ""], window: int) -> Int[Array, "*n"]:
    """How much of each run of numbers is in a window."""
    return jnp.clip(ends - low, 0, window) - jnp.clip(ends - sizes - low, 0, window)
