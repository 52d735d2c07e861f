# The commands of this repository; `make help` lists them. Everything is made inside the checkout.

PYTHON ?= python3
PRESET ?= smollm2
ENGINE ?= vllm
# For which devices `make engines` works: cpu, cuda or rocm, not what this machine has. ELSEWHERE=1: for another machine.
DEVICE ?= auto
ELSEWHERE ?=
SEED ?=
SIM ?= metaworld
PART ?=
LIMIT ?=
BUNDLE_PYTHON ?=
# What `make setup` installs must be, byte for byte, what constraints/base.hashes.txt says.
HASHES ?=
THERE ?=
# Where torch comes from when not from pip's own index: a folder or page of wheels, or an index.
TORCH_FIND_LINKS ?=
TORCH_INDEX_URL ?=
TORCH_VERSION := 2.13.0

export PIP_CACHE_DIR ?= $(CURDIR)/.cache/pip
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# pip would compile on one core what `make setup` compiles on all of them at its end.
.venv/.complete: export PIP_COMPILE := 0

PIP := .venv/bin/python -m pip
PINNED := -c constraints/base.txt
DISTS := proto libs/servicekit libs/schema libs/planner libs/modelkit services/coordinator services/rollout services/trainer \
	services/simulator services/reward plugins/robots plugins/environments plugins/containers plugins/search plugins/megatron \
	plugins/sglang plugins/clusters cli tools/simulation tools/fake_world
TORCH_FROM := $(if $(TORCH_FIND_LINKS),--find-links $(TORCH_FIND_LINKS)) $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL))

.DEFAULT_GOAL := help
.PHONY: help setup run check lint test nightly test-all engines test-engines megatron test-megatron browser e2e-browser screenshots recording simulators test-simulators test-tinker soak audit gpu-check gpu-check-bundle docs spec-docs reference-docs wheels freeze clean

help: ## List the targets.
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 24
	@echo "  PRESET=smollm2|tiny and SEED=N choose the run; ENGINE=vllm|sglang the engine,"
	@echo "  DEVICE=cpu|cuda|rocm and ELSEWHERE=1 its devices; SIM=metaworld|maniskill|libero|dm_control|pybullet|robotics|playground|verifiers|web the"
	@echo "  simulator; PYTHON=, TORCH_FIND_LINKS=DIR and TORCH_INDEX_URL=URL the set-up; CHROMIUM=PATH the browser."

setup: .venv/.complete ## Make .venv with all packages, editable (what run, test and lint call).
	@:

# A venv is complete once the stamp is there: an interrupted set-up starts again.
.venv/.complete: pyproject.toml constraints/base.txt $(DISTS:%=%/pyproject.toml)
	@sh ci/check_host.sh "$(PYTHON)"
	@rm -f $@ && echo "make setup: this takes some minutes the first time"
	"$(PYTHON)" -m venv .venv
	$(PIP) install -q $(PINNED) --upgrade pip
	$(PIP) install -q $(PINNED) hatchling editables
	$(PIP) install -q $(PINNED) --no-deps $(TORCH_FROM) "torch==$(TORCH_VERSION)"
	$(PIP) install -q --no-deps --no-build-isolation $(DISTS:%=-e ./%)
	$(if $(HASHES),$(PIP) install -q --no-deps --require-hashes -r constraints/base.hashes.txt)
	$(PIP) install -q $(PINNED) --group dev "headrace[local]"
	$(PIP) check
	.venv/bin/python -m compileall -q -j 0 .venv/lib $(DISTS) >/dev/null 2>&1 || true # some packages hold files for other Pythons
	@touch $@ && echo "make setup: .venv is complete"

run: setup ## Train a model from nothing and show it live (PRESET=smollm2 or tiny).
	.venv/bin/headrace demo --preset $(PRESET) $(if $(SEED),--seed $(SEED))

check: setup ## Two minutes: lint, types and tests of what changed, ten seeds of the simulation, ceilings.
	.venv/bin/python -m ci.check

lint: setup ## ruff, mypy, import rules, contracts, generated files, paths of one machine, replaced words, ceilings.
	.venv/bin/python -m ci.parts lint

test: setup ## The tests of .ci/run, about half an hour: units, simulation, flows, kills, security, packaging.
	.venv/bin/python -m ci.parts test

nightly: setup ## What takes too long for every change, for hours: many seeds, tests marked nightly (PART=…: some parts).
	.venv/bin/python -m ci.parts nightly $(PART)

test-all: setup ## Everything: lint, test and nightly, whatever changed.
	.venv/bin/python -m ci.parts lint test nightly

engines: ## Make .envs/ENGINE with the build for this machine's GPUs, or for the CPU (ENGINE=vllm or sglang; DEVICE=).
	@TORCH_FIND_LINKS="$(TORCH_FIND_LINKS)" TORCH_INDEX_URL="$(TORCH_INDEX_URL)" \
	    "$(PYTHON)" -m ci.engines.environments "$(ENGINE)" --device "$(DEVICE)" $(if $(ELSEWHERE),--elsewhere)

test-engines: setup ## The engine contract and a whole run on the real engine, on the CPU (ENGINE=vllm or sglang).
	CI=true TORCH_FIND_LINKS="$(TORCH_FIND_LINKS)" TORCH_INDEX_URL="$(TORCH_INDEX_URL)" .venv/bin/python -m ci.engines "$(ENGINE)" --run

megatron: ## Make .envs/megatron, in which trainers run megatron-core on the CPU.
	@TORCH_FIND_LINKS="$(TORCH_FIND_LINKS)" TORCH_INDEX_URL="$(TORCH_INDEX_URL)" sh ci/megatron.sh "$(PYTHON)"

test-megatron: setup ## The megatron backend against the fsdp one, and a whole run with it.
	@TORCH_FIND_LINKS="$(TORCH_FIND_LINKS)" TORCH_INDEX_URL="$(TORCH_INDEX_URL)" sh ci/test_megatron.sh
	MEGATRON=1 .venv/bin/python -m pytest integration_tests/engines/test_megatron_run.py

browser: ## Make .envs/browser with Playwright, and install Chromium where apt-get may.
	@sh ci/browser.sh "$(PYTHON)"

e2e-browser: setup browser ## The dashboard in a real browser: a run's life, every view, axe-core.
	CI=true .venv/bin/python -m pytest integration_tests/browser

screenshots: setup browser ## Pictures of the dashboard over real runs into .cache/screenshots, and the documentation's into docs/img.
	.venv/bin/python integration_tests/browser/screenshots.py .cache/screenshots
	mv .cache/screenshots/dashboard-*.png docs/img/

simulators: ## Make .envs/SIM with one simulator and the service (SIM=metaworld, maniskill, libero, dm_control, pybullet, robotics, playground, verifiers or web).
	@TORCH_FROM="$(TORCH_FROM)" sh ci/simulators.sh "$(SIM)" "$(PYTHON)"

test-simulators: ## The tests of one simulator in its environment (SIM=…, also openenv and nemo-gym, whose servers run apart).
	@TORCH_FROM="$(TORCH_FROM)" PYTHON="$(PYTHON)" sh ci/test_simulators.sh "$(SIM)"

test-tinker: setup ## Tinker's own client and recipes against a fleet; makes .envs/tinker first.
	@TORCH_FROM="$(TORCH_FROM)" sh ci/test_tinker.sh

recording: setup ## Draw docs/img/run.svg anew: a live run of examples/tiny.yaml in a terminal, on a fleet of its own.
	@PYTHON=.venv/bin/python sh ci/recording.sh docs/img/run.svg

soak: setup ## Two hours of runs under random kills; memory, descriptors, threads and disk must stay flat (MINUTES=120, LOG=FILE).
	@.venv/bin/python benchmarks/soak.py --check --minutes $(or $(MINUTES),120) $(if $(LOG),--log $(LOG))

audit: setup ## bandit, zizmor, pip-audit and a list of what an installation needs (.cache/ci/sbom.cdx.json).
	@sh ci/audit.sh all "$(PYTHON)"

gpu-check: setup ## What only a GPU can show, a JSON line an entry (LIMIT=seconds); exits 3 without one.
	@.venv/bin/python benchmarks/gpu_check.py $(if $(LIMIT),--limit $(LIMIT))

gpu-check-bundle: setup ## What gpu-check needs on a machine without a network (BUNDLE_PYTHON=3.12, THERE=its pip freeze).
	@.venv/bin/python benchmarks/_gpu_bundle.py .cache/gpu-check-bundle $(if $(BUNDLE_PYTHON),--python $(BUNDLE_PYTHON)) $(if $(THERE),--there $(THERE))

docs: setup spec-docs reference-docs ## Build the documentation site into .cache/site (tools in .envs/docs); `python3 -m http.server -d .cache/site` shows it, its search too, without a network.
	test -x .envs/docs/bin/mkdocs || "$(PYTHON)" -m venv .envs/docs
	.envs/docs/bin/python -m pip install -q -c constraints/docs.txt mkdocs-material
	.envs/docs/bin/mkdocs build --strict --site-dir .cache/site

spec-docs: setup ## Write docs/run-spec.md again from the run spec's schema.
	.venv/bin/python -m ci.spec_docs docs/run-spec.md

reference-docs: setup ## Write docs/http-api.md, grpc-api.md and models.md again from the API, the proto files and the tests' families.
	.venv/bin/python -m ci.reference_docs docs
	.venv/bin/python -m ci.model_docs docs/models.md

wheels: ## Put torch's wheel into deploy/wheels, from which docker compose builds (TORCH_INDEX_URL=: the CPU index).
	"$(PYTHON)" -m pip download -q --no-deps -d deploy/wheels $(TORCH_FROM) torch==$(TORCH_VERSION)

freeze: ## Write constraints/base.txt from what .venv holds now.
	@{ sed -n '/^#/p' constraints/base.txt; $(PIP) freeze --all --exclude-editable | sed -e '/^#/d' -e 's/^torch==.*/torch==$(TORCH_VERSION)/'; } > .base.txt
	@mv .base.txt constraints/base.txt
	@sh ci/audit.sh hashes "$(PYTHON)"

clean: ## Remove environments, caches and build products; runs and models (.headrace) stay.
	rm -rf .venv .envs .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
