# make demo   the main job on real data
# make demo REPORT=spark   the same, and a report of it in demo-report.html; needs Java 17
# make test   lint, types, and the short tests, most with three of their cases
# make test-all  everything that must hold: also the long tests, a broker, the documentation
# make demo ON=pulsar   the same on a Pulsar broker that it starts; needs Java 17 and Maven
# make bench  the comparison with the peers    make lint   style and types only
# make proof [SIZE=small|medium|full] [PARTS="torture fuzz ..."] [SLICES=m-n]
#             the promises as figures
# make wheels [PYTHONS="python3.12 ..."]
#             a wheel for each Python of this machine, tried out in an environment of its own
# make release-check   what a release still needs; builds and tries what this machine can
# make docs   the documentation as a site, in build/site; warnings and broken links are errors
# Each creates the environment that it needs, in .venv, from pyproject.toml alone.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
DEMO_READY := $(VENV)/ready-for-demo
DOCS_READY := $(VENV)/ready-for-docs
, := ,
SOURCES := setup.py pyproject.toml $(wildcard exclusivelog/*.pyx exclusivelog/*.pxd exclusivelog/_native/*)

.PHONY: demo test test-all test-short test-long test-spark test-process test-broker test-bench lint docs bench \
    torture proof wheels release-check chromium clean
.DELETE_ON_ERROR:

ifeq ($(ON),pulsar)
demo: $(READY)
	$(BIN)/python -m testing.broker -- $(BIN)/exclusivelog demo --path {} --rate 1000
else ifeq ($(REPORT),spark)
demo: $(READY)
	$(BIN)/exclusivelog demo --report demo-report.html
else
demo: $(DEMO_READY)
	$(if $(ON),$(error ON=$(ON): it takes pulsar))
	$(if $(REPORT),$(error REPORT=$(REPORT): it takes spark))
	$(BIN)/exclusivelog demo
endif

# Tests start Python hundreds of times, and each of pytest's workers rewrites each test module: keep
# what was compiled.
unexport PYTHONDONTWRITEBYTECODE

# More at a time than there are cores: most tests wait, for a deadline or a flush.
WORKERS := 6
PYTEST = $(BIN)/python -m pytest -q -rsfE --benchmark-disable -n $(WORKERS)

# `make test test-all` does not run twice what both contain.
GROUPS := lint test-short
REST := test-long test-process test-spark docs test-broker test-bench

test: $(READY)
	@$(BIN)/python tools/groups.py $(GROUPS)

test-all: $(READY) $(DOCS_READY) chromium
	@$(BIN)/python tools/groups.py --beside 3 \
	    $(if $(filter test,$(MAKECMDGOALS)),,$(GROUPS)) $(REST)

chromium:
	@tools/chromium

test-short: build/collected
	$(PYTEST) --short --durations=5

# In a fresh clone, each of pytest's workers would rewrite the assertions of all test modules.
build/collected: $(READY) $(shell find tests testing proof bench -name '*.py')
	@mkdir -p build
	@$(BIN)/python -m pytest -q --collect-only >$@ || { cat $@; exit 1; }

# Each worker that runs a test of Spark starts a JVM, and warms it up: these have few.
test-long: $(READY)
	$(PYTEST) --rest -m "not broker" --durations=10 tests proof/tests --ignore=tests/spark

test-spark: WORKERS := 2
test-spark: $(READY)
	$(PYTEST) --rest -m "not broker" --durations=10 tests/spark

# The other cases of the tests of `make test` are part of test-long.
test-process: WORKERS := 4
test-process: $(READY)
	$(PYTEST) --sample -m "not broker and not once" --durability=process tests testing proof/tests

test-broker: WORKERS := 2
test-broker: $(READY)
	$(PYTEST) -m broker tests/cluster tests/conformance tests/spark proof/tests

test-bench: WORKERS := 2
test-bench: $(READY)
	$(PYTEST) bench

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/lint-imports --no-cache --config runtime-imports.toml
	$(BIN)/python -m testing.rules
	$(BIN)/mypy
	@if command -v node >/dev/null; then $(BIN)/pyright --pythonpath $(BIN)/python; \
	else echo "without node, pyright does not check the examples"; fi
	$(BIN)/python -m mypy.stubtest --mypy-config-file pyproject.toml \
	    --ignore-disjoint-bases exclusivelog._core

docs: $(DOCS_READY)
	@rm -rf build/site
	$(BIN)/sphinx-build -q -W --keep-going -c docs -d build/doctrees . build/site
	$(BIN)/python -m testing.site build/site
	@echo open build/site/index.html

bench: $(READY)
	$(BIN)/python -m bench.compare

# What a run finds is added to build/proof.json.
proof: $(READY)
	$(BIN)/python -m proof --size=$(or $(SIZE),small) $(SLICES:%=--slices=%) $(PARTS)

torture: $(READY)
	$(BIN)/python -m pytest -q proof/tests/test_torture.py --torture-seconds=$(or $(SECONDS),300)

# An environment, with these extras and this dependency group; pip knows groups from 25.1 on only.
# `compat` puts the directory itself into sys.path; the usual finder would take each Python that the
# tests start 14 ms to import. Pip would compile all modules, one after the other; few of them are
# ever imported.
define INSTALL
	$(MAKE_VENV)
	needed=$$($(BIN)/python tools/requirements.py $(2)) && \
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-compile \
	    --config-settings editable_mode=compat -e '.[$(1)]' $$needed
	@touch $@
endef

define MAKE_VENV
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "exclusivelog needs Python 3.11 or newer; name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	    echo "no virtual environment could be made; on Debian: apt-get install python3-venv" >&2; exit 1; }
endef

$(READY): $(SOURCES)
	$(call INSTALL,all$(,)spark,dev)
	@touch $(DEMO_READY) $(DOCS_READY)

# The demo and the site need few tools: where everything is installed, they find that.
$(DEMO_READY): $(SOURCES)
	$(call INSTALL,cli)

$(DOCS_READY): $(SOURCES)
	$(call INSTALL,cli$(,)metrics$(,)models$(,)otel,docs)

# These need neither what the tests need nor the library itself.
$(VENV)/ready-for-%: pyproject.toml
	$(MAKE_VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check \
	    $$($(BIN)/python tools/requirements.py $*)
	@touch $@

wheels: $(VENV)/ready-for-wheels
	$(BIN)/python tools/wheels.py $(PYTHONS)

release-check: $(VENV)/ready-for-cross
	$(BIN)/python tools/release.py

clean:
	rm -rf $(VENV) build dist *.egg-info exclusivelog/*.so exclusivelog/_core.c
