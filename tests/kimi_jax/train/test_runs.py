import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.checkpoint.save import save_huggingface
from kimi_jax.model import Decoder
from kimi_jax.train import (
    Batch,
    Checkpoints,
    MetricsLog,
    OptimizerConfig,
    Stage,
    StepConfig,
    TrainState,
    compile_stage,
    init_params,
    plot_metrics,
    read_metrics,
    run_stage,
    wsd_schedule,
)
from tests.golden_data import model
from tests.kimi_jax.train.tiny import batch, config

DECODER = Decoder(config(), dense_attention=True)
STAGE = Stage("short", 6, OptimizerConfig(1e-3), wsd_schedule(6, warmup=1, decay=2), StepConfig(dtype=jnp.float32))


class Stopped(Exception):
    """The run was cut off."""


def batches(steps: Sequence[int]) -> Iterator[Batch]:
    return (batch(step) for step in steps)


def test_a_run_that_was_cut_off_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    step = compile_stage(DECODER, STAGE, batch())
    said: list[str] = []

    def run(folder: Path, given=batches, **options: object) -> TrainState:
        states = Checkpoints(folder / "states")
        try:
            return run_stage(
                DECODER,
                init_params(DECODER),
                STAGE,
                given,
                train_step=step,
                log=MetricsLog(folder / "metrics.jsonl"),
                log_every=1,
                checkpoints=states,
                save_every=2,
                say=said.append,
            )
        finally:
            states.close()

    def cut_off(steps: Sequence[int]) -> Iterator[Batch]:
        for step in steps:
            if step == 5:
                raise Stopped
            yield batch(step)

    whole = run(tmp_path / "whole")
    with pytest.raises(Stopped):
        run(tmp_path / "cut", cut_off)
    resumed = run(tmp_path / "cut")
    assert "short: goes on at step 4 of 6" in said
    assert int(resumed.step) == 6
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)
    losses = [
        [(record["step"], record["loss"]) for record in read_metrics(tmp_path / name / "metrics.jsonl")]
        for name in ("whole", "cut")
    ]
    assert losses[0] == losses[1]
    assert [number for number, _ in losses[0]] == [1, 2, 3, 4, 5, 6]

    # Run again, a finished stage has nothing to do.
    asked: list[int] = []

    def ask(steps: Sequence[int]) -> Iterator[Batch]:
        asked.extend(steps)
        return iter(())

    jax.tree.map(np.testing.assert_array_equal, run(tmp_path / "cut", ask), whole)
    assert asked == []


def test_restoring_needs_a_state(tmp_path: Path) -> None:
    states = Checkpoints(tmp_path / "states")
    with pytest.raises(FileNotFoundError, match="no saved state here"):
        states.restore(TrainState(jnp.int32(0), {}, ()))
    states.close()
    with pytest.raises(ValueError, match="keep=0"):
        Checkpoints(tmp_path / "states", keep=0)


def test_metrics_survive_a_crash_in_the_middle_of_a_line(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "deep" / "metrics.jsonl")
    log.write(stage="a", step=1, loss=np.float32(2.5), overflow=float("inf"))
    with log.path.open("a") as file:
        file.write('{"stage": "a", "st')
    assert read_metrics(log.path) == [{"stage": "a", "step": 1, "loss": 2.5, "overflow": None}]
    log.path.write_text('{"broken\n{"stage": "a"}\n')
    with pytest.raises(ValueError, match="line 1 isn't JSON"):
        read_metrics(log.path)


def test_metrics_are_drawn(tmp_path: Path) -> None:
    records = [{"stage": "a", "step": 1, "loss": 3.0}, {"stage": "b", "step": 1, "loss": 2.0, "indexer_kl": 0.1}]
    plot_metrics(records, tmp_path / "metrics.svg", ("loss", "indexer_kl"))
    drawn = (tmp_path / "metrics.svg").read_text()
    assert "<svg" in drawn
    assert len(drawn) > 5000


@pytest.mark.parametrize("family", ["kimi-k31-tiny", "kimi-linear-tiny"])
def test_what_is_saved_is_what_was_loaded(family: str, tmp_path: Path) -> None:
    original = model(family)
    save_huggingface(original.config, original.params, tmp_path / "saved", shard_bytes=200_000)
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    again = type(original).from_pretrained(tmp_path / "saved", dtype="float32", progress=False)
    jax.tree.map(np.testing.assert_array_equal, again.params, original.params)
    with pytest.raises(FileExistsError, match="name a folder that doesn't"):
        save_huggingface(original.config, original.params, tmp_path / "saved")
