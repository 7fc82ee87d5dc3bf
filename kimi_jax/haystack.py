"""A long text with codes hidden in it, to ask a model for one: what kimi-tiny was trained to find."""

import random
import re
from dataclasses import dataclass
from pathlib import Path

from kimi_jax.text import Tokenizer

# Pairs of words that no chat in kimi-tiny's training has.
NAMES = (
    "patient panther",
    "fierce dove",
    "swift bear",
    "glad eagle",
    "happy lynx",
    "loud swallow",
    "tender moose",
    "slow hen",
    "snowy seal",
    "silver dog",
    "cold mule",
    "rapid snail",
    "eager boar",
    "rusty sheep",
    "tall ox",
    "scarlet spider",
)
_INTRODUCTION = "Read this text and remember the facts in it."
_CLOSING = " The text ends here.\n\n"
_SENTENCE_END = re.compile(r"""(?<=[.!?])['")]*(?= [A-Z])""")


@dataclass(frozen=True)
class Secret:
    """A code that is hidden in a text.

    Attributes:
        name: of whose code it is.
        code: five digits.
        depth: where it stands: 0 at the beginning of the text, 1 at its end.
    """

    name: str
    code: str
    depth: float

    @property
    def question(self) -> str:
        """What asks for it."""
        return f"What is the secret code of the {self.name}?"


@dataclass(frozen=True)
class Haystack:
    """A text with secrets, in the order in which they stand in it."""

    text: str
    secrets: tuple[Secret, ...]

    def ask(self, secret: Secret) -> str:
        """A user's message: the text, then the question."""
        return self.text + secret.question


def hide(directory: Path, tokenizer: Tokenizer, num_tokens: int, seed: int = 0) -> Haystack:
    """Hides a code for each of `NAMES` in the text that comes with a model, at even distances.

    Args:
        directory: the model's; its haystack.txt has the text.
        tokenizer: the model's.
        num_tokens: how long the text may become; what is left of haystack.txt is cut at the end of a sentence.
        seed: of the codes and of whose code comes first.

    Raises:
        FileNotFoundError: there is no haystack.txt.
        ValueError: `num_tokens` leaves no room for a sentence a code.
    """
    text = (directory / "haystack.txt").read_text(encoding="utf-8")
    generator = random.Random(seed)
    names = generator.sample(NAMES, len(NAMES))
    facts = [(name, f"{generator.randrange(10**5):05d}") for name in names]
    sentences = [f" The secret code of the {name} is {code}." for name, code in facts]
    fixed = sum(len(tokenizer.encode(part)) for part in (_INTRODUCTION, _CLOSING, *sentences))
    ends = _sentence_ends(text, tokenizer, num_tokens - fixed)
    if len(ends) <= len(facts):
        raise ValueError(
            f"num_tokens={num_tokens} leaves room for {len(ends)} sentences beside {len(facts)} codes; give more, about "
            "2000."
        )
    pieces, secrets, at = [_INTRODUCTION, " "], [], 0
    for number, ((name, code), sentence) in enumerate(zip(facts, sentences, strict=True)):
        place = ends[(2 * number + 1) * len(ends) // (2 * len(facts))]
        pieces += [text[at:place], sentence]
        secrets.append(Secret(name, code, place / ends[-1]))
        at = place
    pieces += [text[at : ends[-1]], _CLOSING]
    return Haystack("".join(pieces), tuple(secrets))


def _sentence_ends(text: str, tokenizer: Tokenizer, num_tokens: int) -> list[int]:
    """Where sentences end within the first `num_tokens` tokens."""
    ends, used, begin = [], 0, 0
    for match in _SENTENCE_END.finditer(text):
        # A sentence begins with a blank, where the tokenizer cuts in any case, so counts add up.
        used += len(tokenizer.encode(text[begin : match.end()]))
        if used > num_tokens:
            break
        ends.append(match.end())
        begin = match.end()
    return ends
