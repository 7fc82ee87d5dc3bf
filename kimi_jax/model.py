"""The decoder: embedding, layers, head; prefill, decode and logits as pure functions of parameters."""

from collections.abc import Callable
from copy import copy
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kimi_jax.cache import Cache
from kimi_jax.cache_format import IndexCache, KvCache
from kimi_jax.config import KimiConfig, LayerKind
from kimi_jax.layer_scan import LayerIndex, by_layer, plan, walk
from kimi_jax.modules.attn_res import AttentionResidual, open_block
from kimi_jax.modules.experts import ExpertStack
from kimi_jax.modules.kda import KimiDeltaAttention
from kimi_jax.modules.linear import linear
from kimi_jax.modules.mla import MultiHeadLatentAttention
from kimi_jax.modules.mlp import MLP
from kimi_jax.modules.moe import Experts, MixtureOfExperts
from kimi_jax.modules.norm import RMSNorm
from kimi_jax.observe import Observed, Observer, Trace
from kimi_jax.params import Params, ParamSpec, bind, param, specs_of
from kimi_jax.rows import Rows, check_room, fresh_rows, further_rows
from kimi_jax.shards import ALONE, Shards
from pallas_kernels.dispatch import Implementation
from pallas_kernels.lightning_indexer import TwoStage
from pallas_kernels.precision import at_least_float32
from pallas_kernels.target import platform

Tree = Any
Indexing = Literal["exact", "two_stage"] | TwoStage
Loss = Callable[["Decoder", Params, Any], tuple[Array, Any]]


def two_stage_of(indexer: Indexing, config: KimiConfig) -> TwoStage | None:
    """How keys are left out; None where none is.

    Raises:
        ValueError: another value, or two stages of an indexer that the model doesn't have.
    """
    if not isinstance(indexer, TwoStage) and indexer not in ("exact", "two_stage"):
        raise ValueError(f"indexer={indexer!r}; it must be 'exact', 'two_stage' or a TwoStage.")
    if indexer == "exact":
        return None
    if config.dsa is None:
        raise ValueError(
            f"indexer={indexer!r}: {config.model_type!r} has no indexer (no dsa_config); it must be 'exact'."
        )
    return indexer if isinstance(indexer, TwoStage) else TwoStage()


MOST_UNROLLED = 48
"""Layers up to which decoding on GPUs is compiled without loops; each takes a second or two to compile."""


class Block(nnx.Module):
    """What every layer has whatever its kind: two input norms and, with Attention Residuals, two mixtures."""

    def __init__(self, config: KimiConfig):
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(width, eps, "input_layernorm.weight")
        self.post_attention_norm = RMSNorm(width, eps, "post_attention_layernorm.weight")
        if config.attn_res_block_size is not None:
            self.attention_residual = AttentionResidual(width, eps, "self_attention_res")
            self.mlp_residual = AttentionResidual(width, eps, "mlp_res")


class Stream(NamedTuple):
    """What flows from layer to layer.

    Attributes:
        partial: [B, T, D] residual stream, or with Attention Residuals the current block's partial sum.
        bank: [blocks, B, T, D] sums of finished blocks (row 0: the embedding), or None without Attention Residuals.
        cache: state of earlier tokens, or None.
    """

    partial: Float[Array, "B T D"]
    bank: Float[Array, "N B T D"] | None
    cache: Cache | None


class Decoder:
    """One decoder for the whole family; every difference comes from the config.

    Holds descriptions only: `specs` describes the parameters, the methods take them. Weights of equal layers are
    stacked: `params["kda"]`, `["mla"]`, `["dense"]`, `["moe"]`, `["experts"]` over the layers of that kind, in order,
    `["blocks"]` over all layers.
    """

    def __init__(
        self,
        config: KimiConfig,
        implementation: Implementation | None = None,
        *,
        dense_attention: bool = False,
        indexer: Indexing = "exact",
        shards: Shards = ALONE,
    ):
        """Describes the model of `config`.

        Args:
            config: the model's sizes.
            implementation: passed to every operation; None lets each pick.
            dense_attention: full-attention layers attend all visible keys even where the config has an indexer, which
                is then left unused: what it learns from before it selects.
            indexer: "exact" scores every key; "two_stage" only those of promising blocks, and misses some that belong (see
                `pallas_kernels.lightning_indexer.TwoStage`, which can be given in place of its name).
            shards: the devices that share the work; then the methods take and return what one of them holds (see
                `kimi_jax.parallel.MeshDecoder`, which cuts whole arrays for them).

        Raises:
            ValueError: another `indexer`, or one for a model that has none.
        """
        self.config = config
        self.implementation = implementation
        self.dense_attention = dense_attention
        self.two_stage = two_stage_of(indexer, config)
        self.shards = shards
        self.kinds = config.layer_kinds()
        self.plan = plan(self.kinds)
        layers_of = {
            "blocks": tuple(range(len(self.kinds))),
            "kda": tuple(i for i, kind in enumerate(self.kinds) if kind.mixer == "kda"),
            "mla": tuple(i for i, kind in enumerate(self.kinds) if kind.mixer == "mla"),
            "dense": tuple(i for i, kind in enumerate(self.kinds) if kind.ffn == "dense"),
            "moe": tuple(i for i, kind in enumerate(self.kinds) if kind.ffn == "moe"),
        }
        layers_of["experts"] = layers_of["moe"]
        self.stacks: dict[str, Any] = {
            "blocks": Block(config),
            "kda": KimiDeltaAttention(config),
            "mla": MultiHeadLatentAttention(config),
            "dense": MLP(config, config.intermediate_size, "mlp"),
            "moe": MixtureOfExperts(config),
            "experts": Experts(config),
        }
        self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, "model.norm.weight")
        self.specs: Params = {
            name: jax.tree.map(lambda spec, name=name: spec.stacked(layers_of[name]), specs_of(module))
            for name, module in self.stacks.items()
            if layers_of[name]
        }
        vocab = (config.vocab_size, config.hidden_size)
        self.specs["embed"] = _spec(param(vocab, ("vocab", "embed"), "model.embed_tokens.weight"))
        self.specs["final_norm"] = specs_of(self.final_norm)
        if not config.tie_word_embeddings:
            self.specs["head"] = _spec(param(vocab, ("vocab", "embed"), "lm_head.weight"))
        if config.attn_res_block_size is not None:
            self.output_residual = AttentionResidual(config.hidden_size, config.rms_norm_eps, "model.output_attn_res")
            self.specs["output_residual"] = specs_of(self.output_residual)

    # Whole calls

    def with_indexer(self, indexer: Indexing) -> "Decoder":
        """The same decoder with another way to select.

        Raises:
            ValueError: as the constructor.
        """
        other = copy(self)
        other.two_stage = two_stage_of(indexer, self.config)
        return other

    def allocate(
        self,
        batch: int,
        capacity: int,
        dtype: DTypeLike = jnp.bfloat16,
        *,
        kv_cache: KvCache | None = None,
        index_cache: IndexCache | None = None,
    ) -> Cache:
        """An empty cache (see `Cache.allocate`)."""
        return Cache.allocate(self.config, batch, capacity, dtype, kv_cache=kv_cache, index_cache=index_cache)

    def everywhere(self, tree: Tree) -> Tree:
        """Inside `jax.jit`: small arrays as they are to lie on every device; on one device, as they are."""
        return tree

    def logits(
        self,
        params: Params,
        token_ids: Int[Array, "B T"],
        lengths: Int[Array, " B"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T V"]:
        """Next-token logits of whole sequences, float32; differentiable in `params`.

        Args:
            params: tree of arrays as `specs` describes.
            token_ids: one sequence a row, or packed sequences with `segment_ids`.
            lengths: valid tokens of each row; logits past them mean nothing.
            segment_ids: [B, T] non-decreasing ids of packed sequences from 0, -1 for padding at the end.

        Raises:
            ValueError: both `lengths` and `segment_ids`.
        """
        return self.head(params, self.hidden(params, token_ids, lengths, segment_ids)[0])

    def hidden(
        self,
        params: Params,
        token_ids: Int[Array, "B T"],
        lengths: Int[Array, " B"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        observer: Observer | None = None,
    ) -> tuple[Float[Array, "B T D"], Observed]:
        """What `logits` multiplies with the head, and what an observer saw, stacked over the layers it saw.

        Both are differentiable in `params`.

        Raises:
            ValueError: both `lengths` and `segment_ids`.
        """
        if segment_ids is not None and lengths is not None:
            raise ValueError("give lengths or segment_ids, not both: padding of packed rows has segment id -1.")
        rows = fresh_rows(token_ids, lengths, segment_ids, self.shards)
        embedded = self._embed(params, token_ids)
        partial, bank, outputs = self._differentiable_layers(params, embedded, rows, observer or Observer())
        return self._final(params, partial, bank), self._observed(outputs)

    def head(self, params: Params, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits of hidden states, float32."""
        weight = params["embed"] if self.config.tie_word_embeddings else params["head"]
        return linear(hidden, weight, out=at_least_float32(hidden))

    def gradients(self, loss: Loss, params: Params, part: Any) -> tuple[Params, Any]:
        """Gradients of a loss, and what else it returns.

        Args:
            loss: (decoder, params, part) -> (a sum over tokens, a tree of other sums over tokens).
            params: what to differentiate by.
            part: pytree of arrays [B, T] and scalars.
        """
        return jax.grad(lambda params: loss(self, params, part), has_aux=True)(params)

    def prefill(
        self,
        params: Params,
        token_ids: Int[Array, "B T"],
        cache: Cache,
        lengths: Int[Array, " B"] | None = None,
        all_logits: bool = False,
    ) -> tuple[Float[Array, "B *T V"], Cache]:
        """Runs any number of new tokens on a cache, empty or filled.

        Args:
            params: tree of arrays.
            token_ids: new tokens, padded at the end of each row.
            cache: state of earlier tokens. How full it is is known only on the device, so the caller checks that the
                new tokens fit; keys of tokens that don't are dropped.
            lengths: valid new tokens of each row (0 leaves a row as it is); None: all.
            all_logits: logits of every new token, [B, T, V], in place of each row's last valid one, [B, V].

        Returns:
            (logits float32, cache with the new tokens).

        Raises:
            ValueError: other rows than the cache has, or more new tokens than it could ever hold.
        """
        check_room(token_ids.shape[1], cache.capacity)
        return self.run_prefill(params, token_ids, cache, lengths, all_logits)

    def run_prefill(
        self,
        params: Params,
        token_ids: Int[Array, "B T"],
        cache: Cache,
        lengths: Int[Array, " B"] | None,
        all_logits: bool,
    ) -> tuple[Float[Array, "B *T V"], Cache]:
        """`prefill` on what one device holds."""
        lengths, rows = further_rows(token_ids, cache, lengths, self.shards)
        stream, cache, _ = self._cached_layers(params, token_ids, rows, cache, Observer())
        partial, bank = stream.partial, stream.bank
        if not all_logits:
            partial = self.shards.last_token(partial, lengths)
            bank = None if bank is None else self.shards.last_token(bank, lengths)
        logits = self.head(params, self._final(params, partial, bank))
        return (logits if all_logits else logits[:, 0]), cache.advance(lengths)

    def decode(self, params: Params, token_ids: Int[Array, " B"], cache: Cache) -> tuple[Float[Array, "B V"], Cache]:
        """One new token a row: `prefill` of length one."""
        return self.prefill(params, token_ids[:, None], cache)

    def trace(
        self, params: Params, token_ids: Int[Array, "B T"], cache: Cache, lengths: Int[Array, " B"] | None = None
    ) -> tuple[dict[str, Array], Cache]:
        """`prefill` that also returns what happened inside, for parity checks and debugging.

        Returns:
            (a dict with `logits` [B, T, V], `final_hidden` [B, T, D], `layer_out` [layers, B, T, D], `bank`
            [blocks, B, T, D], `experts` and `expert_weights` [MoE layers, B, T, k], `index_scores`
            [MLA layers, B, T, S] and `selected` [MLA layers, B, T, top_k], as far as the model has them; cache).
        """
        check_room(token_ids.shape[1], cache.capacity)
        return self.run_trace(params, token_ids, cache, lengths, Trace())

    def run_trace(
        self,
        params: Params,
        token_ids: Int[Array, "B T"],
        cache: Cache,
        lengths: Int[Array, " B"] | None,
        observer: Observer,
    ) -> tuple[dict[str, Array], Cache]:
        """`trace` on what one device holds, with what an observer sees."""
        lengths, rows = further_rows(token_ids, cache, lengths, self.shards)
        stream, cache, outputs = self._cached_layers(params, token_ids, rows, cache, observer)
        hidden = self._final(params, stream.partial, stream.bank)
        found = {"logits": self.head(params, hidden), "final_hidden": hidden} | self._observed(outputs)
        if stream.bank is not None:
            found["bank"] = stream.bank
        return found, cache.advance(lengths)

    # Parts

    def _embed(self, params: Params, token_ids: Int[Array, "B T"], dtype: Any = None) -> Float[Array, "B T D"]:
        rows = self.shards.embed(params["embed"], token_ids)
        return rows if dtype is None else rows.astype(dtype)

    def _final(
        self, params: Params, partial: Float[Array, "B T D"], bank: Float[Array, "N B T D"] | None
    ) -> Float[Array, "B T D"]:
        norm = bind(self.final_norm, params["final_norm"])
        if bank is None:
            return norm(partial)
        residual = bind(self.output_residual, params["output_residual"])
        return residual(partial, bank, jnp.int32(bank.shape[0]), norm, self.implementation)

    def _observed(self, outputs: list[list[Observed]]) -> Observed:
        names = sorted({name for segment in outputs for run in segment for name in run})
        return {name: by_layer([[run.get(name) for run in segment] for segment in outputs]) for name in names}

    def _empty_bank(self, x: Float[Array, "B T D"]) -> Float[Array, "N B T D"] | None:
        size = self.config.attn_res_block_size
        return None if size is None else jnp.zeros((-(-len(self.kinds) // size), *x.shape), x.dtype)

    def _weights(self, params: Params, kind: LayerKind, index: LayerIndex) -> Params:
        """One layer's weights. Experts stay in their stack, addressed by an offset: slicing would copy all of them."""
        weights = {
            "block": _at(params["blocks"], index.layer),
            "mixer": _at(params[kind.mixer], index.mixer),
            "ffn": _at(params[kind.ffn], index.ffn),
        }
        if kind.ffn == "moe":
            weights["experts"] = params["experts"]
        return weights

    def _expert_stack(self, experts: Params, offset: Any) -> ExpertStack:
        def flat(stack: Tree) -> Tree:
            per_expert = 2 if stack is experts["gate_up"] else 1
            return jax.tree.map(lambda a: a.reshape(-1, a.shape[-2] * per_expert, a.shape[-1]), stack)

        return ExpertStack(flat(experts["gate_up"]), flat(experts["down"]), offset)

    def _layer(
        self,
        kind: LayerKind,
        index: LayerIndex,
        weights: Params,
        expert_offset: Any,
        stream: Stream,
        rows: Rows,
        observer: Observer,
    ) -> tuple[Stream, Observed]:
        size = self.config.attn_res_block_size
        block = bind(self.stacks["blocks"], weights["block"])
        partial, bank, cache = stream
        seen = Observed()
        if size is None or bank is None:
            x = block.input_norm(partial)
        else:
            num_rows = (index.layer + size - 1) // size
            x = block.attention_residual(partial, bank, num_rows, block.input_norm, self.implementation)
            seen |= observer.residual("attention", block.attention_residual, partial, bank, num_rows)
            partial, bank = open_block(partial, bank, index.layer, size)
        mixer = bind(self.stacks[kind.mixer], weights["mixer"])
        run_mixer = self._kda if kind.mixer == "kda" else self._mla
        mixed, cache, found = run_mixer(mixer, index.mixer, x, rows, cache, observer)
        partial = partial + self.shards.total(mixed)

        if size is None or bank is None:
            x = block.post_attention_norm(partial)
        else:
            num_rows = index.layer // size + 1
            x = block.mlp_residual(partial, bank, num_rows, block.post_attention_norm, self.implementation)
            seen |= observer.residual("ffn", block.mlp_residual, partial, bank, num_rows)
        ffn = bind(self.stacks[kind.ffn], weights["ffn"])
        if kind.ffn == "dense":
            mixed = self.shards.total(ffn(x))
        else:
            stack = self._expert_stack(weights["experts"], expert_offset)
            mixed, routing = ffn(x, stack, rows.positions >= 0, self.implementation, self.shards)
            found |= observer.moe(ffn, routing, rows)
        partial = partial + mixed
        return Stream(partial, bank, cache), seen | found | observer.layer(partial)

    def _kda(
        self, mixer: Any, index: Any, x: Array, rows: Rows, cache: Cache | None, observer: Observer
    ) -> tuple[Array, Cache | None, Observed]:
        if cache is not None and x.shape[1] == 1 and rows.segment_ids is None:
            # Of NumPy's where the index is a number: XLA would launch a kernel for it.
            slots = jnp.asarray(np.arange(cache.batch, dtype=np.int32) + index * cache.batch)
            slots = slots if rows.lengths is None else jnp.where(rows.lengths > 0, slots, -1)
            found = mixer.decode(x, cache.kda_pools(), slots, self.implementation)
            if found is not None:
                return found[0], cache.with_kda_pools(found[1]), observer.kda(mixer, x)
        state = None if cache is None else cache.read_kda(index)
        out, state = mixer(x, state, rows.lengths, rows.segment_ids, self.implementation, self.shards)
        return out, None if cache is None else cache.write_kda(index, state), observer.kda(mixer, x)

    def _mla(
        self, mixer: Any, index: Any, x: Array, rows: Rows, cache: Cache | None, observer: Observer
    ) -> tuple[Array, Cache | None, Observed]:
        queries, keys = mixer.project(x)
        if cache is not None:
            new, positions = self.shards.new_keys(cache.encode(keys), rows.positions)
            cache = cache.write_keys(index, new, self.shards.places(positions, cache.capacity))
            keys = cache.read_keys(index)
            queries = queries.like(keys)
        out, selected = mixer.attend(
            x,
            queries,
            keys,
            rows.positions,
            rows.segment_ids,
            dense=self.dense_attention,
            cached=cache is not None,
            return_indices=observer.wants_selection and self.config.dsa is not None and not self.dense_attention,
            two_stage=self.two_stage,
            implementation=self.implementation,
            shards=self.shards,
        )
        return out, cache, observer.mla(mixer, queries, keys, rows, selected)

    # Layers

    def _unrolls(self, token_ids: Int[Array, "B T"]) -> bool:
        """Whether layers follow each other without loops: for single tokens on GPUs.

        A loop's body gets its weights by an index that only the device knows, and XLA copies most of them out of their
        stacks before it multiplies: a third of a step's traffic. Launches of a loop's body aren't replayed as one graph
        either. Other platforms do neither, and programs that don't grow with depth compile faster.
        """
        return platform() == "gpu" and token_ids.shape[1] == 1 and len(self.kinds) <= MOST_UNROLLED

    def _cached_layers(
        self, params: Params, token_ids: Int[Array, "B T"], rows: Rows, cache: Cache, observer: Observer
    ) -> tuple[Stream, Cache, list[list[Observed]]]:
        def step(kind: LayerKind, stream: Stream, index: LayerIndex, _: None) -> tuple[Stream, Observed]:
            weights = self._weights(params, kind, index)
            offset = index.ffn * _experts_here(params)
            return self._layer(kind, index, weights, offset, stream, rows, observer)

        x = self._embed(params, token_ids, cache.dtype)
        stream, outputs = walk(self.plan, step, Stream(x, self._empty_bank(x), cache), unroll=self._unrolls(token_ids))
        return stream, stream.cache, outputs

    def _differentiable_layers(
        self, params: Params, x: Float[Array, "B T D"], rows: Rows, observer: Observer
    ) -> tuple[Float[Array, "B T D"], Float[Array, "N B T D"] | None, list[list[Observed]]]:
        """All layers without a cache, with a reverse mode that keeps one [B, T, D] array a layer.

        The bank only grows, so its last value holds every earlier one: the backward pass recomputes each layer from its
        saved input and the final bank, and writes weight gradients straight into their stacks. `lax.scan`'s own
        transpose would keep the bank once a layer, and add a full stack of zeros for every layer's gradient.
        """
        layer_params = {name: params[name] for name in self.stacks if name in params}

        def forward(layer_params: Params, x: Array, rows: Rows, keep: bool) -> tuple[tuple, list[list[Tree]]]:
            def step(kind: LayerKind, stream: Stream, index: LayerIndex, _: None) -> tuple[Stream, tuple]:
                weights = self._weights(layer_params, kind, index)
                offset = index.ffn * _experts_here(params)
                after, found = self._layer(kind, index, weights, offset, stream, rows, observer)
                return after, (found, stream.partial if keep else None)

            last, outputs = walk(self.plan, step, Stream(x, self._empty_bank(x), None))
            found, inputs = ([[run[i] for run in segment] for segment in outputs] for i in range(2))
            return (last.partial, last.bank, found), inputs

        @jax.custom_vjp
        def layers(layer_params: Params, x: Array, rows: Rows) -> tuple:
            return forward(layer_params, x, rows, keep=False)[0]

        def layers_fwd(layer_params: Params, x: Array, rows: Rows) -> tuple[tuple, tuple]:
            result, inputs = forward(layer_params, x, rows, keep=True)
            return result, (layer_params, rows, inputs, result[1])

        def layers_bwd(residuals: tuple, cotangents: tuple) -> tuple[Params, Array, None]:
            layer_params, rows, inputs, bank = residuals
            d_partial, d_bank, d_found = cotangents

            def step(kind: LayerKind, carry: tuple, index: LayerIndex, given: tuple) -> tuple[tuple, None]:
                (d_partial, d_bank, grads), (partial, d_found) = carry, given
                weights = self._weights(layer_params, kind, index)
                if kind.ffn == "moe":
                    weights["experts"] = _at(layer_params["experts"], index.ffn)
                inexact, rebuild = _split_inexact(weights)

                def run(inexact: list[Array], partial: Array, bank: Array | None) -> tuple:
                    before = Stream(partial, bank, None)
                    after, found = self._layer(kind, index, rebuild(inexact), 0, before, rows, observer)
                    return after.partial, after.bank, _split_inexact(found)[0]

                _, pullback = jax.vjp(run, inexact, partial, bank)
                d_weights, d_partial, d_bank = pullback((d_partial, d_bank, d_found))
                found = rebuild(d_weights, fill=jnp.zeros(()))
                for name, part, place in (
                    ("blocks", "block", index.layer),
                    (kind.mixer, "mixer", index.mixer),
                    (kind.ffn, "ffn", index.ffn),
                    ("experts", "experts", index.ffn),
                ):
                    if part in found:
                        grads = grads | {name: _put(grads[name], found[part], place)}
                return (d_partial, d_bank, grads), None

            zeros = jax.tree.map(_gradient_like, layer_params)
            given = [
                [(x, _split_inexact(d)[0]) for x, d in zip(*segment, strict=True)]
                for segment in zip(inputs, d_found, strict=True)
            ]
            (d_x, _, grads), _ = walk(self.plan, step, (d_partial, d_bank, zeros), given, reverse=True)
            return jax.tree.map(_tangent, layer_params, grads), d_x, None

        layers.defvjp(layers_fwd, layers_bwd)
        return layers(layer_params, x, rows)


def _experts_here(params: Params) -> int:
    """Routed experts of a layer that this device holds."""
    return params["experts"]["down"].shape[1] if "experts" in params else 0


def _spec(declared: nnx.Param) -> ParamSpec:
    return declared.get_value()


def _at(stack: Tree, index: Any) -> Tree:
    return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, index, keepdims=False), stack)


# Weights that are packed codes (MXFP4) have no gradient: in trees of gradients a scalar stands in their place.


def _is_inexact(leaf: Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _split_inexact(tree: Tree) -> tuple[list[Array], Any]:
    """The float leaves of a tree, and a function that puts replacements (and `fill` for the others) back."""
    leaves, treedef = jax.tree.flatten(tree)

    def rebuild(inexact: list[Array], fill: Array | None = None) -> Tree:
        replacements = iter(inexact)
        rest = [next(replacements) if _is_inexact(leaf) else (leaf if fill is None else fill) for leaf in leaves]
        return jax.tree.unflatten(treedef, rest)

    return [leaf for leaf in leaves if _is_inexact(leaf)], rebuild


def _gradient_like(leaf: Array) -> Array:
    return jnp.zeros_like(leaf) if _is_inexact(leaf) else jnp.zeros(())


def _put(stack: Tree, gradient: Tree, index: Any) -> Tree:
    def put(a: Array, g: Array) -> Array:
        return a if a.ndim == 0 else jax.lax.dynamic_update_index_in_dim(a, g.astype(a.dtype), index, axis=0)

    return jax.tree.map(put, stack, gradient)


def _tangent(leaf: Array, gradient: Array) -> Any:
    return gradient if _is_inexact(leaf) else np.zeros(leaf.shape, jax.dtypes.float0)
