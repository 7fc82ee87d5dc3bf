"""Keys that transformers 5.24 writes beside the released ones: they say again what others say, or switch nothing on.

Source: `KimiLinearConfig` of transformers 5.24, which derives them from the released keys and saves both.
"""

from collections.abc import Mapping

from kimi_jax.config.attention import KdaConfig, MlaConfig
from kimi_jax.config.fields import Section, listed, shown
from kimi_jax.config.moe import MoeConfig

# Would change the model if they held anything else; the checkpoints have no such weights or were trained without.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "attention_bias": (False,),
    "attention_dropout": (0.0, 0),
    "output_router_logits": (False,),
    "pretraining_tp": (1,),
}


def check_redundant(
    text: Section,
    linear: Section | None,
    kda: KdaConfig | None,
    mla: MlaConfig,
    moe: MoeConfig,
    num_layers: int | None,
) -> None:
    """Records every redundant key that contradicts the key it repeats, and every neutral one that isn't neutral."""
    for key, legal in NEUTRAL.items():
        value = text.accept(key)
        if value is not None and not any(type(value) is type(one) and value == one for one in legal):
            text.problem(
                key, f"is {shown(value)}; it must be {legal[0]!r}: anything else would be another architecture."
            )
    for key, member, value in (
        ("linear_head_dim", "head_dim", kda.head_dim if kda else 0),
        ("linear_num_heads", "num_heads", kda.num_heads if kda else 0),
        ("linear_conv_kernel_dim", "short_conv_kernel_size", kda.conv_kernel_size if kda else 0),
    ):
        known = linear is not None and linear.has(member)
        _agree(text, key, linear.name(member) if linear else member, value, known=known)
    _agree(
        text,
        "qk_head_dim",
        f"{text.name('qk_nope_head_dim')} + {text.name('qk_rope_head_dim')}",
        mla.qk_head_dim,
        known=text.has("qk_nope_head_dim", "qk_rope_head_dim"),
    )
    mixers = {layer: "linear_attention" for layer in (kda.layers if kda else ())}
    mixers |= {layer: "full_attention" for layer in mla.layers}
    lists = f"{text.name('linear_attn_config')}.kda_layers and full_attn_layers"
    _same_layers(text, "layer_types", lists, mixers, num_layers)
    blocks = {layer: "sparse" if layer in moe.layers else "dense" for layer in range(num_layers or 0)}
    given = text.has("first_k_dense_replace", "moe_layer_freq")
    _same_layers(
        text,
        "mlp_layer_types",
        f"{text.name('first_k_dense_replace')} and {text.name('moe_layer_freq')}",
        blocks if given else {},
        num_layers,
    )


def _agree(text: Section, key: str, canonical: str, value: int, *, known: bool) -> None:
    found = text.accept(key)
    if found is not None and known and (type(found) is not int or found != value):
        text.problem(key, f"is {shown(found)}, but {canonical} is {value}; they must agree.")


def _same_layers(text: Section, key: str, canonical: str, kinds: Mapping[int, str], num_layers: int | None) -> None:
    found = text.accept(key)
    if found is None or num_layers is None or len(kinds) != num_layers:
        return
    if not isinstance(found, list | tuple) or len(found) != num_layers:
        text.problem(key, f"is {shown(found)}; it must be a list of num_hidden_layers = {num_layers} strings.")
        return
    differing = [layer for layer in range(num_layers) if found[layer] != kinds[layer]]
    if differing:
        first = differing[0]
        text.problem(
            key,
            f"contradicts {canonical} at layer {listed([layer + 1 for layer in differing])} (counted from 1): it says "
            f"{shown(found[first])} where they make layer {first + 1} {kinds[first]!r}.",
        )
