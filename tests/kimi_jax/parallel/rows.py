"""Rows that end, and sequences that begin and end, at and around the borders of the devices' parts."""

import numpy as np

TOKENS_IN_ALL = 304  # with 8, 4 and 2 devices parts end at multiples of 38, 76 and 152
LENGTHS = np.array([0, 1, 2, 37, 38, 39, 41, 152, 153, 299, 300, 304], np.int32)
ROWS = len(LENGTHS)


def padded(x: np.ndarray, lengths: np.ndarray, fill: float = np.nan) -> np.ndarray:
    """`fill` behind each row's length."""
    valid = np.arange(x.shape[1]) < lengths[:, None]
    return np.where(valid.reshape(valid.shape + (1,) * (x.ndim - 2)), x, np.float32(fill))


def packed_ids(sequences: list[list[int]], tokens: int = TOKENS_IN_ALL) -> np.ndarray:
    """Ids of sequences with these lengths, one list a row; ids skip numbers, as they may."""
    ids = np.full((len(sequences), tokens), -1, np.int32)
    for row, lengths in enumerate(sequences):
        ends = np.cumsum(lengths)
        for number, (length, end) in enumerate(zip(lengths, ends, strict=True)):
            ids[row, end - length : end] = 2 * number + row % 2
    return ids


SEQUENCES = [
    [304],
    [38, 38, 76, 152],
    [37, 40, 75, 152],
    [39, 36, 1, 1, 80, 100],
    [10, 200, 50],
    [151, 1, 1, 151],
    [152],
    [1],
    [],
    [1, 2, 3, 32, 38, 1, 37, 3],
    [36, 2, 2, 3, 33, 76, 20],
    [75, 1, 228],
]
IDS = packed_ids(SEQUENCES)
