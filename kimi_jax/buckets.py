"""Lengths that programs are compiled for, so that a new prompt length seldom means a new compilation."""

SMALLEST = 64
SMALLEST_CAPACITY = 512


def bucket(length: int) -> int:
    """The least of 64, 96, 128, 192, 256, 384, ... that is at least `length`: a third of it is padding at most.

    Below 64 tokens a device is waiting for the weights anyway, so shorter buckets would save no time.
    """
    size = SMALLEST
    while size < length:
        if size * 3 // 2 >= length:
            return size * 3 // 2
        size *= 2
    return size


def capacity(longest: int, new_tokens: int) -> int:
    """Places in the cache for prompts in the bucket of `longest` tokens and `new_tokens` more: a bucket, from 512 on."""
    return max(SMALLEST_CAPACITY, bucket(bucket(longest) + new_tokens))
