"""Conversations as callers write them, checked and brought into one form before anything is rendered.

A message is a mapping in the widespread chat form:

    {"role": "system" | "developer", "content": TEXT, "name": str, "tools": [TOOL, ...]}
    {"role": "user", "content": TEXT, "name": str}
    {"role": "assistant", "content": TEXT | None, "reasoning_content": str, "tool_calls": [CALL, ...], "name": str}
    {"role": "tool", "content": TEXT, "tool_call_id": str, "name": str}

TEXT is a string or a list of parts, `{"type": "text", "text": str}` or `{"type": "image" | "image_url", ...}`. CALL is
`{"id": str, "function": {"name": str, "arguments": mapping | JSON text}}`. A developer message is a system message.
Keys that aren't listed are ignored: clients send many that have no form in a prompt.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from kimi_jax.text.shown import shown
from kimi_jax.text.tokenizer import check_text

DEEPEST = 128
"""Levels that JSON in a conversation or an answer may nest."""

ROLES = ("system", "developer", "user", "assistant", "tool")


class MessageError(ValueError):
    """A conversation, a tool or an option can't be rendered; the message names field, value and what is legal."""


@dataclass(frozen=True)
class Image:
    """The place of an image in a content; the pixels travel elsewhere."""


Part = str | Image


@dataclass(frozen=True)
class HistoryCall:
    """A tool call of an earlier assistant message.

    Attributes:
        id: what tool results refer to, or None.
        name: the tool.
        arguments: the arguments as an object, or None when `text` isn't a JSON object.
        text: the arguments as the caller wrote them, when that was text.
    """

    id: str | None
    name: str
    arguments: dict[str, Any] | None
    text: str | None


@dataclass(frozen=True)
class Message:
    """One checked message.

    Attributes:
        where: its place, such as `messages[2]`, for later errors.
        role: `system`, `user`, `assistant` or `tool`.
        content: text and images in order; empty for no content.
        name: the name given to the speaker (for a tool result: the tool), or None.
        reasoning: the assistant's reasoning; empty for none.
        tool_calls: the assistant's calls.
        tool_call_id: the call that a tool result answers, or None.
        tools: declarations that a system message carries, or None.
    """

    where: str
    role: str
    content: tuple[Part, ...] = ()
    name: str | None = None
    reasoning: str = ""
    tool_calls: tuple[HistoryCall, ...] = ()
    tool_call_id: str | None = None
    tools: list[Any] | None = None


def read_messages(messages: object) -> list[Message]:
    """Checks a conversation.

    Raises:
        MessageError: see the module's description for what is legal.
    """
    return [_read_message(message, where) for message, where in _entries(messages, "messages")]


def read_tools(tools: object, where: str = "tools") -> list[Any] | None:
    """Checks tool declarations, `{"type": "function", "function": {"name": str, ...}}` each; none or [] is None.

    Raises:
        MessageError: one has another form or no JSON form.
    """
    if tools is None:
        return None
    result = []
    for tool, here in _entries(tools, where):
        if not isinstance(tool, Mapping):
            _refuse(here, tool, 'a mapping such as {"type": "function", "function": {"name": ..., "parameters": ...}}')
        if tool.get("type", "function") == "function":
            function = tool.get("function")
            if not isinstance(function, Mapping):
                _refuse(f"{here}.function", function, "a mapping with the name, description and parameters of the tool")
            _text(function.get("name"), f"{here}.function.name", empty=False)
        tool = dict(tool)
        check_json(tool, here)
        result.append(tool)
    return result or None


def check_json(value: object, where: str) -> None:
    """Refuses a value that has no JSON form.

    Raises:
        MessageError: a key isn't text, a number isn't finite, text has a lone surrogate, something is of another type,
            or the nesting is too deep.
    """
    _check_json(value, where, 0)
    try:
        json.dumps(value)
    except TypeError:
        _refuse(where, value, "made of dict, list, str, int, float, bool and None")
    except ValueError as error:
        raise MessageError(f"{where} can't be written as JSON: {error}.") from None


def parse_json(text: str) -> Any:
    """Parses JSON that a model or a caller wrote.

    Raises:
        ValueError: it isn't JSON, or its value can't be written again: NaN, a number out of range, a lone surrogate,
            nesting too deep.
    """
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError(f"nested deeper than {DEEPEST} levels") from None
    # The rest of the checks is that of values from callers.
    _check_json(value, "the value", 0)
    json.dumps(value)
    return value


def _read_message(message: object, where: str) -> Message:
    if not isinstance(message, Mapping):
        _refuse(where, message, 'a mapping such as {"role": "user", "content": "..."}')
    if "role" not in message:
        raise MessageError(f"{where}.role is missing; legal roles are {', '.join(ROLES)}.")
    role = message["role"]
    if role not in ROLES:
        _refuse(f"{where}.role", role, f"one of {', '.join(ROLES)}")
    if role == "developer":
        role = "system"

    tools = read_tools(message.get("tools"), f"{where}.tools") if role == "system" else None
    calls = tuple(
        _read_call(call, here) for call, here in _entries(_or(message.get("tool_calls"), []), f"{where}.tool_calls")
    )
    if calls and role != "assistant":
        raise MessageError(f"{where}.tool_calls belongs to an assistant message, but the role is {message['role']!r}.")
    reasoning = ""
    if role == "assistant":
        # Two spellings are in use; the first one that isn't empty counts.
        for key in ("reasoning_content", "reasoning"):
            reasoning = reasoning or _text(_or(message.get(key), ""), f"{where}.{key}")
    name = _or(message.get("tool") if role == "tool" else None, message.get("name"))
    call_id = message.get("tool_call_id")

    content: tuple[Part, ...] = ()
    if message.get("content") is not None:
        content = _read_content(message["content"], f"{where}.content")
    elif not (tools or calls or (role == "assistant" and (reasoning or "content" in message))):
        raise MessageError(
            f"{where}.content is {'None' if 'content' in message else 'missing'}; a message of role "
            f"{message['role']!r} needs text or a list of parts."
        )
    return Message(
        where=where,
        role=role,
        content=content,
        name=None if name is None else _text(name, f"{where}.name"),
        reasoning=reasoning,
        tool_calls=calls,
        tool_call_id=None if call_id is None else _text(call_id, f"{where}.tool_call_id"),
        tools=tools,
    )


def _read_content(content: object, where: str) -> tuple[Part, ...]:
    if isinstance(content, str):
        return (_text(content, where),)
    parts: list[Part] = []
    for part, here in _entries(content, where, "text or a list of parts"):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text":
            parts.append(_text(part.get("text"), f"{here}.text"))
        elif kind in ("image", "image_url"):
            parts.append(Image())
        elif kind in ("video", "video_url"):
            raise MessageError(f"{here} is a video; the models take text and images. Legal part types: text, image.")
        else:
            _refuse(here, part, 'a part of type "text", "image" or "image_url"')
    return tuple(parts)


def _read_call(call: object, where: str) -> HistoryCall:
    if not isinstance(call, Mapping):
        _refuse(where, call, 'a mapping such as {"id": "...", "function": {"name": "...", "arguments": {}}}')
    if call.get("type", "function") != "function":
        _refuse(f"{where}.type", call["type"], '"function"')
    function, here = (call["function"], f"{where}.function") if "function" in call else (call, where)
    if not isinstance(function, Mapping):
        _refuse(here, function, "a mapping with a name and arguments")
    name = _text(function.get("name"), f"{here}.name", empty=False)
    call_id = None if call.get("id") is None else _text(call["id"], f"{where}.id")

    given = function.get("arguments")
    here += ".arguments"
    if given is None:
        return HistoryCall(call_id, name, {}, None)
    if isinstance(given, Mapping):
        arguments = dict(given)
        check_json(arguments, here)
        return HistoryCall(call_id, name, arguments, None)
    if not isinstance(given, str):
        _refuse(here, given, "a mapping or the text of a JSON object")
    _text(given, here)
    if not given.strip():
        return HistoryCall(call_id, name, {}, None)
    try:
        arguments = parse_json(given)
    except ValueError:
        # What a model wrote wrongly stays in the history as it was written.
        return HistoryCall(call_id, name, None, given)
    if not isinstance(arguments, dict):
        _refuse(here, given, "the text of a JSON object")
    return HistoryCall(call_id, name, arguments, given)


def _entries(value: object, where: str, legal: str = "a list") -> list[tuple[Any, str]]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        _refuse(where, value, legal)
    return [(entry, f"{where}[{index}]") for index, entry in enumerate(value)]


def _or(value: object, default: object) -> object:
    return default if value is None else value


def _text(value: object, where: str, *, empty: bool = True) -> str:
    if not isinstance(value, str) or not (value or empty):
        _refuse(where, value, "text" if empty else "text of at least one character")
    try:
        check_text(value, where)
    except ValueError as error:
        raise MessageError(str(error)) from None
    return value


def _refuse(where: str, value: object, legal: str) -> NoReturn:
    raise MessageError(f"{where} is {shown(value)}; legal is {legal}.")


def _check_json(value: object, where: str, depth: int) -> None:
    if depth > DEEPEST:
        raise MessageError(f"{where} is nested deeper than {DEEPEST} levels, the most that is legal.")
    if isinstance(value, str):
        _text(value, where)
    elif isinstance(value, float):
        if not math.isfinite(value):
            _refuse(where, value, "a finite number")
    elif isinstance(value, dict):
        for key, member in value.items():
            _check_json(member, f"{where}[{_text(key, f'a key of {where}')!r}]", depth + 1)
    elif isinstance(value, list | tuple):
        for index, member in enumerate(value):
            _check_json(member, f"{where}[{index}]", depth + 1)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
