"""The trained model in the package, on passages that it hasn't seen, beside a 5-gram of the same training text.

`heldout_passages.json`: a held-out passage of each of six kinds of public-domain books, with the bits that an
interpolated Kneser-Ney 5-gram needs for it (`recipes/kimi_tiny/ngram.py`).
"""

import json
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest

from kimi_jax import Kimi
from kimi_jax.commands.demo import CALL, REQUEST, TOOLS
from kimi_jax.embedded import MODELS
from kimi_jax.haystack import hide
from recipes.kimi_tiny.chats import tool_chat

PASSAGES = json.loads((Path(__file__).parent / "heldout_passages.json").read_text(encoding="utf-8"))
LENGTH = 1024


@cache
def model() -> Kimi:
    return Kimi.from_pretrained("kimi-tiny", dtype="float32", progress=False)


def bits(text: str) -> float:
    """−log2 p of a text after its first token, which nothing precedes."""
    ids = model().tokenizer.encode(text)
    padded = np.zeros((1, LENGTH), np.int32)
    padded[0, : len(ids)] = ids
    log_p = np.asarray(jax.nn.log_softmax(model().logits(padded)[0, : len(ids) - 1]), np.float64)
    return -log_p[np.arange(len(ids) - 1), ids[1:]].sum() / np.log(2)


def test_it_knows_more_of_unseen_text_than_a_5_gram() -> None:
    found = [bits(passage["text"]) for passage in PASSAGES]
    wanted = [passage["kneser_ney_bits"] for passage in PASSAGES]
    assert sum(found) < 0.92 * sum(wanted)


def test_it_calls_a_tool() -> None:
    reply = model().chat([{"role": "user", "content": REQUEST}], tools=TOOLS, max_new_tokens=96)
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [CALL]


@pytest.mark.slow
def test_it_calls_tools_with_words_that_training_never_had() -> None:
    """19 of 20 were right in 200 that were asked; here most of 16 are."""
    right = 0
    for seed in range(16):
        chat = tool_chat(np.random.default_rng([0x7E57, seed]), heldout=True)
        reply = model().chat(chat.messages[:1], tools=chat.tools, max_new_tokens=96)
        right += [{"name": call.name, "arguments": call.arguments} for call in reply.tool_calls] == [chat.call]
    assert right >= 13


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "asked"), [(2000, 8), (7900, 4)])
def test_it_finds_codes_in_long_texts(tokens: int, asked: int) -> None:
    """16 codes stand in a text, all with names that training never had; chance is one in 100 000."""
    haystack = hide(MODELS / "kimi-tiny", model().tokenizer, tokens)
    secrets = haystack.secrets[:: len(haystack.secrets) // asked]
    replies = model().chat(
        [[{"role": "user", "content": haystack.ask(secret)}] for secret in secrets], max_new_tokens=32
    )
    right = sum(secret.code in (reply.text or "") for secret, reply in zip(secrets, replies, strict=True))
    assert right >= asked - 1


@pytest.mark.parametrize("passage", PASSAGES[:2], ids=lambda passage: passage["kind"])
def test_order_matters_to_it(passage: dict) -> None:
    words = passage["text"].split(" ")
    np.random.default_rng(0).shuffle(words)
    assert bits(" ".join(words)) > 1.3 * bits(passage["text"])
