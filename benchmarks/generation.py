"""What generation costs around the model: time to a first token, decode rate, and the choice of a token.

    python -m benchmarks.generation [--output generation.json] [--config configs/kimi-linear-tiny.json]

The models are tiny and random, so that the figures are those of the loop, the host and the sampler. All are of warm
calls: the fastest of three times `--repeats` for the first token and for the prefill program alone that it waits for,
medians of `--repeats` for the rest.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax import Kimi, SamplingParams
from kimi_jax.buckets import bucket, capacity
from kimi_jax.cache import Cache
from kimi_jax.checkpoint.random_weights import init_random
from kimi_jax.generate.prompts import padded
from kimi_jax.generate.sampler import Sampler

CONFIG = Path(__file__).parent.parent / "configs" / "kimi-linear-tiny.json"
VOCABULARY = 163_840
NEW = 200
CHOICES = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "top_k top_p min_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.2},
}


def median(run: Callable[[], float], repeats: int) -> float:
    run()
    return statistics.median(run() for _ in range(repeats))


def generation(model: Kimi, rows: int, prompt: int, repeats: int) -> dict[str, float]:
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (rows, prompt))

    def first() -> float:
        began = time.perf_counter()
        stream = model.stream(ids, NEW, stop_token_ids=())
        next(stream)
        seconds = time.perf_counter() - began
        stream.close()
        return seconds

    prefill = jax.jit(model.decoder.prefill, donate_argnames="cache")
    places = capacity(prompt, NEW)
    tokens, lengths = padded(list(ids), bucket(prompt)), np.full(rows, prompt, np.int32)

    def alone() -> float:
        cache = jax.block_until_ready(Cache.allocate(model.config, rows, places, model.dtype))
        began = time.perf_counter()
        jax.block_until_ready(prefill(model.params, tokens, cache, lengths))
        return time.perf_counter() - began

    def streamed() -> float:
        result = [piece.result for piece in model.stream(ids, NEW, stop_token_ids=()) if piece.result is not None]
        return result[0].timings.tokens_per_second

    def whole() -> float:
        return model.generate(ids, NEW, stop_token_ids=())[0].timings.tokens_per_second

    first(), alone()
    # In turn, and the fastest of each: what else the machine does must not come between them.
    pairs = [(first(), alone()) for _ in range(3 * repeats)]
    return {
        "first_token_ms": 1000 * min(pair[0] for pair in pairs),
        "prefill_program_ms": 1000 * min(pair[1] for pair in pairs),
        "tokens_per_second": rows * median(whole, repeats),
        "streamed_tokens_per_second": rows * median(streamed, repeats),
    }


def choice(changes: dict, rows: int, repeats: int) -> float:
    """Milliseconds to choose a token in each row, with the vocabulary of the released models."""
    sampler = Sampler.of([SamplingParams(seed=0, **changes)] * rows, [np.arange(100)] * rows, VOCABULARY)
    logits = 4 * jax.random.normal(jax.random.key(0), (rows, VOCABULARY))
    run = jax.jit(lambda sampler, logits, step: sampler.choose(logits, step))
    step = jnp.zeros(rows, jnp.int32)

    def once() -> float:
        began = time.perf_counter()
        run(sampler, logits, step).block_until_ready()
        return time.perf_counter() - began

    return 1000 * median(once, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, default=CONFIG, help="of the model, which gets random weights")
    parser.add_argument("--output", type=Path, help="write the tables as JSON too")
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as directory:
        began = time.perf_counter()
        checkpoint = init_random(arguments.config, Path(directory) / "model", progress=False)
        model = Kimi.from_pretrained(checkpoint, dtype="float32", compilation_cache=False, progress=False)
    print(f"{arguments.config.stem} on {jax.devices()[0].device_kind}, jax {jax.__version__}, float32")
    rows = []
    for count, prompt in ((1, 40), (8, 40)):
        found = generation(model, count, prompt, arguments.repeats)
        rows.append({"rows": count, "prompt": prompt, **found})
        print(
            f"B={count} T={prompt:4}  first token {found['first_token_ms']:7.2f} ms (prefill program alone "
            f"{found['prefill_program_ms']:7.2f} ms: {found['first_token_ms'] / found['prefill_program_ms']:.2f} x)  decode "
            f"{found['tokens_per_second']:8.0f} tok/s  streamed {found['streamed_tokens_per_second']:8.0f} tok/s"
        )
    print(f"compiling: {len(model.programs.compiled)} programs in {model.programs.seconds:.1f} s")
    choices = []
    for count in (1, 8):
        for name, changes in CHOICES.items():
            milliseconds = choice(changes, count, arguments.repeats)
            choices.append({"rows": count, "choice": name, "ms": milliseconds})
            print(f"B={count} choice of a token of {VOCABULARY:,}, {name:18} {milliseconds:8.2f} ms")
    print(f"took {time.perf_counter() - began:.0f} s")
    if arguments.output:
        arguments.output.write_text(json.dumps({"generation": rows, "choice": choices}, indent=1))


if __name__ == "__main__":
    main()
