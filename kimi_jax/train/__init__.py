"""Training: next-token loss on packed rows, AdamW and Muon, expert balancing by quantiles, and the indexer's own loss."""

from kimi_jax.train.balancing import margin_histogram, quantile_bias
from kimi_jax.train.batches import Batch, Example, pack, prefetch
from kimi_jax.train.checkpoints import Checkpoints
from kimi_jax.train.init import init_params
from kimi_jax.train.losses import IndexerStage, token_losses
from kimi_jax.train.metrics import MetricsLog, plot_metrics, read_metrics
from kimi_jax.train.optimizer import OptimizerConfig, make_optimizer, wsd_schedule
from kimi_jax.train.stages import Stage, TrainStep, compile_stage, run_stage
from kimi_jax.train.step import StepConfig, TrainState, evaluate_batch, init_state, make_train_step

__all__ = [
    "Batch",
    "Checkpoints",
    "Example",
    "IndexerStage",
    "MetricsLog",
    "OptimizerConfig",
    "Stage",
    "StepConfig",
    "TrainState",
    "TrainStep",
    "compile_stage",
    "evaluate_batch",
    "init_params",
    "init_state",
    "make_optimizer",
    "make_train_step",
    "margin_histogram",
    "pack",
    "plot_metrics",
    "prefetch",
    "quantile_bias",
    "read_metrics",
    "run_stage",
    "token_losses",
    "wsd_schedule",
]
