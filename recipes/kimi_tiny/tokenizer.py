"""kimi-tiny's tokenizer: byte-pair encoding with Kimi K3's cutting rules and control tokens, every digit on its own.

    python -m recipes.kimi_tiny.tokenizer DIR

reads `DIR/corpus`, trains on its train part and on rendered chats, writes `DIR/tokenizer` in the layout that
`kimi_jax.text.Tokenizer.from_directory` reads, and encodes the corpus:

- `DIR/corpus/train.npz`: `tokens` uint16 [N], `offsets` int32 [D + 1] (document d is
  `tokens[offsets[d]:offsets[d + 1]]`), `book` int32 [D], `books` and `kinds` (names, one a book).
- `DIR/corpus/heldout.npz`: the same, and `num_bytes` int32 [D], the UTF-8 bytes of the tokens that are to be predicted:
  all but the document's first, which has nothing in front of it, and its last, `[EOS]`.

A document is what `Kimi.generate` makes of the text as a prompt (no token in front), then `[EOS]`, which ends a
generation. A train document has up to `DOCUMENT_TOKENS` tokens of whole paragraphs; a held-out document is one passage.

Training needs the `tokenizers` library; what is written is read without it.
"""

import argparse
import base64
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kimi_jax.text.tokenizer import CONFIG_FILE, PRETOKENIZER, RANK_FILE, Tokenizer
from kimi_jax.text.xtml import control_tokens
from recipes.kimi_tiny.corpus import Section, read_sections

NUM_RANKS = 3840
"""With the 256 control ids a vocabulary of 4096."""

DOCUMENT_TOKENS = 2000
"""Bound on the tokens of a train document, but for a single paragraph that is longer."""

NUM_CHATS = 6000
"""Synthetic chats whose words take part in the training of the ranks."""

END_OF_DOCUMENT = "[EOS]"


def train_model(texts: Iterable[str], num_ranks: int = NUM_RANKS) -> Any:
    """Trains a `tokenizers.Tokenizer`: the 256 bytes, then merges, the most frequent first.

    No token holds two digits, so that a number's tokens are its digits.

    Args:
        texts: to learn from.
        num_ranks: in all, the bytes included.

    Raises:
        ValueError: `num_ranks` is under 256, or the texts have too few different words for it.
    """
    from tokenizers import Regex, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Trainable

    if num_ranks < 256:
        raise ValueError(f"num_ranks is {num_ranks}; the 256 bytes need at least that many.")
    model = Trainable(models.BPE())
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZER), "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=num_ranks, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    model.train_from_iterator(texts, trainer)
    if model.get_vocab_size() != num_ranks:
        raise ValueError(
            f"The texts give {model.get_vocab_size()} ranks, not num_ranks={num_ranks}: give more text, or ask for fewer."
        )
    return model


def ranks_of(model: Any) -> dict[bytes, int]:
    """The ranks of a model from `train_model`: its ids, by the bytes that its tokens stand for."""
    byte_of = {character: byte for byte, character in enumerate(_byte_characters())}
    return {bytes(byte_of[character] for character in token): rank for token, rank in model.get_vocab().items()}


def _byte_characters() -> list[str]:
    """The character that the byte-level alphabet of the GPT-2 family writes for each byte.

    Printing characters of Latin-1 stand for themselves, the others, in order, for U+0100 and on.
    """
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printing else next(others)) for byte in range(256)]


def write_tokenizer(directory: Path, ranks: dict[bytes, int]) -> Tokenizer:
    """Writes the rank file and the config with Kimi K3's control tokens, and reads them back."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = [
        f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in sorted(ranks.items(), key=lambda i: i[1])
    ]
    (directory / RANK_FILE).write_text("".join(lines), encoding="ascii")
    config = {
        "added_tokens_decoder": {
            str(token.id): {"content": token.name, "special": token.special} for token in control_tokens(len(ranks))
        },
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "tokenizer_class": "TikTokenTokenizer",
    }
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return Tokenizer.from_directory(directory)


def documents(section: Section, tokenizer: Tokenizer, limit: int = DOCUMENT_TOKENS) -> Iterator[list[int]]:
    """Cuts a section into documents of about equal length, of whole paragraphs.

    Args:
        section: to cut.
        tokenizer: to encode with.
        limit: bound on the tokens of a document, `[EOS]` included; a paragraph that is longer stays whole.
    """
    end = tokenizer.control_id(END_OF_DOCUMENT)
    # The empty line behind a paragraph may merge with its last mark, so the two are counted together.
    lengths = [len(tokenizer.encode(f"{paragraph}\n\n")) for paragraph in section.paragraphs]
    goal = sum(lengths) / -(-sum(lengths) // (limit - 1))
    run: list[str] = []
    size = 0
    for paragraph, length in zip(section.paragraphs, lengths, strict=True):
        if run and (size >= goal or size + length >= limit):
            yield [*tokenizer.encode("\n\n".join(run)), end]
            run, size = [], 0
        run.append(paragraph)
        size += length
    yield [*tokenizer.encode("\n\n".join(run)), end]


def encode_corpus(given: Iterable[Section], tokenizer: Tokenizer, *, whole: bool) -> dict[str, np.ndarray]:
    """Arrays of documents, as the module's description has them.

    Args:
        given: sections.
        tokenizer: to encode with.
        whole: one document for each section, and `num_bytes`.
    """
    tokens: list[np.ndarray] = []
    offsets, book, sizes = [0], list[int](), list[int]()
    books: dict[str, str] = {}
    for section in given:
        books.setdefault(section.book, section.kind)
        number = list(books).index(section.book)
        for ids in documents(section, tokenizer, 2**31 if whole else DOCUMENT_TOKENS):
            tokens.append(np.array(ids, np.uint16))
            offsets.append(offsets[-1] + len(ids))
            book.append(number)
        if whole:
            sizes.append(len(section.text.encode()) - len(tokenizer.token_bytes(int(tokens[-1][0]))))
    arrays = {
        "tokens": np.concatenate(tokens),
        "offsets": np.array(offsets, np.int32),
        "book": np.array(book, np.int32),
        "books": np.array(list(books)),
        "kinds": np.array(list(books.values())),
    }
    return {**arrays, "num_bytes": np.array(sizes, np.int32)} if whole else arrays


def load_documents(path: Path) -> list[np.ndarray]:
    """The documents of an .npz file, each uint16."""
    with np.load(path) as arrays:
        tokens, offsets = arrays["tokens"], arrays["offsets"]
    return np.split(tokens, offsets[1:-1])


def build(directory: Path, num_ranks: int = NUM_RANKS, num_chats: int = NUM_CHATS) -> Tokenizer:
    """Trains and writes the tokenizer, and encodes the corpus with it."""
    from recipes.kimi_tiny.chats import chat_texts

    folder = directory / "corpus"
    train, heldout = read_sections(folder / "train.jsonl"), read_sections(folder / "heldout.jsonl")
    chats = chat_texts(np.random.default_rng(0), num_chats)
    model = train_model([*(section.text for section in train), *chats], num_ranks)
    tokenizer = write_tokenizer(directory / "tokenizer", ranks_of(model))
    np.savez_compressed(folder / "train.npz", allow_pickle=False, **encode_corpus(train, tokenizer, whole=False))
    np.savez_compressed(folder / "heldout.npz", allow_pickle=False, **encode_corpus(heldout, tokenizer, whole=True))
    return tokenizer


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.kimi_tiny.tokenizer", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("directory", type=Path, help="work folder, with the corpus in it")
    directory: Path = parser.parse_args(arguments).directory
    tokenizer = build(directory)
    print(f"{tokenizer.num_ranks} ranks, {tokenizer.vocab_size} ids")
    for name in ("train", "heldout"):
        found = load_documents(directory / "corpus" / f"{name}.npz")
        text = sum(len(section.text.encode()) for section in read_sections(directory / "corpus" / f"{name}.jsonl"))
        count = sum(map(len, found))
        print(f"{name}: {count} tokens in {len(found)} documents, {text / (count - len(found)):.3f} bytes a token")


if __name__ == "__main__":
    main()
