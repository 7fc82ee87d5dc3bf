"""The lightning indexer against transformers' DeepSeek-V3.2 indexer, with its rotation set to the identity."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.deepseek_v32.configuration_deepseek_v32 import DeepseekV32Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer

from kimi_jax.config import KimiConfig
from kimi_jax.modules.mla import Indexer
from kimi_jax.params import bind
from pallas_kernels.lightning_indexer import lightning_indexer
from tests.golden_data import ROOT

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 130)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("length", LENGTHS)
def test_selected_sets(seed: int, length: int) -> None:
    config = KimiConfig.from_directory(ROOT / "kimi-k31-tiny")
    assert config.dsa is not None
    assert config.mla.q_lora_rank is not None
    reference = DeepseekV32Indexer(
        DeepseekV32Config(
            hidden_size=config.hidden_size,
            q_lora_rank=config.mla.q_lora_rank,
            index_n_heads=config.dsa.num_heads,
            index_head_dim=config.dsa.head_dim,
            index_topk=config.dsa.top_k,
            qk_rope_head_dim=8,
        ),
        layer_idx=0,
    )
    rng = np.random.default_rng(seed)
    width, heads = config.dsa.head_dim, config.dsa.num_heads
    weights = {
        "wq_b": rng.normal(size=(heads * width, config.mla.q_lora_rank)) * config.mla.q_lora_rank**-0.5,
        "wk": rng.normal(size=(width, config.hidden_size)) * config.hidden_size**-0.5,
        "weights_proj": rng.normal(size=(heads, config.hidden_size)) * config.hidden_size**-0.5,
        "k_norm.weight": 1 + 0.2 * rng.normal(size=width),
        "k_norm.bias": 0.2 * rng.normal(size=width),
    }
    reference.load_state_dict(
        {name if "." in name else f"{name}.weight": torch.from_numpy(value).float() for name, value in weights.items()}
    )
    reference.k_norm.eps = config.dsa.key_norm_eps
    x = rng.normal(size=(2, length, config.hidden_size)).astype(np.float32)
    latent = rng.normal(size=(2, length, config.mla.q_lora_rank)).astype(np.float32)
    identity = (torch.ones(2, length, 8), torch.zeros(2, length, 8))
    causal = torch.tril(torch.ones(1, length, length, dtype=torch.bool))
    chosen = reference(torch.from_numpy(x), torch.from_numpy(latent), identity, causal, None).numpy()

    indexer = bind(
        Indexer(config),
        {
            "query": jnp.asarray(weights["wq_b"], jnp.float32).reshape(heads, width, -1),
            "key": jnp.asarray(weights["wk"], jnp.float32),
            "head_weights": jnp.asarray(weights["weights_proj"], jnp.float32),
            "key_norm": {
                "weight": jnp.asarray(weights["k_norm.weight"], jnp.float32),
                "bias": jnp.asarray(weights["k_norm.bias"], jnp.float32),
            },
        },
    )
    q, k, w = indexer(jnp.asarray(x), jnp.asarray(latent))
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (2, length))
    found = np.asarray(lightning_indexer(q, k, w, top_k=config.dsa.top_k, q_positions=positions))
    for row in range(2):
        for t in range(length):
            # The reference's top-k also returns masked positions where fewer than k are visible.
            assert set(found[row, t]) - {-1} == {s for s in chosen[row, t] if s <= t}
