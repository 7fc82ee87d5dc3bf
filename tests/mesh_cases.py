"""What a decoder on a mesh must reproduce of the same decoder on one device."""

from collections.abc import Mapping
from functools import cached_property, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax import Cache, KimiConfig
from kimi_jax.model import Decoder
from kimi_jax.modules.moe import MixtureOfExperts, Routing
from kimi_jax.observe import Observed, Trace
from kimi_jax.parallel import MeshDecoder
from kimi_jax.rows import Rows
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


TIE = 2e-5
"""Of the largest score: the gap between the last one chosen and the next below which rounding may choose either."""


class _Scores(Trace):
    """A trace that keeps what experts are chosen by."""

    def moe(self, ffn: MixtureOfExperts, routing: Routing, rows: Rows) -> Observed:
        biased = routing.scores + ffn.correction_bias[...]
        return {**super().moe(ffn, routing, rows), "expert_scores": biased.reshape(*rows.positions.shape, -1)}


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
        self.gaps: dict[str, np.ndarray] = {}

    @cached_property
    def found(self) -> dict[str, np.ndarray]:
        """Everything that is compared; what padding holds is 0. On one device, `gaps` are found too."""
        cache: Cache = self.decoder.allocate(len(LENGTHS), CAPACITY, jnp.float32)
        observed = partial(self.decoder.run_trace, observer=_Scores())
        trace, traces = jax.jit(self.decoder.trace if isinstance(self.decoder, MeshDecoder) else observed), []
        for chunk in range(3):
            here = np.clip(LENGTHS - chunk * CHUNK, 0, CHUNK)
            run = trace if chunk < 2 or self.unsplit is self.decoder else jax.jit(self.unsplit.trace)
            found, cache = run(self.params, self.tokens[:, chunk * CHUNK : (chunk + 1) * CHUNK], cache, here)
            traces.append({name: _of_tokens(name, np.asarray(value), here) for name, value in found.items()})
        for name, scores in (("experts", "expert_scores"), ("selected", "index_scores")):
            if scores in traces[0]:
                self.gaps[name] = np.concatenate([_gaps(t.pop(scores), t[name].shape[-1]) for t in traces], axis=1)
        result = {name: np.concatenate([t[name] for t in traces], axis=1) for name in traces[0]}
        if "experts" in result:
            order = np.argsort(result["experts"], axis=-1, kind="stable")
            for name in ("experts", "expert_weights"):
                result[name] = np.take_along_axis(result[name], order, axis=-1)
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


def _gaps(scores: np.ndarray, chosen: int) -> np.ndarray:
    """[B, T, layers] between the last score chosen and the next, over the largest; infinite where all are chosen."""
    if scores.shape[-1] <= chosen:
        return np.full(scores.shape[:-1], np.inf)
    ranked = -np.sort(-np.nan_to_num(scores.astype(np.float64), nan=-np.inf), axis=-1)
    last, following = ranked[..., chosen - 1], ranked[..., chosen]
    largest = np.max(np.abs(np.where(np.isfinite(ranked), ranked, 0)), axis=-1)
    return np.where(np.isfinite(following), (last - following) / np.maximum(largest, 1e-30), np.inf)


def ties(reference: Sequences, found: Mapping[str, np.ndarray]) -> tuple[np.ndarray, int]:
    """How many tokens of each row come before its first near tie that was decided otherwise, and choices that no tie explains.

    What follows such a token in its row can't be compared; what comes before it can, for everything is causal.
    """
    config, first, wrong = reference.decoder.config, LENGTHS.copy(), 0
    layers = {"experts": config.moe.layers, "selected": config.mla.layers}
    for row in range(len(LENGTHS)):
        flips = [
            (int(token), layers[name][layer], reference.gaps[name][row, token, layer])
            for name in reference.gaps
            for token, layer in np.argwhere(np.any(found[name][row] != reference.found[name][row], axis=-1))
        ]
        if flips:
            token, _, gap = min(flips)
            first[row] = token
            wrong += gap >= TIE
    return first, wrong


EXACT = ("selected", "experts", "greedy", "greedy_after", "unexplained")
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
    """How far a golden family on a mesh is from the same on one device, by quantity; for sets, entries that differ.

    Rows are compared up to the first near tie that was decided otherwise ("tokens" of them in all); "unexplained" are rows
    whose choices differ without one.
    """
    reference = alone(family)
    config, devices = reference.decoder.config, make_mesh(mesh)
    split, unsplit = (MeshDecoder(config, devices, split_from=tokens) for tokens in (1, 2**20))
    found = Sequences(split, unsplit, reference.params).found
    counts, wrong = ties(reference, found)
    whole, before = counts == LENGTHS, np.arange(3 * CHUNK) < counts[:, None]
    result = {"unexplained": float(wrong), "tokens": float(counts.sum())}
    for name, value in found.items():
        want = reference.found[name]
        assert value.shape == want.shape
        if name != "packed":
            if name in ("kda_state", "conv_tail"):
                value, want = value[:, whole], want[:, whole]
            else:
                compared = before if value.shape[:2] == before.shape else whole
                value, want = value[compared], want[compared]
        result[name] = float(np.sum(value != want) if name in EXACT else np.max(np.abs(value - want), initial=0))
    return result
