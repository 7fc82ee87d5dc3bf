"""Answers read in pieces: the golden ones, and laws that hold for every division and for every kind of wrong output."""

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kimi_jax.text import (
    ErrorMark,
    K2Format,
    MessageError,
    MessageParser,
    ParsedMessage,
    ReasoningDelta,
    StreamingDetokenizer,
    TextDelta,
    Tokenizer,
    ToolCallArguments,
    ToolCallStart,
    XtmlFormat,
    collect,
)
from kimi_jax.text.k2 import THINKING
from tests.kimi_jax.text.golden import load, name_of
from tests.kimi_jax.text.streams import (
    K2_MARKERS,
    OTHER_MARKERS,
    SNIPPETS,
    XTML_MARKERS,
    check_deltas,
    every_cut,
    feed,
    merged,
    push,
    random_answer,
    random_cuts,
)

GOLDEN = load("parse", "cases.json")
GOLDEN_K2 = load("chat-k2", "parse_cases.json")
# What text can hold so that reading it as text, too, gives it back: no whole tag that closes something.
QUOTABLE = tuple(s for s in SNIPPETS if s not in ("think", "message", "</think"))


def calls_of(message: ParsedMessage) -> list[dict[str, Any]]:
    return [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]


@dataclass(frozen=True)
class Setting:
    """A format with its prompt's last words, and what an assistant message looks like as an answer to it."""

    format: XtmlFormat | K2Format
    thinking: bool | None
    tokenizer: Tokenizer
    markers: tuple[str, ...]
    call_end: str

    def parser(self, *, ids: bool) -> MessageParser:
        return self.format.parser(self.tokenizer if ids else None, thinking=self.thinking)

    def answer(self, message: dict[str, Any], *, ids: bool) -> Any:
        user = {"role": "user", "content": "u"}
        prompt = self.format.render([user], thinking=self.thinking)
        segments = self.format.render([user, message], thinking=self.thinking, add_generation_prompt=False)
        assert [segment[:2] for segment in segments[: len(prompt)]] == [segment[:2] for segment in prompt]
        segments = segments[len(prompt) :]
        return self.tokenizer.encode_segments(segments) if ids else "".join(segment.text for segment in segments)

    def expected(self, message: dict[str, Any]) -> tuple[Any, ...]:
        reasoning = message.get("reasoning_content", "")
        if self.format.name == "XTML":
            reasoning = reasoning if self.thinking and reasoning.strip() else ""
        elif not (self.thinking and message.get("tool_calls")):
            reasoning = ""  # nor does the format keep that of the last answer
        calls = [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])]
        return reasoning or None, message["content"] or None, calls

    def __str__(self) -> str:
        return f"{self.format.name}-{self.thinking}"


SETTINGS: tuple[tuple[str, Callable[[Tokenizer, Tokenizer], Setting]], ...] = (
    ("xtml", lambda t, k: Setting(XtmlFormat(), True, t, XTML_MARKERS, "<|close|>call<|sep|>")),
    ("k2", lambda t, k: Setting(K2Format(), False, k, K2_MARKERS, "<|tool_call_end|>")),
    (
        "k2-thinking",
        lambda t, k: Setting(K2Format(THINKING), True, k, (*K2_MARKERS, "<think>", "</think>"), "<|tool_call_end|>"),
    ),
)


@pytest.fixture(params=[make for _, make in SETTINGS[:2]], ids=[name for name, _ in SETTINGS[:2]])
def plain_setting(request: pytest.FixtureRequest, tokenizer: Tokenizer, k2_tokenizer: Tokenizer) -> Setting:
    """The settings without K2's variety that thinks."""
    return request.param(tokenizer, k2_tokenizer)


@pytest.fixture(params=[make for _, make in SETTINGS], ids=[name for name, _ in SETTINGS])
def setting(request: pytest.FixtureRequest, tokenizer: Tokenizer, k2_tokenizer: Tokenizer) -> Setting:
    return request.param(tokenizer, k2_tokenizer)


def found(message: ParsedMessage) -> tuple[Any, ...]:
    return message.reasoning, message.text, [(c.id, c.name, c.arguments) for c in message.tool_calls]


# Golden


@pytest.mark.parametrize("ids", [False, True], ids=["text", "ids"])
@pytest.mark.parametrize("case", GOLDEN, ids=name_of)
def test_golden_answers(tokenizer: Tokenizer, case: dict, ids: bool) -> None:
    def parser() -> MessageParser:
        return XtmlFormat().parser(tokenizer, thinking=case["thinking"])

    text = case["text"]
    answer = tokenizer.encode(text, allow_special=True) if ids else text
    once = check_deltas(feed(parser(), answer))
    if case["expected"] is None:
        # Required is only that no text is lost and no call invented.
        assert (once.reasoning, once.text, once.tool_calls) == ("r1 ", "c", ())
    else:
        want = case["expected"]
        assert (once.reasoning, once.text, calls_of(once)) == (want["reasoning"], want["response"], want["tool_calls"])
    if ids and case["id"].startswith("10"):
        # In text the markers in the argument are quotations; real control tokens have no business there.
        assert ["belongs to no tag" in error.message for error in once.errors] == [True, True]
    else:
        assert [error.kind for error in once.errors][:1] == ([] if case["class"] == "ok" else [case["class"]])

    divisions = [list(every_cut(answer))]
    if not ids and case.get("streaming"):
        divisions += [division["cuts"] for division in case["streaming"].values() if "cuts" in division]
        assert len(divisions) == 3
    for cuts in divisions:
        assert merged(feed(parser(), answer, cuts)) == merged(feed(parser(), answer))


def test_golden_streams_show_at_least_what_the_public_parser_shows() -> None:
    compared = 0
    for case in GOLDEN:
        for division in (case.get("streaming") or {}).values():
            if not division["final_equals_expected"] or "vllm_python_emitted_chars_after_each_chunk" not in division:
                continue
            parser = XtmlFormat().parser(thinking=case["thinking"])
            reasoning, response, begin = "", "", 0
            ends = [*division["cuts"], len(case["text"])]
            for end, shown in zip(ends, division["vllm_python_emitted_chars_after_each_chunk"], strict=True):
                message = collect(parser.push(case["text"][begin:end]))
                reasoning += message.reasoning or ""
                response += message.text or ""
                begin = end
                assert len(reasoning) >= shown[0]
                assert len(response) >= shown[1]
                compared += 1
    assert compared > 100


@pytest.mark.parametrize("case", GOLDEN_K2, ids=name_of)
def test_golden_k2_answers(k2_tokenizer: Tokenizer, case: dict) -> None:
    want = case["expected"]
    for answer in (case["text"], k2_tokenizer.encode(case["text"], allow_special=True)):
        once = feed(K2Format().parser(k2_tokenizer), answer)
        message = check_deltas(once)
        assert message.text == want["content"]
        calls = [{"id": c.id, "name": c.name, "arguments": c.arguments_text} for c in message.tool_calls]
        assert calls == want["tool_calls"]
        assert [error.kind for error in message.errors] == (["truncated"] if case["id"] == "truncated" else [])
        assert merged(feed(K2Format().parser(k2_tokenizer), answer, every_cut(answer))) == merged(once)


# One answer with everything that streamed tool calls were reported to break on


def hard_answer() -> dict[str, Any]:
    names_and_arguments: list[tuple[str, dict[str, Any]]] = [
        ("search", {"q": {"a": {"b": [{"c": "}{"}, [[]]]}}, "text": 'a < b > "c" \\ <|x|> <|', "n": -1.5}),
        ("write", {"中文👋": "中文👋" * 3, "code": "if a < b:\n\tprint('}')\n", "none": None, "yes": True}),
        ("search", {"big": "<x> the following arguments return é\n" * 560}),
        ("search", {}),
    ]
    return {
        "role": "assistant",
        "content": "Let me look. <b> & 中文👋\n",
        "reasoning_content": "two tools, {then} <more>\n",
        "tool_calls": [
            {"id": f"functions.{name}:{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(names_and_arguments)
        ],
    }


@pytest.mark.parametrize("ids", [False, True], ids=["text", "ids"])
def test_hard_answer_in_every_division(plain_setting: Setting, ids: bool) -> None:
    message = hard_answer()
    answer = plain_setting.answer(message, ids=ids)
    once = feed(plain_setting.parser(ids=ids), answer)
    parsed = check_deltas(once)
    assert found(parsed) == plain_setting.expected(message)
    assert parsed.errors == ()
    whole = merged(once)

    # One at a time, which for ids is token by token.
    assert merged(feed(plain_setting.parser(ids=ids), answer, every_cut(answer))) == whole
    rng = random.Random(9)
    for _ in range(200):
        cuts = random_cuts(rng, len(answer))
        assert merged(feed(plain_setting.parser(ids=ids), answer, cuts)) == whole


@pytest.mark.parametrize("ids", [False, True], ids=["text", "ids"])
def test_short_answer_in_every_division_into_two_and_three(setting: Setting, ids: bool) -> None:
    message = hard_answer()
    message["tool_calls"] = message["tool_calls"][3:] + message["tool_calls"][3:]
    message["content"] = "<é"
    answer = setting.answer(message, ids=ids)
    whole = merged(feed(setting.parser(ids=ids), answer))
    rng = random.Random(10)
    for first in range(len(answer) + 1):
        assert merged(feed(setting.parser(ids=ids), answer, [first])) == whole
        second = rng.randrange(first, len(answer) + 1)
        assert merged(feed(setting.parser(ids=ids), answer, [first, second])) == whole


@pytest.mark.parametrize("ids", [False, True], ids=["text", "ids"])
def test_interleaved_requests_do_not_see_each_other(plain_setting: Setting, ids: bool) -> None:
    first, second = hard_answer(), hard_answer()
    second["tool_calls"] = second["tool_calls"][1:2]
    second["content"] = "other"
    answers = [plain_setting.answer(message, ids=ids) for message in (first, second)]
    alone = [merged(feed(plain_setting.parser(ids=ids), answer)) for answer in answers]
    parsers = [plain_setting.parser(ids=ids) for _ in answers]
    deltas: list[list[Any]] = [[], []]
    position, step = 0, 7
    while position < max(map(len, answers)):
        for parser, answer, out in zip(parsers, answers, deltas, strict=True):
            out += push(parser, answer[position : position + step])
        position += step
    for parser, out, want in zip(parsers, deltas, alone, strict=True):
        out += parser.finish()
        assert merged(out) == want


@pytest.mark.parametrize("ids", [False, True], ids=["text", "ids"])
def test_an_answer_cut_at_each_prefix(setting: Setting, ids: bool) -> None:
    message = hard_answer()
    message["tool_calls"][0]["function"]["arguments"] = {"q": {"a": "}{"}, "n": -1.5}
    message["tool_calls"][1]["function"]["arguments"] = {"中文👋": '"<é'}
    message["tool_calls"][2]["function"]["arguments"] = {}
    answer = setting.answer(message, ids=ids)
    reasoning, text, calls = setting.expected(message)
    for length in range(len(answer)):
        prefix = answer[:length]
        parsed = check_deltas(feed(setting.parser(ids=ids), prefix, truncated=True))
        if not ids:
            assert (reasoning or "").startswith(parsed.reasoning or "")
            assert (text or "").startswith(parsed.text or "")
        else:
            # The last character may be half.
            assert (reasoning or "").startswith((parsed.reasoning or "").rstrip("\ufffd"))
            assert (text or "").startswith((parsed.text or "").rstrip("\ufffd"))
        complete = (setting.tokenizer.decode(prefix) if ids else prefix).count(setting.call_end)
        assert found(parsed)[2] == calls[:complete]
        assert all(error.kind == "truncated" for error in parsed.errors)
        for marker in setting.markers:
            assert marker not in (parsed.reasoning or "") + (parsed.text or "")
        # What isn't handed on as reasoning, answer or call is in the mark.
        if parsed.errors and complete < len(calls) and "call" in parsed.errors[0].message:
            shown = setting.tokenizer.decode(prefix) if ids else prefix
            assert shown.endswith(parsed.errors[0].text)


def test_calls_that_end_and_begin_in_one_piece(setting: Setting) -> None:
    """Speculative decoding delivers several tokens at once."""
    message = hard_answer()
    answer = setting.answer(message, ids=False)
    border = answer.index(setting.call_end) + len(setting.call_end)
    for before, after in ((1, 1), (len(setting.call_end), 30), (60, 60)):
        assert found(check_deltas(feed(setting.parser(ids=False), answer, [border - before, border + after]))) == (
            setting.expected(message)
        )


# Generated answers


@pytest.mark.parametrize("ids", [False, True], ids=["text", "ids"])
def test_generated_answers_come_back(setting: Setting, ids: bool) -> None:
    """More than 500 answers in all; with ids they may quote every marker."""
    rng = random.Random(11)
    snippets = (*SNIPPETS, *XTML_MARKERS, *K2_MARKERS, *OTHER_MARKERS, setting.call_end) if ids else QUOTABLE
    spelled = setting.format.name == "K2" and bool(setting.thinking)  # its think tags are no control tokens here
    for number in range(85):
        if setting.format.name == "XTML":
            setting = replace(setting, thinking=number % 2 == 0)
        message = random_answer(rng, [s for s in snippets if not (spelled and "think" in s)])
        if not ids:
            message = json.loads(json.dumps(message).replace("<|open|>", "<|ope"))
        answer = setting.answer(message, ids=ids)
        once = feed(setting.parser(ids=ids), answer)
        parsed = check_deltas(once)
        assert found(parsed) == setting.expected(message)
        assert parsed.errors == ()
        for cuts in (
            every_cut(answer) if number % 5 == 0 else [],
            *(random_cuts(rng, len(answer)) for _ in range(3)),
        ):
            assert merged(feed(setting.parser(ids=ids), answer, cuts)) == merged(once)
        # And it can be sent back as it was read.
        assert setting.answer(parsed.to_message(), ids=ids) == answer


@pytest.mark.parametrize("ids", [False, True], ids=["text", "ids"])
def test_wrong_answers_never_raise_and_never_depend_on_the_division(setting: Setting, ids: bool) -> None:
    """Answers with pieces removed, doubled, swapped and thrown in, and plain noise."""
    rng = random.Random(12)
    markers = [*setting.markers, "[EOS]", "<|reserved_token_2100|>", "<|media_pad|>"]
    tags = [
        '<|open|>call tool="f" index="1"<|sep|>',
        "<|close|>call<|sep|>",
        '<|open|>json type="object"<|sep|>{"a": 1}',
    ]
    noise = [
        *markers,
        *SNIPPETS,
        *tags,
        "<|close|>think<|sep|>",
        "<|open|>tools<|sep|>",
        "<|close|>response<|sep|>",
        "call",
    ]
    for _ in range(50):
        text = setting.answer(random_answer(rng, QUOTABLE), ids=False)
        if rng.random() < 0.3:
            text = ""
        for _ in range(rng.randrange(1, 6)):
            a, b = sorted(rng.randrange(len(text) + 1) for _ in "ab")
            match rng.randrange(4):
                case 0:
                    text = text[:a] + text[b:]
                case 1:
                    text = text[:b] + text[a:b] + text[b:]
                case 2:
                    text = text[b:] + text[a:b] + text[:a]
                case _:
                    text = text[:a] + "".join(rng.choice(noise) for _ in range(rng.randrange(8))) + text[a:]
        answer = setting.tokenizer.encode(text, allow_special=True) if ids else text
        once = feed(setting.parser(ids=ids), answer)
        parsed = check_deltas(once)
        assert len(parsed.tool_calls) <= text.count(setting.call_end)
        for cuts in (every_cut(answer), random_cuts(rng, len(answer))):
            assert merged(feed(setting.parser(ids=ids), answer, cuts)) == merged(once)


def test_random_ids_never_raise(setting: Setting) -> None:
    rng = random.Random(13)
    tokenizer = setting.tokenizer
    for _ in range(60):
        kinds = (range(tokenizer.num_ranks), range(tokenizer.num_ranks, tokenizer.num_ranks + 20))
        answer = [rng.choice(rng.choices(kinds, (3, 2))[0]) for _ in range(60)]
        once = feed(setting.parser(ids=True), answer)
        check_deltas(once)
        assert merged(feed(setting.parser(ids=True), answer, every_cut(answer))) == merged(once)


def test_output_without_any_marker_is_not_lost(setting: Setting) -> None:
    for text in ("", "just text", "1 < 2", " \n", "中文👋 {'a': 1}", "</thin", "a <|b|> c"):
        parsed = collect(feed(setting.parser(ids=False), text))
        shown = (parsed.reasoning or "") + (parsed.text or "") + "".join(error.text for error in parsed.errors)
        assert shown.strip() == text.strip()
        assert parsed.tool_calls == ()


# The single decisions


def xtml(text: str, *, thinking: bool = True) -> ParsedMessage:
    once = feed(XtmlFormat().parser(thinking=thinking), text)
    assert merged(feed(XtmlFormat().parser(thinking=thinking), text, every_cut(text))) == merged(once)
    return check_deltas(once)


def in_tools(body: str) -> ParsedMessage:
    start = "<|close|>response<|sep|><|open|>tools<|sep|>"
    return xtml(f"{start}{body}<|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>", thinking=False)


def call(body: str, *, name: str = "f", index: int = 1) -> str:
    return f'<|open|>call tool="{name}" index="{index}"<|sep|>{body}<|close|>call<|sep|>'


def argument(key: str, kind: str, text: str) -> str:
    return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{text}<|close|>argument<|sep|>'


def block(text: str) -> str:
    return f'<|open|>json type="object"<|sep|>{text}<|close|>json<|sep|>'


def test_string_arguments_stream_and_are_json_all_the_time() -> None:
    parser = XtmlFormat().parser(thinking=False)
    start = '<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
    assert parser.push(start) == [ToolCallStart(0, "functions.f:0", "f")]
    assert parser.push('<|open|>argument key="a" type="string"<|sep|>') == [ToolCallArguments(0, '{"a": "')]
    assert parser.push('x"\n') == [ToolCallArguments(0, 'x\\"\\n')]
    assert parser.push("y<|clo") == [ToolCallArguments(0, "y")]
    assert parser.push("se|>argument<|sep|>") == [ToolCallArguments(0, '"')]
    assert parser.push('<|open|>argument key="b" type="number"<|sep|> 1') == []
    assert parser.push("0 <|close|>argument<|sep|>") == [ToolCallArguments(0, ', "b": 10')]
    assert merged(parser.push("<|close|>call<|sep|>"))[0] == ToolCallArguments(0, "}")


def test_json_blocks_are_kept() -> None:
    message = in_tools(
        call(block(' {"a": 1, "b": [true]} ')) + call(block('{"a": '), index=2) + call(block("[1]"), index=3)
    )
    assert [(c.arguments, c.arguments_text) for c in message.tool_calls] == [
        ({"a": 1, "b": [True]}, '{"a": 1, "b": [true]}'),
        (None, '{"a": '),
        (None, "[1]"),
    ]
    assert [e.message for e in message.errors] == ["The arguments are no JSON object; they are given as they are."] * 2
    # A block can be added to arguments, and is an object when it is empty.
    message = in_tools(call(argument("a", "string", "x") + block('{"b": 2}') + argument("c", "null", "null")))
    assert message.tool_calls[0].arguments == {"a": "x", "b": 2, "c": None}
    assert in_tools(call(block(" "))).tool_calls[0].arguments == {}
    message = in_tools(call(argument("a", "string", "x") + block("[1]")))
    assert message.tool_calls[0].arguments == {"a": "x"}
    assert (message.errors[0].kind, message.errors[0].text) == ("malformed", "[1]")
    message = in_tools(call(block("oops") + argument("a", "string", "x") + block("{}")))
    assert (message.tool_calls[0].arguments, message.tool_calls[0].arguments_text) == (None, "oops")
    assert len(message.errors) == 3


@pytest.mark.parametrize(
    ("kind", "text", "value", "wrong"),
    [
        ("number", "7", 7, False),
        ("number", " -2.5e3 ", -2500.0, False),
        ("number", "true", True, True),
        ("number", "twelve", "twelve", True),
        ("number", "NaN", "NaN", True),
        ("number", "1e999", "1e999", True),
        ("number", "9" * 5000, "9" * 5000, True),
        ("boolean", "True", "True", True),
        ("boolean", "false", False, False),
        ("null", "null", None, False),
        ("null", "", "", True),
        ("object", "[]", [], True),
        ("object", '{"a": {}}', {"a": {}}, False),
        ("array", "[" * 9999, "[" * 9999, True),
        ("array", '["\\ud800"]', '["\\ud800"]', True),
        ("integer", "7", 7, True),
        ("string", "7", "7", False),
    ],
)
def test_argument_types(kind: str, text: str, value: Any, wrong: bool) -> None:
    message = in_tools(call(argument("k", kind, text)))
    assert message.tool_calls[0].arguments == {"k": value}
    assert json.dumps(message.tool_calls[0].arguments) == json.dumps({"k": value})  # tells True from 1
    assert bool(message.errors) == wrong


def test_only_its_own_closing_tag_ends_an_argument() -> None:
    quoted = (
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|open|>argument<|sep|><|close|>json<|sep|>"
    )
    message = in_tools(call(argument("k", "string", quoted)))
    assert message.tool_calls[0].arguments == {"k": quoted}
    assert message.errors == ()


def test_markers_in_attributes(tokenizer: Tokenizer) -> None:
    name = "a<|sep|>b<|open|>"
    text = in_tools(call("", name=name))
    assert [tool_call.name for tool_call in text.tool_calls] == [name]
    # A control token can't be part of a name: the tag is none, and the call isn't made.
    start = "<|close|>response<|sep|><|open|>tools<|sep|>"
    answer = tokenizer.encode(start + call("", name=name) + call(""), allow_special=True)
    message = check_deltas(feed(XtmlFormat().parser(tokenizer, thinking=False), answer))
    assert [tool_call.name for tool_call in message.tool_calls] == ["f"]
    assert message.errors[0].text == call("", name=name)


def test_arguments_without_key_or_type_and_given_twice() -> None:
    no_key = '<|open|>argument type="string"<|sep|>lost<|close|>argument<|sep|>'
    no_type = '<|open|>argument key="t"<|sep|>1<|close|>argument<|sep|>'
    message = in_tools(call(no_key + no_type + argument("t", "number", "2")))
    assert message.tool_calls[0].arguments == {"t": 2}
    assert message.errors[0].text.endswith("<|sep|>lost")
    assert len(message.errors) == 3


def test_broken_tools_sections() -> None:
    # Text between the tags.
    message = in_tools("so: " + call("mm" + argument("a", "number", "1")) + " ok ")
    assert calls_of(message) == [{"name": "f", "arguments": {"a": 1}}]
    assert [error.text for error in message.errors] == ["so: ", "mm", " ok "]
    # A call that another one interrupts.
    message = in_tools('<|open|>call tool="g" index="1"<|sep|>' + argument("a", "number", "1") + call("", index=2))
    assert calls_of(message) == [{"name": "f", "arguments": {}}]
    assert message.errors[0].text.startswith('<|open|>call tool="g"')
    # Unknown and misspelled tags.
    for wrong in (
        "<|open|>cal<|sep|>",
        "<|open|>call tool=f<|sep|>",
        '<|open|>call tool="f" 1<|sep|>',
        "<|close|>argument<|sep|>",
    ):
        message = in_tools(wrong + call(""))
        assert calls_of(message) == [{"name": "f", "arguments": {}}]
        assert message.errors[0].text == wrong
    # An index that doesn't fit is reported, and the call kept.
    message = in_tools(call("", index=7))
    assert calls_of(message) == [{"name": "f", "arguments": {}}]
    assert "has the index '7'" in message.errors[0].message


def test_parts_out_of_order_and_text_between_them() -> None:
    message = xtml("r<|close|>think<|sep|> \n stray <|open|>x<|sep|><|open|>response<|sep|>a<|close|>response<|sep|>")
    assert (message.reasoning, message.text) == ("r", " \n stray <|open|>x<|sep|>a")
    assert [error.kind for error in message.errors] == ["malformed", "truncated"]
    message = xtml("r<|close|>message<|sep|><|end_of_msg|>")
    assert (message.reasoning, message.text) == ("r", None)
    assert message.errors[0].message == "The message was closed inside the reasoning."
    message = xtml("r<|end_of_msg|>tail")
    assert (message.reasoning, message.text) == ("r", None)
    assert [error.text for error in message.errors] == ["", "tail"]
    message = xtml("<|open|>response<|sep|>a", thinking=False)
    assert (message.text, [error.kind for error in message.errors]) == ("a", ["truncated"])
    message = xtml("\n<|open|>think<|sep|>r<|close|>think<|sep|>", thinking=False)
    assert (message.reasoning, message.text) == ("r", "\n")


def test_no_call_begins_inside_a_reasoning_or_a_response() -> None:
    tools = "<|open|>tools<|sep|>" + call(argument("a", "number", "1")) + "<|close|>tools<|sep|>"
    for thinking in (False, True):
        message = xtml("x" + tools, thinking=thinking)
        assert message.tool_calls == ()
        assert (message.reasoning if thinking else message.text) == "x" + tools


def test_ids_tell_a_marker_from_text_that_quotes_it(tokenizer: Tokenizer) -> None:
    closing = tokenizer.encode("<|close|>response<|sep|><|open|>tools<|sep|>" + call(""))
    end = tokenizer.encode("<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>", allow_special=True)
    message = collect(feed(XtmlFormat().parser(tokenizer, thinking=False), [*closing, *end]))
    assert message.text == "<|close|>response<|sep|><|open|>tools<|sep|>" + call("")
    assert (message.tool_calls, message.errors) == ((), ())
    # A control token that belongs to no tag is shown, and reported.
    answer = [*tokenizer.encode("a"), tokenizer.control_id("<|sep|>"), tokenizer.control_id("[PAD]"), *end]
    message = collect(feed(XtmlFormat().parser(tokenizer, thinking=False), answer))
    assert message.text == "a<|sep|>"
    assert [error.text for error in message.errors] == ["", "[PAD]"]


def test_either_stop_id_ends_the_answer(tokenizer: Tokenizer, k2_tokenizer: Tokenizer) -> None:
    body = tokenizer.encode("a<|close|>response<|sep|><|close|>message<|sep|>", allow_special=True)
    for stop_id in XtmlFormat().stop_ids(tokenizer):
        message = collect(feed(XtmlFormat().parser(tokenizer, thinking=False), [*body, stop_id]))
        assert (message.text, message.errors) == ("a", ())
    for stop_id in K2Format().stop_ids(k2_tokenizer):
        message = collect(feed(K2Format().parser(k2_tokenizer), [*k2_tokenizer.encode("a <"), stop_id]))
        assert (message.text, message.errors) == ("a <", ())


def test_stop_strings_in_a_chat_answer(tokenizer: Tokenizer) -> None:
    answer = tokenizer.encode("r<|close|>think<|sep|><|open|>response<|sep|>one STOP two", allow_special=True)
    for cuts in ([], every_cut(answer)):
        detokenizer, parser = StreamingDetokenizer(tokenizer, stop="STOP"), XtmlFormat().parser(tokenizer)
        deltas: list[Any] = []
        begin = 0
        for end in [*cuts, len(answer)]:
            deltas += parser.push_pieces(detokenizer.push_pieces(answer[begin:end]))
            begin = end
        deltas += parser.push_pieces(detokenizer.finish_pieces()) + parser.finish()
        message = collect(deltas)
        assert (message.reasoning, message.text) == ("r", "one ")


def k2(text: str, *, truncated: bool = False) -> ParsedMessage:
    once = feed(K2Format().parser(), text, truncated=truncated)
    assert merged(feed(K2Format().parser(), text, every_cut(text), truncated=truncated)) == merged(once)
    return check_deltas(once)


SECTION = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
K2_CALL = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{}<|tool_call_end|>"


@pytest.mark.parametrize(
    ("call_id", "kept", "name"),
    [
        ("functions.f:0", "functions.f:0", "f"),
        (" functions.f:0\n", "functions.f:0", "f"),
        ("functions.a.b-c:12", "functions.a.b-c:12", "a.b-c"),
        ("f", "f", "f"),
        ("functions.\nf:0", "functions.\nf:0", "f"),
        ("functions.f:x", "functions.f:x", "f:x"),
    ],
)
def test_k2_ids_are_kept_and_give_the_name(call_id: str, kept: str, name: str) -> None:
    message = k2("t" + SECTION.format(K2_CALL.format(call_id, "{}")))
    assert [(c.id, c.name, c.arguments) for c in message.tool_calls] == [(kept, name, {})]
    assert message.errors == ()


def test_k2_arguments() -> None:
    message = k2(
        SECTION.format(K2_CALL.format("functions.f:0", ' {"a":\n 1 } \n') + K2_CALL.format("functions.f:1", " "))
    )
    assert [(c.arguments_text, c.arguments) for c in message.tool_calls] == [('{"a":\n 1 }', {"a": 1}), ("{}", {})]
    message = k2(SECTION.format(K2_CALL.format("functions.f:0", "[1]") + K2_CALL.format("functions.f:1", '{"a":')))
    assert [(c.arguments_text, c.arguments) for c in message.tool_calls] == [("[1]", None), ('{"a":', None)]
    assert [error.kind for error in message.errors] == ["malformed", "malformed"]


def test_k2_text_around_sections() -> None:
    section = SECTION.format(K2_CALL.format("functions.f:0", "{}"))
    message = k2(f"before {section}\n{section} after {section} \n")
    assert message.text == "before  after "
    assert [call.id for call in message.tool_calls] == ["functions.f:0"] * 3


def test_k2_broken_sections() -> None:
    begin, call_begin, arguments = "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
    good = K2_CALL.format("functions.g:1", "{}")
    for wrong, marks in (
        ("so: ", ["so: "]),
        (f"{call_begin}functions.f:0{arguments}{{", [f"{call_begin}functions.f:0{arguments}{{"]),
        (f"{call_begin}functions.f:0<|tool_call_end|>", [f"{call_begin}functions.f:0<|tool_call_end|>"]),
        (K2_CALL.format(" ", "{}"), [K2_CALL.format(" ", "{}")]),
    ):
        message = k2(SECTION.format(wrong + good))
        assert [call.id for call in message.tool_calls] == ["functions.g:1"]
        assert [error.text for error in message.errors] == marks
    message = k2(f"{begin}{good}<|im_end|>")
    assert [call.id for call in message.tool_calls] == ["functions.g:1"]
    assert [error.kind for error in message.errors] == ["malformed"]
    message = k2(f"{call_begin}functions.f:0{arguments}{{}}<|tool_call_end|>")
    assert message.tool_calls == ()
    assert message.text == f"{call_begin}functions.f:0{arguments}{{}}<|tool_call_end|>"


def test_k2_markers_begun_at_the_end() -> None:
    assert k2("a <|tool").text == "a <|tool"
    message = k2("a <|tool", truncated=True)
    assert (message.text, message.errors) == (
        "a ",
        (ErrorMark("truncated", "The answer ended inside the content.", "<|tool"),),
    )


def test_k2_thinking(k2_tokenizer: Tokenizer) -> None:
    def parse(answer: str | list[int]) -> ParsedMessage:
        return collect(feed(K2Format(THINKING).parser(k2_tokenizer), answer))

    section = SECTION.format(K2_CALL.format("functions.f:0", "{}"))
    assert found(parse("\n<think>a</think>b"))[:2] == ("a", "b")
    assert found(parse("no thought"))[:2] == (None, "no thought")
    assert found(parse(f"<think>a</think>b{section}")) == ("a", "b", [("functions.f:0", "f", {})])
    # Calls begun inside the reasoning: control tokens mean it, text may only quote it.
    message = parse(k2_tokenizer.encode(f"<think>a{section}", allow_special=True))
    assert found(message) == ("a", None, [("functions.f:0", "f", {})])
    assert [error.kind for error in message.errors] == ["malformed"]
    assert parse(f"<think>a{section}</think>b").tool_calls == ()


def test_deltas_come_as_soon_as_they_can() -> None:
    parser = XtmlFormat().parser()
    assert parser.push("a <") == [ReasoningDelta("a ")]
    assert parser.push("b") == [ReasoningDelta("<b")]
    assert parser.push("<|close|>think<|sep|><|open|>response<|sep|>hi<|close|>") == [TextDelta("hi")]


@pytest.mark.parametrize(
    "text",
    ["a" * 10**6, "<|open|>" * 20000, '<|open|>call a="' * 10000, "<|close|>" * 20000, "<" * 10**5, " \n" * 10**5],
    ids=["text", "opens", "attributes", "closes", "lesser", "blanks"],
)
@pytest.mark.parametrize("start", ["", "<|close|>think<|sep|>", "<|close|>think<|sep|><|open|>tools<|sep|>"])
def test_long_wrong_answers_take_linear_time(start: str, text: str) -> None:
    began = time.perf_counter()
    check_deltas(feed(XtmlFormat().parser(), start + text))
    # Quadratic work on these would take minutes.
    assert time.perf_counter() - began < 10


def test_misuse_is_refused(tokenizer: Tokenizer) -> None:
    parser = XtmlFormat().parser()
    with pytest.raises(ValueError, match="push_ids needs a parser made with a tokenizer"):
        parser.push_ids([1])
    parser.push("a")
    parser.finish()
    with pytest.raises(ValueError, match=r"finish\(\) has been called"):
        parser.push("b")
    with pytest.raises(ValueError, match=r"finish\(\) has been called"):
        parser.finish()
    parser = XtmlFormat().parser(tokenizer)
    parser.push_ids([1])
    with pytest.raises(ValueError, match="fed with tokens; it can't be fed with text as well"):
        parser.push("a")
    with pytest.raises(MessageError, match="thinking is True, but style 'instruct_0905' never thinks"):
        K2Format().parser(thinking=True)
