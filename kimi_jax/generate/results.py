"""What comes out of generation."""

from dataclasses import dataclass
from typing import Any, Literal

from kimi_jax.text import ErrorMark, ParsedMessage, ToolCall

FinishReason = Literal["stop", "length", "interrupted"]


@dataclass(frozen=True)
class Timings:
    """Where the time of a request went, waiting for whoever takes its pieces included.

    Attributes:
        compile_seconds: compiling for shapes that are new to the model.
        prefill_seconds: from the call to the first new token, without the above; what ran beside the compiler isn't in it,
            so a call that compiles shows too little.
        decode_seconds: from the first new token to the last, without compiling.
        tokens_per_second: new tokens after the first over `decode_seconds`; None for a single token.
    """

    compile_seconds: float
    prefill_seconds: float
    decode_seconds: float
    tokens_per_second: float | None


@dataclass(frozen=True)
class Generation:
    """What one prompt led to.

    Attributes:
        token_ids: new tokens only, a stop token included. With a stop string, the tokens up to the one that completed
            it.
        text: the new tokens as text up to a stop string, without special control tokens; None for a model without a
            tokenizer.
        finish_reason: `stop` when a stop token or a stop string ended the answer, `length` when max_new_tokens did,
            `interrupted` when whoever took its pieces did.
        prompt_tokens: tokens of the prompt.
        logprobs: log-probability of each new token, when they were asked for.
        top_logprobs: for each new token, the most probable tokens and their log-probabilities, when asked for.
        stopped_by: the stop token or the stop string that ended it, or None.
        timings: where the time went; None when it was interrupted.
    """

    token_ids: list[int]
    text: str | None
    finish_reason: FinishReason
    prompt_tokens: int
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None
    stopped_by: int | str | None = None
    timings: Timings | None = None


@dataclass(frozen=True)
class StreamPiece:
    """New tokens of one prompt; printing it prints their text.

    Attributes:
        index: of the prompt.
        text: whole characters that can't change any more; None for a model without a tokenizer.
        token_ids: the new tokens, which may be ahead of the text: a character or a stop string isn't complete.
        result: in a prompt's last piece everything together, else None.
    """

    index: int
    text: str | None
    token_ids: list[int]
    result: Generation | None = None

    def __str__(self) -> str:
        return self.text or ""


@dataclass(frozen=True)
class ChatReply:
    """An assistant's answer.

    Attributes:
        message: the answer in its parts.
        generation: tokens, finish reason, log-probabilities and timings.
    """

    message: ParsedMessage
    generation: Generation

    @property
    def reasoning(self) -> str | None:
        """What the assistant thought, or None."""
        return self.message.reasoning

    @property
    def text(self) -> str | None:
        """The answer proper, or None."""
        return self.message.text

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The complete tool calls."""
        return self.message.tool_calls

    @property
    def errors(self) -> tuple[ErrorMark, ...]:
        """What in the answer doesn't follow the chat format, an answer that was cut off included."""
        return self.message.errors

    @property
    def finish_reason(self) -> FinishReason:
        """See `Generation`."""
        return self.generation.finish_reason

    def to_message(self) -> dict[str, Any]:
        """The message to append to the conversation."""
        return self.message.to_message()
