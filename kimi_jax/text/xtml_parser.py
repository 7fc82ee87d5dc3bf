"""Reading an answer in XTML, the chat format of Kimi K3, while it is generated; `xtml.py` describes the format."""

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kimi_jax.text.messages import parse_json
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
from kimi_jax.text.tokenizer import Tokenizer

OPEN, CLOSE, SEP, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
MARKERS = (OPEN, CLOSE, SEP, END)


class _Place(Enum):
    """Where in an answer the parser is; the value is how messages call it."""

    THINK = "the reasoning"
    RESPONSE = "the response"
    BETWEEN = "the message, between its parts"
    TOOLS = "the tools section"
    CALL = "a tool call"
    ARGUMENT = "an argument of a tool call"
    BLOCK = "the json block of a tool call"
    AFTER = "the end of the message"
    DONE = "the output behind the message"


# Tags that are structure at a place. Any other is text: an argument may quote what it likes, and nothing inside a
# reasoning or a response can begin a tool call.
_OPENINGS: dict[_Place, tuple[str, ...]] = {
    _Place.THINK: ("response",),
    _Place.BETWEEN: ("think", "response", "tools"),
    _Place.TOOLS: ("call",),
    _Place.CALL: ("argument", "json", "call"),
}
_CLOSINGS: dict[_Place, tuple[str, ...]] = {
    _Place.THINK: ("think", "message"),
    _Place.RESPONSE: ("response", "message"),
    _Place.BETWEEN: ("message",),
    _Place.TOOLS: ("tools", "message"),
    _Place.CALL: ("call", "tools", "message"),
    _Place.ARGUMENT: ("argument",),
    _Place.BLOCK: ("json",),
}
_PARTS = ("think", "response", "tools")  # of a message, in their order
_TYPES: dict[str, tuple[type, ...]] = {
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}
_LONGEST_KEY = 64


class _Tag:
    """A tag whose `<|sep|>` hasn't come yet."""

    def __init__(self, marker: Unit, names: tuple[str, ...]):
        self.units = [marker]
        self.closing = marker.text == CLOSE
        self.name = ""
        self.attributes: dict[str, str] = {}
        self._names = names
        self._expect = "name"
        self._key = ""
        self._value: list[str] = []

    @property
    def raw(self) -> str:
        return "".join(unit.text for unit in self.units)

    def take(self, unit: Unit) -> bool | None:
        """Takes the next unit. True: the tag is complete. False: it is no tag. None: it goes on."""
        self.units.append(unit)
        if not unit.is_marker:
            return None if self._read(unit.text) else False
        if self._expect == "value" and not unit.certain:
            # In text a marker that an attribute quotes looks like any other; the quotation marks tell.
            self._value.append(unit.text)
            return None
        return unit.text == SEP and self.name in self._names and self._expect in ("name", "blank", "blank or key")

    def _read(self, text: str) -> bool:
        position = 0
        while position < len(text):
            if self._expect == "value":
                end = text.find('"', position)
                self._value.append(text[position : end if end >= 0 else None])
                if end < 0:
                    return True
                value = "".join(self._value).replace("&quot;", '"').replace("&amp;", "&")
                self.attributes.setdefault(self._key, value)
                self._value, self._expect, position = [], "blank", end + 1
                continue
            character = text[position]
            position += 1
            if self._expect == "name":
                if character.isspace() and self.name in self._names and not self.closing:
                    self._expect = "blank or key"
                    continue
                self.name += character
                if not any(name.startswith(self.name) for name in self._names):
                    return False
            elif self._expect == "key":
                if character == "=":
                    self._expect = "quotation mark"
                elif (character.isalnum() or character in "_-") and len(self._key) < _LONGEST_KEY:
                    self._key += character
                else:
                    return False
            elif self._expect == "quotation mark":
                if character != '"':
                    return False
                self._expect = "value"
            elif character.isspace():
                self._expect = "blank or key"
            elif self._expect == "blank or key" and (character.isalpha() or character == "_"):
                self._key, self._expect = character, "key"
            else:
                return False
        return True


@dataclass
class _Argument:
    """An argument or a json block that is being read. `key` is None for an argument that is left out."""

    tag: str
    key: str | None
    kind: str
    text: list[str] = field(default_factory=list)


@dataclass
class _Call:
    """A tool call that is being read.

    Attributes:
        index: see `ToolCallStart`.
        name: the tool; empty for a call that is left out.
        raw: the output that it was read from.
        text: pieces of its `arguments_text`.
        values: its arguments.
        argument: the argument or block that is being read.
        unparsed: it has a json block that isn't an object, which is all of its arguments.
    """

    index: int
    name: str
    raw: list[str]
    text: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    argument: _Argument | None = None
    unparsed: bool = False

    @property
    def id(self) -> str:
        return f"functions.{self.name}:{self.index}"


class XtmlParser(MessageParser):
    """Reads an answer in XTML; see `MessageParser`, and `XtmlFormat.parser`, which makes one.

    String arguments are handed on as they come. The others are handed on when they are complete: only then it is known
    whether they are JSON, and what isn't becomes a string. The format gives calls no id; theirs is
    `functions.NAME:INDEX`.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, thinking: bool, end_tokens: Sequence[str]):
        super().__init__(MARKERS, end_tokens, tokenizer)
        self._place = _Place.THINK if thinking else _Place.RESPONSE
        self._part = "think" if thinking else "response"
        self._fresh = True  # nothing but blanks so far
        self._tag: _Tag | None = None
        self._call: _Call | None = None
        self._num_calls = 0
        self._num_started = 0
        self._in_stray_text = False  # between the parts of the message

    def _feed(self, unit: Unit) -> None:
        waiting = deque([unit])
        while waiting:
            unit = waiting.popleft()
            tag = self._tag
            if tag is None:
                self._read(unit)
            elif unit.text == END and unit.is_marker:
                self._end_message(tag.raw)
            else:
                complete = tag.take(unit)
                if complete is None:
                    continue
                self._tag = None
                if complete:
                    self._structure(tag)
                else:
                    # The marker was text after all; what came behind it is read again.
                    marker, *others = tag.units
                    self._plain(marker)
                    waiting.extendleft(reversed(others))

    def _awaited(self) -> tuple[str, ...]:
        if self._tag is not None:
            return MARKERS
        opening = (OPEN,) if self._openings() else ()
        closing = (CLOSE,) if self._place in _CLOSINGS else ()
        return () if self._place is _Place.DONE else (*opening, *closing, END)

    def _openings(self) -> tuple[str, ...]:
        # Some answers repeat the opening that the prompt ended with.
        at_start = self._fresh and self._place in (_Place.THINK, _Place.RESPONSE)
        return ("think", "response") if at_start else _OPENINGS.get(self._place, ())

    def _end(self, fragment: str, *, truncated: bool, stopped: bool) -> None:
        if fragment and stopped and self._tag is None and self._place in (_Place.THINK, _Place.RESPONSE):
            self._plain(Unit(fragment))
            fragment = ""
        rest = (self._tag.raw if self._tag is not None else "") + fragment
        self._tag = None
        self._end_part()
        if self._place in (_Place.AFTER, _Place.DONE) and not fragment:
            return
        if self._call is not None:
            rest = "".join(self._call.raw) + rest
            self._call = None
        if rest or not stopped:
            self._deltas.append(ErrorMark("truncated", f"The answer ended inside {self._place.value}.", rest))

    def _read(self, unit: Unit) -> None:
        names: tuple[str, ...] = ()
        if unit.is_marker:
            if unit.text == END and self._place is not _Place.DONE:
                self._end_message("")
                return
            if unit.text == OPEN:
                names = self._openings()
            elif unit.text == CLOSE:
                names = _CLOSINGS.get(self._place, ())
        if names:
            self._tag = _Tag(unit, names)
        else:
            self._plain(unit)

    def _plain(self, unit: Unit) -> None:
        """Takes text, or a marker that is no structure, at the place where the parser is."""
        self._fresh = self._fresh and not unit.is_marker and unit.text.isspace()
        if self._place is _Place.BETWEEN:
            self._plain_between(unit.text)
            return
        call = self._call
        if call is not None:
            call.raw.append(unit.text)
        if call is not None and call.argument is not None:
            call.argument.text.append(unit.text)
            if call.argument.kind == "string" and call.argument.key is not None:
                self._arguments(call, json.dumps(unit.text, ensure_ascii=False)[1:-1])
        elif self._place is _Place.THINK:
            self._deltas.append(ReasoningDelta(unit.text))
        elif self._place is _Place.RESPONSE:
            self._deltas.append(TextDelta(unit.text))
        else:
            self._stray.append(unit.text)
            return
        if unit.certain:
            self._malformed(f"The control token {unit.text} is in {self._place.value} and belongs to no tag.")

    def _plain_between(self, text: str) -> None:
        # Blanks between the parts mean nothing. Other text must not be lost; the response is where it is looked for.
        if not self._in_stray_text:
            known = self._behind_blanks(text)
            if known is None:
                return
            text, self._in_stray_text = known, True
            self._malformed("There is text between the parts of the message; it is given as response.")
        self._deltas.append(TextDelta(text))

    def _structure(self, tag: _Tag) -> None:
        self._end_part()
        new_call = tag.name == "call" and not tag.closing
        if self._call is not None and not new_call:
            self._call.raw.append(tag.raw)
        if tag.closing:
            self._close(tag.name)
        elif new_call:
            self._drop_call()
            self._open_call(tag)
        elif self._call is None:
            self._open_part(tag.name)
        elif tag.name == "argument":
            self._open_argument(self._call, tag)
        else:
            self._call.argument = _Argument(tag.raw, None, "json")
            self._place = _Place.BLOCK
        self._fresh = False

    def _open_part(self, part: str) -> None:
        if self._place is not _Place.BETWEEN:
            if part == self._part:
                return  # the opening is repeated
            self._malformed(f"{part} was opened inside {self._place.value}.")
        elif _PARTS.index(part) != _PARTS.index(self._part) + 1:
            self._malformed(f"{part} comes directly after {self._part}; the order is {', '.join(_PARTS)}.")
        self._part = part
        self._place = {"think": _Place.THINK, "response": _Place.RESPONSE, "tools": _Place.TOOLS}[part]

    def _open_call(self, tag: _Tag) -> None:
        self._num_calls += 1
        index = tag.attributes.get("index")
        if index != str(self._num_calls):
            self._malformed(f"Tool call {self._num_calls} of the message has the index {index!r}.")
        self._call = call = _Call(self._num_started, tag.attributes.get("tool", ""), [tag.raw])
        self._place = _Place.CALL
        if call.name:
            self._num_started += 1
            self._deltas.append(ToolCallStart(call.index, call.id, call.name))

    def _open_argument(self, call: _Call, tag: _Tag) -> None:
        self._place = _Place.ARGUMENT
        key, kind = tag.attributes.get("key"), tag.attributes.get("type")
        if kind != "string" and kind not in _TYPES:
            self._malformed(f"An argument has the type {kind!r}.", tag.raw)
        argument = _Argument(tag.raw, None if call.unparsed else key, "string" if kind is None else kind)
        call.argument = argument
        if argument.key is None:
            return
        if argument.key in call.values:
            self._malformed(f"The argument {key!r} is given twice; the last one counts.", tag.raw)
        if argument.kind == "string":
            self._arguments(call, _key(call, argument.key) + '"')

    def _arguments(self, call: _Call, text: str) -> None:
        call.text.append(text)
        if call.name and text:
            self._deltas.append(ToolCallArguments(call.index, text))

    def _close(self, name: str) -> None:
        call = self._call
        if name in ("think", "response"):
            self._place = _Place.BETWEEN
        elif call is not None and name in ("argument", "json"):
            if call.argument is not None:
                argument, call.argument = call.argument, None
                (self._close_argument if name == "argument" else self._close_block)(call, argument)
            self._place = _Place.CALL
        elif call is not None and name == "call":
            self._close_call(call)
            self._call = None
            self._place = _Place.TOOLS
        else:
            self._drop_call()
            if name == "message" and call is None and self._place is not _Place.BETWEEN:
                self._malformed(f"The message was closed inside {self._place.value}.")
            self._place = _Place.AFTER if name == "message" else _Place.BETWEEN

    def _close_argument(self, call: _Call, argument: _Argument) -> None:
        text = "".join(argument.text)
        if argument.key is None:
            self._malformed("An argument has no key, or follows a json block; it is left out.", argument.tag + text)
            return
        if argument.kind == "string":
            self._arguments(call, '"')
            call.values[argument.key] = text
            return
        try:
            value, written = parse_json(text), text.strip()
            expected = _TYPES.get(argument.kind, (object,))
            if not isinstance(value, expected) or (argument.kind == "number" and isinstance(value, bool)):
                self._malformed(f"The argument {argument.key!r} is no {argument.kind}; it is given as it is.")
        except ValueError:
            value, written = text, json.dumps(text, ensure_ascii=False)
            self._malformed(f"The argument {argument.key!r} is no JSON {argument.kind}; it is given as a string.")
        self._arguments(call, _key(call, argument.key) + written)
        call.values[argument.key] = value

    def _close_block(self, call: _Call, block: _Argument) -> None:
        text = "".join(block.text)
        try:
            value = parse_json(text) if text.strip() else {}
        except ValueError:
            value = None
        if call.unparsed or (call.text and not isinstance(value, dict)):
            self._malformed("A json block follows other arguments and can't be added to them; it is left out.", text)
        elif isinstance(value, dict):
            for key in value:
                if key in call.values:
                    self._malformed(f"The argument {key!r} is given twice; the last one counts.")
            inner = text.strip()[1:-1].strip()
            if inner:
                self._arguments(call, (", " if call.text else "{") + inner)
            call.values |= value
        else:
            self._malformed("The arguments are no JSON object; they are given as they are.")
            call.unparsed = True
            self._arguments(call, text)

    def _close_call(self, call: _Call) -> None:
        if not call.name:
            self._nameless(call.raw)
            return
        if not call.unparsed:
            self._arguments(call, "}" if call.text else "{}")
        arguments = None if call.unparsed else call.values
        self._deltas.append(ToolCallEnd(call.index, ToolCall(call.id, call.name, "".join(call.text), arguments)))

    def _drop_call(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            self._left_out(call.raw)

    def _end_message(self, rest: str) -> None:
        """Ends the message at its end marker; `rest` is a tag that was begun before it."""
        self._end_part()
        self._tag = None
        if self._call is not None:
            self._call.raw.append(rest)
            self._drop_call()
        elif self._place is not _Place.AFTER:
            self._malformed(f"The message ended inside {self._place.value}.", rest)
        self._place = _Place.DONE

    def _end_part(self) -> None:
        self._in_stray_text = False
        self._end_stray(self._place.value, "tags")


def _key(call: _Call, key: str) -> str:
    return ("{" if not call.text else ", ") + json.dumps(key, ensure_ascii=False) + ": "
