"""Bad input is refused before any work, in sentences that name the field, the value and what is legal."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kimi_jax import CheckpointError, ConfigError, Kimi
from kimi_jax.cache import Cache
from kimi_jax.checkpoint import CheckpointReader, write_safetensors
from tests import golden_data

FAMILY = "kimi-linear-tiny"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A copy of a golden checkpoint as one file, to be damaged."""
    shutil.copy(golden_data.ROOT / FAMILY / "config.json", tmp_path)
    return tmp_path


def rewrite(directory: Path, change, family: str = FAMILY) -> None:
    reader = CheckpointReader(golden_data.ROOT / family)
    tensors = {name: np.array(reader.read(name)) for name in reader.names()}
    change(tensors)
    write_safetensors(directory / "model.safetensors", tensors)


def refusal(directory: Path, change, family: str = FAMILY) -> str:
    rewrite(directory, change, family)
    with pytest.raises(CheckpointError) as caught:
        Kimi.from_pretrained(directory, dtype="float32", progress=False)
    return str(caught.value)


def test_all_mismatches_are_listed_at_once(directory: Path) -> None:
    def change(tensors: dict) -> None:
        del tensors["lm_head.weight"]
        del tensors["model.layers.3.self_attn.kv_b_proj.weight"]
        tensors["model.layers.99.mystery"] = np.zeros(3, np.float32)
        tensors["model.norm.weight"] = np.ones(63, ml_dtypes.bfloat16)
        tensors["model.embed_tokens.weight"] = np.zeros((320, 64), np.int32)

    message = refusal(directory, change)
    assert "5 problems" in message
    for part in (
        "missing: lm_head.weight [320, 64]",
        "missing: model.layers.3.self_attn.kv_b_proj.weight [224, 48]",
        "unexpected: model.layers.99.mystery [3]",
        "wrong shape: model.norm.weight is [63], the config makes it [64]",
        "wrong dtype: model.embed_tokens.weight is int32",
    ):
        assert part in message


@pytest.mark.parametrize("value", [np.nan])
def test_nan_weight(directory: Path, value: float) -> None:
    def change(tensors: dict) -> None:
        tensors["model.layers.2.self_attn.q_proj.weight"][3, 4] = value

    message = refusal(directory, change)
    assert "model.layers.2.self_attn.q_proj.weight" in message
    assert "NaN" in message


def test_nan_scale_of_packed_expert(tmp_path: Path) -> None:
    family = "kimi-k3-tiny-mxfp4"
    shutil.copy(golden_data.ROOT / family / "config.json", tmp_path)
    name = "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight_scale"

    def change(tensors: dict) -> None:
        tensors[name][0, 0] = 255

    message = refusal(tmp_path, change, family)
    assert name in message
    assert "255" in message


@pytest.mark.parametrize(("size", "last"), [(16, 1.0), (16, np.nan), (100, 0.0), (5, 0.0), (3, 0.0)])
def test_padded_decay_must_have_a_zero_tail_and_a_padded_length(directory: Path, size: int, last: float) -> None:
    name = "model.layers.0.self_attn.A_log"

    def change(tensors: dict) -> None:
        stored = np.zeros(size, np.float32)
        stored[: min(4, size)] = tensors[name].reshape(-1)[:size]
        stored[-1] = last
        tensors[name] = stored

    assert name in refusal(directory, change)


@pytest.mark.parametrize("padded", [4, 8, 16, 128])
def test_padded_decay_is_narrowed(directory: Path, padded: int) -> None:
    name = "model.layers.0.self_attn.A_log"

    def change(tensors: dict) -> None:
        heads = tensors[name].reshape(-1)
        tensors[name] = np.concatenate([heads, np.zeros(padded - heads.size, np.float32)])

    rewrite(directory, change)
    found = Kimi.from_pretrained(directory, dtype="bfloat16", progress=False).params["kda"]["A_log"]
    want = golden_data.model(FAMILY).params["kda"]["A_log"]
    np.testing.assert_array_equal(np.asarray(found), np.asarray(want))


def test_unknown_config_key(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_expert_per_token": 4}))
    with pytest.raises(ConfigError, match="num_expert_per_token"):
        Kimi.from_pretrained(directory)


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere"):
        Kimi.from_pretrained(tmp_path / "nowhere")


@pytest.mark.parametrize("dtype", ["float16", "int8", "nonsense", "float64"])
def test_illegal_dtype(dtype: str) -> None:
    with pytest.raises(ValueError, match=dtype):
        Kimi.from_pretrained(golden_data.ROOT / FAMILY, dtype=dtype, progress=False)


@pytest.mark.parametrize(
    ("prompt", "error", "words"),
    [
        ([], ValueError, "empty"),
        ([[]], ValueError, "empty"),
        ([[1, 2], []], ValueError, "prompt 1 is empty"),
        ([1.5, 2.0], TypeError, "float64"),
        ([True, False], TypeError, "bool"),
        ([320], ValueError, "token id 320; legal ids are 0 to vocab_size-1=319"),
        ([3, -1], ValueError, "token id -1"),
        ([1] * 5000, ValueError, "max_position_embeddings=4096"),
        (np.zeros((2, 2, 2), np.int32), ValueError, "dimensions"),
    ],
)
def test_illegal_prompts(prompt: object, error: type[Exception], words: str) -> None:
    model = golden_data.model(FAMILY)
    for call in (model.logits, model.generate):
        with pytest.raises(error, match=words):
            call(prompt)


@pytest.mark.parametrize("value", [0, -3, 1.5, True])
def test_illegal_max_new_tokens(value: object) -> None:
    with pytest.raises((TypeError, ValueError), match="max_new_tokens"):
        golden_data.model(FAMILY).generate([1, 2], max_new_tokens=value)


def test_sequence_longer_than_the_model_takes() -> None:
    with pytest.raises(ValueError, match=r"at most 96 new tokens fit"):
        golden_data.model(FAMILY).generate([1] * 4000, max_new_tokens=97)


def test_ragged_logits() -> None:
    with pytest.raises(ValueError, match="one length"):
        golden_data.model(FAMILY).logits([[1, 2], [3]])


def test_cache_capacity() -> None:
    config = golden_data.model(FAMILY).config
    with pytest.raises(ValueError, match="max_position_embeddings=4096"):
        Cache.allocate(config, 1, 4097, jnp.float32)
    with pytest.raises(ValueError, match="batch=0"):
        Cache.allocate(config, 0, 16, jnp.float32)


def test_prompt_too_long_for_its_cache() -> None:
    model = golden_data.model(FAMILY)
    cache = Cache.allocate(model.config, 1, 16, jnp.float32)
    with pytest.raises(ValueError, match=r"17 new tokens.*16"):
        model.decoder.prefill(model.params, jnp.zeros((1, 17), jnp.int32), cache)
