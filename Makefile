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
	python -m common.demo_verifier
	@set -e; for script in bench/*.py; do echo "== $$script"; python $$script; done
