"""Running a batch of requests: the calls to the device, paced by who waits for the tokens."""

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from kimi_jax.buckets import bucket, capacity
from kimi_jax.cache import Cache
from kimi_jax.cache_format import DEFAULT_FORMAT, CacheFormat
from kimi_jax.generate import loop
from kimi_jax.generate.answer import Answer
from kimi_jax.generate.language import Language
from kimi_jax.generate.prompts import Request, padded
from kimi_jax.generate.results import Generation, Timings
from kimi_jax.generate.sampler import Sampler
from kimi_jax.generate.sampling import MOST_TOP_LOGPROBS
from kimi_jax.model import Decoder
from kimi_jax.params import Params
from kimi_jax.programs import Programs
from kimi_jax.text.detokenizer import Piece

# Prompts longer than this are run piece by piece, which bounds the memory of a call.
PREFILL_TOKENS = 4096
# Room for new tokens in what a call returns, and so the most steps of a call.
STEPS = 64
# How long a call should run when somebody waits for the tokens, or a stop string may end them.
PACE_SECONDS = 0.05
# The same where several processes run one model.
SHARED_STEPS = 8
# Stop tokens are padded to a multiple of this, so that their number seldom matters to a program.
STOP_IDS = 8


class Runner:
    """The programs that generation is made of.

    Args:
        decoder: the model.
        dtype: of its activations, and of what caches keep without a format of its own.
        programs: where they are compiled.
        format: of latents and index keys.
    """

    def __init__(self, decoder: Decoder, dtype: DTypeLike, programs: Programs, format: CacheFormat = DEFAULT_FORMAT):
        format.check(decoder.config)
        self.config = decoder.config
        self.allocate = partial(decoder.allocate, dtype=dtype, kv_cache=format.kv_cache, index_cache=format.index_cache)
        self.dtype = dtype
        self.programs = programs

        def advance(params: Params, cache: Cache, progress: loop.Progress, *rest: Array, **static: Any) -> Any:
            cache, progress, emitted = loop.advance(decoder, params, cache, progress, *rest, **static)
            return cache, *decoder.everywhere((progress, emitted))

        def begin(*args: Any, **static: Any) -> Any:
            return decoder.everywhere(loop.begin(*args, **static))

        self.prefill = programs.add(decoder.prefill, "prefill", donate_argnames="cache")
        self.begin = programs.add(begin, "begin", static_argnames="top_logprobs")
        self.advance = programs.add(
            advance, "advance", static_argnames=("size", "top_logprobs"), donate_argnames=("cache", "progress")
        )


@dataclass(frozen=True)
class Update:
    """What one call to the device added to one answer.

    Attributes:
        index: of the answer.
        token_ids: new tokens.
        pieces: text and control tokens that are now certain.
        result: the whole answer, when it has ended.
    """

    index: int
    token_ids: list[int]
    pieces: list[Piece]
    result: Generation | None


class Batch:
    """Requests that run together, as long as somebody asks for updates.

    Args:
        runner: the model's programs.
        params: the model's parameters.
        language: the model's way with text.
        requests: what is to be answered.
        streaming: somebody waits for every token; otherwise only for the ends.

    Attributes:
        answers: one for each request.

    Raises:
        ValueError: a sampling parameter names a token out of the vocabulary.
    """

    def __init__(
        self, runner: Runner, params: Params, language: Language, requests: Sequence[Request], *, streaming: bool
    ):
        self.answers = [Answer(request, language) for request in requests]
        self._runner = runner
        self._params = params
        self._requests = requests
        # The device doesn't see stop strings, and would run on behind them.
        self._paced = streaming or any(request.sampling.stop for request in requests)
        sampling = [request.sampling for request in requests]
        self._sampler = Sampler.of(sampling, [request.token_ids for request in requests], runner.config.vocab_size)
        # One program for all who want any: those of a single token are the first step to those of the best.
        wanted = any(one.logprobs or one.top_logprobs for one in sampling)
        self._top_logprobs = min(MOST_TOP_LOGPROBS, runner.config.vocab_size) if wanted else None

    def updates(self) -> Generator[Update, None, None]:
        """Runs, and yields what each call adds to each answer."""
        clock, pace = _Clock(self._runner.programs), _Pace(self._paced)
        logits, cache = self._prefilled(self._longest)
        size = f"{self._size}, {cache.capacity} places"
        progress, first = self._runner.begin(
            logits,
            np.array([request.max_new_tokens for request in self._requests], np.int32),
            self._stop_ids(),
            self._sampler,
            what=f"the choice of first tokens for {self._size}",
            top_logprobs=self._top_logprobs,
        )
        call: dict[str, Any] = {"what": f"decoding for {size}", "size": STEPS, "top_logprobs": self._top_logprobs}
        if self._longest > 1:
            # Compiled before the first token is handed on: nobody likes to wait in the middle of a sentence.
            self._runner.advance.prepare(self._params, cache, progress, self._halted, np.int32(0), **call)
        yield from self._read(first, clock)

        sent = 1
        under_way: tuple[loop.Emitted, int] | None = None
        while True:
            # The next call is under way before the tokens of the last one are looked at.
            ahead = None
            if sent < self._longest:
                cache, progress, emitted = self._runner.advance(
                    self._params, cache, progress, self._halted, np.int32(pace.steps), **call
                )
                ahead = emitted, pace.steps
                sent += pace.steps
            if under_way is not None:
                emitted, steps = under_way
                yield from self._read(emitted, clock)
                pace.adapt(steps, clock.seconds)
            if ahead is None or all(answer.finish_reason for answer in self.answers):
                return
            under_way = ahead

    def _read(self, emitted: loop.Emitted, clock: "_Clock") -> Iterator[Update]:
        """Waits for what a call emitted, and gives it to the answers."""
        found = jax.device_get(emitted)
        clock.tick()
        for index, answer in enumerate(self.answers):
            if answer.finish_reason is not None:
                continue
            token_ids, pieces = answer.take(index, found)
            result = None
            if answer.finish_reason is not None:
                result = answer.generation(clock.timings(len(answer.token_ids)))
            yield Update(index, token_ids, pieces, result)

    @property
    def _longest(self) -> int:
        """The most new tokens that an answer which goes on may have; 0 when none does."""
        return max((a.request.max_new_tokens for a in self.answers if a.finish_reason is None), default=0)

    @property
    def _halted(self) -> np.ndarray:
        return np.array([answer.halted for answer in self.answers])

    def _prefilled(self, max_new_tokens: int) -> tuple[Array, Cache]:
        """Logits of each prompt's last token, and the cache after it; long prompts are run in pieces."""
        config = self._runner.config
        rows = [request.token_ids for request in self._requests]
        lengths = np.array([len(row) for row in rows], np.int32)
        longest = int(lengths.max())
        places = min(capacity(longest, max_new_tokens), config.max_position_embeddings)
        cache = self._runner.allocate(len(rows), places)
        logits = None
        for first in range(0, longest, PREFILL_TOKENS):
            piece = [row[first : first + PREFILL_TOKENS] for row in rows]
            # The last piece, too, depends on the bucket and not on the length.
            tokens = padded(piece, min(PREFILL_TOKENS, min(bucket(longest), places) - first))
            what = f"prefill of {self._size} of up to {tokens.shape[1]} tokens, {places} places"
            here = np.array([len(part) for part in piece], np.int32)
            new, cache = self._runner.prefill(self._params, tokens, cache, here, what=what)
            ends_here = (lengths > first) & (lengths <= first + PREFILL_TOKENS)
            logits = new if logits is None else jnp.where(ends_here[:, None], new, logits)
        assert logits is not None
        return logits, cache

    def _stop_ids(self) -> np.ndarray:
        most = max(len(request.stop_ids) for request in self._requests)
        ids = np.full((len(self._requests), max(1, -(-most // STOP_IDS)) * STOP_IDS), -1, np.int32)
        for row, request in zip(ids, self._requests, strict=True):
            row[: len(request.stop_ids)] = request.stop_ids
        return ids

    @property
    def _size(self) -> str:
        return f"{len(self._requests)} prompt{'' if len(self._requests) == 1 else 's'}"


class _Pace:
    """How many steps a call makes: all that fit, or as many as run in `PACE_SECONDS`."""

    def __init__(self, paced: bool):
        self._paced = paced
        self.steps = 1 if paced else STEPS

    def adapt(self, steps: int, seconds: float) -> None:
        """Learns from a call that made `steps` in `seconds`; the pace at most doubles."""
        if jax.process_count() > 1:
            # Processes' clocks differ, and they must all make the same calls.
            self.steps = min(2 * self.steps, SHARED_STEPS) if self._paced else STEPS
        elif self._paced and steps:
            fitting = int(PACE_SECONDS * steps / max(seconds, 1e-9))
            self.steps = min(max(1, fitting), 2 * self.steps, STEPS)


class _Clock:
    """Times of a batch, without the time that compiling took.

    Attributes:
        seconds: between the last two calls that came back.
    """

    def __init__(self, programs: Programs):
        self._programs = programs
        self._compiled_before = programs.seconds
        self._compiled = 0.0
        self._began = self._last = time.perf_counter()
        self._first: float | None = None
        self.seconds = 0.0

    def tick(self) -> None:
        """A call has come back."""
        self._compiled = self._programs.seconds - self._compiled_before
        now = time.perf_counter() - self._compiled
        self.seconds, self._last = now - self._last, now
        if self._first is None:
            self._first = now

    def timings(self, num_tokens: int) -> Timings:
        """Of an answer of so many tokens that ended with the last call."""
        assert self._first is not None
        decode = self._last - self._first
        rate = (num_tokens - 1) / decode if num_tokens > 1 and decode > 0 else None
        return Timings(self._compiled, self._first - self._began, decode, rate)
