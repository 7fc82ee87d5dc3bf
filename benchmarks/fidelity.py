"""How far the model is from the public references, quantity by quantity, on the golden families.

    python -m benchmarks.fidelity [--output fidelity.json]

float32 runs on whatever device jax uses; the references are float64. The last column is a bfloat16 run's mean
KL divergence to the reference's next-token distribution (random weights: routes flip in bfloat16, see the notes of the
golden data).
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax import Cache, Kimi
from tests import golden_data

COLUMNS = (
    "logits",
    "layers",
    "states",
    "tails",
    "index scores",
    "expert weights",
    "experts equal",
    "selection equal",
    "greedy equal",
    "bf16 KL",
)


def farthest(found: np.ndarray, want: np.ndarray) -> float:
    finite = np.isfinite(want)
    if not np.array_equal(finite, np.isfinite(found)):
        return float("inf")
    return float(np.abs(found[finite].astype(np.float64) - want[finite]).max())


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def measure(family: str) -> dict[str, float | bool | None]:
    want = golden_data.expected(family)
    ids = want["input_ids"]
    model = golden_data.model(family)
    cache = Cache.allocate(model.config, *ids.shape, jnp.float32)
    found, cache = jax.jit(model.decoder.trace)(model.params, jnp.asarray(ids), cache)
    found = {name: np.asarray(value) for name, value in found.items()}
    order = np.argsort(found["experts"], axis=-1)
    tail = np.asarray(cache.conv_tail).transpose(0, 3, 1, 2, 4)
    sparse = "dsa_sel" in want
    greedy = model.generate(list(ids), max_new_tokens=want["gen_ids"].shape[1], stop_token_ids=())

    half = Kimi.from_pretrained(golden_data.ROOT / family, dtype="bfloat16", progress=False)
    p = log_softmax(want["logits"].astype(np.float64))
    q = log_softmax(np.asarray(half.logits(ids), np.float64))
    values = (
        farthest(found["logits"], want["logits"]),
        farthest(found["layer_out"], want["layer_out"]),
        farthest(np.asarray(cache.kda_state), want["kda_state"]),
        farthest(tail, want["conv_tail"]),
        farthest(found["index_scores"], want["dsa_scores"]) if sparse else None,
        farthest(np.take_along_axis(found["expert_weights"], order, -1), want["moe_weights"]),
        np.array_equal(np.take_along_axis(found["experts"], order, -1), want["moe_ids"]),
        np.array_equal(found["selected"], want["dsa_sel"]) if sparse else None,
        [result.token_ids for result in greedy] == want["gen_ids"].tolist(),
        float((np.exp(p) * (p - q)).sum(-1).mean()),
    )
    return dict(zip(COLUMNS, values, strict=True))


def shown(value: float | bool | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="write the table as JSON too")
    arguments = parser.parse_args()
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}")
    print("| family | " + " | ".join(COLUMNS) + " |")
    print("|---|" + "---|" * len(COLUMNS))
    rows = {}
    for family in golden_data.FAMILIES:
        rows[family] = measure(family)
        print(f"| {family} | " + " | ".join(shown(value) for value in rows[family].values()) + " |", flush=True)
    if arguments.output:
        arguments.output.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
