"""Named real shapes, read by the tests, the benchmark and ahead-of-time compilation."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AttnResSpec:
    """One mix.

    Attributes:
        name: unique.
        batch: B.
        tokens: T.
        width: D.
        rows: R, the room in the bank.
    """

    name: str
    batch: int
    tokens: int
    width: int = 7168
    rows: int = 8


# Kimi K3 and K3.1: 93 layers in blocks of 12, so at most 8 banked sums.
SPECS = (
    AttnResSpec("k3_prefill_8192", 1, 8192),
    AttnResSpec("k3_decode_1", 1, 1),
    AttnResSpec("k3_decode_64", 64, 1),
    AttnResSpec("k3_train_8_sequences_of_4096", 8, 4096),
)
