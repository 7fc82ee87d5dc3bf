"""A decoder on a mesh: the same methods as `Decoder`, on whole arrays that are spread over devices."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kimi_jax.cache import Cache
from kimi_jax.cache_format import IndexCache, KvCache
from kimi_jax.config import KimiConfig
from kimi_jax.model import Decoder, Indexing, Loss
from kimi_jax.observe import Observed, Observer, Trace
from kimi_jax.parallel.experts import Exchange
from kimi_jax.parallel.shards import MeshShards
from kimi_jax.parallel.zigzag import Layout
from kimi_jax.params import Params, is_spec, named_specs
from kimi_jax.rows import check_room
from kimi_jax.sharding import complete, partition, shard_shape
from pallas_kernels.dispatch import Implementation

P = PartitionSpec

ALIGNMENT = 128
"""Tokens of a row are padded to a multiple of this times the devices that split them.

Blocks of zigzag order and chunks of KDA then end together.
"""


class MeshDecoder(Decoder):
    """`Decoder` for a mesh with the axes of `kimi_jax.sharding.MESH_AXES`, any of which may be missing.

    Every method is one `jax.shard_map` over the whole mesh, in which operations run on local arrays. Rows of a batch are
    split over `data`, and over `expert` too where their number allows; otherwise `expert` splits tokens and places of a
    row together with `context`. Where `data` doesn't divide the rows, its devices do the same work.

    Attributes:
        config: the model's sizes.
        mesh: all four axes.
        specs: descriptions of the whole parameters.
    """

    def __init__(
        self,
        config: KimiConfig,
        mesh: Mesh,
        implementation: Implementation | None = None,
        *,
        dense_attention: bool = False,
        indexer: Indexing = "exact",
        layout: Layout | None = None,
        exchange: Exchange | None = None,
        split_from: int = ALIGNMENT,
    ):
        """Checks that the mesh suits the model.

        Args:
            config: the model's sizes.
            mesh: devices.
            implementation: passed to every operation.
            dense_attention: as in `Decoder`.
            indexer: as in `Decoder`; where devices share the keys of a row, each leaves out of its own.
            layout: order in which attention runs queries of split rows; None: the cheaper one for each call's sizes, by
                the planner's figures of the devices (zigzag where it has none, as of CPUs).
            exchange: how tokens meet their experts; None: as costs say.
            split_from: new tokens a row and device from which a prefill splits its rows; shorter ones run on all devices
                of `context`, which then share the cached keys.

        Raises:
            ShardingError: a size of the model isn't a multiple of the mesh axis that splits it; names the config field.
            ValueError: as `Decoder`.
        """
        super().__init__(config, implementation, dense_attention=dense_attention, indexer=indexer)
        self.mesh = complete(mesh)
        self.layout: Layout | None = layout
        self.exchange: Exchange | None = exchange
        self.split_from = split_from
        self._sizes = dict(self.mesh.shape)
        self._allocations: dict[tuple[Any, ...], Callable[[], Cache]] = {}
        for path, spec in named_specs(self.specs).items():
            shard_shape(path, spec, self._sizes)
        self.param_specs = jax.tree.map(lambda spec: partition(spec, self._sizes), self.specs, is_leaf=is_spec)

    # Whole calls

    def allocate(
        self,
        batch: int,
        capacity: int,
        dtype: DTypeLike = jnp.bfloat16,
        *,
        kv_cache: KvCache | None = None,
        index_cache: IndexCache | None = None,
    ) -> Cache:
        """An empty cache, spread over the mesh; `capacity` is rounded up to a multiple of the devices that split it."""
        capacity += -capacity % self._size(self._shards(batch, split=False).sequence)
        return self._allocation(batch, capacity, jnp.dtype(dtype), kv_cache, index_cache)()

    def _allocation(
        self, batch: int, capacity: int, dtype: Any, kv_cache: KvCache | None, index_cache: IndexCache | None
    ) -> Callable[[], Cache]:
        """The program that makes such caches, one for all calls of the same sizes: compiling it takes longer than running."""
        key = (batch, capacity, dtype, kv_cache, index_cache)
        if key in self._allocations:
            return self._allocations[key]
        shards = self._shards(batch, split=False)
        parts = self._size(shards.sequence)

        def make() -> Cache:
            return Cache.allocate(
                self.config, batch, capacity, dtype, parts, kv_cache=kv_cache, index_cache=index_cache
            )

        specs = self.cache_specs(batch, kv_cache, index_cache)
        shardings = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)
        self._allocations[key] = jax.jit(make, out_shardings=shardings)
        return self._allocations[key]

    def everywhere(self, tree: Any) -> Any:
        """Inside `jax.jit`: the arrays whole on every device, and so in every process."""
        return jax.lax.with_sharding_constraint(tree, NamedSharding(self.mesh, P()))

    def logits(
        self,
        params: Params,
        token_ids: Int[Array, "B T"],
        lengths: Int[Array, " B"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T V"]:
        """As `Decoder.logits`; the vocabulary is split over `tensor`."""
        batch, tokens = token_ids.shape
        shards = self._shards(batch, split=True, tokens=tokens)
        token_ids, lengths, segment_ids = self._padded(token_ids, lengths, segment_ids, shards)
        decoder = self._decoder(shards)

        def run(params: Params, token_ids: Array, lengths: Array | None, segment_ids: Array | None) -> Array:
            return decoder.logits(params, token_ids, lengths, segment_ids)

        by_token = P(shards.rows, shards.sequence)
        in_specs = (self.param_specs, by_token, P(shards.rows), by_token)
        logits = self._map(run, in_specs, P(shards.rows, shards.sequence, "tensor"))(
            params, token_ids, lengths, segment_ids
        )
        return logits[:, :tokens]

    def hidden(
        self,
        params: Params,
        token_ids: Int[Array, "B T"],
        lengths: Int[Array, " B"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        observer: Observer | None = None,
    ) -> tuple[Float[Array, "B T D"], Observed]:
        """As `Decoder.hidden`, without an observer: how what it sees is spread only it could say.

        Raises:
            ValueError: an observer.
        """
        if observer is not None:
            raise ValueError(
                "hidden: observer can't be given on a mesh; it must be None. `trace` and `gradients` see inside."
            )
        batch, tokens = token_ids.shape
        shards = self._shards(batch, split=True, tokens=tokens)
        token_ids, lengths, segment_ids = self._padded(token_ids, lengths, segment_ids, shards)
        decoder = self._decoder(shards)

        def run(params: Params, token_ids: Array, lengths: Array | None, segment_ids: Array | None) -> Array:
            return decoder.hidden(params, token_ids, lengths, segment_ids)[0]

        by_token = P(shards.rows, shards.sequence)
        in_specs = (self.param_specs, by_token, P(shards.rows), by_token)
        return self._map(run, in_specs, by_token)(params, token_ids, lengths, segment_ids)[:, :tokens], {}

    def gradients(self, loss: Loss, params: Params, part: Any) -> tuple[Params, Any]:
        """As `Decoder.gradients`; rows and tokens of `part` are split, what the loss returns is summed over devices.

        Raises:
            ValueError: the rows or the tokens of the batch don't divide.
        """
        batch, tokens = next(x.shape for x in jax.tree.leaves(part) if x.ndim)
        shards = self._shards(batch, split=True, tokens=tokens, phase="train")
        parts = self._size(shards.sequence)
        if shards.split and tokens % (ALIGNMENT * parts):
            raise ValueError(
                f"rows of {tokens} tokens can't be split over {' x '.join(shards.sequence)} = {parts} devices; their "
                f"length must be a multiple of {ALIGNMENT * parts}."
            )
        decoder = self._decoder(shards)
        apart = (*shards.rows, *(shards.sequence if shards.split else ()))
        copies = self.mesh.size // self._size(apart)

        def run(params: Params, part: Any) -> tuple[Params, Any]:
            # Without types of varying values a psum's transpose is a psum: what is differentiated is the sum of all
            # devices' losses, and the gradient of a copy is its own part of a parameter's.
            def scaled(params: Params) -> tuple[Array, Any]:
                value, found = loss(decoder, params, part)
                return value / copies, found

            gradients, found = jax.grad(scaled, has_aux=True)(params)

            def total(spec: PartitionSpec, gradient: Array) -> Array:
                split = {axis for entry in spec for axis in ((entry,) if isinstance(entry, str) else entry or ())}
                return jax.lax.psum(gradient, tuple(axis for axis in self.mesh.axis_names if axis not in split))

            gradients = jax.tree.map(total, self.param_specs, gradients, is_leaf=lambda x: isinstance(x, PartitionSpec))
            return gradients, jax.lax.psum(found, apart) if apart else found

        by_token = P(shards.rows, shards.sequence if shards.split else None)
        parts_specs = jax.tree.map(lambda x: by_token if x.ndim else P(), part)
        return self._map(run, (self.param_specs, parts_specs), (self.param_specs, P()))(params, part)

    def prefill(
        self,
        params: Params,
        token_ids: Int[Array, "B T"],
        cache: Cache,
        lengths: Int[Array, " B"] | None = None,
        all_logits: bool = False,
    ) -> tuple[Float[Array, "B *T V"], Cache]:
        """As `Decoder.prefill`, on a cache from `allocate`; the vocabulary is split over `tensor`."""
        shards, token_ids, lengths, tokens = self._prepared(token_ids, cache, lengths)
        decoder = self._decoder(shards)

        def run(params: Params, token_ids: Array, cache: Cache, lengths: Array | None) -> tuple[Array, Cache]:
            return decoder.run_prefill(params, token_ids, cache, lengths, all_logits)

        by_token = P(shards.rows, shards.sequence if shards.split else None)
        caches = self._specs_like(cache)
        in_specs = (self.param_specs, by_token, caches, P(shards.rows))
        out_specs = (P(*by_token, "tensor") if all_logits else P(shards.rows, "tensor"), caches)
        logits, cache = self._map(run, in_specs, out_specs)(params, token_ids, cache, lengths)
        return (logits[:, :tokens] if all_logits else logits), cache

    def trace(
        self, params: Params, token_ids: Int[Array, "B T"], cache: Cache, lengths: Int[Array, " B"] | None = None
    ) -> tuple[dict[str, Array], Cache]:
        """As `Decoder.trace`, but for `index_scores`, which no device has."""
        shards, token_ids, lengths, tokens = self._prepared(token_ids, cache, lengths)
        decoder = self._decoder(shards)
        observer = _Places()

        def run(
            params: Params, token_ids: Array, cache: Cache, lengths: Array | None
        ) -> tuple[dict[str, Array], Cache]:
            return decoder.run_trace(params, token_ids, cache, lengths, observer)

        by_token = (shards.rows, shards.sequence if shards.split else None)
        names = {"logits": P(*by_token, "tensor"), "final_hidden": P(*by_token), "layer_out": P(None, *by_token)}
        if self.config.attn_res_block_size is not None:
            names["bank"] = P(None, *by_token)
        if self.config.moe.layers:
            names |= {name: P(None, *by_token) for name in ("experts", "expert_weights")}
        if self.config.dsa is not None and not self.dense_attention:
            names["selected"] = P(None, *by_token)
        caches = self._specs_like(cache)
        found, cache = self._map(run, (self.param_specs, P(*by_token), caches, P(shards.rows)), (names, caches))(
            params, token_ids, cache, lengths
        )
        by_row = {"logits", "final_hidden"}
        return {n: (x[:, :tokens] if n in by_row else x[:, :, :tokens]) for n, x in found.items()}, cache

    # How work is spread

    def cache_specs(self, batch: int, kv_cache: KvCache | None = None, index_cache: IndexCache | None = None) -> Cache:
        """How a cache of so many rows is spread: a `Cache` of partition specs."""

        def make() -> Cache:
            return Cache.allocate(self.config, batch, 1, kv_cache=kv_cache, index_cache=index_cache)

        return self._specs_like(jax.eval_shape(make))

    def _specs_like(self, cache: Cache) -> Cache:
        """The same for a cache of arrays or of their shapes; all arrays of a quantised field are spread alike."""
        shards = self._shards(cache.lengths.shape[0], split=False)
        rows, places = shards.rows, P(None, shards.rows, shards.sequence)
        specs = {
            "lengths": P(rows),
            "kda_state": P(None, rows, "tensor"),
            "conv_tail": P(None, rows, None, None, "tensor"),
            "latent": places,
            "index_key": places,
        }
        # A cache of anything but arrays can't be made by calling the class, which checks what it is given.
        leaves, structure = jax.tree_util.tree_flatten_with_path(cache)
        return jax.tree.unflatten(structure, [specs[path[0].name] for path, _ in leaves])

    def _shards(
        self,
        batch: int,
        *,
        split: bool,
        tokens: int = 1,
        context: int = 0,
        phase: Literal["prefill", "train"] = "prefill",
    ) -> MeshShards:
        """How so many rows are spread; `tokens`, `context` and `phase` matter only where rows are split."""
        rows, sequence = axes_of(batch, self._sizes)
        split = split and self._size(sequence) > 1
        layout = self.layout or (self._cheaper_layout(phase, batch, tokens, context) if split else "zigzag")
        return MeshShards(rows, sequence, split, layout, self.exchange)

    def _cheaper_layout(self, phase: Literal["prefill", "train"], batch: int, tokens: int, context: int) -> Layout:
        # The planner, which judges whole steps of this class, is the one place that knows what devices can do.
        from kimi_jax.planning.strategy import cheaper_layout

        tokens += -tokens % (ALIGNMENT * self._size(axes_of(batch, self._sizes)[1]))
        work = (phase, batch, tokens, 0 if phase == "train" else max(context, tokens))
        return cheaper_layout(self.config, self._sizes, str(self.mesh.devices.flat[0].device_kind), *work)

    def _decoder(self, shards: MeshShards) -> Decoder:
        return Decoder(
            self.config,
            self.implementation,
            dense_attention=self.dense_attention,
            indexer=self.two_stage or "exact",
            shards=shards,
        )

    def _size(self, axes: tuple[str, ...]) -> int:
        size = 1
        for axis in axes:
            size *= self._sizes[axis]
        return size

    def _map(self, run: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(run, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def _prepared(
        self, token_ids: Array, cache: Cache, lengths: Array | None
    ) -> tuple[MeshShards, Array, Array | None, int]:
        """How the call is spread, its tokens and lengths, padded, and how many tokens there were."""
        batch, tokens = token_ids.shape
        check_room(tokens, cache.capacity)
        parts = self._size(self._shards(batch, split=False).sequence)
        split = tokens >= self.split_from * parts
        shards = self._shards(batch, split=split, tokens=tokens, context=cache.capacity)
        token_ids, lengths, _ = self._padded(token_ids, lengths, None, shards)
        return shards, token_ids, lengths, tokens

    def _padded(
        self, token_ids: Array, lengths: Array | None, segment_ids: Array | None, shards: MeshShards
    ) -> tuple[Array, Array | None, Array | None]:
        batch, tokens = token_ids.shape
        padding = -tokens % (ALIGNMENT * self._size(shards.sequence)) if shards.split else 0
        if not padding:
            return token_ids, lengths, segment_ids
        if segment_ids is not None:
            segment_ids = jnp.pad(segment_ids, [(0, 0), (0, padding)], constant_values=-1)
        elif lengths is None:
            lengths = jnp.full(batch, tokens, jnp.int32)
        return jnp.pad(token_ids, [(0, 0), (0, padding)]), lengths, segment_ids


def axes_of(batch: int, sizes: Mapping[str, int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Mesh axes that split a batch's rows, and those that split the tokens and places of a row.

    Args:
        batch: rows.
        sizes: of the mesh axes; one that is missing has size 1.
    """
    rows: tuple[str, ...] = ()
    for axes in (("data", "expert"), ("data",), ("expert",)):
        if batch % math.prod(sizes.get(axis, 1) for axis in axes) == 0:
            rows = axes
            break
    return rows, ("context",) if "expert" in rows else ("context", "expert")


class _Places(Trace):
    """A trace without index scores, for which a device lacks the others' keys."""

    def mla(self, mixer: Any, queries: Any, keys: Any, rows: Any, selected: Int[Array, "B T k"] | None) -> Observed:
        """The selection."""
        return {} if selected is None else {"selected": selected}
