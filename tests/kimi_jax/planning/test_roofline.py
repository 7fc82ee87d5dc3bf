"""Seconds of messages and products against the formulas, worked out by hand."""

import math

import jax
import pytest

from kimi_jax.planning import Collective, Counts, UnknownLoop, chip_named, estimate
from kimi_jax.planning.roofline import HOP_SECONDS, Torus, collective_seconds, torus_of

V5P, V5E, SEVEN, H200 = (chip_named(name) for name in ("v5p", "v5e", "tpu7x", "h200"))
MEBI = 2**20


def line_of(size: int, *, dims: int = 3, joined: bool, cores: int = 1) -> Torus:
    places = tuple((at, *(0,) * (dims - 1)) for at in range(size) for _ in range(cores))
    shape = (size, *(1,) * (dims - 1))
    return Torus(places, tuple(range(cores)) * size, shape, (joined, *(False,) * (dims - 1)))


def collective(kind: str, groups: tuple[tuple[int, ...], ...], *, size: int | None = None) -> Collective:
    count = size or max(map(len, groups))
    return Collective(kind, ("tensor",), count, MEBI, 1, groups=groups)


EIGHT = (tuple(range(8)),)
RING = tuple((i, (i + 1) % 8) for i in range(8))


@pytest.mark.parametrize(
    ("kind", "joined", "seconds", "hops"),
    [
        ("all-gather", True, MEBI * 7 / 8 / 200e9, 4),
        ("all-gather", False, MEBI * 7 / 8 / 100e9, 7),
        ("reduce-scatter", True, MEBI * 7 / 8 / 200e9, 4),
        ("all-reduce", True, 2 * MEBI * 7 / 8 / 200e9, 8),
        ("all-to-all", True, MEBI * 8 / (4 * 2 * 100e9), 4),
        ("all-to-all", False, MEBI * 8 / (4 * 100e9), 7),
    ],
)
def test_messages_on_a_line_and_on_a_ring(kind: str, joined: bool, seconds: float, hops: int) -> None:
    found, steps = collective_seconds(collective(kind, EIGHT), V5P, line_of(8, joined=joined))
    assert math.isclose(found, seconds)
    assert steps == hops


def test_a_shift_on_a_ring_uses_every_link_once_and_on_a_line_the_last_goes_all_the_way() -> None:
    shift = collective("collective-permute", RING, size=8)
    assert collective_seconds(shift, V5P, line_of(8, joined=True)) == (MEBI / 100e9, 1)
    assert collective_seconds(shift, V5P, line_of(8, joined=False)) == (MEBI / 100e9, 7)
    across = collective("collective-permute", tuple((i, (i + 4) % 8) for i in range(8)), size=8)
    # All go four links the same way: every link carries four.
    assert collective_seconds(across, V5P, line_of(8, joined=True)) == (4 * MEBI / 100e9, 4)


def test_two_dimensions_carry_more_than_one() -> None:
    places = tuple((x, y, 0) for x in range(4) for y in range(4))
    torus = Torus(places, (0,) * 16, (4, 4, 1), (True, True, False))
    found, _ = collective_seconds(collective("all-gather", (tuple(range(16)),)), V5P, torus)
    assert math.isclose(found, MEBI * 15 / 16 / 400e9)


def test_groups_that_take_every_second_chip_share_links() -> None:
    found, _ = collective_seconds(collective("all-gather", ((0, 2, 4, 6),)), V5P, line_of(8, joined=True))
    assert math.isclose(found, MEBI * 3 / 4 / 100e9)


def test_devices_of_one_chip_have_their_own_way() -> None:
    torus = line_of(4, joined=True, cores=2)
    found, _ = collective_seconds(collective("all-gather", ((0, 1),)), SEVEN, torus)
    assert math.isclose(found, MEBI / 2 / 600e9)
    # Both devices of four chips need the same: it comes to each chip once, over the links of both.
    found, _ = collective_seconds(collective("all-gather", EIGHT), SEVEN, torus)
    assert math.isclose(found, MEBI * 7 / 8 / (2 * 2 * 50e9))
    swap = collective("collective-permute", ((0, 1), (1, 0)), size=2)
    assert collective_seconds(swap, SEVEN, torus)[0] == MEBI / 600e9
    # Both devices of every chip shift to the next chip; one device's share of a link is half of a chip's.
    shift = collective("collective-permute", tuple((i, (i + 2) % 8) for i in range(8)), size=4)
    assert collective_seconds(shift, SEVEN, torus)[0] == MEBI / 50e9


def test_a_switch_has_no_places() -> None:
    assert collective_seconds(collective("all-reduce", EIGHT), H200, None) == (2 * MEBI * 7 / 8 / 450e9, 2)
    assert collective_seconds(collective("collective-permute", RING, size=8), H200, None)[0] == MEBI / 450e9


def test_a_group_of_one_costs_nothing() -> None:
    assert collective_seconds(collective("all-reduce", ((0,),)), V5P, line_of(8, joined=True)) == (0.0, 0)


def test_a_step_is_as_long_as_its_longest_part_or_waits_for_messages() -> None:
    counts = Counts(
        {"bf16": 197e12 * 0.003, "f32 highest": 197e12 * 0.001 / 6},
        0.0,
        819e9 * 0.002,
        (Collective("all-gather", ("tensor",), 2, int(100e9 * 0.002), 10),),
        {},
        (),
        0,
    )
    found = estimate(counts, V5E, {"tensor": 2})
    assert math.isclose(found.compute_seconds, 0.004)
    assert math.isclose(found.memory_seconds, 0.002)
    # Ten times 200 MB, half of which travels, at 100 GB/s: a ring of two uses both directions of a link of 50 GB/s.
    assert math.isclose(found.transfer_seconds, 0.01)
    assert math.isclose(found.latency_seconds, 10 * HOP_SECONDS)
    assert math.isclose(found.overlapped_seconds, 0.01 + 1e-5)
    assert math.isclose(found.serial_seconds, 0.014 + 1e-5)
    assert found.bound == "communication"
    assert not found.lower_bound
    said = " ".join(found.assumptions)
    for part in ("bf16 197 T", "819 GB/s of memory", "50 GB/s in one direction of one link", "a ring of neighbours"):
        assert part in said


def test_what_is_not_counted_makes_it_a_lower_bound_and_is_said() -> None:
    loop = UnknownLoop("jit(f)/while", 12.0, 34.0)
    found = estimate(Counts({}, 5.0, 1.0, (), {"tpu_custom_call": 3}, (loop,), 2), V5E, {"x": 1})
    assert found.lower_bound
    said = " ".join(found.assumptions)
    for part in (
        "3 calls of tpu_custom_call",
        "the loop jit(f)/while depends on data; it is counted once",
        "2 conditionals",
    ):
        assert part in said


def test_without_devices_that_have_places_there_is_no_torus() -> None:
    assert torus_of(V5E, {"x": 4}) is None
    assert torus_of(V5E, jax.make_mesh((8,), ("x",))) is None
    assert torus_of(H200, jax.make_mesh((8,), ("x",))) is None
