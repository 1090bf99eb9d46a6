# make config   fit the shipped timings and write build/nvidia-h200.json; needs only Python and the network
# make test     run all tests, those against the real FlashInfer (CPU torch will do) and Ray included
# make lint     ruff and mypy
# make install-test   build wheel and sdist, install each into an empty environment, and use it there
# make docs     write docs/cli.md anew
# make clean    remove build/
#
# PYTHON=python3.12 names the interpreter, VENV=folder the virtual environment.

PYTHON ?= python3
VENV ?= .venv
BUILD ?= build

BIN := $(VENV)/bin
MODELS := $(BUILD)/models
CONFIG := $(BUILD)/nvidia-h200.json
# Timings of your own are read from here, so that what comes out depends on the checkout alone.
OWN := --models $(MODELS) --measurements $(BUILD)/measurements

# A stamp an interpreter: asking for another one is noticed.
STAMP := $(VENV)/.stamp-$(subst /,_,$(PYTHON))
SOURCES := $(shell find synth measurements $(wildcard $(BUILD)/measurements) -type f -not -name '*.pyc')

.DELETE_ON_ERROR:
.PHONY: config test lint ruff mypy install-test docs clean

config: $(CONFIG)
	@echo "$(CONFIG) is ready; README.md says how to point vLLM and SGLang at it"

$(CONFIG): $(MODELS)/.stamp
	$(BIN)/synth emit --device "NVIDIA H200" $(OWN) -o $@

$(MODELS)/.stamp: $(STAMP)-core $(SOURCES)
	@mkdir -p $(BUILD)/measurements
	$(BIN)/synth fit $(OWN)
	@touch $@

test: $(STAMP)-test
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: ruff mypy

ruff: $(STAMP)-test
	$(BIN)/ruff check .

mypy: $(STAMP)-test
	$(BIN)/mypy

install-test:
	.ci/install $(PYTHON)

docs: $(STAMP)-core
	$(BIN)/python docs/make_cli.py

clean:
	rm -rf $(BUILD)

$(STAMP)-core: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "$(PYTHON): Python 3.10 or newer is needed; name one: make PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@test "$$($(PYTHON) -c 'import sys; print(sys.version_info[:2])')" = \
	      "$$($(BIN)/python -c 'import sys; print(sys.version_info[:2])')" \
	  || { echo "$(VENV) is of another Python than $(PYTHON); name another folder: make VENV=.venv-new" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(STAMP)-test: $(STAMP)-core .ci/constraints.txt
	$(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt --editable '.[flashinfer,ray,test]'
	@touch $@
