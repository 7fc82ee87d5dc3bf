"""What may be asked for, and that anything else is refused in a sentence that says what is legal."""

import importlib.util
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kimi_jax import SamplingParams
from kimi_jax.generate import sampling


@pytest.fixture(scope="module")
def unchecked() -> ModuleType:
    """The module as users have it: without the type checks that tests put around every function."""
    spec = importlib.util.spec_from_file_location("unchecked_sampling", sampling.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("field", "value", "error", "words"),
    [
        ("temperature", -0.1, ValueError, "temperature=-0.1 must be from 0 to 1,000,000"),
        ("temperature", float("nan"), ValueError, "temperature=nan"),
        ("temperature", float("inf"), ValueError, "temperature=inf"),
        ("temperature", "warm", TypeError, "temperature='warm' must be a number"),
        ("temperature", True, TypeError, "temperature=True"),
        ("temperature", None, TypeError, "temperature=None"),
        ("top_k", 0, ValueError, "top_k=0 must be an integer of at least 1"),
        ("top_k", -1, ValueError, "top_k=-1"),
        ("top_k", 2.0, TypeError, "top_k=2.0 must be an integer"),
        ("top_p", 0.0, ValueError, "top_p=0.0 must be above 0 and at most 1"),
        ("top_p", 1.01, ValueError, "top_p=1.01"),
        ("top_p", float("nan"), ValueError, "top_p=nan"),
        ("min_p", -0.01, ValueError, "min_p=-0.01 must be from 0 to 1"),
        ("min_p", 1.5, ValueError, "min_p=1.5"),
        ("repetition_penalty", 0.0, ValueError, "repetition_penalty=0.0"),
        ("repetition_penalty", 1e9, ValueError, "repetition_penalty=1000000000.0"),
        ("presence_penalty", float("-inf"), ValueError, "presence_penalty=-inf"),
        ("max_new_tokens", 0, ValueError, "max_new_tokens=0 must be an integer of at least 1"),
        ("max_new_tokens", 3.5, TypeError, "max_new_tokens=3.5"),
        ("stop", "", ValueError, "stop='' holds an empty string"),
        ("stop", ["a", ""], ValueError, "empty string"),
        ("stop", [b"a"], TypeError, "must be a string, or several"),
        ("stop", 7, TypeError, "stop=7 must be a string, or several"),
        ("stop_token_ids", [-1], ValueError, "stop_token_ids holds -1"),
        ("stop_token_ids", [1.0], TypeError, "stop_token_ids holds 1.0"),
        ("stop_token_ids", 3, TypeError, "stop_token_ids=3 must be a list of token ids"),
        ("stop_token_ids", "12", TypeError, "stop_token_ids='12' must be a list"),
        ("seed", -1, ValueError, "seed=-1 must be an integer from 0 to 9223372036854775807"),
        ("seed", 2**63, ValueError, "seed=9223372036854775808"),
        ("seed", 1.0, TypeError, "seed=1.0"),
        ("logprobs", 1, TypeError, "logprobs=1 must be True or False"),
        ("top_logprobs", 21, ValueError, "top_logprobs=21 must be an integer from 0 to 20"),
        ("top_logprobs", -1, ValueError, "top_logprobs=-1"),
        ("logit_bias", {3: float("nan")}, ValueError, r"logit_bias\[3\]=nan"),
        ("logit_bias", {3: 1e7}, ValueError, r"logit_bias\[3\]=10000000.0 must be from -1,000,000 to 1,000,000"),
        ("logit_bias", {-3: 1.0}, ValueError, "logit_bias holds -3"),
        ("logit_bias", {"3": 1.0}, TypeError, "logit_bias holds '3'"),
        ("logit_bias", {3: "x"}, TypeError, r"logit_bias\[3\]='x' must be a number"),
        ("logit_bias", [3], TypeError, r"logit_bias=\[3\] must map token ids to numbers"),
        ("allowed_token_ids", [], ValueError, "allowed_token_ids is empty"),
        ("allowed_token_ids", [True], TypeError, "allowed_token_ids holds True"),
        # Python refuses to write out so many digits, which must not hide what is wrong.
        *(
            pytest.param(
                field, 10**5000, ValueError, f"{field}=a value of type int that is too long to be shown must", id=field
            )
            for field in ("temperature", "top_p", "seed", "top_logprobs", "presence_penalty")
        ),
        ("stop_token_ids", [-(10**5000)], ValueError, "stop_token_ids holds a value of type int that is too long"),
        (
            "logit_bias",
            {10**5000: "x"},
            TypeError,
            r"logit_bias\[a value of type int that is too long to be shown\]='x'",
        ),
        ("stop", [["a"] * 10**6], TypeError, r"stop=\[\['a', 'a', 'a', 'a', 'a', 'a', ...\]\] must be a string"),
    ],
)
def test_illegal_values(unchecked: ModuleType, field: str, value: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        unchecked.SamplingParams(**{field: value})
    with pytest.raises(error, match=words):
        unchecked.SamplingParams.of(unchecked.SamplingParams(), {field: value})


def test_unknown_parameter(unchecked: ModuleType) -> None:
    with pytest.raises(TypeError, match=r"'temprature' isn't a sampling parameter; legal are temperature, top_k"):
        unchecked.SamplingParams.of(None, {"temprature": 1.0})
    with pytest.raises(TypeError, match="sampling=3 must be SamplingParams"):
        unchecked.SamplingParams.of(3, {})


def test_values_of_numpy_are_taken() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(3), seed=np.int32(7), stop_token_ids=np.array([4, 5]).tolist()
    )
    assert params.stop_token_ids == (4, 5)
    assert SamplingParams(logit_bias={np.int64(3): np.float32(1.5)}).logit_bias == {3: 1.5}


def test_one_stop_string_is_one() -> None:
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_later_changes_of_what_was_given_do_not_matter() -> None:
    bias, stop = {3: 1.0}, ["a"]
    params = SamplingParams(logit_bias=bias, stop=stop)
    bias[4] = 2.0
    stop.append("b")
    assert (params.logit_bias, params.stop) == ({3: 1.0}, ("a",))
