"""float32 on a CPU against the public references: every layer, every state, every choice."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.cache import Cache
from tests import golden_data

FLOAT_TOLERANCE = 1e-4
WEIGHT_TOLERANCE = 1e-5
pytestmark = pytest.mark.parametrize("family", golden_data.FAMILIES)


@functools.cache
def traced(family: str) -> tuple[dict[str, np.ndarray], Cache]:
    """The golden prompts through `Decoder.trace`, and the cache after them."""
    model = golden_data.model(family)
    ids = jnp.asarray(golden_data.expected(family)["input_ids"])
    cache = Cache.allocate(model.config, *ids.shape, jnp.float32)
    found, cache = jax.jit(model.decoder.trace)(model.params, ids, cache)
    return {name: np.asarray(value) for name, value in found.items()}, cache


@functools.cache
def continued(family: str) -> list[dict[str, np.ndarray]]:
    """The golden continuation, one token at a time, on the cache that the prompts left."""
    model, want = golden_data.model(family), golden_data.expected(family)
    ids = jnp.asarray(want["input_ids"])
    steps = want["gen_ids"].shape[1]
    cache = Cache.allocate(model.config, ids.shape[0], ids.shape[1] + steps, jnp.float32)
    trace = jax.jit(model.decoder.trace)
    found, cache = trace(model.params, ids, cache)
    results = [{"logits": np.asarray(found["logits"])[:, -1]}]
    for step in range(steps - 1):
        found, cache = trace(model.params, jnp.asarray(want["gen_ids"][:, step : step + 1]), cache)
        results.append({name: np.asarray(value) for name, value in found.items()})
    return results


def close(found: np.ndarray, want: np.ndarray, tolerance: float = FLOAT_TOLERANCE) -> None:
    np.testing.assert_allclose(found, want, rtol=0, atol=tolerance)


def test_logits(family: str) -> None:
    want = golden_data.expected(family)
    close(np.asarray(golden_data.model(family).logits(want["input_ids"])), want["logits"])


@pytest.mark.parametrize("name", ["logits", "final_hidden", "layer_out"])
def test_activations(family: str, name: str) -> None:
    close(traced(family)[0][name], golden_data.expected(family)[name])


def test_bank_rows(family: str) -> None:
    want = golden_data.expected(family)
    if "bank_rows" not in want:
        assert "bank" not in traced(family)[0]
        return
    close(traced(family)[0]["bank"], want["bank_rows"])


def test_kda_state_and_tail(family: str) -> None:
    want, (_, cache) = golden_data.expected(family), traced(family)
    close(np.asarray(cache.kda_state), want["kda_state"])
    tail = np.asarray(cache.conv_tail)
    close(tail.transpose(0, 3, 1, 2, 4), want["conv_tail"])


def test_experts(family: str) -> None:
    want, (found, _) = golden_data.expected(family), traced(family)
    order = np.argsort(found["experts"], axis=-1)
    np.testing.assert_array_equal(np.take_along_axis(found["experts"], order, -1), want["moe_ids"])
    close(np.take_along_axis(found["expert_weights"], order, -1), want["moe_weights"], WEIGHT_TOLERANCE)


def test_index_scores_and_selection(family: str) -> None:
    want, (found, _) = golden_data.expected(family), traced(family)
    if "dsa_sel" not in want:
        assert "selected" not in found
        return
    np.testing.assert_array_equal(found["selected"], want["dsa_sel"])
    close(found["index_scores"], want["dsa_scores"])


def test_greedy_continuation(family: str) -> None:
    want = golden_data.expected(family)
    results = golden_data.model(family).generate(list(want["input_ids"]), max_new_tokens=24, stop_token_ids=[])
    assert [result.token_ids for result in results] == want["gen_ids"].tolist()
    assert {result.finish_reason for result in results} == {"length"}


def test_continuation_step_by_step(family: str) -> None:
    want, steps = golden_data.expected(family), continued(family)
    logits = np.stack([steps[0]["logits"], *(step["logits"][:, 0] for step in steps[1:])], axis=1)
    close(logits, want["gen_logits"])
    chosen = np.stack([np.sort(step["experts"][:, :, 0], axis=-1) for step in steps[1:]], axis=2)
    np.testing.assert_array_equal(chosen, want["gen_moe_ids"])
    if "gen_dsa_sel" in want:
        selected = np.stack([step["selected"][:, :, 0] for step in steps[1:]], axis=2)
        np.testing.assert_array_equal(selected, want["gen_dsa_sel"])
