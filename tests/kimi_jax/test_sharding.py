"""The table from logical to mesh axes, and what it makes of parameters."""

import json
import math
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import AxisType, PartitionSpec

from kimi_jax.config import KimiConfig
from kimi_jax.model import Decoder
from kimi_jax.params import ParamSpec, named_specs
from kimi_jax.sharding import (
    MESH_AXES,
    RULES,
    ShardingError,
    automatic,
    complete,
    config_field,
    make_mesh,
    num_devices,
    parse_mesh,
    partition,
    shard_shape,
)

CONFIGS = Path(__file__).parents[2] / "configs"


def specs(name: str) -> dict[str, ParamSpec]:
    return named_specs(Decoder(KimiConfig.from_dict(json.loads((CONFIGS / f"{name}.json").read_text()))).specs)


def test_every_logical_axis_has_a_rule_and_a_config_field() -> None:
    for name in ("kimi-linear-48b-a3b", "kimi-k3", "kimi-k31-pro"):
        for path, spec in specs(name).items():
            for axis in spec.axes:
                assert axis is None or axis in RULES
                assert axis is None or config_field(path, axis) != axis
    for rule in RULES.values():
        assert rule is None or {rule} <= set(MESH_AXES) or set(rule) <= set(MESH_AXES)


def test_k3_fits_the_meshes_it_is_made_for() -> None:
    """896 experts are 7 for each of 128 devices, and 512 devices hold four copies of them."""
    mesh = {"context": 4, "expert": 16, "tensor": 8}
    k3 = specs("kimi-k3")
    experts = k3["experts.gate_up"]
    assert shard_shape("experts.gate_up", experts, mesh) == (92, 7, 2, 3072, 3584)
    assert shard_shape("kda.A_log", k3["kda.A_log"], mesh) == (69, 12)
    assert partition(experts, mesh) == PartitionSpec(None, ("expert", "tensor"), None, None, None)
    packed = math.prod(shard_shape("experts.gate_up", experts, mesh, shape=(92, 896, 2, 3072, 1792)))
    assert packed == 92 * 7 * 2 * 3072 * 1792


def test_axes_that_a_mesh_lacks_split_nothing() -> None:
    spec = specs("kimi-k3")["kda.qkv"]
    assert partition(spec, {}) == PartitionSpec(None, None, None, None)
    assert shard_shape("kda.qkv", spec, {"data": 7}) == spec.shape


@pytest.mark.parametrize(
    ("path", "mesh", "field"),
    [
        ("kda.A_log", {"tensor": 5}, "linear_attn_config.num_heads doesn't allow tensor=5: kda.A_log has 96"),
        ("mla.query", {"tensor": 36}, "num_attention_heads doesn't allow tensor=36: mla.query has 96"),
        ("experts.down", {"expert": 3}, "num_experts doesn't allow expert=3: experts.down has 896"),
        (
            "experts.down",
            {"expert": 5, "tensor": 1},
            "num_experts doesn't allow expert=5 times tensor=1: experts.down has 896 along its axis 'experts'",
        ),
        ("dense.down", {"tensor": 7}, "intermediate_size doesn't allow tensor=7: dense.down has 33792"),
        ("moe.shared.down", {"tensor": 5}, "moe_intermediate_size (times num_shared_experts) doesn't allow tensor=5"),
        ("head", {"tensor": 3}, "vocab_size doesn't allow tensor=3: head has 163840"),
    ],
)
def test_a_size_that_doesnt_divide_names_the_config_field(path: str, mesh: dict[str, int], field: str) -> None:
    with pytest.raises(ShardingError) as caught:
        shard_shape(path, specs("kimi-k3")[path], mesh)
    assert str(caught.value).startswith(field)
    assert f"isn't a multiple of {next(iter(mesh.values()))}" in str(caught.value)


def test_sizes_that_would_work_are_named() -> None:
    with pytest.raises(
        ShardingError, match=r"tensor may be 1, 2, 3, 4, 6, 8, 12, .*; more devices than that go to data"
    ):
        shard_shape("kda.A_log", specs("kimi-k3")["kda.A_log"], {"tensor": 128})


def test_packed_weights_divide_as_they_are_packed() -> None:
    spec = specs("kimi-k3")["experts.down"]
    rules = {**RULES, "experts": "expert", "expert_mlp": "tensor"}
    scales = (92, 896, 3584, 96)
    assert shard_shape("experts.down", spec, {"tensor": 32}, rules, scales) == (92, 896, 3584, 3)
    with pytest.raises(ShardingError, match=r"moe_intermediate_size doesn't allow tensor=64: .* as it is packed"):
        shard_shape("experts.down", spec, {"tensor": 64}, rules, scales)


def test_rules_must_be_complete_and_use_a_mesh_axis_once() -> None:
    spec = specs("kimi-k3")["embed"]
    with pytest.raises(ShardingError, match="no entry for the logical axis 'embed'"):
        partition(spec, {"tensor": 2}, {"vocab": "tensor"})
    with pytest.raises(ShardingError, match="one mesh axis to two axes"):
        partition(spec, {"tensor": 2}, {"vocab": "tensor", "embed": "tensor"})


def test_meshes_are_described_as_axis_and_size() -> None:
    assert parse_mesh("expert=8, tensor=4") == {"expert": 8, "tensor": 4}
    assert num_devices({"expert": 8, "tensor": 4}) == 32


@pytest.mark.parametrize(
    "text", ["", "tensor", "tensor=", "tensor=0", "tensor=-1", "tensor=2,tensor=2", "tensor=²", "rows=2"]
)
def test_other_descriptions_are_refused(text: str) -> None:
    with pytest.raises(ShardingError, match="expert=8,tensor=4"):
        parse_mesh(text)


def test_missing_axes_are_added() -> None:
    made = complete(jax.make_mesh((2, 2), ("context", "tensor"), devices=jax.devices()[:4]))
    assert dict(made.shape) == {"data": 1, "context": 2, "expert": 1, "tensor": 2}
    assert made.devices.reshape(-1).tolist() == jax.devices()[:4]
    for axes in (("tensor", "context"), ("rows",)):
        with pytest.raises(
            ShardingError, match=r"must be some of \('data', 'context', 'expert', 'tensor'\), in this order"
        ):
            complete(jax.make_mesh((1,) * len(axes), axes, devices=jax.devices()[:1]))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"rows": 2}, "axes must be some of data, context, expert, tensor"),
        ({"tensor": 0}, "of whole sizes from 1 on"),
        ({"tensor": 16}, "needs 16 devices; there are 8"),
    ],
)
def test_a_mesh_is_made_of_devices_that_there_are(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        make_mesh(sizes)


def test_the_compiler_is_put_in_charge() -> None:
    made: Any = automatic(jax.make_mesh((1,), ("tensor",)))
    assert made.axis_types == (AxisType.Auto,)
    assert made.axis_names == ("tensor",)
