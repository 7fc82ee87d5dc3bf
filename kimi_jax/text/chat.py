"""The chat format of a model."""

from kimi_jax.text.format import ChatFormat
from kimi_jax.text.k2 import K2Format
from kimi_jax.text.xtml import XtmlFormat

FORMATS = {"kimi_k3": "XTML", "kimi_k31": "XTML", "kimi_linear": "K2", "kimi_k2": "K2"}
"""Chat format by the `model_type` at the top of a checkpoint's config."""


def chat_format(model_type: str, *, vendor_compatible: bool = False) -> ChatFormat:
    """The chat format of a model.

    Args:
        model_type: of the checkpoint's config.
        vendor_compatible: see `XtmlFormat`. The K2 format has no such difference.

    Raises:
        ValueError: no format is known for `model_type`; a wrong one would do more harm than none.
    """
    if model_type not in FORMATS:
        raise ValueError(f"model_type={model_type!r} has no known chat format; known are {', '.join(FORMATS)}.")
    return XtmlFormat(vendor_compatible) if FORMATS[model_type] == "XTML" else K2Format()
