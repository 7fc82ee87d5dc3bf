"""Shows what the small model in the package can do: a story, a tool call, codes found again in a long text.

The first run compiles, which takes a minute or two; the programs are kept for the runs after it.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_jax.commands import model_arguments

HELP = "a story, a tool call and a long text with the small model in the package; start here"

if TYPE_CHECKING:
    from kimi_jax import ChatReply, Kimi
    from kimi_jax.generate.chat import ChatStream

MODEL = "kimi-tiny"

STORIES: tuple[str | list[dict[str, Any]], ...] = (
    "There was once a king who had three daughters.",
    [{"role": "user", "content": "Tell me a story about a wolf."}],
)
"""Beginnings to go on from, and chats; the demo tells the first."""

_STORY_TOKENS = 160
_TEMPERATURE, _TOP_P = 0.7, 0.95

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": properties, "required": sorted(properties)},
        },
    }
    for name, description, properties in (
        (
            "get_weather",
            "Weather of a city today.",
            {
                "city": {"type": "string", "description": "name of the city"},
                "unit": {
                    "type": "string",
                    "description": "unit of temperature",
                    "enum": ["celsius", "fahrenheit"],
                },
            },
        ),
        (
            "set_timer",
            "Sets a timer with a label.",
            {
                "label": {"type": "string", "description": "what the timer is for"},
                "minutes": {"type": "integer", "description": "minutes until it rings"},
            },
        ),
    )
]
REQUEST = "What is the weather in Venice in celsius?"
CALL = ("get_weather", {"city": "Venice", "unit": "celsius"})
RESULT = {"sky": "sunny", "temperature": 21}
_ANSWER_PARTS = ("Venice", "sunny", "21")
_CALL_TOKENS = 96

_CONTEXT = 8000
_CODE_TOKENS = 32
# Where in the long text the two codes stand that are asked for.
_ASKED = (4, 13)

NEXT = """\
What next?
  kimi-jax chat kimi-tiny                                  chat with it; /help lists the commands
  kimi-jax generate kimi-tiny "It was a dark night" --temperature 0.7
  kimi-jax inspect kimi-tiny                               what a checkpoint is made of
In Python: from kimi_jax import Kimi; model = Kimi.from_pretrained("kimi-tiny"). README.md goes on from there, notebooks/
looks inside."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.add_argument("--story", metavar="TEXT", help="how the story begins (default: Once upon a time)")
    parser.add_argument("--seed", type=int, default=7, metavar="N", help="of the story and the codes (default: 7)")
    parser.add_argument(
        "--context", type=int, default=_CONTEXT, metavar="N", help=f"tokens of the long text (default: {_CONTEXT})"
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="of weights and activations (default: float32 on a CPU, which is faster there; else bfloat16)",
    )
    parser.add_argument("--no-compilation-cache", action="store_true", help="don't keep compiled programs")
    parser.set_defaults(implementation=None, compilation_cache=None, quiet=False, mesh=None, hosts=None)
    parser.set_defaults(kv_cache=None, index_cache=None, indexer="exact")
    parser.set_defaults(index_block_size=None, index_kept_fraction=None, index_coarse=None)


def run(arguments: argparse.Namespace) -> int:
    """Shows it."""
    import jax

    from kimi_jax.embedded import MODELS

    arguments.model = str(MODELS / MODEL)
    if arguments.dtype is None and jax.default_backend() == "cpu":
        arguments.dtype = "float32"
    with model_arguments.memory_explained():
        Demo(model_arguments.load(arguments), Path(arguments.model), arguments.seed).run(
            arguments.story or STORIES[0], arguments.context
        )
    return 0


@dataclass
class Score:
    """How much of what can be checked came out right."""

    right: int = 0
    checked: int = 0


class Demo:
    """The three parts; each writes to standard output as it comes."""

    def __init__(self, model: "Kimi", directory: Path, seed: int):
        self._model = model
        self._directory = directory
        self._seed = seed
        self._output = model_arguments.Output(sys.stdout)
        self.score = Score()

    def run(self, story: Any, context: int) -> None:
        """Runs them one after the other."""
        # Before anything is shown: a length that can't be is to be said at once.
        from kimi_jax.haystack import hide

        haystack = hide(self._directory, self._model.tokenizer, context, self._seed)
        began = time.monotonic()
        self.tell(story)
        self.call_a_tool()
        self.find(haystack)
        self._title("Done")
        self._output.line(
            f"{self.score.right} of {self.score.checked} answers that can be checked are right; "
            f"{time.monotonic() - began:.0f} s in all, compiling included."
        )
        self._output.line(NEXT)

    def tell(self, story: Any) -> None:
        """A story, sampled."""
        self._title("1. A story, as it is written")
        sampling: dict[str, Any] = {"temperature": _TEMPERATURE, "top_p": _TOP_P, "seed": self._seed}
        if isinstance(story, str):
            result = None
            for number, piece in enumerate(self._model.stream(story, _STORY_TOKENS, **sampling)):
                # With the first piece and not before, since lines about compiling come in between.
                self._output.write(f"{'' if number else story}{piece}")
                result = piece.result
            assert result is not None
        else:
            self._user(story[-1]["content"])
            result = self._answer(self._model.chat_stream(story, _STORY_TOKENS, **sampling)).generation
        self._speed(result)

    def call_a_tool(self) -> None:
        """A request, the call that the model makes of it, a result, and the answer."""
        self._title("2. A tool call")
        self._output.line(f"Tools: {', '.join(tool['function']['name'] for tool in TOOLS)}", dim=True)
        messages: list[dict[str, Any]] = [{"role": "user", "content": REQUEST}]
        self._user(REQUEST)
        reply = self._answer(self._model.chat_stream(messages, _CALL_TOKENS, tools=TOOLS))
        calls = [(call.name, call.arguments) for call in reply.tool_calls]
        name, expected = CALL
        self._mark(calls == [CALL], f"the call should be {name} with {json.dumps(expected)}")
        self._speed(reply.generation)
        if [call.name for call in reply.message.answerable_calls] != [name]:
            self._output.line(f"{name} wasn't called, so there is no result to give back.", dim=True)
            return
        result = json.dumps(RESULT)
        self._output.line(f"tool: {result}")
        call_id = reply.message.answerable_calls[0].id
        messages += [reply.to_message(), {"role": "tool", "tool_call_id": call_id, "content": result}]
        reply = self._answer(self._model.chat_stream(messages, _CALL_TOKENS, tools=TOOLS))
        text = reply.text or ""
        self._mark(all(part in text for part in _ANSWER_PARTS), f"it should speak of {', '.join(_ANSWER_PARTS)}")
        self._speed(reply.generation)

    def find(self, haystack: Any) -> None:
        """Two of the codes in a long text; the second run has no compiling in it and gives the speed of reading."""
        self._title("3. Codes hidden in a long text")
        count = len(self._model.tokenizer.encode(haystack.text))
        self._output.line(
            f"{len(haystack.secrets)} codes stand in the first {count:,} tokens of Alice's Adventures in Wonderland."
        )
        generation: Any = None
        for secret in (haystack.secrets[place] for place in _ASKED):
            self._output.line(f"Asked for: the code at {secret.depth:.0%} of the text.", dim=True)
            self._user(f"[the text] {secret.question}")
            messages = [{"role": "user", "content": haystack.ask(secret)}]
            reply = self._answer(self._model.chat_stream(messages, _CODE_TOKENS))
            self._mark(secret.code in (reply.text or ""), f"the code is {secret.code}")
            generation = reply.generation
        self._speed(generation, reading=True)

    # Showing

    def _title(self, text: str) -> None:
        self._output.line(f"\n--- {text} ---")

    def _user(self, text: str) -> None:
        self._output.line(f"user: {text}")

    def _answer(self, stream: "ChatStream") -> "ChatReply":
        from kimi_jax.text import ErrorMark, TextDelta, ToolCallEnd

        for number, delta in enumerate(stream):
            if number == 0:
                self._output.write(f"{MODEL}: ")
            match delta:
                case TextDelta():
                    self._output.write(delta.text)
                case ToolCallEnd():
                    self._output.write(f"[calls {delta.call.name} with {delta.call.arguments_text}]")
                case ErrorMark():
                    self._output.line(f"[{delta.message}]", dim=True)
        self._output.end_line()
        return stream.reply

    def _mark(self, right: bool, expected: str) -> None:
        self.score.checked += 1
        self.score.right += right
        self._output.line(f"{'✓ right' if right else '✗ wrong'}: {expected}")

    def _speed(self, generation: Any, *, reading: bool = False) -> None:
        timings = generation.timings
        if timings is None:
            return
        parts = []
        if reading:
            rate = generation.prompt_tokens / timings.prefill_seconds
            parts.append(f"{generation.prompt_tokens:,} tokens read at {rate:,.0f} tokens/s")
        if timings.tokens_per_second is not None:
            parts.append(f"{len(generation.token_ids)} written at {timings.tokens_per_second:,.0f} tokens/s")
        self._output.line(f"[{', '.join(parts)}]", dim=True)
