"""Configurations by name: the files of the folder `configs`, in a checkout or beside an installed package."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from kimi_jax import strict_json
from kimi_jax.config import ConfigError, KimiConfig
from kimi_jax.embedded import MODELS

_FOLDERS = (Path(__file__).parents[2] / "configs", Path(sys.prefix) / "share" / "kimi_jax" / "configs")
_LARGEST_FILE = 16 * 2**20


def named_configs() -> dict[str, Path]:
    """Configurations that have a name, models that come with the package among them."""
    found = {path.parent.name: path for path in sorted(MODELS.glob("*/config.json"))}
    for folder in _FOLDERS:
        found = {path.stem: path for path in sorted(folder.glob("*.json"))} | found
    return found


def find_config(source: str | os.PathLike[str]) -> tuple[str, KimiConfig]:
    """The name and the configuration of a config.json, of a directory with one, or of a name.

    Raises:
        FileNotFoundError: there is none; the message lists the names.
        ConfigError: the file isn't a configuration of the family; all faults are listed.
    """
    path, name = Path(source), os.fspath(source)
    if path.is_dir():
        file = path / "config.json"
        if not file.is_file():
            raise FileNotFoundError(f"{name!r} has no config.json.")
        return path.resolve().name, _read(file)
    if path.is_file():
        return (path.resolve().parent.name if path.name == "config.json" else path.stem), _read(path)
    known = named_configs()
    if name not in known:
        raise FileNotFoundError(
            f"{name!r} is no configuration. Legal are the path of a config.json, a directory with one, or one of "
            f"{', '.join(sorted(known))}."
        )
    return name, _read(known[name])


def _read(path: Path) -> KimiConfig:
    try:
        read = strict_json.load(path, largest=_LARGEST_FILE)
    except strict_json.StrictJsonError as error:
        raise ConfigError([str(error)], str(path)) from error
    if not isinstance(read, Mapping):
        raise ConfigError(["It must hold an object."], str(path))
    try:
        return KimiConfig.from_dict(read)
    except ConfigError as error:
        raise ConfigError(error.problems, str(path)) from error
