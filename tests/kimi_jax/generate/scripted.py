"""A model whose logits are known: what it is told to say, or one distribution for ever."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax import Kimi, KimiConfig
from kimi_jax.compile_cache import CompileCache
from kimi_jax.generate.language import Language
from kimi_jax.model import Decoder
from kimi_jax.programs import Programs
from kimi_jax.text import Tokenizer, k2, xtml
from tests.kimi_jax.generate import tiny
from tests.kimi_jax.text.golden import path


class ScriptedDecoder(Decoder):
    """After n tokens of row b, the logits are `params["logits"]`, and 50 more for `params["script"][b, n]`, if any."""

    def prefill(self, params: Any, token_ids: Any, cache: Any, lengths: Any = None, all_logits: bool = False) -> Any:
        rows, size = token_ids.shape[0], params["script"].shape[1]
        token = params["script"][jnp.arange(rows), (cache.lengths + lengths) % size]
        favoured = jax.nn.one_hot(token, self.config.vocab_size, dtype=jnp.float32) * 50
        return params["logits"] + favoured, cache.advance(lengths)


class Actor:
    """A model that says what it is told. It speaks as any family does, and its programs are compiled once for all.

    Attributes:
        model: as it was last told.
    """

    ROWS, LENGTH = 8, 2048

    def __init__(self, compilation_cache: str | Path):
        self._config = KimiConfig.from_dict(tiny.config("kimi_linear"))
        self._languages = {
            family: Language.of(tokenizer(family), KimiConfig.from_dict(tiny.config(family)))
            for family in ("kimi_linear", "kimi_k3")
        }
        programs = Programs(CompileCache(compilation_cache))
        self.model = Kimi(ScriptedDecoder(self._config), {}, jnp.float32, programs=programs)
        self.speaks("kimi_linear")
        self.constant(np.zeros(tiny.VOCABULARY, np.float32))

    def speaks(self, family: str) -> Kimi:
        """The model with the tokenizer and the chat format of a family."""
        self.model._language = self._languages[family]
        return self.model

    def told(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> Kimi:
        """The model with an answer for each prompt, given as token ids; behind it there are ends for ever."""
        script = np.full((self.ROWS, self.LENGTH), tiny.EOS, np.int32)
        for row, prompt, answer in zip(script, prompts, answers, strict=False):
            row[len(prompt) : len(prompt) + len(answer)] = answer
        return self._with(script, np.zeros(tiny.VOCABULARY, np.float32))

    def constant(self, logits: np.ndarray) -> Kimi:
        """The model with the same logits at every step, whatever the tokens."""
        return self._with(np.full((self.ROWS, self.LENGTH), -1, np.int32), logits)

    def _with(self, script: np.ndarray, logits: np.ndarray) -> Kimi:
        self.model.params = {"script": jnp.asarray(script), "logits": jnp.asarray(logits)}
        return self.model


def tokenizer(family: str) -> Tokenizer:
    tokens = (k2 if family == "kimi_linear" else xtml).control_tokens(tiny.RANKS)
    return Tokenizer.from_rank_file(path("tokenizer-tiny", "tiktoken.model"), tokens)
