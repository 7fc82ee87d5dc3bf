"""How random weights are marked, so that nobody takes them for a model."""

RANDOM = "kimi_jax_random_weights"
"""Key in the metadata of safetensors files whose weights are random numbers; its value is the seed."""
