"""Compiles the programs of a plan for a topology that isn't there, and reports what they need."""

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from kimi_jax.cache import Cache
from kimi_jax.cache_format import IndexCache, KvCache
from kimi_jax.checkpoint.locate import packed_shapes
from kimi_jax.config import KimiConfig
from kimi_jax.parallel.decoder import MeshDecoder
from kimi_jax.parallel.experts import Exchange, block_and_window
from kimi_jax.params import Params, ParamSpec, is_spec
from kimi_jax.planning.report import (
    FailedProgram,
    PlanReport,
    ProgramReport,
    peak_rss_bytes,
    report_failure,
    report_program,
)
from kimi_jax.planning.step_cost import StepCost
from kimi_jax.planning.strategy import MeshPlan
from kimi_jax.planning.topology import Topology, topology_mesh, versions
from kimi_jax.sharding import RULES
from kimi_jax.train.batches import Batch
from kimi_jax.train.losses import IndexerStage
from kimi_jax.train.step import StepConfig, init_state, make_train_step
from pallas_kernels.mxfp4 import Mxfp4
from pallas_kernels.target import traced_for

Progress = Callable[[str], None]

_ROWS = re.compile(r"tiles_of_(\d+)_rows")
_KEYS = re.compile(r"(?:scored_)?tiles_of_(\d+)_keys")


def compile_plan(
    plan: MeshPlan,
    topology: Topology,
    model: str,
    *,
    train_indexer: bool = True,
    progress: Progress = lambda line: None,
) -> PlanReport:
    """Compiles every phase of a plan, one after the other.

    Args:
        plan: the mesh and what shall run on it.
        topology: what it shall run on.
        model: its name, for the report.
        train_indexer: whether a training step also trains the indexer of a model that has one.
        progress: is told what is compiled, and what came of it.

    Raises:
        TopologyError: libtpu isn't installed, or doesn't know the topology.
    """
    mesh = topology_mesh(topology.name, plan.sizes)
    programs, failed = [], []
    options: dict[str, Any] = {"mesh": plan.reason}
    for step in plan.chosen.steps:
        phase = step.workload.phase
        options |= {phase: _described(plan, step)}
        progress(f"compiling {phase}: {step.workload}")
        began, worked = time.monotonic(), time.process_time()
        found = compile_step(plan.config, step, mesh, topology, train_indexer=train_indexer)
        took = (
            f"{time.monotonic() - began:.0f} s ({time.process_time() - worked:.0f} s of processor time), "
            f"{peak_rss_bytes() / 2**30:.2f} GiB"
        )
        if isinstance(found, FailedProgram):
            failed.append(found)
            progress(f"{phase} can't be compiled ({took}): {found.reason}")
        else:
            programs.append(found)
            progress(f"compiled {phase} in {took}")
    return PlanReport(
        model,
        topology.name,
        topology.chip.name,
        plan.sizes,
        {name: list(axis) if isinstance(axis, tuple) else axis for name, axis in RULES.items()},
        options,
        tuple(programs),
        tuple(failed),
        versions(),
    )


def compile_step(
    config: KimiConfig, step: StepCost, mesh: jax.sharding.Mesh, topology: Topology, *, train_indexer: bool = True
) -> ProgramReport | FailedProgram:
    """Compiles one phase.

    A prefill and a decode step are `MeshDecoder.prefill` on bfloat16 weights (packed MXFP4 experts where the config says
    so) and on a cache that is given up for the new one. A training step is that of `kimi_jax.train`: float32 parameters,
    computation in bfloat16, all experts unpacked; its optimizer only adds the gradients up, so the state of a real one,
    which `StepCost.memory` knows, comes on top.

    Args:
        config: the model.
        step: the phase, and how it is to run.
        mesh: of the topology.
        topology: what it shall run on.
        train_indexer: whether a training step also trains the indexer of a model that has one.
    """
    work = step.workload
    train = work.phase == "train"
    if train:
        config = replace(config, quantization=None)
    layout = step.layout if step.spread.split else "zigzag"
    decoder = MeshDecoder(config, mesh, layout=layout, exchange=step.exchange)
    began = time.monotonic()
    # Tiles and blocks of the platform compiled for, not of this machine's.
    with jax.set_mesh(decoder.mesh), traced_for("tpu"):
        lowered, categories = (_train if train else _cached)(decoder, step, train_indexer)
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            return report_failure(work.phase, error)
    return report_program(
        work.phase,
        compiled,
        decoder.mesh,
        categories,
        work.rows * work.tokens,
        topology.chip,
        assumed_trips=assumed_trips(config, step, compiled.as_text() or ""),
        compile_seconds=time.monotonic() - began,
        compile_peak_rss_bytes=peak_rss_bytes(),
    )


def abstract_params(decoder: MeshDecoder, *, train: bool = False) -> Params:
    """Shapes, dtypes and shardings of the parameters; quantised experts packed, all float32 for training."""

    def leaf(spec: ParamSpec, split: PartitionSpec) -> Any:
        sharding = NamedSharding(decoder.mesh, split)
        if spec.has_experts and decoder.config.quantization is not None:
            packed = (jax.ShapeDtypeStruct(s, jnp.uint8, sharding=sharding) for s in packed_shapes(spec.shape))
            return Mxfp4(*packed)
        dtype = jnp.float32 if spec.float32 or train else jnp.bfloat16
        return jax.ShapeDtypeStruct(spec.shape, dtype, sharding=sharding)

    return jax.tree.map(leaf, decoder.specs, decoder.param_specs, is_leaf=is_spec)


def abstract_cache(
    decoder: MeshDecoder,
    rows: int,
    context: int,
    parts: int,
    *,
    kv_cache: KvCache | None = None,
    index_cache: IndexCache | None = None,
) -> Cache:
    """Shapes, dtypes and shardings of a cache, as `MeshDecoder.allocate` makes it."""

    def make() -> Cache:
        return Cache.allocate(
            decoder.config, rows, context, jnp.bfloat16, parts, kv_cache=kv_cache, index_cache=index_cache
        )

    shapes = jax.eval_shape(make)
    return jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(decoder.mesh, spec)),
        shapes,
        decoder.cache_specs(rows, kv_cache, index_cache),
    )


def assumed_trips(config: KimiConfig, step: StepCost, text: str) -> dict[str, int]:
    """How often loops run whose length depends on data, by parts of their names in a compiled program.

    Routing is taken as even: with r rows a device and window, tiles of c rows and E experts of its own,
    E · (1 - (1 - 1/E)^r) · ceil(r / E / c) of them. A loop over tiles of c keys runs to the last key that its queries see:
    for all places of a cache when decoding, for what is before a piece of a prompt, half of the new tokens and half a tile
    on average over these.

    Args:
        config: the model.
        step: the phase.
        text: of the program; its loops say in their names how large their tiles are.
    """
    moe, at, work = config.moe, step.spread, step.workload
    found: dict[str, int] = {}
    if moe.layers:
        rows, windows = _rows_a_window(config, step)
        own = moe.num_experts // step.experts_over
        touched = own * (1 - (1 - 1 / own) ** rows) if own > 1 else 1
        found |= {
            "expert_windows": windows,
            "expert_sums": math.ceil(moe.num_experts_per_token * own / moe.num_experts),
        }
        for match in set(_ROWS.finditer(text)):
            tile = int(match[1])
            found[match[0]] = max(1, round(touched * math.ceil(rows / own / tile)))
    if work.phase == "decode":
        visible, half = float(at.places), 0.0
    else:
        visible, half = work.prefix + (at.tokens * at.parts if at.split else work.tokens) / 2, 0.5
        if not at.split and work.context:
            visible /= at.parts
    for match in set(_KEYS.finditer(text)):
        found[match[0]] = max(1, math.ceil(visible / int(match[1]) + half))
    return found


def _rows_a_window(config: KimiConfig, step: StepCost) -> tuple[float, int]:
    """Rows of one window on a device, and windows a block of tokens, if the routing is even."""
    moe, at = config.moe, step.spread
    size, copies = step.experts_over, step.experts_copies
    kind: Exchange = step.exchange or "replicated"
    tokens = at.count if kind == "replicated" else -(-at.count // copies)
    width = moe.latent_size or config.hidden_size
    block, window = block_and_window(kind, (tokens, width), 2, moe.num_experts_per_token, moe.intermediate_size, size)
    rows = block * moe.num_experts_per_token / (size if kind == "replicated" else 1)
    windows = max(1, math.ceil(rows / window))
    return rows / windows, windows


def _cached(decoder: MeshDecoder, step: StepCost, _: bool) -> tuple[jax.stages.Lowered, Mapping[str, int]]:
    work = step.workload
    params = abstract_params(decoder)
    cache = abstract_cache(
        decoder, work.rows, work.context, step.spread.parts, kv_cache=work.kv_cache, index_cache=work.index_cache
    )
    rows = PartitionSpec(step.spread.rows or None, step.spread.sequence if step.spread.split else None)
    tokens = jax.ShapeDtypeStruct(
        (work.rows, work.tokens), jnp.int32, sharding=NamedSharding(decoder.mesh, _even(rows, work, step))
    )
    lowered = jax.jit(decoder.prefill, donate_argnums=2).lower(params, tokens, cache)
    return lowered, {"parameters": _held(params), "cache": _held(cache)}


def _even(rows: PartitionSpec, work: Any, step: StepCost) -> PartitionSpec:
    """Tokens arrive split where they divide, and whole where they're padded first."""
    return rows if work.tokens % step.spread.parts == 0 else PartitionSpec(rows[0])


def _train(decoder: MeshDecoder, step: StepCost, train_indexer: bool) -> tuple[jax.stages.Lowered, Mapping[str, int]]:
    work = step.workload
    params = abstract_params(decoder, train=True)
    stage: IndexerStage | None = "sparse" if train_indexer and decoder.config.dsa is not None else None
    run = make_train_step(decoder, optax.identity(), StepConfig(indexer=stage, micro_batches=step.micro_batches))
    whole = NamedSharding(decoder.mesh, PartitionSpec())

    def rows(dtype: Any) -> jax.Array:
        return jnp.zeros((work.rows, work.tokens), dtype)

    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole),
        jax.eval_shape(lambda: Batch(rows(jnp.int32), rows(jnp.int32), rows(jnp.bool_))),
    )
    state = jax.eval_shape(lambda params: init_state(params, optax.identity()), params)
    state = replace(state, params=params)
    return jax.jit(run, donate_argnums=0).lower(state, batch), {"parameters": _held(params)}


def _held(tree: Any) -> int:
    """Bytes of one device."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _described(plan: MeshPlan, step: StepCost) -> str:
    said = f"{step.workload}"
    if step.spread.split:
        said += f"; {step.layout} order"
    if step.exchange is not None:
        said += f"; {step.exchange} exchange of experts' rows"
    if step.workload.phase == "train":
        said += (
            f"; {step.micro_batches} micro-batches; float32 parameters and gradients; an optimizer's state, "
            f"{step.memory['optimizer'] / 2**30:,.2f} GiB a device, comes on top"
        )
    return said
