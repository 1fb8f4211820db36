# Two commands for a fresh machine: `make calibrate` and `make test`. Both make the environment first.
# PYTHON chooses the interpreter (3.11 or newer), VENV the environment made with it; BUDGET is the seconds of
# the calibrate job, of both its models.
PYTHON ?= python3
BUDGET ?= 120
VENV := .venv
BIN := $(VENV)/bin

.PHONY: calibrate test test-all venv lint clean

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

lint: venv
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	cd tests && ../$(BIN)/mypy --strict user_script.py

clean:
	rm -rf .venv .venv-newest build dist *.egg-info
