"""Packed rows: several examples one after the other, each on its own as far as the model is concerned."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Int

from kimi_jax.pytree import pytree


class Example(NamedTuple):
    """One sequence to learn from.

    Attributes:
        tokens: its token ids.
        learned: which of them the model is to predict; those of a prompt usually aren't.
    """

    tokens: np.ndarray
    learned: np.ndarray


@pytree
class Batch:
    """Rows of packed examples.

    Attributes:
        tokens: token ids; anything where there is padding.
        segment_ids: the number of the example in its row, -1 for padding at the end.
        learned: tokens to be predicted. The first token of an example never is: nothing precedes it.
    """

    tokens: Int[Array, "B T"] | Int[np.ndarray, "B T"]
    segment_ids: Int[Array, "B T"] | Int[np.ndarray, "B T"]
    learned: Bool[Array, "B T"] | Bool[np.ndarray, "B T"]


def pack(examples: Iterable[Example], rows: int, length: int) -> Batch:
    """Fills `rows` rows of `length` tokens, each example into the first row with room for it.

    Stops reading at the first example that fits nowhere; a last one that does fit a part of some row is cut to it, so
    that padding is at most what the other rows have left.

    Raises:
        ValueError: an example is longer than a row, or its two arrays differ in length.
    """
    tokens = np.zeros((rows, length), np.int32)
    segment_ids = np.full((rows, length), -1, np.int32)
    learned = np.zeros((rows, length), bool)
    used, segments = np.zeros(rows, int), np.zeros(rows, int)
    for example in examples:
        size = len(example.tokens)
        if size > length:
            raise ValueError(f"an example has {size} tokens, a row {length}: cut it, or make rows longer.")
        if len(example.learned) != size:
            raise ValueError(f"an example has {size} tokens and {len(example.learned)} marks; they must be equal.")
        room = length - used
        fits = np.flatnonzero(room >= size)
        row = fits[0] if len(fits) else int(np.argmax(room))
        part = slice(used[row], used[row] + min(size, room[row]))
        kept = part.stop - part.start
        tokens[row, part] = example.tokens[:kept]
        segment_ids[row, part] = segments[row]
        learned[row, part] = example.learned[:kept]
        used[row] = part.stop
        segments[row] += 1
        if not len(fits):
            break
    return Batch(tokens, segment_ids, learned)


def prefetch(
    batch_of: Callable[[int], Batch], steps: Sequence[int], workers: Executor, ahead: int = 8
) -> Iterator[Batch]:
    """The batches of `steps` in order, made `ahead` of their use.

    `batch_of` is a function of the step alone, so that a run that resumes at a step meets the same data.
    """
    waiting: deque = deque()
    remaining = iter(steps)
    for step in remaining:
        waiting.append(workers.submit(batch_of, step))
        if len(waiting) == ahead:
            break
    while waiting:
        yield waiting.popleft().result()
        for step in remaining:
            waiting.append(workers.submit(batch_of, step))
            break
