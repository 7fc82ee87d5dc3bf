"""Text in, text out: tokenizer, chat formats, and answers read while they are generated.

A prompt is `tokenizer.encode_segments(format.render(messages))` with `format = chat_format(model_type)`. The answer's
ids go through a `StreamingDetokenizer`, which knows the stop strings, into `format.parser(tokenizer)`:
`parser.push_pieces(detokenizer.push_pieces(ids))`, and at the end `finish_pieces` and `finish`.
"""

from kimi_jax.text.chat import chat_format
from kimi_jax.text.detokenizer import StreamingDetokenizer
from kimi_jax.text.format import ChatFormat
from kimi_jax.text.k2 import K2Format
from kimi_jax.text.messages import MessageError
from kimi_jax.text.parsing import (
    Delta,
    ErrorMark,
    MessageParser,
    ParsedMessage,
    ReasoningDelta,
    TextDelta,
    ToolCall,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    collect,
)
from kimi_jax.text.tokenizer import ControlToken, Segment, Tokenizer
from kimi_jax.text.xtml import XtmlFormat, image_prompt

__all__ = [
    "ChatFormat",
    "ControlToken",
    "Delta",
    "ErrorMark",
    "K2Format",
    "MessageError",
    "MessageParser",
    "ParsedMessage",
    "ReasoningDelta",
    "Segment",
    "StreamingDetokenizer",
    "TextDelta",
    "Tokenizer",
    "ToolCall",
    "ToolCallArguments",
    "ToolCallEnd",
    "ToolCallStart",
    "XtmlFormat",
    "chat_format",
    "collect",
    "image_prompt",
]
