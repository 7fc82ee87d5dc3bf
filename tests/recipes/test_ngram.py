from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from recipes.kimi_tiny import ngram

VOCAB = 120


def corpus(seed: int, documents: int = 30) -> list[np.ndarray]:
    """Documents in which a token hangs on the one before; some are rare, and the last id is never there."""
    rng = np.random.default_rng(seed)
    p = 1 / np.arange(1, VOCAB) ** 1.3
    found = []
    for _ in range(documents):
        steps = rng.choice(VOCAB - 1, size=int(rng.integers(10, 60)), p=p / p.sum())
        repeated = rng.random(len(steps)) < 0.5
        ids = [int(steps[0])]
        for step, again in zip(steps[1:], repeated[1:], strict=True):
            ids.append((ids[-1] * 7 + 3) % 11 if again else int(step))
        found.append(np.array(ids, np.uint16))
    return found


class Dictionaries:
    """The formulas with tuples and dictionaries, context by context."""

    def __init__(self, documents: list[np.ndarray], vocab: int, order: int):
        self.vocab, self.order = vocab, order
        self.counts: dict[int, Counter[tuple[int, ...]]] = {order: Counter()}
        for document in documents:
            padded = [-1] * (order - 1) + [int(t) for t in document]
            for end in range(order, len(padded) + 1):
                self.counts[order][tuple(padded[end - order : end])] += 1
        for n in range(order - 1, 0, -1):
            self.counts[n] = Counter()
            for gram in self.counts[n + 1]:
                self.counts[n][gram[1:]] += 1
        self.discount = {}
        for n, counts in self.counts.items():
            n1, n2, n3, n4 = (sum(c == k for c in counts.values()) for k in (1, 2, 3, 4))
            y = n1 / (n1 + 2 * n2)
            found = (1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3)
            self.discount[n] = [0.0, *(min(max(d, 0.0), k) for k, d in enumerate(found, 1))]

    def p(self, context: tuple[int, ...], token: int) -> float:
        n = len(context) + 1
        lower = self.p(context[1:], token) if n > 1 else 1 / self.vocab
        after = {gram[-1]: c for gram, c in self.counts[n].items() if gram[:-1] == context}
        if not after:
            return lower
        total, discount = sum(after.values()), self.discount[n]
        kept = after.get(token, 0)
        weight = sum(discount[min(c, 3)] for c in after.values()) / total
        return (kept - discount[min(kept, 3)]) / total + weight * lower


@pytest.mark.parametrize("order", [2, 3])
def test_equal_to_dictionaries(order: int) -> None:
    train, (text, *_) = corpus(0), corpus(1, 1)
    model, slow = ngram.KneserNey(train, VOCAB, order), Dictionaries(train, VOCAB, order)
    text = np.append(text[:25], [119, 3]).astype(np.uint16)
    padded = [-1] * (order - 1) + text.tolist()
    wanted = [slow.p(tuple(padded[i : i + order - 1]), padded[i + order - 1]) for i in range(len(text))]
    np.testing.assert_allclose(2.0 ** model.log2_probabilities(text), wanted, rtol=1e-12)


def test_unigrams_by_hand() -> None:
    # Counts 1, 1, 2, 3, 4 give n_k = 2, 1, 1, 1, so y = 1/2, D_1 = 1/2, D_2 = 1/2, D_3 = 1; the kept-back
    # 2 (1/2) + 1/2 + 2 (1) = 7/2 of 11 tokens is spread over 6 ids.
    model = ngram.KneserNey([np.array([0, 1, 2, 2, 3, 3, 3, 4, 4, 4, 4])], 6, 1)
    spread = 3.5 / 11 / 6
    wanted = np.array([0.5, 0.5, 1.5, 2, 3, 0]) / 11 + spread
    np.testing.assert_allclose(model.distribution([]), wanted, rtol=1e-12)


@pytest.mark.parametrize("context", [[], [0], [5, 7, 1, 3], [119, 119, 119, 119, 119], [2, 119, 4], [1, 2, 3, 4, 5, 6]])
def test_probabilities_sum_to_one_whatever_the_context(context: list[int]) -> None:
    model = ngram.KneserNey(corpus(0), VOCAB, 3)
    p = model.distribution(context)
    assert p.min() > 0
    np.testing.assert_allclose(p.sum(), 1, rtol=1e-12)


def test_a_distribution_is_what_the_tokens_of_a_document_get() -> None:
    model, document = ngram.KneserNey(corpus(0), VOCAB, 3), corpus(4, 1)[0][:12]
    found = 2.0 ** model.log2_probabilities(document)
    for i, token in enumerate(document):
        np.testing.assert_allclose(model.distribution(document[:i].tolist())[token], found[i], rtol=1e-12)


def test_a_higher_order_predicts_better() -> None:
    train, heldout = corpus(0, 200), corpus(0, 210)[200:]
    sizes = np.array([len(d) - 2 for d in heldout])
    values = [ngram.bits_per_byte(ngram.KneserNey(train, VOCAB, order), heldout, sizes) for order in (1, 2)]
    assert values[1] < values[0] < np.log2(VOCAB)


def test_first_and_last_token_of_a_document_do_not_count() -> None:
    model, document = ngram.KneserNey(corpus(0), VOCAB, 2), np.array([3, 1, 4, 1, 5])
    bits = -model.log2_probabilities(document)
    np.testing.assert_allclose(ngram.bits_per_byte(model, [document], np.array([10])), bits[1:4].sum() / 10)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="order=6 with vocab_size=4096 isn't legal"):
        ngram.KneserNey(corpus(0), 4096, 6)
    with pytest.raises(ValueError, match="token id 18; legal ids are 0 to 9"):
        ngram.KneserNey([np.array([1, 18])], 10, 2)
    with pytest.raises(ValueError, match=r"too little text: .* n-grams of order 2"):
        ngram.KneserNey([np.array([1, 2, 3])], 10, 2)


def test_the_command_reports_each_kind(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, documents in (("train", corpus(0, 400)), ("heldout", corpus(0, 404)[400:])):
        arrays = {
            "tokens": np.concatenate(documents),
            "offsets": np.cumsum([0, *map(len, documents)]).astype(np.int32),
            "book": np.arange(len(documents), dtype=np.int32) % 2,
            "books": np.array(["a", "b"]),
            "kinds": np.array(["tales", "verse"]),
            "num_bytes": np.array([len(d) - 2 for d in documents], np.int32),
        }
        np.savez_compressed(folder / f"{name}.npz", allow_pickle=False, **arrays)
    lines = list(ngram.report(tmp_path, VOCAB))
    assert [line.split(":")[0] for line in lines[1:]] == ["all", "tales", "verse"]
