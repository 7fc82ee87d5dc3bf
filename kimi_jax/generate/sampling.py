"""Choosing tokens: what a request may ask for, and the choice itself, on the device, row by row."""

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

MOST_TOP_LOGPROBS = 20
LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen. The default is greedy.

    Scores are changed in this order: logit bias and allowed tokens, repetition penalty, presence penalty, temperature,
    then top_k, top_p and min_p, each on what the one before it left, renormalised.

    Attributes:
        temperature: divides the logits; 0 takes the most probable token.
        top_k: keep this many of the most probable tokens; None keeps all.
        top_p: keep the fewest most probable tokens whose probabilities reach this sum; the token that reaches it stays.
        min_p: drop tokens less probable than this fraction of the most probable one.
        repetition_penalty: above 1, makes tokens of the prompt and the answer less likely (positive logits are divided
            by it, negative ones multiplied).
        presence_penalty: subtracted from the logits of tokens that the answer already has.
        max_new_tokens: bound on the new tokens.
        stop: strings that end the answer; they aren't part of it.
        stop_token_ids: tokens that end the answer besides the model's own; None: only those; (): none at all.
        seed: the request's own randomness; None draws one. The same seed gives the same tokens whatever else is in
            the batch.
        logprobs: report the log-probability of every new token.
        top_logprobs: also report this many most probable tokens at every step.
        logit_bias: added to the logits of these tokens.
        allowed_token_ids: only these tokens may come; None: any.

    Log-probabilities are those of the model's own distribution, before any of the changes above.

    Raises:
        ValueError, TypeError: an illegal value; the message names the field and what is legal.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] | None = None
    seed: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        self._number("temperature", 0, math.inf, "at least 0")
        self._number("top_p", 0, 1, "above 0 and at most 1", open_low=True)
        self._number("min_p", 0, 1, "at least 0 and at most 1")
        self._number("repetition_penalty", 0, math.inf, "above 0", open_low=True)
        self._number("presence_penalty", -math.inf, math.inf, "finite")
        self._integer("max_new_tokens", 1, math.inf)
        self._integer("top_logprobs", 0, MOST_TOP_LOGPROBS)
        if self.top_k is not None:
            self._integer("top_k", 1, math.inf)
        if self.seed is not None:
            self._integer("seed", 0, LARGEST_SEED)
        if not isinstance(self.logprobs, bool):
            raise TypeError(f"logprobs={self.logprobs!r} must be True or False.")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"stop={self.stop!r} must hold strings that aren't empty.")
        object.__setattr__(self, "stop", stop)
        for name in ("stop_token_ids", "allowed_token_ids"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _token_ids(name, getattr(self, name)))
        if self.allowed_token_ids == ():
            raise ValueError("allowed_token_ids is empty: no token could be chosen; None allows all.")
        _token_ids("logit_bias", self.logit_bias)
        for token, bias in self.logit_bias.items():
            if not _is_number(bias) or not math.isfinite(bias):
                raise ValueError(f"logit_bias[{token}]={bias!r} must be a finite number.")

    def _number(self, name: str, low: float, high: float, legal: str, open_low: bool = False) -> None:
        value = getattr(self, name)
        if not _is_number(value):
            raise TypeError(f"{name}={value!r} must be a number, {legal}.")
        if not math.isfinite(value) or value < low or value > high or (open_low and value == low):
            raise ValueError(f"{name}={value!r} must be {legal}.")

    def _integer(self, name: str, low: int, high: float) -> None:
        value = getattr(self, name)
        bound = f"from {low} to {high}" if math.isfinite(high) else f"of at least {low}"
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"{name}={value!r} must be an integer {bound}.")
        if not low <= value <= high:
            raise ValueError(f"{name}={value!r} must be an integer {bound}.")

    @classmethod
    def of(cls, params: "SamplingParams | None", changes: Mapping[str, Any]) -> "SamplingParams":
        """`params`, or the default, with `changes` applied; an unknown name is an error that lists the legal ones."""
        names = [item.name for item in fields(cls)]
        unknown = [name for name in changes if name not in names]
        if unknown:
            raise TypeError(f"{unknown[0]!r} isn't a sampling parameter; legal are {', '.join(names)}.")
        return replace(params or cls(), **changes)

    @property
    def penalizes(self) -> bool:
        """Whether tokens already present matter."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0

    @property
    def filters(self) -> bool:
        """Whether some tokens are ruled out by their probability."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float, np.integer, np.floating))


def _token_ids(name: str, values: Any) -> tuple[int, ...]:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
            raise ValueError(f"{name} holds {value!r}; token ids are integers of at least 0.")
    return tuple(int(value) for value in values)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampler:
    """The sampling parameters of a batch, as arrays. Parts that no row asks for are None and cost nothing.

    Attributes:
        keys: [B, 2] raw random keys, one a row.
        temperature: [B]; 0 for greedy rows; None when all are.
        top_k, top_p, min_p: [B] filters, or None when no row has any.
        bias: [B, V] added to the logits, -inf for tokens that aren't allowed; or None.
        repetition, presence: [B] penalties, or None.
        in_prompt, in_answer: [B, V] tokens that are present, or None.
    """

    keys: UInt32[Array, "B 2"]
    temperature: Float[Array, " B"] | None
    top_k: Int[Array, " B"] | None
    top_p: Float[Array, " B"] | None
    min_p: Float[Array, " B"] | None
    bias: Float[Array, "B V"] | None
    repetition: Float[Array, " B"] | None
    presence: Float[Array, " B"] | None
    in_prompt: Bool[Array, "B V"] | None
    in_answer: Bool[Array, "B V"] | None

    @staticmethod
    def of(requests: Sequence[SamplingParams], prompts: Sequence[np.ndarray], vocab_size: int) -> "Sampler":
        """Gathers the parameters of a batch.

        Raises:
            ValueError: a token id in `logit_bias` or `allowed_token_ids` isn't in the vocabulary.
        """
        batch = len(requests)

        def column(name: str, dtype: Any = np.float32) -> Array:
            return jnp.asarray(np.array([getattr(request, name) for request in requests], dtype))

        seeds = [secrets.randbits(63) if request.seed is None else request.seed for request in requests]
        keys = np.array([[seed >> 32, seed & 0xFFFFFFFF] for seed in seeds], np.uint32)
        samples = any(request.temperature > 0 for request in requests)
        filters = samples and any(request.filters for request in requests)
        penalizes = any(request.penalizes for request in requests)
        bias = None
        if any(request.logit_bias or request.allowed_token_ids is not None for request in requests):
            bias = np.stack([_bias(request, vocab_size) for request in requests])
        in_prompt = np.zeros((batch, vocab_size), bool)
        for row, prompt in zip(in_prompt, prompts, strict=True):
            row[prompt] = True
        top_k = [request.top_k or vocab_size for request in requests]
        return Sampler(
            keys=jnp.asarray(keys),
            temperature=column("temperature") if samples else None,
            top_k=jnp.asarray(np.minimum(top_k, vocab_size), jnp.int32) if filters else None,
            top_p=column("top_p") if filters else None,
            min_p=column("min_p") if filters else None,
            bias=None if bias is None else jnp.asarray(bias),
            repetition=column("repetition_penalty") if penalizes else None,
            presence=column("presence_penalty") if penalizes else None,
            in_prompt=jnp.asarray(in_prompt) if penalizes else None,
            in_answer=jnp.zeros((batch, vocab_size), bool) if penalizes else None,
        )

    def choose(self, logits: Float[Array, "B V"], step: Int[Array, " B"]) -> Int[Array, " B"]:
        """The next token of each row. All of a row's randomness is its key and `step`, its own count of new tokens."""
        scores = self.adjusted(logits)
        best = jnp.argmax(scores, axis=-1).astype(jnp.int32)
        if self.temperature is None:
            return best
        greedy = self.temperature == 0
        scores = scores / jnp.where(greedy, 1, self.temperature)[:, None]
        if self.top_k is not None and self.top_p is not None and self.min_p is not None:
            scores = filtered(scores, self.top_k, self.top_p, self.min_p)
        noise = jax.vmap(self._noise, in_axes=(0, 0, None))(self.keys, step, scores.shape[-1])
        drawn = jnp.argmax(scores + noise.astype(scores.dtype), axis=-1).astype(jnp.int32)
        return jnp.where(greedy, best, drawn)

    def adjusted(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Logits with bias and penalties, before temperature."""
        scores = logits if self.bias is None else logits + self.bias
        if self.repetition is None or self.presence is None or self.in_prompt is None or self.in_answer is None:
            return scores
        penalty = self.repetition[:, None]
        repeated = jnp.where(scores > 0, scores / penalty, scores * penalty)
        scores = jnp.where(self.in_prompt | self.in_answer, repeated, scores)
        return scores - self.presence[:, None] * self.in_answer

    def record(self, tokens: Int[Array, " B"], active: Bool[Array, " B"]) -> "Sampler":
        """The sampler after the active rows emitted `tokens`."""
        if self.in_answer is None:
            return self
        rows = jnp.arange(tokens.shape[0])
        return replace(self, in_answer=self.in_answer.at[rows, tokens].max(active))

    @staticmethod
    def _noise(key: UInt32[Array, "2"], step: Int[Array, ""], size: int) -> Float[Array, " V"]:
        return jax.random.gumbel(jax.random.fold_in(jax.random.wrap_key_data(key), step), (size,), jnp.float32)


def _bias(request: SamplingParams, vocab_size: int) -> np.ndarray:
    for name in ("logit_bias", "allowed_token_ids"):
        outside = [token for token in getattr(request, name) or () if token >= vocab_size]
        if outside:
            raise ValueError(f"{name} holds {outside[0]}; legal ids are 0 to vocab_size-1={vocab_size - 1}.")
    bias = np.zeros(vocab_size, np.float32)
    if request.allowed_token_ids is not None:
        bias[:] = -np.inf
        bias[list(request.allowed_token_ids)] = 0
    for token, value in request.logit_bias.items():
        bias[token] += value
    return bias


def filtered(
    scores: Float[Array, "B V"], top_k: Int[Array, " B"], top_p: Float[Array, " B"], min_p: Float[Array, " B"]
) -> Float[Array, "B V"]:
    """Scores with -inf for tokens that top_k, then top_p, then min_p rule out.

    Among equal scores the lower token id stays first. The most probable token always stays.
    """
    order = jnp.argsort(-scores, axis=-1, stable=True)
    ranked = jnp.take_along_axis(scores, order, axis=-1)
    rank = jnp.arange(scores.shape[-1])
    ranked = jnp.where(rank < top_k[:, None], ranked, -jnp.inf)
    probability = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    keep = (before < top_p[:, None]) | (top_p[:, None] >= 1)
    keep &= probability >= min_p[:, None] * probability[:, :1]
    ranked = jnp.where(keep | (rank == 0), ranked, -jnp.inf)
    return jnp.take_along_axis(ranked, jnp.argsort(order, axis=-1), axis=-1)
