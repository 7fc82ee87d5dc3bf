"""Batches for kimi-tiny: book passages and synthetic chats, packed into rows; a batch depends on its step alone."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from kimi_jax.text import Tokenizer
from kimi_jax.train import Batch, Example, pack
from recipes.kimi_tiny.tasks import KINDS, Kind, Tasks, load_tasks
from recipes.kimi_tiny.tokenizer import load_documents

# How often a document of each kind of book is read in an epoch: a story-teller should know more tales than speeches.
READINGS = {"tales": 3, "fiction": 2, "drama": 1, "scripture": 1, "verse": 1, "speeches": 1}


@dataclass(frozen=True)
class Mixture:
    """What a batch is made of.

    Attributes:
        rows: rows of a batch.
        length: tokens of a row.
        shares: of the tokens, by kind of task; the rest is book passages.
        recall_lengths: shortest and longest recall task; lengths between are log-uniform.
    """

    rows: int
    length: int
    shares: dict[Kind, float] = field(default_factory=dict)
    recall_lengths: tuple[int, int] = (200, 2048)

    def __post_init__(self) -> None:
        unknown = set(self.shares) - set(KINDS)
        if unknown or not 0 <= sum(self.shares.values()) <= 1 or min(self.shares.values(), default=0) < 0:
            raise ValueError(f"shares={self.shares}; they must be of {', '.join(KINDS)} and add up to at most 1.")
        if not 200 <= self.recall_lengths[0] <= self.recall_lengths[1] <= self.length:
            raise ValueError(f"recall_lengths={self.recall_lengths}; they must lie between 200 and {self.length}.")


class Data:
    """The encoded corpus of a work folder."""

    def __init__(self, folder: Path):
        """Reads `folder`/corpus and `folder`/tokenizer."""
        path = folder / "corpus" / "train.npz"
        documents = load_documents(path)
        with np.load(path) as arrays:
            kinds = arrays["kinds"][arrays["book"]]
        self.once = documents
        self.documents = [d for d, kind in zip(documents, kinds, strict=True) for _ in range(READINGS[str(kind)])]
        self.tasks: Tasks = load_tasks(folder, Tokenizer.from_directory(folder / "tokenizer"))
        self._mean = sum(map(len, self.documents)) / len(self.documents)

    def batch(self, mixture: Mixture, seed: int, step: int) -> Batch:
        """The batch of a step; passages come in shuffled epochs, chats are drawn anew."""
        return pack(self._examples(mixture, seed, step), mixture.rows, mixture.length)

    def plain_batch(self, rows: int, length: int, chats: float, seed: int) -> Batch:
        """Passages as the held-out ones are, every one as likely, and a share of tokens of chats."""
        rng = np.random.default_rng([seed, 2])
        mixture = Mixture(rows, length, {"recall": 1.0}, (200, length))

        def examples() -> Iterator[Example]:
            chatted = total = 0
            while True:
                chat = chatted <= chats * total
                if chat:
                    kinds: tuple[Kind, ...] = ("recall", "tools", "lists")
                    example = self._chat(rng, kinds[rng.integers(len(kinds))], mixture)
                else:
                    tokens = self.once[rng.integers(len(self.once))][:length]
                    example = Example(tokens, np.ones(len(tokens), bool))
                total += len(example.tokens)
                chatted += chat * len(example.tokens)
                yield example

        return pack(examples(), rows, length)

    def _examples(self, mixture: Mixture, seed: int, step: int) -> Iterator[Example]:
        rng = np.random.default_rng([seed, step])
        kinds = list(mixture.shares)
        tokens = mixture.rows * mixture.length
        books = 1 - sum(mixture.shares.values())
        per_step = max(1, round(books * tokens / self._mean))
        passages = self._passages(seed, step * per_step, mixture.length)
        # The kind that lags most behind its share comes next; which one that is at first is left to chance.
        wanted = np.array([mixture.shares[kind] for kind in kinds] + [books])
        made = np.zeros(len(wanted))
        credit = rng.uniform(-150, 150, len(wanted))
        while True:
            which = int(np.argmax(wanted * made.sum() + credit - made))
            example = next(passages) if which == len(kinds) else self._chat(rng, kinds[which], mixture)
            made[which] += len(example.tokens)
            yield example

    def _passages(self, seed: int, first: int, longest: int) -> Iterator[Example]:
        count = len(self.documents)
        while True:
            epoch, place = divmod(first, count)
            order = np.random.default_rng([seed, epoch, 1]).permutation(count)
            for index in order[place:]:
                tokens = self.documents[index][:longest]
                yield Example(tokens, np.ones(len(tokens), bool))
            first += count - place

    def _chat(self, rng: np.random.Generator, kind: Kind, mixture: Mixture) -> Example:
        longest = min(mixture.length, 1200)
        if kind == "recall":
            low, high = mixture.recall_lengths
            longest = int(np.exp(rng.uniform(np.log(low), np.log(high + 1))))
        example = self.tasks.sample(rng, kind, longest)
        return Example(example.tokens, example.loss_mask)


_DATA: Data


def _load(folder: Path) -> None:
    global _DATA
    _DATA = Data(folder)


def _batch(mixture: Mixture, seed: int, step: int) -> Batch:
    return _DATA.batch(mixture, seed, step)


class Workers:
    """Processes that make batches."""

    def __init__(self, folder: Path, count: int):
        """Starts `count` processes, each with the corpus of `folder` in memory."""
        context = get_context("spawn")
        self.executor = ProcessPoolExecutor(count, mp_context=context, initializer=_load, initargs=(folder,))

    def batch_of(self, mixture: Mixture, seed: int) -> partial[Batch]:
        """A function from steps to batches that a worker can run."""
        return partial(_batch, mixture, seed)
