"""Running a stage of training: data in, state out, metrics and checkpoints on the way."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax

from kimi_jax.model import Decoder
from kimi_jax.params import Params
from kimi_jax.train.batches import Batch
from kimi_jax.train.checkpoints import Checkpoints
from kimi_jax.train.init import init_params
from kimi_jax.train.metrics import MetricsLog
from kimi_jax.train.optimizer import OptimizerConfig, make_optimizer
from kimi_jax.train.step import Metrics, StepConfig, TrainState, init_state, make_train_step

TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


@dataclass(frozen=True)
class Stage:
    """A stage of a run.

    Attributes:
        name: in metrics and messages.
        steps: how many.
        optimizer: settings of the optimizer.
        schedule: factor of the learning rate by step of this stage.
        step: what a step does.
        trainable: which parameters learn, by dotted path.
    """

    name: str
    steps: int
    optimizer: OptimizerConfig
    schedule: optax.Schedule
    step: StepConfig
    trainable: Callable[[str], bool] = lambda path: True

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"stage {self.name!r}: steps={self.steps!r}; it must be at least 1.")


def compile_stage(decoder: Decoder, stage: Stage, batch: Batch) -> TrainStep:
    """The step of a stage, compiled for batches like `batch` without running anything; may be called in a thread."""
    optimizer = make_optimizer(decoder, stage.optimizer, stage.schedule, stage.trainable)
    shapes = jax.eval_shape(lambda: init_state(init_params(decoder), optimizer))
    step: Any = make_train_step(decoder, optimizer, stage.step)  # a jitted function, as its type doesn't say
    return step.lower(shapes, batch).compile()


def run_stage(
    decoder: Decoder,
    params: Params,
    stage: Stage,
    batches: Callable[[Sequence[int]], Iterator[Batch]],
    *,
    train_step: TrainStep | None = None,
    log: MetricsLog | None = None,
    log_every: int = 20,
    checkpoints: Checkpoints | None = None,
    save_every: int = 500,
    say: Callable[[str], None] = print,
) -> TrainState:
    """Trains `params` (used up) for one stage and returns the state after it.

    Args:
        decoder: the model; with `dense_attention` where the stage wants it.
        params: float32 parameters as `decoder` describes them.
        stage: what to do.
        batches: gives the batches of the steps it is asked for, in order. A batch depends on its step alone, so that a
            run that resumes meets the same data.
        train_step: from `compile_stage`; None compiles when the first batch is there.
        log: where metrics go.
        log_every: steps from one record to the next; reading a metric waits for the device.
        checkpoints: where states are saved, every `save_every` steps and at the end; a state that is there is resumed.
        save_every: steps between saved states.
        say: prints a line of progress with every record.
    """
    optimizer = make_optimizer(decoder, stage.optimizer, stage.schedule, stage.trainable)
    state = init_state(params, optimizer)
    if checkpoints is not None and checkpoints.latest is not None:
        state = checkpoints.restore(state)
        say(f"{stage.name}: goes on at step {int(state.step)} of {stage.steps}")
    done = int(state.step)
    if log is not None:
        log.drop_after(stage.name, done)
    run = train_step or make_train_step(decoder, optimizer, stage.step)
    began, since = time.perf_counter(), done
    for number, batch in enumerate(batches(range(done, stage.steps)), start=done + 1):
        state, metrics = run(state, batch)
        if number == done + 1 or number % log_every == 0 or number == stage.steps:
            values: dict[str, Any] = {name: float(value) for name, value in metrics.items()}
            elapsed = time.perf_counter() - began
            rate = (number - since) * batch.tokens.size / elapsed
            if log is not None:
                log.write(stage=stage.name, step=number, **values, tokens_per_second=round(rate))
            shown = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
            say(f"{stage.name} {number}/{stage.steps}  {shown}  {rate:,.0f} tokens/s")
            began, since = time.perf_counter(), number
        if checkpoints is not None and (number % save_every == 0 or number == stage.steps):
            checkpoints.save(state)
    return state
