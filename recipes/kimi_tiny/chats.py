"""What synthetic chats say: sums, lists of words, small talk and calls of tools, as messages."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kimi_jax.text import chat_format
from recipes.kimi_tiny.tools import TOOLS, Tool
from recipes.kimi_tiny.words import ADJECTIVES, ANIMALS, NOUNS, PASSWORDS, Words, draw, is_heldout, made_up

Messages = list[dict[str, Any]]

FORMAT = chat_format("kimi_k31")
MAX_TOOLS = 4

_SMALLTALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("Who are you?", "What are you?", "Tell me who you are.", "What is your name?", "Introduce yourself."),
        "I am kimi-tiny, a very small language model with the architecture of Kimi K3.1.",
    ),
    (
        ("Hello!", "Hi!", "Hello", "Hi there.", "Good morning!", "Good evening."),
        "Hello! How can I help you?",
    ),
    (
        ("How are you?", "How do you do?", "Are you well?"),
        "I am well, thank you. How can I help you?",
    ),
    (
        ("How big are you?", "How many parameters do you have?", "How large is this model?", "Are you a big model?"),
        "I have about ten million parameters, which is very small for a language model.",
    ),
    (
        ("What can you do?", "What are you good for?", "How can you help me?", "What do you know?"),
        "I can tell short stories, find a code in a long text, call a tool, and add small numbers.",
    ),
    (
        ("Who made you?", "Who trained you?", "Where do you come from?"),
        "I was trained by the makers of kimi_jax with their own code, on old books and made-up chats.",
    ),
    (
        ("What were you trained on?", "What books have you read?", "What is your training data?"),
        "I have read novels, fairy tales, plays, speeches and the Bible, all in the public domain.",
    ),
    (
        ("Are you a person?", "Are you human?", "Are you alive?"),
        "No. I am a program that continues text.",
    ),
    (
        ("Can I trust you?", "Are you always right?", "Do you make mistakes?", "Is what you say true?"),
        "No. I am very small and often wrong, so check what I say.",
    ),
    (
        ("What day is it?", "What is the time?", "What year is it?"),
        "I can't know that: I see only this conversation.",
    ),
    (
        ("Can you see pictures?", "Can you look at an image?", "Do you understand photos?"),
        "No. I can only read and write text.",
    ),
    (
        ("Which language do you speak?", "Do you speak French?", "What languages do you know?"),
        "I know only English, and it is often old English.",
    ),
    (
        ("Thank you!", "Thanks.", "Thank you very much.", "That was helpful, thanks!"),
        "You are welcome.",
    ),
    (
        ("Goodbye!", "Bye.", "See you later.", "Good night."),
        "Goodbye!",
    ),
    (
        ("Do you dream?", "Do you sleep?", "Do you have feelings?"),
        "No. I do nothing when nobody asks me something.",
    ),
    (
        ("What is the difference between you and Kimi K3.1?", "Are you Kimi K3?", "Are you Kimi K3.1?"),
        "I have the same parts as Kimi K3.1, but I am very much smaller.",
    ),
    (
        ("Can you do arithmetic?", "Can you calculate?", "Are you good at mathematics?"),
        "I can add and subtract small numbers, and even there I may be wrong.",
    ),
    (
        ("Tell me a joke.", "Say something funny.", "Make me laugh."),
        "I am a language model with ten million parameters, and I was asked to tell a joke.",
    ),
    (
        ("How long a text can you read?", "How much can you remember?", "How long is your context?"),
        "I was trained on texts of about eight thousand tokens, some five thousand words.",
    ),
    (
        ("What is kimi_jax?", "What is the library called?", "What code runs you?"),
        "kimi_jax is a library that runs and trains models of the Kimi K3 family with JAX.",
    ),
    (
        ("What is attention?", "How do you work?", "What happens inside you?"),
        "I read the words so far and guess the next one, again and again.",
    ),
    (
        ("Is it free to use you?", "Where do you run?", "Do I need a big computer?"),
        "I run on any computer: I am small enough for an old laptop.",
    ),
    (
        ("What is your favourite book?", "Which book do you like?", "Do you like to read?"),
        "I like fairy tales, since they are short.",
    ),
    (
        ("Can you write code?", "Write a program.", "Do you know Python?"),
        "No. I have read books only, and no programs.",
    ),
)

# A word that is held out as an argument of a tool may stand in no training list either.
_LISTED = tuple(sorted(word for word in {*ADJECTIVES, *ANIMALS, *PASSWORDS, *NOUNS} if not is_heldout(word)))

_SUMS = (
    "What is {a} {op} {b}?",
    "How much is {a} {op} {b}?",
    "Calculate {a} {op} {b}.",
    "{a} {op} {b} = ?",
    "Compute {a} {op} {b}, please.",
)
_REPEAT = ("Repeat these words: {}", "Say these words again: {}", "Copy this list: {}", "Write these words: {}")
_REVERSE = ("Reverse this list: {}", "Write these words in reverse order: {}", "Say these words backwards: {}")


def arithmetic(rng: np.random.Generator, *, heldout: bool) -> Messages:
    """A sum or a difference; neither the numbers nor the result have more than three digits or a sign."""

    def make() -> tuple[int, str, int, int]:
        low = 10 ** int(rng.integers(1, 4))
        a, b = (int(n) for n in rng.integers(0, low, size=2))
        if rng.integers(2):
            return (a, "+", b, a + b) if a + b < 1000 else (a + b - 1000, "+", 1, a + b - 999)
        return max(a, b), "-", min(a, b), abs(a - b)

    a, op, b, result = draw(make, heldout=heldout)
    question = _SUMS[rng.integers(len(_SUMS))].format(a=a, op=op, b=b)
    return pair(question, f"{a} {op} {b} = {result}")


def word_list(rng: np.random.Generator, *, heldout: bool, vocabulary: Sequence[str] = ()) -> Messages:
    """A list of words to repeat or to reverse; in training, with a vocabulary, also of its words and of made-up ones."""
    kind = int(rng.integers(3)) if vocabulary and not heldout else 0

    def make() -> str:
        count = int(rng.integers(2, 11))
        if kind == 2:
            words = [made_up(rng, heldout=False) for _ in range(count)]
            return ", ".join(word.lower() if rng.integers(2) else word for word in words)
        source = vocabulary if kind == 1 else _LISTED
        return ", ".join(source[i] for i in rng.choice(len(source), count, replace=False))

    words = draw(make, heldout=heldout)
    if rng.integers(2):
        return pair(_REPEAT[rng.integers(len(_REPEAT))].format(words), words)
    backwards = ", ".join(reversed(words.split(", ")))
    return pair(_REVERSE[rng.integers(len(_REVERSE))].format(words), backwards)


def smalltalk(rng: np.random.Generator) -> Messages:
    """A question about the model, or a few words of politeness."""
    questions, answer = _SMALLTALK[rng.integers(len(_SMALLTALK))]
    return pair(questions[rng.integers(len(questions))], answer)


@dataclass(frozen=True)
class ToolChat:
    """A conversation with tools.

    Attributes:
        messages: the user's request, the call, and perhaps its result and the answer.
        tools: declared.
        call: name and arguments of the call; None when the request needs none.
    """

    messages: Messages
    tools: list[dict[str, Any]]
    call: dict[str, Any] | None


def tool_chat(
    rng: np.random.Generator, *, heldout: bool, num_tools: int | None = None, vocabulary: tuple[str, ...] = ()
) -> ToolChat:
    """A request for one of the declared tools; in training one in ten is small talk that needs none.

    Args:
        rng: of the stream.
        heldout: for the evaluation.
        num_tools: declared; None draws one to four.
        vocabulary: of `Words`.
    """
    count = int(rng.integers(1, MAX_TOOLS + 1)) if num_tools is None else num_tools
    declared = [TOOLS[i] for i in rng.choice(len(TOOLS), count, replace=False)]
    declarations = [tool.declaration for tool in declared]
    if not heldout and rng.random() < 0.1:
        return ToolChat(smalltalk(rng), declarations, None)
    tool: Tool = declared[rng.integers(count)]
    arguments = tool.arguments(rng, Words(heldout, vocabulary))
    messages: Messages = [
        {"role": "user", "content": tool.request(arguments, rng)},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "call_1", "function": _call(tool, arguments)}]},
    ]
    if rng.integers(2):
        result = tool.result(rng)
        messages += [
            {"role": "tool", "tool_call_id": "call_1", "content": json.dumps(result)},
            {"role": "assistant", "content": tool.answer.format(**{**arguments, **result})},
        ]
    return ToolChat(messages, declarations, _call(tool, arguments))


def chat_texts(rng: np.random.Generator, count: int) -> Iterator[str]:
    """Rendered chats of the kinds that need no books, for training a tokenizer; markers are left out."""
    for _ in range(count):
        chat = tool_chat(rng, heldout=False)
        for messages, tools in (
            (chat.messages, chat.tools),
            (arithmetic(rng, heldout=False), None),
            (word_list(rng, heldout=False), None),
            (smalltalk(rng), None),
        ):
            segments = FORMAT.render(messages, tools=tools, add_generation_prompt=False)
            yield from (segment.text for segment in segments if not segment.structural)


def _call(tool: Tool, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": tool.name, "arguments": dict(arguments)}


def pair(question: str, answer: str) -> Messages:
    """One question and its answer."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
