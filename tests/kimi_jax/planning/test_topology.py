"""Names of topologies, and sizes of meshes over them."""

import os
from typing import Any

import jax
import pytest
from jax.experimental import topologies

from kimi_jax.planning import (
    CHIPS,
    TopologyError,
    chip_named,
    num_devices,
    parse_topology,
    topology_devices,
    topology_mesh,
    versions,
)


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("v5e:4x4", 16),
        ("v6e:16x16", 256),
        ("v5p:8x8x8", 512),
        ("tpu7x:4x4x4", 128),
        ("tpu7x:8x8x8", 1024),
        ("v5e:1x1", 1),
    ],
)
def test_devices_of_topologies(name: str, devices: int) -> None:
    assert num_devices(name) == devices


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5p-512", "isn't KIND:SHAPE"),
        ("v5p:8x8x8x8", "isn't KIND:SHAPE"),
        ("", "isn't KIND:SHAPE"),
        ("v9z:2x2", "names the chip 'v9z'; legal are v5e, v5p, v6e, tpu7x"),
        ("h200:2x2", "names the chip 'h200'; legal are v5e, v5p, v6e, tpu7x"),
        ("v5e:2x2x2", "has 3 dimensions, but chips of v5e are joined in 2, as in 'v5e:4x4'"),
        ("v5p:8x8", "has 2 dimensions, but chips of v5p are joined in 3, as in 'v5p:8x8x8'"),
        ("v5p:3x4x4", "the first two sizes must be even"),
        ("v5e:0x2", "must have between 1 and"),
    ],
)
def test_names_that_mean_nothing_are_refused(name: str, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        parse_topology(name)


def test_a_mesh_of_another_size_is_refused_with_sizes_that_fit() -> None:
    with pytest.raises(TopologyError) as caught:
        topology_mesh("v5p:8x8x8", {"data": 1, "context": 4, "expert": 16, "tensor": 4})
    message = str(caught.value)
    assert "data=1,context=4,expert=16,tensor=4 has 256 devices, but v5p:8x8x8 has 512" in message
    assert "data=1,context=4,expert=16,tensor=8" in message
    assert "data=1,context=4,expert=32,tensor=4" in message


def test_sizes_that_fit_are_found_when_no_single_change_is_enough() -> None:
    with pytest.raises(TopologyError, match="data=1,expert=1,tensor=4; data=1,expert=4,tensor=1"):
        topology_mesh("v5e:2x2", {"data": 1, "expert": 3, "tensor": 5})


@pytest.mark.parametrize("sizes", [{}, {"data": 0, "tensor": 4}])
def test_meshes_without_devices_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(TopologyError, match="every size must be 1 or more"):
        topology_mesh("v5e:2x2", sizes)


def test_a_missing_libtpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise RuntimeError("JAX TPU support not installed; cannot generate TPU topology.")

    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    with pytest.raises(TopologyError, match=r"needs libtpu, which isn't installed: pip install 'kimi-jax\[tpu\]'"):
        topology_devices("v5e:2x2")


def test_describing_a_topology_leaves_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def described(*_: object, **__: object) -> None:
        seen.update(os.environ)
        raise RuntimeError("no such thing")

    monkeypatch.setattr(topologies, "get_topology_desc", described)
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    before = dict(os.environ)
    with pytest.raises(TopologyError, match="can't describe the topology 'v5e:2x2': no such thing"):
        topology_devices("v5e:2x2")
    assert seen["TPU_SKIP_MDS_QUERY"] == "1"
    assert dict(os.environ) == before


def test_versions_are_named() -> None:
    found = versions()
    assert found["jax"] == jax.__version__
    assert set(found) == {"python", "jax", "jaxlib", "libtpu"}


def test_peaks_of_operands() -> None:
    chip = chip_named("v5e")
    assert (chip.peak("bf16"), chip.peak("s8"), chip.peak("f32 highest")) == (197e12, 393e12, 197e12 / 6)
    assert CHIPS["h200"].peak("f8e4m3fn") == 1978.9e12
    assert CHIPS["tpu7x"].hbm_bytes == 96 * 2**30
    with pytest.raises(ValueError, match="chip 'v1' is unknown; legal are v5e"):
        chip_named("v1")
