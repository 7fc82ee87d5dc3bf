"""The choice of tokens, on the device, row by row."""

import math
import secrets
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from kimi_jax.generate.sampling import Integer, Number, SamplingParams
from kimi_jax.pytree import pytree

# Ranked by every filter before the whole vocabulary is. Most nuclei are smaller, and sorting 160 thousand logits costs
# as much as a small model.
CANDIDATES = 128


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
            keys=jnp.asarray(np.array([_raw_key(request.seed) for request in requests])),
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
            # argmax(z + Gumbel noise) is a draw from softmax(z). The noise belongs to a token, not to a rank, so it
            # doesn't matter how the filters found theirs.
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
    """The tokens that top_k, then top_p, then min_p leave.

    Each filter keeps the beginning of the ranking by probability, then id: so a rank is looked for, and the token that
    has it. Only the most probable tokens are ranked, unless a row's rank lies beyond them.

    Args:
        scaled: logits over the temperature, less their maximum.
        top_k: from 1 to V, which keeps all.
        top_p: above 0, to 1, which keeps all.
        min_p: from 0, which keeps all, to 1.
    """
    vocab_size = scaled.shape[-1]
    # Renormalising doesn't change the ratio to the most probable token, whose p is exp(0) here.
    likely = scaled >= jnp.log(min_p.astype(scaled.dtype))[:, None]
    ranked = (top_k < vocab_size) | (top_p < 1)

    def before_last() -> Bool[Array, "B V"]:
        num_candidates = min(CANDIDATES, vocab_size)
        last, complete = _last(*jax.lax.top_k(scaled, num_candidates), scaled, top_k, top_p)

        def rank_all() -> tuple[Array, Array]:
            ids = jnp.broadcast_to(jnp.arange(vocab_size, dtype=jnp.int32), scaled.shape)
            negated, ids = jax.lax.sort((-scaled, ids), num_keys=2)
            found, _ = _last(-negated, ids, scaled, top_k, top_p)
            # A row that the candidates suffice for keeps their answer: another order of summation could round to
            # another rank, and then a neighbour would have changed the row.
            return jax.tree.map(lambda few, all_: jnp.where(complete, few, all_), last, found)

        value, token = jax.lax.cond((complete | ~ranked).all(), lambda: last, rank_all)
        tied = (scaled == value[:, None]) & (jnp.arange(vocab_size) <= token[:, None])
        return (scaled > value[:, None]) | tied | ~ranked[:, None]

    return likely & jax.lax.cond(ranked.any(), before_last, lambda: jnp.ones(scaled.shape, bool))


def _last(
    values: Float[Array, "B N"],
    ids: Int[Array, "B N"],
    scaled: Float[Array, "B V"],
    top_k: Int[Array, " B"],
    top_p: Float[Array, " B"],
) -> tuple[tuple[Array, Array], Bool[Array, " B"]]:
    """The last token that top_k and top_p keep, looked for among the first of the ranking.

    Returns:
        ((its value, its id), whether it was among them).
    """
    num_ranked, vocab_size = values.shape[-1], scaled.shape[-1]
    within_k = jnp.arange(num_ranked) < top_k[:, None]
    mass = jnp.where(within_k, jnp.exp(values), 0)
    all_of_k = (top_k <= num_ranked) | (num_ranked == vocab_size)
    total = jnp.where(all_of_k, mass.sum(-1), jnp.exp(scaled).sum(-1))
    # Mass of the tokens before each: its own would be taken off again with an error.
    before = jnp.cumsum(mass, axis=-1)[:, :-1]
    before = jnp.concatenate([jnp.zeros_like(mass[:, :1]), before], axis=-1)
    limit = jnp.where(top_p < 1, top_p.astype(scaled.dtype) * total, jnp.inf)
    count = jnp.maximum((within_k & (before < limit[:, None])).sum(-1), 1)
    # With top_k beyond the candidates its total isn't known; without one, the rank that reaches top_p must be seen.
    complete = all_of_k | ((top_k == vocab_size) & (count < num_ranked))
    at = count[:, None] - 1
    value = jnp.take_along_axis(values, at, axis=-1)[:, 0]
    token = jnp.take_along_axis(ids, at, axis=-1)[:, 0].astype(jnp.int32)
    return (value, token), complete


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
            raise ValueError(f"{name} holds {outside[0]}; legal ids are 0 to vocab_size-1={vocab_size - 1}.")
    bias = np.zeros(vocab_size, np.float32)
    if request.allowed_token_ids is not None:
        bias[:] = -math.inf
        bias[np.array(request.allowed_token_ids)] = 0
    for token, value in request.logit_bias.items():
        bias[token] += value
    return bias
