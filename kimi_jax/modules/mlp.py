"""Gated MLPs: SwiGLU (Kimi-Linear-48B) and SiTU-GLU (K3, K3.1)."""

from flax import nnx
from jaxtyping import Array, Float

from kimi_jax.config import KimiConfig
from kimi_jax.modules.linear import linear
from kimi_jax.params import param
from pallas_kernels.gate import Gate


class GatedActivation(Gate):
    """The gate of a model's MLPs and experts: SwiGLU or SiTU-GLU. Source: the vendor's K3 reference code."""

    @staticmethod
    def of(config: KimiConfig) -> "GatedActivation":
        """The activation that a config asks for."""
        if config.hidden_act == "silu":
            return GatedActivation()
        return GatedActivation(config.situ_beta, config.situ_linear_beta)


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
        return self.after(linear(x, self.both()))

    def both(self) -> Float[Array, "G D"]:
        """Weights of gate and up, one after the other."""
        pair, width, hidden = self.gate_up.shape
        return self.gate_up[...].reshape(pair * width, hidden)

    def after(self, gate_up: Float[Array, "*rows G"]) -> Float[Array, "*rows D"]:
        """The block from its products with gate and up on."""
        width = self.gate_up.shape[1]
        return linear(self.activation(gate_up[..., :width], gate_up[..., width:]), self.down[...])
