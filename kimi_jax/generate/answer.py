"""One request's answer, put together on the host from what the device emits."""

import numpy as np

from kimi_jax.generate.language import Language
from kimi_jax.generate.loop import Emitted
from kimi_jax.generate.prompts import Request
from kimi_jax.generate.results import FinishReason, Generation, Timings
from kimi_jax.text.detokenizer import Piece, StreamingDetokenizer


class Answer:
    """An answer so far.

    Attributes:
        request: what is answered.
        token_ids: new tokens.
        finish_reason: None while it goes on.
        halted: a stop string ended it, which the device doesn't know.
    """

    def __init__(self, request: Request, language: Language):
        self.request = request
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.halted = False
        self._stopped_by: int | str | None = None
        self._detokenizer: StreamingDetokenizer | None = None
        if language.tokenizer is not None:
            self._detokenizer = StreamingDetokenizer(
                language.tokenizer, stop=request.sampling.stop, structure=request.structure
            )
        self._logprobs: list[float] = []
        self._top: list[dict[int, float]] = []
        self._text: list[str] = []

    def take(self, row: int, emitted: Emitted) -> tuple[list[int], list[Piece]]:
        """Takes what a call emitted for this answer's row.

        Returns:
            (new tokens, the text and control tokens that are now certain).
        """
        found = np.asarray(emitted.tokens[row])
        tokens: list[int] = found[found >= 0].tolist()
        pieces: list[Piece] = []
        if self._detokenizer is not None:
            before = self._detokenizer.num_tokens
            pieces = self._detokenizer.push_pieces(tokens)
            # What the device ran behind a stop string isn't part of the answer.
            tokens = tokens[: self._detokenizer.num_tokens - before]
        self.token_ids += tokens
        self._note_logprobs(row, len(tokens), emitted)
        if self._detokenizer is not None and self._detokenizer.stopped_by is not None:
            self.halted = True
            self._finish("stop", self._detokenizer.stopped_by)
        elif tokens and tokens[-1] in self.request.stop_ids:
            pieces += self._finish("stop", tokens[-1])
        elif len(self.token_ids) >= self.request.max_new_tokens:
            pieces += self._finish("length", None)
        self._text += [piece.text for piece in pieces]
        return tokens, pieces

    def interrupt(self) -> list[Piece]:
        """Ends an answer that still goes on, and returns what was held back."""
        pieces = [] if self.finish_reason else self._finish("interrupted", None)
        self._text += [piece.text for piece in pieces]
        return pieces

    def generation(self, timings: Timings | None) -> Generation:
        """The whole answer, once it has ended."""
        assert self.finish_reason is not None
        sampling = self.request.sampling
        return Generation(
            token_ids=self.token_ids,
            text=None if self._detokenizer is None else "".join(self._text),
            finish_reason=self.finish_reason,
            prompt_tokens=len(self.request.token_ids),
            logprobs=self._logprobs if sampling.logprobs else None,
            top_logprobs=self._top if sampling.top_logprobs else None,
            stopped_by=self._stopped_by,
            timings=timings,
        )

    def _finish(self, reason: FinishReason, by: int | str | None) -> list[Piece]:
        self.finish_reason, self._stopped_by = reason, by
        if self._detokenizer is None:
            return []
        pieces = self._detokenizer.finish_pieces()
        # An unfinished character at the end becomes U+FFFD, which may complete a stop string.
        if self._detokenizer.stopped_by is not None:
            self.finish_reason, self._stopped_by = "stop", self._detokenizer.stopped_by
        return pieces

    def _note_logprobs(self, row: int, count: int, emitted: Emitted) -> None:
        sampling, found = self.request.sampling, emitted.logprobs
        if found is None:
            return
        if sampling.logprobs:
            self._logprobs += np.asarray(found.own[row, :count]).tolist()
        for step in range(count if sampling.top_logprobs else 0):
            tokens = np.asarray(found.top_tokens[row, step, : sampling.top_logprobs]).tolist()
            values = np.asarray(found.top[row, step, : sampling.top_logprobs]).tolist()
            self._top.append(dict(zip(tokens, values, strict=True)))
