"""What a chat format is: conversations into segments of a prompt, and answers back into messages."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kimi_jax.text.messages import Message, MessageError, read_messages, read_tools
from kimi_jax.text.parsing import MessageParser
from kimi_jax.text.shown import shown
from kimi_jax.text.tokenizer import Segment, Tokenizer


@dataclass(frozen=True)
class RenderOptions:
    """What a conversation is rendered with besides its messages; see `ChatFormat.render`."""

    tools: list[Any] | None
    thinking: bool | None
    thinking_effort: str | None
    tool_choice: str | None
    response_format: Mapping[str, Any] | None
    image_prompts: Sequence[str] | None
    add_generation_prompt: bool


class ChatFormat(ABC):
    """How a model's conversations are written as tokens and how its answers are read.

    Attributes:
        name: of the format.
        end_tokens: control tokens that end an answer.
        structure: control tokens of an answer by name, and whether the text behind each belongs to the structure of
            the answer (the name of a tag, the id of a call) and not to what it says.
    """

    name: ClassVar[str]
    end_tokens: ClassVar[tuple[str, ...]]
    structure: ClassVar[Mapping[str, bool]]

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Refuses a tokenizer without this format's control tokens.

        Raises:
            ValueError: one is missing; the message names it.
        """
        for name in (*self._control_names(), *self.end_tokens):
            if not tokenizer.has_control_token(name):
                raise ValueError(
                    f"{tokenizer.name} has no control token {name!r}, which the {self.name} format needs; its named "
                    f"ones are {', '.join(tokenizer.named_control_tokens)}. Choose the format that the model was "
                    "trained on."
                )

    def stop_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """The ids that end an answer: those of the format's own end marker and of `[EOS]`."""
        return tuple(map(tokenizer.control_id, self.end_tokens))

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
        """Renders a conversation; `Tokenizer.encode_segments` makes it token ids.

        The K2 format has no form for effort, tool choice, response format and images, and its models think always or
        never: there None is legal, and the value that changes nothing.

        Args:
            messages: see `kimi_jax.text.messages`.
            tools: declarations of tools.
            thinking: whether the assistant thinks before it answers; None: as the model does unless it's asked
                otherwise (in XTML, it does).
            thinking_effort: low, high or max; None is max. It's looked at in thinking mode only.
            tool_choice: auto, none or required; None is auto.
            response_format: `{"type": "text"}`, `{"type": "json_object"}` or
                `{"type": "json_schema", "json_schema": {"schema": ...}}`.
            image_prompts: one `image_prompt` for each image part, in order. None writes a placeholder for each.
            add_generation_prompt: end with the opening of the assistant's answer.

        Raises:
            MessageError: something isn't legal; the message names the field, its value and what is legal.
        """
        if not isinstance(thinking, bool | None):
            raise MessageError(f"thinking is {shown(thinking)}; legal is True, False or None.")
        conversation = read_messages(messages)
        return self._render(
            conversation,
            RenderOptions(
                read_tools(tools),
                thinking,
                thinking_effort,
                tool_choice,
                response_format,
                image_prompts,
                add_generation_prompt,
            ),
        )

    @abstractmethod
    def parser(self, tokenizer: Tokenizer | None = None, *, thinking: bool | None = None) -> MessageParser:
        """A parser for one answer to a prompt that was rendered with the same `thinking`.

        Args:
            tokenizer: needed to read token ids, which is the better way: see `MessageParser`.
            thinking: as in `render`.
        """

    @abstractmethod
    def _render(self, conversation: list[Message], options: RenderOptions) -> list[Segment]:
        """Renders a conversation that has been checked."""

    @abstractmethod
    def _control_names(self) -> Iterable[str]:
        """The control tokens that the format needs besides its ends."""
