"""How good a kimi-tiny is: bits per byte of held-out passages, recall, tool calls, and the balance of its experts.

    python -m recipes.kimi_tiny.evaluate DIR MODEL [--recalls 500] [--tools 200] [--kv-cache fp8] [--index-cache mxfp8]
        [--indexer two_stage] [--json FILE]

DIR is the work folder of the recipe, MODEL a checkpoint or "kimi-tiny". Passages are read without caches; their formats
matter to answers (`benchmarks.cache_quality` reads passages with caches).
"""

import argparse
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kimi_jax import Kimi, SamplingParams
from kimi_jax.model import Decoder
from kimi_jax.params import Params
from kimi_jax.text import Tokenizer
from kimi_jax.train import Batch, Example, evaluate_batch
from recipes.kimi_tiny.tasks import Tasks, load_tasks
from recipes.kimi_tiny.tokenizer import load_documents

RECALL_LENGTH = 8192
PASSAGE_ROWS, PASSAGE_LENGTH = 16, 2048
RECALL_ROWS = 4


def lower_bound(right: int, trials: int) -> float:
    """Lower end of the 95 % Wilson interval of a proportion."""
    z, p = 1.96, right / trials
    centre = p + z * z / (2 * trials)
    return (centre - z * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials))) / (1 + z * z / trials)


def one_a_row(examples: Sequence[Example], rows: int, length: int) -> Iterator[Batch]:
    """Batches with one example a row, the last one filled up with empty rows.

    Raises:
        ValueError: an example is longer than a row.
    """
    for first in range(0, len(examples), rows):
        tokens = np.zeros((rows, length), np.int32)
        segments = np.full((rows, length), -1, np.int32)
        learned = np.zeros((rows, length), bool)
        for row, example in enumerate(examples[first : first + rows]):
            size = len(example.tokens)
            if size > length:
                raise ValueError(f"an example has {size} tokens, a row {length}.")
            tokens[row, :size], segments[row, :size], learned[row, :size] = example.tokens, 0, example.learned
        yield Batch(tokens, segments, learned)


def passages(folder: Path) -> tuple[list[Example], np.ndarray, np.ndarray]:
    """(held-out passages, their bytes, the kind of book of each).

    As in `recipes.kimi_tiny.ngram`, a passage's first token isn't scored, nor its end mark.
    """
    path = folder / "corpus" / "heldout.npz"
    found = []
    for tokens in load_documents(path):
        learned = np.ones(len(tokens), bool)
        learned[-1] = False
        found.append(Example(tokens, learned))
    with np.load(path) as arrays:
        return found, arrays["num_bytes"], arrays["kinds"][arrays["book"]]


def text_quality(decoder: Decoder, params: Params, folder: Path, **options: Any) -> dict[str, Any]:
    """Bits per byte, in all and by kind of book, and the largest load of an expert over the mean, by layer."""
    examples, num_bytes, kinds = passages(folder)
    evaluate = evaluate_batch(decoder, **options)
    nats: list[float] = []
    load: np.ndarray | float = 0.0
    for batch in one_a_row(examples, PASSAGE_ROWS, PASSAGE_LENGTH):
        found = evaluate(params, batch)
        nats += np.asarray(found["nats"], np.float64).sum(axis=1).tolist()
        load = load + np.asarray(found["expert_load"], np.float64)
    bits = np.array(nats[: len(examples)]) / math.log(2)
    by_kind = {str(k): float(bits[kinds == k].sum() / num_bytes[kinds == k].sum()) for k in dict.fromkeys(kinds)}
    balance = np.max(load, axis=-1) / np.mean(load, axis=-1)
    return {
        "bits_per_byte": float(bits.sum() / num_bytes.sum()),
        "bits_per_byte_by_kind": by_kind,
        "expert_max_over_mean": [round(float(x), 3) for x in balance],
    }


def forced_recall(decoder: Decoder, params: Params, tasks: Tasks, count: int, length: int, **options: Any) -> dict:
    """Recalls whose whole answer is the likeliest at every token: what greedy generation would then write."""
    evaluate = evaluate_batch(decoder, **options)
    recalls = tasks.heldout_recalls(count, length)
    examples = []
    for recall in recalls:
        tokens = np.concatenate([recall.prompt, recall.answer])
        examples.append(Example(tokens, np.arange(len(tokens)) >= len(recall.prompt)))
    right: list[bool] = []
    for batch in one_a_row(examples, RECALL_ROWS, length):
        found = evaluate(params, batch)
        right += np.all(np.asarray(found["correct"]) == np.asarray(found["counts"]), axis=1).tolist()
    hits = np.array(right[:count])
    return _proportion(hits) | {"length": length, "by_depth_tenth": _tenths(hits, [r.depth for r in recalls])}


def _proportion(hits: np.ndarray) -> dict[str, Any]:
    right = int(np.sum(hits))
    return {"right": right, "of": len(hits), "lower_95": round(lower_bound(right, len(hits)), 4)}


def _tenths(hits: np.ndarray, depths: Iterable[float]) -> list[float | None]:
    tenth = np.minimum((np.array(list(depths)) * 10).astype(int), 9)
    return [round(float(hits[tenth == i].mean()), 3) if np.any(tenth == i) else None for i in range(10)]


def chats(model: Kimi, tasks: Tasks, recalls: int, tools: int, others: int) -> dict[str, Any]:
    """What comes out of `Kimi.chat`, greedily: recalls, tool calls, sums and lists that training never saw."""
    greedy = SamplingParams(temperature=0, max_new_tokens=120)
    found: dict[str, Any] = {}
    if recalls:
        wanted = tasks.heldout_recalls(recalls, RECALL_LENGTH)
        hits = [w.value in (model.chat(w.messages, sampling=greedy).text or "") for w in wanted]
        depths = _tenths(np.array(hits), [w.depth for w in wanted])
        found["recall"] = _proportion(np.array(hits)) | {"length": RECALL_LENGTH, "by_depth_tenth": depths}
    if tools:
        hits = []
        for messages, declared, call in tasks.heldout_tool_prompts(tools):
            calls = model.chat(messages, tools=declared, sampling=greedy).tool_calls
            hits.append(len(calls) == 1 and calls[0].name == call["name"] and calls[0].arguments == call["arguments"])
        found["tool_calls"] = _proportion(np.array(hits))
    for name, prompts in (("arithmetic", tasks.heldout_arithmetic), ("lists", tasks.heldout_lists)):
        if others:
            hits = [model.chat(m, sampling=greedy).text == answer for m, answer in prompts(others)]
            found[name] = _proportion(np.array(hits))
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.kimi_tiny.evaluate", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("folder", type=Path, help="work folder, with the encoded corpus in it")
    parser.add_argument("model", help="checkpoint, or the name of an embedded model")
    parser.add_argument("--recalls", type=int, default=500)
    parser.add_argument("--tools", type=int, default=200)
    parser.add_argument("--others", type=int, default=100, help="sums, and lists")
    parser.add_argument("--kv-cache", choices=("bfloat16", "fp8"), help="of latents")
    parser.add_argument("--index-cache", choices=("bfloat16", "mxfp8"), help="of index keys")
    parser.add_argument("--indexer", choices=("exact", "two_stage"), default="exact")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = Kimi.from_pretrained(
        options.model, kv_cache=options.kv_cache, index_cache=options.index_cache, indexer=options.indexer
    )
    tasks = load_tasks(options.folder, Tokenizer.from_directory(options.folder / "tokenizer"))
    found = text_quality(Decoder(model.config), model.params, options.folder)
    print(json.dumps(found), flush=True)
    found |= chats(model, tasks, options.recalls, options.tools, options.others)
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
