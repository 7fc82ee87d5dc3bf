"""Messages between the devices of a mesh before anyone knows where these are: each group a compact box of neighbours.

A group of n devices on a torus is taken as the most cubic box of its own, whose ends aren't joined. With w the bytes per
second in one direction of one link, d the box's dimensions that have more than one chip, and l the longest of them:

    all-gather, reduce-scatter of P bytes    P (n - 1) / n / (d w)
    all-reduce                               2 P (n - 1) / n / (d w)
    all-to-all                               P l / (4 w)
    to a neighbour                           P / w

The two devices of a TPU7x chip use its links together. Behind a switch d w, and 4 w / l, are the bandwidth of one device.
Every message waits one microsecond for each link of its way, an all-reduce twice. So groups are judged alike on slices of
any shape, and devices that only hold copies of a model change no group; `roofline` knows the real places, joined ends too.
"""

import math
from dataclasses import dataclass

from kimi_jax.planning.chips import Chip
from kimi_jax.planning.roofline import HOP_SECONDS


@dataclass(frozen=True)
class Group:
    """Devices that exchange messages.

    Attributes:
        size: devices.
        gather_bandwidth: bytes per second of gathers and reductions.
        exchange_bandwidth: of all-to-alls.
        link_bandwidth: to a neighbour.
        hops: links on the longest way.
    """

    size: int
    gather_bandwidth: float
    exchange_bandwidth: float
    link_bandwidth: float
    hops: int

    @staticmethod
    def of(chip: Chip, size: int) -> "Group":
        """A group of so many devices of a kind."""
        if chip.fabric == "switch":
            return Group(size, chip.link_bandwidth, chip.link_bandwidth, chip.link_bandwidth, 1)
        together = chip.devices_per_chip if size % chip.devices_per_chip == 0 else 1
        sides = [side for side in box(size // together, chip.torus_dims) if side > 1]
        if not sides:
            one = chip.pair_bandwidth or chip.link_bandwidth
            return Group(size, one, one, one, 1)
        width = together * chip.link_bandwidth * len(sides)
        exchange = min(width, 4 * chip.link_bandwidth / max(sides))
        return Group(size, width, exchange, chip.link_bandwidth, sum(side - 1 for side in sides))

    @property
    def delay(self) -> float:
        """Seconds that a message waits for its way."""
        return self.hops * HOP_SECONDS

    def gather(self, size: float | int) -> float:
        """Seconds of an all-gather or a reduce-scatter of an array of so many bytes."""
        return 0.0 if self.size == 1 else size * self._others / self.gather_bandwidth + self.delay

    def reduce(self, size: float | int) -> float:
        """Seconds of an all-reduce."""
        return 2 * self.gather(size)

    def send(self, size: float | int) -> float:
        """Seconds of sending so many bytes to a neighbour."""
        return 0.0 if self.size == 1 else size / self.link_bandwidth + HOP_SECONDS

    @property
    def _others(self) -> float:
        return (self.size - 1) / self.size


def box(size: int, dimensions: int) -> tuple[int, ...]:
    """The most cubic box of so many chips, short sides first: its longest side is as short as it can be, then the next."""
    if dimensions == 1:
        return (size,)
    sides = (side for side in range(1, math.isqrt(size) + 1) if size % side == 0)
    boxes = (tuple(sorted((side, *box(size // side, dimensions - 1)))) for side in sides)
    return min(boxes, key=lambda found: found[::-1])
