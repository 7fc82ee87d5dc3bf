"""The one exception of the checkpoint package."""


class CheckpointError(ValueError):
    """A checkpoint can't be used; the message names the file and the tensor."""
