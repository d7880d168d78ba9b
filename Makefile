# Every target is short enough to be run by hand; `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:
.DEFAULT_GOAL := build

# scripts/go is the machine's Go, or the one that scripts/setup fetched.
GO := scripts/go
ARCH = $(shell $(GO) env GOHOSTARCH)
VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
LINT_VERSION := $(shell sed -n 's,.*golangci/golangci-lint/v2 \(v[0-9.]*\).*,\1,p' tools/go.mod)
LINT := .tools/golangci-lint-$(LINT_VERSION)

TESTFLAGS ?=
# What reads the bytes of clients, daemons and guests, of the daemon's own files that others may have damaged, and of the host.
FUZZ_PACKAGES ?= ./client ./internal/access ./internal/audit ./internal/cgroup ./internal/cli ./internal/host ./internal/httpapi \
	./internal/layout ./internal/network ./internal/network/egress ./internal/network/inspect ./internal/network/nameserver ./internal/proc ./internal/store
FUZZTIME ?= 3s

export CGO_ENABLED := 0
# For everything alike: what one target compiled serves the others.
export GOFLAGS := -trimpath $(GOFLAGS)
# What scripts/sdk has fetched where the machine has no Node, or an old one, and what scripts/setup has for tests alone.
export PATH := $(CURDIR)/.tools/sdk/runtime/bin:$(PATH):$(CURDIR)/.tools/bin

.PHONY: help
help: ## list the targets
	@sed -n 's/^\([a-z][a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

.PHONY: all
all: build lint test-fast ## build, lint and the tests that need no VM

.PHONY: setup-build setup-demo setup-test setup-soak
setup-build setup-demo setup-test setup-soak: setup-%:
	@scripts/setup $*

.PHONY: agent
agent: setup-build ## the guest agent, embedded by the next build
	GOOS=linux GOARCH=$(ARCH) $(GO) build -buildvcs=false -ldflags='-s -w' -o internal/agentbin/bin/forkd-agent-$(ARCH) ./cmd/forkd-agent

.PHONY: build
build: agent ## bin/forkd
	$(GO) build -buildvcs=false -ldflags='-s -w -X main.version=$(VERSION)' -o bin/forkd ./cmd/forkd

.PHONY: install uninstall
install: build ## bin/forkd, completions and the service below $DESTDIR$PREFIX (/usr/local)
	scripts/install

uninstall: ## take that away again; what forkd has stored stays
	scripts/install --remove

.PHONY: demo
demo: setup-demo build ## install what is missing, build, and run `forkd quickstart`; then build the templates of E2B's clients
	bin/forkd quickstart --e2b

.PHONY: test
test: setup-test ## install what is missing, then every test: lint, units with -race, VMs as root and without privileges
	$(MAKE) build lint test-race fuzz test-vm

.PHONY: test-race
test-race: agent ## every test that needs no VM, under the race detector
	scripts/test-race $(TESTFLAGS)

.PHONY: test-fast
test-fast: setup-build ## every test that needs no VM: about a minute
	FORKD_TEST_NO_VM=1 $(GO) test -timeout 5m $(TESTFLAGS) ./...

.PHONY: fuzz
fuzz: setup-build ## the fuzz tests of FUZZ_PACKAGES, FUZZTIME each
	scripts/fuzz $(FUZZTIME) $(FUZZ_PACKAGES)

.PHONY: test-guest
test-guest: setup-build # what the engine's tests boot: those that run without privileges have no compiler
	GOOS=linux GOARCH=$(ARCH) $(GO) build -buildvcs=false -ldflags='-s -w' -o internal/engine/enginetest/bin/guest-$(ARCH) ./internal/engine/enginetest/guest

.PHONY: test-vm
test-vm: build test-guest ## the tests that start VMs, as this user and, when that is root, without privileges too
	scripts/test-vm $(TESTFLAGS)

.PHONY: test-recipes
test-recipes: setup-test build ## build every recipe and use its children: a quarter of an hour
	FORKD_SOAK=1 $(GO) test -count=1 -v -timeout 2h $(TESTFLAGS) ./e2e/recipes

.PHONY: test-newer-qemu
test-newer-qemu: setup-soak build ## captures and branches on the next Debian's QEMU, in a chroot, as root: half an hour
	scripts/test-newer-qemu $(TESTFLAGS)

.PHONY: soak
soak: setup-soak build ## the long counts: hundreds of boots, ten-minute drifts; a newer QEMU; takes hours
	$(MAKE) fuzz FUZZTIME=10m FUZZ_PACKAGES="$(FUZZ_PACKAGES) ./internal/e2bapi ./internal/network/netd ./internal/pack ./internal/registry"
	scripts/test-newer-qemu
	FORKD_SOAK=1 $(GO) test -count=1 -v -p 1 -timeout 12h $(TESTFLAGS) $$(scripts/vm-packages) \
		$$(grep -rl --include='*_test.go' 'testenv.Soak()' ./internal | xargs -n1 dirname | sort -u)

.PHONY: lint
lint: setup-build $(LINT) ## go vet, the other architecture, golangci-lint, formatting
	$(GO) vet ./...
	GOARCH=arm64 $(GO) build -gcflags='all=-N -l' ./... # whether it compiles, not how fast it is
	PATH="$$($(GO) env GOROOT)/bin:$$PATH" $(LINT) run --allow-parallel-runners ./...
	PATH="$$($(GO) env GOROOT)/bin:$$PATH" $(LINT) fmt --diff
	$(MAKE) lint-drivers lint-sdk

.PHONY: lint-drivers
lint-drivers: ## the drivers of contexts, with ruff and node where they are installed
	@PATH="$$PATH:$(CURDIR)/.tools/sdk/python/bin"; if command -v ruff >/dev/null; then ruff check internal/agent/contexts && ruff format --check internal/agent/contexts; else echo "no ruff: Python's driver is not checked"; fi
	@if command -v node >/dev/null; then node --check internal/agent/contexts/driver.js; else echo "no node: JavaScript's driver is not checked"; fi

.PHONY: lint-sdk
lint-sdk: ## the SDKs, with ruff, mypy, tsc and eslint, where scripts/sdk could install them
	@scripts/sdk lint

.PHONY: fmt
fmt: setup-build $(LINT) ## format every Go file in place
	$(LINT) fmt

$(LINT): tools/go.mod
	cd tools && ../$(GO) build -o ../$@ github.com/golangci/golangci-lint/v2/cmd/golangci-lint

.PHONY: generate
generate: setup-build ## files that are made from others
	$(GO) generate ./...

.PHONY: clean
clean: ## everything built here; the fetched toolchain stays in the user's cache
	rm -rf bin .tools internal/agentbin/bin/forkd-agent-*
