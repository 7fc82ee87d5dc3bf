"""The chat format of Kimi K3 and Kimi K3.1: XTML.

    <|open|>message role="user"<|sep|>CONTENT<|close|>message<|sep|><|end_of_msg|>

A conversation is, in order: declared tools, thinking effort, the messages, tool choice, response format, and the
opening of the assistant's answer. An assistant message holds `think` (in thinking mode, even when empty), `response`,
and `tools` with one `call` per tool call and one `argument` per argument. Attribute values escape `&` and `"`; bodies
escape nothing, since a marker is a control token and text that spells it isn't.

Source: the renderer published with Kimi K3, by way of its public derivatives. K3.1 is taken to use the same format.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kimi_jax.text.format import ChatFormat, RenderOptions
from kimi_jax.text.messages import HistoryCall, Image, Message, MessageError, check_json
from kimi_jax.text.shown import shown
from kimi_jax.text.tokenizer import ControlToken, Segment, Tokenizer
from kimi_jax.text.xtml_parser import CLOSE, END, MARKERS, OPEN, SEP, XtmlParser

IMAGE_PLACEHOLDER = "<|kimi_image_placeholder|>"
EFFORTS = ("low", "high", "max")
TOOL_CHOICES = ("auto", "none", "required")
RESPONSE_FORMATS = ("text", "json_object", "json_schema")

# Offsets behind the ranks. The tags' markers aren't flagged special: skipping special tokens keeps them.
_CONTROL_TOKENS = {
    "[BOS]": 0,
    "[EOS]": 1,
    END: 2,
    OPEN: 3,
    CLOSE: 4,
    SEP: 5,
    "[start_header_id]": 6,
    "[end_header_id]": 7,
    "[EOT]": 9,
    "<|media_begin|>": 18,
    "<|media_content|>": 19,
    "<|media_end|>": 20,
    "<|media_pad|>": 21,
    "<osagent_mode>": 65,
    "[UNK]": 254,
    "[PAD]": 255,
}
_MEDIA = ("<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>")
_IMAGE_PROMPT = re.compile(r"<\|media_begin\|>image [0-9]+x[0-9]+<\|media_content\|>(<\|media_pad\|>)+<\|media_end\|>")

# These sentences are part of the format, to the byte.
_TOOLS_TEXT = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"
_MORE_TOOLS_TEXT = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n```json\n{}\n```"
)
_EFFORT_TEXT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_CHOICE_TEXT = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
_FORMAT_TEXT = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
_SCHEMA_TEXT = "\nThe JSON data must match the following schema:\n```json\n{}\n```"


def control_tokens(num_ranks: int) -> list[ControlToken]:
    """The named control tokens of Kimi K3 behind a vocabulary of `num_ranks` ranks."""
    tags = (OPEN, CLOSE, SEP)
    return [ControlToken(name, num_ranks + offset, name not in tags) for name, offset in _CONTROL_TOKENS.items()]


def image_prompt(width: int, height: int, num_pads: int = 1) -> str:
    """The prompt of one image, for `render(image_prompts=...)`.

    Args:
        width: of the original image, in pixels.
        height: of the original image, in pixels.
        num_pads: media pads. The format has one, which stands for all features of the image.

    Raises:
        ValueError: a number isn't positive.
    """
    for name, value in (("width", width), ("height", height), ("num_pads", num_pads)):
        if value < 1:
            raise ValueError(f"{name} is {value}; an image prompt needs at least 1.")
    return f"<|media_begin|>image {width}x{height}<|media_content|>{'<|media_pad|>' * num_pads}<|media_end|>"


@dataclass(frozen=True)
class XtmlFormat(ChatFormat):
    """Renders conversations for Kimi K3 and reads its answers.

    Attributes:
        vendor_compatible: do as the vendor's renderer and its derivatives where this one differs on purpose: replace
            an image placeholder that is merely typed in a text by an image, and accept the thinking effort `medium`.
    """

    vendor_compatible: bool = False

    name: ClassVar[str] = "XTML"
    end_tokens: ClassVar[tuple[str, ...]] = (END, "[EOS]")

    structure: ClassVar[Mapping[str, bool]] = {OPEN: True, CLOSE: True, SEP: False, END: False}

    def _control_names(self) -> Iterable[str]:
        return (*MARKERS, *_MEDIA)

    def _render(self, conversation: list[Message], options: RenderOptions) -> list[Segment]:
        conversation = _answer_in_order(conversation)
        declared, tool_choice = options.tools, options.tool_choice
        if not conversation and options.add_generation_prompt:
            raise MessageError("messages is empty; a prompt for an answer needs at least one message.")
        think = options.thinking is not False
        effort = "max" if options.thinking_effort is None else options.thinking_effort
        efforts = ("low", "medium", "high", "max") if self.vendor_compatible else EFFORTS
        if think and effort not in efforts:
            raise MessageError(f"thinking_effort is {shown(effort)}; legal values are {', '.join(efforts)}.")
        if tool_choice is not None and tool_choice not in TOOL_CHOICES:
            raise MessageError(f"tool_choice is {shown(tool_choice)}; legal values are {', '.join(TOOL_CHOICES)}.")
        if tool_choice == "required" and not declared and not any(message.tools for message in conversation):
            raise MessageError(
                "tool_choice is 'required', but there are no tools; legal values without tools: auto, none."
            )
        format_text = _response_format_text(options.response_format)

        out = _Writer(options.image_prompts, self.vendor_compatible)
        if declared:
            out.system("tool-declare", _TOOLS_TEXT.format(_compact(declared)))
        if think:
            out.system("thinking-effort", _EFFORT_TEXT.format(effort))
        calls: tuple[HistoryCall, ...] = ()
        result_index = 0
        for message in conversation:
            if message.role == "system" and message.tools:
                out.system("tool-declare", _MORE_TOOLS_TEXT.format(_compact(message.tools)))
                continue
            attributes = {"role": message.role}
            if message.role == "tool":
                result_index += 1
                attributes["tool"] = _tool_name(message, calls, result_index)
                attributes["index"] = str(result_index)
            elif message.name:
                attributes["name"] = message.name
            out.open("message", attributes)
            if message.role == "assistant":
                calls, result_index = message.tool_calls, 0
                out.assistant = True
                _write_answer(out, message, think)
            else:
                out.content(message.content)
            out.end_message()
        if tool_choice in _CHOICE_TEXT:
            out.system("tool-choice", _CHOICE_TEXT[tool_choice])
        if format_text:
            out.system("response-format", format_text)
        if options.add_generation_prompt:
            out.open("message", {"role": "assistant"})
            out.open("think" if think else "response")
        out.check_images()
        return out.segments

    def parser(self, tokenizer: Tokenizer | None = None, *, thinking: bool | None = None) -> XtmlParser:
        """A parser for one answer; see `ChatFormat.parser`."""
        if tokenizer is not None:
            self.check_tokenizer(tokenizer)
        return XtmlParser(tokenizer, thinking=thinking is not False, end_tokens=self.end_tokens)


class _Writer:
    """Segments of a prompt. Their borders are part of the format: each is encoded on its own."""

    def __init__(self, image_prompts: Sequence[str] | None, replace_placeholders: bool):
        if image_prompts is not None and (not isinstance(image_prompts, Sequence) or isinstance(image_prompts, str)):
            raise MessageError(f"image_prompts is {shown(image_prompts)}; legal is a list, or None.")
        for index, prompt in enumerate(image_prompts or ()):
            if not isinstance(prompt, str) or not _IMAGE_PROMPT.fullmatch(prompt):
                raise MessageError(f"image_prompts[{index}] is {shown(prompt)}; legal is what image_prompt() returns.")
        self.segments: list[Segment] = []
        self.assistant = False
        self._prompts = None if image_prompts is None else list(image_prompts)
        self._num_images = 0
        self._replace = replace_placeholders and image_prompts is not None

    def control(self, text: str) -> None:
        self.segments.append(Segment(text, True, self.assistant))

    def plain(self, text: str) -> None:
        if text:
            self.segments.append(Segment(text, False, self.assistant))

    def open(self, tag: str, attributes: Mapping[str, str] | None = None) -> None:
        self.control(OPEN)
        self.plain(tag)
        for key, value in (attributes or {}).items():
            self.plain(f" {key}")
            self.plain('="')
            self.plain(value.replace("&", "&amp;").replace('"', "&quot;"))
            self.plain('"')
        self.control(SEP)

    def close(self, tag: str) -> None:
        self.control(CLOSE)
        self.plain(tag)
        self.control(SEP)

    def end_message(self) -> None:
        self.close("message")
        self.control(END)
        self.assistant = False

    def system(self, kind: str, text: str) -> None:
        self.open("message", {"role": "system", "type": kind})
        self.plain(text)
        self.end_message()

    def content(self, parts: Iterable[str | Image]) -> None:
        for part in parts:
            if isinstance(part, Image):
                self._image()
            else:
                self.text(part)

    def text(self, text: str) -> None:
        first, *others = text.split(IMAGE_PLACEHOLDER) if self._replace else [text]
        self.plain(first)
        for other in others:
            self._image()
            self.plain(other)

    def _image(self) -> None:
        self._num_images += 1
        if self._prompts is None:
            self.control(IMAGE_PLACEHOLDER)
        elif self._num_images <= len(self._prompts):
            self.control(self._prompts[self._num_images - 1])

    def check_images(self) -> None:
        if self._prompts is not None and self._num_images != len(self._prompts):
            raise MessageError(
                f"image_prompts has {len(self._prompts)} entries, but the messages have {self._num_images} images; "
                "legal is one for each, or None."
            )


def _write_answer(out: _Writer, message: Message, think: bool) -> None:
    if think:
        out.open("think")
        if message.reasoning.strip():
            out.text(message.reasoning)
        out.close("think")
    out.open("response")
    out.content(message.content)
    out.close("response")
    if not message.tool_calls:
        return
    out.open("tools")
    for index, call in enumerate(message.tool_calls, start=1):
        out.open("call", {"tool": call.name, "index": str(index)})
        if call.arguments is None:
            out.open("json", {"type": "object"})
            out.text(call.text or "")
            out.close("json")
        for key, value in (call.arguments or {}).items():
            out.open("argument", {"key": key, "type": _type_of(value)})
            out.text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
            out.close("argument")
        out.close("call")
    out.close("tools")


def _type_of(value: object) -> str:
    # bool is a subclass of int, so it comes first.
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    if value is None:
        return "null"
    return "object" if isinstance(value, dict) else "array"


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def _answer_in_order(messages: list[Message]) -> list[Message]:
    """Brings each run of tool results into the order of the calls, when every one of them names a call by its id."""
    result: list[Message] = []
    positions: dict[str, tuple[int, str]] = {}
    run: list[Message] = []

    def end_run() -> None:
        answered = [None if message.tool_call_id is None else positions.get(message.tool_call_id) for message in run]
        if None in answered:
            result.extend(run)
        else:
            order = sorted(zip(answered, range(len(run)), strict=True))
            # The call knows its tool better than the result does.
            result.extend(_renamed(run[index], call[1]) for call, index in order if call is not None)
        run.clear()

    for message in messages:
        if message.role == "tool":
            run.append(message)
            continue
        end_run()
        if message.role == "assistant":
            positions = {}
            for position, call in enumerate(message.tool_calls):
                if call.id is not None:
                    positions.setdefault(call.id, (position, call.name))
        result.append(message)
    end_run()
    return result


def _renamed(message: Message, name: str) -> Message:
    return Message(message.where, message.role, message.content, name, tool_call_id=message.tool_call_id)


def _tool_name(message: Message, calls: Sequence[HistoryCall], index: int) -> str:
    if message.name:
        return message.name
    if index <= len(calls):
        return calls[index - 1].name
    raise MessageError(
        f"{message.where}.name is missing and tool_call_id={message.tool_call_id!r} is no call of the assistant "
        "message before it; legal is a name, or the id of a call."
    )


def _response_format_text(response_format: object) -> str | None:
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if not isinstance(response_format, Mapping) or kind not in RESPONSE_FORMATS:
        raise MessageError(
            f"response_format is {shown(response_format)}; legal is a mapping whose type is one of "
            f"{', '.join(RESPONSE_FORMATS)}."
        )
    if kind == "text":
        return None
    text = _FORMAT_TEXT.format(kind)
    if kind == "json_object":
        return text
    given = response_format.get("json_schema")
    schema = given.get("schema") if isinstance(given, Mapping) else None
    if not isinstance(schema, Mapping | bool):
        raise MessageError(
            f'response_format.json_schema is {shown(given)}; legal is a mapping such as {{"name": ..., "schema": {{...}}}}.'
        )
    schema = schema if isinstance(schema, bool) else dict(schema)
    check_json(schema, "response_format.json_schema.schema")
    return text + _SCHEMA_TEXT.format(_compact(schema))
