"""Answers of a chat, read while they are generated."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from kimi_jax.generate.batch import Batch
from kimi_jax.generate.language import Language
from kimi_jax.generate.results import ChatReply, Generation
from kimi_jax.generate.sampling import SamplingParams
from kimi_jax.text import Delta, MessageError, MessageParser, collect
from kimi_jax.text.messages import Image, read_messages
from kimi_jax.text.shown import shown

NEW_TOKENS = 4096
"""Bound on the new tokens of an answer when the caller gives none."""


def conversations(messages: Any) -> tuple[list[Any], bool]:
    """The conversations as a list, and whether it was a single one: a list of messages."""
    if isinstance(messages, Sequence) and messages and isinstance(messages[0], list | tuple):
        return list(messages), False
    return [messages], True


@dataclass(frozen=True)
class ChatOptions:
    """What a conversation is rendered with besides its messages.

    Attributes:
        tools: declarations of tools that the assistant may call.
        thinking: whether it thinks before it answers; None: as the format does by default.
        effort: how much it thinks: low, high or max, where the format has a form for it.
        tool_choice: auto, none or required, where the format has a form for it.
        response_format: `{"type": "json_object"}` and the like, where the format has a form for it. The model is asked
            for the form, not held to it.
        images: none; the models that are built so far read text.
        vendor_compatible: see `kimi_jax.text.XtmlFormat`.
    """

    tools: Any = None
    thinking: bool | None = None
    effort: str | None = None
    tool_choice: str | None = None
    response_format: Mapping[str, Any] | None = None
    images: Any = None
    vendor_compatible: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "tuple[ChatOptions, dict[str, Any]]":
        """Takes these options out of a caller's keywords.

        Returns:
            (the options, the other keywords: sampling parameters).

        Raises:
            TypeError: a keyword is neither; the message lists both.
        """
        own, sampling = ([field.name for field in fields(kind)] for kind in (cls, SamplingParams))
        unknown = [name for name in options if name not in own and name not in sampling]
        if unknown:
            raise TypeError(
                f"{unknown[0]!r} is neither an option of a chat ({', '.join(own)}) nor a sampling parameter "
                f"({', '.join(sampling)})."
            )
        rest = {name: value for name, value in options.items() if name not in own}
        return cls(**{name: value for name, value in options.items() if name in own}), rest

    def prompt(self, language: Language, conversation: Any) -> np.ndarray:
        """Token ids of a conversation, ready for the assistant's answer.

        Raises:
            MessageError: something isn't legal; images aren't.
            ValueError: the model has no tokenizer or no chat format.
        """
        tokenizer, format = language.need_chat(vendor_compatible=self.vendor_compatible)
        self._refuse_images(conversation)
        segments = format.render(
            conversation,
            tools=self.tools,
            thinking=self.thinking,
            thinking_effort=self.effort,
            tool_choice=self.tool_choice,
            response_format=self.response_format,
        )
        return np.array(tokenizer.encode_segments(segments), np.int32)

    def parser(self, language: Language) -> MessageParser:
        """A parser for one answer."""
        tokenizer, format = language.need_chat(vendor_compatible=self.vendor_compatible)
        return format.parser(tokenizer, thinking=self.thinking)

    def structure(self, language: Language) -> Mapping[str, bool]:
        """See `ChatFormat`."""
        return language.need_chat(vendor_compatible=self.vendor_compatible)[1].structure

    def _refuse_images(self, conversation: Any) -> None:
        legal = "this version reads text only: leave the images out"
        if self.images is not None and not (isinstance(self.images, Sized) and len(self.images) == 0):
            raise MessageError(f"images is {shown(self.images)}, but {legal}.")
        for message in read_messages(conversation):
            if any(isinstance(part, Image) for part in message.content):
                raise MessageError(f"{message.where}.content has an image, but {legal}.")


class ChatStream(Iterator[Any]):
    """Deltas of one conversation's answer as they come; of several, pairs of the conversation's index and a delta.

    Generation goes on as far as somebody iterates. When the answers have ended, or after `close`, `reply` (or `replies`)
    has them whole.

    Args:
        batch: the running requests.
        parsers: one for each.
        single: one conversation was given, not a list.
    """

    def __init__(self, batch: Batch, parsers: Sequence[MessageParser], *, single: bool):
        self._batch = batch
        self._updates = batch.updates()
        self._parsers = parsers
        self.single = single
        self._deltas: list[list[Delta]] = [[] for _ in parsers]
        self._results: list[Generation | None] = [None for _ in parsers]
        self._ready: deque[tuple[int, Delta]] = deque()
        self._interrupted = False

    def __iter__(self) -> "ChatStream":
        return self

    def __next__(self) -> Any:
        while not self._ready:
            if self._interrupted:
                self.close()
                raise StopIteration
            update = next(self._updates)
            deltas = self._parsers[update.index].push_pieces(update.pieces)
            if update.result is not None:
                self._results[update.index] = update.result
                wanted = update.result.finish_reason == "stop"
                deltas += self._parsers[update.index].finish(truncated=not wanted, stopped=wanted)
            self._add(update.index, deltas)
        index, delta = self._ready.popleft()
        return delta if self.single else (index, delta)

    def interrupt(self) -> None:
        """Asks for the end, as `close` does, from a signal handler or another thread: it comes with the next tokens."""
        self._interrupted = True

    def close(self) -> None:
        """Ends the generation; answers that went on finish as `interrupted`, with what they have so far."""
        self._updates.close()
        for index, (answer, parser) in enumerate(zip(self._batch.answers, self._parsers, strict=True)):
            if self._results[index] is None:
                deltas = parser.push_pieces(answer.interrupt()) + parser.finish(truncated=True)
                self._results[index] = answer.generation(None)
                self._add(index, deltas)
        self._ready.clear()

    @property
    def replies(self) -> list[ChatReply]:
        """The answers, one for each conversation.

        Raises:
            ValueError: one hasn't ended.
        """
        results = [result for result in self._results if result is not None]
        if len(results) < len(self._results):
            raise ValueError(
                "The answer hasn't ended: iterate to the end, or close() the stream, before asking for it."
            )
        return [ChatReply(collect(deltas), result) for deltas, result in zip(self._deltas, results, strict=True)]

    @property
    def reply(self) -> ChatReply:
        """The answer to a single conversation.

        Raises:
            ValueError: it hasn't ended, or there are several.
        """
        if len(self._parsers) > 1:
            raise ValueError(f"There are {len(self._parsers)} answers: ask for replies.")
        return self.replies[0]

    def _add(self, index: int, deltas: list[Delta]) -> None:
        self._deltas[index] += deltas
        self._ready.extend((index, delta) for delta in deltas)
