"""A model of Kimi K3.1's shape on one GPU and on two: a long prefill over `context`, decoding over `tensor`.

    python -m benchmarks.two_gpus [--tokens 131072] [--slots 64] [--json FILE]

5 B random parameters in bfloat16: 12 layers (9 KDA, 3 sparse attention with top-k 2048), width 2048, 32 heads, 128 experts at
a latent width of 1024. Times are medians of whole steps on the host's clock: a prefill takes seconds, and decoding steps are
issued ahead, 32 at a time. Needs two GPUs; results on one and on two are compared too. What a sublayer adds is a twentieth
of what `init_params` would draw: at random, a choice of experts that rounding tips over is amplified from layer to layer,
until two exact ways to run the same model have nothing in common.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from kimi_jax.config import KimiConfig
from kimi_jax.model import Decoder
from kimi_jax.parallel import MeshDecoder
from kimi_jax.params import Params, is_spec
from kimi_jax.planning.configs import find_config
from kimi_jax.train.init import init_params

LAYERS, FULL = 12, (3, 7, 11)
ADDED = 0.05
"""Of the output projections that `init_params` draws."""
STEPS = 32


def small_k31() -> KimiConfig:
    """Kimi K3.1 Pro with fewer and narrower layers, experts in bfloat16."""
    _, config = find_config("kimi-k31-pro")
    linear = tuple(layer for layer in range(LAYERS) if layer not in FULL)
    assert config.dsa is not None
    return replace(
        config,
        hidden_size=2048,
        num_hidden_layers=LAYERS,
        intermediate_size=8192,
        num_attention_heads=32,
        kda=replace(config.kda, layers=linear, num_heads=32),
        mla=replace(config.mla, layers=FULL, q_lora_rank=768),
        moe=replace(
            config.moe,
            layers=tuple(range(1, LAYERS)),
            num_experts=128,
            num_experts_per_token=8,
            intermediate_size=1024,
            latent_size=1024,
        ),
        attn_res_block_size=4,
        quantization=None,
        vision=None,
    )


def draw(decoder: Decoder) -> Params:
    """Random weights where the decoder wants them; the same for every decoder."""

    def make() -> Params:
        values = init_params(decoder)

        def narrow(spec: Any, value: jax.Array) -> jax.Array:
            if any(name in spec.names[0] for name in ("o_proj", "w2", ".down_proj", "expert_up_proj")):
                value = ADDED * value
            return value if spec.float32 else value.astype(jnp.bfloat16)

        return jax.tree.map(narrow, decoder.specs, values, is_leaf=is_spec)

    if not isinstance(decoder, MeshDecoder):
        return jax.jit(make)()
    shardings = jax.tree.map(lambda spec: NamedSharding(decoder.mesh, spec), decoder.param_specs)
    return jax.jit(make, out_shardings=shardings)()


def timed(run: Callable[[], Any], repeats: int) -> float:
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def prefill(decoder: Decoder, params: Params, tokens: jax.Array) -> tuple[float, jax.Array]:
    """Seconds of a prefill of one row, and its last logits."""
    step = jax.jit(decoder.prefill, donate_argnums=2)

    def run() -> jax.Array:
        return step(params, tokens, decoder.allocate(1, tokens.shape[1]))[0]

    logits = jax.block_until_ready(run())
    return timed(run, 3), logits


def decode(decoder: Decoder, params: Params, slots: int, context: int) -> tuple[float, jax.Array]:
    """Seconds of a decoding step, and the tokens that were decoded."""
    step = jax.jit(lambda params, tokens, cache: _greedy(decoder.decode(params, tokens, cache)), donate_argnums=2)
    prompt = jax.random.randint(jax.random.key(1), (slots, context), 0, decoder.config.vocab_size)
    _, cache = jax.jit(decoder.prefill, donate_argnums=2)(
        params, prompt, decoder.allocate(slots, context + 4 * STEPS + 1)
    )
    tokens = prompt[:, -1]
    said = []
    for _ in range(STEPS):  # the first ones compile
        tokens, cache = step(params, tokens, cache)
        said.append(tokens)
    jax.block_until_ready(tokens)

    def run() -> jax.Array:
        nonlocal tokens, cache
        for _ in range(STEPS):
            tokens, cache = step(params, tokens, cache)
        return tokens

    return timed(run, 3) / STEPS, jnp.stack(said, axis=1)


def _greedy(result: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
    return jnp.argmax(result[0], axis=-1).astype(jnp.int32), result[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--context", type=int, default=4096, help="tokens of each slot before decoding")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    config = small_k31()
    tokens = jax.random.randint(jax.random.key(0), (1, arguments.tokens), 0, config.vocab_size)
    rows: list[dict[str, Any]] = []
    answers: dict[str, list[jax.Array]] = {}
    phases: dict[str, Callable[..., tuple[float, jax.Array]]] = {
        "prefill": partial(prefill, tokens=tokens),
        "decode": partial(decode, slots=arguments.slots, context=arguments.context),
    }
    for phase, axis in (("prefill", "context"), ("decode", "tensor")):
        for count in (1, 2):
            mesh = jax.make_mesh((count,), (axis,), devices=jax.devices()[:count])
            decoder = Decoder(config) if count == 1 else MeshDecoder(config, mesh)
            params = draw(decoder)
            seconds, answer = phases[phase](decoder, params)
            answers.setdefault(phase, []).append(jax.device_get(answer))
            rows.append({"phase": phase, "devices": count, "axis": axis, "seconds": seconds})
            print(f"{phase:8} {axis}={count}: {1e3 * seconds:10.2f} ms", flush=True)
            del params
        one, two = answers[phase]
        speedup = rows[-2]["seconds"] / rows[-1]["seconds"]
        if phase == "prefill":
            same = float(jnp.linalg.norm(one - two) / jnp.linalg.norm(one))
            said = f"relative difference of the last logits {same:.1e}"
        else:
            same = float(jnp.mean(one[:, 0] == two[:, 0]))
            said = f"same first token in {100 * same:.0f} % of the slots"
        rows[-1] |= {"speedup": speedup, "agreement": same}
        print(f"{phase:8} speed-up {speedup:.2f}; {said}", flush=True)
    if arguments.json:
        device = jax.devices()[0].device_kind
        arguments.json.write_text(json.dumps({"jax": jax.__version__, "device": device, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
