"""Caches in eight bits on a mesh: latents and keys of several arrays, split alike, are those of one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax import Cache
from kimi_jax.model import Decoder
from kimi_jax.parallel import MeshDecoder
from kimi_jax.planning.chips import CHIPS
from kimi_jax.planning.step_cost import StepModel, Workload
from kimi_jax.sharding import make_mesh
from pallas_kernels.fp8_latent import Fp8Latent
from pallas_kernels.lightning_indexer import TwoStage
from pallas_kernels.mxfp8 import Mxfp8
from tests import golden_data

FAMILY = "kimi-k31-d128"
SMALL: dict[str, Any] = {"kv_cache": "fp8", "index_cache": "mxfp8"}
TOKENS, CAPACITY = 60, 64
MESH = {"context": 2, "tensor": 2}


def run(decoder: Decoder, ids: np.ndarray) -> tuple[np.ndarray, Cache]:
    """Logits of a prompt's tokens and of four more, one at a time; and the cache."""
    params = golden_data.model(FAMILY).params
    cache = decoder.allocate(2, CAPACITY, jnp.float32, **SMALL)
    prefill = jax.jit(decoder.prefill, static_argnames="all_logits")
    logits, cache = prefill(params, ids[:, : TOKENS - 4], cache, all_logits=True)
    found, decode = [np.asarray(logits)], jax.jit(decoder.decode)
    for place in range(TOKENS - 4, TOKENS):
        logits, cache = decode(params, ids[:, place], cache)
        found.append(np.asarray(logits)[:, None])
    return np.concatenate(found, axis=1), cache


def test_split_prefill_and_decode_with_an_indexer_in_two_stages() -> None:
    """The prompt is split over devices, which gather bytes; then each has a half of the places and of the candidates."""
    config = golden_data.model(FAMILY).config
    ids = np.random.default_rng(0).integers(0, 248, (2, TOKENS)).astype(np.int32)
    decoder = MeshDecoder(config, make_mesh(MESH), split_from=16, indexer=TwoStage(4, 0.25, "bound"))
    found, cache = run(decoder, ids)
    want, single = run(golden_data.model(FAMILY).decoder, ids)
    # Sums in another order turn a rounding of eight bits here and there, and what the next layer rounds, with it.
    distance = np.abs(found - want)
    assert distance.mean() < 1e-2
    assert distance.max() < 0.3
    assert isinstance(cache.latent, Fp8Latent)
    assert isinstance(cache.index_key, Mxfp8)
    for one, two in ((cache.latent, single.latent), (cache.index_key, single.index_key)):
        same = np.isclose(*(np.asarray(x.dequantize(jnp.float32)) for x in (one, two)), rtol=1e-4, atol=1e-6)
        assert same.mean() > 0.95


def test_a_device_holds_what_the_planner_says() -> None:
    config = golden_data.model(FAMILY).config
    decoder = MeshDecoder(config, make_mesh(MESH))
    cache = decoder.allocate(2, CAPACITY, jnp.bfloat16, **SMALL)
    model = StepModel(config, next(iter(CHIPS.values())))
    planned = model.cache_bytes({"data": 1, "expert": 1, **MESH}, Workload("decode", 2, 1, CAPACITY, "fp8", "mxfp8"))
    for name, size in planned.items():
        held = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(getattr(cache, name))]
        assert sum(held) == size, name
    token = cache.format.token_bytes(config)
    assert planned["latent"] + planned["index_key"] == token.total * 2 * CAPACITY // MESH["context"]
