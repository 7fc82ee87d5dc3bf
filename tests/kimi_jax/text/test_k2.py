"""Prompts in the K2 format: the golden ones of three template versions, and no way for text to become structure."""

import json
import random

import pytest

from kimi_jax.text import K2Format, MessageError, Segment, Tokenizer
from kimi_jax.text.k2 import BASE, INSTRUCT_0905, THINKING, K2Style
from tests.kimi_jax.text.golden import load, name_of
from tests.kimi_jax.text.streams import K2_MARKERS, OTHER_MARKERS, SNIPPETS, XTML_MARKERS, random_answer, random_text

STYLES = {"kimi_k2_base": BASE, "kimi_k2_instruct_0905": INSTRUCT_0905, "kimi_k2_thinking": THINKING}
CASES = [
    pytest.param(case, version, id=f"{case['id']}-{version}")
    for case in load("chat-k2", "cases.json")
    for version in case["expected_text"]
]
NASTY = (*SNIPPETS, *K2_MARKERS, *OTHER_MARKERS, *XTML_MARKERS, "<think>", "</think>", "<|reserved_token_2100|>")


def render(case: dict, style: K2Style) -> list[Segment]:
    options = dict(case["input"])
    return K2Format(style).render(options.pop("messages"), **options)


def text_of(segments: list[Segment]) -> str:
    return "".join(segment.text for segment in segments)


@pytest.mark.parametrize(("case", "version"), CASES)
def test_golden_prompts(k2_tokenizer: Tokenizer, case: dict, version: str) -> None:
    segments = render(case, STYLES[version])
    assert text_of(segments) == case["expected_text"][version]
    ids = k2_tokenizer.encode_segments(segments)
    assert k2_tokenizer.decode(ids) == case["expected_text"][version]
    if version != "kimi_k2_thinking" and "literal" not in case["id"]:
        # Where no text spells a marker, the whole prompt encoded at once (what the vendor does) has the same ids.
        assert ids == k2_tokenizer.encode(case["expected_text"][version], allow_special=True)


@pytest.mark.parametrize("case", load("chat-k2", "cases.json"), ids=name_of)
def test_versions_without_tool_calls_refuse_them(case: dict) -> None:
    if "kimi_k2_base" not in case["expected_text"]:
        with pytest.raises(MessageError, match=r"has tool calls or a tool result, for which style 'base' has no form"):
            render(case, BASE)


def test_the_plain_layout_in_ids(k2_tokenizer: Tokenizer) -> None:
    word = k2_tokenizer.encode
    ids = k2_tokenizer.encode_segments(
        K2Format().render([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}])
    )
    system = [2010, *word("system"), 2017, *word("s"), 2002]
    user = [2003, *word("user"), 2017, *word("u"), 2002]
    assert ids == [*system, *user, 2004, *word("assistant"), 2017]


def structure(tokenizer: Tokenizer, text: str) -> list[int]:
    call = {"id": text, "function": {"name": "f", "arguments": {text: text}}}
    broken = {"id": f"b{text}", "function": {"name": "g", "arguments": "{" + text}}
    messages = [
        {"role": "system", "content": text, "name": text},
        {"role": "user", "content": [{"type": "text", "text": text}, {"type": "text", "text": text}], "name": text},
        {"role": "assistant", "content": text, "reasoning_content": text, "name": text, "tool_calls": [call, broken]},
        {"role": "tool", "tool_call_id": text, "content": text, "name": text},
        {"role": "developer", "content": text},
    ]
    tools = [{"function": {"name": text, "description": text, "parameters": {text: text}}}]
    segments = K2Format().render(messages, tools=tools)
    ids = tokenizer.encode_segments(segments)
    assert tokenizer.decode(ids) == text_of(segments)
    return [token_id for token_id in ids if token_id >= tokenizer.num_ranks]


def test_control_tokens_depend_on_the_structure_only(k2_tokenizer: Tokenizer) -> None:
    want = structure(k2_tokenizer, "plain")
    assert want.count(2017) == want.count(2002) + 1 == 7
    for marker in (*K2_MARKERS, *OTHER_MARKERS, *(token.name for token in k2_tokenizer.control_tokens[::5])):
        assert structure(k2_tokenizer, marker) == want
    rng = random.Random(7)
    for _ in range(60):
        assert structure(k2_tokenizer, "x" + random_text(rng, NASTY, 20)) == want


def test_random_conversations_of_any_kind_render(k2_tokenizer: Tokenizer) -> None:
    rng = random.Random(8)
    for _ in range(60):
        messages = [{"role": "user", "content": random_text(rng, NASTY)}, random_answer(rng, NASTY)]
        for style in (INSTRUCT_0905, THINKING):
            segments = K2Format(style).render(messages)
            assert k2_tokenizer.decode(k2_tokenizer.encode_segments(segments)) == text_of(segments)


def test_the_loss_mask_covers_what_the_assistant_said() -> None:
    answer = {"role": "assistant", "content": "hi", "tool_calls": [{"id": "functions.f:0", "function": {"name": "f"}}]}
    result = {"role": "tool", "content": "r", "tool_call_id": "functions.f:0"}
    segments = K2Format().render([{"role": "user", "content": "u"}, answer, result])
    said = text_of([segment for segment in segments if segment.assistant])
    assert said == (
        "hi<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|><|im_end|>"
    )


def test_only_reasoning_behind_the_last_plain_answer_is_kept() -> None:
    call = [{"id": "functions.f:0", "function": {"name": "f"}}]
    result = {"role": "tool", "content": "r", "tool_call_id": "functions.f:0"}
    messages = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "", "reasoning_content": "one", "tool_calls": call},
        result,
        {"role": "assistant", "content": "plain", "reasoning_content": "two"},
        {"role": "user", "content": "v"},
        {"role": "assistant", "content": "", "reasoning_content": "three", "tool_calls": call},
        result,
    ]
    text = text_of(K2Format(THINKING).render(messages))
    assert text.count("<think></think>") == 2
    assert "<think>three</think>" in text
    assert "think>" not in text_of(K2Format().render(messages))


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"role": "tool", "content": "x"}, r"messages\[0\].tool_call_id is None; in the K2 format a tool result needs"),
        (
            {"role": "assistant", "tool_calls": [{"name": "f"}]},
            r"messages\[0\].tool_calls\[0\].id is None; .*functions.f:0",
        ),
        ({"role": "user", "content": [{"type": "image"}]}, r"messages\[0\].content has an image; models of the K2"),
        (
            {"role": "system", "tools": [{"function": {"name": "f"}}]},
            r"messages\[0\].tools: the K2 format declares tools once",
        ),
    ],
)
def test_messages_without_a_form_are_refused(message: dict, error: str) -> None:
    with pytest.raises(MessageError, match=error):
        K2Format().render([message])


def test_stop_ids_are_both_ends(k2_tokenizer: Tokenizer) -> None:
    assert K2Format().stop_ids(k2_tokenizer) == (2002, 2001)


def test_messages_are_not_changed() -> None:
    messages = [{"role": "user", "content": "u"}, random_answer(random.Random(0), SNIPPETS)]
    before = json.dumps(messages)
    K2Format().render(messages)
    assert json.dumps(messages) == before
    with pytest.raises(MessageError, match="messages is empty"):
        K2Format().render([])
