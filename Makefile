# `make test` and `make demo` set up everything they need: an environment in .venv, the package, its tools.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Processes that share the suite, a file at a time; each takes up to 4 GiB.
WORKERS ?= 2
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# libtpu comes with the tools, to compile for TPUs that aren't there; where none is, it writes that it looked for one.
export JAX_PLATFORMS ?= cpu

# What tells fastest whether a new Python or jax breaks anything.
FAST := tests/kimi_jax/test_golden.py tests/kimi_jax/test_bad_input.py tests/kimi_jax/test_config.py \
	tests/kimi_jax/test_reader.py tests/kimi_jax/text tests/pallas_kernels/test_attn_res.py \
	tests/pallas_kernels/test_short_conv.py tests/pallas_kernels/test_lightning_indexer.py

.PHONY: help setup test lint types fast parity bench demo clean

help:
	@echo "make demo    a story, a tool call and a long text with the small trained model in the package"
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
	$(BIN)/kimi-jax demo

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

test: lint types
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --ignore tests/parity --durations 25

fast: $(VENV)/.dev
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow" $(FAST)

parity: $(VENV)/.parity
	$(BIN)/pytest tests/parity

bench: $(VENV)/.parity
	$(BIN)/python -m benchmarks.model

clean:
	rm -rf .venv* .pytest_cache .mypy_cache .ruff_cache
