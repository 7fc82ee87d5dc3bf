"""Muon for matrices inside layers, AdamW for everything else, and the warm-up, stable, decay schedule."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from kimi_jax.model import Decoder
from kimi_jax.params import Params, ParamSpec, is_spec, named_specs

Group = Literal["muon", "adamw", "frozen"]


@dataclass(frozen=True)
class OptimizerConfig:
    """Settings of `make_optimizer`.

    Attributes:
        learning_rate: peak; of Muon (with updates scaled to AdamW's usual size, 0.2 · √max(out, in)) and of AdamW alike.
        adamw_scale: AdamW's learning rate as a multiple of it.
        weight_decay: decoupled, on matrices only.
        clip_norm: bound on the global norm of gradients.
        beta1: AdamW's first moment.
        beta2: AdamW's second moment.
        momentum: Muon's.
    """

    learning_rate: float
    adamw_scale: float = 1.0
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.95
    momentum: float = 0.95

    def __post_init__(self) -> None:
        for name in ("learning_rate", "adamw_scale", "clip_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r}; it must be positive.")
        for name in ("beta1", "beta2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r}; it must be at least 0 and less than 1.")
        if not self.weight_decay >= 0:
            raise ValueError(f"weight_decay={self.weight_decay!r}; it must not be negative.")


def wsd_schedule(steps: int, *, warmup: int, decay: int, peak: float = 1.0, floor: float = 0.0) -> optax.Schedule:
    """Warm-up, stable, decay: a factor that rises to `peak` in `warmup` steps and falls to `floor` in the last `decay`.

    Raises:
        ValueError: the parts don't fit into `steps`, or not 0 <= floor <= peak.
    """
    if not 0 <= floor <= peak:
        raise ValueError(f"floor={floor} and peak={peak}: 0 <= floor <= peak must hold.")
    if warmup < 0 or decay < 0 or warmup + decay > steps:
        raise ValueError(f"warmup={warmup} and decay={decay} must not be negative and fit into {steps} steps.")
    parts = [
        optax.linear_schedule(peak / (warmup + 1), peak, warmup),
        optax.constant_schedule(peak),
        optax.linear_schedule(peak, floor, decay),
    ]
    return optax.join_schedules(parts, [warmup, steps - decay])


def groups(decoder: Decoder, trainable: Callable[[str], bool] = lambda path: True) -> Params:
    """Which optimizer a parameter belongs to, as a tree like the parameters.

    Args:
        decoder: the model.
        trainable: by dotted path, such as `mla.indexer.key`; what it refuses is frozen. Router biases always are:
            balancing sets them.
    """
    paths = iter(named_specs(decoder.specs))

    def group(spec: ParamSpec) -> Group:
        path = next(paths)
        if path.endswith("correction_bias") or not trainable(path):
            return "frozen"
        return "muon" if _is_matrix(spec) and path != "moe.router" else "adamw"

    return jax.tree.map(group, decoder.specs, is_leaf=is_spec)


def make_optimizer(
    decoder: Decoder,
    config: OptimizerConfig,
    schedule: optax.Schedule,
    trainable: Callable[[str], bool] = lambda path: True,
) -> optax.GradientTransformation:
    """The optimizer of the parameters that `decoder` describes.

    Args:
        decoder: the model.
        config: settings.
        schedule: factor of the learning rates by step.
        trainable: see `groups`.

    Raises:
        ValueError: nothing is trainable.

    Source: Moonlight (arXiv 2502.16982) for Muon's scale and weight decay.
    """
    of = groups(decoder, trainable)
    used = set(jax.tree.leaves(of)) - {"frozen"}
    if not used:
        raise ValueError("trainable refuses every parameter; it must accept the dotted path of at least one.")

    def rate(scale: float) -> optax.Schedule:
        return lambda step: scale * config.learning_rate * schedule(step)

    def of_group(name: Group, make: Callable[[ParamSpec], Any]) -> Params:
        """A tree for the parameters of one group as optax shows them to its optimizer."""
        return jax.tree.map(
            lambda group, spec: make(spec) if group == name else optax.MaskedNode(),
            of,
            decoder.specs,
            is_leaf=lambda x: isinstance(x, str),
        )

    def scale_to_adamw(updates: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        scales = of_group("muon", _rms_scale)
        return jax.tree.map(lambda update, scale: update * scale, updates, scales), state

    def no_state(params: Params) -> optax.EmptyState:
        return optax.EmptyState()

    muon = optax.chain(
        scale_by_muon(beta=config.momentum, weight_dimension_numbers=of_group("muon", _matrix_axes)),
        optax.GradientTransformation(no_state, scale_to_adamw),
        optax.add_decayed_weights(config.weight_decay),
        optax.scale_by_learning_rate(rate(1.0)),
    )
    adamw = optax.adamw(
        rate(config.adamw_scale),
        b1=config.beta1,
        b2=config.beta2,
        weight_decay=config.weight_decay,
        mask=of_group("adamw", lambda spec: len(spec.tensor_shape) > 1 and not spec.float32),
    )
    transforms = {"muon": muon, "adamw": adamw, "frozen": optax.set_to_zero()}
    frozen = jax.tree.map(lambda group: group == "frozen", of)
    # Gradients of what is frozen mustn't count in the norm.
    clip = optax.chain(optax.masked(optax.set_to_zero(), frozen), optax.clip_by_global_norm(config.clip_norm))
    return optax.chain(clip, optax.partition(transforms, of))


def _is_matrix(spec: ParamSpec) -> bool:
    """Matrices inside layers; convolutions and decay parameters are vectors by head or channel."""
    inside = spec.layers is not None and len(spec.tensor_shape) > 1
    return inside and not spec.float32 and spec.adapt in ("as stored", "heads")


def _matrix_axes(spec: ParamSpec) -> MuonDimensionNumbers:
    """`[out, in]`, with heads a part of `out`; every matrix of a stack is orthogonalised on its own."""
    stacked = len(spec.stack_shape)
    return MuonDimensionNumbers(
        reduction_axis=(len(spec.shape) - 1,), output_axis=tuple(range(stacked, len(spec.shape) - 1))
    )


def _rms_scale(spec: ParamSpec) -> float:
    *out, inner = spec.tensor_shape
    return 0.2 * math.sqrt(max(math.prod(out), inner))
