"""What a conversion may take of the machine."""

import pytest

from kimi_jax.checkpoint import resources
from kimi_jax.checkpoint.resources import available_memory, disk_needed, keep_memory, memory_needed

GIB = 2**30


def test_needs_are_the_documented_ones() -> None:
    assert memory_needed(2**27) == GIB + 5 * 2**27
    assert 10**12 < disk_needed(10**12) < 1.003 * 10**12
    found = available_memory()
    assert found is None or found > 0


@pytest.mark.parametrize(("resident", "trims"), [(GIB + 3 * GIB, 0), (GIB + 3 * GIB + 1, 1)])
def test_freed_memory_goes_back_when_two_more_arrays_would_break_the_bound(
    monkeypatch: pytest.MonkeyPatch, resident: int, trims: int
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(resources, "_resident", lambda: resident)
    monkeypatch.setattr(resources, "_TRIM", calls.append)
    keep_memory(GIB)
    assert calls == [0] * trims
