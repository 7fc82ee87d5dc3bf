"""kimi-tiny: data, training and evaluation of the small model that ships with kimi_jax."""
