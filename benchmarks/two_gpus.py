"""A model of Kimi K3.1's shape on one GPU and on two: a long prefill over `context`, decoding over `tensor`.

    python -m benchmarks.two_gpus [--shape wide deep] [--tokens 131072] [--slots 64 256 512] [--json FILE]

About 5 B random parameters in bfloat16, three KDA layers to one of sparse attention with top-k 2048: `wide` has 8 layers of
width 4096, 64 heads and 64 experts, `deep` 12 layers of width 2048, 32 heads and 128 experts. Times are medians of whole steps
on the host's clock: a prefill takes seconds, and decoding steps are issued ahead, 32 at a time, over caches filled with
numbers. Needs two GPUs; logits on one and on two are compared too, beside those of one GPU without kernels, which differ by
rounding alone. What a sublayer adds is a five-hundredth of what `init_params` would draw, some 5 to 10 % of the embedding: at
random, a choice of experts that rounding tips over is amplified from layer to layer, until two exact ways to run the same
model have nothing in common.
"""

import argparse
import functools
import json
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from kimi_jax.config import KimiConfig
from kimi_jax.model import Decoder
from kimi_jax.parallel import MeshDecoder
from kimi_jax.params import Params, is_spec
from kimi_jax.planning.configs import find_config
from kimi_jax.train.init import init_params
from pallas_kernels.dispatch import Implementation

SHAPES = {"wide": (8, 4096, 64, 64, 2048), "deep": (12, 2048, 32, 128, 1024)}
"""Layers, width, heads, experts and their latent width."""
ADDED = 0.002
"""Of the output projections that `init_params` draws."""
STEPS = 32


def small_k31(shape: str) -> KimiConfig:
    """Kimi K3.1 Pro with fewer and narrower layers, experts in bfloat16."""
    _, config = find_config("kimi-k31-pro")
    layers, width, heads, experts, latent = SHAPES[shape]
    assert config.dsa is not None
    return replace(
        config,
        hidden_size=width,
        num_hidden_layers=layers,
        intermediate_size=4 * width,
        num_attention_heads=heads,
        kda=replace(config.kda, layers=tuple(layer for layer in range(layers) if layer % 4 != 3), num_heads=heads),
        mla=replace(config.mla, layers=tuple(range(3, layers, 4)), q_lora_rank=768),
        moe=replace(
            config.moe,
            layers=tuple(range(1, layers)),
            num_experts=experts,
            num_experts_per_token=8,
            intermediate_size=1024,
            latent_size=latent,
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


@functools.cache
def model(shape: str, count: int, axis: str, implementation: Implementation | None) -> tuple[Decoder, Params]:
    """A decoder on some devices, and its parameters: each only once."""
    if count > 1:
        mesh = jax.make_mesh((count,), (axis,), devices=jax.devices()[:count])
        decoder: Decoder = MeshDecoder(small_k31(shape), mesh, implementation)
    else:
        decoder = Decoder(small_k31(shape), implementation)
    return decoder, draw(decoder)


class Part:
    """One row of the table: a phase on some devices, compiled when it is made and timed later.

    Args:
        shape: of `SHAPES`.
        phase: "prefill" or "decode".
        count: how many devices.
        size: the prompt's tokens of a prefill, the slots of decoding.
        context: tokens of each slot before decoding.
        implementation: of every operation.
    """

    def __init__(
        self, shape: str, phase: str, count: int, size: int, context: int, implementation: Implementation | None = None
    ) -> None:
        self.shape, self.phase, self.count, self.size, self.context = shape, phase, count, size, context
        self.implementation = implementation
        self.axis = "context" if phase == "prefill" else "tensor"
        self.decoder, self.params = model(shape, count, self.axis if count > 1 else "", implementation)
        tokens = (1, size) if phase == "prefill" else (size,)
        self.tokens = jax.random.randint(jax.random.key(0), tokens, 0, self.decoder.config.vocab_size)
        run = self.decoder.prefill if phase == "prefill" else self._greedy
        self.lowered = jax.jit(run, donate_argnums=2).lower(self.params, self.tokens, self._cache())

    def compile(self) -> None:
        """Compile the step; may run in a thread of its own."""
        self.step = self.lowered.compile()

    def _greedy(self, params: Params, tokens: jax.Array, cache: Any) -> tuple[jax.Array, jax.Array, Any]:
        logits, cache = self.decoder.decode(params, tokens, cache)
        return logits, jnp.argmax(logits, axis=-1).astype(jnp.int32), cache

    def _cache(self) -> Any:
        if self.phase == "prefill":
            return self.decoder.allocate(1, self.size)
        cache = self.decoder.allocate(self.size, self.context + 8 * STEPS)
        context = jnp.full(self.size, self.context, jnp.int32)
        shardings = jax.tree.map(lambda values: values.sharding, cache)
        fill = jax.jit(
            lambda cache: jax.tree.map(_wave, cache).advance(context), out_shardings=shardings, donate_argnums=0
        )
        return fill(cache)

    def time(self) -> tuple[float, jax.Array]:
        """Seconds of one step, and the first step's logits."""
        if self.phase == "prefill":
            logits = jax.device_get(self.step(self.params, self.tokens, self._cache())[0])
            return timed(lambda: self.step(self.params, self.tokens, self._cache())[0], 3), logits
        logits, tokens, cache = self.step(self.params, self.tokens, self._cache())

        def run() -> jax.Array:
            nonlocal tokens, cache
            for _ in range(STEPS):
                _, tokens, cache = self.step(self.params, tokens, cache)
            return tokens

        jax.block_until_ready(run())  # warm
        return timed(run, 5) / STEPS, jax.device_get(logits)


def _wave(values: jax.Array) -> jax.Array:
    """Numbers for a cache without a prefill: no two rows alike, the same however the cache is laid over devices."""
    if not jnp.issubdtype(values.dtype, jnp.inexact):
        return values
    index = jnp.arange(values.size, dtype=jnp.int32).reshape(values.shape)
    return (0.3 * jnp.sin((index * 40503 % 65521).astype(jnp.float32))).astype(values.dtype)


def measure(shape: str, tokens: int, slots: list[int], context: int) -> list[dict[str, Any]]:
    """The rows of one shape; everything compiles side by side before anything is timed."""
    cases = [("prefill", tokens)] * bool(tokens) + [("decode", number) for number in slots]
    parts, threads = [], []
    for phase, size in cases:
        plain = "xla" if (phase, size) == ("decode", min(slots)) else None
        for count, implementation in ((1, None), (2, None), *([(1, plain)] if plain else [])):
            parts.append(Part(shape, phase, count, size, context, implementation))
            threads.append(threading.Thread(target=parts[-1].compile))
            threads[-1].start()
    for thread in threads:
        thread.join()
    rows: list[dict[str, Any]] = []
    for part in parts:
        seconds, logits = part.time()
        logits = logits.astype(np.float64)
        row = {"shape": shape, "phase": part.phase, "size": part.size, "devices": part.count, "seconds": seconds}
        said = f"{shape} {part.phase:8}{part.size:7} {part.axis}={part.count}: {1e3 * seconds:9.2f} ms"
        if part.count == 1 and part.implementation is None:
            one, alone = logits, seconds
        else:
            row["implementation"] = part.implementation
            row["speedup"] = alone / seconds
            row["difference"] = float(np.linalg.norm(one - logits) / np.linalg.norm(one))
            row["same_choice"] = float(np.mean(one.argmax(-1) == logits.argmax(-1)))
            said += f" {'(no kernels) ' if part.implementation else ''} {row['speedup']:.2f} times as fast"
            said += f"; logits differ by {row['difference']:.1e} of their norm"
            said += f", same best token in {100 * row['same_choice']:.0f} % of the rows"
        rows.append(row)
        print(said, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--tokens", type=int, default=131072, help="of the prefill; 0: none")
    parser.add_argument("--slots", type=int, nargs="*", default=[64, 256, 512])
    parser.add_argument("--context", type=int, default=4096, help="tokens of each slot before decoding")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for shape in arguments.shape:
        rows += measure(shape, arguments.tokens, arguments.slots, arguments.context)
        model.cache_clear()
    if arguments.json:
        device = jax.devices()[0].device_kind
        arguments.json.write_text(json.dumps({"jax": jax.__version__, "device": device, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
