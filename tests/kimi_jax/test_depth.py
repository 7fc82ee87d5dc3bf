"""Program size doesn't depend on depth, and a gradient step's memory grows by one activation a layer."""

import functools

import jax
import jax.numpy as jnp
import pytest

from kimi_jax.cache import Cache
from kimi_jax.config import KimiConfig
from kimi_jax.model import Decoder
from kimi_jax.params import ParamSpec, is_spec
from tests import golden_data

DEPTHS = (13, 93)
TOKENS = 128


def k31_of_depth(depth: int) -> KimiConfig:
    """The public K3.1 layer structure at tiny widths: full attention at every fourth layer and the last."""
    base = KimiConfig.from_directory(golden_data.ROOT / "kimi-k31-tiny").to_dict()
    text = base["text_config"]
    full = [layer for layer in range(1, depth + 1) if layer % 4 == 0 or layer == depth]
    text["num_hidden_layers"] = depth
    text["attn_res_block_size"] = 12
    text["linear_attn_config"] |= {
        "full_attn_layers": full,
        "kda_layers": [layer for layer in range(1, depth + 1) if layer not in full],
    }
    text["dsa_config"]["dsa_layers"] = full
    return KimiConfig.from_dict(base)


def shapes(decoder: Decoder):
    def shape(spec: ParamSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(spec.shape, jnp.float32)

    return jax.tree.map(shape, decoder.specs, is_leaf=is_spec)


@functools.cache
def lowered(depth: int, what: str) -> jax.stages.Lowered:
    decoder = Decoder(k31_of_depth(depth))
    ids = jax.ShapeDtypeStruct((1, TOKENS), jnp.int32)
    params = shapes(decoder)
    if what == "prefill":
        cache = jax.eval_shape(lambda: Cache.allocate(decoder.config, 1, TOKENS, jnp.float32))
        return jax.jit(decoder.prefill).lower(params, ids, cache)

    def loss(params, ids):
        logits = decoder.logits(params, ids)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), ids[:, 1:, None], -1).mean()

    return jax.jit(jax.grad(loss)).lower(params, ids)


@pytest.mark.parametrize("what", ["prefill", "gradient"])
def test_program_size_is_the_same_at_any_depth(what: str) -> None:
    sizes = {depth: lowered(depth, what).as_text().count("\n") for depth in DEPTHS}
    assert sizes[93] <= 1.02 * sizes[13]


@pytest.mark.slow
def test_gradient_memory_grows_by_one_activation_a_layer() -> None:
    temporaries = {depth: lowered(depth, "gradient").compile().memory_analysis().temp_size_in_bytes for depth in DEPTHS}
    width = k31_of_depth(13).hidden_size
    row = 4 * TOKENS * width
    layers, bank_rows = 93 - 13, 8 - 2
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes(Decoder(k31_of_depth(93))))) - sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes(Decoder(k31_of_depth(13))))
    )
    # One saved input a layer, the bank and its gradient; plus, on backends that don't write loops in place, the
    # gradients themselves once more.
    assert temporaries[93] - temporaries[13] <= 1.25 * (layers + 3 * bank_rows) * row + weights
