# make demo   the main job on real data        make test   everything that must hold
# make bench  the comparison with the peers    make lint   style and types only
# Each creates the environment that it needs, in .venv, from pyproject.toml alone.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
SOURCES := setup.py pyproject.toml $(wildcard exclusivelog/*.pyx exclusivelog/*.pxi exclusivelog/*.pxd)

.PHONY: demo test lint bench torture clean
.DELETE_ON_ERROR:

demo: $(READY)
	$(BIN)/exclusivelog demo

test: lint
	$(BIN)/python -m pytest -q --benchmark-disable --durations=10
	$(BIN)/python -m pytest -q --benchmark-disable --durability=process tests
	$(BIN)/python -m pytest -q --benchmark-disable bench

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest --mypy-config-file pyproject.toml \
	    --ignore-disjoint-bases exclusivelog._core

bench: $(READY)
	$(BIN)/python -m bench.compare

torture: $(READY)
	$(BIN)/python -m pytest -q tests/test_torture.py --torture-seconds=$(or $(SECONDS),300)

$(READY): $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "exclusivelog needs Python 3.11 or newer; name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	    echo "no virtual environment could be made; on Debian: apt-get install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info exclusivelog/*.so exclusivelog/_core.c
