"""Synthetic chats that teach kimi-tiny the K3 chat format and a few skills, as tokens with a loss mask.

Kinds of tasks (`KINDS`):

- recall: a long text from the books with facts planted at sentence ends; the questions ask for some of them.
- tools: one to four declared tools; the assistant calls the right one, and answers from its result.
- arithmetic: sums and differences of numbers with up to three digits.
- lists: repeating or reversing a list of words.
- smalltalk: who are you, and the like.
- stories: "Tell me a story about a wolf", answered with the beginning of a passage from the books.

Prompts are token for token what `Kimi.chat` makes of the messages: with its defaults (thinking, at the largest effort;
the reasoning is empty), and in training one in ten with thinking off. The loss mask is True on what the assistant
writes behind its prompt, end markers included.

Whatever is drawn for training never meets the evaluation's: see `recipes.kimi_tiny.words`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from kimi_jax.text import Segment, Tokenizer
from recipes.kimi_tiny.chats import FORMAT, MAX_TOOLS, Messages, arithmetic, pair, smalltalk, tool_chat, word_list
from recipes.kimi_tiny.tokenizer import load_documents
from recipes.kimi_tiny.words import ADJECTIVES, ANIMALS, NOUNS, PASSWORDS, is_heldout

Kind = Literal["recall", "tools", "arithmetic", "lists", "smalltalk", "stories"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_CACHE_SIZE = 10_000
_TRIES = 100
_THINKING_OFF = 0.1
_STORY_HEAD = 400


@dataclass(frozen=True)
class Example:
    """A conversation as the model sees it.

    Attributes:
        tokens: [T] uint16.
        loss_mask: [T] bool: the tokens that the assistant writes.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray


@dataclass(frozen=True)
class Recall(Example):
    """A recall task.

    Attributes:
        prompt: [P] uint16, up to the first answer, as `Kimi.chat` makes it.
        answer: tokens of the first answer, from the end of the prompt to the end of the message.
        value: what the first question asks for: digits or a word.
        depth: where the fact stands in the text: 0 at its beginning, 1 at its end.
        num_facts: planted in the text.
        content: tokens of the user's first message.
        tokenizer: to make text of it.
    """

    prompt: np.ndarray
    answer: np.ndarray
    value: str
    depth: float
    num_facts: int
    content: np.ndarray
    tokenizer: Tokenizer

    @cached_property
    def messages(self) -> Messages:
        """The prompt as messages for `Kimi.chat`."""
        return [{"role": "user", "content": self.tokenizer.decode(self.content.tolist())}]


_STORY = (
    "Tell me a story about a {}.",
    "Write a story with a {}.",
    "I want to hear a story about a {}.",
    "Please tell me something about a {}.",
    "Can you tell me a tale of a {}?",
)


class _Frame:
    """The tokens around the contents of a conversation without tools.

    head, content, (ask, answer), then (between, content, ask, answer) for each further turn, then tail. `ask` is split
    in what belongs to the prompt and what the assistant writes before its answer.
    """

    def __init__(self, tokenizer: Tokenizer, thinking: bool):
        question, answer = "question", "answer"
        turn = pair(question, answer)
        segments = FORMAT.render([*turn, *turn], thinking=thinking, add_generation_prompt=False)
        at = [i for i, segment in enumerate(segments) if segment.text in (question, answer) and not segment.structural]
        prompt = FORMAT.render(turn[:1], thinking=thinking)
        encode = tokenizer.encode_segments
        self.head = encode(segments[: at[0]])
        self.prompt_tail = encode(prompt[at[0] + 1 :])
        self.answer_head = encode(segments[at[0] + 1 : at[1]])[len(self.prompt_tail) :]
        self.between = encode(segments[at[1] + 1 : at[2]])
        self.answer_tail = encode(segments[at[3] + 1 :])
        self.user_head = self.between[len(self.answer_tail) :]

    def prompt(self, content: Sequence[int] | np.ndarray) -> np.ndarray:
        return np.concatenate([_ids(self.head), _ids(content), _ids(self.prompt_tail)])

    def answer(self, content: Sequence[int] | np.ndarray) -> np.ndarray:
        return np.concatenate([_ids(self.answer_head), _ids(content), _ids(self.answer_tail)])

    def example(self, turns: Sequence[tuple[Sequence[int] | np.ndarray, Sequence[int] | np.ndarray]]) -> Example:
        pieces, written = [], []
        for number, (content, answer) in enumerate(turns):
            for tokens, own in (
                (self.user_head if number else self.head, False),
                (content, False),
                (self.prompt_tail, False),
                (self.answer_head, True),
                (answer, True),
                (self.answer_tail, True),
            ):
                pieces.append(_ids(tokens))
                written.append(own)
        lengths = [len(piece) for piece in pieces]
        return Example(np.concatenate(pieces), np.repeat(np.array(written), lengths))

    def num_tokens(self, turns: int) -> int:
        """Tokens of a conversation but for its contents."""
        fixed = len(self.prompt_tail) + len(self.answer_head) + len(self.answer_tail)
        return len(self.head) + turns * fixed + (turns - 1) * len(self.user_head)


class _Facts:
    """Facts, questions and answers in tokens, put together from words that are encoded once.

    A piece starts with a blank and ends with a full stop, where the tokenizer cuts in any case, so pieces can be joined.
    """

    FORMS = (
        ("The secret code of the", "is", "What is the secret code of the"),
        ("The password of the", "is", "What is the password of the"),
    )

    def __init__(self, tokenizer: Tokenizer):
        self._encode = tokenizer.encode
        self.digits = [self._one(str(digit)) for digit in range(10)]
        self.blank = self._one(" ")
        self._words = {word: self._encode(f" {word}") for word in {*ADJECTIVES, *ANIMALS, *PASSWORDS}}
        self._stop, self._mark = self._encode("."), self._encode("?")
        self._forms = [
            (self._encode(f" {start}"), self._encode(start), self._encode(f" {verb}"), self._encode(question))
            for start, verb, question in self.FORMS
        ]
        names = [(a, b) for a in ADJECTIVES for b in ANIMALS]
        side = np.array([is_heldout(f"{a} {b}") for a, b in names])
        tokens = [[*self._words[a], *self._words[b]] for a, b in names]
        self._names = {heldout: [tokens[i] for i in np.flatnonzero(side == heldout)] for heldout in (False, True)}
        self._passwords = [word for word in PASSWORDS if not is_heldout(word)]

    def _one(self, text: str) -> int:
        (token,) = self._encode(text)
        return token

    def draw(self, rng: np.random.Generator, count: int, *, heldout: bool, form: int) -> "_Drawn":
        names = self._names[heldout]
        chosen = rng.choice(len(names), count, replace=False).tolist()
        if form == 0:
            digits = rng.integers(0, 10, (count, 5)).tolist()
            values = [[self.blank, *(self.digits[d] for d in row)] for row in digits]
            spoken = ["".join(map(str, row)) for row in digits]
        else:
            spoken = [self._passwords[i] for i in rng.integers(0, len(self._passwords), count).tolist()]
            values = [self._words[word] for word in spoken]
        return _Drawn(self, form, [names[i] for i in chosen], values, spoken)

    def fact(self, form: int, name: list[int], value: list[int]) -> list[int]:
        start, _, verb, _ = self._forms[form]
        return [*start, *name, *verb, *value, *self._stop]

    def answer(self, form: int, name: list[int], value: list[int]) -> list[int]:
        _, start, verb, _ = self._forms[form]
        return [*start, *name, *verb, *value, *self._stop]

    def question(self, form: int, name: list[int]) -> list[int]:
        return [*self._forms[form][3], *name, *self._mark]


@dataclass(frozen=True)
class _Drawn:
    facts: _Facts
    form: int
    names: list[list[int]]
    values: list[list[int]]
    spoken: list[str]

    def fact(self, index: int) -> list[int]:
        return self.facts.fact(self.form, self.names[index], self.values[index])

    def question(self, index: int) -> list[int]:
        return self.facts.question(self.form, self.names[index])

    def answer(self, index: int) -> list[int]:
        return self.facts.answer(self.form, self.names[index], self.values[index])


class _Sentences:
    """Finds the places in tokens where a sentence ends and another one starts.

    Before a place stands an end mark, behind it a blank and a capital letter: there the tokenizer cuts whatever the
    neighbours are.
    """

    def __init__(self, tokenizer: Tokenizer):
        spelled = [tokenizer.token_bytes(token) for token in range(tokenizer.num_ranks)]
        spelled += [b""] * (tokenizer.vocab_size - tokenizer.num_ranks)
        self._ends = np.array([s.rstrip(b"\"')").endswith((b".", b"!", b"?")) for s in spelled])
        self._starts = np.array([s[:1] == b" " and s[1:2].isalpha() and s[1:2].isupper() for s in spelled])
        self._titles = np.array([s.strip() in (b"Mr", b"Mrs", b"Dr", b"St", b"Messrs") for s in spelled])

    def places(self, document: np.ndarray) -> np.ndarray:
        """Indices of the tokens that start a sentence, but the document's first."""
        after = np.flatnonzero(self._ends[document[:-1]] & self._starts[document[1:]]) + 1
        return after[~self._titles[document[np.maximum(after - 2, 0)]]]


class _Haystack:
    """The books as one row of tokens, `tokens`, with the places of `_Sentences` in it, `places`.

    Of each document what lies between its first and its last place is kept.
    """

    def __init__(self, sentences: _Sentences, documents: Sequence[np.ndarray]):
        pieces, places, at = [], [], 0
        for document in documents:
            found = sentences.places(document)
            if len(found) > 1:
                places.append(found[:-1] - found[0] + at)
                pieces.append(document[found[0] : found[-1]])
                at += len(pieces[-1])
        self.tokens = np.concatenate(pieces) if pieces else np.zeros(0, np.uint16)
        self.places = np.concatenate([*places, [at]]).astype(np.int64)

    def slice(self, rng: np.random.Generator, size: int) -> tuple[int, int]:
        """Indices into `places` of a random stretch of at most `size` tokens, as long as its sentences let it be.

        The two are equal when no sentence that was tried is short enough.
        """
        last = max(1, int(np.searchsorted(self.places, len(self.tokens) - size, "right")))
        start = stop = 0
        for _ in range(_TRIES):
            start = int(rng.integers(last))
            stop = int(np.searchsorted(self.places, self.places[start] + size, "right")) - 1
            if stop > start:
                break
        return start, stop


@dataclass(frozen=True)
class _Story:
    """A document about a noun; `ends[i]` is a bound on the tokens of its first i + 1 paragraphs."""

    noun: str
    paragraphs: list[str]
    ends: np.ndarray


_INTRODUCTIONS = (
    "Read this text and remember the facts in it.",
    "Here is a text.",
    "There are some facts hidden in this text.",
    "I will ask you about this text.",
)
_CLOSING = " The text ends here.\n\n"


class Tasks:
    """Makes examples.

    Args:
        tokenizer: kimi-tiny's.
        documents: of the train part, uint16, each ending with `[EOS]`: the text in which facts are planted.
        stories: documents to tell stories from; None: `documents`.

    Raises:
        ValueError: the documents have no sentences to plant facts between, or no story about anything in `NOUNS`.
    """

    def __init__(
        self, tokenizer: Tokenizer, documents: Sequence[np.ndarray], stories: Sequence[np.ndarray] | None = None
    ):
        self.tokenizer = tokenizer
        self._frames = {thinking: _Frame(tokenizer, thinking) for thinking in (True, False)}
        self._facts = _Facts(tokenizer)
        self._haystack = _Haystack(_Sentences(tokenizer), documents)
        if len(self._haystack.places) < 2:
            raise ValueError(f"The {len(documents)} documents have no two sentences in a row to plant a fact between.")
        self.vocabulary = _vocabulary(tokenizer, documents)
        self._introductions = [tokenizer.encode(text) for text in _INTRODUCTIONS]
        self._closing = tokenizer.encode(_CLOSING)
        self._cache: dict[Segment, list[int]] = {}
        self._stories = self._find_stories(documents if stories is None else stories)
        if not self._stories:
            raise ValueError("The stories have no document that speaks of one of the words in NOUNS twice.")

    def sample(self, rng: np.random.Generator, kind: Kind, max_tokens: int) -> Example:
        """A training example.

        Args:
            rng: of the stream.
            kind: of the task.
            max_tokens: bound on the tokens; a recall is as long as its sentences let it be, a story may be cut there.

        Raises:
            ValueError: an unknown kind, or a bound under 200 (recall) or under what an example of the kind has.
        """
        if kind not in KINDS:
            raise ValueError(f"kind is {kind!r}; legal kinds are {', '.join(KINDS)}.")
        thinking = rng.random() >= _THINKING_OFF
        if kind == "recall":
            return self._recall_mix(rng, max_tokens, thinking)
        for _ in range(_TRIES):
            if kind == "stories":
                example = self._story(rng, max_tokens, thinking)
            elif kind == "tools":
                chat = tool_chat(rng, heldout=False, vocabulary=self.vocabulary)
                example = self.encode(chat.messages, chat.tools, thinking=thinking)
            elif kind == "arithmetic":
                example = self.encode(arithmetic(rng, heldout=False), thinking=thinking)
            elif kind == "lists":
                words = word_list(rng, heldout=False, vocabulary=self.vocabulary)
                example = self.encode(words, thinking=thinking)
            else:
                example = self.encode(smalltalk(rng), thinking=thinking)
            if len(example.tokens) <= max_tokens:
                return example
        raise ValueError(f"max_tokens={max_tokens} is too small for an example of kind {kind!r}.")

    def recall(
        self,
        rng: np.random.Generator,
        length: int,
        *,
        num_facts: int,
        depth: float | None = None,
        questions: int = 1,
        form: Literal["code", "password"] = "code",
        heldout: bool = False,
        thinking: bool = True,
    ) -> Recall:
        """A text with planted facts and questions about them.

        Args:
            rng: of the stream.
            length: bound on the tokens of the whole conversation; it comes close, sentences being whole.
            num_facts: facts in the text, of one form, with different names.
            depth: where the first fact that is asked for stands, 0 to 1; None: anywhere, evenly.
            questions: number of questions, each a turn, about different facts.
            form: what a fact tells: a code of five digits, or a word.
            heldout: names for the evaluation, which training never has.
            thinking: as in `Kimi.chat`, whose default is True.

        Raises:
            ValueError: more questions than facts, a depth outside 0 to 1, or a length without room for a sentence.
        """
        if not 1 <= questions <= num_facts:
            raise ValueError(f"questions={questions} must be 1 to num_facts={num_facts}.")
        if depth is not None and not 0 <= depth <= 1:
            raise ValueError(f"depth is {depth}; legal is 0 (the beginning of the text) to 1 (its end), or None.")
        drawn = self._facts.draw(rng, num_facts, heldout=heldout, form=("code", "password").index(form))
        frame = self._frames[thinking]
        introduction = self._introductions[int(rng.integers(len(self._introductions)))]
        facts = [_ids(drawn.fact(i)) for i in range(num_facts)]
        turns = [(_ids(drawn.question(i)), _ids(drawn.answer(i))) for i in range(questions)]
        fixed = frame.num_tokens(questions) + len(introduction) + len(self._closing)
        room = length - fixed - sum(map(len, facts)) - sum(len(q) + len(a) for q, a in turns)
        start, stop = self._haystack.slice(rng, room) if room > 0 else (0, 0)
        if start >= stop:
            raise ValueError(
                f"length={length} leaves {room} tokens for text beside num_facts={num_facts} facts and "
                f"questions={questions} questions; give more."
            )
        places = self._haystack.places[start : stop + 1]
        depths = rng.random(num_facts)
        if depth is not None:
            depths[0] = depth
        planted = np.searchsorted(places, places[0] + depths * (places[-1] - places[0]))
        order = np.argsort(planted, kind="stable").tolist()
        pieces, at = [_ids(introduction)], int(places[0])
        for index in order:
            place = int(places[planted[index]])
            pieces += [self._haystack.tokens[at:place], facts[index]]
            at = place
        pieces += [self._haystack.tokens[at : int(places[-1])], _ids(self._closing), turns[0][0]]
        content = np.concatenate(pieces)
        whole = frame.example([(content, turns[0][1]), *turns[1:]])
        real = (places[planted[0]] - places[0]) / (places[-1] - places[0])
        return Recall(
            whole.tokens,
            whole.loss_mask,
            prompt=frame.prompt(content),
            answer=frame.answer(turns[0][1]),
            value=drawn.spoken[0],
            depth=float(real),
            num_facts=num_facts,
            content=content,
            tokenizer=self.tokenizer,
        )

    def encode(
        self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None = None, *, thinking: bool = True
    ) -> Example:
        """A finished conversation, as `Kimi.chat` renders it."""
        segments = FORMAT.render(messages, tools=tools, thinking=thinking, add_generation_prompt=False)
        ids: list[int] = []
        mask: list[bool] = []
        given = 0
        for segment in segments:
            # The opening of `think` or `response`, three segments, belongs to the prompt.
            given = given + 1 if segment.assistant else 0
            new = self._encode_segment(segment)
            ids += new
            mask += [given > 3] * len(new)
        return Example(np.array(ids, np.uint16), np.array(mask, bool))

    def heldout_tool_prompts(
        self, n: int, seed: int = 0
    ) -> list[tuple[Messages, list[dict[str, Any]], dict[str, Any]]]:
        """Requests with words and combinations that no training example has.

        Returns:
            n times (messages, tools, expected call: `{"name": ..., "arguments": {...}}`), all calls different.
        """
        rng = np.random.default_rng([0x7001, seed])
        found: dict[str, tuple[Messages, list[dict[str, Any]], dict[str, Any]]] = {}
        while len(found) < n:
            chat = tool_chat(rng, heldout=True, num_tools=len(found) % MAX_TOOLS + 1)
            assert chat.call is not None
            found.setdefault(json.dumps(chat.call), (chat.messages[:1], chat.tools, chat.call))
        return list(found.values())

    def heldout_arithmetic(self, n: int, seed: int = 0) -> list[tuple[Messages, str]]:
        """Sums that no training example has: n times (messages, expected answer)."""
        rng = np.random.default_rng([0x7002, seed])
        chats = [arithmetic(rng, heldout=True) for _ in range(n)]
        return [(chat[:1], chat[1]["content"]) for chat in chats]

    def heldout_lists(self, n: int, seed: int = 0) -> list[tuple[Messages, str]]:
        """Lists that no training example has: n times (messages, expected answer)."""
        rng = np.random.default_rng([0x7003, seed])
        chats = [word_list(rng, heldout=True) for _ in range(n)]
        return [(chat[:1], chat[1]["content"]) for chat in chats]

    def heldout_recalls(self, n: int, length: int, *, num_facts: int = 16, seed: int = 0) -> list[Recall]:
        """Recalls of a code whose names no training example has; depths are spread evenly from 0 to 1."""
        rng = np.random.default_rng([0x7004, seed])
        depths = (np.arange(n) + 0.5) / n
        return [self.recall(rng, length, num_facts=num_facts, depth=float(d), heldout=True) for d in depths]

    def _recall_mix(self, rng: np.random.Generator, max_tokens: int, thinking: bool) -> Recall:
        # A fact has about 15 tokens, and so has a question with its answer twice that: keep half for the text.
        most = max(1, min(64, (max_tokens - 150) // 60))
        num_facts = 1 + int(rng.integers(most))
        questions = 1 + int(rng.integers(min(num_facts, 12)))
        form: Literal["code", "password"] = "code" if rng.random() < 0.75 else "password"
        while True:
            try:
                return self.recall(
                    rng, max_tokens, num_facts=num_facts, questions=questions, form=form, thinking=thinking
                )
            except ValueError:
                if questions == num_facts == 1:
                    raise
                num_facts = max(1, num_facts // 2)
                questions = min(questions, num_facts, 2)

    def _story(self, rng: np.random.Generator, max_tokens: int, thinking: bool) -> Example:
        frame = self._frames[thinking]
        story = self._stories[int(rng.integers(len(self._stories)))]
        question = self.tokenizer.encode(_STORY[int(rng.integers(len(_STORY)))].format(story.noun))
        room = max_tokens - frame.num_tokens(1) - len(question)
        # At least a paragraph: what is too long is thrown away by the caller.
        count = max(1, int(np.searchsorted(story.ends, room, "right")))
        return frame.example([(question, self.tokenizer.encode("\n\n".join(story.paragraphs[:count])))])

    def _find_stories(self, documents: Sequence[np.ndarray]) -> list["_Story"]:
        """The documents whose first part has one of the nouns twice."""
        nouns = {self.tokenizer.encode(f" {noun}")[0]: noun for noun in NOUNS if self._is_token(f" {noun}")}
        lookup = np.zeros(self.tokenizer.vocab_size, bool)
        lookup[list(nouns)] = True
        found = []
        for document in documents:
            head = document[:_STORY_HEAD]
            values, counts = np.unique(head[lookup[head]], return_counts=True)
            if len(values) and counts.max() > 1:
                paragraphs = self.tokenizer.decode(document[:-1].tolist()).split("\n\n")
                ends = np.cumsum([len(self.tokenizer.encode(f"{paragraph}\n\n")) for paragraph in paragraphs])
                found.append(_Story(nouns[int(values[counts.argmax()])], paragraphs, ends))
        return found

    def _is_token(self, text: str) -> bool:
        return len(self.tokenizer.encode(text)) == 1

    def _encode_segment(self, segment: Segment) -> list[int]:
        if len(segment.text) > 40:
            return self.tokenizer.encode(segment.text, allow_special=segment.structural)
        key = Segment(segment.text, segment.structural)
        ids = self._cache.get(key)
        if ids is None:
            ids = self.tokenizer.encode(segment.text, allow_special=segment.structural)
            if len(self._cache) < _CACHE_SIZE:
                self._cache[key] = ids
        return ids


def load_tasks(directory: Path, tokenizer: Tokenizer) -> Tasks:
    """Tasks over the train documents of a work folder; stories come from tales and fiction."""
    path = directory / "corpus" / "train.npz"
    found = load_documents(path)
    with np.load(path) as arrays:
        kinds = arrays["kinds"][arrays["book"]]
    return Tasks(tokenizer, found, [d for d, kind in zip(found, kinds, strict=True) if kind in ("tales", "fiction")])


def _vocabulary(tokenizer: Tokenizer, documents: Sequence[np.ndarray]) -> tuple[str, ...]:
    """The words of a sample of the documents that no list holds out."""
    sample = documents[:: max(1, len(documents) // 200)]
    text = " ".join(tokenizer.decode(document[:2000].tolist()) for document in sample)
    found = set(re.findall(r"(?<![A-Za-z'])[a-z]{3,12}(?![A-Za-z'])", text))
    return tuple(sorted(word for word in found if not is_heldout(word) and not is_heldout(word.capitalize())))


def _ids(tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.asarray(tokens, np.uint16)
