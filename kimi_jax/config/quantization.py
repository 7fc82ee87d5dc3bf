"""How the routed experts of a released checkpoint are stored."""

from dataclasses import dataclass
from typing import Any

from kimi_jax.config.fields import Section

FORMAT = "mxfp4-pack-quantized"
GROUP_SIZE = 32


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """Routed experts in packed MXFP4.

    Attributes:
        format: `mxfp4-pack-quantized`, the only format these models use.
        group_size: input elements that share one scale.
        ignore: the file's patterns of unquantised modules. They're kept, not used: which tensors are packed is
            decided by the tensors themselves, because the patterns miss some.
    """

    format: str
    group_size: int
    ignore: tuple[str, ...]


def read_quantization(section: Section) -> QuantizationConfig:
    """Reads a `quantization_config` object; anything but 4-bit MX groups of 32 is a problem."""
    section.exactly("quant_method", "compressed-tensors", "other ways of packing aren't read.")
    section.exactly("format", FORMAT, "the released models use no other.")
    section.exactly("quantization_status", "compressed", "the checkpoint holds packed weights.", required=False)
    for key in ("kv_cache_scheme", "global_compression_ratio"):
        section.exactly(key, None, "the released models have none.", required=False)
    groups = section.section("config_groups", needed_by="it describes the packing")
    if groups is not None:
        group = groups.section("group_0", needed_by="it describes the packing")
        if group is not None:
            _read_group(group)
        groups.refuse_unknown()
    config = QuantizationConfig(format=FORMAT, group_size=GROUP_SIZE, ignore=section.strings("ignore"))
    section.refuse_unknown()
    return config


def _read_group(group: Section) -> None:
    group.exactly("format", FORMAT, "the released models use no other.", required=False)
    group.exactly("targets", ["Linear"], "experts are linear layers.")
    for key in ("input_activations", "output_activations"):
        group.exactly(key, None, "activations aren't quantised by the checkpoint.", required=False)
    weights = group.section("weights", needed_by="it describes the packing")
    if weights is not None:
        weights.exactly("num_bits", 4, "MXFP4 has four bits.")
        weights.exactly("type", "float", "MXFP4 elements are floats.")
        weights.exactly("strategy", "group", "MXFP4 has one scale a group.")
        weights.exactly("group_size", GROUP_SIZE, "MXFP4 groups have 32 elements.")
        weights.exactly("symmetric", True, "MXFP4 has no zero points.", required=False)
        weights.exactly("dynamic", False, "weights have stored scales.", required=False)
        weights.exactly("scale_dtype", "torch.uint8", "MXFP4 scales are exponent bytes.", required=False)
        for key in ("zp_dtype", "actorder", "block_structure"):
            weights.exactly(key, None, "the released models have none.", required=False)
        # How the scales were found doesn't matter to a reader.
        weights.accept("observer")
        weights.accept("observer_kwargs")
        weights.refuse_unknown()
    group.refuse_unknown()


def write_quantization(config: QuantizationConfig) -> dict[str, Any]:
    """The `quantization_config` object of the public file."""
    return {
        "config_groups": {
            "group_0": {
                "format": config.format,
                "input_activations": None,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {
                    "actorder": None,
                    "block_structure": None,
                    "dynamic": False,
                    "group_size": config.group_size,
                    "num_bits": 4,
                    "observer": "minmax",
                    "observer_kwargs": {},
                    "scale_dtype": "torch.uint8",
                    "strategy": "group",
                    "symmetric": True,
                    "type": "float",
                    "zp_dtype": None,
                },
            }
        },
        "format": config.format,
        "global_compression_ratio": None,
        "ignore": list(config.ignore),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
