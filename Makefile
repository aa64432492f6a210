PYTHON ?= python3
# The tested version. It is installed first, so that no other requirement can pull in another one.
TORCH ?= torch==2.13.0

BIN := .venv/bin
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-6s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP) ## create .venv and install jetspec there; done again when pyproject.toml changes

demo: $(STAMP) ## decode four prompts with and without drafts
	$(BIN)/jetspec demo

test: $(STAMP) ## run all tests
	$(BIN)/python -m pytest

lint: $(STAMP) ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP) ## measure the forward's cost and all methods here; results go to the README
	$(BIN)/python benchmarks/forward.py
	$(BIN)/jetspec bench --methods jetspec-tree,jetspec-chain,hf-generate,hf-lookup --budgets 8,16,auto --tokens 128 --outside-prompts 2 \
		--out benchmarks/results/bench.jsonl
	$(BIN)/jetspec bench --heads heads/smollm2-135m --temperatures 0,1 --outside-prompts 1 \
		--out benchmarks/results/bench.jsonl
	$(BIN)/python benchmarks/table.py

clean: ## remove caches and build outputs; .venv, data and runs stay
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "jetspec needs Python 3.11 or newer; choose one with: make venv PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv .venv

$(STAMP): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install "$(TORCH)"
	$(BIN)/python -m pip install -e ".[dev]"
	touch $@
