"""Interpolated modified Kneser-Ney n-grams: the yardstick for kimi-tiny's bits per byte.

    python -m recipes.kimi_tiny.ngram DIR

counts the tokens of `DIR/corpus/train.npz` and prints the bits per byte of the passages in `DIR/corpus/heldout.npz`.

For a context h of n - 1 tokens, h' the same without its first one, and counts c of order n,

    p_n(w | h) = max(c(h w) - D(c(h w)), 0) / c(h) + (D_1 N_1(h) + D_2 N_2(h) + D_3 N_3(h)) / c(h) p_(n-1)(w | h')

where c(h) = sum over w of c(h w), N_1(h) and N_2(h) are the numbers of w with c(h w) = 1 and 2, N_3(h) of those with at
least 3. A context that was never seen leaves p_n = p_(n-1), and p_0 is 1 / V. c counts occurrences at the largest order;
below it counts the different tokens seen in front of (h w). With n_k the number of n-grams of the order that have c = k,

    D_k = k - (k + 1) n_1 / (n_1 + 2 n_2) n_(k+1) / n_k    for k = 1, 2, and 3 for every c >= 3,

held to 0 <= D_k <= k. Each document is preceded by n - 1 start marks, which are never predicted.

Source: S. F. Chen and J. Goodman, "An Empirical Study of Smoothing Techniques for Language Modeling", TR-10-98, Harvard
University, 1998, section 3.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from recipes.kimi_tiny.tokenizer import load_documents

ORDER = 5


@dataclass(frozen=True)
class _Order:
    """Counts of one order.

    Attributes:
        keys: n-grams as numbers, sorted: with base V + 1, the first token in the highest place.
        discounted: of each, max(c - D(c), 0) / c(h).
        contexts: the different h, sorted.
        backoff: of each, the weight of the order below.
    """

    keys: np.ndarray
    discounted: np.ndarray
    contexts: np.ndarray
    backoff: np.ndarray


class KneserNey:
    """A model of token sequences.

    Args:
        documents: [T] token ids each.
        vocab_size: V; ids are 0 to V - 1.
        order: n; 5 looks at four tokens.

    Raises:
        ValueError: an order under 1, an id outside the vocabulary, a vocabulary whose n-grams don't fit 63 bits, or too
            little text: the discounts of an order need n-grams that have c = 1, 2, 3 and 4.
    """

    def __init__(self, documents: Sequence[np.ndarray], vocab_size: int, order: int = ORDER):
        if order < 1 or (vocab_size + 1) ** order >= 2**63:
            raise ValueError(f"order={order} with vocab_size={vocab_size} isn't legal: 1 or more, in 63 bits together.")
        self.vocab_size, self.order = vocab_size, order
        self._base = vocab_size + 1
        keys, counts = np.unique(np.concatenate([self._keys(d, order) for d in documents]), return_counts=True)
        orders = []
        for n in range(order, 0, -1):
            orders.append(self._count(keys, counts, n))
            # Each n-gram type is one token in front of its last n - 1 tokens.
            keys, counts = np.unique(keys % self._base ** (n - 1), return_counts=True)
        self._orders = orders[::-1]

    def log2_probabilities(self, document: np.ndarray) -> np.ndarray:
        """Base-2 logarithm of the probability of each token after those before it: [T] float64."""
        return np.log2(self._probabilities(self._keys(document, self.order)))

    def distribution(self, context: Sequence[int]) -> np.ndarray:
        """Probability of every token after a document's beginning: [V] float64."""
        start = [self.vocab_size] * (self.order - 1)
        recent = [*start, *context][len(context) :]
        key = 0
        for token in recent:
            key = key * self._base + int(token)
        return self._probabilities(key * self._base + np.arange(self.vocab_size, dtype=np.int64))

    def _probabilities(self, keys: np.ndarray) -> np.ndarray:
        p = np.full(len(keys), 1 / self.vocab_size)
        for n, counted in enumerate(self._orders, start=1):
            grams = keys % self._base**n
            known, at = _find(counted.contexts, grams // self._base)
            weight = np.where(known, counted.backoff[at], 1.0)
            seen, at = _find(counted.keys, grams)
            p = np.where(seen, counted.discounted[at], 0.0) + weight * p
        return p

    def _keys(self, document: np.ndarray, order: int) -> np.ndarray:
        """The n-gram that ends with each token."""
        ids = np.asarray(document).astype(np.int64)
        outside = ids[(ids < 0) | (ids >= self.vocab_size)]
        if len(outside):
            raise ValueError(f"A document holds token id {outside[0]}; legal ids are 0 to {self.vocab_size - 1}.")
        padded = np.concatenate([np.full(order - 1, self.vocab_size, np.int64), ids])
        keys = np.zeros(len(ids), np.int64)
        for offset in range(order):
            keys = keys * self._base + padded[offset : offset + len(ids)]
        return keys

    def _count(self, keys: np.ndarray, counts: np.ndarray, n: int) -> _Order:
        of = [int((counts == k).sum()) for k in range(1, 5)]
        if not all(of):
            raise ValueError(
                f"There is too little text: {of} n-grams of order {n} have a count of 1, 2, 3 and 4; each needs some."
            )
        y = of[0] / (of[0] + 2 * of[1])
        discounts = np.array([0.0, *(min(max(k - (k + 1) * y * of[k] / of[k - 1], 0), k) for k in (1, 2, 3))])
        level = np.minimum(counts, 3)
        contexts, first = np.unique(keys // self._base, return_index=True)
        totals = np.add.reduceat(counts, first)
        backoff = np.add.reduceat(discounts[level], first) / totals
        sizes = np.diff(np.append(first, len(keys)))
        discounted = (counts - discounts[level]) / np.repeat(totals, sizes)
        return _Order(keys, discounted, contexts, backoff)


def _find(known: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whether each number is in a sorted array, and where."""
    at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    return known[at] == wanted, at


def bits_per_byte(model: KneserNey, documents: Sequence[np.ndarray], num_bytes: np.ndarray) -> float:
    """Bits per byte of text over documents.

    A document's first token is only looked at, since a model that has no start mark can't predict it, and its last,
    `[EOS]`, is no text; `num_bytes` are those of the tokens between.
    """
    return _bits(model, documents) / float(np.sum(num_bytes))


def _bits(model: KneserNey, documents: Sequence[np.ndarray]) -> float:
    return -sum(float(model.log2_probabilities(document)[1:-1].sum()) for document in documents)


def report(directory: Path, vocab_size: int) -> Iterator[str]:
    """Lines with the bits per byte of all passages and of each kind of book."""
    began = time.perf_counter()
    train = load_documents(directory / "corpus" / "train.npz")
    model = KneserNey(train, vocab_size)
    path = directory / "corpus" / "heldout.npz"
    found = load_documents(path)
    with np.load(path) as arrays:
        sizes, kinds = arrays["num_bytes"], arrays["kinds"][arrays["book"]]
    yield f"{sum(map(len, train))} train tokens counted in {time.perf_counter() - began:.1f} s"
    yield f"all: {bits_per_byte(model, found, sizes):.4f} bits a byte, {len(found)} passages, {sizes.sum()} bytes"
    for kind in dict.fromkeys(kinds.tolist()):
        chosen = np.flatnonzero(kinds == kind)
        value = bits_per_byte(model, [found[i] for i in chosen], sizes[chosen])
        yield f"{kind}: {value:.4f} bits a byte, {len(chosen)} passages, {sizes[chosen].sum()} bytes"


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.kimi_tiny.ngram", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("directory", type=Path, help="work folder, with the encoded corpus in it")
    parser.add_argument("--vocab-size", type=int, default=4096)
    options = parser.parse_args(arguments)
    for line in report(options.directory, options.vocab_size):
        print(line)


if __name__ == "__main__":
    main()
