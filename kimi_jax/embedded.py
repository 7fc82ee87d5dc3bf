"""Models that come with the package."""

import os
import sys
from pathlib import Path

MODELS = Path(__file__).parent / "models"
"""Where they are, each in a directory in the Hugging Face layout."""


def names() -> tuple[str, ...]:
    """Names of the models that come with the package."""
    return tuple(sorted(path.parent.name for path in MODELS.glob("*/config.json")))


def embedded(source: str | os.PathLike[str], *, progress: bool = True) -> Path | None:
    """The directory of the model that comes with the package under this name; None for anything else.

    Args:
        source: a name without any path separator. A directory of that name in the working directory wins.
        progress: say on standard error when such a directory was preferred.
    """
    name = os.fspath(source)
    if name not in names():
        return None
    if not Path(name).is_dir():
        return MODELS / name
    if progress:
        print(
            f"kimi_jax: {name!r} is the directory {Path(name).absolute()}, not the model of that name in the package, "
            f"which is {MODELS / name}.",
            file=sys.stderr,
            flush=True,
        )
    return None
