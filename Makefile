# All commands for development and CI; `make help` lists them.
PYTHON ?= python3
BIN := .venv/bin
# Extra arguments for `tessera serve`, e.g. make serve ARGS="--port 9000"
ARGS ?=
# Folders or files of tests, e.g. make test TESTS=tests/http, and the number of processes that run them
TESTS ?= tests
JOBS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist=worksteal $(TESTS)

.DEFAULT_GOAL := help
.PHONY: help setup dev serve test test-slow test-gpu check format docs bench clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

.venv/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Tessera needs Python 3.11 or newer, found " + sys.version)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

.venv/.installed-dev: .venv/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test,dev]'
	@touch $@

setup: .venv/.installed ## Make .venv and install Tessera into it

dev: setup .venv/.installed-dev ## Install the dependencies of tests and checks too

serve: setup ## Serve the bundled model on port 8000 (ARGS="..." is passed on)
	@exec $(BIN)/tessera serve $(ARGS)

test: dev ## Run the tests that need no GPU and are not slow
	$(PYTEST)

test-slow: dev ## Run the slow tests: compile every launch for every GPU, all combinations
	$(PYTEST) -m 'slow and not gpu'

test-gpu: dev ## Run the tests that need a CUDA device; fails without one
	$(PYTEST) -m gpu

check: dev ## Lint, types, import contracts, the Dockerfile
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint Dockerfile

format: dev ## Apply the formatter and the safe fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: dev ## Regenerate the generated parts of the documents
	$(BIN)/python -m docs.generate

bench: dev ## Measure the bundled model on the CPU, compared with transformers
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m benchmarks.cpu # the same setting as in the engine process

clean: ## Remove the environment and caches
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
