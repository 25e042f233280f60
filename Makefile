# Every target that needs the virtual environment makes it first; see scripts/setup.sh for the variables.
.DEFAULT_GOAL := help
.PHONY: help setup run test test-tools test-nightly test-skew test-engines test-fleet fleet chaos bench newcomer wheels gpu-wheels lint fix protos boards page-picture api reference clean

PYTHON_SOURCES := kvplane control_plane data_plane engine integrations conftest.py models tests benchmarks examples scripts setup.py
SHELL_SOURCES := .ci/run $(wildcard scripts/*.sh integrations/*/tests/*.sh deploy/*.sh deploy/slurm/*.sh benchmarks/gpu/*.sh tests/*/*.sh)
BIN := .venv/bin
# More for pytest, such as PYTEST_ARGS="-k fork -x", or PYTEST_ARGS="-n 0" for a single process.
PYTEST_ARGS ?=
# Two workers more than there are cores: much of what tests do is to wait for processes and timers.
# Each begins with neighbouring tests, so that what they share is made once.
# A test that fails is run once more, and listed as RERUN: hundreds of them start processes, and one
# that a busy machine held up is no fault of the change. One that is listed often wants mending.
PYTEST := $(BIN)/python -m pytest -n $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 2))) --dist worksteal --reruns 1

# Tests start hundreds of processes, and pytest rewrites modules of hypothesis where it finds no
# bytecode of its own: each start would take a second longer.
unexport PYTHONDONTWRITEBYTECODE

help:  ## List the targets
	@sed -nE 's/^([a-z-]+):.*## /\1\t/p' $(MAKEFILE_LIST) | awk -F'\t' '{printf "make %-14s %s\n", $$1, $$2}'

setup:  ## Make .venv: pinned packages, native kernels, this project
	@scripts/setup.sh

run:  ## Start both planes, serve the shipped model through them, and check every answer
	@began=$$(date +%s) && scripts/setup.sh && $(BIN)/python -m examples.demo && \
	  echo "make run: $$(($$(date +%s) - began)) s, of which $$(cat .venv/.kvplane-network) s waited for the network"

test: setup  ## Run the push tier of the tests
	@$(PYTEST) -m "not nightly and not fleet" $(PYTEST_ARGS)

test-nightly: setup  ## Run the nightly tier: the long tests that make test leaves out
	@$(PYTEST) -m nightly $(PYTEST_ARGS)

test-skew: setup  ## Run the last release as each plane and as the engine, beside this tree
	@$(BIN)/python -m pytest -n 0 -v tests/e2e/test_skew.py $(PYTEST_ARGS)

test-engines: setup build/engines/sglang  ## Run the tests of engines of others: vLLM and SGLang, on a CPU
	@$(BIN)/python -m pytest -n 0 -v -s -m nightly $(PYTEST_ARGS) tests/engines

# On Linux, pip finds builds for CUDA of the three that are uninstalled, which cannot be imported here.
build/engines/vllm: tests/engines/requirements.txt
	@python3 -m venv $@
	@$@/bin/python -m pip install --quiet --requirement $<
	@$@/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$@/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

build/engines/sglang: tests/engines/sglang.txt | build/engines/vllm
	@test -e /usr/include/openssl/sha.h || { echo "SGLang needs libssl-dev (on Debian: apt install libssl-dev)" >&2; exit 1; }
	@build/engines/vllm/bin/python -m pip install --quiet --no-deps --upgrade --target $@ --requirement $<
	@touch $@

# Ray listens on all interfaces, so it gets a network of its own.
FLEET := PYTHONPATH=build/ray integrations/ray/tests/in_namespace.sh $(BIN)/python

fleet: setup build/ray  ## Answer on simulated machines while a leader, a shard and a machine are lost; needs etcd
	@$(FLEET) -m integrations.ray.tests.simulate

test-fleet: setup build/ray  ## Run the tests of fleets on Ray, on a cluster of simulated nodes
	@$(FLEET) -m pytest -n 0 -m fleet $(PYTEST_ARGS) integrations/ray/tests

build/ray: integrations/ray/requirements.txt
	@$(BIN)/python -m pip install --quiet --target $@ --requirement $< --constraint requirements/lock.txt
	@touch $@

SECONDS ?= 600
chaos: setup  ## Break a running fleet for SECONDS and check every answer; SEED chooses how
	@$(BIN)/python -m tests.chaos --seconds $(SECONDS) --seed $(or $(SEED),0)

bench: setup  ## Measure a step through both planes, by transport
	@$(BIN)/python -m benchmarks.transport
	@$(BIN)/python -m benchmarks.blocks

test-tools:  ## Install, as root, what tests and make lint use of Debian; else print the line that does
	@bash -c '. scripts/packages.sh && need_to_test && need_at_night && install_missing "make test-tools"'

wheels: setup build/wheel-tools  ## Make dist/, a release's wheels, and serve a model from them in a bare Debian; needs debootstrap
	@scripts/wheels.sh
	@scripts/newcomer.sh server

build/wheel-tools: requirements/wheels.txt
	@$(BIN)/python -m pip install --quiet --target $@ --requirement $<
	@touch $@

ROLES := model server engines engineer platform
newcomer:  ## Do what README.md shows to each reader, in a bare Debian with dist/, and say how long it takes
	@for role in $(ROLES); do scripts/newcomer.sh $$role || exit 1; done

gpu-wheels:  ## Make .whl, the wheels that the first minutes on a GPU take along; needs nvcc
	@benchmarks/gpu/gpu_wheels.sh

lint: setup node_modules  ## Check style, types, C++ format, protos and shell scripts
	$(BIN)/ruff check $(PYTHON_SOURCES)
	$(BIN)/ruff format --check $(PYTHON_SOURCES)
	$(BIN)/mypy
	find csrc tests -not -path '*/build/*' \( -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \) \
	  -exec $(BIN)/clang-format --dry-run -Werror {} +
	npx --no-install buf lint
	npx --no-install buf breaking --against protos/wire-0.binpb
	for script in $(SHELL_SOURCES); do bash -n "$$script" || exit 1; done

fix: setup  ## Format the code and mend what ruff can mend
	$(BIN)/ruff check --fix $(PYTHON_SOURCES)
	$(BIN)/ruff format $(PYTHON_SOURCES)
	find csrc tests -not -path '*/build/*' \( -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \) \
	  -exec $(BIN)/clang-format -i {} +

protos:  ## Generate the stubs of the contract again
	@scripts/protos.sh

boards: setup  ## Write the Grafana boards from deploy/grafana/panels.yml
	@$(BIN)/python -m scripts.boards

page-picture: setup  ## Take a picture of the page under load, into docs/page.png; needs chromium
	@$(BIN)/python -m scripts.page_picture

api: setup build/api-tools  ## Write the reference of the Python API to build/api, and check its links
	@PYTHONPATH=build/api-tools $(BIN)/python -m scripts.api_reference

build/api-tools: requirements/api.txt
	@$(BIN)/python -m pip install --quiet --target $@ --requirement $<
	@touch $@

reference: setup  ## Write the tables of docs/reference/ from the declarations
	@$(BIN)/python -m scripts.reference

node_modules: package.json
	@command -v npm >/dev/null || { echo "make lint needs npm (on Debian: apt install npm)" >&2; exit 1; }
	npm install --no-audit --no-fund --no-package-lock
	@touch node_modules

clean:  ## Remove all that these targets made
	rm -rf .venv node_modules build dist csrc/build csrc/blocks/build .whl .run benchmarks/out .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
