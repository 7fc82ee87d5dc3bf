"""Saving and resuming a run through Orbax."""

import os
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from kimi_jax.train.step import TrainState


class Checkpoints:
    """The newest states of a run in one folder. A state is there whole or not at all."""

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 2):
        """Opens or creates `folder`; `keep` states are kept, older ones removed."""
        if keep < 1:
            raise ValueError(f"keep={keep!r}; it must be at least 1.")
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        self._manager = ocp.CheckpointManager(Path(folder).absolute(), options=options)

    @property
    def latest(self) -> int | None:
        """Step of the newest state, None where there is none."""
        return self._manager.latest_step()

    def save(self, state: TrainState) -> None:
        """Saves in the background; a later call waits for it."""
        self._manager.save(int(state.step), args=ocp.args.StandardSave(state))

    def restore(self, like: TrainState) -> TrainState:
        """The newest state, with the shapes, dtypes and shardings of `like`.

        Raises:
            FileNotFoundError: there is none.
            ValueError: what was saved doesn't have these shapes.
        """
        if self.latest is None:
            raise FileNotFoundError(f"{self._manager.directory}: no saved state here.")
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        return self._manager.restore(self.latest, args=ocp.args.StandardRestore(abstract))

    def close(self) -> None:
        """Waits until everything is written."""
        self._manager.wait_until_finished()
        self._manager.close()
