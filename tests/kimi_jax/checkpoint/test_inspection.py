"""What `inspect` says about whole and faulty checkpoints, and about meshes."""

import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest

from kimi_jax.checkpoint import CheckpointReader
from kimi_jax.checkpoint.convert import convert
from kimi_jax.checkpoint.inspection import inspect
from kimi_jax.checkpoint.load import load_params
from kimi_jax.checkpoint.opened import open_checkpoint
from kimi_jax.config import KimiConfig, parameter_count
from kimi_jax.model import Decoder
from kimi_jax.sharding import ShardingError, make_mesh
from tests.kimi_jax.checkpoint.sources import (
    GOLDEN,
    k3_config,
    plain_checkpoint,
    random_checkpoint,
    tensors_of,
)


@pytest.mark.parametrize("family", ["kimi-linear-tiny", "kimi-k3-tiny-mxfp4"])
def test_counts_and_bytes_are_those_of_config_and_files(family: str) -> None:
    found = inspect(GOLDEN / family)
    config = KimiConfig.from_directory(GOLDEN / family)
    assert found.ok
    assert sum(group.parameters for group in found.groups) == parameter_count(config).total
    reader = CheckpointReader(GOLDEN / family)
    assert found.tensors == len(reader.names())
    sizes = {name: math.prod(reader.shape(name)) * reader.dtype(name).itemsize for name in reader.names()}
    assert sum(found.dtypes.values()) == sum(group.nbytes for group in found.groups) == sum(sizes.values())
    (experts,) = (group for group in found.groups if group.name == "experts")
    assert experts.nbytes == sum(size for name, size in sizes.items() if ".experts." in name)


def test_both_formats_are_described_alike(tmp_path: Path) -> None:
    source = random_checkpoint(tmp_path / "source", k3_config())
    convert(source, tmp_path / "orbax", progress=False)
    a, b = (inspect(path, mesh={"expert": 2}).to_dict() for path in (source, tmp_path / "orbax"))
    differing = {key for key in a if a[key] != b[key]}
    assert differing == {"directory", "format"}
    assert (a["format"], b["format"]) == ("huggingface", "orbax")
    assert a["random"]
    assert json.loads(json.dumps(a)) == a
    text = str(inspect(tmp_path / "orbax", mesh={"expert": 2}))
    for part in (
        "orbax, random weights",
        "packed experts",
        "bfloat16",
        "on each of 2 devices (expert=2)",
        "74 tensors",
    ):
        assert part in text


def test_bytes_per_device_are_those_that_loading_takes(tmp_path: Path) -> None:
    source = random_checkpoint(tmp_path / "source", k3_config())
    params = load_params(open_checkpoint(source), Decoder(KimiConfig.from_directory(source)), "bfloat16")
    taken = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert inspect(source, mesh={}).device_bytes == taken
    mesh = make_mesh({"expert": 2, "tensor": 2})
    decoder = Decoder(KimiConfig.from_directory(source))
    spread = load_params(open_checkpoint(source), decoder, "bfloat16", mesh=mesh)
    shards = [leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(spread)]
    assert inspect(source, mesh=dict(mesh.shape)).device_bytes == sum(shards) < taken
    with pytest.raises(ShardingError, match="num_experts doesn't allow expert=3"):
        inspect(source, mesh={"expert": 3})


def test_tensors_that_dont_fit_are_listed_by_kind(tmp_path: Path) -> None:
    tensors = tensors_of(random_checkpoint(tmp_path / "whole", k3_config()))
    prefix = "language_model.model."
    del tensors[f"{prefix}norm.weight"]
    tensors[f"{prefix}extra"] = np.zeros(3, np.float32)
    tensors[f"{prefix}layers.0.input_layernorm.weight"] = np.zeros(3, np.float32)
    found = inspect(plain_checkpoint(tmp_path / "faulty", k3_config(), tensors))
    assert not found.ok
    kinds = {(entry["kind"], entry["tensor"]) for entry in found.to_dict()["mismatches"]}
    assert kinds == {
        ("missing", f"{prefix}norm.weight"),
        ("unexpected", f"{prefix}extra"),
        ("wrong shape", f"{prefix}layers.0.input_layernorm.weight"),
    }
    for part in ("missing: 1", "unexpected: 1", "wrong shape: 1", f"{prefix}extra [3]"):
        assert part in str(found)


def test_files_that_cant_be_read_are_no_obstacle(tmp_path: Path) -> None:
    source = random_checkpoint(tmp_path / "source", k3_config())
    (file,) = source.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    found = inspect(source, mesh={"expert": 4})
    assert not found.ok
    assert found.unreadable is not None
    assert str(file.name) in found.unreadable
    assert found.unreadable in str(found)
    assert found.device_bytes is not None
    with pytest.raises(FileNotFoundError):
        inspect(tmp_path / "absent")
