import pytest

from kimi_jax.text import ControlToken, Tokenizer, k2
from tests.kimi_jax.text.golden import load, path


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The golden vocabulary with the control tokens that the golden data names."""
    golden = load("tokenizer-tiny", "special_tokens.json")
    kept = golden["kept_by_skip_special_tokens"]
    return Tokenizer.from_rank_file(
        path("tokenizer-tiny", "tiktoken.model"),
        [ControlToken(name, token_id, name not in kept) for name, token_id in golden["named"].items()],
    )


@pytest.fixture(scope="session")
def k2_tokenizer() -> Tokenizer:
    """The golden vocabulary with Kimi K2's control tokens."""
    return Tokenizer.from_rank_file(path("tokenizer-tiny", "tiktoken.model"), k2.control_tokens(2000))
