"""Into how many segments the Hopper kernels cut a sequence: a model of their time from shapes and multiprocessors.

Its numbers were measured on an H200 with 12, 24, 32 and 96 heads; `python -m benchmarks.kda_segments` prints what it says beside
what the kernels take.
"""

import math
from typing import NamedTuple

LARGEST = 16
WORTH = 0.95  # of the time without segments; less is within what the model doesn't know
_BYTES = 4.1e12  # a second, of device memory


class _Pass(NamedTuple):
    """Seconds of a pass over chunks.

    Attributes:
        alone: of a chunk, and of beginning and ending, where a warpgroup with 64 columns has a multiprocessor.
        paired: where two share one and its copies.
        bytes: of a chunk and head from and to device memory, which may take longer.
    """

    alone: tuple[float, float]
    paired: tuple[float, float]
    bytes: int


_RESULTS = _Pass((0.98e-6, 4.7e-6), (1.40e-6, 8.0e-6), 90 * 1024)
_SUMMARIES = _Pass((0.80e-6, 8.0e-6), (0.80e-6, 8.0e-6), 48 * 1024)
_COMBINED, _LAUNCH = 2.4e-6, 2.3e-6


def seconds(segments: int, sequences: int, heads: int, chunks: int, processors: int) -> float:
    """Of everything behind the chunks' own stage.

    Args:
        segments: of a sequence.
        sequences: of all rows.
        heads: of a sequence.
        chunks: of a sequence, on average.
        processors: multiprocessors.
    """
    chains = sequences * heads
    longest = math.ceil(chunks / segments)

    def passing(which: _Pass, pairs: int, fraction: float) -> float:
        alone = 2 * pairs <= processors
        rounds = 1 if alone else math.ceil(pairs / processors)
        step, begun = which.alone if alone else which.paired
        return max(rounds * longest * step, fraction * chains * chunks * which.bytes / _BYTES) + rounds * begun

    total = passing(_RESULTS, chains * segments, 1.0)
    if segments > 1:
        others = segments - 1
        total += passing(_SUMMARIES, 2 * chains * others, others / segments)
        total += math.ceil(2 * chains / processors) * others * _COMBINED + 2 * _LAUNCH
    return total


def best(sequences: int, heads: int, chunks: int, processors: int) -> int:
    """The number of segments that takes the least time; 1 unless more save something."""
    times = {n: seconds(n, sequences, heads, chunks, processors) for n in range(1, min(LARGEST, chunks) + 1)}
    found = min(times, key=lambda n: times[n])
    return found if times[found] < WORTH * times[1] else 1
