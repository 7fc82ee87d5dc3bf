"""What travels between devices in a compiled decode step: read off the program."""

import jax
import jax.numpy as jnp
import pytest

from kimi_jax.parallel import MeshDecoder
from kimi_jax.planning import Collective, collectives_of
from kimi_jax.sharding import make_mesh
from tests import golden_data

ROWS, CAPACITY = 4, 4096
MESH = {"context": 2, "expert": 2, "tensor": 2}


@pytest.fixture(scope="module")
def decode() -> tuple[MeshDecoder, tuple[Collective, ...]]:
    model = golden_data.model("kimi-k31-d128")
    decoder = MeshDecoder(model.config, make_mesh(MESH))
    cache = decoder.allocate(ROWS, CAPACITY, jnp.float32)
    run = jax.jit(decoder.decode, donate_argnums=2)
    compiled = run.lower(model.params, jnp.zeros(ROWS, jnp.int32), cache).compile()
    return decoder, collectives_of(compiled, decoder.mesh)


def total(collectives: tuple[Collective, ...], *axes: str) -> int:
    """Bytes of those that run over one of the axes; all arrays are float32, so bytes are those of the numbers sent."""
    return sum(one.total_bytes for one in collectives if set(axes) & set(one.axes))


def test_over_context_go_scores_and_partial_outputs(decode: tuple[MeshDecoder, tuple[Collective, ...]]) -> None:
    """For each row, head and sparse layer: top_k scores of each device, its output in the latent space, two of its LSE."""
    decoder, found = decode
    config, rows, heads = decoder.config, ROWS // MESH["expert"], decoder.config.num_attention_heads // MESH["tensor"]
    assert config.dsa is not None
    scores = MESH["context"] * config.dsa.top_k
    outputs = heads * (config.mla.kv_lora_rank + 2)
    assert total(found, "context") == 4 * rows * len(config.mla.layers) * (scores + outputs)


def test_nothing_as_large_as_weights_or_caches_moves(decode: tuple[MeshDecoder, tuple[Collective, ...]]) -> None:
    """The largest message is a few rows of activations."""
    decoder, found = decode
    assert max(one.bytes for one in found) <= 4 * ROWS * decoder.config.mla.kv_lora_rank * MESH["context"]
    layers = len(decoder.kinds)
    assert total(found, "tensor", "expert") <= 4 * layers * 8 * ROWS * decoder.config.hidden_size
    # A layer's expert weights alone are more than all messages of a step together.
    moe, width = decoder.config.moe, decoder.config.moe.latent_size or decoder.config.hidden_size
    assert total(found, "data", "context", "tensor", "expert") < 4 * 3 * moe.num_experts * moe.intermediate_size * width


def test_the_exchange_of_tokens_and_heads_is_all_there_is(decode: tuple[MeshDecoder, tuple[Collective, ...]]) -> None:
    """Two sums over heads and widths a layer; on a CPU tokens are gathered for their experts."""
    decoder, found = decode
    sums = [one for one in found if one.kind == "all-reduce" and one.axes == ("tensor",)]
    assert sum(one.executions for one in sums) == 2 * len(decoder.kinds) + 1  # and the embedding
    assert {one.kind for one in found} <= {"all-reduce", "all-gather", "reduce-scatter"}
