"""Bad conversations are refused before anything is rendered; the sentence names field, value and what is legal."""

import pytest

from kimi_jax.text import K2Format, MessageError, XtmlFormat, chat_format
from kimi_jax.text.messages import DEEPEST, Image, parse_json, read_messages, read_tools

USER = {"role": "user", "content": "x"}


def assistant(**call: object) -> list[object]:
    return [{"role": "assistant", "content": None, "tool_calls": [call]}]


def nested(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = [value]
    return value


BAD_MESSAGES = [
    ("hello", "messages is 'hello'; legal is a list"),
    (USER, "messages is {.*}; legal is a list"),
    (None, "messages is None; legal is a list"),
    (["hello"], r"messages\[0\] is 'hello'; legal is a mapping"),
    ([USER, 3], r"messages\[1\] is 3; legal is a mapping"),
    ([{"content": "x"}], r"messages\[0\].role is missing; legal roles are system, developer, user, assistant, tool"),
    ([{"role": "bot", "content": "x"}], r"messages\[0\].role is 'bot'; legal is one of system, developer, user"),
    ([{"role": 3, "content": "x"}], r"messages\[0\].role is 3; legal is one of"),
    ([{"role": ["user"], "content": "x"}], r"messages\[0\].role is \['user'\]; legal is one of"),
    ([{"role": "user"}], r"messages\[0\].content is missing; a message of role 'user' needs text"),
    ([{"role": "user", "content": None}], r"messages\[0\].content is None; a message of role 'user' needs text"),
    ([{"role": "developer"}], r"messages\[0\].content is missing; a message of role 'developer' needs text"),
    ([{"role": "tool", "name": "f"}], r"messages\[0\].content is missing; a message of role 'tool' needs text"),
    ([{"role": "assistant"}], r"messages\[0\].content is missing; a message of role 'assistant' needs text"),
    ([{"role": "user", "content": 3}], r"messages\[0\].content is 3; legal is text or a list of parts"),
    ([{"role": "user", "content": b"x"}], r"messages\[0\].content is b'x'; legal is text or a list of parts"),
    ([{"role": "user", "content": {"type": "text"}}], r"messages\[0\].content is {.*}; legal is text or a list"),
    ([{"role": "user", "content": ["x"]}], r"messages\[0\].content\[0\] is 'x'; legal is a part of type"),
    ([{"role": "user", "content": [{"text": "x"}]}], r"messages\[0\].content\[0\] is .*; legal is a part of type"),
    ([{"role": "user", "content": [{"type": "audio"}]}], r"messages\[0\].content\[0\] is .*; legal is a part of type"),
    ([{"role": "user", "content": [{"type": "video"}]}], r"messages\[0\].content\[0\] is a video; .* text and images"),
    ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\].content\[0\].text is None; legal is text"),
    ([{"role": "user", "content": "x", "name": 3}], r"messages\[0\].name is 3; legal is text"),
    ([{"role": "user", "content": "a\ud800"}], r"messages\[0\].content has the lone surrogate U\+D800 at character 1"),
    ([{"role": "user", "content": "x", "name": "\udc00"}], r"messages\[0\].name has the lone surrogate U\+DC00"),
    ([{"role": "assistant", "content": 1.5}], r"messages\[0\].content is 1.5; legal is text"),
    ([{"role": "assistant", "reasoning_content": 1}], r"messages\[0\].reasoning_content is 1; legal is text"),
    ([{"role": "assistant", "reasoning": []}], r"messages\[0\].reasoning is \[\]; legal is text"),
    ([{"role": "tool", "content": "x", "tool_call_id": 7}], r"messages\[0\].tool_call_id is 7; legal is text"),
    ([{"role": "user", "content": "x", "tool_calls": [{"name": "f"}]}], r"tool_calls belongs to an assistant message"),
    ([{"role": "assistant", "tool_calls": {}}], r"messages\[0\].tool_calls is {}; legal is a list"),
    (assistant(), r"tool_calls\[0\].name is None; legal is text of at least one character"),
    ([{"role": "assistant", "tool_calls": ["f"]}], r"messages\[0\].tool_calls\[0\] is 'f'; legal is a mapping"),
    (assistant(function="f"), r"tool_calls\[0\].function is 'f'; legal is a mapping"),
    (assistant(function={"name": ""}), r"tool_calls\[0\].function.name is ''; legal is text of at least one"),
    (assistant(type="web", function={"name": "f"}), r"tool_calls\[0\].type is 'web'; legal is \"function\""),
    (assistant(id=1, function={"name": "f"}), r"tool_calls\[0\].id is 1; legal is text"),
    (assistant(name="f", arguments=3), r"tool_calls\[0\].arguments is 3; legal is a mapping or the text of a JSON"),
    (assistant(name="f", arguments="[1]"), r"tool_calls\[0\].arguments is '\[1\]'; legal is the text of a JSON object"),
    (assistant(name="f", arguments="3"), r"tool_calls\[0\].arguments is '3'; legal is the text of a JSON object"),
    (assistant(name="f", arguments={1: 2}), r"a key of messages\[0\].tool_calls\[0\].arguments is 1; legal is text"),
    (assistant(name="f", arguments={"x": {2, 3}}), r"arguments is .*; legal is made of dict, list, str"),
    (assistant(name="f", arguments={"x": float("nan")}), r"arguments\['x'\] is nan; legal is a finite number"),
    (
        assistant(name="f", arguments={"x": [1, float("inf")]}),
        r"arguments\['x'\]\[1\] is inf; legal is a finite number",
    ),
    (assistant(name="f", arguments={"x": "\ud800"}), r"arguments\['x'\] has the lone surrogate"),
    (assistant(name="f", arguments={"x": nested(DEEPEST)}), "nested deeper than 128 levels"),
    (assistant(name="f", arguments={"x": 10**5000}), "can't be written as JSON"),
    ([{"role": "user", "content": 10**5000}], r"messages\[0\].content is a value of type int that is too long to be"),
    ([{"role": "x" * 10**6, "content": "x"}], r"messages\[0\].role is 'x{30,40}\.\.\.x{30,40}'; legal is one of"),
]

BAD_TOOLS = [
    ({"type": "function"}, "tools is {.*}; legal is a list"),
    (["f"], r"tools\[0\] is 'f'; legal is a mapping"),
    ([{"type": "function"}], r"tools\[0\].function is None; legal is a mapping with the name"),
    ([{"type": "function", "function": {}}], r"tools\[0\].function.name is None; legal is text"),
    ([{"name": "f"}], r"tools\[0\].function is None; legal is a mapping with the name"),
    ([{"function": {"name": "f", "parameters": {1: 2}}}], r"a key of tools\[0\]\['function'\]\['parameters'\] is 1"),
    ([{"function": {"name": "f", "parameters": {"x": object()}}}], r"tools\[0\] is .*; legal is made of dict"),
    ([{"function": {"name": "f", "description": "\udfff"}}], r"\['description'\] has the lone surrogate U\+DFFF"),
    ([{"function": {"name": "f", "parameters": nested(1000)}}], "nested deeper than 128 levels"),
]


@pytest.mark.parametrize(("messages", "error"), BAD_MESSAGES, ids=[error for _, error in BAD_MESSAGES])
def test_bad_messages_are_refused(messages: object, error: str) -> None:
    with pytest.raises(MessageError, match=error):
        read_messages(messages)


@pytest.mark.parametrize(("tools", "error"), BAD_TOOLS, ids=[error for _, error in BAD_TOOLS])
def test_bad_tools_are_refused(tools: object, error: str) -> None:
    with pytest.raises(MessageError, match=error):
        read_tools(tools)
    with pytest.raises(MessageError, match=error.replace("tools", r"messages\[0\].tools", 1)):
        read_messages([{"role": "system", "tools": tools}])


def test_a_value_within_itself_is_refused() -> None:
    loop: dict = {}
    loop["x"] = loop
    with pytest.raises(MessageError, match="nested deeper than 128 levels"):
        read_messages(assistant(name="f", arguments=loop))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"thinking_effort": "medium"}, "thinking_effort is 'medium'; legal values are low, high, max"),
        ({"thinking_effort": "extreme"}, "thinking_effort is 'extreme'; legal values are low, high, max"),
        ({"tool_choice": "f"}, "tool_choice is 'f'; legal values are auto, none, required"),
        ({"tool_choice": "required"}, "tool_choice is 'required', but there are no tools"),
        ({"response_format": {}}, "response_format is {}; legal is a mapping whose type is one of text, json_object"),
        ({"response_format": {"type": "xml"}}, "response_format is {'type': 'xml'}; legal is"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema is None; legal is"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, "json_schema is {.*}; legal is"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": float("nan")}}}},
            r"schema\['a'\] is nan; legal is a finite number",
        ),
        (
            {"image_prompts": ["<|open|>"]},
            r"image_prompts\[0\] is '<\|open\|>'; legal is what image_prompt\(\) returns",
        ),
        ({"image_prompts": ["x" * 99]}, r"image_prompts\[0\] is 'x*[.]{3}x*'; legal is what"),
    ],
)
def test_bad_options_are_refused(options: dict, error: str) -> None:
    with pytest.raises(MessageError, match=error):
        XtmlFormat().render([USER], **options)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"thinking": True}, "thinking is True, but style 'instruct_0905' never thinks; legal is None or False"),
        ({"thinking_effort": "low"}, "thinking_effort is 'low', which the K2 format has no form for; legal is None"),
        (
            {"tool_choice": "none"},
            "tool_choice is 'none', which the K2 format has no form for; legal is None or 'auto'",
        ),
        (
            {"response_format": {"type": "json_object"}},
            "response_format is .*no form for; legal is None or {'type': 'text'}",
        ),
        (
            {"image_prompts": ["x"]},
            r"image_prompts is \['x'\], which the K2 format has no form for; legal is None or \[\]",
        ),
    ],
)
def test_options_without_a_form_in_k2_are_refused(options: dict, error: str) -> None:
    with pytest.raises(MessageError, match=error):
        K2Format().render([USER], **options)


def test_a_developer_is_a_system_message() -> None:
    for chat in (XtmlFormat(), K2Format()):
        rendered = [
            chat.render([{"role": role, "content": "be brief", "name": "n"}, USER]) for role in ("system", "developer")
        ]
        assert rendered[0] == rendered[1]


def test_messages_come_out_in_one_form() -> None:
    system, user, answer, result = read_messages(
        (
            {"role": "developer", "content": "s", "refusal": None, "made_up": object()},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "u"}}],
            },
            {"role": "assistant", "content": None, "reasoning_content": "", "reasoning": "r", "tool_calls": None},
            {"role": "tool", "content": "", "tool": "f", "name": "g"},
        )
    )
    assert (system.role, system.content, system.tools) == ("system", ("s",), None)
    assert user.content == ("a", Image())
    assert (answer.content, answer.reasoning, answer.tool_calls) == ((), "r", ())
    assert (result.name, result.content) == ("f", ("",))


def test_arguments_that_are_not_json_stay_as_they_were_written() -> None:
    for text in (
        '{"a": 1',
        "nonsense",
        '{"a": NaN}',
        '{"a": 1e999}',
        '{"a": "\\ud800"}',
        "[" * 5000,
        '{"a": ' + "9" * 5000 + "}",
    ):
        call = read_messages(assistant(name="f", arguments=text))[0].tool_calls[0]
        assert (call.arguments, call.text) == (None, text)
        with pytest.raises(ValueError):  # noqa: PT011 - json's own words
            parse_json(text)
    for nothing in (None, "", " \n"):
        assert read_messages(assistant(name="f", arguments=nothing))[0].tool_calls[0].arguments == {}


def test_the_model_type_chooses_the_format() -> None:
    assert chat_format("kimi_k3") == chat_format("kimi_k31") == XtmlFormat()
    assert chat_format("kimi_k3", vendor_compatible=True) == XtmlFormat(vendor_compatible=True)
    assert chat_format("kimi_linear") == chat_format("kimi_k2") == K2Format()
    with pytest.raises(ValueError, match="model_type='llama' has no known chat format; known are kimi_k3, kimi_k31"):
        chat_format("llama")
