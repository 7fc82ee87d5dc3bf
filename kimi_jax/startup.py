"""What is said before a model is loaded: where it will run, how, and what it takes."""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kimi_jax.cache import Cache
from kimi_jax.cache_format import DEFAULT_FORMAT, CacheFormat, row_bytes
from kimi_jax.checkpoint.locate import packed_shapes
from kimi_jax.compile_cache import jax_setting
from kimi_jax.config import KimiConfig
from kimi_jax.model import Decoder
from kimi_jax.params import Params, ParamSpec, is_spec, named_specs
from kimi_jax.sharding import RULES, Rule, shard_shape
from pallas_kernels.dispatch import Choice, noted_choices
from pallas_kernels.lightning_indexer import TwoStage
from pallas_kernels.mxfp4 import Mxfp4
from pallas_kernels.precision import at_least_float32
from pallas_kernels.target import platform

_log = logging.getLogger(__name__)
# Files by which a driver shows an accelerator, whether or not JAX can use it.
_ACCELERATORS = {"nvidia[0-9]*": "an NVIDIA GPU", "accel[0-9]*": "a TPU"}


def describe(
    decoder: Decoder,
    dtype: DTypeLike,
    mesh: Mapping[str, int] | None,
    rules: Mapping[str, Rule] = RULES,
    format: CacheFormat = DEFAULT_FORMAT,
) -> str:
    """One line: the model, its devices, bytes on each, bytes a token, and which implementation operations run, and why.

    Args:
        decoder: the model.
        dtype: of its parameters and activations.
        mesh: sizes of the mesh axes, or None for one device.
        rules: mesh axis of each logical axis.
        format: of its caches.
    """
    devices = 1 if mesh is None else math.prod(mesh.values())
    kind = jax.devices()[0]
    where = f"{devices} {kind.platform} device{'' if devices == 1 else 's'} ({kind.device_kind})"
    size = device_bytes(decoder, dtype, mesh or {}, rules) / 2**20
    return (
        f"{decoder.config.model_type}, {decoder.config.num_hidden_layers} layers, {jnp.dtype(dtype).name}, on {where}, "
        f"{size:,.1f} MiB of parameters on each; caches: {cache_in_words(decoder.config, dtype, format)}; "
        f"{_selection_in_words(decoder.two_stage)}"
        f"{in_words(choices(decoder, dtype, format), platform())}"
    )


def device_bytes(decoder: Decoder, dtype: DTypeLike, mesh: Mapping[str, int], rules: Mapping[str, Rule] = RULES) -> int:
    """Bytes of parameters on one device.

    Raises:
        ShardingError: a size of the model isn't a multiple of the mesh axis that splits it.
    """
    total = 0
    for path, spec in named_specs(decoder.specs).items():
        if spec.has_experts and decoder.config.quantization is not None:
            for shape in packed_shapes(spec.shape):
                total += math.prod(shard_shape(path, spec, mesh, rules, shape))
        else:
            kind = at_least_float32(dtype) if spec.float32 else jnp.dtype(dtype)
            total += math.prod(shard_shape(path, spec, mesh, rules)) * kind.itemsize
    return total


def _selection_in_words(two_stage: TwoStage | None) -> str:
    if two_stage is None:
        return ""
    misses = "exact" if two_stage.coarse == "bound" else "missing some keys"
    of = "keys" if two_stage.block_size == 1 else f"blocks of {two_stage.block_size} keys"
    by = "one vector a query" if two_stage.coarse == "linear" else f"their {two_stage.coarse}"
    return f"an indexer in two stages, {two_stage.kept_fraction:.1%} of {of} by {by}, {misses}; "


def cache_in_words(config: KimiConfig, dtype: DTypeLike, format: CacheFormat = DEFAULT_FORMAT) -> str:
    """What a row of a cache takes: bytes of every token, and those that don't depend on their number."""
    compute, token = jnp.dtype(dtype).name, format.token_bytes(config, dtype)
    parts = [f"{token.latent / 2**10:,.1f} KiB a token of latents in {format.kv_cache or compute}"]
    if token.index_key:
        parts.append(f"{token.index_key / 2**10:,.1f} KiB of index keys in {format.index_cache or compute}")
    parts.append(f"{row_bytes(config, dtype) / 2**20:,.1f} MiB a row")
    return ", ".join(parts)


def choices(decoder: Decoder, dtype: DTypeLike, format: CacheFormat = DEFAULT_FORMAT) -> dict[str, Choice]:
    """The implementation that each operation of a model chooses here; nothing is computed.

    Raises:
        UnsupportedImplementationError: the one that was asked for can't run.
    """

    def leaf(spec: ParamSpec) -> Any:
        if spec.has_experts and decoder.config.quantization is not None:
            return Mxfp4(*(jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in packed_shapes(spec.shape)))
        return jax.ShapeDtypeStruct(spec.shape, at_least_float32(dtype) if spec.float32 else dtype)

    def run(params: Params) -> jax.Array:
        cache = Cache.allocate(decoder.config, 1, 1, dtype, kv_cache=format.kv_cache, index_cache=format.index_cache)
        return decoder.prefill(params, jnp.zeros((1, 1), jnp.int32), cache)[0]

    with noted_choices() as found:
        jax.eval_shape(run, jax.tree.map(leaf, decoder.specs, is_leaf=is_spec))
    return found


def in_words(found: Mapping[str, Choice], on: str) -> str:
    """Operations by implementation and reason; that a CPU runs no kernels is said once."""
    groups: dict[tuple[str, str], list[str]] = {}
    for operation, choice in sorted(found.items()):
        reason = choice.reason.replace(f"{operation} has", "there is").replace(".;", ";").rstrip(".")
        if on == "cpu" and choice.name == "xla" and choice.reason.startswith(("tpu: ", "gpu: ")):
            reason = "kernels run on TPUs and Hopper GPUs"
        groups.setdefault((choice.name, reason), []).append(operation)
    return "; ".join(f"{name} for {', '.join(names)} ({reason})" for (name, reason), names in groups.items())


def warn_of_fallback(devices: Path = Path("/dev")) -> None:
    """Warns, in the log, when JAX runs on the CPU of a host that seems to have an accelerator, unless it was told to."""
    if jax.default_backend() != "cpu" or jax_setting("jax_platforms"):
        return
    found = [name for pattern, name in _ACCELERATORS.items() if any(devices.glob(pattern))]
    if found:
        _log.warning(
            "This host seems to have %s, but JAX %s sees only the CPU, which is far slower. Install JAX for the "
            "accelerator (pip install 'kimi-jax[cuda]' or 'kimi-jax[tpu]'), or set JAX_PLATFORMS=cpu to be asked no more.",
            found[0],
            jax.__version__,
        )
