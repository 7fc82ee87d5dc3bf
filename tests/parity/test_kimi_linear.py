"""The whole Kimi-Linear model against transformers on a CPU, float64, random weights."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import KimiLinearConfig, KimiLinearForCausalLM

from kimi_jax import Kimi
from kimi_jax.cache import Cache

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 130)
TOLERANCE = 1e-9
BASE = json.loads((Path(__file__).parents[2] / "configs" / "kimi-linear-tiny.json").read_text())
PATTERNS = {
    0: {"kda_layers": [1, 2, 3, 5], "full_attn_layers": [4, 6]},
    1: {"kda_layers": [2, 3, 5], "full_attn_layers": [1, 4]},
    2: {"kda_layers": [1, 3, 4, 5, 6], "full_attn_layers": [2, 7]},
}


def tiny_config(seed: int) -> dict:
    layers = PATTERNS[seed]
    return BASE | {
        "num_hidden_layers": len(layers["kda_layers"]) + len(layers["full_attn_layers"]),
        "linear_attn_config": BASE["linear_attn_config"] | layers,
        "first_k_dense_replace": 1 + seed % 2,
        "hidden_size": 48 + 16 * seed,
    }


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Weights large enough that every part of the model moves the logits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.randn(value.shape, generator=generator, dtype=value.dtype)
            if name.endswith("A_log"):
                value.copy_(noise)
            elif name.endswith(("dt_bias", "e_score_correction_bias")):
                value.copy_(0.3 * noise)
            elif "norm" in name:
                value.copy_(1 + 0.2 * noise)
            elif value.ndim > 1:
                value.copy_(noise * value.shape[-1] ** -0.5)


@pytest.fixture(scope="module", params=sorted(PATTERNS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A reference model and this project's, on the same files."""
    config = tiny_config(request.param)
    directory = tmp_path_factory.mktemp("kimi_linear")
    reference = KimiLinearForCausalLM(
        KimiLinearConfig(**{key: value for key, value in config.items() if key != "rope_scaling"})
    ).double()
    # The other implementations have no float64.
    reference.set_attn_implementation("eager")
    reference.set_experts_implementation("eager")
    randomise(reference, request.param)
    reference.eval().save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(config))
    jax.config.update("jax_enable_x64", True)
    try:
        yield reference, Kimi.from_pretrained(directory, dtype="float64", progress=False)
    finally:
        jax.config.update("jax_enable_x64", False)


@contextlib.contextmanager
def nothing_below_float64() -> Iterator[None]:
    """The reference rounds norms, gates and router scores to float32 by name: here that name means float64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def reference_logits(reference: KimiLinearForCausalLM, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad(), nothing_below_float64():
        return reference(torch.from_numpy(ids).long()).logits.numpy()


@pytest.mark.parametrize("length", LENGTHS)
def test_logits(pair, length: int) -> None:
    reference, model = pair
    ids = np.random.default_rng(length).integers(0, model.config.vocab_size, (2, length), dtype=np.int32)
    found = np.asarray(model.logits(ids))
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, reference_logits(reference, ids), rtol=0, atol=TOLERANCE)


def test_prefill_then_decode(pair) -> None:
    reference, model = pair
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 70), dtype=np.int32)
    cache = Cache.allocate(model.config, 2, 96, jnp.float64)
    first, cache = model.decoder.prefill(model.params, jnp.asarray(ids[:, :66]), cache, all_logits=True)
    pieces = [np.asarray(first)]
    for step in range(66, 70):
        logits, cache = model.decoder.decode(model.params, jnp.asarray(ids[:, step]), cache)
        pieces.append(np.asarray(logits)[:, None])
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), reference_logits(reference, ids), rtol=0, atol=TOLERANCE)


def test_greedy_tokens(pair) -> None:
    reference, model = pair
    ids = np.random.default_rng(1).integers(0, model.config.vocab_size, 33, dtype=np.int32)
    with nothing_below_float64():
        want = reference.generate(
            torch.from_numpy(ids[None]).long(), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    found = model.generate(ids, max_new_tokens=20, stop_token_ids=())
    assert found.token_ids == want[0, len(ids) :].tolist()
