"""The decode loop, on the device: run one token, choose the next, write it down, until every row has finished."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.cache import Cache
from kimi_jax.generate.sampling import Sampler
from kimi_jax.model import Decoder
from kimi_jax.params import Params
from pallas_kernels.precision import at_least_float32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Progress:
    """Where a batch of requests stands.

    Attributes:
        cache: state after every token but each row's last one.
        token: [B] each row's last token, not yet run.
        emitted: [B] new tokens so far.
        limits: [B] new tokens each row may have.
        stopped: [B] rows that emitted a stop token.
        sampler: how each row's tokens are chosen.
    """

    cache: Cache
    token: Int[Array, " B"]
    emitted: Int[Array, " B"]
    limits: Int[Array, " B"]
    stopped: Bool[Array, " B"]
    sampler: Sampler

    @property
    def active(self) -> Bool[Array, " B"]:
        """Rows that still want tokens."""
        return ~self.stopped & (self.emitted < self.limits)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Emitted:
    """New tokens of a call, -1 where a row had finished, and what was asked to be known of them.

    Attributes:
        tokens: [B, n].
        logprobs: [B, n] log-probability of each token in the model's own distribution, or None.
        top_tokens, top_logprobs: [B, n, k] the most probable tokens at each step, or None.
    """

    tokens: Int[Array, "B n"]
    logprobs: Float[Array, "B n"] | None
    top_tokens: Int[Array, "B n k"] | None
    top_logprobs: Float[Array, "B n k"] | None


def begin(
    logits: Float[Array, "B V"],
    cache: Cache,
    limits: Int[Array, " B"],
    sampler: Sampler,
    stop_ids: Int[Array, "B N"],
    top_logprobs: int | None = None,
) -> tuple[Progress, Emitted]:
    """Emits each row's first token, from the logits that its prompt led to.

    Args:
        logits: of each row's last prompt token.
        cache: after the prompts.
        limits: [B] new tokens each row may have, at least 1.
        sampler: how tokens are chosen.
        stop_ids: tokens that end each row, padded with -1; they're emitted.
        top_logprobs: static; None reports no log-probabilities, 0 those of the tokens alone.
    """
    batch = logits.shape[0]
    zeros = jnp.zeros(batch, jnp.int32)
    progress = Progress(cache, zeros, zeros, limits, jnp.zeros(batch, bool), sampler)
    return _emit(progress, logits, _nothing(batch, 1, top_logprobs, logits.dtype), 0, stop_ids)


def advance(
    decoder: Decoder,
    params: Params,
    progress: Progress,
    stop_ids: Int[Array, "B N"],
    num_steps: int,
    top_logprobs: int | None = None,
) -> tuple[Progress, Emitted]:
    """Emits up to `num_steps` further tokens a row, fewer when all rows finish earlier.

    A finished row no longer changes: it is run with zero valid tokens.

    Args:
        decoder: the model.
        params: its parameters.
        progress: from `begin` or an earlier call.
        stop_ids: as in `begin`.
        num_steps: static.
        top_logprobs: static, as in `begin`.

    Returns:
        (progress, what was emitted).
    """
    emitted = _nothing(progress.token.shape[0], num_steps, top_logprobs, at_least_float32(progress.cache.latent))

    def wanted(carry: tuple) -> Bool[Array, ""]:
        step, progress, _ = carry
        return (step < num_steps) & progress.active.any()

    def run(carry: tuple) -> tuple:
        step, progress, emitted = carry
        lengths = progress.active.astype(jnp.int32)
        logits, cache = decoder.prefill(params, progress.token[:, None], progress.cache, lengths=lengths)
        return (step + 1, *_emit(replace(progress, cache=cache), logits, emitted, step, stop_ids))

    _, progress, emitted = jax.lax.while_loop(wanted, run, (jnp.int32(0), progress, emitted))
    return progress, emitted


def _emit(
    progress: Progress,
    logits: Float[Array, "B V"],
    emitted: Emitted,
    step: Int[Array, ""] | int,
    stop_ids: Int[Array, "B N"],
) -> tuple[Progress, Emitted]:
    """Chooses each active row's next token and writes it down at `step`."""
    active = progress.active
    token = progress.sampler.choose(logits, progress.emitted)
    progress = replace(
        progress,
        token=jnp.where(active, token, progress.token),
        emitted=progress.emitted + active,
        stopped=progress.stopped | (active & (token[:, None] == stop_ids).any(-1)),
        sampler=progress.sampler.record(token, active),
    )
    emitted = replace(emitted, tokens=emitted.tokens.at[:, step].set(jnp.where(active, token, -1)))
    if emitted.logprobs is None:
        return progress, emitted
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    own = jnp.take_along_axis(logprobs, token[:, None], axis=-1)[:, 0]
    emitted = replace(emitted, logprobs=emitted.logprobs.at[:, step].set(own))
    if emitted.top_tokens is None or emitted.top_logprobs is None:
        return progress, emitted
    values, tokens = jax.lax.top_k(logprobs, emitted.top_tokens.shape[-1])
    return progress, replace(
        emitted,
        top_tokens=emitted.top_tokens.at[:, step].set(tokens),
        top_logprobs=emitted.top_logprobs.at[:, step].set(values),
    )


def _nothing(batch: int, num_steps: int, top_logprobs: int | None, dtype: jnp.dtype) -> Emitted:
    tokens = jnp.full((batch, num_steps), -1, jnp.int32)
    logprobs = None if top_logprobs is None else jnp.zeros((batch, num_steps), dtype)
    if not top_logprobs:
        return Emitted(tokens, logprobs, None, None)
    shape = (batch, num_steps, top_logprobs)
    return Emitted(tokens, logprobs, jnp.zeros(shape, jnp.int32), jnp.zeros(shape, dtype))
