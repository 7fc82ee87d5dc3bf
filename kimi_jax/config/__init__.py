"""The models' configuration: frozen dataclasses, read from and written to the public config.json.

Everything that distinguishes one Kimi model from another is here, and every check on sizes.
"""

from kimi_jax.config.attention import DsaConfig, KdaConfig, LayerKind, MlaConfig
from kimi_jax.config.count import ParameterCount, parameter_count
from kimi_jax.config.errors import ConfigError
from kimi_jax.config.model import KimiConfig
from kimi_jax.config.moe import MoeConfig
from kimi_jax.config.quantization import QuantizationConfig
from kimi_jax.config.vision import VisionConfig

__all__ = [
    "ConfigError",
    "DsaConfig",
    "KdaConfig",
    "KimiConfig",
    "LayerKind",
    "MlaConfig",
    "MoeConfig",
    "ParameterCount",
    "QuantizationConfig",
    "VisionConfig",
    "parameter_count",
]
