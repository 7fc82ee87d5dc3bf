"""Finding a checkpoint: a path, a model in the package, or the Hugging Face hub for those with the `hub` extra."""

import os
import re
from pathlib import Path

from kimi_jax.checkpoint.errors import CheckpointError
from kimi_jax.checkpoint.side_files import SUFFIXES
from kimi_jax.embedded import embedded

# What is fetched: weights in safetensors and text. Code and pickles stay where they are.
PATTERNS = ["*.safetensors", "LICENSE*", *(f"*{suffix}" for suffix in SUFFIXES)]

_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


def resolve(
    source: str | os.PathLike[str],
    *,
    progress: bool = True,
    endpoint: str | None = None,
    cache: str | Path | None = None,
) -> Path:
    """The directory of a checkpoint: `source` itself, that of a model in the package, or that of the hub's files.

    Files that are there already aren't fetched again. A connection that is cut is resumed where it stopped, a run that
    is stopped with the file that it was in.

    Args:
        source: a path, the name of a model that comes with the package, or `owner/name` like `moonshotai/Kimi-K3`. A path
            that exists, or whose parent exists, is never taken for an id.
        progress: show how far the download is, and say what a name that means two things was taken for.
        endpoint: address of the hub; None: the public one, or what its library is set to.
        cache: where files are kept; None: the library's usual place.

    Raises:
        CheckpointError: `source` looks like an id, and the `hub` extra isn't installed or the hub refuses.
    """
    inside = embedded(source, progress=progress)
    if inside is not None:
        return inside
    path = Path(source)
    name = os.fspath(source)
    if path.exists() or not _REPOSITORY.fullmatch(name) or path.parent.exists():
        return path
    try:
        import huggingface_hub
        from huggingface_hub.utils import tqdm
    except ImportError as error:
        raise CheckpointError(
            f"{name!r} is no directory. To fetch it from the Hugging Face hub, install the extra: "
            "pip install 'kimi-jax[hub]'."
        ) from error

    class Silent(tqdm):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **{**options, "disable": True})

    try:
        found = huggingface_hub.snapshot_download(
            name,
            allow_patterns=PATTERNS,
            endpoint=endpoint,
            cache_dir=cache,
            library_name="kimi_jax",
            tqdm_class=None if progress else Silent,
        )
    except (OSError, ValueError, RuntimeError) as error:
        text = " ".join(str(error).split())
        raise CheckpointError(f"{name!r} can't be fetched from the Hugging Face hub: {text[:500]}") from error
    return Path(found)
