# `make test` and `make demo` set up everything they need: an environment in .venv, the package, its tools.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
export JAX_PLATFORMS ?= cpu

# What tells fastest whether a new Python or jax breaks anything.
FAST := tests/kimi_jax/test_golden.py tests/kimi_jax/test_bad_input.py tests/kimi_jax/test_config.py \
	tests/kimi_jax/test_reader.py tests/kimi_jax/text tests/pallas_kernels/test_attn_res.py \
	tests/pallas_kernels/test_short_conv.py tests/pallas_kernels/test_lightning_indexer.py

.PHONY: help setup test lint types fast parity bench demo clean

help:
	@echo "make demo    look into a tiny checkpoint and generate with it (random weights: token ids, not a story)"
	@echo "make test    lint, types, and the test suite"
	@echo "make parity  the suite against transformers and torch on the CPU"
	@echo "make bench   benchmarks; tables on standard output"

$(VENV)/.dev: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(VENV)/.parity: $(VENV)/.dev
	$(PIP) --constraint constraints.txt --editable '.[dev,parity]'
	@touch $@

$(VENV)/.run: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --constraint constraints.txt --editable .
	@touch $@

setup: $(VENV)/.dev

demo: $(VENV)/.run
	$(BIN)/kimi-jax inspect tests/golden/kimi-k31-tiny
	$(BIN)/kimi-jax generate tests/golden/kimi-k31-tiny --token-ids 1,2,3,4 --max-new-tokens 24

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

test: lint types
	$(BIN)/pytest --ignore tests/parity

fast: $(VENV)/.dev
	$(BIN)/pytest -m "not slow" $(FAST)

parity: $(VENV)/.parity
	$(BIN)/pytest tests/parity

bench: $(VENV)/.parity
	$(BIN)/python -m benchmarks.model

clean:
	rm -rf .venv* .pytest_cache .mypy_cache .ruff_cache
