# The project's commands. Each first sets up .venv, which takes no time if it exists.
#
#   make demo    train a GPT on Python's own sources, stop it, resume it, read what it writes
#   make test    run the tests of each part, on one and on several ranks
#   make test-system    run the tests of whole programs, and those on several emulated hosts
#   make test-quick    run the tests of one process that start no programs
#   make test-long    run the long tests, which the others leave out; with COLD=1 no rank is forked
#   make test-mpich, make test-openmpi5    run the tests of several ranks with another MPI
#   make test-gpu    try everything on this machine's GPU in ten minutes, with the site's own packages
#   make lint    check formatting, types, import rules, and the names and sizes of modules
#   make docs    build the documentation as HTML in docs/_build
#   make clean   remove all that the others made, and .venv; Horovod wheels stay in the cache

PYTHON ?= python3
RANKS ?= 4
PYTEST_OPTIONS ?=
# The number of tests of one process that run at the same time. Many of them wait most of the time for
# timeouts and schedulers, so there is one more than the two cores of a small machine.
WORKERS ?= 3
# A folder to write the durations of all tests to.
DURATIONS ?=
# The folders with the tests of `make test-system`.
SYSTEM = tests/system tests/cluster
# The MPI: mpich, openmpi5, or "" for the site's MPI (Open MPI 4 from a wheel if there is none).
WITH ?=

export PATH := $(CURDIR)/.venv$(addprefix -,$(WITH))/bin:$(PATH)
# With several threads each, ranks on one machine would compete for its cores.
test-mpi test test-system test-quick test-long: export OMP_NUM_THREADS := 1
# A laptop may have fewer cores than there are ranks. Open MPI 4 and 5 allow that only if told so.
test-mpi test test-system test-quick test-long: export OMPI_MCA_rmaps_base_oversubscribe := 1
test-mpi test test-system test-quick test-long: export PRTE_MCA_rmaps_default_mapping_policy := :oversubscribe
# Most of the programs that the tests start would otherwise compile the package again.
unexport PYTHONDONTWRITEBYTECODE
ifdef COLD
export HPC_TRAIN_WARM := off
endif
ifeq ($(shell id -u),0)
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
endif

# `make lint` runs tests/test_house.py.
BESIDE = -n $(WORKERS) --dist loadscope --no-loadscope-reorder --ignore=tests/test_house.py

# Tests of several ranks, and tests of one process; $(1): which of them, $(2): a name for their durations.
durations = $(if $(DURATIONS),--durations_file=$(DURATIONS)/$(1).tsv)
define several_ranks
timeout 2400 mpirun -np $(RANKS) python -m pytest --only-mpi -m "mpi and not long" -p no:cacheprovider \
	$(1) $(call durations,$(2)-mpi) $(PYTEST_OPTIONS)
endef
define one_process
python -m pytest -m "not mpi and not long" $(BESIDE) $(1) $(call durations,$(2)) $(PYTEST_OPTIONS)
endef

.PHONY: setup demo test test-mpi test-system test-quick test-long test-mpich test-openmpi5 test-gpu lint docs clean

setup:
	@$(PYTHON) bootstrap.py $(WITH)

demo: setup
	@python -m examples.demo

test-mpich:
	$(MAKE) test-mpi WITH=mpich

test-openmpi5:
	$(MAKE) test-mpi WITH=openmpi5

test-mpi: setup
	$(call several_ranks,,all)

test: setup
	$(call several_ranks,$(SYSTEM:%=--ignore=%),parts)
	$(call one_process,$(SYSTEM:%=--ignore=%),parts)

test-system: setup
	$(call several_ranks,$(SYSTEM),system)
	$(call one_process,$(SYSTEM),system)

test-quick: setup
	python -m pytest -m "not mpi and not long and not programs" $(BESIDE) $(PYTEST_OPTIONS)

test-long: setup
	mpirun -np $(RANKS) python -m pytest --only-mpi -m "mpi and long" -p no:cacheprovider $(PYTEST_OPTIONS)
	python -m pytest -m "long and not mpi" $(PYTEST_OPTIONS)

# Without setup, which would need a network, and would bring a torch for processors.
test-gpu:
	$(PYTHON) -m benchmarks.gpu

lint: setup
	ruff format --check
	ruff check
	ruff check --preview --select PLW1514 bootstrap.py benchmarks docs hpc_train  # names encodings
	mypy
	lint-imports
	python -m pytest --noconftest --quiet tests/test_house.py

docs: setup
	sphinx-build --quiet --fail-on-warning --keep-going docs docs/_build

clean:
	rm -rf .venv .venv-* docs/_build runs build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
