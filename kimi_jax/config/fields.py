"""Reading one JSON object key by key, keeping track of everything that is wrong with it."""

import difflib
import math
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

LARGEST_INTEGER: Final = 2**31 - 1
_MOST_LISTED: Final = 50
_MOST_UNDERSTOOD: Final = 12


class _Absent:
    """Marks a key that isn't there, or whose value was refused."""


_ABSENT: Final = _Absent()


def shown(value: object) -> str:
    """A value and its type, short enough for a message whatever the file holds."""
    return f"{reprlib.repr(value)} ({type(value).__name__})"


def listed(items: Sequence[object], text: Callable[[object], str] = str) -> str:
    """Items in order, separated by commas; a long list ends in a count."""
    texts = [text(item) for item in items[:_MOST_LISTED]]
    if len(items) > _MOST_LISTED:
        texts.append(f"and {len(items) - _MOST_LISTED} more")
    return ", ".join(texts)


class Section:
    """One JSON object of a configuration.

    A reading method returns the value of a key. When the key is missing or its value is illegal, the method records a
    problem and returns a legal stand-in, so that reading goes on and all problems come out together. `has` tells a
    value from a stand-in; rules that compare keys ask it first.
    """

    def __init__(self, json: Mapping[str, Any], path: str, problems: list[str]) -> None:
        self.json = json
        self.path = path
        self.problems = problems
        self._asked: dict[str, None] = {}
        self._values: set[str] = set()

    def name(self, key: str) -> str:
        """The key with the path that leads to it."""
        return f"{self.path}.{key}" if self.path else key

    def problem(self, key: str, sentence: str) -> None:
        """Records a problem; the sentence follows the key's full name."""
        self.problems.append(f"{self.name(key)} {sentence}")

    def has(self, *keys: str) -> bool:
        """Whether all these keys were read and hold legal values."""
        return all(key in self._values for key in keys)

    def gives(self, key: str) -> bool:
        """Whether the object holds the key with a value other than null or false."""
        return self.json.get(key) is not None and self.json[key] is not False

    def integer(self, key: str, *aliases: str, minimum: int = 1, maximum: int = LARGEST_INTEGER) -> int:
        """A required integer; `aliases` are other accepted names of the key."""
        value = self._required(key, *aliases)
        return minimum if isinstance(value, _Absent) else self._as_integer(key, value, minimum, maximum)

    def nullable_integer(self, key: str, *, minimum: int = 1, maximum: int = LARGEST_INTEGER) -> int | None:
        """A required key that holds an integer or null."""
        value = self._required(key, nullable=True)
        if value is None:
            self._values.add(key)
        return None if value is None or isinstance(value, _Absent) else self._as_integer(key, value, minimum, maximum)

    def optional_integer(
        self, key: str, *, needed_by: str | None = None, minimum: int = 1, maximum: int = LARGEST_INTEGER
    ) -> int | None:
        """An integer or None when absent or null; `needed_by` names what makes it required."""
        value = self._optional(key, needed_by)
        return None if isinstance(value, _Absent) else self._as_integer(key, value, minimum, maximum)

    def number(self, key: str, *, maximum: float = math.inf) -> float:
        """A required number above zero."""
        value = self._required(key)
        return 1.0 if isinstance(value, _Absent) else self._as_positive(key, value, maximum)

    def optional_number(self, key: str, *, needed_by: str | None = None) -> float | None:
        """A number above zero, or None when absent or null; `needed_by` names what makes it required."""
        value = self._optional(key, needed_by)
        return None if isinstance(value, _Absent) else self._as_positive(key, value, math.inf)

    def negative_number(self, key: str, *, minimum: float, reason: str) -> float | None:
        """A number in [minimum, 0), or None when absent or null."""
        value = self._optional(key, None)
        if isinstance(value, _Absent):
            return None
        if not _is_number(value) or not minimum <= value < 0:
            self.problem(key, f"is {shown(value)}; it must be a number from {minimum} to below 0{reason}")
            return minimum
        self._values.add(key)
        return float(value)

    def boolean(self, key: str) -> bool:
        """A required true or false."""
        value = self._required(key)
        return False if isinstance(value, _Absent) else self._as_boolean(key, value)

    def optional_boolean(self, key: str, *, needed_by: str | None = None, default: bool = False) -> bool:
        """True or false, `default` when absent or null; `needed_by` names what makes it required."""
        value = self._optional(key, needed_by)
        return default if isinstance(value, _Absent) else self._as_boolean(key, value)

    def one_of(self, legal: Collection[str], key: str, *aliases: str) -> str:
        """A required string out of `legal`."""
        value = self._required(key, *aliases)
        if isinstance(value, _Absent):
            return next(iter(legal))
        if not isinstance(value, str) or value not in legal:
            self.problem(key, f"is {shown(value)}; it must be {' or '.join(map(repr, legal))}.")
            return next(iter(legal))
        self._values.add(key)
        return value

    def exactly(self, key: str, legal: object, because: str, *, required: bool = True) -> None:
        """A key that can hold one value only."""
        value = self._required(key, nullable=True) if required else self._asked_for(key)
        if isinstance(value, _Absent):
            return
        if type(value) is not type(legal) or value != legal:
            self.problem(key, f"is {shown(value)}; it must be {legal!r}: {because}")
        else:
            self._values.add(key)

    def integers(self, key: str, *aliases: str) -> tuple[int, ...]:
        """A required list of integers."""
        value = self._required(key, *aliases)
        if isinstance(value, _Absent):
            return ()
        if not isinstance(value, list | tuple):
            self.problem(key, f"is {shown(value)}; it must be a list of integers.")
            return ()
        wrong = [entry for entry in value if not _is_integer(entry)]
        if wrong:
            self.problem(key, f"holds {listed(wrong, shown)}; all must be integers.")
            return ()
        self._values.add(key)
        return tuple(value)

    def strings(self, key: str) -> tuple[str, ...]:
        """A list of strings, empty when absent or null."""
        value = self._optional(key, None)
        if isinstance(value, _Absent):
            return ()
        if not isinstance(value, list | tuple) or not all(isinstance(entry, str) for entry in value):
            self.problem(key, f"is {shown(value)}; it must be a list of strings.")
            return ()
        self._values.add(key)
        return tuple(value)

    def section(self, key: str, *, needed_by: str | None = None) -> "Section | None":
        """A nested object, or None when absent or null; `needed_by` names what makes it required."""
        value = self._optional(key, needed_by)
        if isinstance(value, _Absent):
            return None
        if not isinstance(value, Mapping):
            self.problem(key, f"is {shown(value)}; it must be an object.")
            return None
        self._values.add(key)
        return Section(value, self.name(key), self.problems)

    def accept(self, key: str) -> object:
        """A key that may hold anything; None when absent."""
        value = self._asked_for(key)
        return None if isinstance(value, _Absent) else value

    def refuse_unknown(self, *harmless: Collection[str]) -> None:
        """Records the keys that nothing has asked for and that aren't `harmless`."""
        known = {*self._asked, *(key for keys in harmless for key in keys)}
        unknown = [key for key in self.json if key not in known]
        if not unknown:
            return
        entries = []
        for key in unknown[:_MOST_LISTED]:
            close = difflib.get_close_matches(key, self._asked, n=1) if len(key) <= 100 else []
            entries.append(reprlib.repr(key) + (f" (did you mean {close[0]!r}?)" if close else ""))
        if len(unknown) > _MOST_LISTED:
            entries.append(f"and {len(unknown) - _MOST_LISTED} more")
        few = len(self._asked) <= _MOST_UNDERSTOOD
        self.problems.append(
            f"{self.path or 'The top level'} has {'an unknown key' if len(unknown) == 1 else 'unknown keys'}: "
            f"{', '.join(entries)}. Keys that aren't understood are refused, because ignoring one can change the model."
            + (f" Understood here: {', '.join(sorted(self._asked))}." if few else "")
        )

    def _asked_for(self, key: str) -> Any:
        self._asked[key] = None
        return self.json.get(key, _ABSENT)

    def _required(self, canonical: str, *aliases: str, nullable: bool = False) -> Any:
        spellings = (canonical, *aliases)
        given = {key: value for key in spellings if not isinstance(value := self._asked_for(key), _Absent)}
        accepted = f" (accepted spellings: {', '.join(spellings)})" if aliases else ""
        if not given:
            self.problem(canonical, f"is missing{accepted}.")
            return _ABSENT
        spelling, value = next(iter(given.items()))
        if any(other != value or type(other) is not type(value) for other in given.values()):
            pairs = ", ".join(f"{self.name(key)} is {shown(other)}" for key, other in given.items())
            self.problems.append(f"Two spellings of {self.name(canonical)} disagree: {pairs}.")
            return _ABSENT
        if value is None and not nullable:
            self.problem(spelling, f"is null; it must have a value{accepted}.")
            return _ABSENT
        return value

    def _optional(self, key: str, needed_by: str | None) -> Any:
        value = self._asked_for(key)
        if isinstance(value, _Absent) or value is None:
            if needed_by is not None:
                self.problem(key, f"is {'null' if value is None else 'missing'}; {needed_by}.")
            return _ABSENT
        return value

    def _as_integer(self, key: str, value: Any, minimum: int, maximum: int) -> int:
        if not _is_integer(value) or not minimum <= value <= maximum:
            self.problem(key, f"is {shown(value)}; it must be an integer from {minimum} to {maximum}.")
            return minimum
        self._values.add(key)
        return value

    def _as_positive(self, key: str, value: Any, maximum: float) -> float:
        # An integer too large for a float would raise on conversion; the bound refuses it first.
        if not _is_number(value) or not 0 < value <= min(maximum, 1e30):
            upper = f" and at most {maximum}" if math.isfinite(maximum) else ""
            self.problem(key, f"is {shown(value)}; it must be a finite number above 0{upper}.")
            return 1.0
        self._values.add(key)
        return float(value)

    def _as_boolean(self, key: str, value: Any) -> bool:
        if not isinstance(value, bool):
            self.problem(key, f"is {shown(value)}; it must be true or false.")
            return False
        self._values.add(key)
        return value


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
