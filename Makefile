# Everything runs in .venv; a target installs what it needs there, once, and again when
# pyproject.toml changes. Choose another interpreter with `make PYTHON=python3.12 test`.
PYTHON ?= python3
VENV := .venv
# Tests start hundreds of processes. Where nothing keeps what Python has compiled, as in many
# containers, each would compile JAX and Keras again, which takes longer than most tests.
unexport PYTHONDONTWRITEBYTECODE
BIN := $(VENV)/bin

# What is installed was tested together: the constraints for the environment's Python, those of the
# newest JAX for newer ones. `make constraints` brings them up to date; `make CONSTRAINTS=` does
# without.
INTERPRETER := $(firstword $(wildcard $(BIN)/python) $(PYTHON))
VERSION := $(shell $(INTERPRETER) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
CONSTRAINTS ?= $(firstword $(wildcard constraints/jax*-python$(VERSION).txt) \
  $(lastword $(sort $(wildcard constraints/*.txt))))

# What `make bench` measures: one contest or several, as `python -m benchmarks --help` lists them.
# Those over links, `network` and `compression`, only root can measure.
DEVICE := $(if $(filter gpu,$(MAKECMDGOALS)),gpu,cpu)
ifeq ($(DEVICE),gpu)
WHAT := fit run memory
else
WHAT := fit architectures run memory aggregation data workers all_reduce shares checkpoint recovery weak_scaling \
  parameter_servers
endif
RESULTS := benchmarks/results

.PHONY: help demo test check durations changed matrix canary lint types soak docs perf bench gpu \
  gpu-bundle gpu-environment constraints dist clean

help:
	@echo "make demo    install, then train a Keras model on two replicas (embedded data)"
	@echo "make test    install, lint, check types, run the tests that take no longer than a moment"
	@echo "make check   the same, then all other tests, and the documentation's examples"
	@echo "make changed the tests that a change can reach: make changed BASE=origin/main"
	@echo "make matrix  demo and all tests with every JAX in constraints/ whose Python is there;"
	@echo "             make matrix ARGS='--jax 0.12 --quick': with one, those of make test"
	@echo "make canary  a few tests with the newest of these, if its Python is there"
	@echo "make soak    the tests that take minutes or hours"
	@echo "make docs    build the documentation into site/"
	@echo "make perf    two minutes of ratios beside the stored ones, for reviews"
	@echo "make bench   install the peers, measure beside them, write benchmarks/RESULTS.md;"
	@echo "             hours: make bench WHAT=fit ARGS='--rounds 3' measures one contest,"
	@echo "             make bench DEVICE=gpu those that run on GPUs"
	@echo "make gpu     check numbers, jobs and speed on this machine's GPUs, in 8 minutes; DEVICE=cpu"
	@echo "             shows that the checks work; make gpu PYTHON=... OFFLINE=1 takes the JAX that"
	@echo "             PYTHON has, and the wheels that make gpu-bundle has downloaded elsewhere"
	@echo "make durations    record how long tests take, by which make test chooses"
	@echo "make constraints  bring the tested sets of packages in constraints/ up to date"
	@echo "make dist    build the sdist and the wheels into dist/, check them, install each in fresh"
	@echo "             environments and run the demo there"
	@echo "make clean   remove the environment and everything built"

demo: $(VENV)/.installed-demo
	$(BIN)/unison demo

# A file's tests stay in one process, which shares their fixtures. Each process has four logical
# devices: more processes than eight would only crowd each other out. tests/conftest.py says how
# many there are, and which file comes when.
PYTEST = $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

# The types are checked beside the tests, and said as soon as they are: the tests' summary is the
# last line.
define TEST_AND_CHECK_TYPES
	$(BIN)/mypy & types=$$!; trap "kill $$types" INT TERM; $(PYTEST) $(1); \
	tests=$$?; wait $$types || { echo "The types are wrong: see above." >&2; exit 1; }; exit $$tests
endef

# XLA's GPU compiler, with which tests compile for GPUs that are not here: 550 MB, for Linux. It is
# beside the environment, since JAX would load it at the start of every process.
GPU_COMPILER := $(VENV)/gpu-compiler
$(VENV)/.installed-gpu-compiler: pyproject.toml $(CONSTRAINTS) $(VENV)/.installed-dev
	PIP_COMPILE=0 $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps \
	  $(addprefix --constraint ,$(CONSTRAINTS)) --upgrade --target $(GPU_COMPILER) \
	  "jax-cuda12-pjrt==$$($(BIN)/python -c 'from jaxlib import version; print(version.__version__)')" \
	  'nvidia-cuda-nvcc-cu12<13'
	@touch $@
ifeq ($(shell uname -s),Linux)
test: $(VENV)/.installed-gpu-compiler
endif

# Which tests are slow was recorded by `make durations`, in tests/durations.txt.
test: lint
	$(call TEST_AND_CHECK_TYPES,-m "not soak and (smoke or not slow)")

# The tests that `make test` leaves out, after it. `make check UNTIL=SECONDS` skips, and counts, those
# that would begin after that time, in seconds since 1970.
check: test
	$(PYTEST) -m "slow and not smoke and not soak" $(if $(UNTIL),--until $(UNTIL))

durations: $(VENV)/.installed-dev
	$(PYTEST) --record-durations

# What a change beside BASE can reach, as far as the sources say: `make changed BASE=origin/main`.
BASE ?= HEAD
changed: $(VENV)/.installed-dev
	@files=$$($(BIN)/python tests/changed.py --base $(BASE)) || exit; \
	if [ -z "$$files" ]; then echo "No test depends on what has changed."; else \
	$(PYTEST) $$files; fi

matrix: $(VENV)/.installed-release
	$(BIN)/python -m release.matrix $(ARGS)

# With a newer Python than that of the newest JAX's set: `make canary NEWER=3.14`.
canary: $(VENV)/.installed-release
	$(BIN)/python -m release.matrix --canary $(if $(NEWER),--python $(NEWER))

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

soak: $(VENV)/.installed-dev $(VENV)/.installed-release
	$(BIN)/python -m pytest -m soak tests

docs: $(VENV)/.installed-docs
	$(BIN)/mkdocs build --strict

perf: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.perf $(ARGS)

bench: $(VENV)/.installed-bench
	-$(BIN)/python -m benchmarks.peers .peers --device $(DEVICE)
	@# 1: a contestant has failed, as the page will say.
	mkdir -p $(RESULTS)
	for what in $(WHAT); do \
	  $(BIN)/python -m benchmarks $$what --device $(DEVICE) --peers .peers \
	    --json $(RESULTS)/$$what$(subst _cpu,,_$(DEVICE)).json $(ARGS) \
	    || [ $$? -eq 1 ] || exit; \
	done
	$(BIN)/python -m benchmarks.results $(RESULTS)

# In .venv with JAX for CUDA, or OFFLINE=1: with the JAX of PYTHON, and the wheels of BUNDLE. Only
# what GPUs gave, all of them or not, comes to the results of this checkout.
CUDA := cuda13
BUNDLE := gpu-bundle
ifdef OFFLINE
GPU_PYTHON := .gpu/bin/python
gpu-environment:
	$(PYTHON) -m release.gpu_bundle install $(BUNDLE) .gpu
else
GPU_PYTHON := $(BIN)/python
gpu-environment: $(VENV)/.installed-bench $(if $(filter gpu,$(DEVICE)),$(VENV)/.installed-$(CUDA))
endif

gpu: gpu-environment
	@status=0; $(GPU_PYTHON) -m benchmarks.gpu --device $(DEVICE) --json build/gpu.json \
	  --page build/gpu.html $(ARGS) || status=$$?; \
	case "$(DEVICE)$(OFFLINE):$$status" in gpu:[013]) \
	  mkdir -p $(RESULTS) && cp build/gpu.json $(RESULTS) && \
	  $(BIN)/python -m benchmarks.results $(RESULTS);; esac; exit $$status

gpu-bundle: $(VENV)/.installed-release
	$(BIN)/python -m release.gpu_bundle fill $(BUNDLE)

constraints: $(VENV)/.installed-release
	$(BIN)/python -m release.constraints

dist: $(VENV)/.installed-release
	$(BIN)/python -m release.distributions

clean:
	rm -rf $(VENV) .gpu .matrix $(BUNDLE) build dist site .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp for each extra: .installed-dev is `pip install -e '.[dev]'`, constrained. Python compiles modules
# when they are first imported, which of most packages few are; pip would compile all.
$(VENV)/.installed-%: pyproject.toml $(CONSTRAINTS) $(VENV)/.created
	PIP_COMPILE=0 $(BIN)/python -m pip install --disable-pip-version-check --quiet \
	  $(addprefix --constraint ,$(CONSTRAINTS)) --editable '.[$*]'
	@touch $@

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Unison needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	       "Name another one: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@
