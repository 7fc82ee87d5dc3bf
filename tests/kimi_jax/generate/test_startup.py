"""What is said before a model is loaded."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import pytest

from kimi_jax import Kimi, KimiConfig, startup
from kimi_jax.model import Decoder
from kimi_jax.params import named_specs
from pallas_kernels.dispatch import Choice, UnsupportedImplementationError, always, choose, noted_choices
from tests import golden_data

CONFIGS = Path(__file__).parents[3] / "configs"


def released(name: str) -> Decoder:
    return Decoder(KimiConfig.from_dict(json.loads((CONFIGS / f"{name}.json").read_text())))


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("kimi-linear-tiny", "float32"), ("kimi-k3-tiny-mxfp4", "float32"), ("kimi-k31-tiny", "bfloat16")],
)
def test_bytes_are_those_that_loading_takes(family: str, dtype: str) -> None:
    model = golden_data.model(family, dtype)
    assert startup.device_bytes(model.decoder, dtype, {}) == sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))


def test_bytes_on_a_mesh() -> None:
    decoder = released("kimi-linear-48b-a3b")
    whole = startup.device_bytes(decoder, "bfloat16", {})
    experts = sum(2 * spec.size for spec in named_specs(decoder.specs).values() if spec.has_experts)
    assert startup.device_bytes(decoder, "bfloat16", {"expert": 8}) == whole - experts * 7 // 8


@pytest.mark.parametrize(
    ("name", "operations"),
    [
        ("kimi-linear-48b-a3b", {"kda", "short_conv", "dense_mla", "grouped_matmul"}),
        ("kimi-k3", {"kda", "short_conv", "dense_mla", "grouped_matmul", "attn_res"}),
        ("kimi-k31-pro", {"kda", "short_conv", "dsa_mla", "grouped_matmul", "attn_res"}),
    ],
)
def test_every_operation_says_what_it_chose_and_why(name: str, operations: set[str]) -> None:
    found = startup.choices(released(name), "bfloat16")
    assert set(found) >= operations
    line = startup.in_words(found, "gpu")
    for operation, choice in found.items():
        assert choice.name != "reference"
        assert operation in line
        assert choice.name in line
    # Noting the choices has left nothing behind.
    assert startup.choices(released(name), "bfloat16") == found


def test_choices_are_noted_where_they_are_asked_for_only() -> None:
    def work(name: str) -> None:
        choose(name, None, {"tpu": lambda: "there is none.", "xla": always})

    work("before")
    with noted_choices() as outer:
        work("a")
        with noted_choices() as inner:
            work("b")
        with ThreadPoolExecutor(1) as pool:
            pool.submit(work, "elsewhere").result()
        with pytest.raises(UnsupportedImplementationError), noted_choices() as failed:
            choose("c", "gpu", {"xla": always})
        work("d")
    work("after")
    assert list(outer) == ["a", "b", "d"]
    assert inner == {"b": Choice("xla", "tpu: there is none.")}
    assert failed == {}


def test_operations_are_grouped_by_choice_and_reason() -> None:
    none = Choice("xla", "tpu: a has no TPU kernel yet.; gpu: a has no GPU kernel yet.")
    also = Choice("xla", "tpu: b has no TPU kernel yet.; gpu: b has no GPU kernel yet.")
    found = {"b": also, "a": none, "c": Choice("gpu", "first choice")}
    assert startup.in_words(found, "gpu") == (
        "xla for a, b (tpu: there is no TPU kernel yet; gpu: there is no GPU kernel yet); gpu for c (first choice)"
    )
    assert startup.in_words(found, "cpu") == (
        "xla for a, b (kernels run on TPUs and Hopper GPUs); gpu for c (first choice)"
    )


def test_one_line_before_loading(capsys: pytest.CaptureFixture[str]) -> None:
    directory = golden_data.ROOT / "kimi-k3-tiny"
    Kimi.from_pretrained(directory, compilation_cache=False)
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("kimi_jax: kimi_k3, 13 layers, bfloat16, on 1 cpu device (cpu), ")
    assert "MiB of parameters on each; caches: 0.4 KiB a token of latents in bfloat16, " in said[0]
    assert " MiB a row; xla for attn_res, " in said[0]
    assert said[0].endswith("router, short_conv, sort_by_expert (kernels run on TPUs and Hopper GPUs)")
    assert said[1].startswith("kimi_jax: loaded in ")
    assert f"{directory / 'tiktoken.model'} is missing" in said[1]
    Kimi.from_pretrained(directory, compilation_cache=False, progress=False)
    assert capsys.readouterr().err == ""


@pytest.fixture
def unasked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """JAX on the CPU without having been told so."""
    before = jax.config.jax_platforms
    jax.default_backend()
    jax.config.update("jax_platforms", None)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    yield
    jax.config.update("jax_platforms", before)


@pytest.mark.usefixtures("unasked")
@pytest.mark.parametrize(("file", "name"), [("nvidia0", "an NVIDIA GPU"), ("accel3", "a TPU")])
def test_fallback_to_the_cpu_is_seen(tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, name: str) -> None:
    startup.warn_of_fallback(tmp_path)
    (tmp_path / "null").touch()
    (tmp_path / "nvidiactl").touch()
    startup.warn_of_fallback(tmp_path)
    assert caplog.text == ""
    (tmp_path / file).touch()
    startup.warn_of_fallback(tmp_path)
    assert f"This host seems to have {name}, but JAX {jax.__version__} sees only the CPU" in caplog.text
    assert "JAX_PLATFORMS=cpu" in caplog.text


def test_cpu_that_was_asked_for_is_no_fallback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia0").touch()
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", "cpu")
    startup.warn_of_fallback(tmp_path)
    jax.config.update("jax_platforms", before)
    assert caplog.text == ""
