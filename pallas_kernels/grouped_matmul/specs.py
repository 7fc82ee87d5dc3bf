"""Named real shapes, read by the tests, the benchmark and ahead-of-time compilation."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class GroupedMatmulSpec:
    """One product over experts.

    Attributes:
        name: unique.
        rows: M, tokens times experts a token.
        groups: G, experts of one layer on one device.
        width: D, of a row.
        out_width: F, of a result.
        weights: how the experts are stored.
    """

    name: str
    rows: int
    groups: int
    width: int
    out_width: int
    weights: Literal["bfloat16", "mxfp4"]


# Kimi K3 and K3.1: 896 experts, 16 a token, 3584 -> 3072 -> 3584.
# Kimi-Linear-48B: 256 experts, 8 a token, 2304 -> 1024 -> 2304.
SPECS = (
    GroupedMatmulSpec("k3_prefill_4096_up", 4096 * 16, 896, 3584, 3072, "mxfp4"),
    GroupedMatmulSpec("k3_prefill_4096_down", 4096 * 16, 896, 3072, 3584, "mxfp4"),
    GroupedMatmulSpec("k3_decode_1_up", 16, 896, 3584, 3072, "mxfp4"),
    GroupedMatmulSpec("k3_decode_64_up", 64 * 16, 896, 3584, 3072, "mxfp4"),
    GroupedMatmulSpec("k3_train_4096_up_of_32_devices", 4096 * 16, 28, 3584, 3072, "bfloat16"),
    GroupedMatmulSpec("48b_prefill_4096_up", 4096 * 8, 256, 2304, 1024, "bfloat16"),
    GroupedMatmulSpec("48b_prefill_4096_down", 4096 * 8, 256, 1024, 2304, "bfloat16"),
    GroupedMatmulSpec("48b_decode_1_up", 8, 256, 2304, 1024, "bfloat16"),
    GroupedMatmulSpec("48b_decode_64_up", 64 * 8, 256, 2304, 1024, "bfloat16"),
    GroupedMatmulSpec("48b_prefill_8192_up", 8192 * 8, 256, 2304, 1024, "bfloat16"),
    GroupedMatmulSpec("48b_decode_32_up", 32 * 8, 256, 2304, 1024, "bfloat16"),
    # One of eight devices has 112 of K3's experts and an eighth of the rows.
    GroupedMatmulSpec("k3_prefill_8192_up_of_8_devices", 8192 * 2, 112, 3584, 3072, "mxfp4"),
    GroupedMatmulSpec("k3_decode_64_up_of_8_devices", 64 * 2, 112, 3584, 3072, "mxfp4"),
    GroupedMatmulSpec("k3_prefill_8192_up_of_8_devices_bfloat16", 8192 * 2, 112, 3584, 3072, "bfloat16"),
    GroupedMatmulSpec("k3_decode_64_up_of_8_devices_bfloat16", 64 * 2, 112, 3584, 3072, "bfloat16"),
)
