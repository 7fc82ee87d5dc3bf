# `make test` and `make demo` set up everything they need: an environment in .venv, the package, its tools.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
export JAX_PLATFORMS ?= cpu

.PHONY: help setup test lint types fast parity bench demo clean

help:
	@echo "make demo    generate with a tiny model"
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

setup: $(VENV)/.dev

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

test: lint types
	$(BIN)/pytest --ignore tests/parity

fast: $(VENV)/.dev
	$(BIN)/pytest --ignore tests/parity -m "not slow"

parity: $(VENV)/.parity
	$(BIN)/pytest tests/parity

bench: $(VENV)/.parity
	$(BIN)/python -m benchmarks.model

clean:
	rm -rf .venv* .pytest_cache .mypy_cache .ruff_cache
