"""The public face: load a model, ask for logits, generate."""

import functools
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kimi_jax.buckets import bucket
from kimi_jax.cache import Cache
from kimi_jax.checkpoint.load import load_params
from kimi_jax.checkpoint.reader import CheckpointReader
from kimi_jax.config import KimiConfig
from kimi_jax.generate import loop
from kimi_jax.generate.sampling import Sampler, SamplingParams
from kimi_jax.model import Decoder
from kimi_jax.params import Params
from pallas_kernels.dispatch import Implementation

DTYPES = ("bfloat16", "float32", "float64")
# Prompts longer than this are prefilled piece by piece, which bounds the memory of a call.
PREFILL_TOKENS = 4096
STEPS_PER_CALL = 64


@dataclass(frozen=True)
class Generation:
    """What one prompt led to.

    Attributes:
        token_ids: new tokens only, a stop token included.
        text: the new tokens as text, or None for a model without a tokenizer.
        finish_reason: `stop` when the model ended the answer, `length` when max_new_tokens did.
        prompt_tokens: tokens of the prompt.
        logprobs: log-probability of each new token, when they were asked for.
        top_logprobs: for each new token, the most probable tokens and their log-probabilities, when asked for.
    """

    token_ids: list[int]
    text: str | None
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None


class Kimi:
    """A model with its parameters.

    Attributes:
        config: the model's config.
        params: nested dict of arrays; layers of one kind are stacked (see `Decoder`).
        decoder: the pure functions that take `params`.
    """

    def __init__(self, decoder: Decoder, params: Params, dtype: DTypeLike):
        self.decoder = decoder
        self.config = decoder.config
        self.params = params
        self.dtype = jnp.dtype(dtype)
        self._logits = jax.jit(decoder.logits)
        self._prefill = jax.jit(decoder.prefill, donate_argnames="cache")
        self._begin = jax.jit(loop.begin, static_argnames="top_logprobs", donate_argnames="cache")
        self._advance = jax.jit(
            functools.partial(loop.advance, decoder),
            static_argnames=("num_steps", "top_logprobs"),
            donate_argnames="progress",
        )

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        dtype: DTypeLike | None = None,
        *,
        implementation: Implementation | None = None,
        progress: bool = True,
    ) -> "Kimi":
        """Loads a Hugging Face directory: config.json and safetensors files.

        Args:
            directory: path.
            dtype: of weights and activations: bfloat16, float32 or float64 (with jax_enable_x64). None: the config's.
                Parameters that must be float32 stay so, and packed MXFP4 experts stay packed.
            implementation: of every operation; None lets each pick the best that runs here.
            progress: say on standard error what is loaded, for which devices, and how long it took.

        Raises:
            FileNotFoundError: no such directory or no config.json in it.
            ConfigError: the config isn't one of the family, or contradicts itself; all faults are listed.
            CheckpointError: the tensors don't fit the config (all are listed), are damaged, or hold NaN.
            ValueError: an illegal `dtype`.
        """
        directory = Path(directory)
        config = KimiConfig.from_directory(directory)
        dtype = _legal_dtype(config.dtype if dtype is None else dtype)
        decoder = Decoder(config, implementation)
        began = time.monotonic()
        params = load_params(CheckpointReader(directory), decoder, dtype)
        if progress:
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
            devices = jax.devices()
            print(
                f"kimi_jax: {config.model_type}, {config.num_hidden_layers} layers, {dtype.name}, "
                f"{size / 2**20:,.0f} MiB on {len(devices)} {devices[0].platform} device(s), "
                f"operations: {implementation or 'xla'}, loaded in {time.monotonic() - began:.1f} s",
                file=sys.stderr,
            )
        return cls(decoder, params, dtype)

    def logits(self, token_ids: Any) -> Float[Array, "B T V"]:
        """Next-token logits at every position.

        Args:
            token_ids: [B, T] or [T] token ids.

        Returns:
            float32 [B, T, vocabulary] (float64 for a float64 model); B is 1 for a single sequence.

        Raises:
            ValueError, TypeError: empty, ragged, not integers, out of vocabulary, or too long.
        """
        rows = self._checked_rows(token_ids)
        lengths = {len(row) for row in rows}
        if len(lengths) > 1:
            raise ValueError(
                f"token_ids has rows of {sorted(lengths)} tokens, and logits takes rows of one length: call it row by row."
            )
        tokens, count = _padded(rows, self.config.max_position_embeddings), len(rows[0])
        return self._logits(self.params, tokens, jnp.full(len(rows), count, jnp.int32))[:, :count]

    def generate(
        self,
        prompts: Any,
        max_new_tokens: Any = None,
        *,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **changes: Any,
    ) -> Any:
        """Continues prompts, greedily unless sampling is asked for.

        Args:
            prompts: one prompt as token ids, or a list of prompts of any lengths.
            max_new_tokens: bound on the new tokens of each; None: that of `sampling`.
            sampling: how tokens are chosen, for all prompts or one for each.
            **changes: single sampling parameters by name (`temperature=0.7, seed=1`), for all prompts.

        Returns:
            One `Generation` for one prompt, a list of them for a list.

        Raises:
            ValueError, TypeError: an empty prompt, a token out of vocabulary, an illegal or unknown sampling parameter,
                or more tokens than max_position_embeddings.
        """
        single = _is_one_prompt(prompts)
        rows = self._checked_rows(prompts)
        if max_new_tokens is not None:
            changes["max_new_tokens"] = max_new_tokens
        requests = self._requests(sampling, changes, rows)

        emitted = list(self._emitted(rows, requests))
        results = [
            self._result(i, row, request, emitted) for i, (row, request) in enumerate(zip(rows, requests, strict=True))
        ]
        return results[0] if single else results

    def _result(self, i: int, row: np.ndarray, request: SamplingParams, emitted: list[loop.Emitted]) -> Generation:
        """Row i of a batch's pieces."""

        def column(name: str) -> np.ndarray:
            return np.concatenate([getattr(piece, name)[i] for piece in emitted])

        tokens = column("tokens")
        valid = tokens >= 0
        token_ids = tokens[valid].tolist()
        logprobs = column("logprobs")[valid].tolist() if request.logprobs else None
        top = None
        if request.top_logprobs:
            pairs = zip(column("top_tokens")[valid].tolist(), column("top_logprobs")[valid].tolist(), strict=True)
            top = [dict(list(zip(*pair, strict=True))[: request.top_logprobs]) for pair in pairs]
        stopped = token_ids[-1] in self._stop_ids(request)
        return Generation(token_ids, None, "stop" if stopped else "length", len(row), logprobs, top)

    def _emitted(self, rows: list[np.ndarray], requests: list[SamplingParams]) -> Iterator[loop.Emitted]:
        """New tokens of a batch, some steps at a time, as NumPy arrays."""
        limits = np.array([request.max_new_tokens for request in requests], np.int32)
        stops = [self._stop_ids(request) for request in requests]
        stop_ids = np.full((len(rows), max(1, *map(len, stops))), -1, np.int32)
        for row, stop in zip(stop_ids, stops, strict=True):
            row[: len(stop)] = stop
        wants = any(request.logprobs or request.top_logprobs for request in requests)
        top_logprobs = max(request.top_logprobs for request in requests) if wants else None

        sampler = Sampler.of(requests, rows, self.config.vocab_size)
        logits, cache = self._prefilled(rows, int(limits.max()))
        state, emitted = self._begin(logits, cache, limits, sampler, stop_ids, top_logprobs=top_logprobs)
        yield jax.device_get(emitted)
        steps = min(STEPS_PER_CALL, bucket(int(limits.max())))
        while bool(state.active.any()):
            state, emitted = self._advance(self.params, state, stop_ids, num_steps=steps, top_logprobs=top_logprobs)
            yield jax.device_get(emitted)

    def _prefilled(self, rows: list[np.ndarray], max_new_tokens: int) -> tuple[Array, Cache]:
        """Logits of each prompt's last token and the cache after it; long prompts are run in pieces."""
        longest = max(len(row) for row in rows)
        capacity = min(bucket(longest + max_new_tokens), self.config.max_position_embeddings)
        cache = Cache.allocate(self.config, len(rows), capacity, self.dtype)
        lengths = np.array([len(row) for row in rows], np.int32)
        logits = None
        for first in range(0, longest, PREFILL_TOKENS):
            piece = [row[first : first + PREFILL_TOKENS] for row in rows]
            here = np.array([len(part) for part in piece], np.int32)
            new, cache = self._prefill(self.params, _padded(piece, capacity), cache, here)
            ends_here = (lengths > first) & (lengths <= first + PREFILL_TOKENS)
            logits = new if logits is None else jnp.where(ends_here[:, None], new, logits)
        assert logits is not None
        return logits, cache

    def _requests(
        self,
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        changes: Mapping[str, Any],
        rows: list[np.ndarray],
    ) -> list[SamplingParams]:
        given = [sampling] * len(rows) if sampling is None or isinstance(sampling, SamplingParams) else list(sampling)
        if len(given) != len(rows):
            raise ValueError(f"sampling has {len(given)} entries for {len(rows)} prompts: give one, or one a prompt.")
        requests = [SamplingParams.of(one, changes) for one in given]
        limit = self.config.max_position_embeddings
        for row, request in zip(rows, requests, strict=True):
            if len(row) + request.max_new_tokens > limit:
                raise ValueError(
                    f"a prompt of {len(row)} tokens and max_new_tokens={request.max_new_tokens} exceed "
                    f"max_position_embeddings={limit}; at most {limit - len(row)} new tokens fit."
                )
            for token in request.stop_token_ids or ():
                if token >= self.config.vocab_size:
                    raise ValueError(
                        f"stop_token_ids holds {token}; legal ids are 0 to vocab_size-1={self.config.vocab_size - 1}."
                    )
        return requests

    def _stop_ids(self, request: SamplingParams) -> list[int]:
        if request.stop_token_ids == ():
            return []
        return sorted({self.config.eos_token_id, *(request.stop_token_ids or ())})

    def _checked_rows(self, token_ids: Any) -> list[np.ndarray]:
        rows = [token_ids] if _is_one_prompt(token_ids) else list(token_ids)
        if not rows:
            raise ValueError("token_ids is empty: give at least one prompt of at least one token.")
        return [self._checked_row(row, i) for i, row in enumerate(rows)]

    def _checked_row(self, row: Any, number: int) -> np.ndarray:
        array = np.asarray(row)
        if array.ndim != 1:
            raise ValueError(f"prompt {number} has {array.ndim} dimensions; a prompt is one sequence of token ids.")
        if array.size == 0:
            raise ValueError(f"prompt {number} is empty: a prompt has at least one token.")
        if not np.issubdtype(array.dtype, np.integer):
            raise TypeError(f"prompt {number} has dtype {array.dtype}; token ids are integers.")
        outside = array[(array < 0) | (array >= self.config.vocab_size)]
        if outside.size:
            raise ValueError(
                f"prompt {number} holds token id {int(outside[0])}; legal ids are 0 to vocab_size-1="
                f"{self.config.vocab_size - 1}."
            )
        if array.size > self.config.max_position_embeddings:
            raise ValueError(
                f"prompt {number} has {array.size} tokens, more than max_position_embeddings="
                f"{self.config.max_position_embeddings}."
            )
        return array.astype(np.int32)


def _is_one_prompt(prompts: Any) -> bool:
    if isinstance(prompts, (np.ndarray, jax.Array)):
        return prompts.ndim < 2
    if isinstance(prompts, Iterable):
        first = next(iter(prompts), None)
        return first is not None and np.ndim(first) == 0
    return True


def _legal_dtype(dtype: DTypeLike) -> np.dtype:
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in DTYPES:
        raise ValueError(f"dtype={dtype!r} isn't supported; legal are {', '.join(DTYPES)}.")
    if name == "float64" and not jax.config.read("jax_enable_x64"):
        raise ValueError("dtype='float64' needs jax_enable_x64: call jax.config.update('jax_enable_x64', True) first.")
    return jnp.dtype(name)


def _padded(rows: list[np.ndarray], limit: int) -> Array:
    """Rows as one array, padded at the end to a bucket's length, but not past `limit`."""
    tokens = np.zeros((len(rows), min(bucket(max(len(row) for row in rows)), limit)), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return jnp.asarray(tokens)
