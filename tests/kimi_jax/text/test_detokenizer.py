"""Whole characters only, whatever the bytes and however they are divided; stop strings cut where they begin."""

import random

import numpy as np
import pytest

from kimi_jax.text import StreamingDetokenizer, Tokenizer, XtmlFormat
from kimi_jax.text.detokenizer import Piece
from tests.kimi_jax.text.golden import load, name_of
from tests.kimi_jax.text.streams import SNIPPETS, XTML_MARKERS, every_cut, random_cuts, random_text

CASES = load("tokenizer-tiny", "decode_cases.json")["cases"]


def stream(detokenizer: StreamingDetokenizer, ids: list[int], cuts: list[int] | range) -> list[str]:
    pieces, begin = [], 0
    for end in [*cuts, len(ids)]:
        pieces.append(detokenizer.push(ids[begin:end]))
        begin = end
    return [*pieces, detokenizer.finish()]


@pytest.fixture(scope="module")
def single_bytes(tokenizer: Tokenizer) -> dict[int, int]:
    """The id of each byte."""
    tokens = {token_id: tokenizer.token_bytes(token_id) for token_id in range(tokenizer.num_ranks)}
    return {token[0]: token_id for token_id, token in tokens.items() if len(token) == 1}


def random_ids(rng: random.Random, tokenizer: Tokenizer, single_bytes: dict[int, int], length: int) -> list[int]:
    """Single bytes, whole tokens and control tokens: mostly not UTF-8."""
    single = list(single_bytes.values())
    high = [single_bytes[byte] for byte in range(0x80, 0x100)]
    kinds = (single, high, range(tokenizer.num_ranks), range(tokenizer.num_ranks, tokenizer.vocab_size))
    return [rng.choice(rng.choices(kinds, (3, 6, 3, 1))[0]) for _ in range(length)]


def cut_at_stop(text: str, stop: list[str]) -> str:
    """The definition: character by character; the first stop string to be complete, the longest if several are."""
    for end in range(len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_golden_streams(tokenizer: Tokenizer, case: dict) -> None:
    detokenizer = StreamingDetokenizer(tokenizer, skip_special=False)
    assert [detokenizer.push([token_id]) for token_id in case["ids"]] == case["stream_text_after_each_id"]
    assert detokenizer.finish() == case["stream_flush"]


@pytest.mark.parametrize("skip_special", [False, True])
def test_random_bytes_add_up_to_the_decoded_whole(
    tokenizer: Tokenizer, single_bytes: dict[int, int], skip_special: bool
) -> None:
    rng = random.Random(2)
    for _ in range(150):
        ids = random_ids(rng, tokenizer, single_bytes, rng.randrange(1, 60))
        whole = tokenizer.decode(ids, skip_special=skip_special)
        for cuts in (every_cut(ids), random_cuts(rng, len(ids)), []):
            pieces = stream(StreamingDetokenizer(tokenizer, skip_special=skip_special), ids, cuts)
            assert "".join(pieces) == whole


def test_valid_text_never_shows_half_a_character(tokenizer: Tokenizer, single_bytes: dict[int, int]) -> None:
    rng = random.Random(3)
    for _ in range(100):
        text = random_text(rng, (*SNIPPETS, *XTML_MARKERS), 30)
        # The bytes one by one: the worst division there is.
        ids = [single_bytes[byte] for byte in text.encode()]
        shown = ""
        detokenizer = StreamingDetokenizer(tokenizer)
        for token_id in ids:
            shown += detokenizer.push([token_id])
            assert text.startswith(shown)
        assert shown + detokenizer.finish() == text


def test_stop_strings_against_the_definition(tokenizer: Tokenizer) -> None:
    rng = random.Random(4)
    found = 0
    for _ in range(600):
        alphabet = rng.choice(("ab", "abc", "a中👋", "xyz\n "))
        text = "".join(rng.choice(alphabet) for _ in range(rng.randrange(40)))
        stop = ["".join(rng.choice(alphabet) for _ in range(rng.randrange(1, 7))) for _ in range(rng.randrange(1, 4))]
        ids = tokenizer.encode(text)
        want = cut_at_stop(text, stop)
        found += want != text
        results = set()
        for cuts in (every_cut(ids), random_cuts(rng, len(ids)), []):
            detokenizer = StreamingDetokenizer(tokenizer, stop=stop)
            assert "".join(stream(detokenizer, ids, cuts)) == want
            assert (detokenizer.stopped_by in stop) == (want != text)
            results.add((detokenizer.stopped_by, detokenizer.num_tokens))
        assert len(results) == 1
    assert found > 200


def test_stop_strings_mean_nothing_in_the_structure_nor_across_it(tokenizer: Tokenizer) -> None:
    """Against the definition: each stretch of content is looked at by itself, tags are passed over."""
    rng = random.Random(5)
    found = 0
    for _ in range(400):
        stop = ["".join(rng.choice("ab<|") for _ in range(rng.randrange(1, 5))) for _ in range(rng.randrange(1, 4))]
        ids: list[int] = []
        want = ""
        stopped = False
        for number in range(rng.randrange(1, 7)):
            text = "".join(rng.choice("ab<|中") for _ in range(rng.randrange(8)))
            if number % 2:
                opening = rng.choice(("<|open|>", "<|close|>"))
                ids += [tokenizer.control_id(opening), *tokenizer.encode(text), tokenizer.control_id("<|sep|>")]
                shown = f"{opening}{text}<|sep|>"
            else:
                ids += tokenizer.encode(text)
                shown = cut_at_stop(text, stop)
            want += "" if stopped else shown
            stopped = stopped or (number % 2 == 0 and shown != text)
        found += stopped
        for cuts in (every_cut(ids), random_cuts(rng, len(ids)), []):
            detokenizer = StreamingDetokenizer(tokenizer, stop=stop, structure=XtmlFormat.structure)
            assert "".join(stream(detokenizer, ids, cuts)) == want
            assert (detokenizer.stopped_by is not None) == stopped
    assert 100 < found < 350


def test_nothing_is_held_longer_than_it_must(tokenizer: Tokenizer) -> None:
    """After each id the text that is out is all but the longest end that begins a stop string."""
    text = "aab aabaac the end of it, aabaabaa"
    stop = ["aabaaba!", "end of time"]
    ids = tokenizer.encode(text)
    detokenizer = StreamingDetokenizer(tokenizer, stop=stop)
    shown = ""
    for count, token_id in enumerate(ids, start=1):
        shown += detokenizer.push([token_id])
        known = tokenizer.decode(ids[:count])
        held = max(n for n in range(len(known) + 1) if n == 0 or any(s.startswith(known[-n:]) for s in stop))
        assert shown == known[: len(known) - held]
    assert shown + detokenizer.finish() == text


def test_ids_behind_a_stop_string_are_not_taken(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one STOP two three")
    needed = next(n for n in range(len(ids)) if "STOP" in tokenizer.decode(ids[:n]))
    detokenizer = StreamingDetokenizer(tokenizer, stop="STOP")
    assert detokenizer.push(ids) == "one "
    assert (detokenizer.stopped_by, detokenizer.num_tokens) == ("STOP", needed)
    assert detokenizer.push(ids) == detokenizer.finish() == ""
    assert detokenizer.num_tokens == needed


def test_a_stop_string_that_ends_with_the_last_character(tokenizer: Tokenizer, single_bytes: dict[int, int]) -> None:
    half_a_character = single_bytes[0xC3]
    detokenizer = StreamingDetokenizer(tokenizer, stop="x\ufffd")
    assert detokenizer.push([*tokenizer.encode("ax"), half_a_character]) == "a"
    assert detokenizer.finish() == ""
    assert detokenizer.stopped_by == "x\ufffd"


def test_long_stop_strings_stay_linear(tokenizer: Tokenizer) -> None:
    detokenizer = StreamingDetokenizer(tokenizer, stop=["a" * 2000 + "b", "ab" * 1000])
    ids = tokenizer.encode("a" * 3000)
    assert "".join(stream(detokenizer, ids, every_cut(ids))) == "a" * 3000


def test_pieces_tell_control_tokens_from_text(tokenizer: Tokenizer) -> None:
    ids = [2003, *tokenizer.encode("<|open|>"), 2002]
    detokenizer = StreamingDetokenizer(tokenizer)
    pieces = detokenizer.push_pieces(ids)
    assert pieces[0] == Piece("<|open|>", tokenizer.control_token(2003))
    assert "".join(piece.text for piece in pieces[1:-1]) == "<|open|>"
    assert all(piece.control is None for piece in pieces[1:-1])
    assert pieces[-1] == Piece("", tokenizer.control_token(2002))


def test_a_stop_string_inside_a_control_token_leaves_no_piece_of_it(tokenizer: Tokenizer) -> None:
    detokenizer = StreamingDetokenizer(tokenizer, stop="open|>t")
    assert detokenizer.push([*tokenizer.encode("a"), 2003, *tokenizer.encode("think")]) == "a"
    assert detokenizer.stopped_by == "open|>t"


def test_requests_do_not_see_each_other(tokenizer: Tokenizer) -> None:
    a, b = StreamingDetokenizer(tokenizer, stop="!!"), StreamingDetokenizer(tokenizer)
    ids = tokenizer.encode("你好 👋 fine!")
    shown = {"a": "", "b": ""}
    for token_id in ids:
        shown["a"] += a.push([token_id])
        shown["b"] += b.push(np.array([token_id], np.int32))
    assert shown["a"] + a.finish() == shown["b"] + b.finish() == "你好 👋 fine!"


def test_misuse_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"stop\[1\] is empty"):
        StreamingDetokenizer(tokenizer, stop=["a", ""])
    with pytest.raises(ValueError, match=r"stop\[0\] has the lone surrogate U\+D800"):
        StreamingDetokenizer(tokenizer, stop="\ud800")
    detokenizer = StreamingDetokenizer(tokenizer)
    with pytest.raises(ValueError, match="Token id 2256"):
        detokenizer.push([2256])
    detokenizer.finish()
    with pytest.raises(ValueError, match=r"after finish\(\)"):
        detokenizer.push([0])
