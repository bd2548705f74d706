"""`data.micro_batch: auto`: the largest micro-batch that fits, the same on all ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.errors import ConfigError
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.training import micro_batch
from hpc_train.training.micro_batch import USED, Need, largest_that_fits, sizes_to_try
from tests.cases import cases
from tests.training.test_trainer import check_equal, config, make

AUTO = ["--data.micro_batch", "auto", "--run.deterministic", "false"]


@given(st.integers(1, 200), st.integers(1, 8))
def test_sizes_divide_the_samples_and_keep_a_pipeline_busy(samples, stages):
    sizes = sizes_to_try(samples, stages)
    assert sizes == sorted(sizes)
    assert sizes[0] == 1
    assert all(samples % size == 0 for size in sizes)
    if stages == 1:
        assert sizes[-1] == samples
    assert all(samples // size >= 4 * stages for size in sizes[1:] if stages > 1)


@given(st.floats(0, 1.2), st.floats(1e-4, 0.5), st.integers(1, 64))
def test_the_largest_that_fits_is_found_without_a_trial_that_does_not(rest, of_sample, samples):
    sizes, tried = sizes_to_try(samples, 1), []

    def needs(size):
        tried.append(rest + size * of_sample)
        return [Need(rest, size * of_sample), Need(rest / 2, size * of_sample / 3)]

    best, share = largest_that_fits(sizes, needs)
    fit = [size for size in sizes if rest + size * of_sample <= USED]
    assert best == max(fit, default=sizes[0])
    assert share == pytest.approx(rest + best * of_sample)
    assert all(need <= USED + 1e-9 for need in tried[1:])


@pytest.mark.mpi
@pytest.mark.parametrize(
    "options",
    cases(
        {"replicas": [], "zero": ["--memory.zero", "2"], "pipeline": ["--parallel.pp", "2"]},
        later=["zero"],
    ),
)
def test_losses_are_those_of_one_rank(job, together, reference, options):
    trainer = make(config(together / "run", *AUTO, *options), job)
    trainer.train()
    assert trainer.plan.parts[0].count == (1 if options[:1] == ["--parallel.pp"] else 6)
    if job.world.rank == 0:
        check_equal(together / "run", reference)


@pytest.mark.mpi
def test_a_node_with_little_memory_decides_for_all(job, together, reference, monkeypatch):
    free = 1 << (10 if job.world.rank == 1 else 40)
    monkeypatch.setattr(micro_batch, "free_memory_of", lambda device: free)
    trainer = make(config(together / "run", *AUTO), job)
    trainer.train()
    assert trainer.plan.parts[0].count == 1
    if job.world.rank == 0:
        check_equal(together / "run", reference)


def test_a_node_with_more_activations_is_foreseen_though_another_needs_more_now():
    tried = []

    def needs(size):
        tried.append(size)
        return [Need(0.6, 0.01 * size), Need(0.0, 0.5 * size)]

    assert largest_that_fits([1, 2, 4], needs)[0] == 1
    assert tried == [1]


def test_compressed_runs_need_a_number(tmp_path):
    with pytest.raises(ConfigError, match=r"auto, but gradients\.compression is fp16"):
        make(config(tmp_path, *AUTO, "--gradients.compression", "fp16"), Runtime(Group(), Group()))


def test_deterministic_runs_need_a_number(tmp_path):
    with pytest.raises(ConfigError, match=r"auto, but run\.deterministic is on"):
        make(config(tmp_path, "--data.micro_batch", "auto"), Runtime(Group(), Group()))


@pytest.mark.parametrize("value", ["0", "many"])
def test_other_values_are_refused(tmp_path, value):
    with pytest.raises(ConfigError, match=r"data\.micro_batch"):
        config(tmp_path, "--data.micro_batch", value)
