"""Functions compiled once for every shape they meet, with a word about what is compiled and for how long."""

import functools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from kimi_jax.compile_cache import CompileCache


class Programs:
    """The compiled programs of one model.

    Args:
        cache: where programs are kept between processes.
        progress: say on standard error what is being compiled and how long it took.

    Attributes:
        seconds: spent compiling so far.
        compiled: what has been compiled, in order.
        lock: held while one is looked for and compiled.
    """

    def __init__(self, cache: CompileCache | None = None, *, progress: bool = False):
        self.seconds = 0.0
        self.compiled: list[str] = []
        self._cache = CompileCache(False) if cache is None else cache
        self._progress = progress
        # Threads that need the same program wait for the first of them.
        self.lock = threading.Lock()

    def add(
        self,
        function: Callable[..., Any],
        name: str,
        *,
        static_argnames: str | tuple[str, ...] = (),
        donate_argnames: str | tuple[str, ...] = (),
    ) -> "Program":
        """A program of this collection; the arguments are those of `jax.jit`, static ones are given by name."""

        def named(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        named.__name__ = named.__qualname__ = name
        # jax.jit reads the parameters' names off the function that it is given.
        named.__wrapped__ = function  # type: ignore[attr-defined]
        jitted = jax.jit(named, static_argnames=static_argnames, donate_argnames=donate_argnames)
        return Program(self, jitted, name)

    def compile(self, jitted: Any, name: str, what: str, args: tuple, static: dict[str, Any]) -> Any:
        """Compiles for the shapes of `args`."""
        self._cache.drop_damaged(name)
        if self._progress:
            print(f"kimi_jax: compiling {what} ...", end=" ", file=sys.stderr, flush=True)
        began = time.perf_counter()
        lowered = jitted.lower(*args, **static)
        with self._cache.in_use(name) as outcome:
            program = lowered.compile()
        seconds = time.perf_counter() - began
        self.seconds += seconds
        self.compiled.append(what)
        if self._progress:
            print(f"{seconds:.1f} s{', from the cache on disk' if outcome.hit else ''}", file=sys.stderr, flush=True)
        outcome.report()
        return program


class Program:
    """One function of a `Programs` collection, compiled for each combination of shapes that it is called with."""

    def __init__(self, programs: Programs, jitted: Any, name: str):
        self._programs = programs
        self._jitted = jitted
        self._name = name
        self._variants: dict[Any, Any] = {}

    def __call__(self, *args: Any, what: str, **static: Any) -> Any:
        """Runs the program.

        Args:
            *args: arrays and trees of arrays.
            what: names the program to the user when it has to be compiled first.
            **static: values that it is compiled for.
        """
        return self.prepare(*args, what=what, **static)(*args)

    def prepare(self, *args: Any, what: str, **static: Any) -> Callable[..., Any]:
        """The program for the shapes of `args`, compiled if need be."""
        leaves, structure = jax.tree.flatten(args)
        key = (structure, tuple(map(_kind, leaves)), tuple(static.items()))
        with self._programs.lock:
            program = self._variants.get(key)
            if program is None:
                program = self._variants[key] = self._programs.compile(self._jitted, self._name, what, args, static)
        return program


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return leaf.shape, leaf.dtype, _layout(leaf.sharding, leaf.shape)
    array = np.asarray(leaf)
    return array.shape, array.dtype


@functools.lru_cache(maxsize=4096)
def _layout(sharding: Any, shape: tuple[int, ...]) -> Any:
    """Which part of an array lies where. One layout may be spelled in several ways, and is one for a program."""
    parts = sharding.devices_indices_map(shape)
    return tuple((device.id, tuple((part.start, part.stop) for part in index)) for device, index in parts.items())
