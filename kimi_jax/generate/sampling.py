"""What a request may ask for about the choice of its tokens."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from kimi_jax.text.shown import shown

MOST_TOP_LOGPROBS = 20
LARGEST_SEED = 2**63 - 1
LARGEST_NUMBER = 1e6

Number = int | float | np.integer | np.floating
Integer = int | np.integer


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen. The default is greedy.

    With logits z of the vocabulary, in this order:

    1. z_i += logit_bias_i, and z_i = -inf for tokens that aren't allowed.
    2. Tokens of the prompt and the answer: z_i /= repetition_penalty where z_i > 0, z_i *= repetition_penalty elsewhere.
    3. Tokens of the answer: z_i -= presence_penalty.
    4. Temperature 0: the largest z_i, the lowest id among equals. Otherwise p = softmax(z / temperature).
    5. top_k, then top_p, then min_p, each on what the one before left, renormalised. Equal tokens rank by their id. The
       most probable token always stays.
    6. A draw from what is left.

    All of it in float32 (float64 for a float64 model).

    Attributes:
        temperature: 0 takes the most probable token.
        top_k: keep this many of the most probable tokens; None keeps all.
        top_p: keep the fewest most probable tokens whose probabilities reach this sum.
        min_p: drop tokens less probable than this fraction of the most probable one.
        repetition_penalty: above 1, makes tokens that are there already less likely.
        presence_penalty: above 0, makes tokens that the answer has less likely.
        max_new_tokens: bound on the new tokens. None: 256 for a prompt, 4096 for a chat, or fewer where the model's
            max_position_embeddings leave less room.
        stop: strings that end the answer; they aren't part of its text.
        stop_token_ids: tokens that end the answer besides the model's own; None: only those; empty: none at all.
        seed: of the request's own randomness; None draws one. Draw n of a request depends on its logits, its seed and
            n, and on nothing else in the batch.
        logprobs: report the log-probability of every new token.
        top_logprobs: also report this many most probable tokens at every step.
        logit_bias: added to the logits of these tokens.
        allowed_token_ids: only these tokens may come; None: any.

    Log-probabilities are those of the model's own distribution, softmax(z) before any of the changes above.

    Raises:
        ValueError, TypeError: an illegal value; the message names the field and what is legal.
    """

    temperature: Number = 0.0
    top_k: Integer | None = None
    top_p: Number = 1.0
    min_p: Number = 0.0
    repetition_penalty: Number = 1.0
    presence_penalty: Number = 0.0
    max_new_tokens: Integer | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[Integer] | None = None
    seed: Integer | None = None
    logprobs: bool = False
    top_logprobs: Integer = 0
    logit_bias: Mapping[Integer, Number] = field(default_factory=dict)
    allowed_token_ids: Sequence[Integer] | None = None

    def __post_init__(self) -> None:
        largest = f"{LARGEST_NUMBER:,.0f}"
        self._number("temperature", 0.0, LARGEST_NUMBER, f"from 0 to {largest}")
        self._number("top_p", 0.0, 1.0, "above 0 and at most 1", open_low=True)
        self._number("min_p", 0.0, 1.0, "from 0 to 1")
        self._number("repetition_penalty", 1 / LARGEST_NUMBER, LARGEST_NUMBER, f"from 1/{largest} to {largest}")
        self._number("presence_penalty", -LARGEST_NUMBER, LARGEST_NUMBER, f"from -{largest} to {largest}")
        self._integer("top_logprobs", 0, MOST_TOP_LOGPROBS)
        for name, low, high in (("max_new_tokens", 1, math.inf), ("top_k", 1, math.inf), ("seed", 0, LARGEST_SEED)):
            if getattr(self, name) is not None:
                self._integer(name, low, high)
        if not isinstance(self.logprobs, bool):
            raise TypeError(f"logprobs={shown(self.logprobs)} must be True or False.")
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        for name in ("stop_token_ids", "allowed_token_ids"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _token_ids(name, getattr(self, name)))
        if self.allowed_token_ids == ():
            raise ValueError("allowed_token_ids is empty: no token could be chosen; None allows all.")
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))

    def _number(self, name: str, low: float, high: float, legal: str, *, open_low: bool = False) -> None:
        value = getattr(self, name)
        if not _is_number(value):
            raise TypeError(f"{name}={shown(value)} must be a number {legal}.")
        if not low <= value <= high or (open_low and value == low):
            raise ValueError(f"{name}={shown(value)} must be {legal}.")

    def _integer(self, name: str, low: int, high: int | float) -> None:
        value = getattr(self, name)
        bound = f"from {low} to {high}" if math.isfinite(high) else f"of at least {low}"
        if not _is_integer(value):
            raise TypeError(f"{name}={shown(value)} must be an integer {bound}.")
        if not low <= value <= high:
            raise ValueError(f"{name}={shown(value)} must be an integer {bound}.")

    @classmethod
    def of(cls, params: "SamplingParams | None", changes: Mapping[str, Any]) -> "SamplingParams":
        """`params`, or the default, with `changes` applied.

        Raises:
            ValueError, TypeError: an illegal value, or an unknown name; the message lists the known ones.
        """
        names = [item.name for item in fields(cls)]
        unknown = [name for name in changes if name not in names]
        if unknown:
            raise TypeError(f"{unknown[0]!r} isn't a sampling parameter; legal are {', '.join(names)}.")
        if not isinstance(params, SamplingParams | None):
            raise TypeError(f"sampling={shown(params)} must be SamplingParams, one for each prompt, or None.")
        return replace(params or cls(), **changes)

    @property
    def penalizes(self) -> bool:
        """Whether it matters which tokens are there already."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0

    @property
    def biases(self) -> bool:
        """Whether single tokens are named."""
        return bool(self.logit_bias) or self.allowed_token_ids is not None


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Number)


def _is_integer(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integer)


def _stop_strings(stop: Any) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Iterable) else (stop,)
    for text in strings:
        if not isinstance(text, str):
            raise TypeError(f"stop={shown(stop)} must be a string, or several.")
        if not text:
            raise ValueError(f"stop={shown(stop)} holds an empty string; a stop string has at least one character.")
    return strings


def _token_ids(name: str, values: Any) -> tuple[int, ...]:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise TypeError(f"{name}={shown(values)} must be a list of token ids.")
    values = tuple(values)
    for value in values:
        if not _is_integer(value):
            raise TypeError(f"{name} holds {shown(value)}; token ids are integers of at least 0.")
        if value < 0:
            raise ValueError(f"{name} holds {shown(value)}; token ids are integers of at least 0.")
    return tuple(map(int, values))


def _logit_bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise TypeError(f"logit_bias={shown(bias)} must map token ids to numbers.")
    ids = _token_ids("logit_bias", bias)
    for token, value in bias.items():
        if not _is_number(value):
            raise TypeError(f"logit_bias[{shown(token)}]={shown(value)} must be a number.")
        if not abs(value) <= LARGEST_NUMBER:
            raise ValueError(
                f"logit_bias[{shown(token)}]={shown(value)} must be from -{LARGEST_NUMBER:,.0f} to {LARGEST_NUMBER:,.0f}."
            )
    return dict(zip(ids, map(float, bias.values()), strict=True))
