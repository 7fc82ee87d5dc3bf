"""Tokenizer of the Kimi models: byte-pair encoding over a tiktoken rank file, with control tokens behind it.

The text is first cut by a regular expression (Han runs, words with their contraction, groups of up to three digits,
punctuation, line breaks, blanks), then each piece is merged by rank. The 256 ids after the last rank are control
tokens. Text from users, tools and histories is encoded with control tokens disallowed: a marker that is spelled in it
becomes ordinary tokens. Only text that the program wrote itself is encoded with control tokens allowed.

Sources: the public Kimi K2 and Kimi K3 tokenizer files; tiktoken for the merge procedure.
"""

import base64
import binascii
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, SupportsIndex

import tiktoken

from kimi_jax import strict_json

NUM_CONTROL_TOKENS = 256
"""Control ids that follow the ranks, named or not."""

RANK_FILE = "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_WORD_PREFIX = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"

PRETOKENIZER = "|".join(
    (
        r"[\p{Han}]+",
        f"{_WORD_PREFIX}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_WORD_PREFIX}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""Alternatives in order; `&&` intersects character classes, which tiktoken's engine supports."""

# The reference cuts its input at these lengths, so merges never cross a cut: part of what makes ids equal.
_MAX_PART = 400_000
_MAX_RUN = 25_000
_MAX_CONFIG_BYTES = 16 * 2**20
_RUN = re.compile(r"\s+|\S+")


class Segment(NamedTuple):
    """A piece of a rendered conversation; every segment is encoded on its own.

    Attributes:
        text: the characters.
        structural: written by the renderer itself: control tokens in it are control tokens. False for everything
            that came from outside.
        assistant: belongs to what the assistant said (the mask for a training loss).
    """

    text: str
    structural: bool
    assistant: bool = False


@dataclass(frozen=True)
class ControlToken:
    """A named id behind the ranks.

    Attributes:
        name: its spelling, such as `[EOS]`.
        id: the token id.
        special: left out when ids are decoded with `skip_special=True`.
    """

    name: str
    id: int
    special: bool = True


def check_text(text: str, what: str) -> None:
    """Refuses text that has no UTF-8 form.

    Raises:
        ValueError: `text` holds half a surrogate pair; the message names `what`, the code point and its position.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} has the lone surrogate U+{ord(text[error.start]):04X} at character {error.start}; it stands for "
            "no character, so the text can't be encoded. Legal is text made of whole Unicode characters."
        ) from None


def read_ranks(path: str | PathLike[str]) -> dict[bytes, int]:
    """Reads a rank file: one token a line, its bytes in base64, a blank, its rank.

    Raises:
        ValueError: a line has another form; the message names the file and the line.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(Path(path).read_bytes().splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(
                f"{path}, line {number} is {line[:80]!r}; a line of a rank file is base64 bytes, a blank and a rank."
            ) from None
    return ranks


class Tokenizer:
    """Text to token ids and back.

    Args:
        ranks: token bytes to rank. The ranks are 0, 1, ..., and each of the 256 single bytes has one.
        control_tokens: the named ids among the 256 behind the ranks. The others are called
            `<|reserved_token_ID|>` and count as special.
        name: used in messages.

    Raises:
        ValueError: ranks with a gap or without a byte; a control token outside its 256 ids or named twice.
    """

    def __init__(self, ranks: Mapping[bytes, int], control_tokens: Iterable[ControlToken], *, name: str = "tokenizer"):
        self.name = name
        self.num_ranks = len(ranks)
        self.vocab_size = self.num_ranks + NUM_CONTROL_TOKENS
        if sorted(ranks.values()) != list(range(self.num_ranks)):
            raise ValueError(f"{name}: the {self.num_ranks} ranks must be 0 to {self.num_ranks - 1}, each once.")
        missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
        if missing:
            raise ValueError(f"{name}: the single byte {missing[0]} has no rank; every one of the 256 bytes needs one.")

        named: dict[int, ControlToken] = {}
        for token in control_tokens:
            if not self.num_ranks <= token.id < self.vocab_size:
                raise ValueError(
                    f"{name}: control token {token.name!r} has id {token.id}; behind {self.num_ranks} ranks the legal "
                    f"ids are {self.num_ranks} to {self.vocab_size - 1}."
                )
            if token.id in named:
                raise ValueError(f"{name}: id {token.id} is named both {named[token.id].name!r} and {token.name!r}.")
            named[token.id] = token
        self.control_tokens = tuple(
            named.get(token_id, ControlToken(f"<|reserved_token_{token_id}|>", token_id))
            for token_id in range(self.num_ranks, self.vocab_size)
        )
        self._control_ids = {token.name: token.id for token in self.control_tokens}
        if "" in self._control_ids:
            raise ValueError(f"{name}: control token {self._control_ids['']} has an empty name.")
        if len(self._control_ids) != NUM_CONTROL_TOKENS:
            raise ValueError(f"{name}: two control tokens have the same name; names must differ.")
        # Looking at the first character alone spares the 256 alternatives at most positions.
        first = "".join(sorted({re.escape(token.name[0]) for token in self.control_tokens}))
        self._control_pattern = re.compile(f"(?=[{first}])(?:{'|'.join(map(re.escape, self._control_ids))})")

        self._bytes = [b""] * self.num_ranks
        for token_bytes, rank in ranks.items():
            self._bytes[rank] = token_bytes
        self._bpe = tiktoken.Encoding(
            name, pat_str=PRETOKENIZER, mergeable_ranks=dict(ranks), special_tokens=self._control_ids
        )

    @classmethod
    def from_rank_file(cls, path: str | PathLike[str], control_tokens: Iterable[ControlToken]) -> "Tokenizer":
        """A tokenizer from a rank file, with the control tokens given by the caller."""
        return cls(read_ranks(path), control_tokens, name=str(path))

    @classmethod
    def from_directory(cls, path: str | PathLike[str]) -> "Tokenizer":
        """A tokenizer from a checkpoint directory: `tiktoken.model` and `tokenizer_config.json`.

        The names of control tokens come from the config's `added_tokens_decoder`, never from a guess: the same ids
        mean different things in Kimi K2 and Kimi K3. A token is special when its entry says so or when the config
        names it as bos, eos, unk, pad or additional special token.

        Raises:
            FileNotFoundError: one of the two files isn't there.
            ValueError: one of them doesn't have the expected form.
        """
        directory = Path(path)
        for file in (RANK_FILE, CONFIG_FILE):
            if not (directory / file).is_file():
                raise FileNotFoundError(
                    f"{directory / file} is missing; a tokenizer needs {RANK_FILE} and {CONFIG_FILE}."
                )
        return cls(
            read_ranks(directory / RANK_FILE), _read_control_tokens(directory / CONFIG_FILE), name=str(directory)
        )

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            text: any text without lone surrogates.
            allow_special: spellings of control tokens become their ids. Leave it False for text that isn't yours.

        Raises:
            ValueError: `text` holds a lone surrogate.
        """
        check_text(text, "text")
        ids: list[int] = []
        for part in self._cut(text, allow_special):
            ids += self._bpe.encode(part, allowed_special="all") if allow_special else self._bpe.encode_ordinary(part)
        return ids

    def encode_segments(self, segments: Iterable[Segment]) -> list[int]:
        """Token ids of a rendered conversation; each segment is encoded on its own."""
        return [token_id for segment in segments for token_id in self._encode_segment(segment)]

    def encode_segments_with_mask(self, segments: Iterable[Segment]) -> tuple[list[int], list[bool]]:
        """Token ids as `encode_segments` gives them, and for each whether the assistant said it."""
        ids: list[int] = []
        mask: list[bool] = []
        for segment in segments:
            new = self._encode_segment(segment)
            ids += new
            mask += [segment.assistant] * len(new)
        return ids, mask

    def decode(self, ids: Iterable[SupportsIndex], *, skip_special: bool = False) -> str:
        """Text of token ids.

        Bytes that aren't UTF-8 become U+FFFD. A control token ends a character: bytes on its two sides never join.

        Args:
            ids: token ids.
            skip_special: leave out special control tokens. Those that aren't special (the tags of Kimi K3) stay.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        return "".join(
            part.decode("utf-8", "replace")
            if isinstance(part, bytes)
            else ("" if skip_special and part.special else part.name)
            for part in self.parts(ids)
        )

    def parts(self, ids: Iterable[SupportsIndex]) -> Iterator[bytes | ControlToken]:
        """The bytes of ordinary tokens, joined, and the control tokens between them.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        run: list[bytes] = []
        for index in map(operator.index, ids):
            if 0 <= index < self.num_ranks:
                run.append(self._bytes[index])
                continue
            if run:
                yield b"".join(run)
                run = []
            yield self.control_tokens[self.check_id(index) - self.num_ranks]
        if run:
            yield b"".join(run)

    def token_bytes(self, token_id: SupportsIndex) -> bytes:
        """The bytes of one token; of a control token, those of its name."""
        control = self.control_token(token_id)
        return control.name.encode("utf-8") if control else self._bytes[self.check_id(token_id)]

    def control_token(self, token_id: SupportsIndex) -> ControlToken | None:
        """The control token with this id, or None for an ordinary id."""
        index = self.check_id(token_id)
        return None if index < self.num_ranks else self.control_tokens[index - self.num_ranks]

    def control_id(self, name: str) -> int:
        """The id of a control token.

        Raises:
            ValueError: there is no control token of this name.
        """
        if name not in self._control_ids:
            raise ValueError(
                f"{self.name} has no control token {name!r}; its named ones are {', '.join(self.named_control_tokens)}."
            )
        return self._control_ids[name]

    def has_control_token(self, name: str) -> bool:
        """Whether a control token has this name."""
        return name in self._control_ids

    @property
    def named_control_tokens(self) -> tuple[str, ...]:
        """Names of the control tokens that aren't merely reserved, by id."""
        return tuple(t.name for t in self.control_tokens if t.name != f"<|reserved_token_{t.id}|>")

    def check_id(self, token_id: SupportsIndex) -> int:
        """The id as a Python int.

        Raises:
            ValueError: it isn't in the vocabulary.
        """
        index = operator.index(token_id)
        if not 0 <= index < self.vocab_size:
            raise ValueError(f"Token id {index} is not in the vocabulary; legal ids are 0 to {self.vocab_size - 1}.")
        return index

    def _encode_segment(self, segment: Segment) -> list[int]:
        return self.encode(segment.text, allow_special=segment.structural)

    def _cut(self, text: str, allow_special: bool) -> Iterator[str]:
        cuts = list(_cuts(text))
        if cuts and allow_special:
            # A cut inside the spelling of a control token would turn it into ordinary text.
            spans = [match.span() for match in self._control_pattern.finditer(text)]
            cuts = [next((start for start, end in spans if start < cut < end), cut) for cut in cuts]
        for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            yield text[begin:end]


def _cuts(text: str) -> Iterator[int]:
    """Where the reference cuts: every 400,000 characters, and every 25,000 in a run of blanks or of non-blanks."""
    for start in range(0, len(text), _MAX_PART):
        if start:
            yield start
        end = min(start + _MAX_PART, len(text))
        if end - start > _MAX_RUN:
            for run in _RUN.finditer(text, start, end):
                yield from range(run.start() + _MAX_RUN, run.end(), _MAX_RUN)


def _read_control_tokens(path: Path) -> list[ControlToken]:
    try:
        config = strict_json.load(path, largest=_MAX_CONFIG_BYTES)
    except strict_json.StrictJsonError as error:
        raise ValueError(f"{path}: {error}") from error
    config = config if isinstance(config, dict) else {}
    entries = config.get("added_tokens_decoder")
    if not isinstance(entries, dict) or not entries:
        raise ValueError(
            f"{path}: added_tokens_decoder is {type(entries).__name__}; it must be an object that maps ids to entries "
            'such as {"content": "[EOS]", "special": true}.'
        )
    special = {_token_name(config.get(f"{role}_token")) for role in ("bos", "eos", "unk", "pad")}
    special |= {_token_name(token) for token in config.get("additional_special_tokens") or ()}
    tokens = []
    for key, entry in entries.items():
        name = _token_name(entry)
        if not (key.isascii() and key.isdigit()) or name is None:
            raise ValueError(
                f"{path}: added_tokens_decoder[{key!r}] is {entry!r}; legal is an id with an entry such as "
                '{"content": "[EOS]", "special": true}.'
            )
        tokens.append(ControlToken(name, int(key), special=bool(entry.get("special")) or name in special))
    return tokens


def _token_name(entry: Any) -> str | None:
    name = entry.get("content") if isinstance(entry, dict) else entry
    return name if isinstance(name, str) else None
