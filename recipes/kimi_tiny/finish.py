"""What makes a model of two checkpoints: the mean of their parameters, with the experts' biases settled anew."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kimi_jax.model import Decoder
from kimi_jax.params import Params
from kimi_jax.train import Batch
from kimi_jax.train.balancing import quantile_bias
from kimi_jax.train.losses import TrainingObserver


def mean(first: Params, second: Params, share: float) -> Params:
    """(1 - share) first + share second, of every parameter: between a model and what further training made of it.

    Raises:
        ValueError: `share` isn't between 0 and 1.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share={share}; it must be from 0 to 1.")
    return jax.tree.map(lambda a, b: (1 - share) * a + share * b, first, second)


def settle(decoder: Decoder, params: Params, batches: Sequence[Batch], rounds: int, step: float = 0.4) -> Params:
    """The parameters with biases under which the batches would load the experts evenly.

    A bias moves the thresholds of all experts of its layer, and what the layers behind it read: every batch moves the
    biases by a part of the way, several times.

    Args:
        decoder: the model.
        params: its parameters; all but the biases stay.
        batches: of one shape.
        rounds: how often all batches are run.
        step: the part of the way.
    """
    observer = TrainingObserver(decoder, None)

    @jax.jit
    def margins(params: Params, batch: Batch) -> Int[Array, "L E bins"]:
        tokens, segments = jnp.asarray(batch.tokens), jnp.asarray(batch.segment_ids)
        return decoder.hidden(params, tokens, segment_ids=segments, observer=observer)[1]["margins"]

    for batch in [*batches] * rounds:
        old = params["moe"]["correction_bias"]
        found = quantile_bias(margins(params, batch), old, decoder.config.moe.num_experts_per_token)
        params = params | {"moe": params["moe"] | {"correction_bias": old + step * (found - old)}}
    return params
