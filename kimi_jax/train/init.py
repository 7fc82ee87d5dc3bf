"""Parameters of an untrained model."""

import math
import zlib

import jax
import jax.numpy as jnp

from kimi_jax.model import Decoder
from kimi_jax.params import Params, ParamSpec, is_spec


def init_params(decoder: Decoder, seed: int = 0) -> Params:
    """Float32 parameters to train from; a parameter's values depend on the seed and its name alone.

    Matrices are normal with the config's `initializer_range`, norms 1. A head's decay rate exp(A_log) is uniform from 1
    to 16, and softplus(dt_bias) log-uniform from 0.001 to 0.1. The queries of Attention Residuals start at 0: a layer
    first reads the plain average of the blocks before it.
    """

    def make(spec: ParamSpec) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(spec.names[0].encode()))
        match spec.init:
            case "ones":
                return jnp.ones(spec.shape, jnp.float32)
            case "zeros":
                return jnp.zeros(spec.shape, jnp.float32)
            case "decay":
                return jnp.log(jax.random.uniform(key, spec.shape, minval=1.0, maxval=16.0))
            case "dt_bias":
                low, high = math.log(1e-3), math.log(1e-1)
                step = jnp.exp(jax.random.uniform(key, spec.shape, minval=low, maxval=high))
                return step + jnp.log(-jnp.expm1(-step))
            case "normal":
                if spec.names[0].endswith("_res_proj.weight"):
                    return jnp.zeros(spec.shape, jnp.float32)
                return decoder.config.initializer_range * jax.random.normal(key, spec.shape)

    return jax.tree.map(make, decoder.specs, is_leaf=is_spec)
