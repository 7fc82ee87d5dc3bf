"""A model's way with text: its tokenizer and its chat format, or why it has none."""

import os
from dataclasses import dataclass

from kimi_jax.config import KimiConfig
from kimi_jax.text import ChatFormat, Tokenizer, chat_format

_END_OF_TEXT = "[EOS]"


@dataclass(frozen=True)
class Language:
    """Tokenizer and chat format of a model.

    Attributes:
        model_type: of the model's config, which decides on the chat format.
        stop_ids: all tokens by which the model ends an answer: its config's, its tokenizer's, its chat format's.
        tokenizer: or None.
        no_tokenizer: a sentence about why there is none; empty when there is one.
        no_chat: a sentence about why the model can't chat; empty when it can.
    """

    model_type: str
    stop_ids: tuple[int, ...]
    tokenizer: Tokenizer | None = None
    no_tokenizer: str = ""
    no_chat: str = ""

    @staticmethod
    def of_directory(directory: str | os.PathLike[str], config: KimiConfig) -> "Language":
        """Reads the tokenizer beside a checkpoint. One that is missing or damaged is an error only when it's needed."""
        try:
            tokenizer = Tokenizer.from_directory(directory)
        except (OSError, ValueError) as error:
            return Language.of(None, config, str(error))
        return Language.of(tokenizer, config)

    @staticmethod
    def of(tokenizer: Tokenizer | None, config: KimiConfig, missing: str = "it was made without one.") -> "Language":
        """The way of a model with this tokenizer, or with none for a reason."""
        kind, own = config.model_type, {config.eos_token_id}
        if tokenizer is not None and tokenizer.vocab_size != config.vocab_size:
            missing = f"{tokenizer.name} has {tokenizer.vocab_size} token ids, its config says {config.vocab_size}."
            tokenizer = None
        if tokenizer is None:
            missing = f"This model has no tokenizer: {missing}"
            return Language(kind, tuple(own), None, missing, missing)
        if tokenizer.has_control_token(_END_OF_TEXT):
            own.add(tokenizer.control_id(_END_OF_TEXT))
        try:
            format = chat_format(kind)
            format.check_tokenizer(tokenizer)
        except ValueError as error:
            return Language(kind, tuple(sorted(own)), tokenizer, "", f"This model can't chat: {error}")
        return Language(kind, tuple(sorted(own | set(format.stop_ids(tokenizer)))), tokenizer)

    def need_tokenizer(self, what: str) -> Tokenizer:
        """The tokenizer.

        Raises:
            ValueError: there is none; the message says what needs it, and why it isn't there.
        """
        if self.tokenizer is None:
            raise ValueError(f"{what} needs a tokenizer. {self.no_tokenizer}")
        return self.tokenizer

    def need_chat(self, *, vendor_compatible: bool = False) -> tuple[Tokenizer, ChatFormat]:
        """Tokenizer and chat format.

        Raises:
            ValueError: one is missing; the message says why.
        """
        if self.no_chat:
            raise ValueError(f"A chat needs a tokenizer with the control tokens of a chat format. {self.no_chat}")
        return self.need_tokenizer("A chat"), chat_format(self.model_type, vendor_compatible=vendor_compatible)
