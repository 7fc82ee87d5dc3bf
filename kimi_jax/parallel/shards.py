"""`Shards` of a mesh: what a device of many does for a decoder, with collectives; inside `jax.shard_map` over all axes."""

from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.modules.experts import ExpertStack, Routing
from kimi_jax.modules.mlp import GatedActivation
from kimi_jax.parallel.context_dsa import dense_context, dsa_context, gather_tokens
from kimi_jax.parallel.context_kda import kda_from_raw_sharded, short_conv_sharded
from kimi_jax.parallel.experts import Exchange, run_experts_parallel, run_experts_sharded
from kimi_jax.parallel.sharded_decode import dense_decode_sharded, dsa_decode_sharded, owned_places
from kimi_jax.parallel.shared_selection import dsa_shared, shares_selection
from kimi_jax.parallel.zigzag import Layout
from kimi_jax.shards import Shards
from pallas_kernels.dispatch import Implementation
from pallas_kernels.fp8_latent import Fp8Latent
from pallas_kernels.kda import KdaOutput, kda_from_raw
from pallas_kernels.manual_axes import align
from pallas_kernels.mxfp8 import Mxfp8
from pallas_kernels.short_conv import short_conv
from pallas_kernels.target import platform

Keys = TypeVar("Keys")


FEW_TOKENS = 1024
"""Tokens up to which the start of a collective takes longer than what it moves."""


@dataclass(frozen=True)
class MeshShards(Shards):
    """One device of a mesh with the axes of `kimi_jax.sharding.MESH_AXES`.

    Attributes:
        rows: mesh axes that split the rows of a batch.
        sequence: mesh axes that split the places of a cache, and the tokens of a row where `split` says so.
        split: whether each device of `sequence` holds other tokens, contiguous ones; otherwise all hold all.
        layout: order in which attention runs queries that are split.
        exchange: how tokens meet their experts; None: as costs say (see `run_experts_parallel`).
        expert_budget: bytes that the experts' temporaries may take.
    """

    rows: tuple[str, ...]
    sequence: tuple[str, ...]
    split: bool
    layout: Layout = "zigzag"
    exchange: Exchange | None = None
    expert_budget: int = 2**28

    @property
    def whole_rows(self) -> bool:
        """Whether this device has all tokens of its rows, and all heads."""
        return not self.split and jax.lax.axis_size("tensor") == 1

    @property
    def cache_parts(self) -> int:
        """How many devices share the places of a cache's row."""
        return jax.lax.axis_size(self.sequence)

    # Tokens

    def first_token(self, tokens: int) -> Int[Array, ""] | int:
        """Number of the first of this device's `tokens` tokens in its row."""
        return jax.lax.axis_index(self.sequence) * tokens if self.split else 0

    def row_tokens(self, tokens: int) -> int:
        """Tokens of a whole row of which this device holds `tokens`."""
        return tokens * jax.lax.axis_size(self.sequence) if self.split else tokens

    def last_token(self, x: Float[Array, "*N B T D"], lengths: Int[Array, " B"]) -> Float[Array, "*N B 1 D"]:
        """Each row's last valid token (its first one where there is none), on every device."""
        if not self.split:
            return super().last_token(x, lengths)
        last = jnp.maximum(lengths - 1, 0) - self.first_token(x.shape[-2])
        mine = (last >= 0) & (last < x.shape[-2])
        picked = super().last_token(x, jnp.where(mine, last, 0) + 1)
        return jax.lax.psum(jnp.where(mine[:, None, None], picked, 0), self.sequence)

    # Heads, widths, vocabulary

    def embed(self, table: Float[Array, "V D"], token_ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Rows of the embedding, of which every device of `tensor` holds some."""
        local = token_ids - jax.lax.axis_index("tensor") * table.shape[0]
        mine = (local >= 0) & (local < table.shape[0])
        rows = jnp.where(mine[..., None], table[jnp.where(mine, local, 0)], 0)
        return jax.lax.psum(rows, "tensor")

    def total(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """The sum over `tensor`."""
        return jax.lax.psum(x, "tensor")

    def surprise(self, logits: Float[Array, "*rows V"], tokens: Int[Array, "*rows"]) -> Float[Array, "*rows"]:
        """−log p(token) in nats; every device of `tensor` has the logits of some of the vocabulary."""
        top = jax.lax.pmax(jax.lax.stop_gradient(jnp.max(logits, axis=-1)), "tensor")
        total = jax.lax.psum(jnp.sum(jnp.exp(logits - top[..., None]), axis=-1), "tensor")
        local = tokens - jax.lax.axis_index("tensor") * logits.shape[-1]
        mine = (local >= 0) & (local < logits.shape[-1])
        chosen = jnp.take_along_axis(logits, jnp.where(mine, local, 0)[..., None], axis=-1)[..., 0]
        return top + jnp.log(total) - jax.lax.psum(jnp.where(mine, chosen, 0), "tensor")

    # Keys

    def new_keys(self, keys: Keys, positions: Int[Array, "B T"]) -> tuple[Keys, Int[Array, "B S"]]:
        """The keys of all new tokens of the rows, with their places."""
        return gather_tokens((keys, positions), self.sequence) if self.split else (keys, positions)

    def places(self, positions: Int[Array, "B T"], capacity: int) -> Int[Array, "B T"]:
        """Where in this device's part of the cache the keys belong; -1: not in this part."""
        return owned_places(positions, capacity, self.sequence)

    # Operations

    def short_conv(self, x: Float[Array, "B T X"], weight: Float[Array, "X W"], **options: Any) -> tuple[Array, Array]:
        """The convolution of this device's tokens, with the last inputs of the device before."""
        if not self.split:
            return short_conv(x, weight, **options)
        return short_conv_sharded(x, weight, axis=self.sequence, **options)

    def kda(
        self,
        q: Float[Array, "B T H K"],
        k: Float[Array, "B T H K"],
        v: Float[Array, "B T H V"],
        raw: Float[Array, "B T H K"],
        beta_logits: Float[Array, "B T H"],
        A_log: Float[Array, " H"],
        dt_bias: Float[Array, "H K"],
        **options: Any,
    ) -> KdaOutput:
        """The recurrence over this device's tokens, from the state that the devices before leave."""
        arguments = q, k, v, raw, beta_logits, A_log, dt_bias
        if not self.split:
            return kda_from_raw(*arguments, **options)
        return KdaOutput(*kda_from_raw_sharded(*arguments, axis=self.sequence, **options), None)

    def dense_mla(
        self,
        q: Float[Array, "B T H Q"],
        latent: Float[Array, "B S R"] | Fp8Latent,
        w_uk: Float[Array, "H N L"],
        w_uv: Float[Array, "H V L"],
        *,
        cached: bool,
        segment_ids: Int[Array, "B T"] | None = None,
        **options: Any,
    ) -> Float[Array, "B T H V"]:
        """Attention over all visible keys: they come to split queries, and the others go to them."""
        if self.split:
            options |= {"segment_ids": segment_ids, "layout": self.layout}
            return dense_context(q, latent, w_uk, w_uv, axis=self.sequence, **options)
        if cached and self.cache_parts > 1:
            return dense_decode_sharded(q, latent, w_uk, w_uv, axis=self.sequence, **options)
        return super().dense_mla(q, latent, w_uk, w_uv, cached=cached, segment_ids=segment_ids, **options)

    def dsa_mla(
        self,
        index_q: Float[Array, "B T I K"] | Mxfp8,
        index_k: Float[Array, "B S K"] | Mxfp8,
        index_w: Float[Array, "B T I"],
        q: Float[Array, "B T H Q"],
        latent: Float[Array, "B S R"] | Fp8Latent,
        w_uk: Float[Array, "H N L"],
        w_uv: Float[Array, "H V L"],
        *,
        cached: bool,
        segment_ids: Int[Array, "B T"] | None = None,
        **options: Any,
    ) -> Any:
        """Attention over selected keys: they come to split queries, and the others go to them.

        On GPUs devices that split the heads share the selection where it is long enough.
        """
        operands = (index_q, index_k, index_w, q, latent, w_uk, w_uv)
        if self.split:
            options |= {"segment_ids": segment_ids, "layout": self.layout}
            return dsa_context(*operands, axis=self.sequence, **options)
        if cached and self.cache_parts > 1:
            return dsa_decode_sharded(*operands, axis=self.sequence, **options)
        whole = cached and segment_ids is None and options.get("two_stage") is None and platform() == "gpu"
        sizes = (*index_q.shape[:2], *index_k.shape[1:])
        if whole and shares_selection(*sizes, devices=jax.lax.axis_size("tensor"), top_k=options["top_k"]):
            options.pop("two_stage", None)
            return dsa_shared(*operands, axis="tensor", **options)
        return super().dsa_mla(*operands, cached=cached, segment_ids=segment_ids, **options)

    def experts(
        self,
        x: Float[Array, "M D"],
        routing: Routing,
        valid: Bool[Array, " M"],
        stack: ExpertStack,
        num_experts: int,
        activation: GatedActivation,
        implementation: Implementation | None,
        beside: Float[Array, "M W"] | None = None,
    ) -> tuple[Float[Array, "M D"], Float[Array, "M W"] | None]:
        """Tokens go to their experts, or all devices run their own experts on all tokens.

        In the second case what is beside few tokens is added up in the same collective, where the same devices share
        both, and each device's part is rounded to the activations' type before, as parts of projections are.
        """
        differ = "expert" in self.rows or self.split
        given = x, routing, valid, stack, num_experts, activation
        alone = jax.lax.axis_size("expert") == 1 and jax.lax.axis_size("tensor") > 1
        few = alone and x.shape[0] <= FEW_TOKENS and not self.split
        # What `run_experts_parallel` would choose everywhere but on TPUs.
        replicated = self.exchange == "replicated" or (self.exchange is None and platform() != "tpu")
        if beside is not None and few and replicated:
            others = beside

            def add_up(sums: Array) -> tuple[Array, Array]:
                sums, more = align(sums.astype(x.dtype), others)
                both = jax.lax.psum(jnp.concatenate([sums, more.astype(x.dtype)], axis=1), ("expert", "tensor"))
                return both[:, : x.shape[1]], both[:, x.shape[1] :].astype(more.dtype)

            return run_experts_sharded(
                *given,
                axes=("expert", "tensor"),
                tokens="replicated",
                budget=self.expert_budget,
                implementation=implementation,
                reduce=add_up,
            )
        mixed = run_experts_parallel(
            *given,
            split_axes=("expert",) if differ else (),
            replicated_axes=("tensor",) if differ else ("expert", "tensor"),
            exchange=self.exchange,
            budget=self.expert_budget,
            implementation=implementation,
        )
        return mixed, None if beside is None else self.total(beside)
