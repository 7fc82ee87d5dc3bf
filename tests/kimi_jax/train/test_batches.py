from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kimi_jax.train import Batch, Example, pack, prefetch
from kimi_jax.train.losses import targets


def example(*tokens: int, learned: list[int] | None = None) -> Example:
    marks = np.ones(len(tokens), bool) if learned is None else np.isin(np.arange(len(tokens)), learned)
    return Example(np.array(tokens), marks)


def test_examples_go_where_there_is_room() -> None:
    batch = pack([example(1, 2, 3), example(4, 5, 6, 7), example(8, 9), example(10)], rows=2, length=5)
    np.testing.assert_array_equal(batch.tokens, [[1, 2, 3, 8, 9], [4, 5, 6, 7, 10]])
    np.testing.assert_array_equal(batch.segment_ids, [[0, 0, 0, 1, 1], [0, 0, 0, 0, 1]])


def test_the_first_example_without_room_is_cut_and_ends_the_batch() -> None:
    asked: list[int] = []

    def examples() -> Iterator[Example]:
        for number in range(10):
            asked.append(number)
            yield example(*[number] * 4)

    batch = pack(examples(), rows=2, length=6)
    assert asked == [0, 1, 2]
    np.testing.assert_array_equal(batch.tokens[0], [0, 0, 0, 0, 2, 2])
    np.testing.assert_array_equal(batch.segment_ids[1], [0, 0, 0, 0, -1, -1])


def test_too_long_or_unequal_examples_are_refused() -> None:
    with pytest.raises(ValueError, match="has 3 tokens, a row 2"):
        pack([example(1, 2, 3)], rows=1, length=2)
    with pytest.raises(ValueError, match="2 tokens and 1 marks"):
        pack([Example(np.array([1, 2]), np.array([True]))], rows=1, length=4)


def test_targets_are_the_next_tokens_of_the_same_example() -> None:
    batch = pack([example(5, 6, 7, learned=[0, 2]), example(8, 9)], rows=1, length=7)
    wanted, counts = targets(batch)
    # 6 isn't to be learned; 8 opens another example; after 9 comes padding.
    np.testing.assert_array_equal(counts, [[False, True, False, True, False, False, False]])
    np.testing.assert_array_equal(wanted[0, [1, 3]], [7, 9])


def test_batches_come_in_order_whoever_makes_them() -> None:
    def batch_of(step: int) -> Batch:
        return pack([example(step)], rows=1, length=1)

    with ThreadPoolExecutor(3) as workers:
        made = [int(batch.tokens[0, 0]) for batch in prefetch(batch_of, range(5, 30), workers, ahead=4)]
    assert made == list(range(5, 30))
