"""What a decoder on a mesh must reproduce of the same decoder on one device."""

from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax import Cache, KimiConfig
from kimi_jax.model import Decoder
from kimi_jax.parallel import MeshDecoder
from kimi_jax.sharding import make_mesh
from tests import golden_data

LENGTHS = np.array([300, 1, 177, 100], np.int32)
CHUNK = 100
CAPACITY = 320
PACKED = 260

MESHES: tuple[Mapping[str, int], ...] = (
    {"data": 2},
    {"context": 2},
    {"context": 4},
    {"context": 8},
    {"expert": 2},
    {"expert": 4},
    {"expert": 8},
    {"tensor": 2},
    {"tensor": 4},
    {"tensor": 8},
    {"data": 2, "context": 2},
    {"data": 2, "expert": 2},
    {"data": 2, "tensor": 2},
    {"context": 2, "expert": 2},
    {"context": 2, "tensor": 2},
    {"context": 4, "tensor": 2},
    {"context": 2, "tensor": 4},
    {"expert": 2, "tensor": 2},
    {"expert": 4, "tensor": 2},
    {"expert": 2, "tensor": 4},
    {"context": 2, "expert": 4},
    {"context": 4, "expert": 2},
    {"data": 2, "context": 2, "expert": 2},
    {"data": 2, "context": 2, "tensor": 2},
    {"data": 2, "expert": 2, "tensor": 2},
    {"context": 2, "expert": 2, "tensor": 2},
)


class Sequences:
    """Rows of different lengths that come in three chunks, then one more token; and packed rows.

    Args:
        decoder: the model, on one device or on a mesh.
        unsplit: the same model, made so that a chunk isn't split.
        params: its parameters.
    """

    def __init__(self, decoder: Decoder, unsplit: Decoder, params: Any):
        vocabulary, rows = decoder.config.vocab_size, len(LENGTHS)
        rng = np.random.default_rng(7)
        self.tokens = rng.integers(0, vocabulary, (rows, 3 * CHUNK)).astype(np.int32)
        self.packed = rng.integers(0, vocabulary, (rows, PACKED)).astype(np.int32)
        self.segments = np.stack([_segments(rng, PACKED) for _ in range(rows)])
        self.decoder, self.unsplit, self.params = decoder, unsplit, params

    @cached_property
    def found(self) -> dict[str, np.ndarray]:
        """Everything that is compared; what padding holds is 0."""
        cache: Cache = self.decoder.allocate(len(LENGTHS), CAPACITY, jnp.float32)
        trace, traces = jax.jit(self.decoder.trace), []
        for chunk in range(3):
            here = np.clip(LENGTHS - chunk * CHUNK, 0, CHUNK)
            run = trace if chunk < 2 else jax.jit(self.unsplit.trace)
            found, cache = run(self.params, self.tokens[:, chunk * CHUNK : (chunk + 1) * CHUNK], cache, here)
            traces.append({name: _of_tokens(name, np.asarray(value), here) for name, value in found.items()})
        result = {name: np.concatenate([t[name] for t in traces], axis=1) for name in traces[0]}
        result |= {"kda_state": np.asarray(cache.kda_state), "conv_tail": np.asarray(cache.conv_tail)}
        last = np.take_along_axis(result["logits"], (LENGTHS - 1)[:, None, None], axis=1)[:, 0]
        result["greedy"] = np.argmax(last, axis=-1).astype(np.int32)
        after, cache = jax.jit(self.decoder.decode)(self.params, result["greedy"], cache)
        result["decoded"] = np.asarray(after)
        result["greedy_after"] = np.argmax(after, axis=-1)
        packed = jax.jit(self.decoder.logits)(self.params, self.packed, None, self.segments)
        result["packed"] = np.where(self.segments[..., None] >= 0, np.asarray(packed), 0)
        return result


def _segments(rng: np.random.Generator, length: int) -> np.ndarray:
    """Ids of packed sequences of random lengths, with padding behind; one begins at 128, where a device's tokens may."""
    cuts = sorted({0, 128, *rng.integers(1, length, 3).tolist()})
    ids = np.searchsorted(cuts, np.arange(length), side="right") - 1
    return np.where(np.arange(length) < length - int(rng.integers(0, 40)), ids, -1).astype(np.int32)


def _of_tokens(name: str, value: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[B, T, ...], 0 at padding; layers, which come first in most of a trace, come behind."""
    value = value if name in ("logits", "final_hidden") else np.moveaxis(value, 0, 2)
    valid = np.arange(CHUNK) < lengths[:, None]
    return np.where(valid.reshape(*valid.shape, *(1,) * (value.ndim - 2)), value, 0)


EXACT = ("selected", "experts", "greedy", "greedy_after")
"""What is compared bit for bit; the rest by its largest difference."""


@lru_cache
def alone(family: str) -> Sequences:
    """A golden family on one device, in float32."""
    model = golden_data.model(family)
    return Sequences(model.decoder, model.decoder, model.params)


def allowed(config: KimiConfig, mesh: Mapping[str, int]) -> bool:
    """Whether heads and experts can be spread so."""
    tensor, experts = mesh.get("tensor", 1), mesh.get("tensor", 1) * mesh.get("expert", 1)
    heads = config.kda.num_heads, config.num_attention_heads
    return all(count % tensor == 0 for count in heads) and config.moe.num_experts % experts == 0


def differences(family: str, mesh: Mapping[str, int]) -> dict[str, float]:
    """How far a golden family on a mesh is from the same on one device, by quantity; for sets, entries that differ."""
    reference = alone(family)
    config, devices = reference.decoder.config, make_mesh(mesh)
    split, unsplit = (MeshDecoder(config, devices, split_from=tokens) for tokens in (1, 2**20))
    found = Sequences(split, unsplit, reference.params).found
    result = {}
    for name, value in found.items():
        want = reference.found[name]
        assert value.shape == want.shape
        result[name] = float(np.sum(value != want) if name in EXACT else np.max(np.abs(value - want)))
    return result
