"""The choice of tokens against the distribution that its definition gives, computed in float64."""

import functools
import itertools
import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax import SamplingParams
from kimi_jax.generate.sampler import Sampler, _noise, kept

VOCABULARY = 160
DRAWS = 8000
PROMPT = np.array([0, 1, 2, 3, 17])
ANSWER = np.array([2, 5, 8])


def ranking(scores: np.ndarray) -> np.ndarray:
    return np.lexsort((np.arange(scores.size), -scores))


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def filtered(p: np.ndarray, params: SamplingParams) -> np.ndarray:
    """What top_k, top_p and min_p leave of a distribution, one after the other, by their definitions."""
    order = ranking(p)
    if params.top_k is not None:
        p = np.where(np.isin(np.arange(p.size), order[: params.top_k]), p, 0)
        p = p / p.sum()
    if params.top_p < 1:
        keep, total = [], 0.0
        for token in order:
            keep.append(token)
            total += p[token]
            if total >= params.top_p:
                break
        p = np.where(np.isin(np.arange(p.size), keep), p, 0)
        p = p / p.sum()
    p = np.where(p >= params.min_p * p.max(), p, 0)
    return p / p.sum()


def exact(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution of the next token after PROMPT and ANSWER."""
    z = logits.astype(np.float64)
    for token, bias in params.logit_bias.items():
        z[token] += bias
    if params.allowed_token_ids is not None:
        z = np.where(np.isin(np.arange(z.size), params.allowed_token_ids), z, -np.inf)
    for token in np.union1d(PROMPT, ANSWER):
        z[token] = z[token] / params.repetition_penalty if z[token] > 0 else z[token] * params.repetition_penalty
    z[ANSWER] -= params.presence_penalty
    if params.temperature == 0:
        return np.eye(z.size)[ranking(z)[0]]
    return filtered(softmax(z / params.temperature), params)


@functools.cache
def logits() -> np.ndarray:
    """A few likely tokens and a long tail, with ties."""
    z = np.random.default_rng(5).normal(0, 1.3, VOCABULARY)
    z[:40] += np.linspace(4, 0, 40)
    return (np.round(z * 4) / 4).astype(np.float32)


choose = jax.jit(lambda sampler, logits, step: sampler.choose(jnp.broadcast_to(logits, (step.size, logits.size)), step))


def many(params: SamplingParams) -> Sampler:
    """The sampler of DRAWS equal rows, behind PROMPT and ANSWER; it has all parts, so that one program serves all."""
    everything = SamplingParams(logit_bias={0: 0.0}, presence_penalty=1.0)
    pair = Sampler.of([params, everything], [PROMPT, PROMPT], VOCABULARY)
    pair = replace(pair, in_answer=pair.in_answer.at[0, ANSWER].set(True))
    return jax.tree.map(lambda a: jnp.asarray(np.repeat(np.asarray(a)[:1], DRAWS, axis=0)), pair)


def draws(params: SamplingParams, z: np.ndarray | None = None) -> np.ndarray:
    """Draws with the seeds 0, 1, ..., all for the same logits."""
    keys = np.stack([np.zeros(DRAWS, np.uint32), np.arange(DRAWS, dtype=np.uint32)], axis=-1)
    sampler = replace(many(params), keys=jnp.asarray(keys))
    return np.asarray(choose(sampler, logits() if z is None else z, np.full(DRAWS, 3, np.int32)))


def check_frequencies(found: np.ndarray, p: np.ndarray) -> None:
    """Pearson's test at one in 10,000; tokens too rare for it are taken together."""
    counts = np.bincount(found, minlength=p.size)
    assert counts[p == 0].sum() == 0
    expected = p * found.size
    often = expected >= 8
    observed, expected = counts[often], expected[often]
    rest = found.size - expected.sum()
    if rest >= 1:
        observed, expected = np.append(observed, found.size - observed.sum()), np.append(expected, rest)
    statistic = ((observed - expected) ** 2 / expected).sum()
    degrees = expected.size - 1
    if degrees == 0:
        return
    # Wilson and Hilferty: the cube root of chi-square over its degrees is about normal.
    limit = degrees * (1 - 2 / (9 * degrees) + 3.72 * math.sqrt(2 / (9 * degrees))) ** 3
    assert statistic < limit, f"chi-square {statistic:.1f} with {degrees} degrees of freedom, at most {limit:.1f}"


FILTERS = [
    dict(itertools.chain(*pick))
    for pick in itertools.product(
        [(), (("top_k", 7),), (("top_k", 140),)],
        [(), (("top_p", 0.7),), (("top_p", 0.985),)],
        [(), (("min_p", 0.04),)],
    )
]
CHANGES = [
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 1.5},
    {"presence_penalty": -2.0},
    {"logit_bias": {0: -3.0, 150: 6.0}},
    {"allowed_token_ids": [1, 2, 5, 40, 159]},
    {"repetition_penalty": 1.4, "presence_penalty": 0.7, "logit_bias": {5: 2.5, 9: 1.0}},
    {
        "allowed_token_ids": list(range(0, 160, 2)),
        "logit_bias": {8: 2.0, 7: 9.0},
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.02,
    },
]


EVERY = {
    "top_k": 12,
    "top_p": 0.9,
    "min_p": 0.03,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.6,
    "logit_bias": {5: 1.5, 8: -0.5, 90: 3.0},
    "allowed_token_ids": [*range(0, 60), *range(61, 160, 3)],
}
COMBINATIONS = [
    {name: EVERY[name] for name in names}
    for count in range(len(EVERY) + 1)
    for names in itertools.combinations(EVERY, count)
]


def short(changes: dict) -> str:
    return "-".join(changes) or "nothing"


@pytest.mark.parametrize("changes", FILTERS, ids=str)
def test_frequencies_behind_every_combination_of_filters(changes: dict) -> None:
    params = SamplingParams(temperature=1.1, **changes)
    check_frequencies(draws(params), exact(logits(), params))


def test_frequencies_behind_every_combination_of_everything() -> None:
    assert len(COMBINATIONS) == 128
    for changes in COMBINATIONS:
        params = SamplingParams(temperature=0.8, **changes)
        check_frequencies(draws(params), exact(logits(), params))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_frequencies_at_every_temperature(temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    check_frequencies(draws(params), exact(logits(), params))


@pytest.mark.parametrize("changes", CHANGES, ids=short)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_frequencies_behind_bias_and_penalties(changes: dict, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, **changes)
    check_frequencies(draws(params), exact(logits(), params))


def test_draws_of_one_seed_are_independent_from_step_to_step() -> None:
    params = SamplingParams(temperature=1.0, seed=11)
    found = np.asarray(choose(many(params), logits(), np.arange(DRAWS, dtype=np.int32)))
    p = exact(logits(), params)
    check_frequencies(found, p)
    # Pairs of neighbours, by halves of the mass.
    likely = np.isin(found, ranking(p)[: np.searchsorted(np.cumsum(np.sort(p)[::-1]), 0.5)])
    share = likely.mean()
    together = (likely[1:] & likely[:-1]).mean()
    assert abs(together - share**2) < 4 * math.sqrt(share**2 * (1 - share**2) / DRAWS)


@dataclass
class Case:
    scaled: np.ndarray
    params: SamplingParams


def cases(rows: int, seed: int) -> list[Case]:
    """Distributions, flat and peaked, with ties, and filters that cut between two tokens and not at one."""
    rng = np.random.default_rng(seed)
    result = []
    for _ in range(rows):
        z = np.round(rng.normal(0, rng.choice([0.0, 0.3, 2.0, 6.0]), VOCABULARY) * 8) / 8
        z = z - z.max()
        top_k = None if rng.random() < 0.4 else int(rng.choice([1, 2, 5, 100, 127, 128, 129, 150, 159, 160, 400]))
        p = filtered(softmax(z), SamplingParams(top_k=top_k))
        sums = np.cumsum(p[ranking(p)])
        # Cuts in the middle of a token so likely that no rounding reaches its edge.
        count = int(rng.integers(1, np.count_nonzero(p > 1e-4) + 1))
        before = sums[count - 2] if count > 1 else 0.0
        top_p = 1.0 if rng.random() < 0.3 else float(min(1.0, (before + sums[count - 1]) / 2))
        values = np.unique(z)[::-1]
        min_p = 0.0
        if rng.random() < 0.5 and values.size > 1:
            cut = int(rng.integers(1, min(values.size, 12)))
            min_p = float(np.exp((values[cut - 1] + values[cut]) / 2))
        result.append(Case(z.astype(np.float32), SamplingParams(temperature=1, top_k=top_k, top_p=top_p, min_p=min_p)))
    return result


def kept_of(found: list[Case]) -> np.ndarray:
    arrays = Sampler.of([case.params for case in found], [PROMPT] * len(found), VOCABULARY)
    scaled = jnp.asarray(np.stack([case.scaled for case in found]))
    return np.asarray(jax.jit(kept)(scaled, arrays.top_k, arrays.top_p, arrays.min_p))


def test_filters_keep_exactly_what_their_definitions_do() -> None:
    found = cases(600, seed=1)
    masks = kept_of(found)
    for case, mask in zip(found, masks, strict=True):
        want = filtered(softmax(case.scaled.astype(np.float64)), case.params) > 0
        np.testing.assert_array_equal(mask, want, err_msg=str(case.params))


def test_row_ignores_its_neighbours_bit_for_bit() -> None:
    """Also neighbours that need filters which the row doesn't, or nothing to be drawn at all."""
    rng = np.random.default_rng(3)
    own = cases(8, seed=4)
    own_seeds = [replace(case.params, seed=int(rng.integers(2**62))) for case in own]
    others = {
        "greedy": SamplingParams(),
        "sampled": SamplingParams(temperature=1.0),
        "flat": SamplingParams(temperature=1e6, top_p=0.999),
        "wide": SamplingParams(temperature=3.0, top_k=150, top_p=0.99, min_p=0.001),
    }
    run = jax.jit(lambda sampler, logits, step: sampler.choose(logits, step))
    for number, params in enumerate(own_seeds):
        tokens = set()
        for (name, other), place in itertools.product(others.items(), (0, 3)):
            requests = [other] * 4
            requests[place] = params
            z = np.round(rng.normal(0, 3, (4, VOCABULARY)), 2).astype(np.float32)
            z[place] = own[number].scaled
            step = rng.integers(0, 1000, 4).astype(np.int32)
            step[place] = 5
            arrays = Sampler.of(requests, [PROMPT] * 4, VOCABULARY)
            tokens.add((int(run(arrays, z, step)[place]), name)[0])
        assert len(tokens) == 1


def test_greedy_takes_the_lowest_of_equals() -> None:
    z = np.zeros(VOCABULARY, np.float32)
    z[[7, 30, 100]] = 2.5
    assert set(draws(SamplingParams(), z).tolist()) == {7}


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 1e-30},
        {"temperature": 1e-42},
        {"temperature": 1e-320},
        {"temperature": 1e6, "top_k": 1},
        {"temperature": 1.0, "top_p": 1e-30},
        {"temperature": 1.0, "top_p": 1e-320},
        {"temperature": 1.0, "min_p": 1.0},
        {"temperature": 1.0, "allowed_token_ids": [33]},
        {"temperature": 1.0, "logit_bias": {33: 1e6}},
        {"temperature": 1e-6, "logit_bias": {33: 1e6, 34: -1e6}, "repetition_penalty": 1e6, "presence_penalty": 1e6},
    ],
    ids=str,
)
def test_extremes_leave_the_most_probable_token(changes: dict) -> None:
    z = np.asarray(logits()).copy()
    z[33] = z.max() + 0.5
    assert set(draws(SamplingParams(**changes), z).tolist()) == {33}


def test_noise_reaches_as_far_as_the_vocabulary_is_large() -> None:
    """The largest of n Gumbel variables is below log(n) - 2 once in 1,600 times, and above log(n) + 7 as often."""
    count = 2**24
    noise = np.asarray(_noise(jnp.array([0, 1], jnp.uint32), jnp.int32(0), count))
    assert math.log(count) - 2 < noise.max() < math.log(count) + 7
    # Between the steps of a float32 just below 1 there would be no value above 15.95.
    assert np.count_nonzero(noise > 15.0) == np.unique(noise[noise > 15.0]).size


def test_token_out_of_vocabulary() -> None:
    for changes in ({"logit_bias": {160: 1.0}}, {"allowed_token_ids": [2, 160]}):
        with pytest.raises(ValueError, match=r"holds 160; legal ids are 0 to vocab_size-1=159"):
            Sampler.of([SamplingParams(**changes)], [PROMPT], VOCABULARY)


def test_float64_scores_stay_float64() -> None:
    with jax.enable_x64():
        z = np.zeros((1, VOCABULARY))
        z[0, 3], z[0, 4] = 1.0, 1.0 + 1e-12
        arrays = Sampler.of([SamplingParams(repetition_penalty=1.5)], [np.array([100])], VOCABULARY)
        assert arrays.adjusted(jnp.asarray(z)).dtype == jnp.float64
        assert int(arrays.choose(jnp.asarray(z), jnp.zeros(1, jnp.int32))[0]) == 4
