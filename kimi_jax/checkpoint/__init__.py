"""Checkpoints: safetensors files without torch, conversion to Orbax and back, and the way to a model's parameters."""

from kimi_jax.checkpoint.errors import CheckpointError
from kimi_jax.checkpoint.reader import CheckpointReader, SafetensorsFile
from kimi_jax.checkpoint.writer import write_safetensors

__all__ = ["CheckpointError", "CheckpointReader", "SafetensorsFile", "write_safetensors"]
