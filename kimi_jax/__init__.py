"""The Kimi K3 model family in JAX: Kimi-Linear-48B, Kimi K3 and Kimi K3.1 Pro."""

from kimi_jax.api import Kimi
from kimi_jax.cache import Cache
from kimi_jax.checkpoint import CheckpointError
from kimi_jax.checkpoint.convert import convert
from kimi_jax.config import ConfigError, KimiConfig
from kimi_jax.generate.results import ChatReply, Generation, StreamPiece
from kimi_jax.generate.sampling import SamplingParams
from kimi_jax.model import Decoder

__all__ = [
    "Cache",
    "ChatReply",
    "CheckpointError",
    "ConfigError",
    "Decoder",
    "Generation",
    "Kimi",
    "KimiConfig",
    "SamplingParams",
    "StreamPiece",
    "convert",
]
