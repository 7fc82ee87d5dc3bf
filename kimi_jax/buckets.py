"""Lengths that programs are compiled for, so that a new prompt length seldom means a new compilation."""

SMALLEST = 16


def bucket(length: int) -> int:
    """The least of 16, 24, 32, 48, 64, 96, 128, ... that is at least `length`: a third of it is padding at most."""
    size = SMALLEST
    while size < length:
        if size * 3 // 2 >= length:
            return size * 3 // 2
        size *= 2
    return size
