"""The planner: legal meshes, exact memory, more devices never slower, and errors that say what would fit."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from kimi_jax.cache import Cache
from kimi_jax.model import Decoder
from kimi_jax.parallel import MeshDecoder, shared_selection
from kimi_jax.params import named_specs
from kimi_jax.planning import chip_named, parse_topology
from kimi_jax.planning.configs import find_config, named_configs
from kimi_jax.planning.links import Group, box
from kimi_jax.planning.step_cost import StepModel, Workload
from kimi_jax.planning.strategy import Candidate, PlanError, cheaper_layout, choose_mesh, factorisations, plan_mesh
from kimi_jax.sharding import MESH_AXES, ShardingError, make_mesh, shard_shape

LARGE = find_config("kimi-k31-pro")[1]
MEDIUM = find_config("kimi-linear-48b-a3b")[1]
TINY = find_config("kimi-k31-tiny")[1]
PACKED = find_config("kimi-k3-tiny-mxfp4")[1]
PREFILL, DECODE = Workload("prefill", 1, 2**17, 2**17), Workload("decode", 64, 1, 2**15)


@pytest.mark.parametrize("count", [1, 7, 12, 512])
def test_every_mesh_of_so_many_devices_is_considered_once(count: int) -> None:
    found = [tuple(sizes[axis] for axis in MESH_AXES) for sizes in factorisations(count)]
    assert len(set(found)) == len(found)
    assert all(math.prod(sizes) == count for sizes in found)
    brute = sum(1 for a in range(1, count + 1) if count % a == 0 for b in range(1, count // a + 1) if count // a % b == 0
                for c in range(1, count // (a * b) + 1) if count // (a * b) % c == 0)  # fmt: skip
    assert len(found) == brute


@pytest.mark.parametrize("count", [96, 512])
def test_meshes_that_are_considered_are_legal(count: int) -> None:
    plan = plan_mesh(LARGE, chip_named("v5p"), [DECODE], devices=count, shown=1000, limit=2**60)
    chosen = {tuple(c.sizes.items()) for c in (plan.chosen, *plan.others)}
    specs = named_specs(Decoder(LARGE).specs)

    def legal(sizes: Mapping[str, int]) -> bool:
        try:
            for path, spec in specs.items():
                shard_shape(path, spec, sizes)
        except ShardingError:
            return False
        return True

    # Packed widths follow from unpacked ones here: no expert's own axes are split.
    assert chosen == {tuple(sizes.items()) for sizes in factorisations(count) if legal(sizes)}
    for sizes in map(dict, chosen):
        assert LARGE.num_attention_heads % sizes["tensor"] == 0
        assert LARGE.moe.num_experts % (sizes["expert"] * sizes["tensor"]) == 0


@pytest.mark.parametrize("name", ["kimi-k31-tiny", "kimi-k3-tiny-mxfp4"])
@pytest.mark.parametrize(
    "sizes",
    [{"expert": 4, "tensor": 2}, {"data": 2, "context": 2, "tensor": 2}, {"context": 2, "expert": 4}, {"data": 8}],
)
def test_bytes_of_parameters_and_caches_are_those_of_their_shardings(name: str, sizes: dict[str, int]) -> None:
    config = find_config(name)[1]
    sizes = {axis: sizes.get(axis, 1) for axis in MESH_AXES}
    decoder = MeshDecoder(config, make_mesh(sizes))
    model = StepModel(config, chip_named("v5e"))

    def held(shape: tuple[int, ...], spec: PartitionSpec, itemsize: int) -> int:
        mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
        return math.prod(NamedSharding(mesh, spec).shard_shape(shape)) * itemsize

    specs = named_specs(decoder.specs)
    splits = jax.tree.leaves(decoder.param_specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    expected = 0
    for spec, split in zip(specs.values(), splits, strict=True):
        if spec.has_experts and config.quantization is not None:
            *outer, inner = spec.shape
            expected += held((*outer, inner // 2), split, 1) + held((*outer, inner // 32), split, 1)
        else:
            expected += held(spec.shape, split, 4 if spec.float32 else 2)
    assert sum(model.parameter_bytes(sizes, train=False).values()) == expected
    trained = sum(held(spec.shape, split, 4) for spec, split in zip(specs.values(), splits, strict=True))
    assert sum(model.parameter_bytes(sizes, train=True).values()) == trained

    for rows in (1, 2, 8):
        work = Workload("decode", rows, 1, 64)
        shapes = jax.eval_shape(lambda rows=rows: Cache.allocate(config, rows, 64, jnp.bfloat16))
        cache = jax.tree.map(lambda x, s: held(x.shape, s, x.dtype.itemsize), shapes, decoder.cache_specs(rows))
        counted = model.cache_bytes(sizes, work)
        assert counted == {field: size for field, size in vars(cache).items() if size is not None}
        assert model.cost(sizes, work).memory["cache"] == sum(counted.values())


@pytest.mark.parametrize("chip", ["v5p", "h200"])
def test_more_devices_are_never_slower(chip: str) -> None:
    for config, counts in ((MEDIUM, (4, 8, 16, 32)), (LARGE, (64, 128))):
        for work in (PREFILL, Workload("decode", 56, 1, 4096)):
            seconds = []
            for count in counts:
                try:
                    seconds.append(plan_mesh(config, chip_named(chip), [work], devices=count).chosen.seconds)
                except PlanError:
                    assert not seconds, f"{count} devices hold less than half as many did"
            assert seconds
            assert all(later <= earlier * (1 + 1e-9) for earlier, later in itertools.pairwise(seconds))


def test_the_chosen_mesh_is_the_fastest_that_fits_and_serves_both_phases() -> None:
    topology = parse_topology("v5p:4x4x8")
    alone = [plan_mesh(LARGE, topology, [work], shown=1000) for work in (PREFILL, DECODE)]
    both = plan_mesh(LARGE, topology, [PREFILL, DECODE], shown=1000)
    for plan, at in zip(alone, range(2), strict=True):
        assert plan.chosen.fits
        assert all(plan.chosen.seconds <= other.seconds for other in plan.others)
        assert both.chosen.steps[at].seconds >= plan.chosen.seconds * (1 - 1e-9)
    least = [min(c.steps[i].seconds for c in (both.chosen, *both.others)) for i in range(2)]

    def score(candidate: Candidate) -> float:
        return sum(step.seconds / one for step, one in zip(candidate.steps, least, strict=True))

    assert all(score(both.chosen) <= score(other) + 1e-6 for other in both.others)
    # Both phases' caches stay on the device, whichever runs.
    caches = sum(step.memory["cache"] for step in both.chosen.steps)
    for step in both.chosen.steps:
        assert both.chosen.needed(step) == step.memory["parameters"] + step.memory["temporaries"] + caches


def test_a_given_mesh_is_kept_and_judged() -> None:
    sizes = {"context": 4, "expert": 16, "tensor": 8}
    plan = plan_mesh(LARGE, parse_topology("v5p:8x8x8"), [DECODE], mesh=sizes)
    assert plan.sizes == {"data": 1, **sizes}
    assert plan.given
    assert "as given" in str(plan)
    with pytest.raises(ShardingError, match="sizes must multiply to 512"):
        plan_mesh(LARGE, parse_topology("v5p:8x8x8"), [DECODE], mesh={"tensor": 8})
    with pytest.raises(ShardingError, match="num_experts doesn't allow"):
        plan_mesh(LARGE, parse_topology("v5p:8x8x8"), [DECODE], mesh={"expert": 64, "tensor": 8})


def test_what_was_chosen_is_said() -> None:
    text = str(plan_mesh(LARGE, parse_topology("v5p:4x4x8"), [PREFILL, DECODE]))
    for word in ("zigzag order", "ragged exchange", "limited by", "next best", "KDA (69 layers)", "of 95.74 GiB"):
        assert word in text
    switch = str(plan_mesh(MEDIUM, chip_named("h200"), [DECODE], devices=8))
    assert "the ragged one runs on TPUs only" in switch


def test_a_prefill_of_equal_parts_runs_in_zigzag_order() -> None:
    model = StepModel(LARGE, chip_named("v5p"))
    sizes = {"data": 1, "context": 8, "expert": 1, "tensor": 8}
    cost = model.cost(sizes, PREFILL)
    assert cost.layout == "zigzag"
    assert cost.spread.split
    # Few tokens run on all devices, and whole rows need no order.
    assert not model.cost(sizes, Workload("prefill", 1, 512, 2**17)).spread.split


@pytest.mark.parametrize("kind", ["TPU v5", "NVIDIA H200"])
def test_a_call_takes_the_order_that_costs_less(kind: str) -> None:
    sizes = {"context": 4, "tensor": 8}
    # Few tokens attend as much in either order, and moving them costs; many leave the last device most of the work.
    assert cheaper_layout(LARGE, sizes, kind, "prefill", 1, 2048, 2048) == "contiguous"
    assert cheaper_layout(LARGE, sizes, kind, "prefill", 1, 2**20, 2**20) == "zigzag"
    assert cheaper_layout(LARGE, sizes, kind, "train", 1, 2**17, 0) == "zigzag"
    assert cheaper_layout(LARGE, sizes, "cpu", "prefill", 1, 2048, 2048) == "zigzag"


def test_gpus_that_split_the_heads_share_long_selections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reads the index keys of a part of the rows; nobody does on TPUs, whose kernel takes longer rows only."""
    sizes, work = {"expert": 4, "tensor": 4}, Workload("decode", 64, 1, 2**17)

    def attention(chip: str) -> float:
        parts = StepModel(LARGE, chip_named(chip)).cost(sizes, work).parts
        return next(part.memory for part in parts if part.name == "attention")

    shared, tpu = attention("h200"), attention("v5p")
    monkeypatch.setattr(shared_selection, "SHARED_FROM", 2**60)
    alone = attention("h200")
    assert LARGE.dsa is not None
    rows = 64 // 4
    keys = len(LARGE.mla.layers) * rows * 2**17 * 2 * LARGE.dsa.head_dim
    assert alone - shared == pytest.approx(0.75 * keys / chip_named("h200").hbm_bandwidth)
    assert attention("v5p") == tpu


def test_a_mesh_decoder_asks_for_the_order_of_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def answer(config: object, sizes: object, kind: str, *work: object) -> str:
        asked.append(work)
        return "contiguous"

    monkeypatch.setattr("kimi_jax.planning.strategy.cheaper_layout", answer)
    decoder = MeshDecoder(TINY, make_mesh({"context": 2}))
    tokens, cache = jnp.zeros((1, 300), jnp.int32), Decoder(TINY).allocate(1, 512)
    assert decoder._prepared(tokens, cache, None)[0].layout == "contiguous"
    assert asked == [("prefill", 1, 512, 512)]
    zigzag = MeshDecoder(TINY, make_mesh({"context": 2}), layout="zigzag")
    assert zigzag._prepared(tokens, cache, None)[0].layout == "zigzag"
    assert len(asked) == 1


def test_pieces_of_a_prompt_do_what_the_prompt_does() -> None:
    """Each attends what came before it: in all the same pairs of queries and keys, and less memory at a time."""
    model, sizes = StepModel(LARGE, chip_named("v5p")), {"data": 1, "context": 8, "expert": 1, "tensor": 8}
    whole = model.cost(sizes, Workload("prefill", 1, 2**20, 2**20))
    piece = model.cost(sizes, Workload("prefill", 1, 2**19, 2**20))
    assert piece.workload.prefix == 2**18
    (one,), (half,) = ([part for part in cost.parts if part.name == "attention"] for cost in (whole, piece))
    assert 2 * half.compute == pytest.approx(one.compute, rel=1e-3)
    assert piece.memory["temporaries"] < 0.6 * whole.memory["temporaries"]


def test_training_is_cut_into_as_few_parts_as_fit() -> None:
    work = Workload("train", 64, 4096, 0)
    roomy = plan_mesh(MEDIUM, chip_named("v5p"), [work], devices=64, limit=2**60).chosen.steps[0]
    assert roomy.micro_batches == 1
    plan = plan_mesh(MEDIUM, parse_topology("v5p:2x2x4"), [work])
    step = plan.chosen.steps[0]
    assert step.micro_batches > 1
    assert plan.chosen.fits
    fewer = StepModel(MEDIUM, chip_named("v5p")).cost(plan.sizes, work, step.micro_batches // 2)
    assert sum(fewer.memory.values()) > plan.chosen.limit
    assert f"{step.micro_batches} micro-batches" in str(plan)
    # Training has float32 parameters, as many gradients, and at least one moment of each.
    values = sum(spec.size for spec in named_specs(Decoder(MEDIUM).specs).values())
    assert step.memory["parameters"] >= 4 * values / 16
    assert step.memory["gradients"] == step.memory["parameters"] <= step.memory["optimizer"]


def test_what_does_not_fit_says_what_would() -> None:
    with pytest.raises(PlanError, match=r"decode doesn't fit on 16 v5p devices: .* GiB may be used\. .* 64 devices"):
        plan_mesh(LARGE, chip_named("v5p"), [DECODE], devices=16)
    with pytest.raises(PlanError, match=r"rows=\d+ for decode") as caught:
        plan_mesh(MEDIUM, parse_topology("v6e:2x2"), [Workload("decode", 512, 1, 2**17)])
    rows = int(str(caught.value).split("rows=")[1].split(" ")[0])
    assert plan_mesh(MEDIUM, parse_topology("v6e:2x2"), [Workload("decode", rows, 1, 2**17)]).chosen.fits
    with pytest.raises(PlanError):
        plan_mesh(MEDIUM, parse_topology("v6e:2x2"), [Workload("decode", 2 * rows, 1, 2**17)])


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (Workload("decode", 1, 1, 2**21), "max_position_embeddings=1048576"),
        (Workload("train", 1, 2**21, 0), "max_position_embeddings=1048576"),
    ],
)
def test_rows_longer_than_the_model_allows_are_refused(work: Workload, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_mesh(MEDIUM, parse_topology("v6e:2x2"), [work])


def test_workloads_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="don't hold tokens=9"):
        Workload("prefill", 1, 9, 8)
    with pytest.raises(ValueError, match="must be 1 or more"):
        Workload("decode", 0, 1, 8)
    with pytest.raises(ValueError, match="number of devices"):
        plan_mesh(TINY, chip_named("v5e"), [DECODE])
    with pytest.raises(ValueError, match="at least one phase"):
        plan_mesh(TINY, chip_named("v5e"), [], devices=4)


def test_local_devices_get_a_mesh() -> None:
    assert choose_mesh(TINY, jax.devices()[:1])[0] == {}
    sizes, reason = choose_mesh(TINY, jax.devices()[:4])
    assert math.prod(sizes.values()) == 4
    assert set(sizes) <= set(MESH_AXES)
    MeshDecoder(TINY, make_mesh(sizes))
    assert "no figures of 'cpu'" in reason

    class Device:
        device_kind = "NVIDIA H200"

        def memory_stats(self) -> dict[str, int]:
            return {"bytes_limit": 100 * 10**9}

    sizes, reason = choose_mesh(MEDIUM, [Device()] * 8)
    assert math.prod(sizes.values()) == 8
    assert "h200" in reason
    with pytest.raises(PlanError, match=r"93\.13 GiB may be used"):
        choose_mesh(LARGE, [Device()] * 8)


def test_a_model_without_packed_experts_needs_more() -> None:
    sizes = dict.fromkeys(MESH_AXES, 1)
    packed = StepModel(PACKED, chip_named("v5e")).parameter_bytes(sizes, train=False)
    plain = StepModel(replace(PACKED, quantization=None), chip_named("v5e")).parameter_bytes(sizes, train=False)
    assert packed["experts"] * 16 * 2 == plain["experts"] * 17 / 2
    assert {k: v for k, v in packed.items() if k != "experts"} == {k: v for k, v in plain.items() if k != "experts"}


def test_groups_are_compact_boxes() -> None:
    assert [box(n, 3) for n in (1, 2, 8, 16, 128)] == [(1, 1, 1), (1, 1, 2), (2, 2, 2), (2, 2, 4), (4, 4, 8)]
    chip = chip_named("v5p")
    group = Group.of(chip, 8)
    assert group.gather_bandwidth == 3 * chip.link_bandwidth
    assert group.gather(8e9) == pytest.approx(7e9 / 300e9 + 3e-6)
    assert Group.of(chip, 1).reduce(1e9) == 0.0
    half = chip_named("tpu7x")
    assert Group.of(half, 2).gather_bandwidth == half.pair_bandwidth


def test_configs_are_found_by_name_file_and_directory(tmp_path: object) -> None:
    assert {"kimi-k31-pro", "kimi-linear-48b-a3b", "kimi-tiny"} <= set(named_configs())
    file = named_configs()["kimi-k3-tiny"]
    assert find_config(file) == find_config("kimi-k3-tiny")
    assert find_config(named_configs()["kimi-tiny"].parent)[0] == "kimi-tiny"
    with pytest.raises(FileNotFoundError, match="kimi-linear-48b-a3b"):
        find_config("kimi-k9")
