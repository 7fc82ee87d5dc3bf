"""The platform that programs are traced for, which is JAX's own backend unless a caller compiles for another one.

Sizes of blocks and tiles suit a platform. They're chosen while a function is traced, before anything says what it will be
compiled for.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import jax

Platform = Literal["cpu", "gpu", "tpu"]

_target: ContextVar[str | None] = ContextVar("platform", default=None)


def platform() -> str:
    """Its name: "cpu", "gpu" or "tpu"."""
    return _target.get() or jax.default_backend()


@contextmanager
def traced_for(target: Platform) -> Iterator[None]:
    """Functions traced in this block choose what suits a platform, wherever they're traced.

    JAX remembers traces by the shapes of arguments alone, so those of another platform are forgotten, before and after.
    """
    if target == platform():
        yield
        return
    jax.clear_caches()
    token = _target.set(target)
    try:
        yield
    finally:
        _target.reset(token)
        jax.clear_caches()
