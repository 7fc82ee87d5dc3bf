"""Batches and measurements of the recipe, on a work folder made here."""

import json
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest

from kimi_jax.text import Tokenizer
from kimi_jax.train import Example
from recipes.kimi_tiny import evaluate, tokenizer
from recipes.kimi_tiny.corpus import Section
from recipes.kimi_tiny.data import READINGS, Data, Mixture
from recipes.kimi_tiny.train import Settings, stages


@pytest.fixture(scope="module")
def folder(sections: list[Section], bpe: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("work")
    (root / "corpus").mkdir()
    for name, part, whole in (("train", sections[:-2], False), ("heldout", sections[-2:], True)):
        arrays = tokenizer.encode_corpus(part, bpe, whole=whole)
        np.savez_compressed(root / "corpus" / f"{name}.npz", allow_pickle=False, **arrays)
    ranks = {bpe.token_bytes(i): i for i in range(bpe.num_ranks)}
    tokenizer.write_tokenizer(root / "tokenizer", ranks)
    return root


@pytest.fixture(scope="module")
def data(folder: Path) -> Data:
    return Data(folder)


def test_a_batch_depends_on_its_seed_and_step_alone(folder: Path, data: Data) -> None:
    mixture = Mixture(4, 512, {"recall": 0.3, "arithmetic": 0.1}, (200, 512))
    again = Data(folder)
    again.batch(mixture, 5, 0)
    for step in (0, 7):
        jax.tree.map(np.testing.assert_array_equal, data.batch(mixture, 5, step), again.batch(mixture, 5, step))
    assert np.any(data.batch(mixture, 5, 0).tokens != data.batch(mixture, 6, 0).tokens)


def test_an_epoch_reads_every_passage_as_often_as_its_kind_asks(data: Data) -> None:
    counts = Counter(tuple(document.tolist()) for document in data.documents)
    assert set(counts.values()) == {READINGS["tales"], READINGS["fiction"], READINGS["speeches"]}
    passages = data._passages(0, 0, 10_000)
    read = Counter(tuple(next(passages).tokens.tolist()) for _ in data.documents)
    assert read == counts


def test_tasks_get_their_share(data: Data, bpe: Tokenizer) -> None:
    mixture = Mixture(8, 512, {"arithmetic": 0.2, "smalltalk": 0.1}, (200, 512))
    chat = whole = 0
    for step in range(6):
        batch = data.batch(mixture, 0, step)
        for tokens, segments in zip(batch.tokens, batch.segment_ids, strict=True):
            for number in range(segments.max() + 1):
                own = tokens[segments == number]
                whole += len(own)
                chat += len(own) * (own[0] == bpe.control_id("<|open|>"))
    assert 0.25 < chat / whole < 0.35


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"shares": {"recall": 0.7, "tools": 0.5}}, "add up to at most 1"),
        ({"shares": {"poems": 0.5}}, "must be of recall, tools"),
        ({"recall_lengths": (100, 300)}, "between 200 and 512"),
        ({"recall_lengths": (300, 600)}, "between 200 and 512"),
    ],
)
def test_mixtures_are_checked(options: dict, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Mixture(4, 512, **options)


def test_held_out_passages_are_scored_between_their_ends(folder: Path) -> None:
    examples, num_bytes, kinds = evaluate.passages(folder)
    assert len(examples) == len(num_bytes) == len(kinds) > 0
    for example, size in zip(examples, num_bytes, strict=True):
        assert not example.learned[-1]
        assert example.learned[:-1].all()
        text = Tokenizer.from_directory(folder / "tokenizer").decode(example.tokens[1:-1].tolist())
        assert len(text.encode()) == size


def test_one_example_a_row() -> None:
    examples = [Example(np.full(size, size), np.ones(size, bool)) for size in (3, 1, 2)]
    first, last = evaluate.one_a_row(examples, rows=2, length=4)
    np.testing.assert_array_equal(first.segment_ids, [[0, 0, 0, -1], [0, -1, -1, -1]])
    np.testing.assert_array_equal(last.segment_ids, [[0, 0, -1, -1], [-1] * 4])
    with pytest.raises(ValueError, match="has 3 tokens, a row 2"):
        list(evaluate.one_a_row(examples, rows=2, length=2))


def test_the_lower_bound_is_wilson_s() -> None:
    # Of 9 in 10 the 95 % interval is 0.596 to 0.982 (E. B. Wilson, 1927).
    assert evaluate.lower_bound(9, 10) == pytest.approx(0.596, abs=1e-3)
    assert evaluate.lower_bound(0, 10) == pytest.approx(0, abs=1e-9)


def test_sparse_and_dense_meet_the_same_tokens_on_the_same_schedule() -> None:
    plan = stages(Settings())
    assert list(plan) == ["pretrain", "indexer", "sparse", "dense", "polish"]
    assert [dense for dense, _, _ in plan.values()] == [True, True, False, True, False]
    (_, sparse, of_sparse), (_, dense, of_dense) = plan["sparse"], plan["dense"]
    assert of_sparse == of_dense
    assert (sparse.steps, sparse.optimizer) == (dense.steps, dense.optimizer)
    assert [float(sparse.schedule(n)) for n in (0, 50, 169)] == [float(dense.schedule(n)) for n in (0, 50, 169)]
    assert plan["indexer"][1].trainable("mla.indexer.key")
    assert not plan["indexer"][1].trainable("mla.query")
    assert plan["polish"][1].trainable("mla.query")
    assert not plan["polish"][1].trainable("mla.indexer.key")


def test_the_shipped_model_has_the_recipe_s_config() -> None:
    recipe = Path(evaluate.__file__).parent / "config.json"
    shipped = Path(evaluate.__file__).parents[2] / "kimi_jax" / "models" / "kimi-tiny" / "config.json"
    from kimi_jax.config import KimiConfig

    assert KimiConfig.from_dict(json.loads(recipe.read_text())) == KimiConfig.from_dict(json.loads(shipped.read_text()))
