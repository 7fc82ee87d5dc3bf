"""FLA's KDA (flash-linear-attention; `fla-core` is enough) on the cases of `benchmarks.kda_table`, which runs this beside itself.

    python -m benchmarks.kda_fla --tune FOLDER    Triton's autotuner on this GPU, in minutes; the winners in FLA's own format

With FLA_CACHE_MODE=full and FLA_CONFIG_DIR=FOLDER set, FLA takes the winners from there instead of tuning itself at its first
call.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

WIDTH, BOUND = 128, -5.0
CALLS = 12


def missing() -> str | None:
    """Why FLA can't run, or None."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
        from fla.ops.kda import chunk_kda  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as failure:
        return f"FLA not installed: {failure}"
    return None if torch.cuda.is_available() else "FLA not run: torch sees no GPU"


def prefill(tokens: int, heads: int, segments: tuple[int, ...], gradient: bool) -> Callable[[], Any]:
    """A call of chunk_kda, with everything that a layer's projections leave inside its kernels."""
    import torch  # pyright: ignore[reportMissingImports]
    from fla.ops.kda import chunk_kda  # pyright: ignore[reportMissingImports]

    shape = (1, tokens, heads, WIDTH)
    q, k, v, g = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    logits = torch.randn(*shape[:3], device="cuda", dtype=torch.bfloat16)
    a_log, bias = torch.rand(heads, device="cuda"), torch.rand(heads * WIDTH, device="cuda")
    state = 0.1 * torch.randn(max(1, len(segments)), heads, WIDTH, WIDTH, device="cuda")
    ends = torch.tensor(np.cumsum([0, *segments]), device="cuda", dtype=torch.long) if segments else None
    inputs = (q, k, v, g, logits, a_log, bias, state)
    cotangents = torch.randn_like(v), torch.randn_like(state)
    for x in inputs if gradient else ():
        x.requires_grad_()

    def call() -> Any:
        with torch.enable_grad() if gradient else torch.inference_mode():
            result = chunk_kda(
                q,
                k,
                v,
                g,
                logits,
                A_log=a_log,
                dt_bias=bias,
                initial_state=state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True,
                safe_gate=True,
                lower_bound=BOUND,
                cu_seqlens=ends,
            )
            return torch.autograd.grad(result, inputs, cotangents) if gradient else result

    return call


def recurrent(slots: int, heads: int, tokens: int) -> Callable[[], Any]:
    """A call of the decoding kernel, state in place, on other slots each time so that none comes from the cache."""
    import torch  # pyright: ignore[reportMissingImports]
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd  # pyright: ignore[reportMissingImports]

    shape = (slots, tokens, heads, WIDTH)
    q, k, v, g = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    logits = torch.randn(*shape[:3], device="cuda", dtype=torch.bfloat16)
    a_log, bias = torch.rand(heads, device="cuda"), torch.rand(heads * WIDTH, device="cuda")
    pool = [0.1 * torch.randn(slots, heads, WIDTH, WIDTH, device="cuda") for _ in range(max(1, 16 // slots))]
    out, turn = torch.empty_like(v), [0]

    def call() -> Any:
        turn[0] += 1
        with torch.inference_mode():
            return fused_recurrent_kda_fwd(
                q,
                k,
                v,
                g,
                logits,
                A_log=a_log,
                dt_bias=bias,
                initial_state=pool[turn[0] % len(pool)],
                inplace_final_state=True,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True,
                lower_bound=BOUND,
                out=out,
            )

    return call


def call_of(case: dict[str, Any]) -> Callable[[], Any]:
    """Of a case of `benchmarks.kda_table`."""
    if case["slots"]:
        return recurrent(case["slots"], case["heads"], case["tokens"])
    return prefill(case["tokens"], case["heads"], tuple(case["segments"]), case["gradient"])


def milliseconds(call: Callable[[], Any]) -> dict[str, float]:
    """Medians: of a call's kernels, from a profiler's trace, and between events around a call."""
    import torch  # pyright: ignore[reportMissingImports]
    from torch.profiler import ProfilerActivity, profile  # pyright: ignore[reportMissingImports]

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    waited = []
    for _ in range(CALLS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        waited.append(begin.elapsed_time(end))
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    kernels = [event for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels.sort(key=lambda event: event.time_range.start)
    found = {"fla_ms_between_events": statistics.median(waited)}
    if kernels and len(kernels) % CALLS == 0:
        each = np.reshape([event.time_range.elapsed_us() / 1e3 for event in kernels], (CALLS, -1)).sum(axis=1)
        found["fla_ms"] = float(np.median(each))
    elif not kernels:
        found["fla_ms"] = found["fla_ms_between_events"]
    else:
        found["fla_ms"] = sum(event.time_range.elapsed_us() for event in kernels) / 1e3 / CALLS
    return found


def tune(folder: Path) -> None:
    """Lets every kernel's autotuner run once for 96 heads and once for 32 with gradients, and writes what won."""
    import gc

    import triton  # pyright: ignore[reportMissingImports]
    from fla.ops.utils.cache import AutotuneKey, CachedAutotuner  # pyright: ignore[reportMissingImports]

    for heads, gradient in ((96, False), (32, True)):
        prefill(8192, heads, (), gradient)()
    folder.mkdir(parents=True, exist_ok=True)
    for tuner in [x for x in gc.get_objects() if isinstance(x, CachedAutotuner) and x.cache]:
        entries = {
            AutotuneKey.key_hash(key): {
                "autotune_key": AutotuneKey.normalize_autotune_key(key),
                "config": {
                    "kwargs": winner.kwargs,
                    "num_warps": winner.num_warps,
                    "num_stages": winner.num_stages,
                    "num_ctas": winner.num_ctas,
                    "maxnreg": winner.maxnreg,
                },
            }
            for key, winner in tuner.cache.items()
        }
        last = list(entries.values())[-1]["config"]
        kept = {"kernel_name": tuner.kernel_name, "triton_version": triton.__version__}
        kept |= {"autotune_entries": entries, "default_config": last}
        (folder / f"{tuner.kernel_name}.json").write_text(json.dumps(kept, indent=1) + "\n")
        print(tuner.kernel_name, [entry["config"] for entry in entries.values()], flush=True)


def work(case: dict[str, Any]) -> None:
    """Compiles, says so, waits to be told, and says what a call takes."""
    obstacle = missing()
    if obstacle is not None:
        print(json.dumps({"missing": obstacle}), flush=True)
        return
    import torch  # pyright: ignore[reportMissingImports]

    try:
        call = call_of(case)
        call()
        torch.cuda.synchronize()
        print(json.dumps({"ready": {}}), flush=True)
        if sys.stdin.readline():
            print(json.dumps(milliseconds(call)), flush=True)
    except Exception as failure:
        print(json.dumps({"failed": f"{type(failure).__name__}: {failure}"[:300]}), flush=True)
        raise


def main() -> None:
    """Tunes, or works for `benchmarks.kda_table`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--tune", type=Path)
    action.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options.worker)
    elif (obstacle := missing()) is not None:
        parser.exit(1, obstacle + "\n")
    else:
        tune(options.tune)


if __name__ == "__main__":
    main()
