"""Seconds and bytes of one step on a mesh, from shapes and published peaks; nothing is traced or compiled.

Of one device, with M its tokens (B rows of T tokens, over the axes that split rows and tokens), t devices of `tensor`,
D = hidden_size, and every array's part as `sharding.shard_shape` gives it:

    weights      bytes of its parameters are read once; of E / n routed experts each layer's k·(tokens of the group) / E rows
                 read an expert once for every 256 rows, and not at all where none comes:
                 E / n · max(1 - (1 - k / E)^tokens, rows / 256)
    products     2 · M · values of its matrices; 6 · (tokens of the group) · k / n · F · W for routed experts; the router
                 in float32
    KDA          M · H / t · (6 · K · V + 4 · 64 · K) operations in float32, 1.9 times as many for split rows (see
                 `parallel.context_kda`); its state is read and written
    attention    indexer: 2 · heads · width for each query and key that it sees, of the busiest device (`index_work`);
                 then 2 · H / t · (2 · L + R) for each query and key that it attends; keys read once by a step that
                 attends a cache, selected ones by each query; GPUs of `tensor` share long selections
                 (`parallel.shared_selection`)
    residual     16 · M · D bytes a layer, and half of the bank twice with Attention Residuals
    messages     an all-reduce of 2 · M · D bytes over `tensor` after each mixer and MLP; experts as
                 `parallel.experts.cheaper_exchange` has it; keys of split rows gathered twice (for the cache, and from
                 it), queries and outputs moved to zigzag order and back; merged partial attention else; KDA's
                 4 · K · (K + V) bytes a head of every part

A part of the step takes max(products / peak, bytes / bandwidth) + messages, parts follow each other. Training runs a
layer forward, again, and backward: 4 times the products, 3 times weights and messages, and an all-reduce of the float32
gradients over the axes that don't split a parameter, for each micro-batch. A prefill starts from an empty cache; a decode
step finds it full.

Temporaries are bounded, not counted: the stream and the bank, the largest part's activations, gathered keys, the budgets
of attention and experts, another copy of a cache whose rows aren't whole lanes (TPUs lay it out otherwise for loops), on
TPU7x as many bytes as all weights but the experts' have, and when training one [B, T, D] array a layer, weights
and their gradients in the dtype of the computation, and float32 gradients of a layer's experts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from kimi_jax.cache import Cache
from kimi_jax.cache_format import DEFAULT_FORMAT, CacheFormat, IndexCache, KvCache
from kimi_jax.checkpoint.locate import packed_shapes
from kimi_jax.config import KimiConfig
from kimi_jax.model import Decoder
from kimi_jax.parallel.decoder import ALIGNMENT, axes_of
from kimi_jax.parallel.experts import BUDGET, Exchange, cheaper_exchange
from kimi_jax.parallel.shared_selection import shares_selection
from kimi_jax.parallel.zigzag import Layout, index_work
from kimi_jax.params import named_specs
from kimi_jax.planning.chips import Chip
from kimi_jax.planning.links import Group
from kimi_jax.sharding import RULES, shard_shape

Phase = Literal["prefill", "decode", "train"]
Number = float | int

ITEM = 2
"""Bytes of an element of weights, activations and keys: bfloat16."""

_ROWS_A_READ = 256
_CHUNK = 64
_SPLIT_KDA = 1.9
_LANES = 128
_ATTENTION_BUDGET = 2**31
_LOGITS_BLOCK = 4096
# Compiled programs of these hold about as many temporaries as all weights have bytes, in other tiles (libtpu 0.0.42).
_COPIED_WEIGHTS = frozenset({"tpu7x"})


@dataclass(frozen=True)
class Workload:
    """What a step does.

    Attributes:
        phase: "prefill", "decode" or "train".
        rows: sequences at once.
        tokens: new ones of each row.
        context: places of each row's cache; 0 for training. A prefill with more places than tokens is one piece of a
            prompt that fills them, with as many tokens before it as a piece has on average.
        kv_cache: what latents are kept in between steps (see `CacheFormat`); None: bfloat16.
        index_cache: what index keys are kept in; None: bfloat16.
    """

    phase: Phase
    rows: int
    tokens: int
    context: int
    kv_cache: KvCache | None = None
    index_cache: IndexCache | None = None

    def __post_init__(self) -> None:
        if self.phase == "train" and self.format != DEFAULT_FORMAT:
            raise ValueError("train: a training step has no caches; leave kv_cache and index_cache out.")
        if self.phase not in ("prefill", "decode", "train"):
            raise ValueError(f"phase={self.phase!r}; it must be 'prefill', 'decode' or 'train'.")
        if self.rows < 1 or self.tokens < 1:
            raise ValueError(f"{self.phase}: rows={self.rows} and tokens={self.tokens} must be 1 or more.")
        if self.phase != "train" and self.context < self.tokens:
            raise ValueError(
                f"{self.phase}: context={self.context} places don't hold tokens={self.tokens} new ones; make it larger."
            )

    @property
    def format(self) -> CacheFormat:
        """Of the caches."""
        return CacheFormat(self.kv_cache, self.index_cache)

    @property
    def prefix(self) -> float:
        """Tokens of a row that a prefill finds in the cache, on average over the pieces of a prompt."""
        return (self.context - self.tokens) / 2 if self.phase == "prefill" else 0.0

    def check(self, config: KimiConfig) -> None:
        """Raises ValueError where rows are longer than the model allows, or its keys can't be kept so."""
        self.format.check(config)
        length = max(self.tokens, self.context)
        if length > config.max_position_embeddings:
            raise ValueError(
                f"{self.phase}: rows of {length} tokens exceed max_position_embeddings="
                f"{config.max_position_embeddings} of the config."
            )

    def __str__(self) -> str:
        held = f", caches of {self.context:,} places" if self.context else ""
        held += f" ({self.format})" if self.format != DEFAULT_FORMAT else ""
        return f"{self.rows:,} rows of {self.tokens:,} new token{'s' if self.tokens > 1 else ''}{held}"


@dataclass(frozen=True)
class Part:
    """Layers of one kind, or another part of a step, all of them together.

    Attributes:
        name: such as "KDA".
        compute: seconds of products.
        memory: seconds of memory traffic.
        messages: seconds of messages.
    """

    name: str
    compute: float
    memory: float
    messages: float

    @property
    def seconds(self) -> float:
        """Products and memory at once, then messages."""
        return max(self.compute, self.memory) + self.messages


@dataclass(frozen=True)
class Spread:
    """How a workload lies on a mesh.

    Attributes:
        rows: axes that split rows.
        sequence: axes that split tokens and places.
        split: whether tokens are split.
        parts: devices of `sequence`.
        batch: rows of a device, of one micro-batch.
        tokens: of each row on a device.
        places: of each row's cache on a device.
    """

    rows: tuple[str, ...]
    sequence: tuple[str, ...]
    split: bool
    parts: int
    batch: int
    tokens: int
    places: int

    @property
    def count(self) -> int:
        """Tokens of a device."""
        return self.batch * self.tokens


@dataclass(frozen=True)
class StepCost:
    """What one step of a workload takes on one mesh.

    Attributes:
        workload: which.
        parts: of the step.
        memory: bytes of one device: "parameters", "cache", "gradients", "optimizer"; "temporaries" is a bound.
        spread: over the mesh.
        layout: of the queries of split rows.
        exchange: how tokens meet their experts; None where one device has all.
        experts_over: devices that share the experts.
        experts_copies: how many of them hold the same tokens.
        micro_batches: into which a training batch is cut.
        reasons: sentences for layout and exchange, by kind of layer.
    """

    workload: Workload
    parts: tuple[Part, ...]
    memory: Mapping[str, int]
    spread: Spread
    layout: Layout
    exchange: Exchange | None
    experts_over: int
    experts_copies: int
    micro_batches: int
    reasons: Mapping[str, str]

    @property
    def seconds(self) -> float:
        """Of the step."""
        return sum(part.seconds for part in self.parts)

    @property
    def bound(self) -> str:
        """What takes longest: "compute", "memory" or "messages"."""
        times = {
            "compute": sum(part.compute for part in self.parts if part.compute > part.memory),
            "memory": sum(part.memory for part in self.parts if part.compute <= part.memory),
            "messages": sum(part.messages for part in self.parts),
        }
        return max(times, key=lambda name: times[name])


class StepModel:
    """Costs of one model on one kind of device."""

    def __init__(self, config: KimiConfig, chip: Chip):
        """`config`: the model; `chip`: figures of a device."""
        self.config = config
        self.chip = chip
        self.specs = named_specs(Decoder(config).specs)
        self.stacks = {
            "KDA": len(config.kda.layers),
            "attention": len(config.mla.layers),
            "experts": len(config.moe.layers),
            "dense MLP": config.num_hidden_layers - len(config.moe.layers),
        }
        # Most meshes of a search differ in axes that split no parameter.
        self._known: dict[tuple[Any, ...], dict[str, int]] = {}

    def cost(self, sizes: Mapping[str, int], workload: Workload, micro_batches: int = 1) -> StepCost:
        """The cost of a workload on a mesh.

        Args:
            sizes: of the mesh axes.
            workload: what the step does.
            micro_batches: parts into which a training batch is cut.

        Raises:
            ShardingError: a size of the model isn't a multiple of the mesh axis that splits it.
            ValueError: rows that can't be cut or split so.
        """
        return _Step(self, sizes, workload, micro_batches).cost()

    def parameter_bytes(self, sizes: Mapping[str, int], train: bool) -> dict[str, int]:
        """Bytes of a device's parameters by the first part of their path; float32 and unpacked when training.

        Raises:
            ShardingError: as `cost`.
        """
        key = ("parameters", train, *_splitting(sizes))
        if key in self._known:
            return self._known[key]
        found: dict[str, int] = {}
        for path, spec in self.specs.items():
            packed = spec.has_experts and self.config.quantization is not None and not train
            if packed:
                size = sum(math.prod(shard_shape(path, spec, sizes, shape=s)) for s in packed_shapes(spec.shape))
            else:
                size = math.prod(shard_shape(path, spec, sizes)) * (4 if spec.float32 or train else ITEM)
            top = path.split(".")[0]
            found[top] = found.get(top, 0) + size
        self._known[key] = found
        return found

    def matrix_values(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Values of a device's matrices, by the first part of their path; the router apart, experts left out."""
        key = ("matrices", *_splitting(sizes))
        if key in self._known:
            return self._known[key]
        found: dict[str, int] = {"moe.router": 0}
        for path, spec in self.specs.items():
            if spec.has_experts or spec.float32 or len(spec.tensor_shape) < 2:
                continue
            name = path if path == "moe.router" else path.split(".")[0]
            found[name] = found.get(name, 0) + math.prod(shard_shape(path, spec, sizes))
        self._known[key] = found
        return found

    def cache_bytes(self, sizes: Mapping[str, int], workload: Workload) -> dict[str, int]:
        """Bytes of a device's cache by field."""
        rows, sequence = axes_of(workload.rows, sizes)
        held = (workload.rows // _product(sizes, rows), -(-workload.context // _product(sizes, sequence)))
        heads = sizes.get("tensor", 1)
        whole = self._known.get(("cache", *held, workload.format)) or self._whole_cache(*held, workload.format)
        return {name: size // heads if name in ("kda_state", "conv_tail") else size for name, size in whole.items()}

    def _whole_cache(self, rows: int, places: int, format: CacheFormat) -> dict[str, int]:
        """Bytes of a cache with all heads, by field."""
        kinds: dict[str, Any] = {"kv_cache": format.kv_cache, "index_cache": format.index_cache}
        cache = jax.eval_shape(lambda: Cache.allocate(self.config, rows, places, jnp.bfloat16, **kinds))
        sizes = {
            name: sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(field))
            for name, field in vars(cache).items()
            if field is not None
        }
        self._known["cache", rows, places, format] = sizes
        return sizes


class _Step:
    def __init__(self, model: StepModel, sizes: Mapping[str, int], workload: Workload, micro_batches: int):
        self.model, self.config, self.chip, self.workload = model, model.config, model.chip, workload
        self.sizes, self.micro_batches = sizes, micro_batches
        self.train = workload.phase == "train"
        self.tensor = Group.of(self.chip, sizes.get("tensor", 1))
        self.spread = self._spread()
        self.along = Group.of(self.chip, self.spread.parts)
        self.weights = model.parameter_bytes(sizes, self.train)
        self.values = model.matrix_values(sizes)
        self.reasons: dict[str, str] = {}
        self.layout: Layout = "zigzag"
        self.exchange: Exchange | None = None
        differ = "expert" in self.spread.rows or self.spread.split
        self.experts_over = sizes.get("expert", 1) * self.tensor.size
        self.experts_copies = self.tensor.size if differ else self.experts_over

    def cost(self) -> StepCost:
        parts = [part for part in (self._kda(), self._attention(), self._experts(), self._mlps()) if part.seconds]
        parts += [self._residual(), self._vocabulary()]
        if self.train:
            parts.append(self._gradients())
        return StepCost(
            self.workload,
            tuple(parts),
            self._memory(),
            self.spread,
            self.layout,
            self.exchange,
            self.experts_over,
            self.experts_copies,
            self.micro_batches,
            self.reasons,
        )

    def _spread(self) -> Spread:
        work = self.workload
        if work.rows % self.micro_batches:
            raise ValueError(f"micro_batches={self.micro_batches} doesn't divide {work.rows} rows.")
        batch = work.rows // self.micro_batches
        rows, sequence = axes_of(batch, self.sizes)
        parts = _product(self.sizes, sequence)
        split = parts > 1 and (self.train or work.tokens >= ALIGNMENT * parts)
        if self.train and split and work.tokens % (ALIGNMENT * parts):
            raise ValueError(f"rows of {work.tokens} tokens can't be split over {parts} devices.")
        tokens = -(-work.tokens // (ALIGNMENT * parts)) * ALIGNMENT if split else work.tokens
        places = -(-work.context // parts)
        return Spread(rows, sequence, split, parts, batch // _product(self.sizes, rows), tokens, places)

    def _part(self, name: str, compute: Number, memory: Number, messages: Number, reads: Number = 0.0) -> Part:
        """A part from seconds of products, bytes of activations, seconds of messages and bytes of weights, all forward."""
        flops, again = (4, 3) if self.train else (1, 1)
        traffic = (memory * again + reads * again) / self.chip.hbm_bandwidth
        times = self.micro_batches
        return Part(name, times * flops * compute, times * traffic, times * again * messages)

    def _products(self, values: float | int, rows: float | int | None = None) -> float:
        return 2 * (self.spread.count if rows is None else rows) * values / self.chip.peak("bf16")

    @property
    def _summed(self) -> float:
        """Seconds of one all-reduce over `tensor`."""
        return self.tensor.reduce(self.spread.count * self.config.hidden_size * ITEM)

    def _kda(self) -> Part:
        kda, at, layers = self.config.kda, self.spread, self.model.stacks["KDA"]
        heads, width = kda.num_heads / self.tensor.size, kda.head_dim
        once = at.count * heads * (6 * width * width + 4 * _CHUNK * width) * (_SPLIT_KDA if at.split else 1)
        compute = self._products(self.values.get("kda", 0)) + layers * once / self.chip.peak("f32 highest")
        state = 0 if self.train else 2 * at.batch * heads * width * width * 4
        messages = layers * self._summed
        if at.split:
            messages += layers * self.along.gather(at.parts * at.batch * heads * 2 * width * width * 4)
        traffic = layers * (state + at.count * heads * width * 40)
        return self._part("KDA", compute, traffic, messages, self.weights.get("kda", 0))

    def _attention(self) -> Part:
        mla, dsa, at, work = self.config.mla, self.config.dsa, self.spread, self.workload
        layers, heads = self.model.stacks["attention"], self.config.num_attention_heads / self.tensor.size
        latent, rope = mla.kv_lora_rank, mla.qk_rope_head_dim
        stored = work.format.token_bytes(self.config)
        latent_bytes, index_bytes = stored.latent / layers, stored.index_key / layers
        bf16 = self.chip.peak("bf16")

        def seconds(pairs: float | int, selecting: int = 1) -> float:
            """Of products for so many pairs of a query and a key that it sees, of which `selecting` devices score some."""
            if dsa is None:
                once = latent * 2 + rope if at.tokens == 1 else mla.qk_nope_head_dim + rope + mla.v_head_dim
                return 2 * heads * once * pairs / bf16
            attended = min(pairs, at.count * dsa.top_k)
            scored = dsa.num_heads * dsa.head_dim * pairs / selecting
            return 2 * (scored + heads * (2 * latent + rope) * attended) / bf16

        moved, pairs, selecting = 0.0, 0.0, 1
        if at.split:
            per_query = heads * (mla.qk_nope_head_dim + rope + mla.v_head_dim)
            per_query += 0 if dsa is None else dsa.num_heads * (dsa.head_dim + 2)
            total = at.tokens * at.parts
            before = at.tokens * work.prefix
            work_of = {
                name: float(index_work(total, at.parts, name).max()) + before for name in ("contiguous", "zigzag")
            }
            zigzag = self.along.send(at.count * per_query * ITEM)
            times = {
                "zigzag": seconds(at.batch * work_of["zigzag"]) + zigzag,
                "contiguous": seconds(at.batch * work_of["contiguous"]),
            }
            self.layout = "zigzag" if times["zigzag"] <= times["contiguous"] else "contiguous"
            pairs = at.batch * work_of[self.layout]
            moved = zigzag if self.layout == "zigzag" else 0.0
            keys = total + work.prefix
            gathers = 1 if self.train else 2
            moved += gathers * self.along.gather(at.batch * keys * (latent_bytes + index_bytes))
            self.reasons["attention"] = (
                f"{self.layout} order: {_time(times['zigzag'])} a layer with queries moved to zigzag order, "
                f"{_time(times['contiguous'])} in contiguous order, on the busiest of {at.parts} devices"
            )
        else:
            keys = at.places if not self.train else at.tokens
            visible = work.context if work.phase == "decode" else work.prefix + (work.tokens + 1) / 2
            pairs = at.count * visible / (1 if self.train else at.parts)
            if at.parts > 1 and not self.train:
                merged = at.count * heads * (latent + 2) * 4
                moved = self.along.reduce(merged)
                if dsa is not None:
                    moved += self.along.gather(at.count * at.parts * min(dsa.top_k, at.places) * 4)
                self.reasons["attention"] = (
                    f"partial attention over {at.places:,} places a device, merged over {at.parts}"
                )
            elif dsa is not None and not self.train and self.chip.fabric == "switch":
                sizes, sharing = (at.batch, at.tokens, at.places, dsa.head_dim), self.tensor.size
                if shares_selection(*sizes, devices=sharing, top_k=dsa.top_k):
                    selecting = sharing
                    moved = self.tensor.gather(at.count * dsa.top_k * 4)
        read = at.batch * keys * (latent_bytes if dsa is None else index_bytes / selecting)
        if dsa is not None:
            read += at.count * min(dsa.top_k, keys) * latent_bytes
        compute = self._products(self.values.get("mla", 0)) + layers * seconds(pairs, selecting)
        return self._part(
            "attention", compute, layers * read, layers * (moved + self._summed), self.weights.get("mla", 0)
        )

    def _experts(self) -> Part:
        moe, at, layers = self.config.moe, self.spread, self.model.stacks["experts"]
        if not layers:
            return Part("experts", 0.0, 0.0, 0.0)
        size, copies = self.experts_over, self.experts_copies
        share = -(-at.count // copies)
        group = at.count if size == copies else share * size
        width = moe.latent_size or self.config.hidden_size
        rows = group * moe.num_experts_per_token / size
        own = moe.num_experts // size
        touched = 1 - (1 - moe.num_experts_per_token / moe.num_experts) ** group
        reads = max(touched, rows / own / _ROWS_A_READ)
        compute = layers * self._products(3 * moe.intermediate_size * width, rows)
        messages = layers * self._exchange(group, width, size, copies) if size > 1 else 0.0
        return self._part("experts", compute, 0.0, messages, self.weights.get("experts", 0) * reads)

    def _exchange(self, group: int, width: int, size: int, copies: int) -> float:
        """Seconds of bringing tokens and experts of one layer together."""
        moe, over = self.config.moe, Group.of(self.chip, size)
        same = size == copies

        def times(bandwidth: float) -> dict[Exchange, float]:
            return cheaper_exchange(
                group,
                width,
                moe.num_experts_per_token,
                moe.num_experts,
                size,
                link_bandwidth=bandwidth,
                memory_bandwidth=self.chip.hbm_bandwidth,
                collective_seconds=over.delay,
                itemsize=ITEM,
                replicated=same,
            ).seconds

        found = times(over.gather_bandwidth) | {"ragged": times(over.exchange_bandwidth)["ragged"]}
        if self.chip.fabric == "switch":
            del found["ragged"]
        if not same:
            back = self.tensor.gather(self.spread.count * width * ITEM)
            found = {name: seconds + back for name, seconds in found.items()}
        best = min(found, key=lambda name: found[name])
        self.exchange = best
        others = "; ".join(f"{name} {_time(s)}" for name, s in found.items() if name != best)
        self.reasons["experts"] = (
            f"{best} exchange over {size} devices: {_time(found[best])} a layer for {group:,} tokens"
            + (f" ({others})" if others else " (the ragged one runs on TPUs only)")
        )
        return found[best]

    def _mlps(self) -> Part:
        at, moe = self.spread, self.config.moe
        compute = self._products(self.values.get("moe", 0) + self.values.get("dense", 0))
        compute += 2 * at.count * self.values["moe.router"] / self.chip.peak("f32 highest")
        sums = self.model.stacks["dense MLP"] + (self.model.stacks["experts"] if moe.num_shared_experts else 0)
        reads = self.weights.get("moe", 0) + self.weights.get("dense", 0)
        return self._part("MLPs and routers", compute, 0.0, sums * self._summed, reads)

    def _residual(self) -> Part:
        layers, block = self.config.num_hidden_layers, self.config.attn_res_block_size
        bank = 0 if block is None else -(-layers // block)
        traffic = layers * self.spread.count * self.config.hidden_size * ITEM * (8 + bank)
        return self._part("norms and residuals", 0.0, traffic, 0.0)

    def _vocabulary(self) -> Part:
        at, width = self.spread, self.config.hidden_size
        rows = at.count if self.train else at.batch
        table = self.config.vocab_size // self.tensor.size * width
        written = rows * self.config.vocab_size / self.tensor.size * 4
        return self._part("vocabulary", self._products(table, rows), written, self._summed, table * ITEM)

    def _gradients(self) -> Part:
        """Their sums over devices, and the optimizer's pass over memory."""
        whole = sum(self.weights.values())
        experts = self.weights.get("experts", 0)
        for_all = Group.of(self.chip, _product(self.sizes, ("data", "context", "expert")))
        for_experts = Group.of(self.chip, _product(self.sizes, ("data", "context")))
        messages = self.micro_batches * (for_all.reduce(whole - experts) + for_experts.reduce(experts))
        traffic = whole * (2 * self.micro_batches + 4) + 2 * self._optimizer()
        return Part("gradients", 0.0, traffic / self.chip.hbm_bandwidth, messages)

    def _optimizer(self) -> int:
        """Bytes of Muon's moment of matrices inside layers, and of AdamW's two moments of the rest."""
        outer = sum(self.weights.get(name, 0) for name in ("embed", "head"))
        return sum(self.weights.values()) + outer

    def _memory(self) -> dict[str, int]:
        cache = {} if self.train else self.model.cache_bytes(self.sizes, self.workload)
        found = {"parameters": sum(self.weights.values()), "cache": sum(cache.values())}
        if self.train:
            found |= {"gradients": found["parameters"], "optimizer": self._optimizer()}
        return {**found, "temporaries": int(self._temporaries(cache))}

    def _temporaries(self, cache: Mapping[str, int]) -> float | int:
        config, at = self.config, self.spread
        mla, dsa, moe, heads = config.mla, config.dsa, config.moe, config.num_attention_heads / self.tensor.size
        size = config.attn_res_block_size
        bank = 0 if size is None else -(-config.num_hidden_layers // size)
        kda = config.kda.width / self.tensor.size * 36 * (2 if at.split else 1)
        query = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim) * ITEM * 3
        query += 0 if dsa is None else dsa.num_heads * dsa.head_dim * ITEM * 3
        inner = max(config.intermediate_size, moe.num_shared_experts * moe.intermediate_size) / self.tensor.size
        mlp = inner * ITEM * 3 + moe.num_experts * 12
        stream = config.hidden_size * ITEM * (bank + 6)
        total = at.count * (stream + max(kda, query, mlp) * (3 if self.train else 1))
        if at.split:
            stored = self.workload.format.token_bytes(config).total / max(1, len(mla.layers))
            total += 3 * at.batch * at.tokens * at.parts * stored
        total += 2 * BUDGET + _ATTENTION_BUDGET
        if not self.train:
            total += at.batch * config.vocab_size / self.tensor.size * 4
            if self.chip.fabric == "torus" and (mla.kv_lora_rank + mla.qk_rope_head_dim) % _LANES:
                total += cache["latent"] + cache.get("index_key", 0)
            if self.chip.name in _COPIED_WEIGHTS:
                total += sum(self.weights.values())
            return total
        values = sum(self.weights.values()) / 4
        layer = self.weights.get("experts", 0) / max(1, self.model.stacks["experts"])
        total += at.count * config.hidden_size * ITEM * config.num_hidden_layers
        logits = min(_LOGITS_BLOCK, at.count) * config.vocab_size / self.tensor.size * 12
        return total + 2 * values * ITEM + 2 * layer + logits


def _splitting(sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Sizes of the axes that split parameters."""
    axes = {axis for rule in RULES.values() for axis in ((rule,) if isinstance(rule, str) else rule or ())}
    return tuple(sizes.get(axis, 1) for axis in sorted(axes))


def _product(sizes: Mapping[str, int], axes: tuple[str, ...]) -> int:
    return math.prod(sizes.get(axis, 1) for axis in axes)


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
