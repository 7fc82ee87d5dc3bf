"""The decode loop, on the device: run one token, choose the next, write it down, until every row has finished."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.cache import Cache
from kimi_jax.generate.sampler import Sampler
from kimi_jax.model import Decoder
from kimi_jax.params import Params
from kimi_jax.pytree import pytree
from pallas_kernels.precision import at_least_float32


@pytree
class Progress:
    """Where a batch of requests stands.

    Attributes:
        token: [B] each row's last token, which the cache doesn't have yet.
        emitted: [B] new tokens so far.
        limits: [B] new tokens each row may have.
        stopped: [B] rows that emitted a stop token, or were stopped from outside.
        stop_ids: [B, N] tokens that end each row, padded with -1; they're emitted.
        sampler: how each row's tokens are chosen.
    """

    token: Int[Array, " B"]
    emitted: Int[Array, " B"]
    limits: Int[Array, " B"]
    stopped: Bool[Array, " B"]
    stop_ids: Int[Array, "B N"]
    sampler: Sampler

    @property
    def active(self) -> Bool[Array, " B"]:
        """Rows that still want tokens."""
        return ~self.stopped & (self.emitted < self.limits)


@pytree
class Logprobs:
    """Log-probabilities in the model's own distribution, at each step.

    Attributes:
        own: [B, n] of the token that was chosen.
        top_tokens, top: [B, n, k] the most probable tokens and theirs, in descending order.
    """

    own: Float[Array, "B n"]
    top_tokens: Int[Array, "B n k"]
    top: Float[Array, "B n k"]


@pytree
class Emitted:
    """New tokens of a call, -1 where there is none, and what was asked to be known of them.

    Attributes:
        tokens: [B, n].
        logprobs: log-probabilities, or None.
    """

    tokens: Int[Array, "B n"]
    logprobs: Logprobs | None


def begin(
    logits: Float[Array, "B V"],
    limits: Int[Array, " B"],
    stop_ids: Int[Array, "B N"],
    sampler: Sampler,
    *,
    top_logprobs: int | None = None,
) -> tuple[Progress, Emitted]:
    """Emits each row's first token, from the logits that its prompt led to.

    Args:
        logits: of each row's last prompt token.
        limits: new tokens each row may have, at least 1.
        stop_ids: see `Progress`.
        sampler: how tokens are chosen.
        top_logprobs: static; how many of the most probable tokens to report; None reports no log-probabilities.
    """
    batch = logits.shape[0]
    zeros = jnp.zeros(batch, jnp.int32)
    progress = Progress(zeros, zeros, limits, jnp.zeros(batch, bool), stop_ids, sampler)
    return _emit(progress, logits, _nothing(batch, 1, top_logprobs, logits.dtype), 0)


def advance(
    decoder: Decoder,
    params: Params,
    cache: Cache,
    progress: Progress,
    halt: Bool[Array, " B"],
    num_steps: Int[Array, ""],
    *,
    size: int,
    top_logprobs: int | None = None,
) -> tuple[Cache, Progress, Emitted]:
    """Emits up to `num_steps` further tokens a row, fewer when all rows finish earlier.

    A finished row no longer changes: it is run with zero valid tokens.

    Args:
        decoder: the model.
        params: its parameters.
        cache: after every token but each row's last one.
        progress: from `begin` or an earlier call.
        halt: rows that end before the first step.
        num_steps: at most `size`.
        size: static; room for tokens in what is returned.
        top_logprobs: static, as in `begin`.

    Returns:
        (cache, progress, what was emitted).
    """
    progress = replace(progress, stopped=progress.stopped | halt)
    emitted = _nothing(progress.token.shape[0], size, top_logprobs, at_least_float32(cache.dtype))

    def wanted(carry: tuple) -> Bool[Array, ""]:
        step, _, progress, _ = carry
        return (step < num_steps) & progress.active.any()

    def run(carry: tuple) -> tuple:
        step, cache, progress, emitted = carry
        lengths = progress.active.astype(jnp.int32)
        logits, cache = decoder.prefill(params, progress.token[:, None], cache, lengths=lengths)
        return (step + 1, cache, *_emit(progress, logits, emitted, step))

    _, cache, progress, emitted = jax.lax.while_loop(wanted, run, (jnp.int32(0), cache, progress, emitted))
    return cache, progress, emitted


def _emit(
    progress: Progress, logits: Float[Array, "B V"], emitted: Emitted, step: Int[Array, ""] | int
) -> tuple[Progress, Emitted]:
    """Chooses each active row's next token and writes it down at `step`."""
    active = progress.active
    token = progress.sampler.choose(logits, progress.emitted)
    progress = replace(
        progress,
        token=jnp.where(active, token, progress.token),
        emitted=progress.emitted + active,
        stopped=progress.stopped | (active & (token[:, None] == progress.stop_ids).any(-1)),
        sampler=progress.sampler.record(token, active),
    )
    emitted = replace(emitted, tokens=emitted.tokens.at[:, step].set(jnp.where(active, token, -1)))
    if emitted.logprobs is None:
        return progress, emitted
    noted, logprobs = emitted.logprobs, jax.nn.log_softmax(logits, axis=-1)
    top, top_tokens = jax.lax.top_k(logprobs, noted.top.shape[-1])
    noted = Logprobs(
        own=noted.own.at[:, step].set(jnp.take_along_axis(logprobs, token[:, None], axis=-1)[:, 0]),
        top_tokens=noted.top_tokens.at[:, step].set(top_tokens),
        top=noted.top.at[:, step].set(top),
    )
    return progress, replace(emitted, logprobs=noted)


def _nothing(batch: int, size: int, top_logprobs: int | None, dtype: jnp.dtype) -> Emitted:
    tokens = jnp.full((batch, size), -1, jnp.int32)
    if top_logprobs is None:
        return Emitted(tokens, None)
    shape = (batch, size, top_logprobs)
    return Emitted(
        tokens, Logprobs(jnp.zeros((batch, size), dtype), jnp.zeros(shape, jnp.int32), jnp.zeros(shape, dtype))
    )
