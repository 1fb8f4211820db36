# Two commands for a fresh machine: `make calibrate` and `make test`. Both make the environment first.
# PYTHON names the interpreter (3.11 or newer), and VENV the environment that it makes; BUDGET is the time limit of
# `make calibrate`, in seconds.
PYTHON ?= python3
BUDGET ?= 120
VENV := .venv
BIN := $(VENV)/bin

.PHONY: calibrate test test-all venv lint docs notebooks clean

calibrate: venv
	$(BIN)/rlxjax calibrate --budget $(BUDGET)

test: venv
	$(BIN)/python -m pytest -n auto

test-all: venv
	$(BIN)/python -m pytest -n auto -m ""

venv: $(VENV)/ready

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@

# Install the packages of an extra of pyproject.toml.
$(VENV)/ready-%: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --editable '.[$*]'
	touch $@

lint: $(VENV)/ready-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	cd tests && ../$(BIN)/mypy --strict user_script.py

# Build the documentation as a site, in `site/`; a warning, such as a broken link, is an error.
# The second command runs the code of its pages.
docs: $(VENV)/ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	$(BIN)/python -m pytest -n auto -m site tests

# Run the notebooks and keep their outputs.
notebooks: venv
	$(BIN)/python benchmarks/notebooks.py

clean:
	rm -rf .venv .venv-* build dist site *.egg-info
