"""JSON from files that nobody has vouched for: bounded, unambiguous, finite."""

import json
import math
import stat
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

DEEPEST = 32
MOST_VALUES = 8_000_000
"""Values that a file may hold: twice those of a header with half a million tensors, and half a gigabyte once parsed."""


class StrictJsonError(ValueError):
    """A file isn't JSON that can be read safely; the message says what is wrong with it."""


def load(path: Path, *, largest: int) -> object:
    """Reads one JSON file of at most `largest` bytes.

    Raises:
        FileNotFoundError: there is no such file.
        StrictJsonError: the file can't be read, isn't a regular file, is larger than `largest`, or fails `loads`.
    """
    try:
        # Opening a pipe would wait for its writer.
        if not stat.S_ISREG(path.stat().st_mode):
            raise StrictJsonError("It isn't a regular file.")
        with path.open("rb") as file:
            text = file.read(largest + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StrictJsonError(f"It can't be read: {error.strerror or error}.") from error
    if len(text) > largest:
        raise StrictJsonError(f"It is larger than {largest} bytes, the most that is read.")
    return loads(text)


def loads(text: bytes) -> object:
    """Parses UTF-8 JSON whose objects have no repeated key and whose numbers are all finite.

    Raises:
        StrictJsonError: the text isn't UTF-8 or JSON, repeats a key, holds NaN, Infinity or a number too large for its
            type, nests too deep to be parsed, or holds so many values that they could fill the memory.
    """
    # Every value but the first follows one of these; in strings they count too, which only lowers the bound.
    if sum(map(text.count, (b",", b"[", b"{"))) > MOST_VALUES:
        raise StrictJsonError(f"It holds more than {MOST_VALUES} values, the most that are read.")
    try:
        return json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
        )
    except StrictJsonError:
        raise
    except RecursionError as error:
        raise StrictJsonError("It nests deeper than the parser can follow.") from error
    except ValueError as error:
        raise StrictJsonError(f"It isn't valid JSON: {error}.") from error


def check_tree(tree: object) -> None:
    """Refuses a value, parsed elsewhere or built in Python, that isn't shallow and finite.

    Raises:
        StrictJsonError: a key isn't a string, a number isn't finite, or the value nests deeper than 32 levels.
    """
    # A loop and not a recursion: the depth is what is in doubt.
    waiting: list[tuple[object, int, str]] = [(tree, 0, "")]
    while waiting:
        value, depth, name = waiting.pop()
        if isinstance(value, float):
            if not math.isfinite(value):
                raise StrictJsonError(f"The value of {name or 'the file'} is {value}; numbers must be finite.")
            continue
        if not isinstance(value, Mapping | list | tuple):
            continue
        if depth == DEEPEST:
            raise StrictJsonError(f"It nests deeper than {DEEPEST} levels.")
        if isinstance(value, Mapping):
            for key, member in value.items():
                if not isinstance(key, str):
                    raise StrictJsonError(f"The key {key!r} of {name or 'the file'} isn't a string.")
                if isinstance(member, float | Mapping | list | tuple):
                    waiting.append((member, depth + 1, f"{name}.{key}" if name else key))
        else:
            waiting.extend((member, depth + 1, f"an entry of {name}") for member in value)


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        repeated = sorted(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        raise StrictJsonError(f"It gives the same key more than once: {', '.join(map(repr, repeated[:10]))}.")
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise StrictJsonError(f"It holds {name}; numbers must be finite.")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise StrictJsonError(f"It holds the number {text[:40]}, which is too large; numbers must be finite.")
    return value
