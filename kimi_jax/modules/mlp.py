"""Gated MLPs: SwiGLU (Kimi-Linear-48B) and SiTU-GLU (K3, K3.1)."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from kimi_jax.config import KimiConfig
from kimi_jax.modules.linear import linear
from kimi_jax.params import param
from pallas_kernels.precision import at_least_float32


@dataclass(frozen=True)
class GatedActivation:
    """The product of a gate branch g and an up branch u.

    `situ_beta` None: silu(g) · u. Otherwise, with b1 = `situ_beta` and b2 = `situ_linear_beta`:
    [b1 · tanh(g / b1) · σ(g)] · [b2 · tanh(u / b2)]; the sigmoid sees the uncapped g, and b2 None leaves u as it is.
    Computed in float32, cast back. Source: the vendor's K3 reference code.
    """

    situ_beta: float | None = None
    situ_linear_beta: float | None = None

    @staticmethod
    def of(config: KimiConfig) -> "GatedActivation":
        """The activation that a config asks for."""
        if config.hidden_act == "silu":
            return GatedActivation()
        return GatedActivation(config.situ_beta, config.situ_linear_beta)

    def __call__(self, gate: Float[Array, "*rows F"], up: Float[Array, "*rows F"]) -> Float[Array, "*rows F"]:
        """Applies the activation elementwise."""
        dtype = at_least_float32(gate)
        g, u = gate.astype(dtype), up.astype(dtype)
        if self.situ_beta is None:
            return (jax.nn.silu(g) * u).astype(gate.dtype)
        capped = self.situ_beta * jnp.tanh(g / self.situ_beta) * jax.nn.sigmoid(g)
        if self.situ_linear_beta is not None:
            u = self.situ_linear_beta * jnp.tanh(u / self.situ_linear_beta)
        return (capped * u).astype(gate.dtype)


class MLP(nnx.Module):
    """W_down · act(W_gate x, W_up x): the dense MLP and the fused shared experts."""

    def __init__(self, config: KimiConfig, width: int, name: str):
        hidden = config.hidden_size
        self.activation = GatedActivation.of(config)
        self.gate_up = param(
            (2, width, hidden), (None, "mlp", "embed"), f"{name}.gate_proj.weight", f"{name}.up_proj.weight"
        )
        self.down = param((hidden, width), ("embed", "mlp"), f"{name}.down_proj.weight")

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """Applies the block to every row."""
        pair, width, hidden = self.gate_up.shape
        gate_up = linear(x, self.gate_up[...].reshape(pair * width, hidden))
        return linear(self.activation(gate_up[..., :width], gate_up[..., width:]), self.down[...])
