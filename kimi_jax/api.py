"""The public face: load a model, ask for logits, generate, stream, chat."""

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kimi_jax import startup
from kimi_jax.buckets import bucket
from kimi_jax.cache_format import CacheFormat, IndexCache, KvCache
from kimi_jax.checkpoint.hub import resolve
from kimi_jax.checkpoint.load import load_params
from kimi_jax.checkpoint.opened import is_random, open_checkpoint
from kimi_jax.compile_cache import CompileCache
from kimi_jax.config import KimiConfig
from kimi_jax.generate.batch import Batch, Runner
from kimi_jax.generate.chat import NEW_TOKENS as CHAT_NEW_TOKENS
from kimi_jax.generate.chat import ChatOptions, ChatStream, conversations
from kimi_jax.generate.language import Language
from kimi_jax.generate.prompts import Request, padded, requests, split, token_rows
from kimi_jax.generate.results import Generation, StreamPiece
from kimi_jax.generate.sampling import SamplingParams
from kimi_jax.model import Decoder, Indexing
from kimi_jax.parallel.decoder import MeshDecoder
from kimi_jax.parallel.hosts import is_first
from kimi_jax.params import Params
from kimi_jax.planning.strategy import choose_mesh
from kimi_jax.programs import Programs
from kimi_jax.sharding import RULES, Rule, make_mesh
from kimi_jax.text import Tokenizer
from kimi_jax.text.shown import shown
from pallas_kernels.dispatch import Implementation
from pallas_kernels.lightning_indexer import TwoStage

_JAX_CONFIG: Any = jax.config  # its attributes are made at run time

DTYPES = ("bfloat16", "float32", "float64")
NEW_TOKENS = 256
"""Bound on the new tokens of a prompt when the caller gives none."""


class Kimi:
    """A model with its parameters.

    Attributes:
        config: the model's config.
        params: nested dict of arrays; layers of one kind are stacked (see `Decoder`).
        decoder: the pure functions that take `params`.
        dtype: of activations and caches.
        programs: what has been compiled.
        is_random: whether the parameters are random numbers in place of trained ones, as `kimi-jax init` writes them.
    """

    def __init__(
        self,
        decoder: Decoder,
        params: Params,
        dtype: DTypeLike,
        *,
        tokenizer: Tokenizer | None = None,
        language: Language | None = None,
        programs: Programs | None = None,
        is_random: bool = False,
        kv_cache: KvCache | None = None,
        index_cache: IndexCache | None = None,
    ):
        """A model from its parts; `language` is made of `tokenizer` when it isn't given."""
        self.decoder = decoder
        self.config = decoder.config
        self.params = params
        self.is_random = is_random
        self.dtype = jnp.dtype(dtype)
        self.programs = Programs() if programs is None else programs
        self._language = Language.of(tokenizer, self.config) if language is None else language
        self._logits = self.programs.add(decoder.logits, "logits")
        self._format = CacheFormat(kv_cache, index_cache)
        self._runner = Runner(decoder, self.dtype, self.programs, self._format)
        self._runners: dict[tuple[CacheFormat, TwoStage | None], Runner] = {
            (self._format, decoder.two_stage): self._runner
        }

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        dtype: DTypeLike | None = None,
        *,
        mesh: Mesh | Mapping[str, int] | Literal["auto"] | None = None,
        rules: Mapping[str, Rule] | None = None,
        verify: bool = False,
        implementation: Implementation | None = None,
        kv_cache: KvCache | None = None,
        index_cache: IndexCache | None = None,
        indexer: Indexing = "exact",
        compilation_cache: bool | str | os.PathLike[str] = True,
        progress: bool = True,
    ) -> "Kimi":
        """Loads a Hugging Face directory (config.json and safetensors files) or one that `convert` has written.

        Args:
            directory: path; the name of a model that comes with the package (`kimi-tiny`); or `owner/name` on the
                Hugging Face hub, with the `hub` extra.
            dtype: of weights and activations: bfloat16, float32 or float64 (with jax_enable_x64). None: the config's.
                Parameters that must be float32 stay so, and packed MXFP4 experts stay packed.
            mesh: devices to spread the model over: a mesh with axes of `sharding.MESH_AXES`, or their sizes, as in
                `{"expert": 4, "tensor": 2}`; "auto" spreads it over all devices as the planner finds best. Each process
                reads only what its own devices hold. None: the default device.
            rules: mesh axes of each logical axis of the parameters, when the compiler shall spread the computation
                after them. None: `sharding.RULES`, and every operation runs on local arrays (see `MeshDecoder`).
            verify: first compare the tensors with their recorded checksums, for checkpoints that this library wrote.
            implementation: of every operation; None lets each pick the best that runs here.
            kv_cache: what latents are kept in between calls: "bfloat16" or "fp8"; None: the dtype of activations.
            index_cache: the same of index keys: "bfloat16" or "mxfp8"; None: the dtype of activations.
            indexer: "exact", or "two_stage", which scores the keys of promising blocks only and misses some that belong;
                a `pallas_kernels.lightning_indexer.TwoStage` says which.
            compilation_cache: keep compiled programs in `kimi_jax/xla` in the user's cache folder (True), in a folder
                of your own (its path), or not (False). A cache that JAX is configured with is used in place of it.
            progress: say on standard error what is loaded, for which devices, how, and later what is compiled.

        Raises:
            FileNotFoundError: no such directory or no config.json in it.
            TypeError: `directory` is neither text nor a path.
            ConfigError: the config isn't one of the family, or contradicts itself; all faults are listed.
            CheckpointError: the tensors don't fit the config (all are listed), are damaged, or hold NaN; or the checkpoint
                isn't whole.
            ShardingError: a size of the model isn't a multiple of the mesh axis that splits it.
            ValueError: an illegal `dtype`, or a cache or an indexer that the model can't have.
        """
        directory = _directory(directory, progress)
        config = KimiConfig.from_directory(directory)
        dtype = _legal_dtype(config.dtype if dtype is None else dtype)
        progress = progress and is_first()
        if isinstance(mesh, str):
            mesh = _chosen_mesh(config, mesh, progress)
        elif isinstance(mesh, Mapping):
            mesh = make_mesh(mesh)
        format = CacheFormat(kv_cache, index_cache)
        format.check(config)
        alone = Decoder(config, implementation, indexer=indexer)
        decoder: Decoder = alone
        if mesh is not None and rules is None:
            decoder = MeshDecoder(config, mesh, implementation, indexer=indexer)
        programs = Programs(CompileCache(compilation_cache), progress=progress)
        startup.warn_of_fallback()
        if progress:
            line = startup.describe(alone, dtype, None if mesh is None else dict(mesh.shape), rules or RULES, format)
            print(f"kimi_jax: {line}", file=sys.stderr, flush=True)
        began = time.monotonic()
        checkpoint = open_checkpoint(directory)
        params = load_params(checkpoint, decoder, dtype, mesh=mesh, rules=rules, verify=verify)
        language = Language.of_directory(directory, config)
        model = cls(
            decoder,
            params,
            dtype,
            language=language,
            programs=programs,
            is_random=is_random(checkpoint),
            kv_cache=kv_cache,
            index_cache=index_cache,
        )
        if progress:
            remarks = "; the weights are random numbers" if model.is_random else ""
            remarks += f"; {language.no_chat}" if language.no_chat else ""
            print(f"kimi_jax: loaded in {time.monotonic() - began:.1f} s{remarks}", file=sys.stderr, flush=True)
        return model

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            ValueError: it has none; the message says which file is missing.
        """
        if self._language.tokenizer is None:
            raise ValueError(self._language.no_tokenizer)
        return self._language.tokenizer

    def logits(self, token_ids: Any) -> Float[Array, "B T V"]:
        """Next-token logits at every position.

        Args:
            token_ids: [B, T] or [T] token ids; or text.

        Returns:
            float32 [B, T, vocabulary] (float64 for a float64 model); B is 1 for a single sequence.

        Raises:
            ValueError, TypeError: empty, ragged, not integers, out of vocabulary, or too long.
        """
        rows = token_rows(split(token_ids)[0], self.config, self._language)
        lengths = {len(row) for row in rows}
        if len(lengths) > 1:
            raise ValueError(
                f"token_ids has rows of {sorted(lengths)} tokens, and logits takes rows of one length: call it row by row."
            )
        count = len(rows[0])
        tokens = padded(rows, min(bucket(count), self.config.max_position_embeddings))
        what = f"logits of {tokens.shape[0]} x {tokens.shape[1]} tokens"
        return self._logits(self.params, tokens, np.full(len(rows), count, np.int32), what=what)[:, :count]

    def generate(
        self,
        prompts: Any,
        max_new_tokens: Any = None,
        *,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **changes: Any,
    ) -> Any:
        """Continues prompts, greedily unless sampling is asked for.

        Args:
            prompts: one prompt as text or token ids, or a list of prompts of any lengths. Spellings of control tokens
                in text are text: encode with `tokenizer.encode(..., allow_special=True)` where they are meant.
            max_new_tokens: bound on the new tokens of each; None: that of `sampling`.
            sampling: how tokens are chosen, for all prompts or one for each.
            **changes: single sampling parameters by name (`temperature=0.7, seed=1`), for all prompts; and `kv_cache`,
                `index_cache` and `indexer` in place of the model's (see `from_pretrained`).

        Returns:
            One `Generation` for one prompt, a list of them for a list.

        Raises:
            ValueError, TypeError: an empty prompt, a token out of vocabulary, text without a tokenizer, an illegal or
                unknown sampling parameter, or more tokens than max_position_embeddings.
        """
        batch, single = self._batch(prompts, max_new_tokens, sampling, changes, streaming=False)
        results: dict[int, Generation] = {}
        for update in batch.updates():
            if update.result is not None:
                results[update.index] = update.result
        return results[0] if single else [results[i] for i in range(len(results))]

    def stream(
        self,
        prompts: Any,
        max_new_tokens: Any = None,
        *,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **changes: Any,
    ) -> Iterator[StreamPiece]:
        """Continues prompts, and hands on what is new as it comes.

            for piece in model.stream("Once upon a time"):
                print(piece, end="", flush=True)

        Args:
            prompts: as in `generate`. Pieces of several prompts come mixed, each with its index; a prompt's last piece
                comes when it has ended, whatever the others do.
            max_new_tokens: as in `generate`.
            sampling: as in `generate`.
            **changes: as in `generate`.

        Raises:
            ValueError, TypeError: as `generate`, at the call.
        """
        batch, _ = self._batch(prompts, max_new_tokens, sampling, changes, streaming=True)
        return self._pieces(batch)

    def chat(
        self,
        messages: Any,
        max_new_tokens: Any = None,
        *,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> Any:
        """The assistant's answer to a conversation, or to each of several.

            reply = model.chat([{"role": "user", "content": "Hello"}], tools=[...], effort="low", temperature=0.7)

        Every call runs the whole conversation through the model; nothing is kept from the turn before.

        Args:
            messages: `[{"role": "user", "content": "..."}, ...]` (see `kimi_jax.text.messages`), or a list of such
                lists. Append `reply.to_message()` to go on.
            max_new_tokens: bound on the new tokens; None: that of `sampling`.
            sampling: as in `generate`.
            **options: options of a chat by name, which are tools, thinking, effort, tool_choice, response_format and
                vendor_compatible (see `ChatOptions`); and those of `generate`.

        Returns:
            A `ChatReply`, or a list of them for a list of conversations.

        Raises:
            MessageError: a message or an option isn't legal; the message of the error names it. A ValueError.
            ValueError, TypeError: as `generate`; the model has no tokenizer or no chat format.
        """
        stream = self._chat(messages, max_new_tokens, sampling, options, streaming=False)
        for _ in stream:
            pass
        return stream.reply if stream.single else stream.replies

    def chat_stream(
        self,
        messages: Any,
        max_new_tokens: Any = None,
        *,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> ChatStream:
        """The same as `chat`, in deltas as they come: reasoning, text, tool calls, and marks of what went wrong.

            stream = model.chat_stream(messages)
            for delta in stream:
                ...
            messages.append(stream.reply.to_message())

        The arguments, and what is raised, are those of `chat`.
        """
        return self._chat(messages, max_new_tokens, sampling, options, streaming=True)

    def chat_prompt(self, messages: Any, **options: Any) -> list[int]:
        """The token ids that a conversation becomes, up to the opening of the answer; the arguments are `chat`'s."""
        return ChatOptions.of(options)[0].prompt(self._language, messages).tolist()

    def _batch(
        self, prompts: Any, max_new_tokens: Any, sampling: Any, changes: dict[str, Any], *, streaming: bool
    ) -> tuple[Batch, bool]:
        runner, changes = self._runner_of(changes)
        given, single = split(prompts)
        rows = token_rows(given, self.config, self._language)
        asked = requests(rows, sampling, _bounded(changes, max_new_tokens), self.config, self._language, NEW_TOKENS)
        return self._run(asked, streaming=streaming, runner=runner), single

    def _chat(
        self, messages: Any, max_new_tokens: Any, sampling: Any, keywords: dict[str, Any], *, streaming: bool
    ) -> ChatStream:
        runner, keywords = self._runner_of(keywords)
        options, changes = ChatOptions.of(keywords)
        given, single = conversations(messages)
        prompts = [options.prompt(self._language, conversation) for conversation in given]
        asked = requests(
            token_rows(prompts, self.config, self._language),
            sampling,
            _bounded(changes, max_new_tokens),
            self.config,
            self._language,
            CHAT_NEW_TOKENS,
            options.structure(self._language),
        )
        batch = self._run(asked, streaming=streaming, runner=runner)
        return ChatStream(batch, [options.parser(self._language) for _ in given], single=single)

    def _run(self, asked: Sequence[Request], *, streaming: bool, runner: Runner | None = None) -> Batch:
        return Batch(runner or self._runner, self.params, self._language, asked, streaming=streaming)

    def _runner_of(self, keywords: dict[str, Any]) -> tuple[Runner, dict[str, Any]]:
        """The programs for the caches and the indexer that a caller's keywords ask for, and the other keywords."""
        rest = dict(keywords)
        if not {"kv_cache", "index_cache", "indexer"} & set(rest):
            return self._runner, rest
        format = CacheFormat(
            rest.pop("kv_cache", self._format.kv_cache), rest.pop("index_cache", self._format.index_cache)
        )
        decoder = self.decoder
        if "indexer" in rest:
            decoder = decoder.with_indexer(rest.pop("indexer"))
        key = (format, decoder.two_stage)
        if key not in self._runners:
            self._runners[key] = Runner(decoder, self.dtype, self.programs, format)
        return self._runners[key], rest

    def _pieces(self, batch: Batch) -> Iterator[StreamPiece]:
        for update in batch.updates():
            text = None
            if self._language.tokenizer is not None:
                text = "".join(piece.text for piece in update.pieces)
            yield StreamPiece(update.index, text, update.token_ids, update.result)


def _directory(source: Any, progress: bool) -> Path:
    if not isinstance(source, str | Path):
        raise TypeError(f"directory={shown(source)} must be the path of a model's directory, or owner/name on the hub.")
    found = resolve(source, progress=progress)
    if not str(source) or not (found / "config.json").is_file():
        there = "there is no config.json in it" if str(source) and found.is_dir() else "there is no such directory"
        raise FileNotFoundError(
            f"{str(source)!r} is no model: {there}. Legal are a Hugging Face or converted directory, or owner/name on "
            "the Hugging Face hub."
        )
    return found


def _chosen_mesh(config: KimiConfig, name: str, progress: bool) -> Mesh | None:
    if name != "auto":
        raise ValueError(
            f"mesh={shown(name)} must be 'auto', sizes of axes as in {{'expert': 4}}, a jax Mesh, or None."
        )
    sizes, reason = choose_mesh(config, jax.devices())
    if progress:
        print(f"kimi_jax: mesh {sizes or 'of one device'}: {reason}", file=sys.stderr, flush=True)
    return make_mesh(sizes) if sizes else None


def _bounded(changes: dict[str, Any], max_new_tokens: Any) -> dict[str, Any]:
    return changes if max_new_tokens is None else changes | {"max_new_tokens": max_new_tokens}


def _legal_dtype(dtype: DTypeLike) -> np.dtype:
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in DTYPES:
        raise ValueError(f"dtype={shown(dtype)} isn't supported; legal are {', '.join(DTYPES)}.")
    if name == "float64" and not _JAX_CONFIG.jax_enable_x64:
        raise ValueError("dtype='float64' needs jax_enable_x64: call jax.config.update('jax_enable_x64', True) first.")
    return jnp.dtype(name)
