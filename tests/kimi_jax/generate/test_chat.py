"""Conversations in, messages out: what is written into a prompt, and what is read from an answer."""

import json
import random
from typing import Any

import numpy as np
import pytest

from kimi_jax import ChatReply, Kimi
from kimi_jax.text import (
    ErrorMark,
    MessageError,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    collect,
)
from tests import golden_data
from tests.kimi_jax.generate import tiny
from tests.kimi_jax.generate.scripted import Actor
from tests.kimi_jax.text.streams import (
    K2_MARKERS,
    OTHER_MARKERS,
    SNIPPETS,
    XTML_MARKERS,
    check_deltas,
    random_answer,
    random_text,
)

USER = [{"role": "user", "content": "What's the weather in 北京?"}]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
]
XTML_ANSWER = (
    "I should look it up.<|close|>think<|sep|><|open|>response<|sep|>One moment 👋<|close|>response<|sep|>"
    '<|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>北京<|close|>argument<|sep|>'
    '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
)
K2_ANSWER = (
    "One moment 👋<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "北京", "days": 3}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
)
ANSWERS = {"kimi_k3": XTML_ANSWER, "kimi_linear": K2_ANSWER}


def answered(actor: Actor, family: str, answer: str | None = None, **options: Any) -> tuple[Kimi, list[int]]:
    """The model that gives this answer to USER."""
    model = actor.speaks(family)
    prompt = model.chat_prompt(USER, **options)
    ids = model.tokenizer.encode(ANSWERS[family] if answer is None else answer, allow_special=True)
    return actor.told([prompt] * actor.ROWS, [ids] * actor.ROWS), ids


@pytest.mark.parametrize("family", ["kimi_k3", "kimi_linear"])
def test_answer_in_its_parts(actor: Actor, family: str) -> None:
    model, ids = answered(actor, family, tools=TOOLS)
    reply = model.chat(USER, tools=TOOLS)
    assert isinstance(reply, ChatReply)
    assert reply.text == "One moment 👋"
    assert reply.reasoning == ("I should look it up." if family == "kimi_k3" else None)
    assert [(call.id, call.name, call.arguments) for call in reply.tool_calls] == [
        ("functions.weather:0", "weather", {"city": "北京", "days": 3})
    ]
    assert reply.errors == ()
    assert reply.finish_reason == "stop"
    assert reply.generation.token_ids == ids
    assert reply.generation.stopped_by == tiny.END

    stream = model.chat_stream(USER, tools=TOOLS)
    with pytest.raises(ValueError, match="The answer hasn't ended"):
        _ = stream.reply
    deltas = list(stream)
    assert check_deltas(deltas) == reply.message == stream.reply.message
    kinds = {type(delta) for delta in deltas}
    assert kinds >= {TextDelta, ToolCallStart, ToolCallArguments, ToolCallEnd}
    assert (ReasoningDelta in kinds) == (family == "kimi_k3")
    assert len([delta for delta in deltas if isinstance(delta, TextDelta)]) > 1


@pytest.mark.parametrize("family", ["kimi_k3", "kimi_linear"])
def test_conversation_goes_on(actor: Actor, family: str) -> None:
    model, _ = answered(actor, family, tools=TOOLS)
    reply = model.chat(USER, tools=TOOLS)
    history = [*USER, reply.to_message()]
    history.append({"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "sunny"})
    written = model.tokenizer.decode(model.chat_prompt(history, tools=TOOLS))
    for part in (
        "One moment 👋",
        "weather",
        "北京",
        "sunny",
        *(["I should look it up."] if family == "kimi_k3" else []),
    ):
        assert part in written


def test_options_reach_the_prompt(actor: Actor) -> None:
    model = actor.speaks("kimi_k3")
    texts = {
        "plain": {},
        "quiet": {"thinking": False},
        "low": {"effort": "low"},
        "forced": {"tools": TOOLS, "tool_choice": "required"},
        "json": {"response_format": {"type": "json_object"}},
    }
    prompts = {name: model.tokenizer.decode(model.chat_prompt(USER, **options)) for name, options in texts.items()}
    assert prompts["plain"].endswith("<|open|>think<|sep|>")
    assert prompts["quiet"].endswith("<|open|>response<|sep|>")
    assert "thinking_effort=low" in prompts["low"]
    assert "tool_choice=required" in prompts["forced"]
    assert "response_format=json_object" in prompts["json"]
    with pytest.raises(MessageError, match="thinking_effort is 'medium'; legal values are low, high, max"):
        model.chat(USER, effort="medium")
    assert "thinking_effort=medium" in model.tokenizer.decode(
        model.chat_prompt(USER, effort="medium", vendor_compatible=True)
    )
    with pytest.raises(MessageError, match="thinking_effort is 'low', which the K2 format has no form for"):
        actor.speaks("kimi_linear").chat(USER, effort="low")


def test_without_thinking_the_answer_is_the_response(actor: Actor) -> None:
    text = "Fine.<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
    model, _ = answered(actor, "kimi_k3", text, thinking=False)
    reply = model.chat(USER, thinking=False)
    assert (reply.reasoning, reply.text, reply.errors) == (None, "Fine.", ())


def test_several_conversations(actor: Actor) -> None:
    model = actor.speaks("kimi_linear")
    conversations = [[{"role": "user", "content": text}] for text in ("a", "bcd " * 5, "e", "f")]
    prompts = [model.chat_prompt(conversation) for conversation in conversations]
    texts = ["one", "two 👋 " * 20, "", "four"]
    model = actor.told(prompts, [[*model.tokenizer.encode(text), tiny.END] for text in texts])
    replies = model.chat(conversations)
    assert [reply.text for reply in replies] == [text or None for text in texts]
    stream = model.chat_stream(conversations)
    found: list[list[Any]] = [[] for _ in texts]
    for index, delta in stream:
        found[index].append(delta)
    assert [collect(deltas) for deltas in found] == [reply.message for reply in stream.replies]
    assert [reply.message for reply in stream.replies] == [reply.message for reply in replies]
    with pytest.raises(ValueError, match="There are 4 answers: ask for replies"):
        _ = stream.reply


@pytest.mark.parametrize("family", ["kimi_k3", "kimi_linear"])
def test_limit_leaves_a_mark_wherever_it_falls(actor: Actor, family: str) -> None:
    model, ids = answered(actor, family, tools=TOOLS)
    whole = model.chat(USER, tools=TOOLS)
    # Behind its closing tag a message is complete, whether or not the end marker comes.
    complete = len(ids) - 1 if family == "kimi_k3" else len(ids)
    for count in range(1, len(ids)):
        reply = model.chat(USER, count, tools=TOOLS)
        assert reply.finish_reason == "length"
        assert [mark.kind for mark in reply.errors] == (["truncated"] if count < complete else [])
        assert (whole.text or "").startswith((reply.text or "").rstrip("\ufffd"))
        assert (whole.reasoning or "").startswith(reply.reasoning or "")
        assert reply.tool_calls in ((), whole.tool_calls)


@pytest.mark.parametrize(
    ("family", "stop", "reasoning", "text"),
    [
        ("kimi_k3", "moment", "I should look it up.", "One "),
        ("kimi_k3", "👋", "I should look it up.", "One moment "),
        ("kimi_k3", "look", "I should ", None),
        ("kimi_linear", "moment", None, "One "),
    ],
)
def test_stop_string_that_was_asked_for_is_no_fault(
    actor: Actor, family: str, stop: str, reasoning: str | None, text: str | None
) -> None:
    model, ids = answered(actor, family, tools=TOOLS)
    reply = model.chat(USER, tools=TOOLS, stop=stop)
    assert (reply.reasoning, reply.text, reply.tool_calls) == (reasoning, text, ())
    assert (reply.finish_reason, reply.generation.stopped_by, reply.errors) == ("stop", stop, ())
    # A token that was asked for is none either.
    token = ids[len(reply.generation.token_ids) - 1]
    reply = model.chat(USER, tools=TOOLS, stop_token_ids=[token])
    assert (reply.finish_reason, reply.generation.stopped_by, reply.errors) == ("stop", token, ())


@pytest.mark.parametrize("family", ["kimi_k3", "kimi_linear"])
def test_stop_string_inside_a_tool_call_leaves_the_call_out(actor: Actor, family: str) -> None:
    model, _ = answered(actor, family, tools=TOOLS)
    for stop in ("北京", "京"):
        reply = model.chat(USER, tools=TOOLS, stop=stop)
        assert (reply.text, reply.tool_calls, reply.generation.stopped_by) == ("One moment 👋", (), stop)
        [mark] = reply.errors
        assert mark.kind == "truncated"
        assert "weather" in mark.text
        assert stop not in mark.text


@pytest.mark.parametrize("family", ["kimi_k3", "kimi_linear"])
def test_stop_strings_are_not_looked_for_in_the_structure(actor: Actor, family: str) -> None:
    """Names of tags, tools and attributes, ids of calls, markers, and what only a tag between makes adjacent."""
    model, ids = answered(actor, family, tools=TOOLS)
    words = ["response", "think", "message", "tools", "call", "argument", "weather", "index", "functions", ":0"]
    words += ["<|", "|>", "👋tools", "up.think", 'type="', "👋functions"]
    reply = model.chat(USER, tools=TOOLS, stop=words)
    assert reply.generation.token_ids == ids
    assert reply.message == model.chat(USER, tools=TOOLS).message
    stream = model.chat_stream(USER, tools=TOOLS, stop=words)
    assert collect(stream) == reply.message


@pytest.mark.parametrize(
    "arguments",
    ["[1, 2]", "3", "null", '"text"', "{bad", '{"a": NaN}', '["\\ud800"]', "", "{}"],
    ids=lambda text: text[:10] or "nothing",
)
@pytest.mark.parametrize("family", ["kimi_k3", "kimi_linear"])
def test_wrong_arguments_leave_a_conversation_that_goes_on(actor: Actor, family: str, arguments: str) -> None:
    head, tail = {
        "kimi_k3": (
            "<|close|>think<|sep|><|open|>response<|sep|>Hm.<|close|>response<|sep|><|open|>tools<|sep|>"
            '<|open|>call tool="weather" index="1"<|sep|><|open|>json type="object"<|sep|>',
            "<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>",
        ),
        "kimi_linear": (
            "Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>",
            "<|tool_call_end|><|tool_calls_section_end|><|im_end|>",
        ),
    }[family]
    model, _ = answered(actor, family, head + arguments + tail, tools=TOOLS)
    reply = model.chat(USER, tools=TOOLS)
    assert reply.text == "Hm."
    assert len(reply.tool_calls) == 1
    result = {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "name": "weather", "content": "wrong arguments"}
    written = model.tokenizer.decode(model.chat_prompt([*USER, reply.to_message(), result, *USER], tools=TOOLS))
    assert "wrong arguments" in written
    # A conversation has no form for arguments that are JSON, but no object.
    kept = arguments not in ("[1, 2]", "3", "null", '"text"')
    assert ("tool_calls" in reply.to_message()) == kept == bool(reply.message.answerable_calls)


def test_unknown_option_lists_what_there_is(actor: Actor) -> None:
    for call in (actor.model.chat, actor.model.chat_stream, actor.model.chat_prompt):
        with pytest.raises(
            TypeError, match=r"'efort' is neither an option of a chat \(tools, .*parameter \(temperature"
        ):
            call(USER, efort="low")


def test_interrupt_ends_the_stream_with_the_next_tokens(actor: Actor) -> None:
    """Even when nothing is shown for a long time, as while the value of an argument isn't complete."""
    value = json.dumps(list(range(300)))
    text = XTML_ANSWER.replace('type="number"<|sep|>3', f'type="array"<|sep|>{value}')
    model, ids = answered(actor, "kimi_k3", text, tools=TOOLS)
    stream = model.chat_stream(USER, tools=TOOLS)
    for delta in stream:
        if isinstance(delta, ToolCallArguments):
            stream.interrupt()
    assert stream.reply.finish_reason == "interrupted"
    assert stream.reply.text == "One moment 👋"
    assert len(stream.reply.generation.token_ids) < len(ids) - 200
    assert [mark.kind for mark in stream.reply.errors] == ["truncated"]


@pytest.mark.parametrize("family", ["kimi_k3", "kimi_linear"])
def test_closed_stream_has_what_there_is(actor: Actor, family: str) -> None:
    """Interrupted after any number of deltas: a beginning of the answer, which can go into the history."""
    model, _ = answered(actor, family, tools=TOOLS)
    whole = model.chat(USER, tools=TOOLS)
    for count in (0, 1, 4, 12, 30):
        stream = model.chat_stream(USER, tools=TOOLS)
        for _, _delta in zip(range(count), stream, strict=False):
            pass
        stream.close()
        assert list(stream) == []
        reply = stream.reply
        assert (whole.text or "").startswith(reply.text or "")
        assert (whole.reasoning or "").startswith(reply.reasoning or "")
        if reply.finish_reason == "interrupted":
            assert any(mark.kind == "truncated" for mark in reply.errors)
            assert reply.generation.timings is None
        model.chat_prompt([*USER, reply.to_message(), *USER], tools=TOOLS)


# What is refused


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "text", "text": "see"}, {"type": "image", "image": "x.png"}],
        [{"type": "image_url", "image_url": {"url": "data:"}}],
    ],
)
@pytest.mark.parametrize("family", ["kimi_k3", "kimi_linear"])
def test_images_are_refused(actor: Actor, family: str, content: list[dict]) -> None:
    model = actor.speaks(family)
    messages = [*USER, {"role": "assistant", "content": "ok"}, {"role": "user", "content": content}]
    for call in (model.chat, model.chat_stream, model.chat_prompt):
        with pytest.raises(MessageError, match=r"messages\[2\].content has an image, but this version reads text only"):
            call(messages)
    for images, words in ((["x.png"], r"images is \['x.png'\]"), (5, "images is 5"), (b"x", "images is b'x'")):
        with pytest.raises(MessageError, match=f"{words}, but this version reads text only"):
            model.chat(USER, images=images)
    assert model.chat_prompt(USER, images=[]) == model.chat_prompt(USER, images=None)
    assert model.chat_prompt(USER)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages is empty"),
        ("hello", "messages is 'hello'; legal is a list"),
        ([{"role": "robot", "content": "x"}], r"messages\[0\].role is 'robot'"),
        ([{"role": "user", "content": "a\ud800"}], r"lone surrogate U\+D800"),
        ([{"role": "user", "content": 7}], r"messages\[0\].content is 7"),
        ([[{"role": "user", "content": "x"}], []], "messages is empty"),
    ],
)
def test_illegal_messages(actor: Actor, messages: Any, words: str) -> None:
    for family in ("kimi_k3", "kimi_linear"):
        with pytest.raises(MessageError, match=words):
            actor.speaks(family).chat(messages)


def test_model_without_a_tokenizer_says_what_is_missing() -> None:
    model = golden_data.model("kimi-linear-tiny")
    missing = r"This model has no tokenizer: \S*kimi-linear-tiny/tiktoken.model is missing"
    for call in (
        lambda: model.generate("hello"),
        lambda: model.stream(["hello"]),
        lambda: model.generate([1], stop="x"),
        lambda: model.tokenizer,
    ):
        with pytest.raises(ValueError, match=missing):
            call()
    with pytest.raises(ValueError, match=r"A chat needs a tokenizer.*tiktoken.model is missing"):
        model.chat(USER)


def test_tokenizer_of_another_model(actor: Actor) -> None:
    tokenizer = actor.speaks("kimi_k3").tokenizer
    other = golden_data.model("kimi-linear-tiny")
    mixed = Kimi(other.decoder, other.params, np.float32, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="has 2256 token ids, its config says 320"):
        mixed.generate("hello")
    wrong = Kimi(actor.model.decoder, {}, np.float32, tokenizer=tokenizer)
    with pytest.raises(ValueError, match=r"This model can't chat: .*no control token '<\|im_system\|>'"):
        wrong.chat(USER)


# Text of any kind


HOSTILE = (*SNIPPETS, *XTML_MARKERS, *K2_MARKERS, *OTHER_MARKERS, "👋🏽", "\u202e", "\x7f", "ß" * 50)


def structure(model: Kimi, ids: list[int]) -> list[str]:
    """The control tokens of a prompt."""
    return [part.name for part in model.tokenizer.parts(ids) if not isinstance(part, bytes)]


@pytest.mark.parametrize("family", ["kimi_k3", "kimi_linear"])
def test_text_never_becomes_structure(actor: Actor, family: str) -> None:
    """The control tokens of a prompt depend on the form of its messages, not on what they say; fuzzed."""
    model = actor.speaks(family)
    rng = random.Random(1)
    for _ in range(60):
        answer = random_answer(rng, HOSTILE)
        calls = answer.get("tool_calls", [])
        conversation = [
            {"role": "system", "content": random_text(rng, HOSTILE)},
            {"role": "user", "content": random_text(rng, HOSTILE, 40), "name": random_text(rng, HOSTILE) or "n"},
            answer,
            *({"role": "tool", "tool_call_id": call["id"], "content": random_text(rng, HOSTILE, 40)} for call in calls),
            {"role": "user", "content": random_text(rng, HOSTILE, 40)},
        ]
        tools = [{"type": "function", "function": {"name": "f", "description": random_text(rng, HOSTILE, 20)}}]
        harmless = json.loads(json.dumps(conversation))
        for message in harmless:
            message["content"] = "x" if message["content"] else ""
            if message.get("reasoning_content", "").strip():
                message["reasoning_content"] = "x"
            if "name" in message:
                message["name"] = "x"
        bland = [{"type": "function", "function": {"name": "f", "description": "x"}}]
        ids = model.chat_prompt(conversation, tools=tools)
        assert structure(model, ids) == structure(model, model.chat_prompt(harmless, tools=bland))
        written = model.tokenizer.decode(ids)
        assert conversation[-1]["content"] in written


@pytest.mark.parametrize("family", ["kimi_k3", "kimi_linear"])
def test_hundred_kilobytes(actor: Actor, family: str) -> None:
    model = actor.speaks(family)
    rng = random.Random(2)
    for text in ("a" * 100_000, "".join(rng.choices(HOSTILE, k=15_000))):
        assert len(text.encode()) >= 100_000
        messages = [{"role": "user", "content": text}]
        ids = model.chat_prompt(messages)
        assert text in model.tokenizer.decode(ids)
        assert structure(model, ids) == structure(model, model.chat_prompt(USER))
        if len(ids) > tiny.POSITIONS:
            with pytest.raises(ValueError, match=r"has \d+ tokens, more than max_position_embeddings=16384"):
                model.chat(messages)


def test_control_tokens_in_a_plain_prompt_are_text(actor: Actor) -> None:
    model = actor.speaks("kimi_k3")
    text = "".join((*XTML_MARKERS, *OTHER_MARKERS))
    found = actor.told([[0] * len(model.tokenizer.encode(text))], [[tiny.EOS]]).generate(text, 1)
    assert found.prompt_tokens == len(model.tokenizer.encode(text, allow_special=False))
    assert found.prompt_tokens > len(model.tokenizer.encode(text, allow_special=True))


@pytest.mark.parametrize("family", ["kimi_k3", "kimi_linear"])
def test_whatever_the_model_says_is_a_reply(actor: Actor, family: str) -> None:
    """Chance in place of a model, markers included: no exception out of a stream, and a message for the history."""
    model = actor.speaks(family)
    logits = np.zeros(tiny.VOCABULARY, np.float32)
    logits[tiny.RANKS : tiny.RANKS + 20] = 4.0
    actor.constant(logits)
    for seed in range(40):
        stream = model.chat_stream(USER, 60, temperature=1.0, seed=seed)
        deltas = list(stream)
        assert check_deltas(deltas) == stream.reply.message
        assert all(isinstance(mark, ErrorMark) for mark in stream.reply.errors)
        model.chat_prompt([*USER, stream.reply.to_message(), *USER])
