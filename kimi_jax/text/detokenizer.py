"""Token ids to text as they come: whole characters only, stop strings held back and cut."""

import codecs
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, SupportsIndex

from kimi_jax.text.tokenizer import ControlToken, Tokenizer, check_text


class Piece(NamedTuple):
    """A part of the output.

    Attributes:
        text: what is shown; empty for a control token that isn't shown.
        control: the control token that this piece is, or None for ordinary text.
    """

    text: str
    control: ControlToken | None = None


class StreamingDetokenizer:
    """Decodes ids as they are generated.

    Text comes out as soon as it can't change any more: an unfinished UTF-8 sequence and a beginning of a stop string
    are held back. The concatenation of everything that `push` and `finish` return is `Tokenizer.decode` of all ids, up
    to the first stop string, however the ids are divided over the calls.

    The stop string that is complete first ends the output (the longest, when several are complete at once); it isn't
    part of the output, and later ids are not looked at.

    Args:
        tokenizer: the model's tokenizer.
        stop: strings that end the output. They're looked for in the text that is shown.
        skip_special: leave out special control tokens, as `Tokenizer.decode` does.
        structure: see `ChatFormat`. Stop strings are looked for neither in these control tokens nor in the text behind
            those that are true, and they don't reach across either: a stop string `call` doesn't mean a tag's name.

    Attributes:
        stopped_by: the stop string that was found, or None.
        num_tokens: ids taken so far, the one that completed the stop string included.

    Raises:
        ValueError: a stop string is empty or has a lone surrogate.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: str | Sequence[str] = (),
        skip_special: bool = True,
        structure: Mapping[str, bool] | None = None,
    ):
        strings = (stop,) if isinstance(stop, str) else tuple(stop)
        for index, text in enumerate(strings):
            if not text:
                raise ValueError(f"stop[{index}] is empty; a stop string has at least one character.")
            check_text(text, f"stop[{index}]")
        self._stop = tuple(map(_StopString, strings))
        self.stopped_by: str | None = None
        self.num_tokens = 0
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._structure = {} if structure is None else structure
        self._in_structure = False
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held: list[Piece] = []
        self._scanned = 0  # characters in _held that the stop strings have seen
        self._finished = False

    def push(self, ids: Iterable[SupportsIndex]) -> str:
        """Takes the next ids and returns the text that is now certain.

        Raises:
            ValueError: an id isn't in the vocabulary, or `finish` has been called.
        """
        return "".join(piece.text for piece in self.push_pieces(ids))

    def finish(self) -> str:
        """Returns what was held back. An unfinished character becomes U+FFFD."""
        return "".join(piece.text for piece in self.finish_pieces())

    def push_pieces(self, ids: Iterable[SupportsIndex]) -> list[Piece]:
        """Like `push`, with control tokens kept apart from text that merely spells them."""
        if self._finished:
            raise ValueError("ids were pushed after finish(); a StreamingDetokenizer serves one output.")
        ids = list(ids)
        if not self._stop:
            self._take(ids)
            return self._release()
        out: list[Piece] = []
        for token_id in ids:
            if self.stopped_by is not None:
                break
            out += self._next(token_id)
        return out

    def finish_pieces(self) -> list[Piece]:
        """Like `finish`, with control tokens kept apart."""
        self._finished = True
        if self.stopped_by is not None:
            return []
        self._end_character()
        out = [] if self._in_structure else self._release()
        if self.stopped_by is None:
            out += self._held
            self._held = []
        return out

    def _next(self, token_id: SupportsIndex) -> list[Piece]:
        """Takes an id where stop strings matter, and returns what is now certain."""
        control = self._tokenizer.control_token(token_id)
        inside = None if control is None else self._structure.get(control.name)
        if inside is None and not self._in_structure:
            self._take([token_id])
            return self._release()
        before: list[Piece] = []
        if not self._in_structure:
            self._end_character()
            before = self._release()
            if self.stopped_by is not None:
                self.num_tokens += 1
                return before
        self._take([token_id])
        # What looked like the beginning of a stop string ends here.
        out, self._held, self._scanned = before + self._held, [], 0
        for stop in self._stop:
            stop.matched = 0
        if inside is not None:
            self._in_structure = inside
        return out

    def _take(self, ids: list[SupportsIndex]) -> None:
        for part in self._tokenizer.parts(ids):
            if isinstance(part, bytes):
                self._hold(Piece(self._utf8.decode(part)))
            else:
                self._end_character()
                self._hold(Piece("" if self._skip_special and part.special else part.name, part))
        self.num_tokens += len(ids)

    def _end_character(self) -> None:
        # A control token never completes a character, so bytes before it are cut off from bytes behind it.
        self._hold(Piece(self._utf8.decode(b"", final=True)))
        self._utf8.reset()

    def _hold(self, piece: Piece) -> None:
        if piece.text or piece.control is not None:
            self._held.append(piece)

    def _release(self) -> list[Piece]:
        if not self._stop:
            out, self._held = self._held, []
            return out
        text = "".join(piece.text for piece in self._held)
        for end in range(self._scanned + 1, len(text) + 1):
            complete = [stop for stop in self._stop if stop.advance(text[end - 1])]
            if complete:
                longest = max(complete, key=lambda stop: len(stop.text))
                self.stopped_by = longest.text
                out, _ = _split(self._held, end - len(longest.text))
                self._held = []
                return out
        out, self._held = _split(self._held, len(text) - max(stop.matched for stop in self._stop))
        self._scanned = sum(len(piece.text) for piece in self._held)
        return out


class _StopString:
    """How much of a stop string the text so far ends with, by the method of Knuth, Morris and Pratt."""

    def __init__(self, text: str):
        self.text = text
        self.matched = 0
        # fallback[n]: length of the longest proper beginning of text[:n] that is also its end.
        self._fallback = [0, 0]
        for character in text[1:]:
            length = self._fallback[-1]
            while length and text[length] != character:
                length = self._fallback[length]
            self._fallback.append(length + (text[length] == character))

    def advance(self, character: str) -> bool:
        """Takes the next character; whether the stop string is now complete."""
        while self.matched and self.text[self.matched] != character:
            self.matched = self._fallback[self.matched]
        self.matched += self.text[self.matched] == character
        return self.matched == len(self.text)


def _split(pieces: list[Piece], at: int) -> tuple[list[Piece], list[Piece]]:
    """Divides pieces at a character; a control token belongs to the part in which it ends."""
    for index, piece in enumerate(pieces):
        if at >= len(piece.text):
            at -= len(piece.text)
        elif at and piece.control is None:
            return [*pieces[:index], Piece(piece.text[:at])], [Piece(piece.text[at:]), *pieces[index + 1 :]]
        else:
            return pieces[:index], pieces[index:]
    return pieces, []
