"""Feeding parsers in pieces, and random conversations with everything that ever went wrong in one."""

import json
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from kimi_jax.text import (
    Delta,
    MessageParser,
    ParsedMessage,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    collect,
)

Answer = TypeVar("Answer", str, list[int])

XTML_MARKERS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
K2_MARKERS = (
    "<|im_end|>",
    "<|im_user|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
OTHER_MARKERS = ("[BOS]", "[EOS]", "[PAD]", "[UNK]", "[EOT]", "<|media_pad|>", "<|media_begin|>", "<osagent_mode>")
SNIPPETS = (
    *(
        "a",
        "tool",
        " ",
        "\n",
        "  \n",
        "\t",
        "\r\n",
        "<",
        "<|",
        "|>",
        ">",
        "<|clo",
        "<|open|",
        "&",
        "&quot;",
        "&amp;",
        '"',
    ),
    *(
        "\\",
        "{",
        "}",
        "{}",
        "[",
        "null",
        "true",
        "1e5",
        "-0",
        "'",
        "/",
        "中文",
        "👋",
        "👩‍👧",
        "é",
        "\u0301",
        "\u2028",
        "\x00",
    ),
    *("think", "message", "</think", "functions.f:0", "```json", "\ufeff", "ﷺ", "𠀀", "\x1f"),
)


def push(parser: MessageParser, piece: str | list[int]) -> list[Delta]:
    return parser.push(piece) if isinstance(piece, str) else parser.push_ids(piece)


def feed(
    parser: MessageParser, answer: str | list[int], cuts: Iterable[int] = (), *, truncated: bool = False
) -> list[Delta]:
    """All deltas of an answer that is divided at `cuts`."""
    deltas: list[Delta] = []
    begin = 0
    for end in [*cuts, len(answer)]:
        deltas += push(parser, answer[begin:end])
        begin = end
    return deltas + parser.finish(truncated=truncated)


def every_cut(answer: Sequence[Any]) -> range:
    return range(1, len(answer))


def random_cuts(rng: random.Random, length: int) -> list[int]:
    return sorted(rng.randrange(length + 1) for _ in range(rng.choice((1, 2, 3, 8, 40))))


def merged(deltas: Iterable[Delta]) -> list[Delta]:
    """Deltas with neighbours of one kind joined, which is all that a division may change."""
    result: list[Delta] = []
    for delta in deltas:
        last = result[-1] if result else None
        match last, delta:
            case (ReasoningDelta(), ReasoningDelta()) | (TextDelta(), TextDelta()):
                result[-1] = type(delta)(last.text + delta.text)
            case ToolCallArguments(), ToolCallArguments() if last.index == delta.index:
                result[-1] = ToolCallArguments(delta.index, last.text + delta.text)
            case _:
                result.append(delta)
    return result


def check_deltas(deltas: Sequence[Delta]) -> ParsedMessage:
    """Laws that hold for every answer, however wrong; returns the sum."""
    started: dict[int, ToolCallStart] = {}
    arguments: dict[int, str] = {}
    ended: set[int] = set()
    for delta in deltas:
        match delta:
            case ToolCallStart():
                assert delta.index == len(started)
                assert delta.name
                started[delta.index] = delta
                arguments[delta.index] = ""
            case ToolCallArguments():
                assert delta.index == len(started) - 1
                assert delta.index not in ended
                arguments[delta.index] += delta.text
            case ToolCallEnd():
                assert delta.index == len(started) - 1
                assert delta.index not in ended
                ended.add(delta.index)
                call = delta.call
                assert (call.id, call.name) == (started[delta.index].id, started[delta.index].name)
                assert call.arguments_text == arguments[delta.index]
                if call.arguments is not None:
                    assert json.loads(call.arguments_text) == call.arguments
    return collect(deltas)


def random_text(rng: random.Random, snippets: Sequence[str], longest: int = 12) -> str:
    return "".join(rng.choice(snippets) for _ in range(rng.randrange(longest)))


def random_value(rng: random.Random, snippets: Sequence[str], depth: int = 0) -> Any:
    kind = rng.randrange(8 if depth < 3 else 6)
    if kind == 6:
        return {random_text(rng, snippets, 4): random_value(rng, snippets, depth + 1) for _ in range(rng.randrange(4))}
    if kind == 7:
        return [random_value(rng, snippets, depth + 1) for _ in range(rng.randrange(4))]
    make: tuple[Callable[[], Any], ...] = (
        lambda: random_text(rng, snippets),
        lambda: rng.randrange(-(10**20), 10**20),
        lambda: rng.uniform(-1e9, 1e9),
        lambda: rng.random() < 0.5,
        lambda: None,
        lambda: "",
    )
    return make[kind]()


def random_answer(rng: random.Random, snippets: Sequence[str], *, reasoning: bool = True) -> dict[str, Any]:
    """A random assistant message, calls in the ids that the formats use."""
    message: dict[str, Any] = {"role": "assistant", "content": random_text(rng, snippets, 30)}
    if reasoning and rng.random() < 0.8:
        message["reasoning_content"] = random_text(rng, snippets, 30)
    names = [rng.choice(("f", "g", "a_b-c", "naïve_搜索")) for _ in range(rng.choice((0, 0, 1, 2, 3)))]
    if names:
        message["tool_calls"] = [
            {
                "id": f"functions.{name}:{index}",
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": {
                        f"k{i}{random_text(rng, snippets, 3)}": random_value(rng, snippets)
                        for i in range(rng.randrange(4))
                    },
                },
            }
            for index, name in enumerate(names)
        ]
    return message
