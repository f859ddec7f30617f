# `make` alone lists the targets. Everything Python lives in .venv; scripts/setup.sh fills it.
SHELL := /bin/bash
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
BIN := .venv/bin
ARGS ?=
# A few tests run in one process: starting six would take longer.
JOBS ?= $(if $(findstring -k,$(ARGS)),0,6)
# What fails beside five others on a machine of two cores is run once more, alone, and counted.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --reruns 1 --rerun-show-tracebacks
VERSION = $(shell python3 resolver/base/version.py)
DIST := dist
include deploy/published.env # ADDRESS, IMAGE_NAME

.PHONY: help
help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo '  Options go through ARGS:  make run ARGS="--dry-run --once"'

.PHONY: setup
setup: ## install the requirements: Debian packages (as root) and .venv
	@scripts/setup.sh

.PHONY: setup-dev
setup-dev: ## also install what the tests and the bench need
	@scripts/setup.sh dev

.PHONY: run
run: setup ## run the daemon on this node
	@exec $(BIN)/resolver run $(ARGS)

.PHONY: demo
demo: setup ## run the daemon on a node in miniature (needs root; no GPU)
	@$(BIN)/python -m tests.fakes.demo $(ARGS)

.PHONY: test
test: setup-dev ## lint, types, layering and every test, JOBS=6 at a time (needs root; no GPU)
	@$(PYTEST) --durations=10 $(ARGS)

.PHONY: broken
broken: setup-dev ## print what doctor, status and explain say on a node in each of several broken states (needs root)
	@$(BIN)/python -m pytest -q -s --no-header -p no:cacheprovider tests/kernel/test_broken_nodes.py | grep '^[.]*|' | sed 's/^[.]*//'

.PHONY: poisoned
poisoned: setup-dev ## every test, with obstacles in the way that tests must not depend on (needs root)
	@$(BIN)/python -m tests.poisoned $(MAKE) test

.PHONY: long
long: setup-dev ## the long tests: the image, the site, setup, and some at full size (needs root; minutes)
	@$(PYTEST) -m long $(ARGS)

.PHONY: lint
lint: setup-dev ## ruff, mypy and import-linter only
	@$(BIN)/python -m pytest --no-header -q tests/unit/suite/test_style.py tests/unit/suite/test_layering.py

.PHONY: format
format: setup-dev ## format the code with ruff
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format --quiet .

.PHONY: bench
bench: setup-dev ## measure speed, memory and the cost of the probes: a table and bench.json
	@$(BIN)/python -m tests.bench $(ARGS)

.PHONY: soak
soak: setup-dev ## churn and attack a node for long, and fail if the daemon grows (ARGS=30m; needs root)
	@$(BIN)/python -m tests.bench.soak $(ARGS)

.PHONY: figures
figures: setup-dev ## put the figures of `make bench` into the documents (ARGS=bench.json)
	@$(BIN)/python -m tests.bench.figures $(ARGS)

.PHONY: docs
docs: setup-dev ## build the documents as a site, in build/site
	@$(BIN)/python docs/site/conf.py $(ARGS)

.PHONY: gpu-check
gpu-check: setup-dev ## on a GPU: measure which PIDs its driver gives to a container, and check a repair (needs root)
	@$(BIN)/python -m tests.gpu.check $(ARGS)

.PHONY: nvml
nvml: setup-dev ## compare the NVML stand-in with NVIDIA's library, fetched from Debian's non-free (x86-64; needs root)
	@$(PYTEST) -m nvidia tests/contract tests/kernel/test_nvidia_library.py $(ARGS)

.PHONY: kernels
kernels: setup-dev ## boot the kernels of Debian's releases under QEMU and test on each (an hour; ARGS=--help)
	@$(BIN)/python -m tests.vm $(ARGS)

.PHONY: engines
engines: setup-dev ## start Debian's container engines and test under each (needs root; minutes; ARGS=--help)
	@$(BIN)/python -m tests.runtime.engines $(ARGS)

.PHONY: fresh
fresh: ## test setup and demo in a bare Debian made by mmdebstrap (needs root, minutes)
	@tests/runtime/fresh_machine.sh $(ARGS)

.PHONY: lock
lock: ## resolve the dependencies and write the lock files
	@scripts/lock.sh $(ARGS)

.PHONY: man
man: setup ## write the man pages and completion into build/share, as for the wheel
	@$(BIN)/python scripts/build_hook.py build/share

.PHONY: tables
tables: setup-dev ## write the documents' tables that come from the code, and the picture of `resolver top`
	@$(BIN)/python -m tests.fakes.layouts
	@$(BIN)/python -m scripts.tables $(ARGS)
	@$(BIN)/python -m scripts.picture

.PHONY: chart
chart: setup-dev ## pack the Helm chart into dist/
	@rm -rf build/chart && mkdir -p build/chart && $(BIN)/python -m scripts.published build/chart/resolver
	@$(BIN)/helm lint --strict --quiet --set image.repository=$(IMAGE_NAME) build/chart/resolver
	@$(BIN)/helm package --destination $(DIST) build/chart/resolver >/dev/null

# `docker`, `podman` or `buildah`, the first that answers: `docker` may be installed without its daemon.
ENGINE ?= $(firstword $(foreach each,docker podman buildah,$(shell $(each) info >/dev/null 2>&1 && command -v $(each))))
IMAGE ?= $(IMAGE_NAME):$(VERSION)
REVISION ?= $(shell git rev-parse HEAD 2>/dev/null || echo unknown)
WITH_BPF ?= 1
IMAGE_OPTIONS = --build-arg REVISION=$(REVISION) --build-arg WITH_BPF=$(WITH_BPF) \
	$(if $(ADDRESS),--label org.opencontainers.image.source=$(ADDRESS) --label org.opencontainers.image.url=$(ADDRESS))

.PHONY: image
image: ## build the container image; IMAGE_NAME=registry/name, WITH_BPF=0 for one without bcc and LLVM
	@[[ -n "$(ENGINE)" ]] || { echo "image: neither docker nor podman nor buildah answers: install or start one, or name it: ENGINE=..." >&2; exit 1; }
	@$(ENGINE) build --file deploy/image/Dockerfile --tag $(IMAGE) $(IMAGE_OPTIONS) $(ARGS) .

.PHONY: image-check
image-check: setup-dev ## test the image on each Debian (ARGS=bookworm: on that one; needs root, minutes)
	@for suite in $(or $(ARGS),trixie bookworm); do \
		IMAGE_SUITE=$$suite $(BIN)/python -m pytest -q -m long tests/runtime/test_image.py || exit; done

.PHONY: wheel
wheel: setup ## build the wheel into dist/
	@$(BIN)/python -m hatchling build -t wheel

.PHONY: view
view: ## pack the view for containers without resolver, dist/resolver-view.pyz (Python 3.8 and later)
	@rm -rf build/view && mkdir -p build/view $(DIST) && cp --parents resolver/cli/show.py resolver/base/text.py build/view
	@cp resolver/cli/own_view.py build/view/__main__.py
	@python3 -m zipapp build/view --python '/usr/bin/env python3' --output $(DIST)/resolver-view.pyz

.PHONY: deb
deb: wheel ## build the Debian package (12 and later) into dist/
	@$(BIN)/python scripts/deb.py "dist/hami_resolver-$(VERSION)-py3-none-any.whl"

.PHONY: package-check
package-check: setup-dev ## test the package in Debian 12, 13 and sid under QEMU, from installation to purge (needs root; an hour)
	@$(BIN)/python -m tests.runtime.package_check $(ARGS)

.PHONY: release
release: setup-dev ## build wheel, sdist, .deb, image, chart, SBOM and checksums into dist/ (ARGS=--without-image)
	@$(BIN)/python scripts/release.py --engine "$(ENGINE)" $(ARGS)

# The steps of .github/workflows/release.yml that follow. DIGEST is what image-push wrote.
CHARTS ?= oci://$(IMAGE_NAME)-chart
DIGEST = $$(sed -n 's/.*"containerimage.digest": *"\([^"]*\)".*/\1/p' build/image.json)

.PHONY: release-check
release-check: ## check that TAG is this version's
	@[[ "$(TAG)" == "v$(VERSION)" ]] || { echo "release: the tag is '$(TAG)', but resolver/base/version.py says $(VERSION): tag v$(VERSION)" >&2; exit 1; }

.PHONY: checksums
checksums: ## write dist/SHA256SUMS of everything in dist/
	@cd $(DIST) && rm -f SHA256SUMS && sha256sum -- * >.sums && mv .sums SHA256SUMS

.PHONY: image-push
image-push: ## build the image for amd64 and arm64 by docker buildx, with provenance and SBOM, and push it
	@mkdir -p build && docker buildx build --file deploy/image/Dockerfile --tag $(IMAGE) $(IMAGE_OPTIONS) --platform linux/amd64,linux/arm64 \
		--provenance=mode=max --sbom=true --metadata-file build/image.json --push $(ARGS) .

.PHONY: chart-push
chart-push: ## push the packed chart to CHARTS, a directory of a registry
	@$(or $(wildcard $(BIN)/helm),helm) push $(DIST)/resolver-$(VERSION).tgz $(CHARTS) $(ARGS)

.PHONY: sign
sign: ## sign the pushed image and the checksums by cosign, without a key
	@cosign sign --yes "$(IMAGE_NAME)@$(DIGEST)"
	@cosign sign-blob --yes --bundle $(DIST)/SHA256SUMS.sigstore.json $(DIST)/SHA256SUMS

.PHONY: clean
clean: ## remove everything that make has built
	@rm -rf .venv dist build bench.json .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
