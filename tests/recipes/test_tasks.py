import json
import re
import zlib
from typing import Any, Literal, get_args

import numpy as np
import pytest

from kimi_jax.generate.chat import ChatOptions
from kimi_jax.generate.language import Language
from kimi_jax.text import Tokenizer, chat_format, collect
from recipes.kimi_tiny import chats as module
from recipes.kimi_tiny import words
from recipes.kimi_tiny.tasks import KINDS, Example, Kind, Tasks
from recipes.kimi_tiny.tools import TOOLS

FORMAT = chat_format("kimi_k31")


@pytest.fixture(scope="module")
def tasks(bpe: Tokenizer, documents: list[np.ndarray]) -> Tasks:
    return Tasks(bpe, documents)


def prompt(bpe: Tokenizer, messages: module.Messages, **options: Any) -> list[int]:
    """What `Kimi.chat` sends."""
    language = Language("kimi_k31", FORMAT.stop_ids(bpe), bpe)
    return ChatOptions(**options).prompt(language, messages).tolist()


def written(example: Example) -> list[tuple[int, int]]:
    """Begin and end of each stretch that the assistant writes."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], example.loss_mask, [False]]).astype(int)))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("form", ["code", "password"])
def test_joined_pieces_are_the_encoding_of_the_whole_text(
    tasks: Tasks, bpe: Tokenizer, form: Literal["code", "password"], thinking: bool
) -> None:
    rng = np.random.default_rng(3)
    for length, num_facts, questions in ((400, 1, 1), (900, 4, 3), (3000, 20, 2), (3000, 40, 7)):
        recall = tasks.recall(rng, length, num_facts=num_facts, questions=questions, form=form, thinking=thinking)
        text = recall.messages[0]["content"]
        assert bpe.encode(text) == recall.content.tolist()
        assert prompt(bpe, recall.messages, thinking=thinking) == recall.prompt.tolist()
        assert recall.tokens[: len(recall.prompt)].tolist() == recall.prompt.tolist()
        # The whole conversation, rendered turn by turn from its text.
        parts = re.split(r"<\|open\|>message role=\"(?:user|assistant)\"<\|sep\|>", bpe.decode(recall.tokens.tolist()))
        turns = [
            re.sub(r"<\|(open|close)\|>(?:message|think|response)<\|sep\|>|<\|end_of_msg\|>", "", p) for p in parts[1:]
        ]
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
        assert len(messages) == 2 * questions
        whole = tasks.encode(messages, thinking=thinking)
        assert whole.tokens.tolist() == recall.tokens.tolist()
        assert whole.loss_mask.tolist() == recall.loss_mask.tolist()


def test_a_fact_can_only_be_looked_up(tasks: Tasks) -> None:
    rng = np.random.default_rng(5)
    for _ in range(20):
        recall = tasks.recall(rng, 1500, num_facts=8)
        text, question = recall.messages[0]["content"].rsplit("\n\n", 1)
        name = re.fullmatch(r"What is the secret code of the (\w+ \w+)\?", question)
        assert name is not None
        facts = dict(re.findall(r"The secret code of the (\w+ \w+) is (\d{5})\.", text))
        assert len(facts) == 8
        assert facts[name[1]] == recall.value
        assert text.count(recall.value) == 1
        assert f" {recall.value}." in tasks.tokenizer.decode(recall.answer.tolist())


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.8, 1.0])
def test_the_asked_fact_stands_at_its_depth(tasks: Tasks, depth: float) -> None:
    recall = tasks.recall(np.random.default_rng(2), 3000, num_facts=5, depth=depth)
    assert recall.depth == pytest.approx(depth, abs=0.02)
    text = recall.messages[0]["content"]
    assert text.index(recall.value) / len(text) == pytest.approx(depth, abs=0.06)


def test_recall_comes_close_to_its_length_and_values_are_even(tasks: Tasks) -> None:
    rng = np.random.default_rng(2)
    for length in (300, 1000, 4000):
        sizes = [len(tasks.recall(rng, length, num_facts=1).tokens) for _ in range(20)]
        assert length - 40 < min(sizes)
        assert max(sizes) <= length
    digits = "".join(tasks.recall(rng, 300, num_facts=1).value for _ in range(400))
    counts = np.array([digits.count(str(d)) for d in range(10)])
    assert ((counts - 200) ** 2 / 200).sum() < 27.9, "chi-squared with 9 degrees of freedom, p = 0.001"


def test_recall_refuses_what_it_cannot_do(tasks: Tasks) -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="questions=3 must be 1 to num_facts=2"):
        tasks.recall(rng, 1000, num_facts=2, questions=3)
    with pytest.raises(ValueError, match=r"depth is 1\.5"):
        tasks.recall(rng, 1000, num_facts=2, depth=1.5)
    with pytest.raises(ValueError, match=r"length=200 leaves -?[0-9]+ tokens for text beside num_facts=30"):
        tasks.recall(rng, 200, num_facts=30)


@pytest.mark.parametrize("kind", KINDS)
def test_examples_are_chats_that_the_parser_reads(tasks: Tasks, bpe: Tokenizer, kind: Kind) -> None:
    rng = np.random.default_rng(7)
    for limit in (600, 2000):
        for _ in range(15):
            example = tasks.sample(rng, kind, limit)
            assert (example.tokens.dtype, example.loss_mask.dtype) == (np.uint16, bool)
            assert len(example.tokens) == len(example.loss_mask) <= limit
            for begin, end in written(example):
                before = bpe.decode(example.tokens[:begin].tolist())
                thinking = before.endswith("<|open|>think<|sep|>")
                assert thinking or before.endswith("<|open|>response<|sep|>")
                parser = FORMAT.parser(bpe, thinking=thinking)
                answer = collect([*parser.push_ids(example.tokens[begin:end].tolist()), *parser.finish()])
                assert not answer.errors
                assert answer.text or answer.tool_calls
                assert bpe.decode([example.tokens[end - 1]]) == "<|end_of_msg|>"


def test_a_stream_is_its_seed(tasks: Tasks) -> None:
    for kind in KINDS:
        first, again, other = (
            tasks.sample(np.random.default_rng(seed), kind, 900).tokens.tolist() for seed in (1, 1, 2)
        )
        assert first == again
        assert first != other or kind == "smalltalk"


def test_unknown_kinds_and_small_bounds_are_refused(tasks: Tasks) -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="kind is 'jokes'; legal kinds are recall, tools"):
        tasks.sample(rng, "jokes", 500)  # type: ignore[arg-type]
    for kind in get_args(Kind):
        with pytest.raises(ValueError, match=r"max_tokens=40 is too small|length=40 leaves"):
            tasks.sample(rng, kind, 40)


def test_tool_chats_are_rendered_as_kimi_chat_sends_them(tasks: Tasks, bpe: Tokenizer) -> None:
    rng = np.random.default_rng(11)
    for _ in range(30):
        chat = module.tool_chat(rng, heldout=False)
        example = tasks.encode(chat.messages, chat.tools)
        for (begin, _), index in zip(written(example), range(1, len(chat.messages), 2), strict=True):
            assert example.tokens[:begin].tolist() == prompt(bpe, chat.messages[:index], tools=chat.tools)


def test_the_call_can_be_read_from_the_request() -> None:
    rng = np.random.default_rng(13)
    used = set()
    for _ in range(400):
        chat = module.tool_chat(rng, heldout=False)
        if chat.call is None:
            assert len(chat.messages) == 2
            continue
        used.add(chat.call["name"])
        assert chat.call["name"] in [tool["function"]["name"] for tool in chat.tools]
        schema = next(t["function"]["parameters"] for t in chat.tools if t["function"]["name"] == chat.call["name"])
        assert set(chat.call["arguments"]) == set(schema["properties"]) == set(schema["required"])
        types: dict[str, Any] = {"string": str, "integer": int, "number": (int, float), "boolean": bool}
        for key, value in chat.call["arguments"].items():
            kind = schema["properties"][key]
            assert isinstance(value, types[kind["type"]])
            assert value in kind.get("enum", [value])
            spoken = {True: ("with shuffle", " on"), False: ("without shuffle", " off")}
            said = spoken[value] if isinstance(value, bool) else (str(value),)
            assert any(text in chat.messages[0]["content"] for text in said)
    assert used == {tool.name for tool in TOOLS}


def test_what_the_evaluation_asks_training_never_has(tasks: Tasks) -> None:
    assert all(words.is_heldout(text) == (zlib.crc32(text.encode()) % 8 == 0) for text in ("a", "amber falcon", "b"))
    heldout = tasks.heldout_tool_prompts(200)
    assert len({json.dumps(call) for _, _, call in heldout}) == 200
    assert {len(tools) for _, tools, _ in heldout} == {1, 2, 3, 4}
    new = {word for _, _, call in heldout for word in re.findall("[A-Za-z]{4,}", json.dumps(call["arguments"]))}
    rng = np.random.default_rng(17)
    chats = [module.tool_chat(rng, heldout=False) for _ in range(1000)]
    seen_calls = {json.dumps(chat.call) for chat in chats}
    assert seen_calls.isdisjoint(json.dumps(call) for _, _, call in heldout)
    free = {word for pool in (words.PEOPLE, words.CITIES, words.THINGS, words.TOPICS) for word in pool.words}
    listed = {word for word in new if word in free}
    assert len(listed) > 15
    text = " ".join(message["content"] for chat in chats for message in chat.messages)
    lists = " ".join(module.word_list(rng, heldout=False)[0]["content"] for _ in range(500))
    assert listed.isdisjoint(re.findall("[A-Za-z]+", text + lists))


def test_heldout_recalls_have_new_names_and_even_depths(tasks: Tasks) -> None:
    heldout = tasks.heldout_recalls(10, 1500, num_facts=6)
    np.testing.assert_allclose([r.depth for r in heldout], (np.arange(10) + 0.5) / 10, atol=0.04)
    name = re.compile(r"code of the (\w+ \w+) is")
    assert all(words.is_heldout(n) for r in heldout for n in name.findall(r.messages[0]["content"]))
    rng = np.random.default_rng(1)
    trained = [n for _ in range(50) for n in name.findall(tasks.recall(rng, 2000, num_facts=20).messages[0]["content"])]
    assert len(trained) >= 1000
    assert not any(map(words.is_heldout, trained))
    assert [r.value for r in heldout] == [r.value for r in tasks.heldout_recalls(10, 1500, num_facts=6)]
    assert [r.value for r in heldout] != [r.value for r in tasks.heldout_recalls(10, 1500, num_facts=6, seed=1)]


def test_sums_are_right_and_the_evaluations_are_new(tasks: Tasks) -> None:
    rng = np.random.default_rng(19)
    seen = set()
    for chat in (module.arithmetic(rng, heldout=False) for _ in range(500)):
        answer = chat[1]["content"]
        a, op, b, result = re.fullmatch(r"(\d+) ([+-]) (\d+) = (\d+)", answer).groups()  # type: ignore[union-attr]
        assert int(result) == (int(a) + int(b) if op == "+" else int(a) - int(b))
        assert max(map(len, (a, b, result))) <= 3
        assert f"{a} {op} {b}" in chat[0]["content"]
        seen.add(answer)
    heldout = tasks.heldout_arithmetic(100)
    assert seen.isdisjoint(answer for _, answer in heldout)


def test_lists_are_repeated_or_reversed(tasks: Tasks) -> None:
    rng = np.random.default_rng(23)
    for chat in (module.word_list(rng, heldout=False) for _ in range(100)):
        listed = chat[0]["content"].split(": ")[1].split(", ")
        backwards = "everse" in chat[0]["content"] or "backwards" in chat[0]["content"]
        assert chat[1]["content"].split(", ") == (listed[::-1] if backwards else listed)
    assert len(tasks.heldout_lists(20)) == 20


def test_stories_are_whole_paragraphs_about_what_was_asked(
    tasks: Tasks, bpe: Tokenizer, documents: list[np.ndarray]
) -> None:
    rng = np.random.default_rng(29)
    texts = [bpe.decode(d[:-1].tolist()) for d in documents]
    for _ in range(20):
        example = tasks.sample(rng, "stories", 900)
        text = bpe.decode(example.tokens.tolist())
        question, story = re.findall(r"<\|sep\|>([^<]*\w[^<]*)<\|close\|>(?:message|response)", text)[-2:]
        noun = re.search(r"(\w+)[.?]$", question)
        assert noun is not None
        source = next(t for t in texts if t.startswith(story))
        assert len(re.findall(rf"\b{noun[1]}\b", source)) > 1
        assert source[len(story) :][:2] in ("", "\n\n")


def test_documents_without_sentences_or_stories_are_refused(bpe: Tokenizer) -> None:
    with pytest.raises(ValueError, match="The 1 documents have no two sentences in a row"):
        Tasks(bpe, [np.array(bpe.encode("no end and no beginning"), np.uint16)])
    plain = np.array(bpe.encode("The one is here. The two is there. The three is gone. The four"), np.uint16)
    with pytest.raises(ValueError, match="no document that speaks of one of the words in NOUNS"):
        Tasks(bpe, [plain])


def test_words_of_the_books_are_copied_in_training_and_never_held_out(tasks: Tasks) -> None:
    assert tasks.vocabulary
    for word in tasks.vocabulary:
        assert not words.is_heldout(word)
        assert not words.is_heldout(word.capitalize())
    plain, mixed = (
        {
            json.dumps(module.tool_chat(np.random.default_rng(seed), heldout=heldout, vocabulary=tasks.vocabulary).call)
            for seed in range(300)
        }
        for heldout in (True, False)
    )
    known = set(tasks.vocabulary) | {word.capitalize() for word in tasks.vocabulary}
    listed = {word for pool in (words.PEOPLE, words.CITIES, words.THINGS, words.TOPICS) for word in pool.words}
    fresh = known - listed - {word.capitalize() for word in listed}
    found = [set(re.findall(r"[A-Za-z]+", " ".join(calls))) & fresh for calls in (plain, mixed)]
    # What a template says may be a word of the books too.
    assert len(found[1]) > len(found[0])


def test_the_evaluation_draws_nothing_from_the_vocabulary(tasks: Tasks) -> None:
    for heldout in (module.tool_chat, module.word_list):
        ours, without = (
            heldout(np.random.default_rng(5), heldout=True, vocabulary=vocabulary)
            for vocabulary in (tasks.vocabulary, ())
        )
        assert ours == without
