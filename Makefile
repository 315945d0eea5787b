# Each target makes .venv when it is missing and installs the project into it. TORCH is what pip is asked for:
# the default suits a machine with a GPU, TORCH=torch==2.13.0 takes a CPU build where one is at hand.
PYTHON ?= python3
TORCH ?= torch
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CODE := $(wildcard jobs pipelines engine kernels tests examples benchmarks)

export OMP_NUM_THREADS = 1
# Bytecode is kept: tests start Python by the hundred, and each would compile our sources anew.
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help
.PHONY: help demo test torture check clean

help: ## Show the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 16

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)" -e ".[dev]"
	@touch $@

demo: $(STAMP) ## Run the 300 prompts of examples/bard on two ranks and show five answers
	$(BIN)/batch-generate run examples/bard/job.yaml
	$(BIN)/python examples/bard/show.py out/bard

test: $(STAMP) ## Run the tests (GPU tests are skipped without a GPU; REQUIRE_GPU=1 forbids that)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

torture: $(STAMP) ## Kill and stop drivers and ranks at work 360 times at random, resume each time, compare every row (11 minutes)
	$(BIN)/python -m tests.torture --scripted 300 --real 60

check: $(STAMP) ## Lint, format, types and the import rule
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layering.py

clean: ## Remove .venv and caches
	find $(CODE) -name __pycache__ -prune -exec rm -rf {} +
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info build
