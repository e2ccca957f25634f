# make quickstart: train the text-to-SQL agent and draw its curve.   make test: pass the tests.   Both install what they need.
.PHONY: help install quickstart real test test-browser test-long test-peers-clients test-openenv test-verl test-verl-run test-vllm check fix bench bench-peers bench-credit table frameworks docs release clean
.DEFAULT_GOAL := help

BIN := .venv/bin
# Tests start hundreds of processes: without bytecode each of them would compile torch and transformers anew.
unexport PYTHONDONTWRITEBYTECODE
# A test process more than cores: tests wait for processes that they start. Files stay together, for what their tests share.
JOBS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
PYTEST := python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder
LIGHT := --ignore=packages/trainer-verl

help:  ## Say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

.venv/.installed: uv.lock scripts/install.sh $(wildcard packages/*/pyproject.toml)  # their entry points
	@echo "installing into .venv (once) ..."
	@scripts/install.sh

.venv-verl/.installed: packages/trainer-verl/cpu/uv.lock scripts/install-verl.sh
	@echo "installing into .venv-verl (once; 3 GB) ..."
	@scripts/install-verl.sh

install: .venv/.installed  ## Install into .venv; then: source .venv/bin/activate

real: .venv/.installed  ## Train a pretrained model, SmolLM2-135M-Instruct, to use a calculator: about three minutes on two cores
	@$(BIN)/lightningrl train examples/calculator_smollm2

quickstart: .venv/.installed  ## Train an unchanged LangGraph text-to-SQL agent on this machine and draw its curve
	@$(BIN)/lightningrl train examples/text_to_sql

test: .venv/.installed  ## Run all tests, at a size that tells: twenty minutes on two cores
	@$(BIN)/$(PYTEST) $(LIGHT) --durations=10

test-long: .venv/.installed  ## Run all tests at full size: attribution, crashes, fuzz, the pages from built wheels
	@$(BIN)/$(PYTEST) $(LIGHT) --durations=20 --long

test-browser: .venv/.installed  ## Look at the viewer's pages in a real Chromium (apt-get install chromium): keys, axe
	@$(BIN)/uv export --quiet --frozen --only-group browser --no-hashes | $(BIN)/uv pip install --quiet --python $(BIN)/python -r -
	@$(BIN)/python -m pytest -q tests/browser

.venv-openenv/.installed: Makefile .venv/.installed
	@$(BIN)/python -m venv .venv-openenv && $(BIN)/uv pip install --quiet --python .venv-openenv/bin/python 'openenv>=0.10,<0.11' && touch $@

.venv-verifiers/.installed: Makefile .venv/.installed
	@$(BIN)/python -m venv .venv-verifiers && $(BIN)/uv pip install --quiet --python .venv-verifiers/bin/python 'verifiers>=0.4,<0.5' && touch $@

test-openenv: .venv-openenv/.installed .venv-verifiers/.installed  ## Run the task sources against real openenv servers and the real verifiers, each in an environment of its own; three minutes
	@$(BIN)/python -m pytest -q packages/tasks-openenv packages/tasks-verifiers --durations=5

test-verl: .venv-verl/.installed  ## Run all tests of the verl backend: verl, Ray and vLLM for real, on the CPU; most of an hour
	@.venv-verl/bin/python -m pytest -q packages/trainer-verl --durations=10

test-vllm: .venv-verl/.installed  ## Run the tests of vLLM as the torch backend's engine, on the CPU; two minutes
	@OMP_NUM_THREADS=1 .venv-verl/bin/python -m pytest -q packages/trainer-torch/tests/test_torch_vllm.py --durations=3

test-verl-run: .venv-verl/.installed  ## Of those one run through everything: two ranks, kill -9, resume, export; and tuning
	@.venv-verl/bin/python -m pytest -q packages/trainer-verl/tests/test_verl_runs.py packages/trainer-verl/tests/test_verl_tuning.py --durations=3 -k "two_ranks_with_two_replicas or (torch_backend and sft)"

test-peers-clients: .venv/.installed  ## Let real SDKs and coding harnesses (openai, AI SDK, Claude Code, Codex, aider, ...) write a file through `lightningrl try`, and run their own test suites; some: ONLY="codex aider langchain"
	@$(BIN)/python scripts/try_clients.py $(ONLY)

check: .venv/.installed  ## Lint, words, types (of the tests too), import rules
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python scripts/check_words.py
	@$(BIN)/python scripts/check_pages.py
	@scripts/check-types.sh
	@$(BIN)/lint-imports

fix: .venv/.installed  ## Mend what ruff can mend
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: .venv/.installed  ## Measure the numbers of the benchmark table in docs/reference/results.md; AGAINST=COMMIT: then and now, in turns
	@$(BIN)/python benchmarks/against.py $(AGAINST)

bench-peers: .venv/.installed  ## Measure our gateway beside agent-lightning's and our trainer beside TRL's, in turns; a small one: QUICK=1
	@$(BIN)/python benchmarks/peers/gateways.py $(if $(QUICK),--rounds 1 --quick)
	@$(BIN)/python benchmarks/peers/trainers.py $(if $(QUICK),--quick)

bench-credit: .venv/.installed  ## Which credit is right, and does it matter? Tables and picture of docs/explanation/credit/study.md; a small one: QUICK=1
	@$(BIN)/python benchmarks/credit/study.py $(if $(QUICK),--quick)

table: .venv/.installed  ## Reproduce the learning tables of docs/reference/results.md (3 seeds, control, variants); one of them: make table EXAMPLE=rag
	@$(BIN)/python benchmarks/learning_table.py $(EXAMPLE)

frameworks: .venv/.installed  ## Run agents of other frameworks, ours and their authors' own examples, each in an environment of its own, and print what was recorded; some: make frameworks ONLY="agno their_marvin"
	@$(BIN)/python scripts/try_frameworks.py $(ONLY)

docs: .venv/.installed  ## Write the documentation as a site: site/index.html
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

release: .venv/.installed  ## Build wheels and sdists into dist/, check their metadata, and run README from them in an empty environment; nothing is uploaded
	@$(BIN)/python scripts/make_release.py

clean:  ## Remove .venv and caches
	@rm -rf .venv .venv-openenv .venv-verifiers .venv-verl .clients .frameworks .peers .mypy_cache .pytest_cache .ruff_cache .import_linter_cache site
