"""Tiny checkpoints that can speak: a layer or two of each kind, random weights, and the golden vocabulary of 2,256 ids."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from kimi_jax import Kimi
from kimi_jax.checkpoint.random_weights import init_random
from kimi_jax.text import k2, xtml
from tests import golden_data

CONFIGS = Path(__file__).parents[3] / "configs"
RANKS = 2000
VOCABULARY = RANKS + 256
EOS, END = RANKS + 1, RANKS + 2
POSITIONS = 16384

_TOKENS = {"bos_token_id": RANKS, "eos_token_id": END, "pad_token_id": VOCABULARY - 1}


def config(family: str) -> dict[str, Any]:
    """The public config of a small model of a family: `kimi_linear` or `kimi_k3`."""
    if family == "kimi_linear":
        text = json.loads((CONFIGS / "kimi-linear-tiny.json").read_text())
        layers = {"full_attn_layers": [2], "kda_layers": [1]}
        return text | _TOKENS | _small(text, 2, layers) | {"model_max_length": POSITIONS}
    whole = json.loads((CONFIGS / "kimi-k3-tiny.json").read_text())
    text = whole["text_config"]
    layers = {"full_attn_layers": [2], "kda_layers": [1]}
    text |= _TOKENS | _small(text, 2, layers) | {"max_position_embeddings": POSITIONS}
    return whole | _TOKENS | {"text_config": text, "media_placeholder_token_id": RANKS + 21}


def _small(text: dict[str, Any], num_layers: int, layers: dict[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "num_hidden_layers": num_layers,
        "linear_attn_config": text["linear_attn_config"] | layers,
        # With the usual 0.02 so small a model hardly knows its own mind.
        "initializer_range": 0.2,
        "num_experts": 4,
        "num_experts_per_token": 2,
    }


def write_tokenizer(family: str, directory: Path) -> None:
    shutil.copy(golden_data.ROOT / "tokenizer-tiny" / "tiktoken.model", directory)
    format = k2 if family == "kimi_linear" else xtml
    entries = {
        str(token.id): {"content": token.name, "special": token.special} for token in format.control_tokens(RANKS)
    }
    (directory / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": entries}))


def write_checkpoint(family: str, directory: Path) -> Path:
    source = directory / "source"
    source.mkdir(parents=True)
    (source / "config.json").write_text(json.dumps(config(family)))
    write_tokenizer(family, source)
    return init_random(source, directory / family, seed=1, progress=False)


def slow_decay(model: Kimi) -> Kimi:
    """The same model with states that hardly fade, so that a wrong one would show."""
    kda = model.params["kda"]
    kda["A_log"] = jnp.full_like(kda["A_log"], -4.0)
    kda["dt_bias"] = jnp.full_like(kda["dt_bias"], -1.0)
    return model
