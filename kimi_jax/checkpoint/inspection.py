"""What a checkpoint holds, whether that fits its config, and what it takes on a mesh; without reading a tensor."""

import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kimi_jax.checkpoint.converted import ConvertedCheckpoint
from kimi_jax.checkpoint.errors import CheckpointError
from kimi_jax.checkpoint.hub import resolve
from kimi_jax.checkpoint.locate import Located, Mismatch, compare, packed_shapes
from kimi_jax.checkpoint.opened import Checkpoint, is_random, open_checkpoint
from kimi_jax.checkpoint.progress import amount
from kimi_jax.config import KimiConfig
from kimi_jax.model import Decoder
from kimi_jax.params import ParamSpec, named_specs
from kimi_jax.sharding import RULES, Rule, num_devices, shard_shape

_LISTED = 20


@dataclass(frozen=True)
class Group:
    """Parameters of one kind.

    Attributes:
        name: of the kind.
        parameters: values, padding and scales not counted, packed ones counted as the values that they stand for.
        nbytes: bytes in the checkpoint, or 0 for tensors that aren't there.
    """

    name: str
    parameters: int
    nbytes: int


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found.

    Attributes:
        directory: the checkpoint.
        format: `huggingface` or `orbax`.
        random: whether its weights are marked as random.
        config: the model.
        tensors: number of tensors, vision tower included.
        groups: parameters by kind.
        dtypes: bytes by element type.
        mismatches: tensors that are missing, unexpected or of a wrong shape or type.
        unreadable: why the files can't be read as a checkpoint, or None.
        mesh: the mesh that was asked about, or None.
        device_bytes: bytes of parameters on one of its devices, or None without a mesh.
    """

    directory: Path
    format: str
    random: bool
    config: KimiConfig
    tensors: int
    groups: tuple[Group, ...]
    dtypes: Mapping[str, int]
    mismatches: tuple[Mismatch, ...]
    unreadable: str | None
    mesh: Mapping[str, int] | None
    device_bytes: int | None

    @property
    def ok(self) -> bool:
        """Whether the checkpoint fits its config."""
        return not self.mismatches and self.unreadable is None

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON values."""
        return {
            "directory": str(self.directory),
            "format": self.format,
            "random": self.random,
            "ok": self.ok,
            "config": _summary(self.config),
            "tensors": self.tensors,
            "parameters": sum(group.parameters for group in self.groups),
            "bytes": sum(self.dtypes.values()),
            "groups": [
                {"name": group.name, "parameters": group.parameters, "bytes": group.nbytes} for group in self.groups
            ],
            "bytes_by_dtype": dict(self.dtypes),
            "mismatches": [
                {
                    "kind": mismatch.kind,
                    "tensor": mismatch.tensor,
                    "detail": mismatch.detail,
                    "file": None if mismatch.file is None else str(mismatch.file),
                }
                for mismatch in self.mismatches
            ],
            "unreadable": self.unreadable,
            "mesh": None if self.mesh is None else dict(self.mesh),
            "bytes_per_device": self.device_bytes,
        }

    def __str__(self) -> str:
        lines = [f"{self.directory} ({self.format}{', random weights' if self.random else ''})", ""]
        lines += [f"  {name:28} {value}" for name, value in _summary(self.config).items()]
        lines += ["", f"  {'parameters':28} {'count':>18} {'bytes':>20}"]
        for group in self.groups:
            lines.append(f"  {group.name:28} {group.parameters:18,} {group.nbytes:20,}")
        total = sum(group.parameters for group in self.groups)
        lines += [f"  {'all':28} {total:18,} {sum(self.dtypes.values()):20,}", ""]
        lines += [f"  {dtype:28} {'':18} {size:20,}" for dtype, size in sorted(self.dtypes.items())]
        if self.mesh is not None and self.device_bytes is not None:
            axes = ", ".join(f"{axis}={size}" for axis, size in self.mesh.items())
            lines += [
                "",
                f"  on each of {num_devices(self.mesh)} devices ({axes}): {amount(self.device_bytes)} of parameters",
            ]
        lines.append("")
        if self.unreadable is not None:
            lines.append(self.unreadable)
        elif self.ok:
            lines.append(f"  {self.tensors:,} tensors; they are those that the config asks for.")
        for kind, count in Counter(mismatch.kind for mismatch in self.mismatches).items():
            lines.append(f"  {kind}: {count}")
            listed = [mismatch for mismatch in self.mismatches if mismatch.kind == kind]
            lines += [f"    {mismatch.tensor} {mismatch.detail}" for mismatch in listed[:_LISTED]]
            if len(listed) > _LISTED:
                lines.append(f"    ... and {len(listed) - _LISTED} more (all with --json)")
        return "\n".join(lines)


def inspect(
    directory: str | os.PathLike[str],
    *,
    mesh: Mapping[str, int] | None = None,
    rules: Mapping[str, Rule] = RULES,
) -> Inspection:
    """Looks at a checkpoint's config, headers and records.

    Args:
        directory: a Hugging Face directory or a converted one (or an id on the hub, with the `hub` extra).
        mesh: sizes of mesh axes, to estimate what the parameters take on a device.
        rules: mesh axis of each logical axis.

    Raises:
        FileNotFoundError: there is no config.json.
        ConfigError: it isn't one of the family.
        ShardingError: a size of the model isn't a multiple of the mesh axis that splits it.
    """
    directory = resolve(directory)
    config = KimiConfig.from_directory(directory)
    specs = Decoder(config).specs
    named = named_specs(specs)
    checkpoint: Checkpoint | None = None
    unreadable: str | None = None
    located: dict[str, list[Located]] = {}
    mismatches: list[Mismatch] = []
    try:
        checkpoint = open_checkpoint(directory)
    except CheckpointError as error:
        unreadable = str(error)
    if checkpoint is not None:
        located, mismatches = compare(checkpoint, specs)
        if isinstance(checkpoint, ConvertedCheckpoint) and not mismatches:
            try:
                checkpoint.check_parameters(specs)
            except CheckpointError as error:
                unreadable = str(error)
    dtypes: Counter[str] = Counter()
    if checkpoint is not None:
        for name in checkpoint.names():
            dtypes[checkpoint.dtype(name).name] += _nbytes(checkpoint, name)
    return Inspection(
        directory=directory,
        format="orbax" if isinstance(checkpoint, ConvertedCheckpoint) else "huggingface",
        random=checkpoint is not None and is_random(checkpoint),
        config=config,
        tensors=0 if checkpoint is None else len(checkpoint.names()),
        groups=_groups(checkpoint, named, located),
        dtypes=dtypes,
        mismatches=tuple(mismatches),
        unreadable=unreadable,
        mesh=mesh,
        device_bytes=None if mesh is None else _device_bytes(config, checkpoint, named, located, mesh, rules),
    )


def _summary(config: KimiConfig) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "model_type": config.model_type,
        "layers": f"{config.num_hidden_layers} ({len(config.kda.layers)} KDA, {len(config.mla.layers)} full attention)",
        "hidden_size": config.hidden_size,
        "KDA heads": f"{config.kda.num_heads} x {config.kda.head_dim}",
        "attention heads": config.num_attention_heads,
        "experts": (
            f"{config.moe.num_experts}, {config.moe.num_experts_per_token} a token, in {len(config.moe.layers)} layers"
        ),
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "dtype": config.dtype,
    }
    if config.dsa is not None:
        summary["indexer"] = f"{config.dsa.num_heads} x {config.dsa.head_dim}, top {config.dsa.top_k}"
    if config.attn_res_block_size is not None:
        summary["attention residuals"] = f"blocks of {config.attn_res_block_size} layers"
    if config.quantization is not None:
        summary["packed experts"] = config.quantization.format
    if config.vision is not None:
        summary["vision"] = f"{config.vision.vt_num_hidden_layers} blocks of width {config.vision.vt_hidden_size}"
    return summary


def _groups(
    checkpoint: Checkpoint | None, named: Mapping[str, ParamSpec], located: Mapping[str, list[Located]]
) -> tuple[Group, ...]:
    """Parameters by the first part of their path, then tensors outside the decoder."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    used: set[str] = set()
    held = set() if checkpoint is None else checkpoint.names()
    for path, spec in named.items():
        kind = path.split(".")[0]
        counts[kind] += spec.size
        for tensor in located.get(path, []):
            used.update(tensor.names)
            if checkpoint is not None:
                sizes[kind] += sum(_nbytes(checkpoint, name) for name in tensor.names if name in held)
    if checkpoint is not None:
        for name in held - used:
            kind = name.split(".")[0]
            counts[kind] += math.prod(checkpoint.shape(name))
            sizes[kind] += _nbytes(checkpoint, name)
    return tuple(Group(kind, counts[kind], sizes[kind]) for kind in counts)


def _device_bytes(
    config: KimiConfig,
    checkpoint: Checkpoint | None,
    named: Mapping[str, ParamSpec],
    located: Mapping[str, list[Located]],
    mesh: Mapping[str, int],
    rules: Mapping[str, Rule],
) -> int:
    """Bytes of the decoder's parameters on a device, in the types in which they're loaded unless others are asked for."""
    total = 0
    ordinary = 8 if config.dtype == "float64" else 4 if config.dtype == "float32" else 2
    for path, spec in named.items():
        tensors = located.get(path)
        packed = tensors[0].packed if tensors else spec.has_experts and config.quantization is not None
        if packed:
            for shape in packed_shapes(spec.shape):
                total += math.prod(shard_shape(path, spec, mesh, rules, shape))
        else:
            total += math.prod(shard_shape(path, spec, mesh, rules)) * (max(4, ordinary) if spec.float32 else ordinary)
    return total


def _nbytes(checkpoint: Checkpoint, name: str) -> int:
    return int(np.prod(checkpoint.shape(name), dtype=np.int64)) * checkpoint.dtype(name).itemsize
