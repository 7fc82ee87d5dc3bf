"""Kimi Delta Attention: projections, short convolution, decay gate, recurrence, gated output norm."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kimi_jax.config import KimiConfig
from kimi_jax.modules.linear import linear, side_by_side
from kimi_jax.params import param
from kimi_jax.shards import ALONE, Shards
from pallas_kernels.dispatch import Implementation
from pallas_kernels.kda import conv_decode_obstacle, gate, kda_conv_decode
from pallas_kernels.precision import at_least_float32
from pallas_kernels.target import platform


class KdaState(NamedTuple):
    """What one KDA layer keeps between calls.

    Attributes:
        state: [B, H, K, V], float32, key channels first.
        conv_tail: [B, W-1, 3·P], the last inputs of the convolution (q, k and v projections), oldest first.
    """

    state: Float[Array, "B H K V"]
    conv_tail: Float[Array, "B W X"]


class KimiDeltaAttention(nnx.Module):
    """One KDA layer (arXiv 2510.26692); x is already normalised by the layer's input norm."""

    def __init__(self, config: KimiConfig):
        self.config = config
        hidden, heads, width = config.hidden_size, config.kda.num_heads, config.kda.head_dim
        projection, taps = heads * width, config.kda.conv_kernel_size
        self.qkv = param(
            (3, projection, hidden),
            (None, "heads", "embed"),
            *(f"self_attn.{name}_proj.weight" for name in "qkv"),
        )
        self.conv = param(
            (3, projection, taps),
            (None, "heads", None),
            *(f"self_attn.{name}_conv1d.weight" for name in "qkv"),
            float32=True,
            adapt="conv",
        )
        self.decay_down = param((width, hidden), (None, "embed"), "self_attn.f_a_proj.weight")
        self.decay_up = param((projection, width), ("heads", None), "self_attn.f_b_proj.weight")
        self.A_log = param((heads,), ("heads",), "self_attn.A_log", float32=True, init="decay", adapt="narrow")
        self.dt_bias = param(
            (heads, width), ("heads", None), "self_attn.dt_bias", float32=True, init="dt_bias", adapt="heads"
        )
        self.beta = param((heads, hidden), ("heads", "embed"), "self_attn.b_proj.weight")
        if config.kda.full_rank_gate:
            self.output_gate = param((projection, hidden), ("heads", "embed"), "self_attn.g_proj.weight")
        else:
            self.output_gate_down = param((width, hidden), (None, "embed"), "self_attn.g_a_proj.weight")
            self.output_gate_up = param((projection, width), ("heads", None), "self_attn.g_b_proj.weight")
        self.output_norm = param((width,), (None,), "self_attn.o_norm.weight", float32=True, init="ones")
        self.output = param((hidden, projection), ("embed", "heads"), "self_attn.o_proj.weight")

    def __call__(
        self,
        x: Float[Array, "B T D"],
        state: KdaState | None,
        lengths: Int[Array, " B"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        implementation: Implementation | None = None,
        shards: Shards = ALONE,
    ) -> tuple[Float[Array, "B T D"], KdaState]:
        """Runs T new tokens on `state` (None: a fresh one).

        Args:
            x: normalised layer input.
            state: what the layer kept from earlier tokens of the same rows.
            lengths: valid tokens of each row; None: all T.
            segment_ids: ids of packed sequences; each starts from a fresh state.
            implementation: of the operations; None picks.
            shards: the devices that share the work; heads of the others are missing from the output.

        Returns:
            (output, state after each row's last valid token).
        """
        batch, tokens, hidden = x.shape
        heads, width = self.dt_bias.shape
        projected = linear(x, self.qkv[...].reshape(-1, hidden))
        mixed, tail = shards.short_conv(
            projected,
            self.conv[...].reshape(projected.shape[-1], -1),
            tail=None if state is None else state.conv_tail,
            lengths=lengths,
            segment_ids=segment_ids,
            implementation=implementation,
        )
        q, k, v = (mixed.reshape(batch, tokens, 3, heads, width)[:, :, i] for i in range(3))
        result = shards.kda(
            q,
            k,
            v,
            self._decay(x),
            linear(x, self.beta[...]),
            self.A_log[...],
            self.dt_bias[...],
            initial_state=None if state is None else state.state,
            lengths=lengths,
            segment_ids=segment_ids,
            gate_lower_bound=self.config.kda.gate_lower_bound,
            implementation=implementation,
        )
        gated = self._gated_norm(result.o, self._output_gate(x).reshape(batch, tokens, heads, width))
        out = linear(gated.reshape(batch, tokens, heads * width), self.output[...])
        return out, KdaState(result.final_state, tail)

    def decode(
        self,
        x: Float[Array, "B 1 D"],
        pools: KdaState,
        slots: Int[Array, " B"],
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "B 1 D"], KdaState] | None:
        """One new token a row on states that stay where they are, or None where no kernel writes them in place.

        Args:
            x: normalised layer input.
            pools: states and tails of many slots; donate them.
            slots: the slot of each row; negative for rows without a new token, whose output is 0.
            implementation: of `pallas_kernels.kda.kda_conv_decode`.

        Returns:
            (output, the pools after the token).
        """
        if platform() != "gpu":
            return None
        batch, _, hidden = x.shape
        heads, width = self.dt_bias.shape
        row = x[:, 0]
        # XLA joins products of one array as it sees fit, and then rounds the joined sums in a kernel of its own, or copies
        # small weights together. With barriers between them the gate's sums go straight into the norm.
        for_gate = jax.lax.optimization_barrier(row)
        for_beta = jax.lax.optimization_barrier(for_gate)
        full = self.config.kda.full_rank_gate
        gate_weight = self.output_gate[...] if full else self.output_gate_down[...]
        gate_logits, decay = side_by_side(for_gate, [gate_weight, self.decay_down[...]])
        projected = linear(row, self.qkv[...].reshape(-1, hidden))
        arguments = (
            projected,
            self.conv[...].reshape(projected.shape[-1], -1),
            linear(decay, self.decay_up[...]).reshape(batch, heads, width),
            linear(for_beta, self.beta[...]),
            self.A_log[...],
            self.dt_bias[...],
            *pools,
        )
        bound = self.config.kda.gate_lower_bound
        if conv_decode_obstacle(*arguments, gate_lower_bound=bound, implementation=implementation) is not None:
            return None
        o, *after = kda_conv_decode(*arguments, slots, gate_lower_bound=bound, implementation=implementation)
        gate_logits = gate_logits if full else linear(gate_logits, self.output_gate_up[...])
        gated = self._gated_norm(o, gate_logits.reshape(batch, heads, width))
        return linear(gated.reshape(batch, 1, heads * width), self.output[...]), KdaState(*after)

    def gates(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H"]]:
        """(log decay of each key channel, strength of the write) of each token; float32 or better."""
        decay = gate(self._decay(x), self.A_log[...], self.dt_bias[...], self.config.kda.gate_lower_bound)
        return decay, jax.nn.sigmoid(linear(x, self.beta[...]).astype(at_least_float32(x)))

    def _decay(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows H K"]:
        raw = linear(linear(x, self.decay_down[...]), self.decay_up[...])
        return raw.reshape(*x.shape[:-1], *self.dt_bias.shape)

    def _output_gate(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows P"]:
        if self.config.kda.full_rank_gate:
            return linear(x, self.output_gate[...])
        return linear(linear(x, self.output_gate_down[...]), self.output_gate_up[...])

    def _gated_norm(self, o: Float[Array, "*rows H V"], logits: Float[Array, "*rows H V"]) -> Float[Array, "*rows H V"]:
        """(o · rsqrt(mean o² + eps) · w) · σ(logits), all in float32, one cast at the end."""
        dtype = at_least_float32(o)
        wide = o.astype(dtype)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.config.rms_norm_eps)
        weighted = normed * self.output_norm[...].astype(dtype)
        return (weighted * jax.nn.sigmoid(logits.astype(dtype))).astype(logits.dtype)
