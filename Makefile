# Fulmar: what one types. `make` alone shows this list.
#
#   make demo     build Fulmar and show it in a minute
#   make test     install what the tests need, run everything
#   make check    the two-minute loop of a contributor: format, lints, unit tests
#   make fuzz     two minutes for each reader of outside input; MINUTES=60 TARGET=wire for one of them
#   make sqllogictest SCRIPTS=directory   scripts of sqllogictest through the wire, beside stock SQLite
#   make fmt      format the code
#   make clean    remove what was built

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := target/venv
MINUTES ?= 2

.PHONY: help demo test sqllogictest fuzz check fmt clean

help:
	@sed -n 's/^#   /  /p' Makefile

demo:
	@scripts/need cc:build-essential pgbench:postgresql-15
	cargo build --release --package fulmar
	target/release/fulmar demo

test: $(VENV)/ready
	@scripts/need cc:build-essential psql:postgresql-client-15 pgbench:postgresql-15 initdb:postgresql-15 openssl:openssl
	cargo test --workspace
	cargo build --package fulmar
	$(VENV)/bin/python -B tests/psycopg_client.py target/debug/fulmar

sqllogictest:
	@test -d "$(SCRIPTS)" || { echo 'make sqllogictest SCRIPTS=directory with *.test: see CONTRIBUTING.md'; exit 2; }
	@scripts/need cc:build-essential
	SCRIPTS="$(abspath $(SCRIPTS))" cargo test --package fulmar-gateway --test sqllogictest -- --ignored --nocapture

# Counts which code an input reaches: scripts/instrument. One target after the other, each for so many minutes.
fuzz:
	@scripts/need cc:build-essential
	RUSTC_WORKSPACE_WRAPPER="$(CURDIR)/scripts/instrument" FUZZ_MINUTES=$(MINUTES) cargo test --no-fail-fast \
	    --package fulmar-pages --package fulmar-store --package fulmar-engine --package fulmar-gateway \
	    --lib --test fuzz -- --test-threads 1 --nocapture fuzz_$(TARGET)

check:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	cargo test --workspace --lib --bins

fmt:
	cargo fmt --all

clean:
	cargo clean

# Python only drives tests. Its packages live in the build directory, not in the system.
$(VENV)/ready: tests/requirements.txt
	@scripts/need python3:python3 venv:python3-venv
	python3 -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --requirement tests/requirements.txt
	touch $@
