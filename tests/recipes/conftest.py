"""A little corpus and a little tokenizer, made here: these tests need no network."""

from pathlib import Path

import numpy as np
import pytest

from kimi_jax.text import Tokenizer
from recipes.kimi_tiny import chats, tokenizer, words
from recipes.kimi_tiny.corpus import Section


def sentence(rng: np.random.Generator) -> str:
    nouns = [str(rng.choice(words.NOUNS)) for _ in range(3)]
    adjective = rng.choice(words.ADJECTIVES)
    forms = (
        "The {} saw a {} {} near the {}.",
        'Then said the {}, "I am a {} {}, and I have {} more."',
        "Mr. {} had {} hope of the {}; yet the {} came in 1842!",
        "Was the {} so {} that no {} or {} could tell?",
    )
    return forms[rng.integers(len(forms))].format(nouns[0], adjective, nouns[1], nouns[2])


def section(rng: np.random.Generator, book: str, kind: str, paragraphs: int) -> Section:
    texts = (" ".join(sentence(rng) for _ in range(rng.integers(3, 9))) for _ in range(paragraphs))
    return Section(book, kind, tuple(texts))


@pytest.fixture(scope="session")
def sections() -> list[Section]:
    rng = np.random.default_rng(0)
    return [
        section(rng, f"Book {number}, A. Writer", kind, 60)
        for number, kind in enumerate(["tales", "fiction", "fiction", "speeches"])
        for _ in range(3)
    ]


@pytest.fixture(scope="session")
def bpe(sections: list[Section], tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    texts = chats.chat_texts(np.random.default_rng(0), 60)
    model = tokenizer.train_model([*(s.text for s in sections), *texts], 1024)
    return tokenizer.write_tokenizer(Path(tmp_path_factory.mktemp("tokenizer")), tokenizer.ranks_of(model))


@pytest.fixture(scope="session")
def documents(sections: list[Section], bpe: Tokenizer) -> list[np.ndarray]:
    return [np.array(ids, np.uint16) for s in sections for ids in tokenizer.documents(s, bpe)]
