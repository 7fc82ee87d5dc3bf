"""Generation of a batch: every row is what it would be alone."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import jax
import numpy as np
import pytest

from kimi_jax import Generation, Kimi, SamplingParams
from kimi_jax.buckets import SMALLEST_CAPACITY, bucket, capacity
from kimi_jax.cache import Cache
from kimi_jax.generate import batch
from kimi_jax.generate.batch import STEPS
from kimi_jax.generate.sampler import Sampler
from tests.kimi_jax.generate import tiny
from tests.kimi_jax.generate.scripted import Actor

LENGTHS = (1, 3, 12, 64, 65)
NEW = 24
TOLERANCE = 1e-4


def prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, tiny.RANKS, length).tolist() for length in lengths]


def run(model: Kimi, rows: list[list[int]], **changes: object) -> list[Generation]:
    return model.generate(rows, NEW, top_logprobs=2, logprobs=True, stop_token_ids=(), **changes)


def same(found: Generation, want: Generation) -> None:
    """Equal tokens and log-probabilities, as far as the two first choices differ by more than rounding."""
    assert want.top_logprobs is not None
    assert want.logprobs is not None
    assert found.logprobs is not None
    for step, top in enumerate(want.top_logprobs):
        first, second = top.values()
        assert abs(found.logprobs[step] - want.logprobs[step]) < TOLERANCE
        if found.token_ids[step] != want.token_ids[step]:
            assert first - second < TOLERANCE
            return


@pytest.fixture(scope="module")
def alone(model: Kimi) -> list[Generation]:
    return [run(model, [prompt])[0] for prompt in prompts(LENGTHS)]


def batch_of_eight() -> list[list[int]]:
    rows = prompts(LENGTHS)
    return [*rows, rows[2], rows[0], rows[4]]


def test_rows_of_different_lengths_are_what_they_are_alone(model: Kimi, alone: list[Generation]) -> None:
    together = run(model, batch_of_eight())
    for found, want in zip(together, [*alone, alone[2], alone[0], alone[4]], strict=True):
        same(found, want)
    # Rows of one compiled shape that hold the same are the same, bit for bit.
    assert replace(together[5], timings=None) == replace(together[2], timings=None)
    assert replace(together[7], timings=None) == replace(together[4], timings=None)


def test_order_does_not_matter_bit_for_bit(model: Kimi) -> None:
    together, reversed_ = run(model, batch_of_eight()), run(model, batch_of_eight()[::-1])
    for one, other in zip(together, reversed_[::-1], strict=True):
        assert replace(one, timings=None) == replace(other, timings=None)


def test_long_prompts_are_run_in_pieces(model: Kimi, alone: list[Generation], monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside prompts that end in the first piece."""
    monkeypatch.setattr(batch, "PREFILL_TOKENS", 48)
    for found, want in zip(run(model, batch_of_eight()), [*alone, alone[2], alone[0], alone[4]], strict=True):
        same(found, want)


@pytest.mark.parametrize(("row", "copies"), [(2, 4), (4, 8)])
def test_copies_of_a_prompt_agree_and_their_number_moves_low_bits_only(
    model: Kimi, alone: list[Generation], row: int, copies: int
) -> None:
    rows = prompts(LENGTHS)
    found = run(model, [rows[row]] * copies + [rows[-1]] * (8 - copies))
    for one in found[:copies]:
        assert replace(one, timings=None) == replace(found[0], timings=None)
    same(found[0], alone[row])


def test_row_that_finishes_early_leaves_the_others_alone(model: Kimi) -> None:
    rows = batch_of_eight()
    want = run(model, rows)
    sampling = [SamplingParams(stop_token_ids=()) for _ in rows]
    # Row 1 by its limit, row 3 by a stop token.
    sampling[1] = SamplingParams(stop_token_ids=(), max_new_tokens=2)
    sampling[3] = SamplingParams(stop_token_ids=(want[3].token_ids[4],))
    sampling = [one if one.max_new_tokens else replace(one, max_new_tokens=NEW) for one in sampling]
    found = model.generate(rows, sampling=sampling, logprobs=True, top_logprobs=2)
    for row, (one, other) in enumerate(zip(found, want, strict=True)):
        if row not in (1, 3):
            assert replace(one, timings=None) == replace(other, timings=None)
    assert (found[1].token_ids, found[1].finish_reason, found[1].stopped_by) == (want[1].token_ids[:2], "length", None)
    stop = want[3].token_ids[4]
    count = want[3].token_ids.index(stop) + 1
    assert (found[3].token_ids, found[3].finish_reason, found[3].stopped_by) == (
        want[3].token_ids[:count],
        "stop",
        stop,
    )
    assert found[3].logprobs == want[3].logprobs[:count] if want[3].logprobs else False


def test_finished_row_keeps_its_state_bit_for_bit(model: Kimi) -> None:
    """Decoding goes on in the rows beside it, in the programs that generation uses."""
    rows = prompts((12,) * 8)
    runner = model._runner
    tokens = np.zeros((8, bucket(max(LENGTHS))), np.int32)
    tokens[:, :12] = rows
    cache = Cache.allocate(model.config, 8, SMALLEST_CAPACITY, np.float32)
    logits, cache = runner.prefill(model.params, tokens, cache, np.full(8, 12, np.int32), what="prefill")
    sampler = Sampler.of([SamplingParams()] * 8, [np.array(row) for row in rows], tiny.VOCABULARY)
    stop_ids = np.full((8, 8), -1, np.int32)
    limits = np.array([1, *[40] * 7], np.int32)
    progress, _ = runner.begin(logits, limits, stop_ids, sampler, what="begin", top_logprobs=20)
    before = jax.tree.map(np.array, cache)
    halt = np.arange(8) == 2
    cache, progress, emitted = runner.advance(
        model.params, cache, progress, halt, np.int32(5), what="advance", size=STEPS, top_logprobs=20
    )
    for name in ("kda_state", "conv_tail", "latent"):
        old, new = np.asarray(getattr(before, name)), np.asarray(getattr(cache, name))
        np.testing.assert_array_equal(old[:, [0, 2]], new[:, [0, 2]])
        for row in (1, 3, 7):
            assert (old[:, row] != new[:, row]).any()
    assert cache.lengths.tolist() == [12, 17, 12, *[17] * 5]
    assert (np.asarray(emitted.tokens) >= 0).sum(axis=1).tolist() == [0, 5, 0, *[5] * 5]


def test_logprobs_are_those_of_the_model_itself(model: Kimi) -> None:
    """Whatever the sampling does to them: the same as a pass over the whole sequence gives."""
    prompt = prompts((12,))[0]
    found = model.generate(
        prompt, NEW, temperature=2.0, top_k=50, seed=3, logprobs=True, top_logprobs=5, stop_token_ids=()
    )
    logits = np.asarray(model.logits(prompt + found.token_ids), np.float64)[0, len(prompt) - 1 : -1]
    want = (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )
    np.testing.assert_allclose(found.logprobs, want[np.arange(NEW), found.token_ids], atol=TOLERANCE)
    for step, top in enumerate(found.top_logprobs):
        assert len(top) == 5
        np.testing.assert_allclose(list(top.values()), np.sort(want[step])[::-1][:5], atol=TOLERANCE)
        assert set(top) == set(np.argsort(-want[step], kind="stable")[:5].tolist())


# Seeds


@pytest.fixture
def steady(actor: Actor) -> Kimi:
    return actor.constant(np.random.default_rng(0).normal(0, 1, tiny.VOCABULARY).astype(np.float32))


def sampled(seed: int | None, **changes: object) -> SamplingParams:
    return SamplingParams(temperature=0.8, max_new_tokens=16, stop_token_ids=(), seed=seed, **changes)


def test_seeded_request_depends_on_its_logits_its_seed_and_its_step_only(steady: Kimi) -> None:
    prompt = [1, 2, 3]
    want = steady.generate(prompt, sampling=sampled(42)).token_ids
    assert steady.generate([7, 8, 9, 10], sampling=sampled(42)).token_ids == want
    neighbours = {
        "seeded": sampled(7),
        "unseeded": sampled(None),
        "greedy": SamplingParams(max_new_tokens=16, stop_token_ids=()),
        "filtered": sampled(9, top_p=0.9999, min_p=1e-9),
        "short": SamplingParams(max_new_tokens=1, temperature=1.0),
    }
    for neighbour in neighbours.values():
        for place in (0, 1, 3):
            sampling = [neighbour] * 4
            sampling[place] = sampled(42)
            found = steady.generate([[5]] * 4, sampling=sampling)
            assert found[place].token_ids == want
    two = steady.generate([[1], [2, 3, 4, 5]] * 2, sampling=[sampled(42), sampled(42), sampled(43), sampled(None)])
    assert two[0].token_ids == two[1].token_ids == want
    assert two[2].token_ids != want
    assert steady.generate(prompt, sampling=sampled(42)).token_ids == want


def test_unseeded_requests_differ(steady: Kimi) -> None:
    found = [steady.generate([1, 2, 3], sampling=sampled(None)).token_ids for _ in range(2)]
    found += [one.token_ids for one in steady.generate([[1]] * 4, sampling=sampled(None))]
    assert len({tuple(tokens) for tokens in found}) == len(found)


def test_penalties_and_bias_reach_the_device(steady: Kimi, actor: Actor) -> None:
    changes = {"presence_penalty": 1e6, "allowed_token_ids": range(5, 30), "logit_bias": {7: 1e5, 9: -1e5}}
    found = steady.generate([29, 29], 25, stop_token_ids=(), **changes)
    assert sorted(found.token_ids) == list(range(5, 30))
    assert (found.token_ids[0], found.token_ids[-1]) == (7, 9)
    # Token 29 is in the prompt: of its positive logit next to nothing is left.
    logits = np.zeros(tiny.VOCABULARY, np.float32)
    logits[[28, 29]] = 1.0, 5.0
    actor.constant(logits)
    [one, other] = [
        actor.model.generate([29, 3], 1, repetition_penalty=penalty, presence_penalty=0.1).token_ids
        for penalty in (1.0, 10.0)
    ]
    assert (one, other) == ([29], [28])


@pytest.mark.parametrize("changes", [{"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.05}], ids=str)
def test_same_seed_same_tokens_alone_and_in_a_batch_of_eight(model: Kimi, changes: dict) -> None:
    rows = batch_of_eight()
    sampling = [SamplingParams(temperature=1.0, seed=100 + i, **changes) for i in range(8)]
    together = model.generate(rows, NEW, sampling=sampling, stop_token_ids=(), top_logprobs=2, logprobs=True)
    for row in (0, 3):
        [found] = model.generate(
            [rows[row]], NEW, sampling=sampling[row], stop_token_ids=(), top_logprobs=2, logprobs=True
        )
        assert found.token_ids == together[row].token_ids


# Compilation


@contextmanager
def compilations(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Everything that XLA compiles in the block."""
    found: list[str] = []
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        caplog.clear()
        yield found
    found += [r.getMessage() for r in caplog.records if "Finished XLA compilation" in r.getMessage()]


def test_new_length_in_a_known_bucket_compiles_nothing(
    model: Kimi, actor: Actor, caplog: pytest.LogCaptureFixture
) -> None:
    model.generate(prompts((40,))[0], 30, logprobs=True, top_logprobs=1)
    known = len(model.programs.compiled)
    with compilations(caplog) as compiled:
        for length, new in ((1, 30), (17, 12), (63, 100), (64, 1)):
            sampling = {
                "temperature": 0.7,
                "top_p": 0.9,
                "top_k": 9,
                "min_p": 0.01,
                "seed": 1,
                "stop_token_ids": [3, 4],
            }
            for changes in ({}, sampling):
                model.generate(prompts((length,))[0], new, logprobs=True, top_logprobs=3, **changes)
                list(model.stream(prompts((length,))[0], new, logprobs=True, top_logprobs=2, **changes))
    assert compiled == []
    assert len(model.programs.compiled) == known
    with compilations(caplog) as compiled:
        actor.told([[1]] * 3, [[5]] * 3).generate([[1]] * 3, 1)
    # The counter counts.
    assert compiled


def test_new_length_of_a_long_prompt_compiles_nothing(actor: Actor, caplog: pytest.LogCaptureFixture) -> None:
    """Also where another length leaves another rest for the last piece."""
    model = actor.told([[1]], [[5]])
    model.generate([1] * 6144, 4, stop_token_ids=())
    with compilations(caplog) as compiled:
        for length in (4097, 4200, 5000, 6143):
            model.generate([1] * length, 4, stop_token_ids=())
    assert compiled == []


def test_buckets() -> None:
    sizes = [bucket(length) for length in range(1, 5000)]
    assert sorted(set(sizes)) == [64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144]
    for length, size in enumerate(sizes, start=1):
        assert length <= size <= max(64, 1.5 * length)
    assert capacity(1, 256) == capacity(256, 256) == 512
    assert capacity(257, 256) == 768


# Results


def test_timings(actor: Actor) -> None:
    model = actor.told([[1, 2]], [[5] * 100])
    found = model.generate([1, 2], 100)
    timings = model.generate([1, 2], 100).timings
    assert found.timings is not None
    assert timings is not None
    assert timings.compile_seconds == 0
    assert timings.prefill_seconds > 0
    assert timings.decode_seconds > 0
    assert timings.tokens_per_second == pytest.approx(99 / timings.decode_seconds)
    assert model.generate([1, 2], 1).timings.tokens_per_second is None


def test_one_prompt_one_result_and_a_list_a_list(actor: Actor) -> None:
    model = actor.told([[1], [1]], [[5], [5]])
    for one in ([1, 2], np.array([1, 2]), "a", (1, 2), range(1, 3), jax.numpy.array([1, 2])):
        assert isinstance(model.generate(one, 1), Generation)
    for several in ([[1, 2]], [np.array([1, 2])], ["a"], np.array([[1, 2]]), ([1, 2], "a"), iter([[1, 2], [3]])):
        found = model.generate(several, 1)
        assert isinstance(found, list)
        assert all(isinstance(item, Generation) for item in found)


def test_stops_on_all_of_the_models_stop_ids(actor: Actor) -> None:
    for family in ("kimi_linear", "kimi_k3"):
        actor.speaks(family)
        for stop in (tiny.EOS, tiny.END):
            found = actor.told([[1, 2]], [[7, 8, stop, 9]]).generate([1, 2], 20)
            assert (found.token_ids, found.finish_reason, found.stopped_by) == ([7, 8, stop], "stop", stop)
            found = actor.told([[1, 2]], [[7, 8, stop, 9, 10]]).generate([1, 2], 5, stop_token_ids=())
            assert (found.token_ids, found.finish_reason) == ([7, 8, stop, 9, 10], "length")
            found = actor.told([[1, 2]], [[7, 8, stop]]).generate([1, 2], 9, stop_token_ids=[8])
            assert (found.token_ids, found.stopped_by) == ([7, 8], 8)


def test_default_number_of_new_tokens_fits_the_model(actor: Actor) -> None:
    model = actor.told([[1]], [[5]])
    assert len(model.generate([1], stop_token_ids=()).token_ids) == 256
    room = 5
    found = model.generate([1] * (tiny.POSITIONS - room), stop_token_ids=())
    assert len(found.token_ids) == room
    with pytest.raises(ValueError, match=r"at most 5 new tokens fit"):
        model.generate([1] * (tiny.POSITIONS - room), 6)
    with pytest.raises(ValueError, match=r"at most 0 new tokens fit"):
        model.generate([1] * tiny.POSITIONS)


@pytest.mark.parametrize(
    ("prompt", "error", "words"),
    [
        (7.5, TypeError, "text or a sequence of token ids"),
        (None, TypeError, "text or a sequence of token ids"),
        ({"a": 1}, TypeError, "text or a sequence of token ids"),
        (b"abc", TypeError, "text or a sequence of token ids"),
        ("", ValueError, "prompt 0 is empty"),
        (["a", ""], ValueError, "prompt 1 is empty"),
        (["a", 3], ValueError, "prompt 1 has 0 dimensions"),
        ([3, "a"], TypeError, "prompt 0 has dtype"),
        ([[1, [2, 3]]], ValueError, "prompt 0 is ragged"),
        ("a\ud800b", ValueError, r"prompt 0: text has the lone surrogate U\+D800 at character 1"),
        ([[1], [2000_000]], ValueError, "prompt 1 holds token id 2000000"),
    ],
)
def test_illegal_prompts(actor: Actor, prompt: object, error: type[Exception], words: str) -> None:
    for call in (actor.model.generate, actor.model.stream):
        with pytest.raises(error, match=words):
            call(prompt)


def test_illegal_sampling(actor: Actor) -> None:
    model = actor.model
    with pytest.raises(ValueError, match="sampling has 1 entries for 2 prompts"):
        model.generate([[1], [2]], sampling=[SamplingParams()])
    with pytest.raises(TypeError, match="'temprature' isn't a sampling parameter"):
        model.stream([1], temprature=1.0)
    with pytest.raises(ValueError, match=r"stop_token_ids holds 2256; legal ids are 0 to vocab_size-1=2255"):
        model.generate([1], stop_token_ids=[2256])
    with pytest.raises(ValueError, match="max_new_tokens=a value of type int that is too long to be shown exceed"):
        model.generate([1], 10**5000)
    with pytest.raises(ValueError, match="logit_bias holds 2256"):
        model.stream([1], logit_bias={2256: 1.0})
