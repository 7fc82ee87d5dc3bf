"""A model of two layers for tests of training: KDA with a dense MLP, sparse MLA with experts, Attention Residuals."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from kimi_jax.config import KimiConfig
from kimi_jax.train import Batch, Example, pack

RECIPE = Path(__file__).parents[3] / "recipes" / "kimi_tiny" / "config.json"
VOCAB = 64


@cache
def config() -> KimiConfig:
    """kimi-tiny's own config, made smaller."""
    tree: dict[str, Any] = json.loads(RECIPE.read_text())
    text = tree["text_config"]
    text |= {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16}
    text |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "attn_res_block_size": 1}
    text |= {"num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 16, "routed_expert_hidden_size": 16}
    text["linear_attn_config"] |= {"kda_layers": [1], "full_attn_layers": [2], "num_heads": 2, "head_dim": 16}
    text["dsa_config"] |= {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 8, "dsa_layers": [2]}
    for part in (tree, text):
        part |= {"bos_token_id": 60, "eos_token_id": 61, "pad_token_id": 63}
    tree["media_placeholder_token_id"] = 62
    return KimiConfig.from_dict(tree)


def batch(seed: int = 0, rows: int = 4, length: int = 32) -> Batch:
    """Rows of packed examples in which every second token repeats the one before."""
    rng = np.random.default_rng(seed)

    def examples():
        while True:
            tokens = np.repeat(rng.integers(0, VOCAB, 8), 2)[: rng.integers(3, 17)]
            yield Example(tokens, rng.random(len(tokens)) < 0.8)

    return pack(examples(), rows, length)
