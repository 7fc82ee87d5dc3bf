"""The chat format of Kimi K2 and Kimi-Linear.

    <|im_user|>user<|im_middle|>CONTENT<|im_end|><|im_assistant|>assistant<|im_middle|>

Tool calls stand in one section at the end of the assistant's content, each with its id and JSON arguments:

    <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
    <|tool_calls_section_end|>

(without the line break). Source: the public versions of the Kimi K2 chat template, which differ in details; see
`K2Style`. The template of Kimi-Linear-48B isn't among them; it is taken to agree with Kimi-K2-Instruct-0905's.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from kimi_jax.text.format import ChatFormat, RenderOptions
from kimi_jax.text.messages import HistoryCall, Image, Message, MessageError, parse_json
from kimi_jax.text.parsing import (
    ErrorMark,
    MessageParser,
    ReasoningDelta,
    TextDelta,
    ToolCall,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    Unit,
)
from kimi_jax.text.shown import shown
from kimi_jax.text.tokenizer import ControlToken, Segment, Tokenizer

END, MIDDLE = "<|im_end|>", "<|im_middle|>"
SYSTEM, USER, ASSISTANT = "<|im_system|>", "<|im_user|>", "<|im_assistant|>"
SECTION_BEGIN, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_BEGIN, ARGUMENTS_BEGIN, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
THINK_BEGIN, THINK_END = "<think>", "</think>"

_CALL_MARKERS = (SECTION_BEGIN, SECTION_END, CALL_BEGIN, ARGUMENTS_BEGIN, CALL_END)
# Offsets behind the ranks.
_CONTROL_TOKENS = {
    "[BOS]": 0,
    "[EOS]": 1,
    END: 2,
    USER: 3,
    ASSISTANT: 4,
    "[start_header_id]": 6,
    "[end_header_id]": 7,
    "[EOT]": 9,
    SYSTEM: 10,
    SECTION_BEGIN: 11,
    SECTION_END: 12,
    CALL_BEGIN: 13,
    ARGUMENTS_BEGIN: 14,
    CALL_END: 15,
    MIDDLE: 17,
    "[UNK]": 254,
    "[PAD]": 255,
}
_TURNS = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": SYSTEM}
_INDEX = re.compile(r":[0-9]+$")


def control_tokens(num_ranks: int) -> list[ControlToken]:
    """The named control tokens of Kimi-Linear and Kimi K2 behind a vocabulary of `num_ranks` ranks."""
    return [
        ControlToken(name, num_ranks + offset, name not in _CALL_MARKERS) for name, offset in _CONTROL_TOKENS.items()
    ]


@dataclass(frozen=True)
class K2Style:
    """What differs between versions of the template.

    Attributes:
        name: the version.
        default_system: content of the system message that is added when a conversation begins without one.
        tools_heading: what stands before the list of tools.
        result_indent: what stands before the content of a tool result.
        names: a message's name takes the place of its role word.
        calls: the version has a form for tool calls and results.
        thinking: answers begin with their reasoning in `<think>` tags. Of the history only what follows the last
            assistant message without tool calls keeps its reasoning.
    """

    name: str
    default_system: str = "You are Kimi, an AI assistant created by Moonshot AI."
    tools_heading: str = ""
    result_indent: str = ""
    names: bool = True
    calls: bool = True
    thinking: bool = False


BASE = K2Style("base", default_system="You are a helpful assistant", names=False, calls=False)
INSTRUCT_0905 = K2Style("instruct_0905", tools_heading="\n  # Tools\n  ", result_indent="    ")
THINKING = K2Style("thinking", thinking=True)


@dataclass(frozen=True)
class K2Format(ChatFormat):
    """Renders conversations for Kimi K2 and Kimi-Linear, and reads their answers.

    Attributes:
        style: the version of the template.
    """

    style: K2Style = INSTRUCT_0905

    name: ClassVar[str] = "K2"
    end_tokens: ClassVar[tuple[str, ...]] = (END, "[EOS]")

    structure: ClassVar[Mapping[str, bool]] = {
        SECTION_BEGIN: True,
        SECTION_END: False,
        CALL_BEGIN: True,
        ARGUMENTS_BEGIN: False,
        CALL_END: True,
        END: False,
    }

    def _control_names(self) -> Iterable[str]:
        return (SYSTEM, USER, ASSISTANT, MIDDLE, *(_CALL_MARKERS if self.style.calls else ()))

    def _render(self, conversation: list[Message], options: RenderOptions) -> list[Segment]:
        self._check_thinking(options.thinking)
        for option, legal in (
            ("thinking_effort", None),
            ("tool_choice", "auto"),
            ("response_format", {"type": "text"}),
            ("image_prompts", []),
        ):
            value = getattr(options, option)
            if value is not None and value != legal:
                also = "" if legal is None else f" or {legal!r}"
                raise MessageError(
                    f"{option} is {shown(value)}, which the K2 format has no form for; legal is None{also}."
                )
        if not conversation:
            raise MessageError("messages is empty; a prompt needs at least one message.")

        out = _Writer()
        if options.tools:
            text = self.style.tools_heading + json.dumps(options.tools, ensure_ascii=False)
            out.turn(SYSTEM, "tool_declare", text)
        if conversation[0].role != "system":
            out.turn(SYSTEM, "system", self.style.default_system)
        # Reasoning about answers that are given is left out.
        answered = max(
            (i for i, m in enumerate(conversation) if m.role == "assistant" and not m.tool_calls), default=-1
        )
        for index, message in enumerate(conversation):
            self._write(out, message, keep_reasoning=index > answered)
        if options.add_generation_prompt:
            out.begin(ASSISTANT, "assistant")
        return out.segments

    def parser(self, tokenizer: Tokenizer | None = None, *, thinking: bool | None = None) -> "K2Parser":
        """A parser for one answer; see `ChatFormat.parser`."""
        self._check_thinking(thinking)
        if tokenizer is not None:
            self.check_tokenizer(tokenizer)
        return K2Parser(tokenizer, thinking=self.style.thinking, end_tokens=self.end_tokens)

    def _check_thinking(self, thinking: bool | None) -> None:
        if thinking is not None and thinking != self.style.thinking:
            raise MessageError(
                f"thinking is {thinking}, but style {self.style.name!r} {'always' if self.style.thinking else 'never'} "
                f"thinks; legal is None or {self.style.thinking}."
            )

    def _write(self, out: "_Writer", message: Message, *, keep_reasoning: bool) -> None:
        if message.tools:
            raise MessageError(f"{message.where}.tools: the K2 format declares tools once; pass them as tools=.")
        if (message.tool_calls or message.role == "tool") and not self.style.calls:
            raise MessageError(
                f"{message.where} has tool calls or a tool result, for which style {self.style.name!r} has no form; "
                f"legal styles: {INSTRUCT_0905.name!r}, {THINKING.name!r}."
            )
        word = message.name if message.name and self.style.names else message.role
        out.begin(_TURNS[message.role], word)
        if message.role == "tool":
            if not message.tool_call_id:
                raise MessageError(
                    f"{message.where}.tool_call_id is {message.tool_call_id!r}; in the K2 format a tool result needs "
                    "the id of its call, such as 'functions.NAME:0'."
                )
            out.text(f"## Return of {message.tool_call_id}\n{self.style.result_indent}")
        out.assistant = message.role == "assistant"
        if out.assistant and self.style.thinking:
            out.control(THINK_BEGIN)
            out.text(message.reasoning if keep_reasoning else "")
            out.control(THINK_END)
        for part in message.content:
            if isinstance(part, Image):
                raise MessageError(f"{message.where}.content has an image; models of the K2 format take text only.")
            out.text(part)
        if message.tool_calls:
            out.control(SECTION_BEGIN)
            for index, call in enumerate(message.tool_calls):
                if not call.id:
                    raise MessageError(
                        f"{message.where}.tool_calls[{index}].id is {call.id!r}; in the K2 format a call needs an id "
                        f"such as 'functions.{call.name}:{index}'."
                    )
                out.control(CALL_BEGIN)
                out.text(call.id)
                out.control(ARGUMENTS_BEGIN)
                out.text(_arguments(call))
                out.control(CALL_END)
            out.control(SECTION_END)
        out.end()


def _arguments(call: HistoryCall) -> str:
    return json.dumps(call.arguments, ensure_ascii=False) if call.text is None else call.text


class _Writer:
    """Segments of a prompt. Text between two control tokens is one segment, as if the whole were encoded at once."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.assistant = False

    def control(self, text: str) -> None:
        self.segments.append(Segment(text, True, self.assistant))

    def text(self, text: str) -> None:
        if not text:
            return
        if self.segments and not self.segments[-1].structural:
            text = self.segments.pop().text + text
        self.segments.append(Segment(text, False, self.assistant))

    def begin(self, marker: str, word: str) -> None:
        self.control(marker)
        self.text(word)
        self.control(MIDDLE)

    def end(self) -> None:
        self.control(END)
        self.assistant = False

    def turn(self, marker: str, word: str, content: str) -> None:
        self.begin(marker, word)
        self.text(content)
        self.end()


class _Place(Enum):
    """Where in an answer the parser is; the value is how messages call it."""

    START = "the answer"
    THINK = "the reasoning"
    CONTENT = "the content"
    SECTION = "the tool calls section"
    ID = "the id of a tool call"
    ARGUMENTS = "the arguments of a tool call"
    DONE = "the output behind the answer"


# Markers that are structure at a place, besides the end of the answer. Any other is text.
_STRUCTURE: dict[_Place, tuple[str, ...]] = {
    _Place.START: (THINK_BEGIN, SECTION_BEGIN),
    _Place.THINK: (THINK_END, SECTION_BEGIN),
    _Place.CONTENT: (SECTION_BEGIN,),
    _Place.SECTION: (CALL_BEGIN, SECTION_END),
    _Place.ID: (ARGUMENTS_BEGIN, CALL_BEGIN, CALL_END, SECTION_END),
    _Place.ARGUMENTS: (CALL_BEGIN, CALL_END, SECTION_END),
    _Place.DONE: (),
}


@dataclass
class _Call:
    """A tool call that is being read; `name` is empty for one that is left out."""

    index: int
    raw: list[str]
    id: str = ""
    name: str = ""
    text: list[str] = field(default_factory=list)
    blanks: list[str] = field(default_factory=list)  # behind the text, perhaps at its end


class K2Parser(MessageParser):
    """Reads an answer in the K2 format; see `MessageParser`, and `K2Format.parser`, which makes one.

    Ids and arguments are as the model wrote them, without the blanks around them. The format doesn't show in text
    whether an answer is complete: tell `finish`.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, thinking: bool, end_tokens: Sequence[str]):
        think = (THINK_BEGIN, THINK_END) if thinking else ()
        super().__init__((*_CALL_MARKERS, END, *think), end_tokens, tokenizer)
        self._place = _Place.START if thinking else _Place.CONTENT
        self._call: _Call | None = None
        self._num_started = 0
        self._blanks_matter = not thinking

    def _feed(self, unit: Unit) -> None:
        if not unit.is_marker or self._place is _Place.DONE:
            self._plain(unit)
        elif unit.text == END:
            self._end_answer()
        elif unit.text not in _STRUCTURE[self._place]:
            self._plain(unit)
        elif self._place is _Place.THINK and unit.text == SECTION_BEGIN and not unit.certain:
            # Reasoning may quote the marker; only a control token can begin calls there.
            self._plain(unit)
        else:
            self._structure(unit.text)

    def _awaited(self) -> tuple[str, ...]:
        return () if self._place is _Place.DONE else (*_STRUCTURE[self._place], END)

    def _end(self, fragment: str, *, truncated: bool, stopped: bool) -> None:
        places = (_Place.START, _Place.CONTENT, *((_Place.THINK,) if stopped else ()))
        if fragment and not truncated and self._place in places:
            self._plain(Unit(fragment))
            fragment = ""
        if self._place is _Place.DONE:
            self._stray.append(fragment)
            self._end_part()
            return
        self._end_part()
        if self._call is not None:
            fragment = "".join(self._call.raw) + fragment
            self._call = None
        if fragment or truncated or not (stopped or self._place in places):
            self._deltas.append(ErrorMark("truncated", f"The answer ended inside {self._place.value}.", fragment))

    def _plain(self, unit: Unit) -> None:
        """Takes text, or a marker that is no structure, at the place where the parser is."""
        call = self._call
        if call is not None:
            call.raw.append(unit.text)
            if self._place is _Place.ID:
                call.id += unit.text
            else:
                self._arguments(call, unit.text)
        elif self._place is _Place.THINK:
            self._deltas.append(ReasoningDelta(unit.text))
        elif self._place in (_Place.START, _Place.CONTENT):
            self._content(unit.text)
        else:
            self._stray.append(unit.text)
            return
        if unit.certain:
            self._malformed(f"The control token {unit.text} is in {self._place.value} and means nothing there.")

    def _content(self, text: str) -> None:
        # Blanks before the reasoning, and behind tool calls, mean nothing.
        if not self._blanks_matter:
            known = self._behind_blanks(text)
            if known is None:
                return
            text, self._blanks_matter = known, True
        self._place = _Place.CONTENT
        self._deltas.append(TextDelta(text))

    def _arguments(self, call: _Call, text: str) -> None:
        if text.isspace():
            call.blanks.append(text)
            return
        # Blanks inside belong to the arguments, so they wait until it is known where they are.
        before = "".join(call.blanks) if call.text else ""
        text = before + (text if call.text else text.lstrip())
        kept = text.rstrip()
        call.blanks = [text[len(kept) :]]
        call.text.append(kept)
        if call.name:
            self._deltas.append(ToolCallArguments(call.index, kept))

    def _structure(self, marker: str) -> None:
        self._end_part()
        call = self._call
        if marker == THINK_BEGIN:
            self._place = _Place.THINK
        elif marker == THINK_END:
            self._place = _Place.CONTENT
            self._blanks_matter = True
        elif marker == SECTION_BEGIN:
            if self._place is _Place.THINK:
                # Kimi K2 Thinking is known to call tools without closing its reasoning.
                self._malformed("Tool calls begin inside the reasoning.")
            self._place = _Place.SECTION
        elif marker == SECTION_END:
            self._drop_call()
            self._place = _Place.CONTENT
            self._blanks_matter = False
        elif marker == CALL_BEGIN:
            self._drop_call()
            self._call = _Call(self._num_started, [marker])
            self._place = _Place.ID
        elif call is not None and marker == ARGUMENTS_BEGIN:
            call.raw.append(marker)
            self._begin_arguments(call)
            self._place = _Place.ARGUMENTS
        elif call is not None:
            call.raw.append(marker)
            if self._place is _Place.ID:
                self._drop_call()
            else:
                self._close_call(call)
                self._call = None
            self._place = _Place.SECTION

    def _begin_arguments(self, call: _Call) -> None:
        call.id = call.id.strip()
        call.name = _INDEX.sub("", call.id).removeprefix("functions.").strip()
        if call.name:
            self._num_started += 1
            self._deltas.append(ToolCallStart(call.index, call.id, call.name))

    def _close_call(self, call: _Call) -> None:
        if not call.name:
            self._nameless(call.raw)
            return
        text = "".join(call.text)
        if not text:
            text = "{}"
            self._deltas.append(ToolCallArguments(call.index, text))
        try:
            arguments = parse_json(text)
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            arguments = None
            self._malformed(f"The arguments of tool call {call.id!r} are no JSON object; they are given as they are.")
        self._deltas.append(ToolCallEnd(call.index, ToolCall(call.id, call.name, text, arguments)))

    def _drop_call(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            self._left_out(call.raw)

    def _end_answer(self) -> None:
        self._end_part()
        if self._call is not None:
            self._drop_call()
        elif self._place in (_Place.THINK, _Place.SECTION):
            self._malformed(f"The answer ended inside {self._place.value}.")
        self._place = _Place.DONE

    def _end_part(self) -> None:
        self._end_stray(self._place.value, "markers")
