# Fulmar's development targets. `make` alone shows this list.
#
#   make demo     build Fulmar and run the demo, which takes two minutes
#   make test     install what the tests need and run all tests
#   make clients  only the tests with real drivers: Python, Go, Java, Node.js
#   make console  build the page of the web console, which the next build of Fulmar embeds
#   make tools    build the test dependencies that have no package: an S3 server, a slow network
#   make check    the contributor's loop: format, structure, lints, unit tests of what you change
#   make fuzz     fuzz each decoder, and SQL, for 2 minutes; MINUTES=60 TARGET=wire for one of them
#   make soak     simulate 100,000 clusters under faults (SEEDS=1000000 for more), and run a real one
#                 for ten minutes (CHAOS_SEED=7)
#   make sqllogictest SCRIPTS=directory   run its scripts against Fulmar and stock SQLite
#   make needs    install what a build needs; part of every target that builds
#   make fmt      format the code
#   make clean    remove build results

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := target/venv
CLIENTS := target/clients
DRIVERS := $(VENV)/ready $(CLIENTS)/pgx $(CLIENTS)/pgjdbc/ready $(CLIENTS)/node-postgres/ready
TOOLS := target/tools
VERSITYGW := v1.8.0
TOXIPROXY := v2.5.0
CONSOLE := crates/console/web
# What every build needs: a C compiler, and for the client of etcd the protobuf compiler with its
# include files. Tests also start etcd.
NEEDS := cc:build-essential protoc:protobuf-compiler descriptor.proto:libprotobuf-dev etcd:etcd-server etcdctl:etcd-client
MINUTES ?= 2
SEEDS ?= 100000

.PHONY: help needs demo test console tools drivers clients sqllogictest fuzz soak check fmt clean

help:
	@sed -n 's/^#   /  /p' Makefile

needs:
	@scripts/need $(NEEDS)

demo: console
	@scripts/need $(NEEDS) pgbench:postgresql-15
	cargo build --release --package fulmar
	target/release/fulmar demo

test: tools console
	@scripts/need $(NEEDS) psql:postgresql-client-15 pgbench:postgresql-15 initdb:postgresql-15 openssl:openssl \
	    ip:iproute2 unshare:util-linux python3:python3 chromium:chromium
	scripts/test
	$(MAKE) drivers
	tests/clients/run --server target/debug/fulmar

console: $(CONSOLE)/dist/index.html

$(CONSOLE)/dist/index.html: $(wildcard $(CONSOLE)/src/* $(CONSOLE)/*.json $(CONSOLE)/build.mjs)
	@scripts/need node:nodejs npm:npm
	npm --prefix $(CONSOLE) ci --silent --no-audit --no-fund
	npm --prefix $(CONSOLE) run --silent check
	npm --prefix $(CONSOLE) run --silent build

tools: $(TOOLS)/versitygw $(TOOLS)/toxiproxy

drivers: $(DRIVERS)

clients: drivers
	@scripts/need $(NEEDS) openssl:openssl
	cargo build --package fulmar
	tests/clients/run --server target/debug/fulmar

sqllogictest:
	@test -d "$(SCRIPTS)" || { echo 'make sqllogictest SCRIPTS=directory with *.test: see CONTRIBUTING.md'; exit 2; }
	@scripts/need $(NEEDS)
	SCRIPTS="$(abspath $(SCRIPTS))" cargo test --package fulmar-gateway --test sqllogictest -- --ignored --nocapture

# Fuzzes with coverage feedback (scripts/instrument), one target after the other, MINUTES each.
# fuzz_sql runs the real binary, which is not instrumented.
fuzz: needs
	[ "$(TARGET)" = sql ] || RUSTC_WORKSPACE_WRAPPER="$(CURDIR)/scripts/instrument" FUZZ_MINUTES=$(MINUTES) cargo test \
	    --no-fail-fast --package fulmar-pages --package fulmar-store --package fulmar-sqlite --package fulmar-pgwire \
	    --package fulmar-dialect --package fulmar-gateway --package fulmar-transport \
	    --lib --test fuzz -- --test-threads 1 --nocapture fuzz_$(TARGET)
	FUZZ_MINUTES=$(MINUTES) cargo test --package fulmar --test attacks -- --nocapture fuzz_$(TARGET)

soak: tools
	SIMULATION_SEEDS=$(SEEDS) cargo test --release --config profile.release.lto=false --package fulmar-cluster --test protocol no_commit -- --nocapture
	CHAOS_SECONDS=600 cargo test --package fulmar --test chaos -- --nocapture

check: needs
	cargo fmt --all --check
	scripts/structure
	cargo clippy --workspace --all-targets -- -D warnings
	cargo test $$(scripts/changed) --lib --bins

fmt:
	cargo fmt --all

clean:
	cargo clean

# Drivers of other languages are only used by tests. They are installed in the build directory, not
# in the system.
$(VENV)/ready: tests/clients/requirements.txt
	@scripts/need python3:python3 venv:python3-venv
	python3 -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --requirement $<
	touch $@

$(CLIENTS)/pgx: $(wildcard tests/clients/pgx/*)
	cd tests/clients/pgx && $(CURDIR)/scripts/go build -o $(abspath $@) .

# An S3 server. Its version is part of the name of a target, so that another version is built when
# VERSITYGW changes.
$(TOOLS)/versitygw: $(TOOLS)/versitygw-$(VERSITYGW)
	ln --force --symbolic $(<F) $@

$(TOOLS)/versitygw-$(VERSITYGW):
	GOBIN=$(abspath $(TOOLS)/new) scripts/go install github.com/versity/versitygw/cmd/versitygw@$(VERSITYGW)
	mv $(TOOLS)/new/versitygw $@
	rmdir $(TOOLS)/new

# A proxy that delays connections, for a benchmark of moves between sites.
$(TOOLS)/toxiproxy: $(TOOLS)/toxiproxy-$(TOXIPROXY)
	ln --force --symbolic $(<F) $@

$(TOOLS)/toxiproxy-$(TOXIPROXY):
	GOBIN=$(abspath $(TOOLS)/new-proxy) scripts/go install github.com/Shopify/toxiproxy/v2/cmd/server@$(TOXIPROXY)
	mv $(TOOLS)/new-proxy/server $@
	rmdir $(TOOLS)/new-proxy

$(CLIENTS)/pgjdbc/ready: $(wildcard tests/clients/pgjdbc/*)
	@scripts/need javac:default-jdk-headless mvn:maven
	mvn --quiet --batch-mode --file tests/clients/pgjdbc/pom.xml dependency:copy-dependencies -DoutputDirectory=$(abspath $(@D))
	javac -d $(@D) -cp '$(@D)/*' tests/clients/pgjdbc/Client.java
	touch $@

$(CLIENTS)/node-postgres/ready: $(wildcard tests/clients/node-postgres/package*.json)
	@scripts/need node:nodejs npm:npm
	mkdir -p $(@D)
	cp $^ $(@D)
	npm --prefix $(@D) ci --silent --no-audit --no-fund
	touch $@
