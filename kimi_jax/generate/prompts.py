"""Prompts as callers give them, checked and made into token ids, with what is asked for each."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from kimi_jax.config import KimiConfig
from kimi_jax.generate.language import Language
from kimi_jax.generate.sampling import SamplingParams
from kimi_jax.text.shown import shown


@dataclass(frozen=True)
class Request:
    """One prompt, ready to run.

    Attributes:
        token_ids: [T] int32.
        sampling: how its tokens are chosen.
        max_new_tokens: bound on the new tokens; with the prompt they fit the model.
        stop_ids: tokens that end it.
        structure: of the chat format that it is answered in (see `ChatFormat`), where stop strings mean nothing.
    """

    token_ids: np.ndarray
    sampling: SamplingParams
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    structure: Mapping[str, bool] = field(default_factory=dict)


def split(prompts: Any) -> tuple[list[Any], bool]:
    """The prompts as a list, and whether it was a single one: a text, or a sequence of numbers.

    Raises:
        ValueError: there are none.
        TypeError: it is neither.
    """
    if isinstance(prompts, str):
        return [prompts], True
    if isinstance(prompts, np.ndarray | jax.Array):
        return ([prompts], True) if prompts.ndim < 2 else (list(prompts), False)
    if isinstance(prompts, Mapping | bytes) or not isinstance(prompts, Iterable):
        raise TypeError(
            f"A prompt is text or a sequence of token ids, and prompts a list of these, not {shown(prompts)}."
        )
    prompts = list(prompts)
    if not prompts:
        raise ValueError("The prompt is empty: give at least one prompt of at least one token.")
    several = isinstance(prompts[0], Iterable) and getattr(prompts[0], "ndim", 1) > 0
    return (prompts, False) if several else ([prompts], True)


def token_rows(prompts: Sequence[Any], config: KimiConfig, language: Language) -> list[np.ndarray]:
    """Token ids of prompts that may be text.

    Raises:
        ValueError, TypeError: a prompt is empty, no sequence of token ids, or too long; text without a tokenizer, or
            with a lone surrogate.
    """
    rows = []
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            try:
                prompt = language.need_tokenizer("A prompt that is text").encode(prompt)
            except ValueError as error:
                raise ValueError(f"prompt {number}: {error}") from None
            prompt = np.array(prompt, np.int32)
        rows.append(_checked(prompt, number, config))
    return rows


def _checked(row: Any, number: int, config: KimiConfig) -> np.ndarray:
    try:
        array = np.asarray(row)
    except ValueError:
        raise ValueError(f"prompt {number} is ragged; a prompt is text or one sequence of token ids.") from None
    if array.ndim != 1:
        raise ValueError(f"prompt {number} has {array.ndim} dimensions; a prompt is text or one sequence of token ids.")
    if array.size == 0:
        raise ValueError(f"prompt {number} is empty: a prompt has at least one token.")
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"prompt {number} has dtype {array.dtype}; token ids are integers.")
    outside = array[(array < 0) | (array >= config.vocab_size)]
    if outside.size:
        raise ValueError(
            f"prompt {number} holds token id {int(outside[0])}; legal ids are 0 to vocab_size-1={config.vocab_size - 1}."
        )
    if array.size > config.max_position_embeddings:
        raise ValueError(
            f"prompt {number} has {array.size} tokens, more than max_position_embeddings="
            f"{config.max_position_embeddings}."
        )
    return array.astype(np.int32)


def requests(
    rows: Sequence[np.ndarray],
    sampling: SamplingParams | Sequence[SamplingParams] | None,
    changes: Mapping[str, Any],
    config: KimiConfig,
    language: Language,
    default_new_tokens: int,
    structure: Mapping[str, bool] | None = None,
) -> list[Request]:
    """Puts prompts and sampling parameters together.

    Args:
        rows: from `token_rows`.
        sampling: for all, or one for each.
        changes: single parameters by name, for all.
        config: of the model.
        language: of the model.
        default_new_tokens: bound on the new tokens where the parameters have none.
        structure: see `Request`.

    Raises:
        ValueError, TypeError: as `SamplingParams`; a token id out of the vocabulary; more tokens than the model takes;
            stop strings without a tokenizer.
    """
    given: list[SamplingParams | None]
    if sampling is None or isinstance(sampling, SamplingParams):
        given = [sampling] * len(rows)
    elif isinstance(sampling, Sequence) and not isinstance(sampling, str | bytes):
        given = list(sampling)
    else:
        raise TypeError(f"sampling={shown(sampling)} must be SamplingParams, a list of one for each prompt, or None.")
    if len(given) != len(rows):
        raise ValueError(f"sampling has {len(given)} entries for {len(rows)} prompts: give one, or one for each.")
    return [
        _request(row, SamplingParams.of(one, changes), config, language, default_new_tokens, structure or {})
        for row, one in zip(rows, given, strict=True)
    ]


def padded(rows: Sequence[np.ndarray], size: int) -> np.ndarray:
    """Rows as one array, padded at the end to `size` tokens."""
    tokens = np.zeros((len(rows), size), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return tokens


def _request(
    row: np.ndarray,
    sampling: SamplingParams,
    config: KimiConfig,
    language: Language,
    default_new_tokens: int,
    structure: Mapping[str, bool],
) -> Request:
    limit, wanted = config.max_position_embeddings, sampling.max_new_tokens
    room = limit - len(row)
    if room < (wanted or 1):
        raise ValueError(
            f"a prompt of {len(row)} tokens and max_new_tokens={shown(wanted or 1)} exceed max_position_embeddings={limit}; "
            f"at most {room} new tokens fit."
        )
    for token in sampling.stop_token_ids or ():
        if token >= config.vocab_size:
            raise ValueError(
                f"stop_token_ids holds {shown(token)}; legal ids are 0 to vocab_size-1={config.vocab_size - 1}."
            )
    if sampling.stop:
        language.need_tokenizer(f"stop={list(sampling.stop)}")
    own = () if sampling.stop_token_ids == () else language.stop_ids
    stop_ids = sorted({*own, *(sampling.stop_token_ids or ())})
    new_tokens = int(min(wanted or default_new_tokens, room))
    return Request(row, sampling, new_tokens, tuple(int(token) for token in stop_ids), structure)
