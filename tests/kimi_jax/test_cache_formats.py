"""Caches in eight bits: their sizes, what is refused, and the laws that hold as for any cache.

kimi-k31-d128 has the widths of the public models (512 + 64, and index keys of 128) and selects 32 keys.
"""

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from kimi_jax import Cache, Kimi, KimiConfig, cli, startup
from kimi_jax.cache_format import CacheFormat, row_bytes
from kimi_jax.model import Decoder
from kimi_jax.modules.mla import MlaKeys
from kimi_jax.params import bind
from pallas_kernels.fp8_latent import Fp8Latent
from pallas_kernels.lightning_indexer import TwoStage
from pallas_kernels.mxfp8 import Mxfp8
from tests import golden_data

CONFIGS = Path(__file__).parents[2] / "configs"
FAMILY = "kimi-k31-d128"
SMALL: dict[str, Any] = {"kv_cache": "fp8", "index_cache": "mxfp8"}
PLAIN: dict[str, Any] = {"kv_cache": "bfloat16", "index_cache": "bfloat16"}
ROWS, TOKENS, TOP_K = 2, 48, 32


def config(name: str) -> KimiConfig:
    return KimiConfig.from_dict(json.loads((CONFIGS / f"{name}.json").read_text()))


@functools.cache
def prefill(**options: Any) -> Any:
    return jax.jit(Decoder(golden_data.model(FAMILY).config, **options).prefill, static_argnames="all_logits")


def prompts(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 248, (ROWS, TOKENS)).astype(np.int32)


def run(
    ids: np.ndarray, lengths: Any = None, cache: Cache | None = None, form: dict[str, Any] = SMALL, **options: Any
) -> tuple[np.ndarray, Cache]:
    """Logits of all tokens, and the cache; calls have one shape, shorter ones are padded."""
    model = golden_data.model(FAMILY)
    if cache is None:
        cache = Cache.allocate(model.config, ROWS, 2 * TOKENS, jnp.float32, **form)
    padded = np.zeros((ROWS, TOKENS), np.int32)
    padded[:, : ids.shape[1]] = ids
    lengths = np.full(ROWS, ids.shape[1], np.int32) if lengths is None else lengths
    logits, cache = prefill(**options)(model.params, padded, cache, lengths, all_logits=True)
    return np.asarray(logits)[:, : ids.shape[1]], cache


# Sizes


@pytest.mark.parametrize(
    ("name", "form", "latent", "index_key"),
    [
        ("kimi-k31-pro", CacheFormat(), 24 * 1152, 24 * 256),
        ("kimi-k31-pro", CacheFormat("bfloat16", "mxfp8"), 24 * 1152, 24 * 132),
        ("kimi-k31-pro", CacheFormat("fp8", "mxfp8"), 24 * 656, 24 * 132),
        ("kimi-k3", CacheFormat("fp8"), 24 * 656, 0),
        ("kimi-linear-48b-a3b", CacheFormat("fp8"), 7 * 656, 0),
    ],
)
def test_bytes_of_a_token_are_those_of_the_published_layouts(
    name: str, form: CacheFormat, latent: int, index_key: int
) -> None:
    """27.0 or 15.4 KiB of latents, 6.0 or 3.1 of index keys, 414 MiB of states and 14.6 of tails: and as allocated."""
    found = form.token_bytes(config(name))
    assert (found.latent, found.index_key, found.total) == (latent, index_key, latent + index_key)

    def make() -> Cache:
        return Cache.allocate(config(name), 3, 5, jnp.bfloat16, kv_cache=form.kv_cache, index_cache=form.index_cache)

    made = {
        field: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
        for field, tree in vars(jax.eval_shape(make)).items()
    }
    assert made["latent"] == 15 * latent
    assert made["index_key"] == 15 * index_key
    assert made["kda_state"] + made["conv_tail"] == 3 * row_bytes(config(name))


def test_a_million_tokens_of_the_largest_model() -> None:
    large = config("kimi-k31-pro")
    gib = [form.token_bytes(large).total * 2**20 / 2**30 for form in (CacheFormat(), CacheFormat("fp8", "mxfp8"))]
    assert gib == [27.0 + 6.0, 15.375 + 3.09375]
    assert row_bytes(large) == 414 * 2**20 + 69 * 3 * 3 * 12288 * 2
    line = startup.cache_in_words(large, "bfloat16", CacheFormat("fp8", "mxfp8"))
    assert line == "15.4 KiB a token of latents in fp8, 3.1 KiB of index keys in mxfp8, 428.6 MiB a row"
    assert "27.0 KiB a token of latents in bfloat16, 428.6" in startup.cache_in_words(config("kimi-k3"), "bfloat16")


def test_a_cache_says_how_it_keeps_keys() -> None:
    tiny = golden_data.model(FAMILY).config
    for form in (
        CacheFormat(),
        CacheFormat("bfloat16", "mxfp8"),
        CacheFormat("fp8", "bfloat16"),
        CacheFormat("fp8", "mxfp8"),
    ):
        cache = Cache.allocate(tiny, 1, 4, jnp.float32, kv_cache=form.kv_cache, index_cache=form.index_cache)
        assert cache.format == form
        assert cache.dtype == jnp.float32
        assert cache.capacity == 4


# What can't be


def test_formats_that_a_model_cannot_have_are_refused() -> None:
    for name, words in (
        ("kimi-linear-tiny", r"kv_cache='fp8' needs kv_lora_rank to be a multiple of 128.*kv_lora_rank=48"),
        ("kimi-k31-tiny", r"kv_cache='fp8' needs .*kv_lora_rank=32. Legal are 'bfloat16' and None"),
    ):
        with pytest.raises(ValueError, match=words):
            Cache.allocate(config(name), 1, 8, kv_cache="fp8")
    with pytest.raises(ValueError, match=r"index_cache='mxfp8': 'kimi_k3' has no indexer .*; it must be None"):
        Cache.allocate(config("kimi-k3"), 1, 8, index_cache="mxfp8")
    narrow = replace(config("kimi-k31-tiny"), dsa=replace(config("kimi-k31-tiny").dsa, head_dim=40))
    with pytest.raises(ValueError, match=r"index_head_dim to be a multiple of 32.*index_head_dim=40"):
        CacheFormat(index_cache="mxfp8").check(narrow)
    wrong: Any = "int8"
    with pytest.raises(
        (ValueError, jaxtyping.TypeCheckError), match=r"kv_cache='int8'; it must be 'bfloat16', 'fp8'|int8"
    ):
        CacheFormat(wrong)
    with pytest.raises(ValueError, match=r"indexer='two_stage': 'kimi_k3' has no indexer .* it must be 'exact'"):
        Decoder(config("kimi-k3"), indexer="two_stage")
    other: Any = "fast"
    with pytest.raises((ValueError, jaxtyping.TypeCheckError), match=r"indexer='fast'; it must be 'exact'|fast"):
        Decoder(config("kimi-k31-tiny"), indexer=other)


# Writing


def test_written_values_saturate_and_are_read_back() -> None:
    """Public bugs: an inverted scale, and 465 that becomes NaN because the cast doesn't saturate."""
    tiny = golden_data.model(FAMILY).config
    values = np.zeros((1, 4, 576), np.float32)
    for row, scale in enumerate((1, 0.5, 3.7)):
        values[0, row, :7] = scale * np.array([0, 1e-4, 1, 448, 465, 1000, -1000])
        values[0, row, 128:135] = scale * np.array([0, 1e-4, 1, 448, -448, 0.1, 3])
        values[0, row, 512:519] = values[0, row, :7]
    cache = Cache.allocate(tiny, 1, 8, jnp.float32, **SMALL)
    keys = MlaKeys(jnp.asarray(values), jnp.asarray(values[..., :128]))
    written = cache.write_keys(1, keys, jnp.array([[3, 0, 5, -1]]))
    found = written.read_keys(1)
    assert isinstance(found.latent, Fp8Latent)
    assert isinstance(found.index_key, Mxfp8)
    latent, index_key = (np.asarray(x.dequantize(jnp.float32)) for x in found)
    for row, place in enumerate((3, 0, 5)):
        want = values[0, row]
        for have, size in ((latent[0, place, :512], 512), (index_key[0, place], 128)):
            assert np.all(np.isfinite(have))
            # Normal e4m3 numbers are within 2^-4 of theirs; smaller ones within half a step, 2^-10 of the scale.
            step = np.repeat(np.abs(want[:size].reshape(-1, 32)).max(-1) / 448, 32) * 2
            assert np.all(np.abs(have - want[:size]) <= np.maximum(np.abs(want[:size]) * 2.0**-4, step * 2.0**-9 * 8))
        np.testing.assert_allclose(latent[0, place, 512:], want[512:], rtol=2**-8)
    np.testing.assert_array_equal(latent[0, [1, 2, 4, 6, 7]], 0)
    np.testing.assert_array_equal(np.asarray(written.read_keys(0).latent.packed), 0)
    again = written.write_keys(1, written.encode(keys), jnp.array([[3, 0, 5, -1]]))
    jax.tree.map(np.testing.assert_array_equal, again, written)


# Laws


@pytest.mark.parametrize("changed", [TOP_K - 2, TOP_K, TOKENS - 1])
def test_later_tokens_leave_earlier_logits_bit_identical(changed: int) -> None:
    """Below and above as many keys as are selected."""
    ids = prompts(0)
    other = ids.copy()
    other[:, changed:] = (other[:, changed:] + 1) % 248
    before, after = run(ids)[0], run(other)[0]
    np.testing.assert_array_equal(before[:, :changed], after[:, :changed])
    assert np.abs(before[:, changed:] - after[:, changed:]).max() > 0.01


def _numbers(stored: Any) -> np.ndarray:
    return np.asarray(stored.astype(jnp.float32) if isinstance(stored, jax.Array) else stored.dequantize(jnp.float32))


def close(found: np.ndarray, want: np.ndarray, caches: tuple[Cache, Cache], first: int = 0) -> None:
    """Equal up to the first token of a row whose key was rounded to another number; from there on near each other.

    Sums in another order may turn such a rounding, and what follows in its row isn't the same computation any more. `first`
    is the place of the first token.
    """
    turned = np.zeros((ROWS, 2 * TOKENS), bool)
    for name in ("latent", "index_key"):
        one, two = (_numbers(getattr(x, name)) for x in caches)
        turned |= np.any(~np.isclose(one, two, rtol=1e-3, atol=1e-6), axis=(0, 3))
    same = ~np.logical_or.accumulate(turned, axis=1)[:, first : first + found.shape[1]]
    distance = np.abs(found - want)
    assert np.max(distance[same], initial=0) < 1e-4
    assert np.mean(distance) < 1e-2
    assert np.max(distance) < 0.3


@pytest.mark.parametrize("split", [(3, 45), (31, 1, 1, 15), (40, 8)])
def test_prefill_in_pieces(split: tuple[int, ...]) -> None:
    """Every piece reads what the ones before it have written, and in eight bits even its own keys."""
    ids = prompts(1)
    whole, kept = run(ids)
    pieces, cache, first = [], None, 0
    for size in split:
        new, cache = run(ids[:, first : first + size], cache=cache)
        pieces.append(new)
        first += size
    assert cache is not None
    close(np.concatenate(pieces, axis=1), whole, (cache, kept))
    for name in ("latent", "index_key"):
        one, two = (np.asarray(getattr(x, name).dequantize(jnp.float32)) for x in (cache, kept))
        assert np.isclose(one, two, rtol=1e-4, atol=1e-6).mean() > 0.999


def test_continuations_share_a_prefix() -> None:
    """Two texts go on from one cache, whose bytes are read by both: as each does from its own beginning."""
    ids, other = prompts(2), prompts(3)
    other[:, :36] = ids[:, :36]
    _, shared = run(ids[:, :36])
    for text in (ids, other):
        found, after = run(text[:, 36:], cache=shared)
        want, whole = run(text)
        close(found, want[:, 36:], (after, whole), first=36)


def test_what_lies_in_unwritten_places_does_not_matter() -> None:
    """NaN latents, NaN scales, NaN elements."""
    ids, lengths = prompts(4), np.array([20, 48], np.int32)
    clean = Cache.allocate(golden_data.model(FAMILY).config, ROWS, 2 * TOKENS, jnp.float32, **SMALL)
    dirty = jax.tree.map(lambda x: x, clean)
    for name in ("latent", "index_key"):
        full = jax.tree.map(lambda x: jnp.full_like(x.view(jnp.uint8), 255).view(x.dtype), getattr(clean, name))
        object.__setattr__(dirty, name, full)
    want, found = run(ids, lengths, clean)[0], run(ids, lengths, dirty)[0]
    np.testing.assert_array_equal(found[0, :20], want[0, :20])
    np.testing.assert_array_equal(found[1], want[1])


def test_full_attention_without_an_indexer() -> None:
    """The same weights without their indexer, over FP8 latents: near those over float32, and causal."""
    model = golden_data.model(FAMILY)
    decoder = Decoder(replace(model.config, dsa=None, model_type="kimi_k3"))
    params = model.params | {"mla": {name: x for name, x in model.params["mla"].items() if name != "indexer"}}
    run = jax.jit(decoder.prefill, static_argnames="all_logits")
    ids, found = prompts(5), []
    for form in (None, "fp8"):
        cache = decoder.allocate(ROWS, TOKENS, jnp.float32, kv_cache=form)
        found.append(np.asarray(run(params, ids, cache, all_logits=True)[0]))
    p, q = (np.asarray(jax.nn.log_softmax(x), np.float64) for x in found)
    assert 0 < (np.exp(p) * (p - q)).sum(-1).mean() < 0.02


def test_bits_per_byte_are_those_of_bfloat16_caches() -> None:
    """Within 0.3 %, on the golden prompts, for random weights of the public widths; the vocabulary is bytes."""
    ids = golden_data.expected(FAMILY)["input_ids"][:ROWS, :TOKENS]
    bits = []
    for form in (PLAIN, SMALL):
        log_p = np.asarray(jax.nn.log_softmax(run(ids, form=form)[0][:, :-1]), np.float64)
        bits.append(-np.take_along_axis(log_p, ids[:, 1:, None], axis=-1).mean() / np.log(2))
    assert 0 < abs(bits[1] / bits[0] - 1) < 0.003


# Two stages


def test_two_stages_with_bounds_are_the_exact_indexer() -> None:
    ids = prompts(6)
    want, exact = run(ids, form=PLAIN)
    found, cache = run(ids, form=PLAIN, indexer=TwoStage(4, 0.25, "bound"))
    close(found, want, (cache, exact))
    decoder = Decoder(golden_data.model(FAMILY).config)
    assert decoder.with_indexer("two_stage").two_stage == TwoStage()
    assert decoder.two_stage is None


# The public face


def test_generation_with_other_caches_for_one_call() -> None:
    model = golden_data.model(FAMILY)
    before = len(model.programs.compiled)
    found = [model.generate([7, 8, 9], 3, **SMALL, indexer="two_stage", stop_token_ids=()).token_ids for _ in range(2)]
    assert len(found[0]) == 3
    assert found[0] == found[1]
    assert len(model.programs.compiled) == before + 3
    refused = (ValueError, jaxtyping.TypeCheckError)
    with pytest.raises(
        refused, match=r"kv_cache='q4'; it must be 'bfloat16', 'fp8' or None|Literal\['bfloat16', 'fp8'\]"
    ):
        model.generate([1], 8, kv_cache="q4")
    with pytest.raises(refused, match=r"indexer='fast'; it must be 'exact', 'two_stage' or a TwoStage|TwoStage"):
        model.stream([1], 8, indexer="fast")
    with pytest.raises(ValueError, match=r"kv_cache='fp8' needs kv_lora_rank"):
        golden_data.model("kimi-k31-tiny").generate([1, 2, 3], 4, kv_cache="fp8")


def test_loading_says_what_caches_take(capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {**SMALL, "indexer": TwoStage(16, 0.25, "mean")}
    Kimi.from_pretrained("kimi-tiny", dtype="float32", compilation_cache=False, **options)
    said = capsys.readouterr().err
    assert "0.4 KiB a token of latents in fp8, 0.1 KiB of index keys in mxfp8, 0.5 MiB a row" in said
    assert "an indexer in two stages, 25.0% of blocks of 16 keys by their mean, missing some keys" in said
    Kimi.from_pretrained("kimi-tiny", dtype="float32", compilation_cache=False, **SMALL | {"indexer": "two_stage"})
    assert "an indexer in two stages, 1.0% of keys by one vector a query, missing some" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--index-kept-fraction", "0.5"], "--index-kept-fraction has no effect without --indexer two_stage"),
        (["--indexer", "two_stage", "--index-block-size", "0"], "block_size=0; it must be an integer of at least 1"),
        (["--kv-cache", "int4"], "--kv-cache: invalid choice: 'int4'"),
    ],
)
def test_command_line_refuses_in_a_sentence(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = cli.main(["generate", "kimi-tiny", "Once", "--quiet", *options])
    except SystemExit as stop:
        status = stop.code
    assert status
    assert words in capsys.readouterr().err


def test_command_line_passes_caches_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def load(*_: Any, **options: Any) -> Kimi:
        given.update(options)
        raise ValueError("enough")

    monkeypatch.setattr(Kimi, "from_pretrained", load)
    line = "--kv-cache fp8 --index-cache mxfp8 --indexer two_stage --index-block-size 16 --index-coarse bound"
    assert cli.main(["generate", "kimi-tiny", "Once", *line.split()])
    assert (given["kv_cache"], given["index_cache"]) == ("fp8", "mxfp8")
    assert given["indexer"] == TwoStage(16, coarse="bound")


def test_keys_and_head_weights_come_out_of_one_product() -> None:
    """Products of the indexer: queries from their latent; keys and head weights from x, in one."""
    model = golden_data.model(FAMILY)
    weights = jax.tree.map(lambda x: x[0], model.params["mla"])
    indexer = bind(model.decoder.stacks["mla"], weights).indexer
    rng = np.random.default_rng(7)
    x = jnp.asarray(rng.standard_normal((1, 5, model.config.hidden_size)), jnp.float32)
    latent = jnp.asarray(rng.standard_normal((1, 5, model.config.mla.q_lora_rank or 0)), jnp.float32)
    products = [e for e in jax.make_jaxpr(indexer)(x, latent).eqns if e.primitive.name == "dot_general"]
    assert len(products) == 2
    _, keys, found = indexer(x, latent)
    heads, width = model.config.dsa.num_heads, model.config.dsa.head_dim
    want = np.asarray(x) @ np.asarray(weights["indexer"]["head_weights"]).T * (heads * width) ** -0.5
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)
    plain = np.asarray(x) @ np.asarray(weights["indexer"]["key"]).T
    plain = (plain - plain.mean(-1, keepdims=True)) / np.sqrt(plain.var(-1, keepdims=True) + 1e-5)
    norm = weights["indexer"]["key_norm"]
    np.testing.assert_allclose(keys, plain * norm["weight"] + norm["bias"], rtol=1e-4, atol=1e-4)
    for other in (latent, 2 * latent):
        np.testing.assert_array_equal(indexer(x, other)[1], keys)
