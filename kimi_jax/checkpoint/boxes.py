"""Boxes: rectangular parts of arrays, in which checkpoints are cut, stored and read."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Box:
    """A part of an array: `shape` elements from `start` on, along every axis."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def whole(shape: tuple[int, ...]) -> "Box":
        """All of an array."""
        return Box((0,) * len(shape), tuple(shape))

    @staticmethod
    def of_slices(slices: tuple[slice, ...], shape: tuple[int, ...]) -> "Box":
        """The box that slices without steps select in an array of `shape`."""
        bounds = [part.indices(size)[:2] for part, size in zip(slices, shape, strict=True)]
        return Box(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """One past the last element along every axis."""
        return tuple(a + n for a, n in zip(self.start, self.shape, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that selects the box."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True))

    def first(self, shape: tuple[int, ...]) -> int:
        """The place of the first element in an array of `shape`, counted in row-major order."""
        place = 0
        for start, size in zip(self.start, shape, strict=True):
            place = place * size + start
        return place

    def is_run(self, shape: tuple[int, ...]) -> bool:
        """Whether the box lies in an array of `shape` and its elements are adjacent there in row-major order."""
        if any(stop > size for stop, size in zip(self.stop, shape, strict=True)):
            return False
        cut = next((i for i, size in enumerate(self.shape) if size > 1), len(shape))
        return self.shape[cut + 1 :] == tuple(shape[cut + 1 :])

    def tail(self, axes: int) -> "Box":
        """The box without its first `axes` axes."""
        return Box(self.start[axes:], self.shape[axes:])

    def within(self, other: "Box") -> "Box":
        """The same box in coordinates that count from the start of `other`."""
        return Box(tuple(a - b for a, b in zip(self.start, other.start, strict=True)), self.shape)

    def intersect(self, other: "Box") -> "Box | None":
        """What two boxes share, or None."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))

    def split(self, most: int, axes: int | None = None) -> Iterator["Box"]:
        """Cuts into boxes of at most `most` elements, each contiguous in this box in row-major order.

        Args:
            most: elements of a part; parts of one element stay whole.
            axes: only the first `axes` axes are cut, so parts can be larger; None: all.
        """
        limit = len(self.shape) if axes is None else axes
        axis = next((i for i in range(limit) if self.shape[i] > 1), None)
        if self.size <= most or axis is None:
            yield self
            return
        one = self.size // self.shape[axis]
        # Parts of nearly equal length; single rows that are still too large are cut along the next axis.
        count = self.shape[axis] if one > most else -(-self.shape[axis] // (most // one))
        bounds = [self.shape[axis] * i // count for i in range(count + 1)]
        for begin, end in pairwise(bounds):
            part = Box(
                (*self.start[:axis], self.start[axis] + begin, *self.start[axis + 1 :]),
                (*self.shape[:axis], end - begin, *self.shape[axis + 1 :]),
            )
            if one > most:
                yield from part.split(most, axes)
            else:
                yield part
