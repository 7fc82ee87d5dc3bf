"""Checkpoints: safetensors files without torch, and the way from them to a model's parameters."""

from kimi_jax.checkpoint.reader import CheckpointError, CheckpointReader, SafetensorsFile
from kimi_jax.checkpoint.writer import write_safetensors

__all__ = ["CheckpointError", "CheckpointReader", "SafetensorsFile", "write_safetensors"]
