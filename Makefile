# gorun: `make demo` runs the main job, `make test` runs all tests; both set up what they need.
SHELL := /bin/sh
export CGO_ENABLED := 0
GO ?= go
BIN := bin
BUNDLE ?= .gpu-bundle
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo devel)
LDFLAGS := -s -w -X main.version=$(VERSION)
FUZZTIME ?= 10s
DEMO_RANKS ?= 4

.PHONY: help build demo demo-hosts test race lint bench fuzz gpu-bundle clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' Makefile

build: ## build bin/gorun and the examples into bin/
	@$(GO) build -trimpath -ldflags '$(LDFLAGS)' -o $(BIN)/ ./cmd/... ./examples/...

demo: build ## train a small network on 4 ranks of this machine
	@$(BIN)/train -write $(BIN)/demo.csv
	$(BIN)/gorun -np $(DEMO_RANKS) $(BIN)/train -data $(BIN)/demo.csv

demo-hosts: build ## train on 4 hosts with sshd, made here in namespaces (needs root)
	@GO='$(GO)' .ci/demo-hosts $(BIN)

test: ## run all tests; as root installs what they need first
	@.ci/needs
	@.ci/test ./...

race: ## run all tests under the race detector (needs gcc)
	@CGO_ENABLED=1 .ci/test -race $(RACEFLAGS) ./...

lint: ## gofmt, vet and staticcheck, for amd64 and arm64
	@.ci/lint

bench: ## run the benchmarks
	@$(GO) test -run '^$$' -bench . -benchmem ./...

fuzz: ## run every fuzz test for FUZZTIME each (10s)
	@.ci/fuzz $(FUZZTIME)

gpu-bundle: ## pack programs and test binaries for a machine with GPUs and no Go into .gpu-bundle/ (BUNDLE)
	@GO='$(GO)' VERSION='$(VERSION)' .ci/gpu/bundle $(BUNDLE)

clean: ## remove what the targets made
	@rm -rf $(BIN) dist .gpu-bundle
