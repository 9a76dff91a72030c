# Two commands matter: `make demo` and `make test`. Both need Python >= 3.10 with venv, and nothing else.
# PYTHON chooses the interpreter, VENV the folder of the virtual environment, ARGS goes to the program behind a target.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt
# An environment knows the folder that it was made in, so a copied or moved clone installs anew.
HERE := $(shell printf '%s' '$(CURDIR)' | cksum | cut -d ' ' -f 1)
BASE := $(VENV)/.base-$(HERE)
DEV := $(VENV)/.dev-$(HERE)
REAL := $(VENV)/.real-$(HERE)

# vLLM pins another torch and transformers, so it gets an environment of its own.
ENGINES := $(VENV)-engines

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-engines lint format bench clean

help:
	@echo 'make demo      plan, convert, check and verify a checkpoint that reshard makes itself'
	@echo 'make test      lint, types, and the tests that need no download of a model'
	@echo 'make test-all  the same with the slow tests: a trained model, greedy continuations'
	@echo 'make test-engines  vLLM itself, on a CPU, loads what convert writes for it (about 3 GB of packages)'
	@echo 'make lint      ruff and mypy'
	@echo 'make format    let ruff lay out the code'
	@echo 'make bench     time and peak memory of a conversion against a plain copy (docs/performance.md)'
	@echo 'make clean     remove the virtual environment and caches'

demo: $(BASE)
	@$(RUN) -m reshard demo $(ARGS)

test: lint
	$(RUN) -m pytest -m 'not slow' $(ARGS)

test-all: lint $(REAL)
	$(RUN) -m pytest $(ARGS)

test-engines: $(DEV) $(ENGINES)
	RESHARD_VLLM_PYTHON=$(ENGINES)/bin/python $(RUN) -m pytest tests/engines $(ARGS)

lint: $(DEV)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(DEV)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

bench: $(BASE)
	$(RUN) -m tests.bench.bench_convert $(ARGS)

clean:
	rm -rf $(VENV) $(ENGINES) .mypy_cache .ruff_cache .pytest_cache .hypothesis build reshard.egg-info

# A half-made environment (no pip that answers) is made anew.
define ENVIRONMENT
@$(RUN) -m pip --version >/dev/null 2>&1 || { echo 'making $(VENV)'; $(PYTHON) -m venv --clear $(VENV); }
endef

$(BASE): pyproject.toml constraints.txt
	$(ENVIRONMENT)
	@echo 'installing reshard into $(VENV)'
	@$(PIP) -e .
	@touch $@

$(DEV): pyproject.toml constraints.txt
	$(ENVIRONMENT)
	@echo 'installing reshard and its development tools into $(VENV)'
	@$(PIP) -e '.[dev,text]'
	@touch $@ $(BASE)

$(REAL): $(DEV)
	@echo 'installing what reads the trained model of the slow tests into $(VENV)'
	@$(PIP) -e '.[dev,text,real]'
	@touch $@

$(ENGINES): tests/engines/requirements.txt pyproject.toml
	$(PYTHON) -m venv --clear $@
	$@/bin/python -m pip install --quiet -r $<
	$@/bin/python -m pip install --quiet --no-deps vllm==0.33.0
	$@/bin/python -m pip install --quiet -e .
	@touch $@
