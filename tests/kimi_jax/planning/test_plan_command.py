"""`kimi-jax plan`, from the command line to a report."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from kimi_jax.cli import main
from kimi_jax.planning import PlanReport
from kimi_jax.planning.compile import abstract_cache, abstract_params, assumed_trips
from kimi_jax.planning.configs import find_config
from kimi_jax.planning.step_cost import StepModel, Workload
from kimi_jax.planning.topology import parse_topology
from pallas_kernels.mxfp4 import Mxfp4
from pallas_kernels.target import platform, traced_for


@pytest.mark.slow
def test_a_small_model_on_a_topology_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = tmp_path / "plan.json", tmp_path / "plan.svg"
    status = main(
        "plan kimi-linear-tiny --topology v5e:2x2 --mesh expert=2,tensor=2 --prefill-tokens 512 --decode-slots 4 "
        f"--context 512 --json {files[0]} --svg {files[1]}".split()
    )
    said = capsys.readouterr()
    assert status == 0
    assert "Everything fits." in said.out
    assert "mesh data=1,context=1,expert=2,tensor=2: as given" in said.out
    assert "compiled decode in" in said.err
    plain = json.loads(files[0].read_text())
    report = PlanReport.from_dict(plain)
    assert [program.name for program in report.programs] == ["prefill", "decode"]
    assert plain["strategy"]["mesh"] == report.mesh
    config = find_config("kimi-linear-tiny")[1]
    model = StepModel(config, parse_topology("v5e:2x2").chip)
    for program, work in zip(
        report.programs, (Workload("prefill", 1, 512, 512), Workload("decode", 4, 1, 512)), strict=True
    ):
        memory = model.cost(report.mesh, work).memory
        # What the compiler was given is what was planned, but for the lengths of rows.
        assert program.categories["parameters"] == memory["parameters"]
        assert 0 <= program.categories["cache"] - memory["cache"] <= 4 * work.rows
        assert not program.estimate.lower_bound
        assert program.memory.temporaries <= memory["temporaries"]
    assert files[1].read_text().startswith("<svg")


def test_a_choice_is_shown_without_compiling(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    assert main(f"plan kimi-k31-pro --topology v5p:8x8x8 --decode-slots 64 --estimate --json {file}".split()) == 0
    assert "the fastest of" in capsys.readouterr().out
    assert json.loads(file.read_text())["strategy"]["phases"]["decode"]["workload"]["rows"] == 64
    assert main(["plan", "kimi-linear-48b-a3b", "--topology", "h200:8", "--decode-slots", "8"]) == 0
    assert "aren't compiled" in capsys.readouterr().out
    # A mesh that was asked for is judged even where it doesn't fit.
    assert main(["plan", "kimi-k31-pro", "--topology", "h200:8", "--mesh", "tensor=8", "--decode-slots", "8"]) == 1
    assert "which doesn't fit" in capsys.readouterr().out


def test_a_picture_without_programs_is_refused_before_anything_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    files = tmp_path / "plan.json", tmp_path / "plan.svg"
    for options in ("--topology v5e:2x2 --estimate", "--topology h200:8"):
        assert main(f"plan kimi-k3-tiny {options} --json {files[0]} --svg {files[1]}".split()) == 1
        assert "--svg needs compiled programs" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--topology v5q:2x2", "names the chip 'v5q'"),
        ("--topology v5e:2x2 --mesh tensor=8", "sizes must multiply to 4"),
        ("--topology v5e:2x2 --mesh speed=4", "mesh axis 'speed'"),
        ("--topology v5e:4x4 --mesh tensor=16", "doesn't allow tensor=16"),
        ("--topology v5e:2x2 --phases dream", "some of prefill, decode, train"),
        ("--topology v5e:2x2 --phases decode --prefill-tokens 9", "--prefill-tokens has no effect"),
        ("--topology v5e:2x2 --prefill-tokens 512 --prefill-pieces 3", "it must divide the 512 tokens of a prompt"),
        ("--topology v5e:2x2 --decode-slots 0", "--decode-slots 0; it must be 1 or more"),
        ("--topology v5e:2x2 --decode-slots 1 --context 99999999", "max_position_embeddings"),
    ],
)
def test_mistakes_are_explained(options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"plan kimi-k3-tiny {options}".split()) == 1
    said = capsys.readouterr().err
    assert said.startswith("kimi-jax: error: ")
    assert message in said


def test_an_unknown_model_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "kimi-k9", "--topology", "v5e:2x2"]) == 1
    assert "kimi-linear-48b-a3b" in capsys.readouterr().err


def test_programs_are_traced_for_the_platform_that_they_are_compiled_for() -> None:
    seen = []

    @jax.jit
    def function(x: jax.Array) -> jax.Array:
        seen.append(platform())
        return x

    for target in ("cpu", "tpu", "cpu"):
        with traced_for(target):  # type: ignore[arg-type]
            function.lower(jax.ShapeDtypeStruct((), jnp.float32))
    assert seen == ["cpu", "tpu", "cpu"]
    assert platform() == "cpu"


def test_loops_over_experts_run_once_for_each_tile_of_an_even_routing() -> None:
    config = find_config("kimi-linear-48b-a3b")[1]
    step = StepModel(config, parse_topology("v5e:4x4").chip).cost(
        {"data": 1, "context": 1, "expert": 16, "tensor": 1}, Workload("decode", 16 * 512, 1, 4096)
    )
    # 512 tokens and 8 experts each on every device: 4096 rows for its 16 experts, 256 for each.
    found = assumed_trips(config, step, "tiles_of_256_rows/while tiles_of_64_rows scored_tiles_of_512_keys")
    assert found["expert_windows"] == 1
    assert found["tiles_of_256_rows"] == 16
    assert found["tiles_of_64_rows"] == 64
    assert found["scored_tiles_of_512_keys"] == 8
    # Few rows meet few experts.
    few = StepModel(config, parse_topology("v5e:4x4").chip).cost(
        step_sizes := {"expert": 16}, Workload("decode", 16, 1, 4096)
    )
    assert step_sizes
    rows = 8
    expected = np.round(16 * (1 - (15 / 16) ** rows))
    assert assumed_trips(config, few, "tiles_of_8_rows")["tiles_of_8_rows"] == expected


def test_abstract_arguments_have_the_sharding_and_packing_of_real_ones() -> None:
    from kimi_jax.parallel import MeshDecoder

    config = find_config("kimi-k3-tiny-mxfp4")[1]
    mesh = jax.make_mesh((1, 2, 2, 1), ("data", "context", "expert", "tensor"), axis_types=(AxisType.Auto,) * 4)
    decoder = MeshDecoder(config, mesh)
    params = abstract_params(decoder)
    assert isinstance(params["experts"]["down"], Mxfp4)
    cache = abstract_cache(decoder, 2, 64, 2)
    real = decoder.allocate(2, 64)
    for mine, theirs in zip(jax.tree.leaves(cache), jax.tree.leaves(real), strict=True):
        assert (mine.shape, mine.dtype, mine.sharding) == (theirs.shape, theirs.dtype, theirs.sharding)
    trained = jax.tree.leaves(
        abstract_params(MeshDecoder(config, mesh), train=True), is_leaf=lambda x: isinstance(x, Mxfp4)
    )
    assert any(isinstance(leaf, Mxfp4) for leaf in trained), "only a config without quantization unpacks"
