"""Block Attention Residuals: what a sublayer reads instead of an additive residual stream (arXiv 2603.15031)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kimi_jax.modules.norm import RMSNorm
from kimi_jax.params import param
from pallas_kernels.attn_res import attn_res
from pallas_kernels.dispatch import Implementation
from pallas_kernels.precision import at_least_float32, einsum


class AttentionResidual(nnx.Module):
    """A learned mixture over the bank of block sums and the current partial sum."""

    def __init__(self, width: int, eps: float, name: str):
        self.eps = eps
        self.query = param((width,), (None,), f"{name}_proj.weight", adapt="vector")
        self.norm = param((width,), (None,), f"{name}_norm.weight", init="ones")

    def __call__(
        self,
        partial: Float[Array, "B T D"],
        bank: Float[Array, "N B T D"],
        num_rows: Int[Array, ""] | int,
        norm: RMSNorm | None = None,
        implementation: Implementation | None = None,
    ) -> Float[Array, "B T D"]:
        """The mixture of bank rows 0..num_rows-1 and the partial sum; with `norm`, as that leaves it for the sublayer."""
        return attn_res(
            partial,
            bank,
            num_rows,
            self.query[...],
            self.norm[...],
            eps=self.eps,
            out_norm_weight=None if norm is None else norm.weight[...],
            out_eps=self.eps if norm is None else norm.eps,
            implementation=implementation,
        )

    def weights(
        self, partial: Float[Array, "B T D"], bank: Float[Array, "N B T D"], num_rows: Int[Array, ""] | int
    ) -> Float[Array, "M B T"]:
        """The mixture's weights: of each bank row (0 from `num_rows` on), then of the partial sum; float32 or better."""
        dtype = at_least_float32(partial)
        there = jnp.append(jnp.arange(bank.shape[0]) < num_rows, True)[:, None, None]
        # Rows that aren't there may hold anything.
        rows = jnp.where(there[..., None], jnp.concatenate([bank, partial[None]]).astype(dtype), 0)
        scale = jax.lax.rsqrt(jnp.mean(rows * rows, axis=-1) + self.eps)
        scores = einsum("mbtd,d->mbt", rows, self.norm[...].astype(dtype) * self.query[...].astype(dtype)) * scale
        return jax.nn.softmax(jnp.where(there, scores, -jnp.inf), axis=0)


def open_block(
    partial: Float[Array, "B T D"], bank: Float[Array, "N B T D"], layer: Int[Array, ""] | int, block_size: int
) -> tuple[Float[Array, "B T D"], Float[Array, "N B T D"]]:
    """Where `layer` starts a block: banks the partial sum and clears it; elsewhere: leaves both as they are.

    Row layer // block_size is written in either case (with its old content when no block starts), so that the update
    stays in place inside a scan; outside of any, `layer` is a number, and nothing is written where none starts.
    """
    if isinstance(layer, int):
        if layer % block_size:
            return partial, bank
        return jnp.zeros_like(partial), bank.at[layer // block_size].set(partial)
    starts = layer % block_size == 0
    row = layer // block_size
    old = jax.lax.dynamic_index_in_dim(bank, row, keepdims=False)
    bank = jax.lax.dynamic_update_index_in_dim(bank, jnp.where(starts, partial, old), row, axis=0)
    return jnp.where(starts, jnp.zeros_like(partial), partial), bank
