# make demo    everything from nothing: packages, verifier, 01 -> 05, and the table (no GPU, no model hub)
# make test    everything from nothing: packages, then all tests
# make setup   .venv and packages only; make lint, make bench

export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: setup demo test lint bench

setup:
	@./setup.sh

demo: setup
	@./demo.sh

test: setup
	python -m pytest

lint: setup
	ruff check .
	ruff format --check .
	mypy

bench: setup
	@set -e; for script in $(or $(wildcard bench/*.py),none); do \
		if [ $$script = none ]; then echo "bench/ holds no script yet"; else echo "== $$script"; python $$script; fi; \
	done
