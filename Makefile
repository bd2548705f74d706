# The project's commands. Each sets up .venv first, which takes no time once it is there.
#
#   make demo    train a GPT on Python's own sources, stop it, resume it, read what it writes
#   make test    all tests
#   make lint    formatting, types, import rules
#   make docs    the documentation as HTML, in docs/_build
#   make clean   remove what the others made, .venv too; built Horovod wheels stay in the cache

PYTHON ?= python3
RANKS ?= 4
PYTEST_OPTIONS ?=

export PATH := $(CURDIR)/.venv/bin:$(PATH)
# Threads of several ranks on one machine would fight for its cores.
test: export OMP_NUM_THREADS := 1
# Ranks may outnumber cores on a laptop: Open MPI 4 and 5 each want to be told so.
test: export OMPI_MCA_rmaps_base_oversubscribe := 1
test: export PRTE_MCA_rmaps_default_mapping_policy := :oversubscribe
ifeq ($(shell id -u),0)
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
endif

.PHONY: setup demo test lint docs clean

setup:
	@$(PYTHON) bootstrap.py

demo: setup
	@python -m examples.demo

test: setup
	timeout 900 mpirun -np $(RANKS) python -m pytest --only-mpi -m mpi -p no:cacheprovider $(PYTEST_OPTIONS)
	python -m pytest -m "not mpi" $(PYTEST_OPTIONS)

lint: setup
	ruff format --check
	ruff check
	mypy
	lint-imports

docs: setup
	sphinx-build --quiet --fail-on-warning --keep-going docs docs/_build

clean:
	rm -rf .venv docs/_build runs build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
