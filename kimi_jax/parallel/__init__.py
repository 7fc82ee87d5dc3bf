"""One model over many devices: axes of a mesh, and what a device asks the others for.

`MeshDecoder` is `kimi_jax.model.Decoder` on a mesh, `MeshShards` what one device of it does inside `jax.shard_map`.
"""

from kimi_jax.parallel.decoder import MeshDecoder
from kimi_jax.parallel.shards import MeshShards

__all__ = ["MeshDecoder", "MeshShards"]
