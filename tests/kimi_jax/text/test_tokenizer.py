"""The golden ids, and laws: text comes back, text never becomes a control token, nothing of any kind crashes."""

import hashlib
import json
import random
import time
from pathlib import Path

import pytest

from kimi_jax.text import ControlToken, Segment, Tokenizer, k2, xtml
from kimi_jax.text.tokenizer import PRETOKENIZER, _cuts, read_ranks
from tests.kimi_jax.text.golden import load, name_of, path
from tests.kimi_jax.text.streams import K2_MARKERS, OTHER_MARKERS, SNIPPETS, XTML_MARKERS, random_text

RANK_FILE = path("tokenizer-tiny", "tiktoken.model")
DECODE = load("tokenizer-tiny", "decode_cases.json")


def test_pretokenizer_is_the_golden_one() -> None:
    golden = load("tokenizer-tiny", "pretokenizer.json")
    assert golden["joined_with"].join(golden["alternatives_in_order"]) == PRETOKENIZER


@pytest.mark.parametrize("case", load("tokenizer-tiny", "encode_cases.json"), ids=name_of)
def test_golden_encoding(tokenizer: Tokenizer, case: dict) -> None:
    text = case["text"] if "text" in case else "".join(part * count for part, count in case["text_build"])
    ids = tokenizer.encode(text, allow_special=case["allow_special"])
    if "ids" in case:
        assert ids == case["ids"]
    else:
        assert len(ids) == case["n_tokens"]
        assert (ids[:8], ids[-8:]) == (case["first_ids"], case["last_ids"])
        assert hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest() == case["sha256_ids_csv"]
    assert tokenizer.decode(ids) == text
    if not case["allow_special"]:
        assert all(token_id < tokenizer.num_ranks for token_id in ids)


@pytest.mark.parametrize("case", DECODE["cases"], ids=name_of)
def test_golden_decoding(tokenizer: Tokenizer, case: dict) -> None:
    assert tokenizer.decode(case["ids"]) == case["text_replace"]
    assert b"".join(map(tokenizer.token_bytes, case["ids"])).hex() == case["bytes_hex"]


def test_skipping_special_removes_exactly_the_special_ids(tokenizer: Tokenizer) -> None:
    golden = DECODE["skip_special"]
    assert (
        tokenizer.decode(golden["ids"], skip_special=True) == golden["skip_special_tokens_true_without_inserted_blanks"]
    )
    assert tokenizer.decode(golden["ids"]) == golden["skip_special_tokens_false"]
    # Each control id by itself, between two characters.
    kept = load("tokenizer-tiny", "special_tokens.json")["kept_by_skip_special_tokens"]
    x = tokenizer.encode("x")
    for token in tokenizer.control_tokens:
        ids = [*x, token.id, *x]
        assert tokenizer.decode(ids) == f"x{token.name}x"
        assert tokenizer.decode(ids, skip_special=True) == (f"x{token.name}x" if token.name in kept else "xx")


def test_every_control_id_survives_encoding_and_decoding(tokenizer: Tokenizer) -> None:
    named = load("tokenizer-tiny", "special_tokens.json")["named"]
    assert len(tokenizer.control_tokens) == 256
    for token in tokenizer.control_tokens:
        assert token.name == f"<|reserved_token_{token.id}|>" or named[token.name] == token.id
        assert tokenizer.encode(token.name, allow_special=True) == [token.id]
        assert tokenizer.decode(tokenizer.encode(token.name)) == token.name
        assert token.id not in tokenizer.encode(token.name)
        assert tokenizer.control_id(token.name) == token.id
        assert tokenizer.control_token(token.id) == token


def test_text_of_any_kind_comes_back(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    snippets = (*SNIPPETS, *XTML_MARKERS, *K2_MARKERS, *OTHER_MARKERS, "<|reserved_token_2100|>")
    for _ in range(400):
        text = random_text(rng, snippets, 40)
        if rng.random() < 0.5:
            points = (rng.choice((rng.randrange(0xD800), rng.randrange(0xE000, 0x110000))) for _ in range(30))
            text += "".join(map(chr, points))
        ids = tokenizer.encode(text)
        assert all(token_id < tokenizer.num_ranks for token_id in ids)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(ids, skip_special=True) == text
        assert tokenizer.decode(tokenizer.encode(text, allow_special=True)) == text


@pytest.mark.parametrize("text", ["\ud800", "ok \udfff", "a\udc80b", "😀\ud83d"])
def test_lone_surrogates_are_refused(tokenizer: Tokenizer, text: str) -> None:
    position = next(i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff")
    with pytest.raises(
        ValueError, match=rf"text has the lone surrogate U\+{ord(text[position]):04X} at character {position}"
    ):
        tokenizer.encode(text)
    with pytest.raises(ValueError, match="lone surrogate"):
        tokenizer.encode_segments([Segment(text, False)])


@pytest.mark.parametrize(
    "text", ["a", " ", "!", "\n", "中", "😀", "a!", "'s", " \n", "\u0301", "word and ", "<|open|>", "A1 "], ids=ascii
)
def test_100_kilobytes_of_anything_are_fast(tokenizer: Tokenizer, text: str) -> None:
    prompt = text * (100_000 // len(text.encode()))
    start = time.perf_counter()
    ids = tokenizer.encode(prompt)
    # Takes about 0.03 s; quadratic work would take minutes.
    assert time.perf_counter() - start < 3
    assert tokenizer.decode(ids) == prompt


def test_cuts_follow_the_definition() -> None:
    """Against a loop over characters that counts the run, restarting every 400,000 characters."""

    def definition(text: str) -> list[int]:
        cuts, run, blank = [], 0, None
        for i, character in enumerate(text):
            if i and i % 400_000 == 0:
                cuts.append(i)
                run, blank = 0, None
            if character.isspace() != blank:
                run, blank = 0, character.isspace()
            run += 1
            if run > 25_000:
                cuts.append(i)
                run = 1
        return cuts

    rng = random.Random(1)
    texts = ["", "a", "a" * 25_000, "a" * 25_001, "a" * 400_000, "a" * 425_001, " " * 399_999 + "a" * 30_000]
    texts += [
        "".join(rng.choice("a \n\u3000\x1c\u200b") * rng.choice((1, 9, 24_999, 50_001)) for _ in range(20))
        for _ in "abcd"
    ]
    for text in texts:
        assert list(_cuts(text)) == definition(text)


def test_blanks_of_the_pattern_are_those_of_the_definition() -> None:
    import re

    everything = "".join(map(chr, range(0x110000)))
    assert "".join(re.findall(r"\s", everything)) == "".join(filter(str.isspace, everything))


def test_a_cut_never_falls_into_a_control_token(tokenizer: Tokenizer) -> None:
    sep = tokenizer.control_id("<|sep|>")
    for before in (24_992, 24_993, 24_996, 24_999, 25_000):
        ids = tokenizer.encode("a" * before + "<|sep|>b", allow_special=True)
        assert ids.count(sep) == 1
        assert tokenizer.decode(ids) == "a" * before + "<|sep|>b"


def test_segments_are_encoded_one_by_one(tokenizer: Tokenizer) -> None:
    segments = [Segment("<|open|>", True), Segment("<|open|>", False, True), Segment("", False), Segment("hi", False)]
    parts = [[2003], tokenizer.encode("<|open|>"), [], tokenizer.encode("hi")]
    ids, mask = tokenizer.encode_segments_with_mask(segments)
    assert ids == tokenizer.encode_segments(segments) == [token_id for part in parts for token_id in part]
    assert mask == [False] + [True] * len(parts[1]) + [False] * len(parts[3])


def config(tokens: list[ControlToken], **more: object) -> dict:
    return {"added_tokens_decoder": {str(t.id): {"content": t.name, "special": t.special} for t in tokens}, **more}


def write(directory: Path, content: object) -> Path:
    (directory / "tiktoken.model").write_bytes(RANK_FILE.read_bytes())
    text = content if isinstance(content, str) else json.dumps(content)
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
    return directory


def test_loads_a_checkpoint_directory(tokenizer: Tokenizer, tmp_path: Path) -> None:
    loaded = Tokenizer.from_directory(write(tmp_path, config(xtml.control_tokens(2000))))
    assert loaded.control_tokens == tokenizer.control_tokens
    text = '<|open|>message role="user"<|sep|>你好'
    assert loaded.encode(text, allow_special=True) == tokenizer.encode(text, allow_special=True)
    assert loaded.encode(text) == tokenizer.encode(text)


def test_the_same_ids_mean_what_the_directory_says(tmp_path: Path) -> None:
    loaded = Tokenizer.from_directory(write(tmp_path, config(k2.control_tokens(2000))))
    assert loaded.decode([2003, 2004, 2017]) == "<|im_user|><|im_assistant|><|im_middle|>"


def test_a_token_is_special_by_its_entry_or_by_its_role(tmp_path: Path) -> None:
    tokens = [ControlToken("[BOS]", 2000, False), ControlToken("[X]", 2001, False), ControlToken("[Y]", 2002, False)]
    content = config(tokens, bos_token={"content": "[BOS]"}, eos_token=None, additional_special_tokens=["[Y]"])
    loaded = Tokenizer.from_directory(write(tmp_path, content))
    assert [loaded.control_tokens[i].special for i in range(4)] == [True, False, True, True]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "tokenizer_config.json: It isn't valid JSON"),
        ([], "added_tokens_decoder is NoneType; it must be an object"),
        ({}, "added_tokens_decoder is NoneType; it must be an object"),
        ({"added_tokens_decoder": {}}, "added_tokens_decoder is dict; it must be an object"),
        ({"added_tokens_decoder": {"x": {"content": "[A]"}}}, r"added_tokens_decoder\['x'\] is .*legal is an id"),
        ({"added_tokens_decoder": {"2000": {"special": True}}}, r"added_tokens_decoder\['2000'\] is .*legal is an id"),
        ({"added_tokens_decoder": {"2000": {"content": 3}}}, r"added_tokens_decoder\['2000'\] is .*legal is an id"),
        ({"added_tokens_decoder": {"1999": {"content": "a"}}}, "'a' has id 1999.* legal ids are 2000 to 2255"),
        ({"added_tokens_decoder": {"2256": {"content": "a"}}}, "'a' has id 2256.* legal ids are 2000 to 2255"),
        ({"added_tokens_decoder": {"2000": {"content": ""}}}, "control token 2000 has an empty name"),
        (
            {"added_tokens_decoder": {"2000": {"content": "a"}, "2001": {"content": "a"}}},
            "two control tokens have the same name",
        ),
        (
            {"added_tokens_decoder": {"2000": {"content": "a"}, "02000": {"content": "b"}}},
            "id 2000 is named both 'a' and 'b'",
        ),
    ],
)
def test_bad_configs_are_refused(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_directory(write(tmp_path, content))


@pytest.mark.parametrize("missing", ["tiktoken.model", "tokenizer_config.json"])
def test_missing_files_are_named(tmp_path: Path, missing: str) -> None:
    write(tmp_path, config(xtml.control_tokens(2000)))
    (tmp_path / missing).unlink()
    with pytest.raises(FileNotFoundError, match=f"{missing} is missing"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (b"RA== 0 1\n", "line 1 is b'RA== 0 1'"),
        (b"RA== 0\nRA= 1\n", "line 2 is b'RA= 1'"),
        (b"RA== x\n", "line 1 is b'RA== x'"),
        (b"!!!! 0\n", "line 1"),
        (b"RA== 1\n", "the 1 ranks must be 0 to 0"),
        (b"RA== 0\n", "the single byte 0 has no rank"),
        (b"RA== 0\nRA== 1\n", "the 1 ranks must be 0 to 0"),
    ],
)
def test_bad_rank_files_are_refused(tmp_path: Path, lines: bytes, message: str) -> None:
    (tmp_path / "ranks").write_bytes(lines)
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_rank_file(tmp_path / "ranks", [])


def test_ids_outside_the_vocabulary_are_refused(tokenizer: Tokenizer) -> None:
    for bad in (-1, 2256, 10**9):
        with pytest.raises(ValueError, match=f"Token id {bad} is not in the vocabulary; legal ids are 0 to 2255"):
            tokenizer.decode([0, bad])
    with pytest.raises(
        ValueError, match=r"no control token '<\|im_end\|>'; its named ones are \[BOS\], \[EOS\], <\|end_of_msg\|>"
    ):
        tokenizer.control_id("<|im_end|>")


def test_the_named_layouts_are_those_of_the_models() -> None:
    assert {t.name: t.id for t in xtml.control_tokens(2000)} == load("tokenizer-tiny", "special_tokens.json")["named"]
    real = {t.name: t.id for t in k2.control_tokens(163584)}
    assert real["<|im_end|>"] == 163586
    assert real["<|im_user|>"] == 163587
    assert real["<|im_assistant|>"] == 163588
    assert real["<|im_system|>"] == 163594
    assert real["<|tool_calls_section_begin|>"] == 163595
    assert real["<|tool_call_end|>"] == 163599
    assert real["<|im_middle|>"] == 163601
    assert real["[PAD]"] == 163839
    assert len(read_ranks(RANK_FILE)) == 2000
