"""The choice of tokens, on the device, row by row."""

import math
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from kimi_jax.generate.sampling import Integer, Number, SamplingParams
from kimi_jax.parallel.hosts import agreed
from kimi_jax.pytree import pytree
from kimi_jax.text.shown import shown


@pytree
class Sampler:
    """The sampling parameters of a batch, as arrays.

    What a batch asks for is looked at on the device, so that other temperatures or filters need no other program. Only
    the parts with an entry for each token of the vocabulary are None when no row asks for them.

    Attributes:
        keys: [B, 2] raw random keys, one a row.
        temperature: [B]; 0 for greedy rows.
        top_k: [B]; the size of the vocabulary keeps all.
        top_p, min_p: [B].
        bias: [B, V] added to the logits, -inf for tokens that aren't allowed; or None.
        repetition, presence: [B] penalties, or None.
        in_prompt, in_answer: [B, V] tokens that are present, or None.
    """

    keys: UInt32[Array, "B 2"]
    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    bias: Float[Array, "B V"] | None
    repetition: Float[Array, " B"] | None
    presence: Float[Array, " B"] | None
    in_prompt: Bool[Array, "B V"] | None
    in_answer: Bool[Array, "B V"] | None

    @staticmethod
    def of(requests: Sequence[SamplingParams], prompts: Sequence[np.ndarray], vocab_size: int) -> "Sampler":
        """Gathers the parameters of a batch.

        Args:
            requests: one a row.
            prompts: [T] token ids of each row, which the repetition penalty looks at.
            vocab_size: V.

        Raises:
            ValueError: a token id in `logit_bias` or `allowed_token_ids` isn't in the vocabulary.
        """
        # A temperature too small for a float32 is 0: what it tends to is the greedy choice.
        tiny = float(np.finfo(np.float32).tiny)
        temperatures = [0 if request.temperature < tiny else request.temperature for request in requests]
        top_k = [vocab_size if request.top_k is None else min(request.top_k, vocab_size) for request in requests]
        bias = None
        if any(request.biases for request in requests):
            bias = jnp.asarray(np.stack([_bias(request, vocab_size) for request in requests]))
        penalizes = any(request.penalizes for request in requests)
        in_prompt = np.zeros((len(requests), vocab_size), bool)
        for row, prompt in zip(in_prompt, prompts, strict=True):
            row[prompt] = True
        return Sampler(
            keys=jnp.asarray(agreed(np.array([_raw_key(request.seed) for request in requests]))),
            temperature=_column(temperatures),
            top_k=jnp.asarray(np.array(top_k, np.int32)),
            top_p=_column([request.top_p for request in requests]),
            min_p=_column([request.min_p for request in requests]),
            bias=bias,
            repetition=_column([request.repetition_penalty for request in requests]) if penalizes else None,
            presence=_column([request.presence_penalty for request in requests]) if penalizes else None,
            in_prompt=jnp.asarray(in_prompt) if penalizes else None,
            in_answer=jnp.asarray(np.zeros_like(in_prompt)) if penalizes else None,
        )

    def choose(self, logits: Float[Array, "B V"], step: Int[Array, " B"]) -> Int[Array, " B"]:
        """The next token of each row.

        A row's choice depends on its logits, its parameters, its key and its step, bit for bit, and on nothing of its
        neighbours: what is skipped when no row needs it changes no row that doesn't.

        Args:
            logits: the model's.
            step: each row's own count of new tokens.
        """
        scores = self.adjusted(logits)
        best = jnp.argmax(scores, axis=-1).astype(jnp.int32)
        greedy = self.temperature == 0

        def draw() -> Int[Array, " B"]:
            # Taking off the maximum first keeps a tiny temperature from making inf - inf.
            centred = scores - scores.max(axis=-1, keepdims=True)
            scaled = centred / jnp.where(greedy, 1, self.temperature)[:, None].astype(scores.dtype)
            keep = kept(scaled, self.top_k, self.top_p, self.min_p)
            noise = jax.vmap(_noise, in_axes=(0, 0, None))(self.keys, step, scores.shape[-1])
            # argmax(z + Gumbel noise) is a draw from softmax(z). The noise belongs to a token, whatever its rank.
            noisy = jnp.where(keep, scaled + noise.astype(scores.dtype), -jnp.inf)
            return jnp.argmax(noisy, axis=-1).astype(jnp.int32)

        return jnp.where(greedy, best, jax.lax.cond(greedy.all(), lambda: best, draw))

    def adjusted(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Logits with bias and penalties, before temperature."""
        scores = logits if self.bias is None else logits + self.bias.astype(logits.dtype)
        if self.repetition is None or self.presence is None or self.in_prompt is None or self.in_answer is None:
            return scores
        penalty = self.repetition[:, None].astype(scores.dtype)
        repeated = jnp.where(scores > 0, scores / penalty, scores * penalty)
        scores = jnp.where(self.in_prompt | self.in_answer, repeated, scores)
        return scores - self.presence[:, None].astype(scores.dtype) * self.in_answer

    def record(self, tokens: Int[Array, " B"], active: Bool[Array, " B"]) -> "Sampler":
        """The sampler after the active rows emitted `tokens`."""
        if self.in_answer is None:
            return self
        rows = jnp.arange(tokens.shape[0])
        return replace(self, in_answer=self.in_answer.at[rows, tokens].max(active))


def kept(
    scaled: Float[Array, "B V"], top_k: Int[Array, " B"], top_p: Float[Array, " B"], min_p: Float[Array, " B"]
) -> Bool[Array, "B V"]:
    """The tokens that top_k, then top_p, then min_p leave; nothing is sorted.

    Args:
        scaled: logits over the temperature, less their maximum.
        top_k: from 1 to V, which keeps all.
        top_p: above 0, to 1, which keeps all.
        min_p: from 0, which keeps all, to 1.
    """
    everything = jnp.ones(scaled.shape, bool)
    limited, nucleus = top_k < scaled.shape[-1], top_p < 1

    def first_k() -> Bool[Array, "B V"]:
        return _leading(scaled, everything.astype(scaled.dtype), top_k.astype(scaled.dtype)) | ~limited[:, None]

    among = jax.lax.cond(limited.any(), first_k, lambda: everything)

    def first_p() -> Bool[Array, "B V"]:
        mass = jnp.where(among, jnp.exp(scaled), 0)
        return _leading(scaled, mass, top_p.astype(scaled.dtype) * mass.sum(-1)) | ~nucleus[:, None]

    # Renormalising doesn't change the ratio to the most probable token, whose share is exp(0) here.
    likely = scaled >= jnp.log(min_p.astype(scaled.dtype))[:, None]
    return among & likely & jax.lax.cond(nucleus.any(), first_p, lambda: everything)


def _leading(
    scaled: Float[Array, "B V"], weight: Float[Array, "B V"], target: Float[Array, " B"]
) -> Bool[Array, "B V"]:
    """The beginning of the ranking, by descending value and then by id, whose weight first reaches the target.

    The last value in it is found by halving the range of all floats: as many sums over the vocabulary as a float has
    bits, which are far cheaper than sorting it. Equal values have equal weights.
    """
    # Distances from the maximum: floats that aren't negative are in the order of their bits.
    bits = jnp.finfo(scaled.dtype).bits
    integer = jnp.int64 if bits == 64 else jnp.int32
    distance = jax.lax.bitcast_convert_type(jnp.abs(scaled), integer)
    # Of a target that has become 0, nothing would be enough.
    target = jnp.maximum(target, jnp.finfo(scaled.dtype).tiny)

    def halve(_: Any, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        below, reached = bounds
        middle = below + (reached - below) // 2
        enough = jnp.where(distance <= middle[:, None], weight, 0).sum(-1) >= target
        return jnp.where(enough, below, middle), jnp.where(enough, middle, reached)

    furthest = jax.lax.bitcast_convert_type(jnp.array(jnp.inf, scaled.dtype), integer)
    start = jnp.full(target.shape, -1, integer), jnp.full(target.shape, furthest, integer)
    _, last = jax.lax.fori_loop(0, bits, halve, start)
    before, tied = distance < last[:, None], distance == last[:, None]
    missing = target - jnp.where(before, weight, 0).sum(-1)
    each = jnp.where(tied, weight, 0).max(-1)
    needed = jnp.ceil(missing / jnp.where(each > 0, each, 1))
    return before | (tied & (jnp.cumsum(tied, axis=-1) <= needed[:, None]))


def _noise(key: UInt32[Array, "2"], step: Int[Array, ""], size: int) -> Float[Array, " V"]:
    own = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), step)
    # With "low", one draw in 10^7 has no room left in the tail, which 160 thousand tokens reach.
    return jax.random.gumbel(own, (size,), jnp.float32, mode="high")


def _raw_key(seed: Integer | None) -> np.ndarray:
    bits = secrets.randbits(63) if seed is None else int(seed)
    return np.array([bits >> 32, bits & 0xFFFFFFFF], np.uint32)


def _column(values: Sequence[Number]) -> Array:
    return jnp.asarray(np.array(values, np.float32))


def _bias(request: SamplingParams, vocab_size: int) -> np.ndarray:
    for name in ("logit_bias", "allowed_token_ids"):
        outside = [token for token in getattr(request, name) or () if token >= vocab_size]
        if outside:
            raise ValueError(f"{name} holds {shown(outside[0])}; legal ids are 0 to vocab_size-1={vocab_size - 1}.")
    bias = np.zeros(vocab_size, np.float32)
    if request.allowed_token_ids is not None:
        bias[:] = -math.inf
        bias[np.array(request.allowed_token_ids)] = 0
    for token, value in request.logit_bias.items():
        bias[token] += value
    return bias
