"""Devices that split the heads and share the selection of keys, against the operation on one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from kimi_jax.parallel import MeshDecoder, shards, shared_selection
from kimi_jax.parallel.shared_selection import dsa_shared, shares_selection
from kimi_jax.sharding import make_mesh
from pallas_kernels.dispatch import UnsupportedImplementationError
from pallas_kernels.lightning_indexer import lightning_indexer
from pallas_kernels.mxfp8 import Mxfp8
from pallas_kernels.sparse_mla import dsa_mla
from tests import golden_data

HEADS, NOPE, SLOT, LATENT, VALUES, INDEX_HEADS, WIDTH = 4, 6, 3, 8, 5, 3, 32
SCALE = (NOPE + SLOT) ** -0.5


def numbers(seed: int, rows: int, tokens: int, places: int) -> dict[str, jax.Array]:
    """Small integers where keys are selected: exact scores, many ties."""
    rng = np.random.default_rng(seed)
    drawn = {
        "index_q": rng.integers(-2, 3, (rows, tokens, INDEX_HEADS, WIDTH)),
        "index_k": rng.integers(-2, 3, (rows, places, WIDTH)),
        "index_w": rng.integers(-2, 4, (rows, tokens, INDEX_HEADS)),
        "q": rng.standard_normal((rows, tokens, HEADS, NOPE + SLOT)),
        "latent": rng.standard_normal((rows, places, LATENT + SLOT)),
        "w_uk": rng.standard_normal((HEADS, NOPE, LATENT)),
        "w_uv": rng.standard_normal((HEADS, VALUES, LATENT)),
    }
    return {name: jnp.asarray(x, jnp.float32) for name, x in drawn.items()}


@pytest.mark.parametrize(
    ("rows", "tokens", "places", "packed"),
    [(4, 1, 160, False), (2, 3, 160, True), (1, 8, 100, False), (4, 2, 100, False)],
    ids=["rows", "rows-mxfp8", "tokens", "rows-of-no-page"],
)
def test_each_query_is_looked_after_once(rows: int, tokens: int, places: int, packed: bool) -> None:
    """Rows, or tokens where rows don't divide or are no pages; the sets of one device, ties and padding included."""
    x = numbers(rows + places, rows, tokens, places)
    positions = jnp.asarray(np.random.default_rng(0).integers(20, places - tokens, (rows, 1)), jnp.int32)
    positions = (positions + jnp.arange(tokens, dtype=jnp.int32)).at[0, 0].set(-1)
    if packed:
        x |= {name: Mxfp8.quantize(x[name]) for name in ("index_q", "index_k")}
    options: dict[str, Any] = {"top_k": 16, "scale": SCALE, "return_indices": True}
    expected, selected = jax.jit(lambda x, at: dsa_mla(**x, q_positions=at, **options))(x, positions)

    split = {name: P() for name in x} | {"q": P(None, None, "tensor"), "w_uk": P("tensor"), "w_uv": P("tensor")}
    out = P(None, None, "tensor"), P()
    run = jax.jit(
        jax.shard_map(
            lambda x, at: dsa_shared(**x, axis="tensor", q_positions=at, **options),
            mesh=Mesh(np.array(jax.devices()[:2]), ("tensor",)),
            in_specs=(split, P()),
            out_specs=out,
            check_vma=False,
        )
    )
    found, indices = run(x, positions)
    np.testing.assert_array_equal(indices, selected)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.all(np.asarray(found)[0, 0] == 0)


def test_sizes_that_do_not_divide_are_said() -> None:
    x, at = numbers(0, 1, 3, 64), jnp.zeros((1, 3), jnp.int32)
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",))
    options: dict[str, Any] = {"axis": "tensor", "top_k": 4, "scale": SCALE}
    run = jax.shard_map(
        lambda x, at: dsa_shared(**x, q_positions=at, **options),
        mesh=mesh,
        in_specs=({name: P() for name in x}, P()),
        out_specs=P(),
        check_vma=False,
    )
    with pytest.raises(
        ValueError, match="2 devices of axis 'tensor' divide neither B=1 rows, of S=64 keys, nor T=3 tokens"
    ):
        run(x, at)


def test_a_kernel_that_is_named_is_the_attention_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `dsa_mla`, whose indexer takes what it can: models whose indexer has other sizes run all the same."""
    asked: list[Any] = []

    def select(*arrays: Any, implementation: Any, **options: Any) -> jax.Array:
        asked.append(implementation)
        return lightning_indexer(*arrays, implementation=implementation, **options)

    monkeypatch.setattr(shared_selection, "lightning_indexer", select)
    x, at = numbers(0, 2, 1, 64), jnp.full((2, 1), 63, jnp.int32)

    def run(implementation: Any) -> jax.Array:
        options: dict[str, Any] = {"axis": "tensor", "top_k": 4, "scale": SCALE, "implementation": implementation}
        return jax.shard_map(
            lambda x, at: dsa_shared(**x, q_positions=at, **options),
            mesh=Mesh(np.array(jax.devices()[:2]), ("tensor",)),
            in_specs=({name: P() for name in x}, P()),
            out_specs=P(),
            check_vma=False,
        )(x, at)

    run("xla")
    with pytest.raises(UnsupportedImplementationError, match="sparse_mla"):
        run("gpu")
    assert asked == ["xla", None]


def test_only_long_selections_are_shared() -> None:
    """By what there is to read; and where neither rows nor tokens divide, everyone selects for all."""

    def shared(rows: int, tokens: int, places: int, devices: int = 2, top_k: int = 2048) -> bool:
        return shares_selection(rows, tokens, places, 128, devices=devices, top_k=top_k)

    assert shared(64, 1, 131072)
    assert shared(256, 1, 4352)
    assert shared(1, 4096, 131072)
    assert not shared(64, 1, 4352)  # short
    assert not shared(64, 1, 131072, devices=1)
    assert not shared(63, 1, 131072)
    assert not shared(64, 1, 131072, top_k=131072)  # nothing is selected
    assert not shared(1, 131072, 131072)  # too many selections at once


def test_decode_of_a_model_whose_devices_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits and greedy tokens are those of devices that don't."""
    model = golden_data.model("kimi-k31-d128")
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, model.config.vocab_size, (2, 96)), jnp.int32)
    calls: list[int] = []

    def counted(*operands: Any, **options: Any) -> Any:
        calls.append(1)
        return dsa_shared(*operands, **options)

    def run() -> tuple[np.ndarray, np.ndarray]:
        decoder = MeshDecoder(model.config, make_mesh({"tensor": 2}))
        cache = decoder.allocate(2, 128, jnp.float32)
        logits, cache = jax.jit(decoder.prefill)(model.params, tokens, cache)
        after, _ = jax.jit(decoder.decode)(model.params, jnp.argmax(logits, axis=-1).astype(jnp.int32), cache)
        return np.asarray(logits), np.asarray(after)

    monkeypatch.setattr(shards, "dsa_shared", counted)
    expected = run()
    assert not calls  # short rows, and no GPU
    monkeypatch.setattr(shards, "platform", lambda: "gpu")
    monkeypatch.setattr(shared_selection, "SHARED_FROM", 1)
    found = run()
    assert calls
    for one, two in zip(expected, found, strict=True):
        np.testing.assert_allclose(two, one, atol=2e-4)
        np.testing.assert_array_equal(two.argmax(-1), one.argmax(-1))
