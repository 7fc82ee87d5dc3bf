"""Values of callers in the sentences of errors: short, and never the cause of another error."""

import reprlib

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80


def shown(value: object) -> str:
    """The value as Python would write it, cut to a line's length."""
    try:
        return _REPR.repr(value)
    except ValueError:
        # Python doesn't write out integers of thousands of digits.
        return f"a value of type {type(value).__name__} that is too long to be shown"
