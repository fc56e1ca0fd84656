# make demo    everything from nothing: packages, verifier, 01 -> 05, and the table (no GPU, no model hub)
# make test    everything from nothing: packages, then all tests
# make setup   .venv and packages only; make lint
# make bench   our stages beside plain speculators: all rows, or make bench ROWS="1 2", or QUICK=1

export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: setup demo test lint bench

setup:
	@./setup.sh

demo: setup
	@./demo.sh

# Two files at a time, one thread each: two that wait for one another's threads would take longer than one.
test: setup
	OMP_NUM_THREADS=1 python -m pytest -n 2 --dist loadfile

lint: setup
	ruff check .
	ruff format --check .
	mypy

bench: setup
	python -m common.demo_verifier
	python -m bench $(ROWS) $(if $(QUICK),--quick)
