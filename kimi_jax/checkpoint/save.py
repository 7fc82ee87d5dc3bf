"""Writing a model's parameters as a Hugging Face directory."""

import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kimi_jax.checkpoint.errors import CheckpointError
from kimi_jax.checkpoint.locate import TEXT_PREFIX
from kimi_jax.checkpoint.random_weights import tensors_of
from kimi_jax.checkpoint.side_files import CONFIG
from kimi_jax.checkpoint.writer import shard_name, write_index, write_safetensors
from kimi_jax.config import KimiConfig
from kimi_jax.model import Decoder
from kimi_jax.params import Params, named_specs


def save_huggingface(
    config: KimiConfig,
    params: Params,
    destination: str | os.PathLike[str],
    *,
    shard_bytes: int = 4 * 2**30,
    side_files: Mapping[str, Path] | None = None,
) -> None:
    """Saves parameters in the released layout: names, padding, float32 where it is kept, else the config's dtype.

    Args:
        config: of the model.
        params: arrays as `Decoder(config).specs` describes them, of any float dtype.
        destination: a folder that doesn't exist yet; it appears complete or not at all.
        shard_bytes: bound on the size of a file, unless a single tensor is larger.
        side_files: files to put beside the weights, by the name they get.

    Raises:
        FileExistsError: `destination` exists.
        CheckpointError: the config has packed experts or an image tower, which training doesn't produce.
    """
    if config.quantization is not None or config.vision is not None:
        raise CheckpointError("saving needs a config without quantization_config and without vision_config.")
    target = Path(destination)
    if target.exists():
        raise FileExistsError(f"{target} exists; name a folder that doesn't.")
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    shards: list[dict[str, np.ndarray]] = [{}]
    for name, value in _tensors(config, params).items():
        if shards[-1] and sum(tensor.nbytes for tensor in shards[-1].values()) + value.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = value
    files = {shard_name(number, len(shards)): shard for number, shard in enumerate(shards)}
    for file, shard in files.items():
        write_safetensors(partial / file, shard, {"format": "pt"})
    write_index(partial, files)
    for name, path in (side_files or {}).items():
        shutil.copyfile(path, partial / name)
    (partial / CONFIG).write_text(json.dumps(config.to_dict(), indent=2) + "\n", encoding="utf-8")
    partial.rename(target)


def _tensors(config: KimiConfig, params: Params) -> dict[str, np.ndarray]:
    """Every tensor of the checkpoint, in its order, with its padding."""
    prefix = TEXT_PREFIX if config.model_type != "kimi_linear" else ""
    values: dict[str, np.ndarray] = {}
    for path, spec in named_specs(Decoder(config).specs).items():
        array = params
        for part in path.split("."):
            array = array[part]
        whole = np.asarray(array)
        values |= {prefix + name: whole[index] for index, name in spec.sources()}
    found = {}
    for name, tensor in tensors_of(config):
        padded = np.zeros(math.prod(tensor.info.shape), tensor.info.dtype)
        padded[: tensor.used] = values.pop(name).reshape(-1).astype(tensor.info.dtype)
        found[name] = padded.reshape(tensor.info.shape)
    assert not values
    return found
