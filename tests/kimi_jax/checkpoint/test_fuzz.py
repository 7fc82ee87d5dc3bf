"""A short run of the fuzzer; `benchmarks/checkpoint.py fuzz` runs it for longer."""

import json

import pytest

from tests.kimi_jax.checkpoint.sources import run_script

SECONDS = 30


@pytest.mark.slow
def test_mutated_files_are_read_within_bounds_or_refused() -> None:
    script = "import json; from tests.kimi_jax.checkpoint.fuzz import main; print(json.dumps(main(float({}), 0)))"
    results = json.loads(run_script(script.format(SECONDS)))
    for target in ("header", "directory", "index", "marker", "record"):
        assert results[f"{target} refused"] > 5
    assert sum(results.values()) > 100
