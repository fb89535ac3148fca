# Everything runs in .venv; a target installs what it needs there, once, and again when
# pyproject.toml changes. Choose another interpreter with `make PYTHON=python3.12 test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# What `make bench` measures: one contest or several, as `python -m benchmarks --help` lists them.
WHAT := fit run memory aggregation data workers all_reduce shares checkpoint recovery weak_scaling
RESULTS := benchmarks/results

.PHONY: help demo test lint types soak docs bench clean

help:
	@echo "make demo    install, then train a Keras model on two replicas (embedded data)"
	@echo "make test    install, lint, check types, run the tests and the documentation's examples"
	@echo "make soak    the long tests that 'make test' leaves out"
	@echo "make docs    build the documentation into site/"
	@echo "make bench   install the peers, measure beside them, write benchmarks/RESULTS.md;"
	@echo "             hours: make bench WHAT=fit ARGS='--rounds 3' measures one contest"
	@echo "make clean   remove the environment and everything built"

demo: $(VENV)/.installed-demo
	$(BIN)/unison demo

# A file's tests stay in one process, which shares their fixtures. Each process has four logical
# devices: more processes than eight would only crowd each other out. tests/conftest.py says how
# many there are, and which file comes when.
test: lint types
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

soak: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m soak tests

docs: $(VENV)/.installed-docs
	$(BIN)/mkdocs build --strict

bench: $(VENV)/.installed-bench
	-$(BIN)/python -m benchmarks.peers .peers
	@# 1: a contestant has failed, as the page will say.
	mkdir -p $(RESULTS)
	for what in $(WHAT); do \
	  $(BIN)/python -m benchmarks $$what --peers .peers --json $(RESULTS)/$$what.json $(ARGS) \
	    || [ $$? -eq 1 ] || exit; \
	done
	$(BIN)/python -m benchmarks.results $(RESULTS)

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp for each extra: .installed-dev is `pip install -e '.[dev]'`.
$(VENV)/.installed-%: pyproject.toml $(VENV)/.created
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable '.[$*]'
	@touch $@

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Unison needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	       "Name another one: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@
