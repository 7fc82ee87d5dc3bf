"""`kimi-jax demo`: what it marks as right is right, and it runs with the model in the package."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kimi_jax import cli
from kimi_jax.commands import demo
from kimi_jax.embedded import MODELS
from kimi_jax.generate.results import ChatReply, Generation, StreamPiece, Timings
from kimi_jax.haystack import NAMES, hide
from kimi_jax.text import ParsedMessage, TextDelta, Tokenizer, ToolCall, ToolCallEnd

TINY = MODELS / "kimi-tiny"
GENERATION = Generation([1, 2, 3], "", "stop", 600, timings=Timings(9.0, 2.0, 0.5, 4.0))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(TINY)


class Answer:
    def __init__(self, text: str | None = None, call: ToolCall | None = None):
        self.deltas = [TextDelta(text)] if text else [ToolCallEnd(0, call)] if call else []
        self.reply = ChatReply(ParsedMessage(None, text, (call,) if call else (), ()), GENERATION)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.deltas)


class Told:
    """A model that finds every code, and calls the tool as it is told to."""

    def __init__(self, tokenizer: Tokenizer, *, arguments: dict[str, Any] | None, code: str = r"\g<0>"):
        self.tokenizer = tokenizer
        self.arguments = arguments
        self.code = code
        self.conversations: list[list[dict[str, Any]]] = []

    def stream(self, prompt: str, max_new_tokens: int, **sampling: Any) -> Iterator[StreamPiece]:
        assert sampling["seed"] == 3
        yield StreamPiece(0, " there was", [1, 2])
        yield StreamPiece(0, " a fox.", [3], GENERATION)

    def chat_stream(self, messages: Any, max_new_tokens: int, tools: Any = None, **sampling: Any) -> Answer:
        self.conversations.append(list(messages))
        if tools is None:
            text = messages[-1]["content"]
            (name,) = re.findall(r"What is the secret code of the (\w+ \w+)\?$", text)
            (code,) = re.findall(rf"The secret code of the {name} is (\d{{5}})\.", text)
            return Answer(re.sub(r"\d+", self.code, f"The secret code of the {name} is {code}."))
        if messages[-1]["role"] == "tool":
            result = json.loads(messages[-1]["content"])
            return Answer(f"It is {result['sky']} in Venice, {result['temperature']} degrees celsius.")
        if self.arguments is None:
            return Answer("I would rather not.")
        return Answer(call=ToolCall("call_1", "get_weather", json.dumps(self.arguments), self.arguments))


def shown(model: Any, capsys: pytest.CaptureFixture[str]) -> str:
    demo.Demo(model, TINY, 3).run(demo.STORIES[0], 2500)
    return capsys.readouterr().out


def test_right_answers_are_marked_right(tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    model = Told(tokenizer, arguments=demo.CALL[1])
    out = shown(model, capsys)
    assert f"{demo.STORIES[0]} there was a fox.\n" in out
    assert 'calls get_weather with {"city": "Venice", "unit": "celsius"}' in out
    assert "It is sunny in Venice, 21 degrees celsius." in out
    assert out.count("✓ right") == 4
    assert "✗" not in out
    assert "4 of 4 answers" in out
    assert "600 tokens read at 300 tokens/s" in out
    roles = [message["role"] for message in model.conversations[1]]
    assert roles == ["user", "assistant", "tool"]


@pytest.mark.parametrize(
    ("arguments", "code", "right", "checked"),
    [
        ({"city": "Venice", "unit": "fahrenheit"}, r"\g<0>", 3, 4),
        (None, r"\g<0>", 2, 3),
        ({"city": "Venice", "unit": "celsius"}, "12345", 2, 4),
    ],
)
def test_wrong_answers_are_marked_wrong(
    arguments: dict[str, Any] | None,
    code: str,
    right: int,
    checked: int,
    tokenizer: Tokenizer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = shown(Told(tokenizer, arguments=arguments, code=code), capsys)
    assert f"{right} of {checked} answers" in out
    assert (out.count("✓ right"), out.count("✗ wrong")) == (right, checked - right)


def test_every_kind_of_story(tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    class Teller(Told):
        def chat_stream(self, messages: Any, max_new_tokens: int, tools: Any = None, **sampling: Any) -> Answer:
            return Answer("A wolf came.")

    for story in demo.STORIES:
        demo.Demo(Teller(tokenizer, arguments=None), TINY, 3).tell(story)
    assert "kimi-tiny: A wolf came.\n" in capsys.readouterr().out


@pytest.mark.parametrize("num_tokens", [2000, 8000])
def test_codes_are_hidden_once_each(tokenizer: Tokenizer, num_tokens: int) -> None:
    haystack = hide(TINY, tokenizer, num_tokens, seed=1)
    assert num_tokens * 0.9 < len(tokenizer.encode(haystack.text)) <= num_tokens
    assert {secret.name for secret in haystack.secrets} == set(NAMES)
    places = [haystack.text.index(f" The secret code of the {s.name} is {s.code}. ") for s in haystack.secrets]
    assert places == sorted(places)
    depths = [secret.depth for secret in haystack.secrets]
    assert depths == sorted(depths)
    assert 0 < depths[0] < 0.15
    assert 0.85 < depths[-1] <= 1
    assert haystack == hide(TINY, tokenizer, num_tokens, seed=1)
    assert haystack.secrets != hide(TINY, tokenizer, num_tokens, seed=2).secrets


def test_too_short_a_context_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="num_tokens=400 leaves room for 0 sentences beside 16 codes"):
        hide(TINY, tokenizer, 400)


@pytest.mark.slow
def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo", "--context", "1900"]) == 0
    out = capsys.readouterr().out
    assert out.count("✓ right") + out.count("✗ wrong") in (3, 4)
    assert re.search(r"1,\d{3} tokens read at [\d,]+ tokens/s, \d+ written at [\d,]+ tokens/s", out)
    assert "What next?" in out
