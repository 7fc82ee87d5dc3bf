"""A whole model on meshes of eight devices is the model on one."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.parallel import MeshDecoder
from kimi_jax.sharding import make_mesh
from tests.mesh_cases import EXACT, alone, differences

# Every axis alone or with others; heads and experts of the families divide.
CHOSEN: tuple[tuple[str, Mapping[str, int]], ...] = (
    ("kimi-k31-d128", {"context": 4}),
    ("kimi-linear-tiny", {"expert": 4}),
    ("kimi-k31-d128", {"data": 2, "tensor": 2}),
    ("kimi-linear-tiny", {"data": 2, "expert": 2}),
    ("kimi-linear-tiny", {"context": 4, "tensor": 2}),
    ("kimi-k31-d128", {"context": 2, "expert": 2, "tensor": 2}),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mesh"), CHOSEN, ids=[f"{name}-{'-'.join(map(str, mesh))}" for name, mesh in CHOSEN]
)
def test_prefill_in_chunks_decode_and_packed_rows(family: str, mesh: Mapping[str, int]) -> None:
    """float32: values to 2e-4, experts, selected positions and greedy tokens equal; `benchmarks.meshes` has more meshes."""
    compared = differences(family, mesh)
    assert compared.pop("tokens") > 400  # of 578: near ties that fall otherwise end a row
    for name, found in compared.items():
        assert found == 0 if name in EXACT else found < 2e-4, name


@pytest.mark.parametrize("mesh", [{"context": 2}, {"expert": 2}], ids=["context", "expert"])
def test_a_prefill_without_lengths_fills_whole_rows(mesh: Mapping[str, int]) -> None:
    """Rows that split evenly need no padding, and nobody counts their tokens."""
    family = "kimi-linear-tiny"
    single = alone(family)
    split = MeshDecoder(single.decoder.config, make_mesh(mesh))
    tokens = single.tokens[:1, :256]
    found = []
    for decoder in (single.decoder, split):
        cache = decoder.allocate(1, 257, jnp.float32)
        logits, cache = jax.jit(decoder.prefill)(single.params, tokens, cache)
        after, cache = jax.jit(decoder.decode)(single.params, tokens[:, 0], cache)
        assert np.asarray(cache.lengths).tolist() == [257]
        found.append((np.asarray(logits), np.asarray(after)))
    for one, two in zip(*found, strict=True):
        np.testing.assert_allclose(two, one, atol=2e-4)


def test_a_second_cache_of_the_same_sizes_compiles_nothing() -> None:
    """A server allocates one for every long prompt; compiling took longer than a tenth of its prefill."""
    decoder = MeshDecoder(alone("kimi-linear-tiny").decoder.config, make_mesh({"context": 2}))
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
    try:
        decoder.allocate(1, 384, jnp.float32)
        assert any("backend_compile" in event for event in compiled)
        compiled.clear()
        cache = decoder.allocate(1, 384, jnp.float32)
        assert not any("compile" in event for event in compiled)
        assert decoder.allocate(2, 384, jnp.float32).lengths.shape == (2,)
    finally:
        jax.monitoring.clear_event_listeners()
    assert cache.lengths.shape == (1,)
