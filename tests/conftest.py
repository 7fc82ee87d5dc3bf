"""Shapes and dtypes of annotated functions are checked while tests run."""

from jaxtyping import install_import_hook

install_import_hook(["kimi_jax", "pallas_kernels"], "beartype.beartype")
