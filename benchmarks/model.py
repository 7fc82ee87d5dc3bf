"""Prefill and decode of a Kimi-Linear model of about 100 M parameters beside transformers, same weights, same machine.

    python -m benchmarks.model [--output model.json]

Needs the `parity` extra. Runs of the two are interleaved; each figure is a median, ratios are formed pair by pair.
Absolute times on a shared CPU mean little, ratios hold.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import numpy as np
import torch
from transformers import KimiLinearConfig, KimiLinearForCausalLM

from kimi_jax import Kimi

CONFIG = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "q_lora_rank": None,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "mla_use_nope": True,
    "num_experts": 64,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 128,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "routed_scaling_factor": 2.446,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "use_grouped_topk": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "model_max_length": 8192,
    "use_cache": True,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3, 5, 6, 7],
        "full_attn_layers": [4, 8],
        "num_heads": 8,
        "head_dim": 64,
        "short_conv_kernel_size": 4,
    },
}


def seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def compare(ours: Callable[[], object], theirs: Callable[[], object], repeats: int) -> dict[str, float]:
    ours(), theirs()
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(repeats)]
    return {
        "ours_s": statistics.median(pair[0] for pair in pairs),
        "transformers_s": statistics.median(pair[1] for pair in pairs),
        "ratio": statistics.median(pair[1] / pair[0] for pair in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="write the table as JSON too")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    reference = KimiLinearForCausalLM(KimiLinearConfig(**CONFIG)).to(getattr(torch, arguments.dtype)).eval()
    with tempfile.TemporaryDirectory() as directory:
        reference.save_pretrained(directory)
        (Path(directory) / "config.json").write_text(json.dumps(CONFIG))
        model = Kimi.from_pretrained(directory, dtype=arguments.dtype, progress=False)

    count = sum(leaf.size for leaf in jax.tree.leaves(model.params))
    experts = sum(leaf.size for leaf in jax.tree.leaves(model.params["experts"]))
    print(
        f"{count / 1e6:.1f} M parameters, {experts / count:.0%} of them routed experts; {arguments.dtype}, "
        f"jax {jax.__version__} on {jax.devices()[0].device_kind}, torch {torch.__version__} with "
        f"{torch.get_num_threads()} threads"
    )

    rng = np.random.default_rng(0)
    rows = []
    for batch, prompt, new in ((1, 512, 0), (1, 1024, 0), (4, 512, 0), (1, 512, 64), (8, 128, 64)):
        name = f"{'decode ' if new else 'prefill'} B={batch} T={prompt}"
        if arguments.only not in name:
            continue
        ids = rng.integers(3, CONFIG["vocab_size"], (batch, prompt), dtype=np.int32)
        torch_ids = torch.from_numpy(ids).long()

        def ours(new: int, ids: np.ndarray = ids) -> None:
            model.generate(list(ids), max_new_tokens=new, stop_token_ids=[])

        def theirs(new: int, ids: torch.Tensor = torch_ids) -> None:
            with torch.inference_mode():
                reference.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=new,
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                )

        # A prompt and one token is the prefill; what further tokens add to it is the decode.
        times = compare(partial(ours, 1), partial(theirs, 1), arguments.repeats)
        tokens = batch * prompt
        if new:
            whole = compare(partial(ours, new + 1), partial(theirs, new + 1), arguments.repeats)
            times = {key: whole[key] - times[key] for key in ("ours_s", "transformers_s")}
            times["ratio"] = times["transformers_s"] / times["ours_s"]
            tokens = batch * new
        rows.append({"case": name, "tokens": tokens, **times})
        print(
            f"{name:24} {tokens / times['ours_s']:10.0f} tok/s  transformers "
            f"{tokens / times['transformers_s']:8.0f} tok/s  ratio {times['ratio']:.2f}",
            flush=True,
        )
    if arguments.output:
        arguments.output.write_text(json.dumps({"parameters": count, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
