"""The one exception of the configuration package."""

from collections.abc import Sequence


class ConfigError(ValueError):
    """A configuration can't be used.

    Attributes:
        problems: everything that is wrong, one sentence or two each; all of it is reported at once.
        source: where the configuration came from, such as a file's path.
    """

    def __init__(self, problems: Sequence[str], source: str = "the configuration") -> None:
        super().__init__(tuple(problems), source)
        self.problems: tuple[str, ...] = tuple(problems)
        self.source = source

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return f"{self.source}: {self.problems[0]}"
        listed = "".join(f"\n  - {problem}" for problem in self.problems)
        return f"{self.source} has {len(self.problems)} problems:{listed}"
