# make demo   the main job on real data        make test   everything that must hold
# make demo ON=pulsar   the same on a Pulsar broker that it starts; needs Java 17 and Maven
# make bench  the comparison with the peers    make lint   style and types only
# make proof [SIZE=small|medium|full] [PARTS="torture fuzz ..."] [SLICES=m-n]
#             the promises as figures
# make wheels [PYTHONS="python3.12 ..."]
#             a wheel for each Python of this machine, tried out in an environment of its own
# make docs   the documentation as a site, in build/site; warnings and broken links are errors
# Each creates the environment that it needs, in .venv, from pyproject.toml alone.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
DEMO_READY := $(VENV)/ready-for-demo
DOCS_READY := $(VENV)/ready-for-docs
SOURCES := setup.py pyproject.toml $(wildcard exclusivelog/*.pyx exclusivelog/*.pxd exclusivelog/_native/*)

# Spark draws the demo's report, where there is a Java to run it.
comma := ,
JAVA := command -v $${JAVA_HOME:+$$JAVA_HOME/bin/}java >/dev/null

.PHONY: demo test test-power test-process test-broker test-bench collected chromium lint docs bench \
    torture proof wheels clean
.DELETE_ON_ERROR:

ifeq ($(ON),pulsar)
demo: $(READY)
	$(BIN)/python -m testing.broker -- $(BIN)/exclusivelog demo --path {} --rate 1000
else
demo: $(DEMO_READY)
	$(if $(ON),$(error ON=$(ON): it takes pulsar))
	$(BIN)/exclusivelog demo $(shell $(JAVA) && echo --report demo-report.html)
endif

# Tests start Python hundreds of times, and each of pytest's workers rewrites each test module: keep
# what was compiled.
unexport PYTHONDONTWRITEBYTECODE

# More at a time than there are cores: most tests wait, for a deadline or a flush.
PYTEST := $(BIN)/python -m pytest -q -rs --benchmark-disable
WORKERS := 6

# The site and the groups are made beside each other, so that the cores are busy until the end. All
# but the longest group print what they have to say when they have ended. After a failure, nothing
# else begins.
test: $(READY)
	@mkdir -p build
	@$(MAKE) --no-print-directory -j3 -O lint chromium collected
	@$(MAKE) --no-print-directory -j4 BESIDE=1 test-power docs test-broker test-bench

test-power: $(READY)
	$(PYTEST) -n 6 -m "not broker" --durations=10

test-process: $(READY)
	$(PYTEST) -n $(WORKERS) -m "not broker and not once" --durability=process \
	    tests testing proof/tests $(PRINTED_LATER)

test-broker: $(READY)
	$(PYTEST) -n 2 -m broker tests/cluster tests/conformance tests/spark proof/tests \
	    $(PRINTED_LATER)

test-bench: $(READY)
	$(PYTEST) -n $(WORKERS) bench $(PRINTED_LATER)

# In a fresh clone, each of pytest's workers would rewrite the assertions of all test modules.
collected: $(READY)
	$(PYTEST) --collect-only tests testing proof/tests bench >build/$@.txt || { cat build/$@.txt; exit 1; }

chromium:
	tools/chromium

ifdef BESIDE
WORKERS := 2
PRINTED_LATER = >build/$@.txt 2>&1; status=$$?; cat build/$@.txt; exit $$status
test-bench: test-process
endif

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m testing.rules
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest --mypy-config-file pyproject.toml \
	    --ignore-disjoint-bases exclusivelog._core

docs: $(DOCS_READY)
	@rm -rf build/site
	$(BIN)/sphinx-build -q -W --keep-going -c docs -d build/doctrees . build/site
	@echo open build/site/index.html

bench: $(READY)
	$(BIN)/python -m bench.compare

# What a run finds is added to build/proof.json.
proof: $(READY)
	$(BIN)/python -m proof --size=$(or $(SIZE),small) $(SLICES:%=--slices=%) $(PARTS)

torture: $(READY)
	$(BIN)/python -m pytest -q proof/tests/test_torture.py --torture-seconds=$(or $(SECONDS),300)

# An environment, with what the rule named in front needs. `compat` puts the directory itself into
# sys.path; the usual finder would take each Python that the tests start 14 ms to import.
define INSTALL
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "exclusivelog needs Python 3.11 or newer; name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	    echo "no virtual environment could be made; on Debian: apt-get install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install -q --disable-pip-version-check \
	    --config-settings editable_mode=compat -e '.[$(1)]'
	@touch $@
endef

$(READY): $(SOURCES)
	$(call INSTALL,dev)
	@touch $(DEMO_READY) $(DOCS_READY)

# The demo and the site need few tools: where everything is installed, they find that.
$(DEMO_READY): $(SOURCES)
	$(call INSTALL,$(shell $(JAVA) && echo cli$(comma)spark || echo cli))

$(DOCS_READY): $(SOURCES)
	$(call INSTALL,docs)

wheels: $(READY)
	$(BIN)/python tools/wheels.py $(PYTHONS)

clean:
	rm -rf $(VENV) build dist *.egg-info exclusivelog/*.so exclusivelog/_core.c
