"""The chat format of a model."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

from kimi_jax.text.k2 import K2Format
from kimi_jax.text.parsing import MessageParser
from kimi_jax.text.tokenizer import Segment, Tokenizer
from kimi_jax.text.xtml import XtmlFormat


@runtime_checkable
class ChatFormat(Protocol):
    """How a model's conversations are written as tokens and how its answers are read."""

    name: ClassVar[str]

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Refuses a tokenizer that lacks the format's control tokens."""
        ...

    def stop_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """The ids that end an answer."""
        ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool | None = None,
        thinking_effort: str | None = None,
        tool_choice: str | None = None,
        response_format: Mapping[str, Any] | None = None,
        image_prompts: Sequence[str] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[Segment]:
        """Segments of the prompt; an option that the format has no form for raises `MessageError`."""
        ...

    def parser(self, tokenizer: Tokenizer | None = None, *, thinking: bool | None = None) -> MessageParser:
        """A parser for one answer."""
        ...


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
