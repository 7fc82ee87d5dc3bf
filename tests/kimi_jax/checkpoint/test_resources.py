"""What a conversion, and loading, may take of the machine."""

from pathlib import Path

import pytest

from kimi_jax.checkpoint import resources
from kimi_jax.checkpoint.resources import available_memory, disk_needed, keep_memory, memory_needed
from tests.kimi_jax.checkpoint.sources import k3_config, random_checkpoint, run_script

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


LOADING = """
import resource, sys
import jax
from kimi_jax import Kimi
Kimi.from_pretrained(sys.argv[1], progress=False)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
leaves = jax.tree.leaves(Kimi.from_pretrained(sys.argv[2], progress=False).params)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(grown * 1024, sum(leaf.nbytes for leaf in leaves), max(leaf.nbytes for leaf in leaves))
"""


def test_experts_are_stacked_while_a_directory_is_read(tmp_path: Path) -> None:
    """Gate and up of every expert come to lie side by side, all experts in one array, without a second copy of it."""
    small = random_checkpoint(tmp_path / "small", k3_config())
    large = k3_config(num_experts=256, moe_intermediate_size=512, routed_expert_hidden_size=512)
    grown, held, largest = map(int, run_script(LOADING, small, random_checkpoint(tmp_path / "large", large)).split())
    assert largest > 60 * 2**20
    assert grown < held + largest / 4 + 8 * 2**20
