# Everything a person runs. Each target does its own set-up: a fresh clone needs no other command first.

SHELL := /bin/sh
.DEFAULT_GOAL := help
PYTHON := .venv/bin/python
MAKEFLAGS += --no-print-directory

# Which engine to install: cpu, cuda, cuda-0.33 (the next release of vLLM), or none (simulated engines only). Empty: cuda
# where nvidia-smi lists a GPU, else cpu.
BATON_ENGINE ?=
CHOSEN = BATON_ENGINE='$(BATON_ENGINE)' BATON_PYTHON='$(BATON_PYTHON)'
SETUP = $(CHOSEN) scripts/setup.sh
# Services refuse variables that they do not know.
unexport BATON_ENGINE BATON_PYTHON
# Each test starts processes; without compiled modules each of them compiles anew.
unexport PYTHONDONTWRITEBYTECODE
# Passed on to `baton up`, and to pytest.
ARGS ?=
K ?=
# Processes that pytest distributes the tests to.
JOBS ?= 2
export JOBS
# Tests with processes wait for some of their time.
test: JOBS = 4
nightly: JOBS = 3
PYTEST = $(PYTHON) -m pytest -m "not gpu" -rs -n $(JOBS) --no-loadscope-reorder $(if $(K),-k "$(K)")

.PHONY: help setup setup-dev setup-check setup-wheel test-tools llama-server s3-server up down doctor test nightly check fix test-vllm test-gpu compose-test chaos fuzz audit bench-router bench-worker bench-kv bench-placement bench-replay bench-planner bench-role-shift bench-telemetry bench-fleet bench-scale bench-seeds bench-serving gpu-proof outside catalogue wheel dist lock clean

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  \033[1m%-14s\033[0m %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## Make .venv from the locked requirements (the other targets do it when needed)
	@$(SETUP)

setup-dev:
	@$(SETUP) --dev

setup-check: # An edited request path of the router runs as Python, which takes no minute to compile.
	@$(SETUP) --dev --as-is

test-tools: # A browser and Prometheus, where they can be installed
	@scripts/test_tools.sh

llama-server: setup-dev ## A server that is not ours, for a nightly test of attached workers; built from source, a quarter of an hour
	@scripts/llama_server.sh

s3-server: setup-dev ## A server that speaks S3, for nightly tests of objects below a store's files
	@scripts/s3_server.sh

up: setup ## Start the whole system here; ARGS="--decode 2 --model ID_OR_PATH ..." (see .venv/bin/baton up --help)
	@exec .venv/bin/baton up $(ARGS)

down: setup ## Stop a system that `make up` started on another terminal
	@.venv/bin/baton down $(ARGS)

doctor: setup ## Look at the installation and at the system that runs, and say what is wrong and what to do
	@.venv/bin/baton doctor $(ARGS)

test: ## All tests that need no GPU; twelve minutes on two cores; K="a word in the test's name" selects some
	@$(MAKE) -j 2 setup-dev test-tools $(CHOSEN)
	@$(PYTEST) -p no:schemathesis $(ARGS)

nightly: ## What takes longer: chaos, fuzzing, browser, Prometheus, upgrades, containers, benchmarks, many more examples
	@$(MAKE) -j 2 setup-dev test-tools $(CHOSEN)
	@$(MAKE) llama-server s3-server
	@TEST_PROFILE=nightly $(PYTEST) --timeout 3600 tests/nightly tests/properties tests/contracts tests/scenarios $(ARGS)

check: setup-check ## Format, lint, types, layers, generated files and all quick tests that need no process; two minutes on two cores
	@scripts/check.sh

fix: setup-check ## Formatter and safe automatic fixes
	@$(PYTHON) -m ruff format .
	@$(PYTHON) -m ruff check --fix .

test-vllm: setup-dev ## Only the tests with real vLLM engines and NIXL; RELEASE=0.33: that release's Python files over the CPU build
	@over=$$(test -z "$(RELEASE)" || $(PYTHON) -m tests.support.vllm_releases $(RELEASE)) && \
	    PYTHONPATH=$$over $(PYTHON) -m pytest -rs tests/engines $(ARGS)

test-gpu: setup-dev ## KV from GPU to GPU, for one or two NVIDIA GPUs; skips what the machine cannot run; ON_CPU=1 rehearses on the CPU
	@ON_CPU=$(ON_CPU) $(PYTHON) -m pytest -rs -v -m gpu tests/gpu $(ARGS)

chaos: setup-dev ## 50 simulated workers under load, and everything breaks; ten minutes; ARGS="--workers 8 --minutes 1 --seed 2" or "--dense"
	@$(PYTHON) -m tests.nightly.chaos $(ARGS)

audit: setup-dev ## Known vulnerabilities of the locked packages; asks the advisory databases, and says so where they cannot be reached
	@$(PYTHON) scripts/audit.py

fuzz: setup-dev ## 100,000 inputs of each kind, through the edges and on every channel of the bus; half an hour; ARGS="--only LOAD --seed 2"
	@$(PYTHON) -m tests.nightly.fuzz $(ARGS)

compose-test: setup-dev ## Containers, with simulated and with real engines: up, requests, lose one, drain, keys, down; brings a docker of its own to root on Debian
	@$(PYTHON) -m pytest -m compose -rs --timeout 3600 tests/nightly/compose $(ARGS)

bench-router: setup-dev ## What the router and a handoff cost: against direct access and vLLM's own servers; PEERS=1: beside sglang-router and vllm-router
	@$(PYTHON) -m $(if $(PEERS),bench.bench_peers,bench.bench_router) $(ARGS)

bench-worker: setup-dev ## What a worker adds to vLLM's own server, on the same engine: CPU, time to first token and between tokens; and what a step of its scheduler costs; ten minutes
	@$(PYTHON) -m bench.bench_worker $(ARGS)
	@$(PYTHON) -m bench.bench_connector_step

bench-kv: setup-dev ## What the KV exchange costs and saves, on real engines; a quarter of an hour; GPU=1: handoffs on one or two NVIDIA GPUs
	@$(PYTHON) -m $(if $(GPU),bench.bench_kv_gpu,bench.bench_kv) $(ARGS)

bench-placement: setup-dev ## Index, hashing, tokenization and placement; PEER_PYTHON=/a/venv/bin/python with ai-dynamo-runtime compares
	@$(PYTHON) -m bench.bench_index $(if $(PEER_PYTHON),--peer-python $(PEER_PYTHON)) $(ARGS)
	@$(PYTHON) -m bench.bench_tokenize
	@$(PYTHON) -m bench.bench_place
	@$(PYTHON) -m bench.bench_explain
	@$(PYTHON) -m bench.bench_learning

bench-replay: setup-dev ## The placement study in virtual time, an hour and a half, resumable; TRACES="mooncake-conversations=FILE azure-conversations=FILE", ARGS=--quick
	@$(PYTHON) -m bench.study $(foreach one,$(TRACES),--trace $(one)) $(ARGS)

bench-planner: setup-dev ## The planner on a trace in virtual time, against fixed fleets; TRACE=FILE, ARGS="--load 2 --hours 2 --swing 0.7"
	@test -n "$(TRACE)" || { echo "TRACE=FILE is missing: a trace of Mooncake's (.jsonl) or Azure's (.csv)" >&2; exit 2; }
	@$(PYTHON) -m bench.bench_planner "$(TRACE)" $(ARGS)

bench-role-shift: setup-dev ## Goodput of four simulated workers while the load turns, with a planner and without; eight minutes; ARGS=--quick
	@$(PYTHON) -m bench.bench_role_shift $(ARGS)

bench-telemetry: setup-dev ## What metrics and traces cost a router
	@$(PYTHON) -m bench.bench_telemetry $(ARGS)

bench-fleet: setup-dev ## How soon what breaks is noticed, resumed and as before; how long drain and role changes take
	@$(PYTHON) -m bench.bench_fleet $(ARGS)

bench-scale: setup-dev ## Routers among 1,000 played workers with 10 million blocks: placement, memory, reports and events, four routers; nine minutes
	@$(PYTHON) -m bench.bench_scale $(ARGS)

bench-seeds: setup-dev ## What the threads behind Baton claim, measured here, on real engines; half an hour, fetches vLLM's multi-turn script; GPU=1: on NVIDIA GPUs
	@$(PYTHON) -m bench.seeds $(if $(GPU),--gpu) $(ARGS)

bench-serving: setup-dev ## What a user would pick instead, on real engines beside Baton; half an hour or so, fetches two routers and vLLM's sources; ARGS=--quick: some of it; GPU=1: on NVIDIA GPUs
	@$(PYTHON) -m bench.serving $(if $(GPU),--gpu) $(ARGS)

gpu-proof: setup-dev ## Baton on one NVIDIA GPU, on one page; begins nothing after ten minutes; ON_CPU=1 rehearses it on the CPU; not yet run on a GPU
	@ON_CPU=$(ON_CPU) $(PYTHON) -m bench.gpu_proof $(ARGS)

outside: setup-dev ## Suites of other projects against one engine and against P/D; an hour, fetches them; ARGS="--list", ARGS="--only langchain"
	@$(PYTHON) -m tests.outside $(ARGS)

catalogue: setup-check ## Write the generated files anew: catalogue, AsyncAPI, NATS permissions, metrics, diagrams
	@$(PYTHON) -m shared.contracts.catalogue
	@$(PYTHON) -m scripts.make_pages
	@REWRITE=1 $(PYTHON) -m pytest -q tests/unit/orchestrator/test_lifecycle_diagram.py tests/unit/router/relay/test_attempt.py

setup-wheel: # Wheels are compiled from a copy and need no engine; an environment that has one keeps it.
	@BATON_ENGINE=none scripts/setup.sh --as-is

wheel: setup-wheel ## Build the wheel for this Python into dist/; pip install "dist/WHEEL[cpu]" (or [cuda]) installs what `make up` runs; PURE=1: without its parts in C
	@rm -rf dist
	@$(PYTHON) scripts/make_dist.py $(if $(PURE),--pure,--here) dist

dist: setup-wheel ## Build a release into dist/: wheels for each Python that is here, for x86-64 and Arm, the sources, SBOMs, sums; compiles for each
	@rm -rf dist
	@$(PYTHON) scripts/make_dist.py dist

lock: ## Resolve requirements/*.in into the locked requirements (needs uv)
	@scripts/lock.sh

clean: ## Remove .venv and everything the tools left here
	@rm -rf .venv .venv-llama .venv-s3 .peers .baton .outside build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find shared services -name "*.so" -delete
	@rm -f shared/compiled.sha256
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
