# `make` alone lists the targets. Everything Python lives in .venv; scripts/setup.sh fills it.
SHELL := /bin/bash
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
BIN := .venv/bin
ARGS ?=
JOBS ?= 6

.PHONY: help
help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo '  Options go through ARGS:  make run ARGS="--dry-run --once"'

.PHONY: setup
setup: ## install what is needed: Debian packages (as root) and .venv
	@scripts/setup.sh

.PHONY: setup-dev
setup-dev: ## install what the tests and the bench need as well
	@scripts/setup.sh dev

.PHONY: run
run: setup ## run the daemon on this node
	@exec $(BIN)/resolver run $(ARGS)

.PHONY: demo
demo: setup ## a node in miniature, repaired before your eyes (needs root; no GPU)
	@$(BIN)/python -m tests.fakes.demo $(ARGS)

.PHONY: test
test: setup-dev ## lint, types, layering and every test, JOBS=6 at a time (needs root; no GPU)
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

.PHONY: long
long: setup-dev ## the tests that take long: the image, the site, the documents' commands, setup, and some at their full size (needs root; minutes)
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m long $(ARGS)

.PHONY: lint
lint: setup-dev ## ruff, mypy and import-linter only
	@$(BIN)/python -m pytest --no-header -q tests/unit/test_style.py tests/unit/test_layering.py

.PHONY: format
format: setup-dev ## put the code in order with ruff
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format --quiet .

.PHONY: bench
bench: setup-dev ## measure speed, memory and what probes cost: a table and bench.json
	@$(BIN)/python -m tests.bench $(ARGS)

.PHONY: soak
soak: setup-dev ## churn and attack a node for long, and see whether the daemon grows (ARGS=30m; needs root)
	@$(BIN)/python -m tests.bench.soak $(ARGS)

.PHONY: plots
plots: setup-dev ## put what `make bench` measured into the documents (ARGS=bench.json)
	@$(BIN)/python -m tests.bench.plots $(ARGS)

.PHONY: pictures
pictures: setup-dev ## draw docs/dashboard.svg and docs/top.svg anew (needs root; ten minutes)
	@$(BIN)/python -m scripts.pictures.top
	@$(BIN)/python -m scripts.pictures.dashboard $(ARGS)

.PHONY: docs
docs: setup-dev ## build the documents as a site, in build/site
	@$(BIN)/python docs/site/conf.py $(ARGS)

.PHONY: gpu-check
gpu-check: setup-dev ## where there is a GPU: what its driver says in a container, and the repair on it (needs root)
	@$(BIN)/python -m tests.gpu.check $(ARGS)

.PHONY: kernels
kernels: setup-dev ## boot the kernels of Debian's releases under QEMU and try it on each (an hour; ARGS=--help)
	@$(BIN)/python -m tests.vm $(ARGS)

.PHONY: engines
engines: setup-dev ## start Debian's container engines and try it under each (needs root; minutes; ARGS=--help)
	@$(BIN)/python -m tests.runtime.engines $(ARGS)

.PHONY: fresh
fresh: ## prove setup and demo in a bare Debian made by debootstrap (needs root, minutes)
	@tests/runtime/fresh_machine.sh $(ARGS)

.PHONY: lock
lock: ## resolve the dependencies anew and write the lock files
	@scripts/lock.sh $(ARGS)

.PHONY: man
man: setup ## write the man pages in docs/man anew, from the commands' parsers
	@$(BIN)/python scripts/man.py

.PHONY: client-types
client-types: setup-dev ## write the types of what the daemon answers anew, from the API's description
	@$(BIN)/python scripts/client_types.py

.PHONY: completion
completion: setup-dev ## write what shells complete commands and options by anew, from the commands' parsers
	@$(BIN)/python scripts/completion.py

.PHONY: tables
tables: setup-dev ## write the documents' tables anew that come from the code
	@$(BIN)/python -m tests.fakes.layouts
	@$(BIN)/python scripts/tables.py $(ARGS)
	@$(BIN)/python scripts/chart.py

.PHONY: monitoring
monitoring: setup-dev ## write the Grafana dashboard and the PrometheusRule in deploy/ anew, and the chart's copies
	@$(BIN)/python scripts/monitoring.py
	@$(BIN)/python scripts/chart.py

.PHONY: chart
chart: setup-dev ## write what the Helm chart has from elsewhere anew, and pack it into dist/
	@$(BIN)/python scripts/chart.py
	@$(BIN)/helm lint --strict --quiet deploy/chart/resolver
	@$(BIN)/helm package --destination dist deploy/chart/resolver

# `docker`, `podman` or `buildah`, whichever is there. IMAGE=registry.example.org/resolver:0.1.0 names it for a registry.
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' resolver/__init__.py)
ENGINE ?= $(firstword $(foreach each,docker podman buildah,$(shell command -v $(each))))
IMAGE ?= resolver:$(VERSION)
REVISION ?= $(shell git rev-parse HEAD 2>/dev/null || echo unknown)
WITH_BPF ?= 1

.PHONY: image
image: ## build the container image; IMAGE=name:tag, WITH_BPF=0 for one without bcc and LLVM
	@[[ -n "$(ENGINE)" ]] || { echo "image: no docker, podman or buildah on PATH: install one, or name it: ENGINE=..." >&2; exit 1; }
	@$(ENGINE) build --file deploy/image/Dockerfile --tag $(IMAGE) --build-arg VERSION=$(VERSION) \
		--build-arg REVISION=$(REVISION) --build-arg WITH_BPF=$(WITH_BPF) $(ARGS) .

.PHONY: image-check
image-check: setup-dev ## prove the image on each Debian and machine that it is for, and measure it (needs root, minutes)
	@$(BIN)/python -m tests.runtime.image_check $(ARGS)

.PHONY: wheel
wheel: setup ## build the wheel into dist/
	@$(BIN)/python -m hatchling build -t wheel

.PHONY: deb
deb: wheel setup-dev ## build the Debian package (12 and 13) into dist/
	@$(BIN)/python scripts/deb.py dist/hami_resolver-$(VERSION)-py3-none-any.whl

.PHONY: package-check
package-check: setup-dev ## install, start and remove the Debian package in a bare Debian 12 and 13 (needs root, minutes)
	@$(BIN)/python -m tests.runtime.package_check $(ARGS)

.PHONY: release
release: setup-dev ## put wheel, sdist, .deb, image, chart, SBOM and checksums into dist/ (ARGS=--without-image)
	@$(BIN)/python scripts/release.py --engine "$(ENGINE)" $(ARGS)

.PHONY: clean
clean: ## remove everything that was made here
	@rm -rf .venv dist build bench.json .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
