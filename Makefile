PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 4

# Most of what is installed is never imported: what is, is compiled then.
export PIP_NO_COMPILE := 1

# Tests start thousands of processes, each of which would compile all of everstep anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test lint bench soak docs clean

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch hatchling editables
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP)  ## four failures, not a bit of difference, and a page of it
	$(BIN)/python examples/demo.py

# Hundreds of tests kill real processes, several at a time. What fails beside others is tried once more by itself, in
# sight of everybody; what fails twice fails.
TRIED := $(BIN)/python -m pytest -o addopts="-q --strict-markers" -m "not soak"

test: $(STAMP)  ## everything but the long matrices
	$(TRIED) --cache-clear -n $(WORKERS) --dist worksteal || $(TRIED) --last-failed --last-failed-no-failures none

soak: $(STAMP)  ## the long matrices too
	$(BIN)/python -m pytest -n $(WORKERS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)  ## the CPU tables, under five minutes
	$(BIN)/python bench/cpu.py

# All documents as they lie, with what they link to, so that every link in the repository holds on the site too.
docs: $(VENV)/.docs-installed  ## the site, under build/site
	rm -rf build
	git ls-files -z -- '*.md' '*.py' '*.toml' '*.json' '*.txt' '*.png' '*.svg' LICENSE | xargs -0 cp --parents -t $$(mkdir -p build/docs && echo build/docs)
	NO_MKDOCS_2_WARNING=1 PATH=$(CURDIR)/$(BIN):$$PATH mkdocs build --strict --quiet

$(VENV)/.docs-installed: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis dist runs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
