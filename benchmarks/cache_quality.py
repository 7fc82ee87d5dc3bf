"""What quantised caches and the indexer in two stages cost kimi-tiny: bits per byte, codes found again, keys missed.

    python -m benchmarks.cache_quality [--folder DIR] [--tokens 8000] [--texts 4] [--longest 32768] [--json FILE]

Activations are float32, so that the caches' formats are all that differs. Text is read on an empty cache, 512 tokens at a
time, from the passages of tests/kimi_jax/heldout_passages.json, or with the recipe's work folder from all held-out books.
16 codes are hidden in a text (see `kimi_jax.haystack`), which is read once; 16 questions go on from its cache. Recall of two
stages is that of the last 512 queries of a long text, against the exact selection, with the model's own keys. The golden
family kimi-k31-d128, whose weights are random, reads its own prompts and continuations.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kimi_jax import Cache, Kimi
from kimi_jax.cache_format import CacheFormat
from kimi_jax.embedded import MODELS
from kimi_jax.haystack import hide
from kimi_jax.model import Decoder, Indexing
from kimi_jax.observe import Observed, Observer
from pallas_kernels.lightning_indexer import TwoStage, two_stage_recall
from tests import golden_data

PASSAGES = Path(__file__).parent.parent / "tests" / "kimi_jax" / "heldout_passages.json"
CHUNK = 512
ANSWER = 32


@dataclass(frozen=True)
class Kind:
    """A way to keep keys and to select them."""

    name: str
    format: CacheFormat
    indexer: Indexing = "exact"


PLAIN = Kind("bfloat16", CacheFormat("bfloat16", "bfloat16"))
SMALL = Kind("fp8 + mxfp8", CacheFormat("fp8", "mxfp8"))
KINDS = (
    Kind("float32", CacheFormat()),
    PLAIN,
    Kind("fp8 latents", CacheFormat("fp8", "bfloat16")),
    Kind("mxfp8 index keys", CacheFormat("bfloat16", "mxfp8")),
    SMALL,
    Kind("fp8 + mxfp8, two stages", CacheFormat("fp8", "mxfp8"), TwoStage()),
)
STAGES = (
    *(TwoStage(1, kept, "linear") for kept in (0.02, 0.01, 0.005)),
    *(TwoStage(size, kept, "mean") for size in (8, 64) for kept in (0.75, 0.5, 0.25, 0.125)),
    TwoStage(32, 0.25, "bound"),
)


@cache
def tiny() -> Kimi:
    """The model in the package."""
    return Kimi.from_pretrained("kimi-tiny", dtype="float32", progress=False)


class Reader:
    """Reads rows on caches of one kind; compiled once for each number of rows and places."""

    def __init__(self, model: Kimi, kind: Kind):
        self._model, self._kind = model, kind
        self._decoder = Decoder(model.config, indexer=kind.indexer)
        self._prefill = jax.jit(self._decoder.prefill, static_argnames="all_logits", donate_argnames="cache")
        self._decode = jax.jit(self._decoder.decode, donate_argnames="cache")
        self._nats = jax.jit(partial(_nats, self._decoder), donate_argnames="cache")

    def allocate(self, rows: int, places: int) -> Cache:
        """An empty cache; `places` are rounded up to whole chunks."""
        format = self._kind.format
        places = -(-places // CHUNK) * CHUNK
        return self._decoder.allocate(
            rows, places, jnp.float32, kv_cache=format.kv_cache, index_cache=format.index_cache
        )

    def nats(self, rows: Sequence[Sequence[int]]) -> np.ndarray:
        """-log p of each row after its first token."""
        longest = max(map(len, rows))
        held = self.allocate(len(rows), longest)
        total = np.zeros(len(rows))
        for first, tokens, lengths in _chunks(rows):
            following = np.zeros_like(tokens)
            for index, row in enumerate(rows):
                after = row[first + 1 : first + 1 + CHUNK]
                following[index, : len(after)] = after
            wanted = np.clip([len(row) - 1 - first for row in rows], 0, CHUNK).astype(np.int32)
            nats, held = self._nats(self._model.params, tokens, following, wanted, held, lengths)
            total += np.asarray(nats, np.float64)
        return total

    def answers(self, text: Sequence[int], questions: Sequence[Sequence[int]]) -> list[list[int]]:
        """Greedy continuations of a text and each question, which share the cache of the text."""
        held = self.allocate(1, len(text) + max(map(len, questions)) + ANSWER)
        for _, tokens, lengths in _chunks([text]):
            _, held = self._prefill(self._model.params, tokens, cache=held, lengths=lengths)
        count = len(questions)
        held = jax.tree.map(lambda x: jnp.repeat(x, count, axis=0 if x.ndim == 1 else 1), held)
        tokens = np.zeros((count, -(-max(map(len, questions)) // 32) * 32), np.int32)
        for row, question in zip(tokens, questions, strict=True):
            row[: len(question)] = question
        logits, held = self._prefill(
            self._model.params, tokens, cache=held, lengths=np.array([*map(len, questions)], np.int32)
        )
        found = [np.argmax(logits, axis=-1).astype(np.int32)]
        for _ in range(ANSWER - 1):
            logits, held = self._decode(self._model.params, found[-1], cache=held)
            found.append(np.argmax(logits, axis=-1).astype(np.int32))
        return np.stack(found, axis=1).tolist()


def _nats(
    decoder: Decoder, params: Any, tokens: Array, following: Array, wanted: Array, cache: Cache, lengths: Array
) -> tuple[Array, Cache]:
    logits, cache = decoder.prefill(params, tokens, cache, lengths=lengths, all_logits=True)
    chosen = jnp.take_along_axis(logits, following[..., None], axis=-1)[..., 0]
    nats = jax.nn.logsumexp(logits, axis=-1) - chosen
    return jnp.sum(jnp.where(jnp.arange(tokens.shape[1]) < wanted[:, None], nats, 0), axis=1), cache


def _chunks(rows: Sequence[Sequence[int]]) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(first place, tokens, how many are valid in each row) of every chunk."""
    for first in range(0, max(map(len, rows)), CHUNK):
        tokens = np.zeros((len(rows), CHUNK), np.int32)
        for row, given in zip(tokens, rows, strict=True):
            part = given[first : first + CHUNK]
            row[: len(part)] = part
        yield first, tokens, np.clip([len(row) - first for row in rows], 0, CHUNK).astype(np.int32)


def bits_per_byte(reader: Reader, folder: Path | None = None, passages: int | None = None) -> float:
    """Of held-out passages, each on its own, after their first token."""
    if folder is None:
        texts = [entry["text"] for entry in json.loads(PASSAGES.read_text(encoding="utf-8"))][:passages]
        rows = [tiny().tokenizer.encode(text) for text in texts]
        num_bytes = sum(len(text.encode()) for text in texts)
    else:
        from recipes.kimi_tiny.evaluate import passages as heldout

        examples, sizes, _ = heldout(folder)
        rows = [example.tokens.tolist()[:-1] for example in examples]
        num_bytes = int(sizes.sum())
    total = 0.0
    for first in range(0, len(rows), 8):
        part = rows[first : first + 8]
        # The last batch has as many rows as the others, and so the same program.
        part += [rows[0][:2]] * (min(8, len(rows)) - len(part))
        total += reader.nats(part)[: len(rows[first : first + 8])].sum()
    return total / math.log(2) / num_bytes


def golden_bits(kind: Kind) -> float:
    """Bits a byte of kimi-k31-d128 on its prompts and continuations; its vocabulary is bytes."""
    want = golden_data.expected("kimi-k31-d128")
    rows = np.concatenate([want["input_ids"], want["gen_ids"]], axis=1).tolist()
    reader = Reader(golden_data.model("kimi-k31-d128"), kind)
    return reader.nats(rows).sum() / math.log(2) / sum(len(row) - 1 for row in rows)


def planted(reader: Reader, tokens: int, seed: int) -> list[bool]:
    """Which of the 16 codes in a text are found again."""
    model = tiny()
    haystack = hide(MODELS / "kimi-tiny", model.tokenizer, tokens, seed)
    asked = [model.chat_prompt([{"role": "user", "content": haystack.ask(secret)}]) for secret in haystack.secrets]
    shared = min(map(len, asked))
    shared = next((i for i in range(shared) if len({row[i] for row in asked}) > 1), shared)
    written = reader.answers(asked[0][:shared], [row[shared:] for row in asked])
    texts = [model.tokenizer.decode(ids) for ids in written]
    return [secret.code in text for secret, text in zip(haystack.secrets, texts, strict=True)]


class _IndexerInput(Observer):
    """What the indexer is given."""

    def mla(self, mixer: Any, queries: Any, keys: Any, rows: Any, selected: Any) -> Observed:
        return {"q": queries.index_q, "k": keys.index_key, "w": queries.index_w}


def long_text(folder: Path | None, tokens: int) -> list[int]:
    """So many tokens of text that training never had; less where there is no more."""
    if folder is None:
        text = (MODELS / "kimi-tiny" / "haystack.txt").read_text(encoding="utf-8")
        text += "".join(entry["text"] for entry in json.loads(PASSAGES.read_text(encoding="utf-8")))
        found = tiny().tokenizer.encode(text)
    else:
        from recipes.kimi_tiny.tokenizer import load_documents

        documents = load_documents(folder / "corpus" / "heldout.npz")
        found = [token for document in documents for token in document.tolist()]
    return found[: min(tokens, len(found)) // CHUNK * CHUNK]


def index_inputs(text: Sequence[int], format: CacheFormat = PLAIN.format) -> list[tuple[Any, Any, Any]]:
    """What each layer's indexer is given for the last chunk of a text: q, w, and the keys of all of it."""
    model = tiny()
    decoder = Decoder(model.config)
    held = decoder.allocate(1, len(text), jnp.float32, kv_cache=format.kv_cache, index_cache=format.index_cache)
    prefill = jax.jit(decoder.prefill, donate_argnames="cache")
    for first in range(0, len(text) - CHUNK, CHUNK):
        _, held = prefill(model.params, np.array([text[first : first + CHUNK]], np.int32), cache=held)

    def look(params: Any, tokens: Array, cache: Cache) -> dict[str, Any]:
        return decoder.run_trace(params, tokens, cache, None, _IndexerInput())[0]

    found = jax.jit(look)(model.params, np.array([text[-CHUNK:]], np.int32), held)
    layers = range(len(model.config.mla.layers))
    return [jax.tree.map(lambda x, layer=layer: x[layer], (found["q"], found["k"], found["w"])) for layer in layers]


def two_stage_recalls(
    text: Sequence[int], format: CacheFormat, stages: Sequence[TwoStage] = STAGES
) -> dict[TwoStage, list[float]]:
    """Mean recall of the last chunk's queries of a text, by layer."""
    model, layers = tiny(), index_inputs(text, format)
    positions = jnp.arange(len(text) - CHUNK, len(text), dtype=jnp.int32)[None]
    top_k = model.config.dsa.top_k if model.config.dsa else 0

    def mean(stage: TwoStage, q: Any, k: Any, w: Any) -> float:
        return float(two_stage_recall(q, k, w, top_k=top_k, q_positions=positions, two_stage=stage).mean())

    return {stage: [mean(stage, *layer) for layer in layers] for stage in stages}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cache_quality", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--folder", type=Path, help="work folder of recipes.kimi_tiny, for all held-out books")
    parser.add_argument("--tokens", type=int, default=8000, help="of the texts with codes")
    parser.add_argument("--texts", type=int, default=4, help="with 16 codes each")
    parser.add_argument("--longest", type=int, default=32768, help="tokens of the text for the recall of two stages")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kept: dict[str, Any] = {"jax": jax.__version__, "device": str(jax.devices()[0].device_kind)}
    print(
        "| caches | bits per byte | against bfloat16 | codes found | kimi-k31-d128, bits per byte | against bfloat16 |"
    )
    print("|---|---|---|---|---|---|", flush=True)
    found: dict[str, dict[str, Any]] = kept.setdefault("caches", {})
    for kind in sorted(KINDS, key=lambda kind: kind != PLAIN):
        reader = Reader(tiny(), kind)
        bits, golden = bits_per_byte(reader, options.folder), golden_bits(kind)
        right = [hit for seed in range(options.texts) for hit in planted(reader, options.tokens, seed)]
        found[kind.name] = {"bits_per_byte": bits, "codes": sum(right), "of": len(right), "golden": golden}
        base = found[PLAIN.name]
        print(
            f"| {kind.name} | {bits:.5f} | {bits / base['bits_per_byte'] - 1:+.3%} | {sum(right)} of {len(right)} | "
            f"{golden:.5f} | {golden / base['golden'] - 1:+.3%} |",
            flush=True,
        )
    for length in (8192, options.longest):
        text = long_text(options.folder, length)
        print(
            f"\n| two stages, {len(text):,} keys | kept | recall by layer, bfloat16 | fp8 + mxfp8 |\n|---|---|---|---|"
        )
        tables = [two_stage_recalls(text, kind.format) for kind in (PLAIN, SMALL)]
        for stage in STAGES:
            cells = [" ".join(f"{recall:.4f}" for recall in table[stage]) for table in tables]
            name = f"blocks of {stage.block_size}, {stage.coarse}"
            print(f"| {name} | {stage.kept_fraction:.1%} | {' | '.join(cells)} |", flush=True)
            kept[f"recall, {len(text)} keys, {name}, {stage.kept_fraction}"] = [table[stage] for table in tables]
        if len(text) < options.longest and length != options.longest:
            break
    if options.json:
        options.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
