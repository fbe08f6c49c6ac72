# make shell      a shell in which the command `paceline` is found, with the server and the reports
# make demo       see it work: one prompt, plain and speculative
# make test-fast  the tests to run between two edits: under a minute
# make test       the whole test suite
# make test-engines  the tests of engines of others (vLLM, llama.cpp), in an environment of their own: .venv-engines
# make check      ruff and mypy
# Each makes .venv if it is missing and installs exact versions (constraints.txt) into it.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
INSTALL := $(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Two workers share the test files in the order of tests/conftest.py, which begins with the longest.
TWO_WORKERS := --numprocesses 2 --dist loadfile --no-loadscope-reorder

# Byte code is kept even where the environment forbids it: tests start hundreds of processes, and each would compile
# the package again.
export PYTHONDONTWRITEBYTECODE :=

# Engines of others: torch with all it needs, then exact versions of everything else.
ENGINES := .venv-engines
RUN_ENGINES := $(ENGINES)/bin/python
INSTALL_ENGINES := $(RUN_ENGINES) -m pip install --quiet --disable-pip-version-check

.PHONY: shell demo test test-fast test-engines check

shell: $(VENV)/.installed-all
	@echo "paceline is on the PATH of this shell; exit leaves it"
	@PATH="$(abspath $(VENV))/bin:$$PATH" "$${SHELL:-/bin/sh}"

demo: $(VENV)/.installed
	$(RUN) -m paceline demo

test: $(VENV)/.installed-dev
	$(RUN) -m pytest $(TWO_WORKERS)

test-fast: $(VENV)/.installed-dev
	$(RUN) -m pytest $(TWO_WORKERS) -m "not slow and not model and not browser"

test-engines: $(ENGINES)/.installed
	$(RUN_ENGINES) -m pytest tests/contracts/test_engine.py tests/engines --ignore tests/engines/local

check: $(VENV)/.installed-dev
	$(RUN) -m ruff check .
	$(RUN) -m mypy

$(RUN):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "paceline needs Python 3.11: make PYTHON=python3.12 …")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(RUN)
	@echo "installing into $(VENV) (the first time this takes minutes)"
	$(INSTALL) --editable .
	@touch $@

$(VENV)/.installed-all: $(VENV)/.installed
	$(INSTALL) --editable '.[serve,report]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(INSTALL) --editable '.[dev]'
	@touch $@

$(RUN_ENGINES):
	$(PYTHON) -m venv $(ENGINES)

$(ENGINES)/.installed: pyproject.toml constraints-engines.txt | $(RUN_ENGINES)
	@echo "installing into $(ENGINES) (the first time this takes minutes)"
	$(INSTALL_ENGINES) torch==2.13.0
	$(INSTALL_ENGINES) --no-deps --requirement constraints-engines.txt
	$(INSTALL_ENGINES) --no-deps --editable .
	@touch $@
