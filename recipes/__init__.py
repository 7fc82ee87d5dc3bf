"""Recipes that train the models shipped with kimi_jax; they run from a clone and are no part of the wheel."""
