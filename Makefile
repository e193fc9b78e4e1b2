# make demo    sets itself up, then trains a GPT with TP x PP x DP beside one process and compares (under 5 minutes)
# make test    sets itself up, then runs the tests (no GPU needed)
# The virtual environment is .venv; use another with `make test VENV=path`. Python: `make setup PYTHON=python3.12`.

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.lightning_3d_setup

.PHONY: setup demo test test-all lint format bench docs clean help
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

setup: $(STAMP)  ## make the virtual environment and install everything (quick when it is up to date)

$(STAMP): requirements/ci.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 10) else \
		f"lightning_3d needs Python 3.10 or newer, $(PYTHON) is {v[0]}.{v[1]}; try: make setup PYTHON=python3.11")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || { \
		echo "cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/ci.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

demo: setup  ## train a GPT with TP x PP x DP in 8 processes and in one process, and compare
	$(BIN)/lightning-3d demo

test: setup  ## the tests that need no GPU and no patience
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-all: setup  ## all tests; those that need a GPU skip without one
	$(BIN)/python -m pytest

lint: setup  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy lightning_3d

format: setup  ## let ruff rewrite the files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup  ## run the benchmarks and print their tables
	$(BIN)/python benchmarks/run_all.py

docs: setup  ## check every relative link of the documentation
	$(BIN)/python docs/check_links.py

clean:  ## remove what the other targets made
	rm -rf $(VENV) demo_output lightning_logs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
