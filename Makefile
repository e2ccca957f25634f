# make quickstart: train the text-to-SQL agent and draw its curve.   make test: pass the tests.   Both install what they need.
.PHONY: help quickstart test test-verl check fix bench table clean
.DEFAULT_GOAL := help

BIN := .venv/bin
PYTHONS := packages examples tests benchmarks

help:  ## Say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

.venv/.installed: uv.lock scripts/install.sh
	@echo "installing into .venv (once) ..."
	@scripts/install.sh

.venv-verl/.installed: packages/verl-cpu/uv.lock scripts/install-verl.sh
	@echo "installing into .venv-verl (once; 3 GB) ..."
	@scripts/install-verl.sh

quickstart: .venv/.installed  ## Train an unchanged LangGraph text-to-SQL agent on this machine and draw its curve
	@$(BIN)/lightningrl train examples/text_to_sql

test: .venv/.installed  ## Run all tests
	@$(BIN)/python -m pytest -q --ignore=packages/trainer-verl --ignore=packages/verl-cpu

test-verl: .venv-verl/.installed  ## Run the tests of the verl backend: verl, Ray and vLLM for real, on the CPU
	@.venv-verl/bin/python -m pytest -q packages/trainer-verl packages/verl-cpu

check: .venv/.installed  ## Lint, types, import rules
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

fix: .venv/.installed  ## Mend what ruff can mend
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: .venv/.installed  ## Measure the numbers of the README's benchmark table
	@$(BIN)/python benchmarks/run_all.py

table: .venv/.installed  ## Reproduce the README's learning tables (3 seeds, control, variants); one of them: make table EXAMPLE=rag
	@$(BIN)/python benchmarks/learning_table.py $(EXAMPLE)

clean:  ## Remove .venv and caches
	@rm -rf .venv .venv-verl .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
