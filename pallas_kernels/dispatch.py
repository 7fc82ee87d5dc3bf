"""Choosing one implementation of an operation, and saying why."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

Implementation = Literal["reference", "xla", "tpu", "gpu"]

IMPLEMENTATIONS: tuple[Implementation, ...] = ("reference", "xla", "tpu", "gpu")


class UnsupportedImplementationError(ValueError):
    """The implementation that was named can't run here; the message says why."""


@dataclass(frozen=True)
class Choice:
    """The implementation that will run and the reason it was picked."""

    name: Implementation
    reason: str


_LISTENING: ContextVar[tuple[dict[str, Choice], ...]] = ContextVar("listening", default=())


@contextmanager
def noted_choices() -> Iterator[dict[str, Choice]]:
    """Collects what operations choose in the block, the last choice of each by its name.

    Only the choices of this thread, or of this asynchronous task, are seen. Blocks may be nested.
    """
    found: dict[str, Choice] = {}
    token = _LISTENING.set((*_LISTENING.get(), found))
    try:
        yield found
    finally:
        _LISTENING.reset(token)


def choose(
    operation: str,
    requested: Implementation | None,
    candidates: Mapping[Implementation, Callable[[], str | None]],
    notes: Mapping[Implementation, Callable[[], str | None]] | None = None,
) -> Choice:
    """Picks an implementation of `operation`.

    Args:
        operation: name used in messages.
        requested: an implementation by name, or None for the best one that can run.
        candidates: implementations in order of preference. Each value returns None when that implementation can run
            for the call at hand, or a sentence saying why it can't.
        notes: what else to say, after the reason, of an implementation that is picked: how it will run.

    Returns:
        The choice. `reference` is never picked unless it is named: it is a definition, not a way to run a model.

    Raises:
        UnsupportedImplementationError: `requested` isn't known, or can't run here.
    """
    choice = _choose(operation, requested, candidates)
    if notes is not None and choice.name in notes and (note := notes[choice.name]()) is not None:
        choice = Choice(choice.name, f"{choice.reason}; {note}")
    for found in _LISTENING.get():
        found[operation] = choice
    return choice


def always() -> str | None:
    """The obstacle of an implementation that runs anywhere: none."""
    return None


def _choose(
    operation: str,
    requested: Implementation | None,
    candidates: Mapping[Implementation, Callable[[], str | None]],
) -> Choice:
    if requested is not None:
        if requested not in candidates:
            raise UnsupportedImplementationError(
                f"{operation}: implementation={requested!r} is not one of {', '.join(map(repr, candidates))}."
            )
        obstacle = candidates[requested]()
        if obstacle is not None:
            raise UnsupportedImplementationError(f"{operation}: implementation={requested!r} can't run: {obstacle}")
        return Choice(requested, "named by the caller")

    obstacles: list[str] = []
    for name, obstacle_of in candidates.items():
        if name == "reference":
            continue
        obstacle = obstacle_of()
        if obstacle is None:
            return Choice(name, "; ".join(obstacles) or "first choice")
        obstacles.append(f"{name}: {obstacle}")
    raise UnsupportedImplementationError(f"{operation}: nothing can run: {'; '.join(obstacles)}")
