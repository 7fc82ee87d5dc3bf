import re
from pathlib import Path

import numpy as np
import pytest

from kimi_jax.text import Tokenizer, chat_format
from kimi_jax.text.tokenizer import NUM_CONTROL_TOKENS
from recipes.kimi_tiny import chats, corpus, tokenizer
from recipes.kimi_tiny.corpus import Section


def test_ids_are_those_of_the_library_that_learned_the_ranks(sections: list[Section], tmp_path: Path) -> None:
    texts = list(chats.chat_texts(np.random.default_rng(1), 40))
    model = tokenizer.train_model([*(s.text for s in sections), *texts], 700)
    ours = tokenizer.write_tokenizer(tmp_path, tokenizer.ranks_of(model))
    assert (ours.num_ranks, ours.vocab_size) == (700, 700 + NUM_CONTROL_TOKENS)
    for text in [*(s.text for s in sections), *texts, "Déjà vu 漢字 x²\t\n\n  1234567 ½ don't DON'T \u00a0end"]:
        ids = ours.encode(text)
        assert ids == model.encode(text).ids
        assert ours.decode(ids) == text


def test_every_digit_is_a_token(bpe: Tokenizer) -> None:
    assert not [rank for rank in range(bpe.num_ranks) if len(re.findall(rb"\d", bpe.token_bytes(rank))) > 1]
    assert len(bpe.encode("20240117")) == 8


def test_control_tokens_are_kimi_k3s(bpe: Tokenizer) -> None:
    chat_format("kimi_k31").check_tokenizer(bpe)
    assert bpe.control_id("[BOS]") == bpe.num_ranks
    assert bpe.control_id("[PAD]") == bpe.vocab_size - 1
    markers = bpe.encode("<|open|><|sep|>[EOS]", allow_special=True)
    assert bpe.decode(markers, skip_special=True) == "<|open|><|sep|>"


def test_the_shipped_vocabulary_is_4096() -> None:
    assert tokenizer.NUM_RANKS + NUM_CONTROL_TOKENS == 4096


def test_too_little_text_for_the_ranks() -> None:
    with pytest.raises(ValueError, match=r"give \d+ ranks, not num_ranks=500"):
        tokenizer.train_model(["only these words"], 500)
    with pytest.raises(ValueError, match="num_ranks is 255"):
        tokenizer.train_model([], 255)


@pytest.mark.parametrize("limit", [100, 300, 2000, 10**6])
def test_documents_are_whole_paragraphs_within_the_limit(sections: list[Section], bpe: Tokenizer, limit: int) -> None:
    for given in sections[:3]:
        found = list(tokenizer.documents(given, bpe, limit))
        end = bpe.control_id("[EOS]")
        assert all(ids[-1] == end and end not in ids[:-1] for ids in found)
        texts = [bpe.decode(ids[:-1]) for ids in found]
        assert "\n\n".join(texts) == given.text
        for ids, text in zip(found, texts, strict=True):
            assert len(ids) <= limit or "\n\n" not in text
            # As `Kimi.generate` encodes the text as a prompt: nothing in front.
            assert ids[:-1] == bpe.encode(text)
        if limit == 10**6:
            assert len(found) == 1


def test_build_encodes_both_parts(tmp_path: Path, sections: list[Section]) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    train, heldout = corpus.split(sections)
    corpus.write_sections(folder / "train.jsonl", train)
    corpus.write_sections(folder / "heldout.jsonl", heldout)
    tokenizer.build(tmp_path, 600, 20)
    ours = Tokenizer.from_directory(tmp_path / "tokenizer")
    with np.load(folder / "heldout.npz") as arrays:
        found, sizes = tokenizer.load_documents(folder / "heldout.npz"), arrays["num_bytes"]
        assert [str(b) for b in arrays["books"][arrays["book"]]] == [s.book for s in heldout]
        assert (arrays["tokens"].dtype, arrays["offsets"].dtype) == (np.uint16, np.int32)
    for ids, passage, size in zip(found, heldout, sizes, strict=True):
        assert ours.decode(ids[:-1].tolist()) == passage.text
        assert size == len(b"".join(ours.token_bytes(int(i)) for i in ids[1:-1]))
    train_text = "".join(ours.decode(ids[:-1].tolist()) for ids in tokenizer.load_documents(folder / "train.npz"))
    assert train_text.replace("\n\n", "") == "".join(s.text for s in train).replace("\n\n", "")
