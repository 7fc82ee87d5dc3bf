"""Reports as text, JSON and a picture."""

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from kimi_jax.planning import (
    FailedProgram,
    PlanReport,
    ProgramReport,
    chip_named,
    peak_rss_bytes,
    render,
    report_failure,
    report_program,
)
from kimi_jax.planning.picture import Bar, memory_picture

ROWS, WIDTH, STEPS = 32, 64, 5
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jax.make_mesh((1, 8), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


@pytest.fixture(scope="module")
def compiled(mesh: Mesh) -> jax.stages.Compiled:
    def body(cache: jax.Array, weights: jax.Array) -> jax.Array:
        def step(carry: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(jax.lax.psum(carry @ weight, "tensor")), None

        return jax.lax.scan(step, cache, weights)[0]

    weights = PartitionSpec(None, None, None)
    shaped = jax.shard_map(
        body, mesh=mesh, in_specs=(PartitionSpec(), weights), out_specs=PartitionSpec(), check_vma=False
    )
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
        for shape in ((ROWS, WIDTH), (STEPS, WIDTH, WIDTH))
    ]
    return jax.jit(shaped, donate_argnums=0).lower(*arguments).compile()


@pytest.fixture(scope="module")
def program(mesh: Mesh, compiled: jax.stages.Compiled) -> ProgramReport:
    sizes = {"parameters": STEPS * WIDTH * WIDTH * 4, "cache": ROWS * WIDTH * 4}
    return report_program(
        "decode", compiled, mesh, sizes, ROWS, chip_named("v5e"), compile_seconds=1.5, compile_peak_rss_bytes=2**30
    )


@pytest.fixture(scope="module")
def plan(program: ProgramReport) -> PlanReport:
    return PlanReport(
        model="tiny <&> model",
        topology="v5e:2x4",
        chip="v5e",
        mesh={"data": 1, "tensor": 8},
        rules={"heads": "tensor", "experts": ("expert", "tensor"), "layers": None},
        options={"batch": 32, "cache": "bfloat16"},
        programs=(program, replace(program, name="prefill")),
        failed=(FailedProgram("train", "Ran out of memory", 20 * 2**30, 15 * 2**30),),
        versions={"jax": "0.10.2"},
    )


def test_a_program_is_reported_by_what_it_holds(program: ProgramReport) -> None:
    parameters, cache = STEPS * WIDTH * WIDTH * 4, ROWS * WIDTH * 4
    memory = program.memory
    assert memory.arguments == parameters + cache
    assert memory.outputs == memory.aliased == cache
    assert memory.peak == parameters + cache + memory.temporaries
    assert program.segments()["parameters"] == parameters
    assert sum(program.segments().values()) == memory.total
    assert program.flops == {"f32": STEPS * 2 * ROWS * WIDTH * WIDTH}
    (row,) = program.collectives
    assert (row.kind, row.axes, row.executions, row.bytes) == ("all-reduce", ("tensor",), STEPS, STEPS * cache)
    assert program.num_devices == 8
    # XLA's own figure has the loop's body once.
    assert program.xla_flops is not None
    assert program.xla_flops < program.total_flops
    assert program.tokens_per_second == pytest.approx(ROWS / program.estimate.overlapped_seconds)
    assert program.tokens_per_second_serial < program.tokens_per_second


def test_json_comes_back_as_it_was(plan: PlanReport) -> None:
    text = render(plan, "json")
    again = PlanReport.from_json(text)
    assert again.to_json() == text
    assert again.programs == plan.programs
    assert again.failed == plan.failed
    plain = json.loads(text)
    assert plain["schema"] == "kimi-jax plan 1"
    assert plain["fits"] is False
    first = plain["programs"][0]
    assert first["segments"]["cache"] == ROWS * WIDTH * 4
    assert first["memory"]["peak"] == plan.programs[0].memory.peak
    assert first["estimate"]["bound"] == plan.programs[0].estimate.bound


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "other"}, "schema='other' of a plan isn't 'kimi-jax plan 1'"),
        ({"programs": [{"memory": {}}]}, "lacks or has an unknown field"),
    ],
)
def test_json_of_another_form_is_refused(plan: PlanReport, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PlanReport.from_dict({**plan.to_dict(), **change})


def test_text_says_what_is_in_use_and_what_was_assumed(plan: PlanReport) -> None:
    text = render(plan)
    for part in (
        "tiny <&> model on v5e:2x4 (mesh data=1, tensor=8)",
        "heads->tensor, experts->expert+tensor, layers->-",
        "16.00 GiB of memory, of which a program may use 15.75 GiB",
        "parameters",
        "temporaries",
        "all-reduce",
        "train: not compiled: Ran out of memory",
        "Assumed:",
        "one bf16 pass",
        "It doesn't fit.",
        "compiled in",
    ):
        assert part in text
    assert "Everything fits." in render(replace(plan, failed=()))


def test_the_picture_is_well_formed_and_drawn_to_scale(plan: PlanReport) -> None:
    root = ElementTree.fromstring(render(plan, "svg"))
    assert root.tag == f"{SVG}svg"
    texts = ["".join(element.itertext()) for element in root.iter(f"{SVG}text")]
    assert "tiny <&> model on v5e:2x4: memory of one device" in texts
    assert {"decode", "prefill", "train", "parameters", "cache", "free"} <= set(texts)

    picture = memory_picture("t", "s", [Bar("one", {"parameters": 3 * 2**30, "cache": 2**30})], 8 * 2**30)
    widths = {
        title.text: float(box.attrib["width"])
        for box in ElementTree.fromstring(picture).iter(f"{SVG}rect")
        for title in box.iter(f"{SVG}title")
    }
    assert widths["parameters: 3.00 GiB"] == pytest.approx(3 * widths["cache: 1.00 GiB"], abs=0.3)
    assert re.search(r"<script|href", picture) is None


def test_a_bar_that_is_too_long_stays_in_the_picture() -> None:
    root = ElementTree.fromstring(memory_picture("t", "s", [Bar("one", {"cache": 40 * 2**30})], 8 * 2**30))
    width = float(root.attrib["width"])
    boxes = list(root.iter(f"{SVG}rect"))
    assert all(float(box.attrib.get("x", 0)) + float(box.attrib["width"]) <= width for box in boxes)
    label = next(text for text in root.iter(f"{SVG}text") if text.text == "40.00 GiB (too large)")
    # Some 8 units a letter.
    assert float(label.attrib["x"]) + 8 * len("40.00 GiB (too large)") <= width
    assert "40.00 GiB (too large)" in ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]


def test_categories_must_be_in_the_arguments(mesh: Mesh, compiled: jax.stages.Compiled) -> None:
    chip = chip_named("v5e")
    with pytest.raises(ValueError, match="add up to 1000000000 bytes on one device, but the program's arguments"):
        report_program("decode", compiled, mesh, {"parameters": 10**9}, ROWS, chip)
    with pytest.raises(ValueError, match="must not be negative"):
        report_program("decode", compiled, mesh, {"parameters": -1}, ROWS, chip)
    with pytest.raises(ValueError, match="tokens_per_step=0"):
        report_program("decode", compiled, mesh, {}, 0, chip)


@pytest.mark.parametrize(
    ("message", "needed", "available"),
    [
        (
            "RESOURCE_EXHAUSTED: the total memory required for HLO temporaries (20.00G) exceeds available HBM (15.75G).",
            20 * 2**30,
            int(15.75 * 2**30),
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory. Used 512.5M of 1.5G hbm. Exceeded by ...",
            int(512.5 * 2**20),
            3 * 2**29,
        ),
        ("INVALID_ARGUMENT: no", None, None),
    ],
)
def test_failures_say_how_much_memory_is_missing(message: str, needed: int | None, available: int | None) -> None:
    failed = report_failure("train", RuntimeError(message))
    assert (failed.needed_bytes, failed.available_bytes) == (needed, available)
    assert failed.reason == message


def test_the_process_knows_its_peak() -> None:
    assert peak_rss_bytes() > 10 * 2**20
