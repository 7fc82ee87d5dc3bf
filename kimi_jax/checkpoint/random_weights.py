"""Random checkpoints in the released layout, for trying out what needs weights but not trained ones.

Names, types, shapes, padding, packing and sharding into files are those of the releases; the values are noise of a
plausible size. Every file is marked, so that nobody takes the noise for a model.
"""

import hashlib
import math
import os
import shutil
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial as partial_call
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np

from kimi_jax import strict_json
from kimi_jax.checkpoint.boxes import Box
from kimi_jax.checkpoint.destination import state, writing
from kimi_jax.checkpoint.errors import CheckpointError
from kimi_jax.checkpoint.fingerprint import Fingerprint
from kimi_jax.checkpoint.locate import TEXT_PREFIX, packed_shapes, stored_shapes
from kimi_jax.checkpoint.manifest import Marker, sync_directory
from kimi_jax.checkpoint.marks import RANDOM
from kimi_jax.checkpoint.progress import Progress, amount
from kimi_jax.checkpoint.resources import BASE_MEMORY, check_resources, disk_needed
from kimi_jax.checkpoint.safetensors_format import TensorInfo
from kimi_jax.checkpoint.side_files import CONFIG, copy_side_files
from kimi_jax.checkpoint.values import checksum
from kimi_jax.checkpoint.writer import PartialFile, shard_name, write_index
from kimi_jax.config import KimiConfig, VisionConfig
from kimi_jax.model import Decoder
from kimi_jax.params import Init, ParamSpec, named_specs

SHARD_BYTES = 4 * 2**30
"""Bytes of a file, unless a caller asks for another bound."""

# A_log is padded to this many values in K3 and K3.1, 96 heads to 128.
_PADDED_HEADS = 128
# Values of one share of the work.
_BLOCK = 2**22
_WORKERS = max(2, min(8, os.cpu_count() or 2))
_LARGEST_CONFIG = 16 * 2**20

_DTYPES = {
    name: np.dtype(kind)
    for name, kind in (("bfloat16", ml_dtypes.bfloat16), ("float32", np.float32), ("float64", np.float64))
}

Values = Init | Literal["codes", "scales"]


@dataclass(frozen=True)
class RandomTensor:
    """A tensor to fill: the first `used` values are noise (in its own shape, row-major), the rest is zero."""

    info: TensorInfo
    values: Values
    used: int
    deviation: float


def init_random(
    config: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    seed: int = 0,
    shard_bytes: int = SHARD_BYTES,
    progress: bool = True,
) -> Path:
    """Writes a random checkpoint; the same seed gives the same bytes.

    Args:
        config: a config.json, or a directory with one, whose tokenizer files are then copied too.
        destination: a new or empty directory, or one that an interrupted run has left.
        seed: of the random numbers.
        shard_bytes: largest file, unless one tensor is larger.
        progress: say on standard error what is needed and how far it is.

    Returns:
        The finished directory.

    Raises:
        FileNotFoundError: there is no such config.
        ConfigError: it isn't one of the family.
        CheckpointError: the destination holds something else, can't be written, or is full.
        ValueError: an illegal argument.
    """
    if seed < 0 or shard_bytes < 1:
        raise ValueError(f"seed={seed} must not be negative, and shard_bytes={shard_bytes} must be positive.")
    origin, target = Path(config), Path(destination)
    file = origin / CONFIG if origin.is_dir() else origin
    text = file.read_bytes()
    model = KimiConfig.from_dict(_parsed(file))
    mark = Fingerprint(f"random {seed} {shard_bytes} {hashlib.sha256(text).hexdigest()}", "")
    begun = state(target, "huggingface", mark)
    if begun is not None and begun.complete:
        return target
    tensors = dict(tensors_of(model))
    shards = list(_shards(tensors, shard_bytes))
    size = sum(tensor.info.nbytes for tensor in tensors.values())
    summary = check_resources(target, disk_needed(size), BASE_MEMORY)
    report = Progress("init", len(tensors), size, show=progress)
    report.message(f"random weights for {file} in {target}: writes {amount(size)}; {summary}.")
    metadata = {"format": "pt", RANDOM: str(seed)}
    names = [shard_name(number, len(shards)) for number in range(len(shards))]
    marker = Marker(
        format="huggingface",
        complete=False,
        random=True,
        source=str(mark),
        files=tuple(names),
        metadata=(metadata,) * len(names),
    )
    contents = {
        name: {tensor: tensors[tensor].info for tensor in shard} for name, shard in zip(names, shards, strict=True)
    }
    checksums: dict[str, int] = {}
    with writing(target) as lock, ThreadPoolExecutor(_WORKERS) as pool:
        marker.write(target)
        for name, shard in contents.items():
            partial = PartialFile(target / name, shard, metadata)
            partial.open()
            try:
                for tensor, found in _write(partial, {tensor: tensors[tensor] for tensor in shard}, seed, pool):
                    checksums[tensor] = found
                    report.add(1, tensors[tensor].info.nbytes)
                lock.touch()
                partial.publish()
            finally:
                partial.close()
        write_index(target, contents, {RANDOM: str(seed)})
        if origin.is_dir():
            copy_side_files(origin, target)
        else:
            _copy_config(file, target)
        replace(marker, complete=True, checksums=checksums).write(target)
    report.finish()
    return target


def _parsed(file: Path) -> dict[str, object]:
    try:
        tree = strict_json.load(file, largest=_LARGEST_CONFIG)
    except strict_json.StrictJsonError as error:
        raise CheckpointError(f"{file}: {error}") from error
    if not isinstance(tree, dict):
        raise CheckpointError(f"{file} must hold a JSON object.")
    return tree


def _copy_config(file: Path, target: Path) -> None:
    partial = target / f".{CONFIG}.partial"
    shutil.copyfile(file, partial)
    with partial.open("rb") as copied:
        os.fsync(copied.fileno())
    partial.replace(target / CONFIG)
    sync_directory(target)


# What there is to fill.


def tensors_of(config: KimiConfig) -> Iterator[tuple[str, RandomTensor]]:
    """Every tensor that a release of this config holds: layer by layer, then the rest, then the image tower."""
    prefix = TEXT_PREFIX if config.model_type != "kimi_linear" else ""
    named = named_specs(Decoder(config).specs)
    by_layer: dict[int, list[tuple[str, ParamSpec]]] = {}
    for spec in named.values():
        for index, name in spec.sources():
            layer = len(config.layer_kinds()) if spec.layers is None else spec.layers[index[0]]
            by_layer.setdefault(layer, []).append((prefix + name, spec))
    for layer in sorted(by_layer):
        for name, spec in by_layer[layer]:
            yield from _stored(config, name, spec)
    if config.vision is not None:
        for name, shape in _vision(config.vision):
            kind: Values = "ones" if "norm" in name else "normal"
            info = TensorInfo(_DTYPES[config.dtype], shape)
            yield name, RandomTensor(info, kind, math.prod(shape), config.initializer_range)


def _stored(config: KimiConfig, name: str, spec: ParamSpec) -> Iterator[tuple[str, RandomTensor]]:
    deviation = config.initializer_range
    if spec.has_experts and config.quantization is not None:
        codes, scales = packed_shapes(spec.tensor_shape)
        for suffix, shape, values in (("packed", codes, "codes"), ("scale", scales, "scales")):
            kind: Values = "codes" if values == "codes" else "scales"
            yield (
                f"{name}_{suffix}",
                RandomTensor(TensorInfo(np.dtype(np.uint8), shape), kind, math.prod(shape), deviation),
            )
        return
    # Kimi-Linear's files are assumed to keep convolutions and output norms in the model's type, unlike K3's.
    wide = spec.float32 and (config.k3_shaped or not (spec.adapt == "conv" or spec.init == "ones"))
    dtype = np.dtype(np.float32) if wide else _DTYPES[config.dtype]
    shape, *others = stored_shapes(spec)
    used = math.prod(spec.tensor_shape)
    if spec.adapt == "narrow":
        shape = others[0] if not config.k3_shaped else (-(-used // _PADDED_HEADS) * _PADDED_HEADS,)
    yield name, RandomTensor(TensorInfo(dtype, shape), spec.init, used, deviation)


def _vision(vision: VisionConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the image tower and projector."""
    width, inner, qkv = vision.vt_hidden_size, vision.vt_intermediate_size, vision.qkv_hidden_size
    tower = "vision_tower."
    yield f"{tower}patch_embed.proj.weight", (width, 3, vision.patch_size, vision.patch_size)
    yield f"{tower}patch_embed.pos_emb.weight", (vision.init_pos_emb_height, vision.init_pos_emb_width, width)
    for number in range(vision.vt_num_hidden_layers):
        block = f"{tower}encoder.blocks.{number}."
        yield f"{block}norm0.weight", (width,)
        yield f"{block}norm1.weight", (width,)
        yield f"{block}wqkv.weight", (3 * qkv, width)
        yield f"{block}wo.weight", (width, qkv)
        yield f"{block}mlp.fc0.weight", (inner, width)
        yield f"{block}mlp.fc1.weight", (width, inner)
    yield f"{tower}encoder.final_layernorm.weight", (width,)
    merged = vision.merge_kernel_size[0] * vision.merge_kernel_size[1] * vision.mm_hidden_size
    yield "mm_projector.proj.0.weight", (merged, merged)
    yield "mm_projector.proj.2.weight", (vision.text_hidden_size, merged)
    yield "mm_projector.post_norm.weight", (vision.text_hidden_size,)


def _shards(tensors: dict[str, RandomTensor], shard_bytes: int) -> Iterator[list[str]]:
    shard: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if shard and size + tensor.info.nbytes > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += tensor.info.nbytes
    if shard:
        yield shard


# Filling it.


def _write(
    partial: PartialFile, tensors: dict[str, RandomTensor], seed: int, pool: ThreadPoolExecutor
) -> Iterator[tuple[str, int]]:
    """Writes a file's tensors, block by block; yields each name with its checksum."""
    jobs = [
        (name, number, block)
        for name, tensor in tensors.items()
        for number, block in enumerate(Box.whole((math.prod(tensor.info.shape),)).split(_BLOCK))
    ]
    made = _ahead(
        pool, (partial_call(_block, name, number, block, tensors[name], seed) for name, number, block in jobs)
    )
    found: dict[str, int] = {}
    for (name, _, block), values in zip(jobs, made, strict=True):
        partial.write(name, block.start[0], values)
        found[name] = checksum(values, found.get(name, 0))
        if block.stop[0] == math.prod(tensors[name].info.shape):
            yield name, found.pop(name)


def _ahead(pool: ThreadPoolExecutor, calls: Iterable[Callable[[], np.ndarray]]) -> Iterator[np.ndarray]:
    """Results in order, a bounded number of them made ahead."""
    waiting: deque[Future[np.ndarray]] = deque()
    for call in calls:
        waiting.append(pool.submit(call))
        if len(waiting) > 2 * _WORKERS:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _block(name: str, number: int, block: Box, tensor: RandomTensor, seed: int) -> np.ndarray:
    """Values of one block; they depend on the seed, the tensor's name and the block's number alone."""
    generator = np.random.default_rng([seed, zlib.crc32(name.encode()), number])
    (size,) = block.shape
    used = min(size, max(0, tensor.used - block.start[0]))
    values = np.zeros(size, tensor.info.dtype)
    values[:used] = _noise(generator, tensor, used)
    return values


def _noise(generator: np.random.Generator, tensor: RandomTensor, size: int) -> np.ndarray:
    match tensor.values:
        case "normal":
            return generator.standard_normal(size, np.float32) * np.float32(tensor.deviation)
        case "ones":
            return np.ones(size, np.float32)
        case "zeros":
            return np.zeros(size, np.float32)
        case "decay":
            # As models are initialised before training: decay rates exp(A_log) from 1 to 16.
            return np.log(generator.uniform(1, 16, size))
        case "dt_bias":
            # softplus(dt_bias) from 0.001 to 0.1, evenly in its logarithm.
            step = np.exp(generator.uniform(math.log(1e-3), math.log(1e-1), size))
            return step + np.log(-np.expm1(-step))
        case "codes":
            return generator.integers(0, 256, size, np.uint8)
        case "scales":
            # Codes drawn evenly have a root mean square of 2.9; half of the blocks get half the step.
            exponent = 127 + round(math.log2(tensor.deviation / 2.9))
            return generator.integers(exponent - 1, exponent + 1, size, np.uint8)
