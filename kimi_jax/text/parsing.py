"""What is common to reading a model's answer while it is generated: deltas, their sum, and finding the markers.

A parser never raises for what a model wrote. Output that doesn't follow the format is handed on as text where a reader
would look for it, and an `ErrorMark` says what was wrong; what has no such place is in the mark's own text.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, SupportsIndex

from kimi_jax.text.detokenizer import Piece, StreamingDetokenizer
from kimi_jax.text.messages import parse_json
from kimi_jax.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ToolCall:
    """A finished tool call.

    Attributes:
        id: names the call when its result is sent back.
        name: the tool.
        arguments_text: JSON text of the arguments, or what the model wrote in its place.
        arguments: the arguments, or None when `arguments_text` isn't a JSON object.
    """

    id: str
    name: str
    arguments_text: str
    arguments: dict[str, Any] | None


@dataclass(frozen=True)
class ReasoningDelta:
    """More reasoning."""

    text: str


@dataclass(frozen=True)
class TextDelta:
    """More of the answer."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """A tool call begins; it is not to be run before its `ToolCallEnd`.

    Attributes:
        index: tells the calls of one answer apart, from 0.
        id: see `ToolCall`.
        name: the tool.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """More of a call's `arguments_text`."""

    index: int
    text: str


@dataclass(frozen=True)
class ToolCallEnd:
    """A tool call is complete."""

    index: int
    call: ToolCall


@dataclass(frozen=True)
class ErrorMark:
    """Something in the answer doesn't follow the format.

    Attributes:
        kind: `truncated` when the answer ended before it was complete, `malformed` otherwise.
        message: what is wrong.
        text: the output concerned, as far as it isn't in the reasoning or the answer.
    """

    kind: Literal["truncated", "malformed"]
    message: str
    text: str = ""


Delta = ReasoningDelta | TextDelta | ToolCallStart | ToolCallArguments | ToolCallEnd | ErrorMark


@dataclass(frozen=True)
class ParsedMessage:
    """A whole answer.

    Attributes:
        reasoning: the reasoning, or None for none.
        text: the answer proper, or None for none.
        tool_calls: the complete calls.
        errors: what didn't follow the format.
    """

    reasoning: str | None
    text: str | None
    tool_calls: tuple[ToolCall, ...]
    errors: tuple[ErrorMark, ...]

    @property
    def answerable_calls(self) -> tuple[ToolCall, ...]:
        """The calls that a conversation can hold: not those whose arguments are JSON, but no object."""
        return tuple(
            call for call in self.tool_calls if call.arguments is not None or not _is_json(call.arguments_text)
        )

    def to_message(self) -> dict[str, Any]:
        """The assistant message to append to the conversation, with its `answerable_calls`."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text or ""}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.answerable_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_text}}
                for call in self.answerable_calls
            ]
        return message


def collect(deltas: Iterable[Delta]) -> ParsedMessage:
    """Adds up deltas."""
    reasoning: list[str] = []
    text: list[str] = []
    calls: list[ToolCall] = []
    errors: list[ErrorMark] = []
    for delta in deltas:
        match delta:
            case ReasoningDelta():
                reasoning.append(delta.text)
            case TextDelta():
                text.append(delta.text)
            case ToolCallEnd():
                calls.append(delta.call)
            case ErrorMark():
                errors.append(delta)
    return ParsedMessage("".join(reasoning) or None, "".join(text) or None, tuple(calls), tuple(errors))


class Unit(NamedTuple):
    """What a parser is fed with.

    Attributes:
        text: ordinary text, or the spelling of a marker.
        is_marker: a marker of the format.
        certain: the marker was a control token, and not text that may merely quote it.
    """

    text: str
    is_marker: bool = False
    certain: bool = False


class MessageParser(ABC):
    """Reads one answer as it comes. Feed it with `push` or with `push_ids`, then call `finish` once.

    However the answer is divided over the calls, the deltas add up to the same message. With token ids a marker is told
    from text that quotes it; with text it can't be, so an answer that quotes a whole closing tag is cut there.

    Args:
        markers: spellings of the format's markers; `<` is only ever their first character.
        end_tokens: control tokens that end the answer; all are read as the first, which is a marker.
        tokenizer: needed for `push_ids`.

    Raises:
        ValueError: the tokenizer doesn't have the format's control tokens.
    """

    def __init__(self, markers: Sequence[str], end_tokens: Sequence[str], tokenizer: Tokenizer | None):
        self._markers = tuple(markers)
        self._end_tokens = tuple(end_tokens)
        self._tokenizer = tokenizer
        self._detokenizer: StreamingDetokenizer | None = None
        self._source: Literal["text", "tokens"] | None = None
        self._finished = False
        self._fragment = ""
        self._deltas: list[Delta] = []
        self._stray: list[str] = []  # text where only structure may be
        self._blanks: list[str] = []  # that mean nothing unless text follows them
        # Markers that no control token stands for are looked for in the text, even when there are token ids.
        self._spelled = tuple(m for m in markers if tokenizer is None or not tokenizer.has_control_token(m))
        self._longest = max(map(len, markers))
        self._patterns = {
            "text": re.compile("|".join(map(re.escape, self._markers))),
            "tokens": re.compile("|".join(map(re.escape, self._spelled))) if self._spelled else None,
        }

    def push(self, text: str) -> list[Delta]:
        """Takes more of the answer as text, markers spelled out.

        Raises:
            ValueError: ids were pushed before, or `finish` has been called.
        """
        self._use("text")
        self._scan(text)
        return self._take()

    def push_ids(self, ids: Iterable[SupportsIndex]) -> list[Delta]:
        """Takes more of the answer as token ids.

        Raises:
            ValueError: an id isn't in the vocabulary, text was pushed before, there is no tokenizer, or `finish` has
                been called.
        """
        if self._tokenizer is None:
            raise ValueError("push_ids needs a parser made with a tokenizer; this one was made without.")
        if self._detokenizer is None:
            self._detokenizer = StreamingDetokenizer(self._tokenizer)
        return self.push_pieces(self._detokenizer.push_pieces(ids))

    def push_pieces(self, pieces: Iterable[Piece]) -> list[Delta]:
        """Takes more of the answer as a `StreamingDetokenizer` (with its stop strings) gives it.

        Raises:
            ValueError: text was pushed before, or `finish` has been called.
        """
        self._use("tokens")
        for text, control in pieces:
            if control is None:
                self._scan(text)
                continue
            self._end_fragment()
            if control.name in self._end_tokens:
                self._feed(Unit(self._end_tokens[0], is_marker=True, certain=True))
            elif control.name in self._markers:
                self._feed(Unit(control.name, is_marker=True, certain=True))
            elif text:
                self._feed(Unit(text))
            else:
                self._deltas.append(ErrorMark("malformed", "A control token has no meaning here.", control.name))
        return self._take()

    def finish(self, *, truncated: bool = False, stopped: bool = False) -> list[Delta]:
        """Ends the answer.

        Args:
            truncated: generation stopped at a limit, and not because the model ended the answer. Formats that show
                their own end don't need it.
            stopped: generation stopped where the caller wanted it to, at a stop string or a stop token. What has been
                handed on counts as complete; only what can't be, as an unfinished tool call, gets a mark.

        Raises:
            ValueError: `finish` has been called; or both are true.
        """
        if truncated and stopped:
            raise ValueError("truncated and stopped are both True; an answer ends for one reason.")
        if self._detokenizer is not None:
            detokenizer, self._detokenizer = self._detokenizer, None
            self._deltas = self.push_pieces(detokenizer.finish_pieces())
        self._use(self._source or "text")
        self._finished = True
        fragment, self._fragment = self._fragment, ""
        self._end(fragment, truncated=truncated, stopped=stopped)
        return self._take()

    def _use(self, source: Literal["text", "tokens"]) -> None:
        if self._finished:
            raise ValueError("finish() has been called; a parser reads one answer, make another for the next.")
        if self._source not in (None, source):
            raise ValueError(f"This parser was fed with {self._source}; it can't be fed with {source} as well.")
        self._source = source

    def _scan(self, text: str) -> None:
        """Feeds text, cut at the markers spelled in it, and keeps back an end that may become one."""
        pattern = self._patterns[self._source or "text"]
        if pattern is None:
            if text:
                self._feed(Unit(text))
            return
        text = self._fragment + text
        begin = 0
        for match in pattern.finditer(text):
            if begin < match.start():
                self._feed(Unit(text[begin : match.start()]))
            self._feed(Unit(match.group(), is_marker=True))
            begin = match.end()
        last = text.rfind("<", begin)
        if last < 0 or len(text) - last >= self._longest:
            last = len(text)
        if begin < last:
            self._feed(Unit(text[begin:last]))
        # Only now it is known where the parser is, and so which markers would mean anything.
        self._fragment = text[last:]
        if self._fragment and not any(marker.startswith(self._fragment) for marker in self._awaited()):
            self._end_fragment()

    def _end_fragment(self) -> None:
        if self._fragment:
            fragment, self._fragment = self._fragment, ""
            self._feed(Unit(fragment))

    def _take(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    @abstractmethod
    def _feed(self, unit: Unit) -> None:
        """Takes the next unit and appends what follows from it to `_deltas`."""

    @abstractmethod
    def _awaited(self) -> Collection[str]:
        """The markers that are more than text at the place where the parser is, or may be."""

    def _malformed(self, message: str, text: str = "") -> None:
        self._deltas.append(ErrorMark("malformed", message, text))

    def _left_out(self, call: Sequence[str]) -> None:
        """Marks a tool call, given as the output that it was read from, that ended too early."""
        self._malformed("A tool call ended before it was complete; it is left out.", "".join(call))

    def _nameless(self, call: Sequence[str]) -> None:
        self._malformed("A tool call has no name; it is left out.", "".join(call))

    def _behind_blanks(self, text: str) -> str | None:
        """Text with the blanks before it; None as long as there are only blanks."""
        self._blanks.append(text)
        if text.isspace():
            return None
        text, self._blanks = "".join(self._blanks), []
        return text

    def _end_stray(self, place: str, legal: str) -> None:
        """Marks text that stood at a place where only structure may be."""
        stray, self._stray, self._blanks = "".join(self._stray), [], []
        if stray.strip():
            self._malformed(f"There is text in {place}, where only {legal} may be.", stray)

    @abstractmethod
    def _end(self, fragment: str, *, truncated: bool, stopped: bool) -> None:
        """The answer is over; `fragment` is the beginning of a marker at its end."""


def _is_json(text: str) -> bool:
    try:
        parse_json(text)
    except ValueError:
        return False
    return True
