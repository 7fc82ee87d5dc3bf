"""The words of `gpu_warp.Warp` in NumPy: a value is an array of 32 numbers, and memory an array of integers."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Place = tuple[np.ndarray, int]


class NumpyWarp:
    """One warp, number `number` of its block. Raises where lanes disagree about a branch."""

    def __init__(self, number: int = 0, meet_all: Callable[[], Any] = lambda: None) -> None:
        self.lane = np.arange(32, dtype=np.int32)
        self.below = ((1 << np.arange(32, dtype=np.int64)) - 1).astype(np.uint32).view(np.int32)
        self.of_block, self.number = self.integer(number), self.integer(number % 4)
        self.meet_all = meet_all

    def integer(self, value: int) -> np.ndarray:
        return np.full(32, value - (1 << 32) if value >= 1 << 31 else value, np.int32)

    def real(self, value: float) -> np.ndarray:
        return np.full(32, value, np.float32)

    def _int(self, value: Any) -> np.ndarray:
        return self.integer(value) if isinstance(value, int) else value

    def add(self, a: Any, b: Any) -> np.ndarray:
        return (self._int(a).astype(np.int64) + self._int(b)).astype(np.int32)

    def sub(self, a: Any, b: Any) -> np.ndarray:
        return (self._int(a).astype(np.int64) - self._int(b)).astype(np.int32)

    def mul(self, a: Any, b: Any) -> np.ndarray:
        return (self._int(a).astype(np.int64) * self._int(b)).astype(np.int32)

    def both(self, a: Any, b: Any) -> np.ndarray:
        return a & self._int(b)

    def either(self, a: Any, b: Any) -> np.ndarray:
        return a | b

    def differ(self, a: Any, b: Any) -> np.ndarray:
        return a ^ self._int(b)

    def halve(self, a: Any) -> np.ndarray:
        return a >> 1

    def quotient(self, a: Any, b: int) -> np.ndarray:
        assert (a >= 0).all()
        return a // b

    def whole_ratio(self, a: Any, b: Any) -> np.ndarray:
        assert (a >= 0).all()
        assert (b > 0).all()
        return a // b

    def shift_down(self, a: Any, count: int) -> np.ndarray:
        assert (a >= 0).all()
        return a >> count

    def shift_up(self, a: Any, count: Any) -> np.ndarray:
        count = self._int(count)
        assert ((count >= 0) & (count < 32)).all()
        return (self._int(a).astype(np.int64) << count).astype(np.int32)

    def first_one(self, a: Any) -> np.ndarray:
        assert (a != 0).all()
        return np.array([(x & -x).bit_length() - 1 for x in a.tolist()], np.int32)

    def sign_mask(self, a: Any) -> np.ndarray:
        return a >> 31

    def larger(self, a: Any, b: Any) -> np.ndarray:
        return np.maximum(a, self._int(b))

    def smaller(self, a: Any, b: Any) -> np.ndarray:
        return np.minimum(a, self._int(b))

    def compare(self, how: str, a: Any, b: Any) -> np.ndarray:
        names = {"eq": "equal", "ne": "not_equal", "gt": "greater", "ge": "greater_equal", "lt": "less"}
        return getattr(np, names[how])(a, self._int(b))

    def select(self, condition: Any, a: Any, b: Any) -> np.ndarray:
        return np.where(condition, self._int(a), self._int(b))

    def count_of(self, condition: Any) -> np.ndarray:
        return condition.astype(np.int32)

    def relu(self, a: Any) -> np.ndarray:
        return np.maximum(a, np.float32(0))

    def multiply_add(self, a: Any, b: Any, c: Any) -> np.ndarray:
        return (a.astype(np.float64) * b + c).astype(np.float32)

    def add_real(self, a: Any, b: Any) -> np.ndarray:
        return a + b

    def mul_real(self, a: Any, b: Any) -> np.ndarray:
        return a * b

    def ratio(self, a: Any, b: Any) -> np.ndarray:
        return a / b

    def above(self, a: Any, b: Any) -> np.ndarray:
        return a > b

    def byte_of(self, a: Any, which: Any) -> np.ndarray:
        return (a.view(np.uint32) >> (8 * which).astype(np.uint32)).astype(np.int32) & 255

    def bits(self, a: Any) -> np.ndarray:
        return a.view(np.int32)

    def from_lane_xor(self, a: Any, distance: int) -> np.ndarray:
        return a[self.lane ^ distance]

    def from_lane(self, a: Any, lane: Any) -> np.ndarray:
        return a[lane & 31]

    def ballot(self, condition: Any) -> np.ndarray:
        return self.integer(sum(1 << i for i, true in enumerate(condition) if true))

    def alike(self, a: Any) -> np.ndarray:
        return np.array([sum(1 << i for i in range(32) if a[i] == x) for x in a], np.uint32).view(np.int32)

    def ones(self, a: Any) -> np.ndarray:
        return np.array([bin(x).count("1") for x in a.view(np.uint32)], np.int32)

    def total(self, a: Any) -> np.ndarray:
        return self.integer(int(a.sum()))

    def upto(self, a: Any) -> np.ndarray:
        return np.cumsum(a).astype(np.int32)

    def largest(self, a: Any) -> np.ndarray:
        return self.integer(int(a.max()))

    def meet(self) -> None:
        pass

    def offset(self, place: Place, count: Any) -> Place:
        return place[0], place[1] + self._same(count)

    def row(self, place: Place, number: Any, size: int) -> Place:
        return place[0], place[1] + np.asarray(number, np.int64) * size

    def load(self, place: Place, index: Any) -> np.ndarray:
        assert (index >= 0).all()
        return place[0][place[1] + index]

    def load_four(self, place: Place, index: Any, condition: Any) -> list[np.ndarray]:
        assert (index[condition] % 4 == 0).all()
        return [np.where(condition, self.load(place, np.where(condition, index + i, 0)), 0) for i in range(4)]

    def store(self, place: Place, index: Any, value: Any, condition: Any = None) -> None:
        chosen = np.ones(32, bool) if condition is None else condition
        assert (index[chosen] >= 0).all()
        place[0][place[1] + index[chosen]] = value[chosen]

    def copy(self, source: Place, begin: Any, target: Place, to: Any, count: int) -> None:
        assert (begin % count == 0).all()
        assert (to % count == 0).all()
        for i in range(count):
            self.store(target, to + i, self.load(source, begin + i))

    def load_real(self, place: Place, index: Any) -> np.ndarray:
        return self.load(place, index)

    def store_real(self, place: Place, index: Any, value: Any, condition: Any) -> None:
        self.store(place, index, value, condition)

    def when(self, condition: Any, act: Callable[[], None]) -> None:
        if self._same(condition):
            act()

    def loop(self, count: Any, step: Callable[..., Sequence[Any]], state: Sequence[Any]) -> Sequence[Any]:
        for i in range(self._same(self._int(count))):
            state = step(self.integer(i), *state)
        return state

    def repeat(
        self, going: Callable[..., Any], step: Callable[..., Sequence[Any]], state: Sequence[Any]
    ) -> Sequence[Any]:
        while self._same(going(*state)):
            state = step(*state)
        return state

    def _same(self, value: Any) -> int:
        assert (value == value[0]).all(), "lanes disagree"
        return int(value[0])


def run_block(warps: int, act: Callable[[Any], None]) -> None:
    """`act` of every warp of a block, which meet where they say so."""
    meeting = threading.Barrier(warps)
    failures: list[BaseException] = []

    def one(number: int) -> None:
        try:
            act(NumpyWarp(number, meeting.wait))
        except threading.BrokenBarrierError:
            pass
        except BaseException as failure:
            failures.append(failure)
            meeting.abort()

    threads = [threading.Thread(target=one, args=(number,)) for number in range(warps)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
