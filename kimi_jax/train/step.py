"""One step of training, as a pure function of state and batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.model import Decoder
from kimi_jax.params import Params, is_spec
from kimi_jax.pytree import pytree
from kimi_jax.train.balancing import quantile_bias
from kimi_jax.train.batches import Batch
from kimi_jax.train.losses import IndexerStage, TrainingObserver, targets, token_losses

Metrics = dict[str, Float[Array, ""]]


@dataclass(frozen=True)
class StepConfig:
    """What a step does.

    Attributes:
        indexer: what the indexer learns from; None: it doesn't learn.
        indexer_weight: of its loss, the mean over tokens and layers. It reaches the indexer's parameters alone, so with
            an optimizer that doesn't mind the scale of gradients it hardly matters.
        language: whether the next-token loss counts; without it only the indexer learns.
        balance: how far each step moves the experts' biases towards those that would have balanced its batch: 1 sets
            them, less averages over batches, 0 leaves them.
        dtype: of the computation; parameters, gradients and optimizer state are float32.
        micro_batches: parts of the batch, along its rows, that are run one after the other.
    """

    indexer: IndexerStage | None = None
    indexer_weight: float = 1.0
    language: bool = True
    balance: float = 0.25
    dtype: DTypeLike = jnp.bfloat16
    micro_batches: int = 1

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise ValueError(f"micro_batches={self.micro_batches!r}; it must be at least 1.")
        if not 0 <= self.balance <= 1:
            raise ValueError(f"balance={self.balance!r}; it must be from 0 to 1.")
        if not self.language and self.indexer is None:
            raise ValueError("language=False with indexer=None leaves nothing to learn; set one of them.")


@pytree
class TrainState:
    """What a run carries from step to step: steps done, float32 parameters, the optimizer's state."""

    step: Int[Array, ""]
    params: Any
    optimizer_state: Any


def init_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step."""
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def make_train_step(
    decoder: Decoder, optimizer: optax.GradientTransformation, config: StepConfig
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """A compiled step (state, batch) -> (state, metrics); the state given is used up.

    A batch's loss is the mean over all its counting tokens, however they're spread over micro-batches, so these change
    it by rounding alone; a micro-batch in which nothing counts adds nothing.

    Metrics: `loss` nats per counting token; `tokens` that count; `gradient_norm` before clipping; `expert_imbalance`,
    the largest over layers of an expert's load over the mean load; `indexer_kl` nats per token and layer.

    Raises:
        ValueError: the model has no indexer but `config` trains it; or, when the step is traced, `micro_batches`
            doesn't divide the rows.
    """
    observer = TrainingObserver(decoder, config.indexer)

    def loss(decoder: Decoder, params: Params, part: _Part) -> tuple[Array, dict[str, Array]]:
        """Its share of the loss, and what adds up over parts and devices."""
        if config.indexer is not None and not decoder.shards.whole_rows:
            raise ValueError(
                f"indexer={config.indexer!r} needs all heads and whole rows on a device, to compare the indexer with the "
                "attention of all heads; on a mesh with tensor=1 and context=1, and rows that data x expert divides, it "
                "can learn."
            )
        cast = _cast(decoder, params, config.dtype)
        hidden, found = decoder.hidden(cast, part.tokens, segment_ids=part.segment_ids, observer=observer)
        losses = token_losses(decoder, params, hidden, part.wanted)
        language = jnp.sum(jnp.where(part.counts, losses, 0))
        total = language / jnp.maximum(part.counting, 1) if config.language else jnp.zeros(())
        if config.indexer is not None:
            layers = found["indexer_kl"].shape[0]
            total += config.indexer_weight * jnp.sum(found["indexer_kl"]) / (layers * jnp.maximum(part.present, 1))
        return total, found | {"language": language}

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        rows = batch.tokens.shape[0]
        if rows % config.micro_batches:
            raise ValueError(f"micro_batches={config.micro_batches} doesn't divide the batch's {rows} rows.")
        whole = _Part.of(batch)
        counting, tokens = whole.counting, whole.present
        gradients, found = _accumulate(
            lambda params, part: decoder.gradients(loss, params, part), state.params, whole, config.micro_batches
        )
        updates, optimizer_state = optimizer.update(gradients, state.optimizer_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {
            "loss": found["language"] / jnp.maximum(counting, 1),
            "tokens": counting.astype(jnp.float32),
            "gradient_norm": jnp.sqrt(sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(gradients))),
        }
        if "indexer_kl" in found:
            metrics["indexer_kl"] = jnp.mean(found["indexer_kl"]) / jnp.maximum(tokens, 1)
        if "margins" in found:
            load = found["expert_load"].astype(jnp.float32)
            metrics["expert_imbalance"] = jnp.max(load / jnp.maximum(jnp.mean(load, axis=-1, keepdims=True), 1))
            old = params["moe"]["correction_bias"]
            bias = quantile_bias(found["margins"], old, decoder.config.moe.num_experts_per_token)
            bias = old + config.balance * (bias - old)
            params = params | {"moe": params["moe"] | {"correction_bias": bias}}
        return TrainState(state.step + 1, params, optimizer_state), metrics

    return jax.jit(step, donate_argnums=0)


def evaluate_batch(decoder: Decoder, dtype: DTypeLike = jnp.bfloat16) -> Callable[[Params, Batch], dict[str, Array]]:
    """A compiled (params, batch) -> what a batch holds, to be added up over batches.

    Returns per-token arrays [B, T]: `nats`, 0 where nothing is to be predicted; `counts`, where something is;
    `correct`, where the likeliest token is the right one; and `expert_load` [MoE layers, E].
    """
    observer = TrainingObserver(decoder, None)

    @jax.jit
    def evaluate(params: Params, batch: Batch) -> dict[str, Array]:
        params = _cast(decoder, params, dtype)
        tokens, segments = jnp.asarray(batch.tokens), jnp.asarray(batch.segment_ids)
        hidden, found = decoder.hidden(params, tokens, segment_ids=segments, observer=observer)
        wanted, counts = targets(batch)

        def of_row(row: tuple[Array, Array]) -> tuple[Array, Array]:
            hidden, wanted = row
            logits = decoder.head(params, hidden[None])[0]
            nats = jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, wanted[:, None], axis=-1)[:, 0]
            return nats, jnp.argmax(logits, axis=-1) == wanted

        nats, correct = jax.lax.map(of_row, (hidden, wanted))
        result = {"nats": jnp.where(counts, nats, 0), "counts": counts, "correct": correct & counts}
        return result | ({"expert_load": found["expert_load"]} if "expert_load" in found else {})

    return evaluate


def _cast(decoder: Decoder, params: Params, dtype: DTypeLike) -> Params:
    """The dtypes that the model computes in; gradients come back in float32."""
    return jax.tree.map(
        lambda spec, leaf: leaf if spec.float32 else leaf.astype(dtype), decoder.specs, params, is_leaf=is_spec
    )


@pytree
class _Part:
    """A batch or some of its rows: what is read and predicted, and the whole batch's numbers of tokens."""

    tokens: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"]
    wanted: Int[Array, "B T"]
    counts: Bool[Array, "B T"]
    counting: Int[Array, ""]
    present: Int[Array, ""]

    @staticmethod
    def of(batch: Batch) -> "_Part":
        wanted, counts = targets(batch)
        segments = jnp.asarray(batch.segment_ids)
        return _Part(jnp.asarray(batch.tokens), segments, wanted, counts, jnp.sum(counts), jnp.sum(segments >= 0))


def _accumulate(function: Callable[..., Any], params: Params, whole: _Part, parts: int) -> Any:
    """Sum of function(params, part) over parts of the batch."""
    if parts == 1:
        return function(params, whole)

    def cut(x: Array) -> Array:
        return x.reshape(parts, -1, x.shape[1]) if x.ndim else jnp.broadcast_to(x, (parts,))

    split: _Part = jax.tree.map(cut, whole)
    first = jax.tree.map(lambda x: x[0], split)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, params, first))

    def add(total: Any, part: _Part) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, function(params, part)), None

    return jax.lax.scan(add, zeros, split)[0]
