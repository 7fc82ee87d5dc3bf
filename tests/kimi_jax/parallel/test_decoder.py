"""A whole model on meshes of eight devices is the model on one."""

from collections.abc import Mapping

import pytest

from tests.mesh_cases import EXACT, differences

# Every axis alone or with others; heads and experts of both families divide.
CHOSEN: tuple[Mapping[str, int], ...] = (
    {"context": 4},
    {"expert": 4},
    {"data": 2, "tensor": 2},
    {"data": 2, "expert": 2},
    {"context": 4, "tensor": 2},
    {"context": 2, "expert": 2, "tensor": 2},
)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["kimi-k31-d128", "kimi-linear-tiny"])
@pytest.mark.parametrize("mesh", CHOSEN, ids=lambda mesh: "-".join(f"{axis}{size}" for axis, size in mesh.items()))
def test_prefill_in_chunks_decode_and_packed_rows(family: str, mesh: Mapping[str, int]) -> None:
    """float32: values to 2e-4, experts, selected positions and greedy tokens equal; `benchmarks.meshes` has more meshes."""
    for name, found in differences(family, mesh).items():
        assert found == 0 if name in EXACT else found < 2e-4, name
