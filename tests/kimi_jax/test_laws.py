"""Laws that hold for any weights: causality, independence of rows, and splits of a sequence that don't matter."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.cache import Cache
from tests import golden_data

FAMILIES = ("kimi-linear-tiny", "kimi-k31-tiny")
TOKENS = 70
pytestmark = pytest.mark.parametrize("family", FAMILIES)


@functools.cache
def compiled_logits(family: str):
    return jax.jit(golden_data.model(family).decoder.logits)


@functools.cache
def compiled_prefill(family: str):
    return jax.jit(golden_data.model(family).decoder.prefill, static_argnames="all_logits")


def prompts(family: str, seed: int, rows: int = 2, tokens: int = TOKENS) -> np.ndarray:
    vocab = golden_data.model(family).config.vocab_size
    return np.random.default_rng(seed).integers(0, vocab, (rows, tokens), dtype=np.int32)


def logits(family: str, ids: np.ndarray, lengths: np.ndarray | None = None) -> np.ndarray:
    lengths = np.full(len(ids), ids.shape[1], np.int32) if lengths is None else lengths
    return np.asarray(compiled_logits(family)(golden_data.model(family).params, ids, lengths))


@pytest.mark.parametrize("changed", [1, 16, 40, 63, 64, 69])
def test_later_tokens_leave_earlier_logits_bit_identical(family: str, changed: int) -> None:
    ids = prompts(family, 0)
    other = ids.copy()
    other[:, changed:] = prompts(family, 1)[:, changed:]
    before, after = logits(family, ids), logits(family, other)
    np.testing.assert_array_equal(before[:, :changed], after[:, :changed])
    assert np.abs(before[:, changed:] - after[:, changed:]).max() > 0.1


def test_row_ignores_its_neighbours(family: str) -> None:
    ids = prompts(family, 0)
    other = ids.copy()
    other[1] = prompts(family, 1)[1]
    np.testing.assert_array_equal(logits(family, ids)[0], logits(family, other)[0])
    # Another place in the batch may move low bits: a matrix product treats its last rows apart.
    np.testing.assert_allclose(logits(family, ids)[0], logits(family, ids[::-1])[1], rtol=0, atol=1e-5)


def test_row_ignores_padding(family: str) -> None:
    ids, lengths = prompts(family, 0), np.array([41, 70], np.int32)
    other = ids.copy()
    other[0, 41:] = prompts(family, 1)[0, 41:]
    short, junk, full = logits(family, ids, lengths), logits(family, other, lengths), logits(family, ids)
    np.testing.assert_array_equal(short[0, :41], junk[0, :41])
    np.testing.assert_array_equal(short[1], junk[1])
    np.testing.assert_allclose(short[0, :41], full[0, :41], rtol=0, atol=1e-5)


@pytest.mark.parametrize("split", [(1, 69), (3, 67), (64, 6), (37, 33), (16, 5, 49), (69, 1), (37, 1, 1, 31)])
def test_prefill_in_pieces(family: str, split: tuple[int, ...]) -> None:
    """Any split equals one pass: later pieces see state, tails, latents and index keys of earlier ones."""
    model, ids = golden_data.model(family), prompts(family, 2)
    cache = Cache.allocate(model.config, 2, TOKENS, jnp.float32)
    pieces = []
    for begin, end in zip(np.cumsum([0, *split[:-1]]), np.cumsum(split), strict=True):
        # One compiled length for all pieces: the rest is padding.
        piece = np.zeros((2, TOKENS), np.int32)
        piece[:, : end - begin] = ids[:, begin:end]
        lengths = np.full(2, end - begin, np.int32)
        new, cache = compiled_prefill(family)(model.params, piece, cache, lengths, all_logits=True)
        pieces.append(np.asarray(new)[:, : end - begin])
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), logits(family, ids), rtol=0, atol=1e-4)
    assert cache.lengths.tolist() == [TOKENS, TOKENS]


def test_token_by_token(family: str) -> None:
    model, ids = golden_data.model(family), prompts(family, 3)
    decode = jax.jit(model.decoder.decode)
    cache = Cache.allocate(model.config, 2, TOKENS, jnp.float32)
    steps = []
    for t in range(TOKENS):
        new, cache = decode(model.params, ids[:, t], cache)
        steps.append(np.asarray(new))
    np.testing.assert_allclose(np.stack(steps, axis=1), logits(family, ids), rtol=0, atol=1e-4)


def test_rows_of_different_lengths(family: str) -> None:
    """Rows at different positions in one cache continue as they do alone; a row without new tokens stays as it is."""
    model, ids = golden_data.model(family), prompts(family, 4, rows=3)
    prefill = compiled_prefill(family)
    cache = Cache.allocate(model.config, 3, TOKENS, jnp.float32)
    _, cache = prefill(model.params, ids, cache, np.array([5, 40, 64], np.int32), all_logits=False)
    kept = np.asarray(cache.kda_state[:, 1]), np.asarray(cache.conv_tail[:, 1]), np.asarray(cache.latent[:, 1])
    rest = np.zeros_like(ids)
    rest[0, :20], rest[2, :6] = ids[0, 5:25], ids[2, 64:]
    new, cache = prefill(model.params, rest, cache, np.array([20, 0, 6], np.int32), all_logits=False)
    for before, after in zip(kept, (cache.kda_state, cache.conv_tail, cache.latent), strict=True):
        np.testing.assert_array_equal(before, np.asarray(after)[:, 1])
    assert cache.lengths.tolist() == [25, 40, 70]
    whole = logits(family, ids)
    np.testing.assert_allclose(np.asarray(new)[0], whole[0, 24], rtol=0, atol=1e-4)
    np.testing.assert_allclose(np.asarray(new)[2], whole[2, 69], rtol=0, atol=1e-4)


def test_cache_contents_of_earlier_requests_do_not_matter(family: str) -> None:
    """Unwritten places may hold anything, NaN too."""
    model, ids = golden_data.model(family), prompts(family, 5)
    clean = Cache.allocate(model.config, 2, 2 * TOKENS, jnp.float32)
    dirty = jax.tree.map(lambda a: a, clean)
    object.__setattr__(dirty, "latent", jnp.full_like(clean.latent, jnp.nan))
    if clean.index_key is not None:
        object.__setattr__(dirty, "index_key", jnp.full_like(clean.index_key, jnp.nan))
    lengths = np.array([33, 70], np.int32)
    prefill = compiled_prefill(family)
    want, _ = prefill(model.params, ids, clean, lengths, all_logits=False)
    found, _ = prefill(model.params, ids, dirty, lengths, all_logits=False)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(want))


def test_packed_sequences_equal_separate_ones(family: str) -> None:
    model, ids = golden_data.model(family), prompts(family, 6)
    sizes = (5, 1, 33, 24)
    segments = np.full((2, TOKENS), -1, np.int32)
    begins = np.cumsum([0, *sizes])
    for number, (begin, end) in enumerate(itertools.pairwise(begins)):
        segments[:, begin:end] = number
    packed = np.asarray(jax.jit(model.decoder.logits)(model.params, ids, None, segments))
    for begin, end in itertools.pairwise(begins):
        alone = np.zeros_like(ids)
        alone[:, : end - begin] = ids[:, begin:end]
        want = logits(family, alone, np.full(2, end - begin, np.int32))[:, : end - begin]
        np.testing.assert_allclose(packed[:, begin:end], want, rtol=0, atol=1e-4)


def test_batch_size_moves_low_bits_only(family: str) -> None:
    ids = prompts(family, 7, rows=4)
    four = logits(family, ids)
    for row in range(0, 4, 2):
        np.testing.assert_allclose(four[row : row + 2], logits(family, ids[row : row + 2]), rtol=0, atol=1e-5)
