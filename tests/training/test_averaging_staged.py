"""memory.offload optimizer: parameters on a device, the optimizer in the memory of the node.

No GPU is needed: the ranks' parameters count as those of a device, and copies end late.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager, nullcontext

import pytest
import safetensors.torch
import torch
from torch import nn

import hpc_train
from hpc_train.config.file import load
from hpc_train.errors import ConfigError, UserError
from hpc_train.gradients import average_gradients, staged_parameters
from hpc_train.gradients.options import AveragingOptions
from hpc_train.mpi.group import Group
from hpc_train.mpi.levels import Levels
from hpc_train.mpi.runtime import Runtime
from hpc_train.training import sharing
from tests.cases import cases
from tests.gradients.late_lane import LateLane
from tests.training.test_averaging import LAYOUTS, deeper, last_checkpoint, stop_after
from tests.training.test_averaging_streamed import FINE_TUNED, NODES, loop_losses, train
from tests.training.test_averaging_streamed import make as make_private
from tests.training.test_trainer import STEPS, check_equal, config, make, records

STAGED = ["--memory.offload", "optimizer"]
ALONE = Runtime(Group(), Group())


@contextmanager
def on_device():
    """Parameters count as those of a device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "on_host", lambda device: False)
        patch.setattr(staged_parameters, "CopyLane", LateLane)
        yield


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize(
    "more",
    [
        pytest.param([], id="auto"),
        pytest.param(
            ["--data.micro_batch", "2", "--memory.zero", "1", "--memory.scope", "node"],
            id="stage 1",
            marks=pytest.mark.long,
        ),
        pytest.param(["--data.micro_batch", "2", "--memory.zero", "2"], id="stage 2"),
    ],
)
def test_losses_are_those_of_one_rank(group, together, reference, more, caplog):
    with on_device(), caplog.at_level(logging.INFO):
        trainer = make(config(together / "run", *STAGED, *more), Runtime(group, group))
        trainer.train()
        told = [r for r in caplog.records if r.message.startswith("memory.offload optimizer: ")]
        assert len(told) == (group.rank == 0)
        near = trainer.averager.parameters._near
        mine = {p.untyped_storage().data_ptr() for p in trainer.model.parameters()}
        assert mine == {flat.untyped_storage().data_ptr() for flat in near}, "all are staged"
        trainer.close()
        assert not any(p.isnan().any() for p in trainer.model.parameters())
    if group.rank == 0:
        check_equal(together / "run", reference)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("nodes", "order"),
    [
        ("two", (True, False)),
        ("uneven", (False, True)),
        pytest.param("four", (True, True), marks=pytest.mark.long),
    ],
)
def test_a_run_goes_on_with_and_without_it(job, together, reference, nodes, order):
    """And with the model's own modules as the only readers, while copies are on their way."""
    for staged, steps in zip(order, (3, STEPS), strict=True):
        options = ["--run.steps", str(steps), "--memory.zero", "2"]
        if staged:
            with on_device():
                train(job, NODES[nodes], together / "run", *options, *STAGED)
        else:
            train(job, NODES[nodes], together / "run", *options)
    if job.world.rank == 0:
        check_equal(together / "run", reference)
    job.world.barrier()


@pytest.mark.mpi(min_size=2)
def test_checkpoints_do_not_tell_it(job, together):
    make(config(together / "plain"), job).train()
    with on_device():
        make(config(together / "staged", *STAGED), job).train()
    if job.world.rank == 0:
        plain, staged = (
            safetensors.torch.load_file(last_checkpoint(together / name))
            for name in ("plain", "staged")
        )
        assert plain.keys() == staged.keys()
        for name in plain:
            if name.startswith(("model.", "optim.")):
                assert torch.allclose(plain[name], staged[name], rtol=1e-10, atol=1e-12), name


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(LAYOUTS[0], id="tensor", marks=pytest.mark.long),
        pytest.param(LAYOUTS[1], id="sequence"),
        pytest.param(LAYOUTS[2], id="pipeline"),
    ],
)
def test_layouts(job, together, layout, caplog):
    """Parameters that several ranks complete stay with their optimizer on the device."""
    if job.world.rank == 0:
        deeper(config(together / "one"), ALONE).train()
    job.world.barrier()
    with on_device(), caplog.at_level(logging.INFO):
        deeper(config(together / "run", *STAGED, *layout, "--run.steps", "4"), job).train()
    told = [r for r in caplog.records if r.message.startswith("memory.offload optimizer leaves ")]
    if job.world.rank == 0:
        assert len(told) == (layout != LAYOUTS[0])
    if job.world.rank == 0:
        deeper(config(together / "run"), ALONE).train()
        assert [record["loss"] for record in records(together / "run")] == pytest.approx(
            [record["loss"] for record in records(together / "one")], rel=1e-10
        )
    job.world.barrier()


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("staged", "micro_batch"),
    cases(
        {
            "at once": (False, "1"),
            "staged": (True, "3"),
            "at once, larger": (False, "3"),
            "staged, smaller": (True, "1"),
        },
        later=["at once, larger", "staged, smaller"],
    ),
)
def test_a_run_stopped_where_it_saves_goes_on_bit_for_bit(job, together, staged, micro_batch):
    more = ["--memory.zero", "2", "--data.micro_batch", micro_batch, *(STAGED if staged else ())]
    with on_device() if staged else nullcontext():
        make(config(together / "whole", *more), job).train()
        stop_after(make(config(together / "cut", *more), job), 3, job)
        make(config(together / "cut", *more), job).train()
    if job.world.rank == 0:
        mine, theirs = (last_checkpoint(together / name).read_bytes() for name in ("whole", "cut"))
        assert mine == theirs


@pytest.mark.mpi
def test_fine_tuning_from_weights(job, together, reference):
    given = [*FINE_TUNED["head"], "--checkpoint.weights", str(reference)]
    with on_device():
        make_private(config(together / "run", *given, *STAGED), job).train()
    if job.world.rank == 0:
        make_private(config(together / "one", *given), ALONE).train()
        check_equal(together / "run", together / "one")
    job.world.barrier()


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=pytest.mark.long), "float16"])
def test_16_bit_numbers(job, together, dtype):
    """Of one rank: the ranks' numbers would be rounded in another order."""
    given = ["--precision.dtype", dtype, "--run.steps", "4"]
    if job.world.rank == 0:
        make(config(together / "plain", *given), ALONE).train()
        with on_device():
            make(config(together / "staged", *given, *STAGED), ALONE).train()
        plain, staged = records(together / "plain"), records(together / "staged")
        for key in ("loss", "grad_norm"):
            assert [r[key] for r in staged] == pytest.approx([r[key] for r in plain], rel=1e-6)
    with on_device():
        make(config(together / "run", *given, *STAGED), job).train()
    if job.world.rank == 0:
        found = [record["loss"] for record in records(together / "run")]
        assert found == pytest.approx([record["loss"] for record in plain], rel=0.05)


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize(
    ("order", "private"),
    [
        ((True, False), True),
        pytest.param((False, True), False, marks=pytest.mark.long),
    ],
)
def test_a_loop_of_ones_own(job, together, tmp_path, monkeypatch, order, private):
    nodes = NODES["two"]

    def two_nodes(whole):
        node = whole.split(nodes[whole.rank], whole.rank)
        return Levels.join(whole, node, whole.split(node.rank, whole.rank))

    expected, _ = loop_losses(ALONE, tmp_path, 4, hpc_train.LoopOptions(clip_norm=0.3))
    monkeypatch.setattr(Levels, "of", staticmethod(two_nodes))
    seen = []
    for staged, epochs in zip(order, (2, 4), strict=True):
        offload = "optimizer" if staged else "none"
        options = hpc_train.LoopOptions(
            memory=hpc_train.MemorySection(offload=offload),
            private_parameters=private,
            clip_norm=0.3,
        )
        if staged:
            with on_device():
                found, _ = loop_losses(job, together / "run", epochs, options)
        else:
            found, _ = loop_losses(job, together / "run", epochs, options)
        seen += found
    assert seen == pytest.approx(expected, rel=1e-10)


@pytest.mark.mpi
def test_what_others_write_to_parameters_between_steps_is_kept(job):
    def trained(group, **options):
        torch.manual_seed(0)
        model = nn.Linear(3, 4).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        averager = average_gradients(model, optimizer, group, AveragingOptions(**options))
        for step in range(4):
            averager.zero_grad()
            model(torch.ones(2, 3).double() * step).square().mean().backward()
            averager.step()
            with torch.no_grad():
                model.weight.clamp_(-0.2, 0.2)
        averager.close()
        return model

    with on_device():
        mine = trained(job.world, staged=True, zero=1)
    for one, other in zip(mine.parameters(), trained(Group()).parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-12)


@pytest.mark.mpi
def test_a_model_without_wide_parameters_is_refused(job):
    model = nn.Linear(3, 4).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UserError, match="float32 and float64 .* and these are torch.bfloat16"):
        average_gradients(model, optimizer, job.world, AveragingOptions(staged=True, zero=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory.zero", "0"], "memory.zero is 0: the ranks of a node divide"),
        (["--memory.zero", "3"], "memory.zero is 3: .*: leave memory.zero out, or set it to 1 or"),
        (["--gradients.engine", "horovod"], "offload is optimizer, but gradients.engine is hor"),
        (["--gradients.two_level", "off"], "memory.zero is 1, but gradients.two_level is off"),
        (["--gradients.average_every", "2"], "average_every is 2"),
        (["--gradients.compression", "bf16"], "memory.scope is all, but gradients.compression"),
    ],
)
def test_what_does_not_go_together_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        load(None, [*STAGED, *options])


def loop(options, directory):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    memory = hpc_train.MemorySection(**options)
    hpc_train.Loop(ALONE, directory, model, optimizer, hpc_train.LoopOptions(memory=memory))


def test_on_processors_there_is_nothing_to_move(tmp_path):
    with pytest.raises(ConfigError, match="state is in the host's memory already: leave .*folder"):
        make(config(tmp_path, *STAGED), ALONE)
    with pytest.raises(ConfigError, match="state is in the host's memory already"):
        loop({"offload": "optimizer"}, tmp_path)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"zero": 1}, "set memory.offload optimizer as well"),
        ({"zero": 2}, "set memory.offload optimizer as well"),
        ({"zero": 3}, "set memory.offload optimizer and memory.zero 2"),
        ({"offload": "/scratch"}, "set memory.offload optimizer, which also takes the step"),
    ],
)
def test_on_gpus_other_ways_name_this_one(tmp_path, options, remedy):
    words = [word for key, one in options.items() for word in (f"--memory.{key}", str(one))]
    with on_device():
        with pytest.raises(ConfigError, match=remedy):
            make_private(config(tmp_path, *words), ALONE)
        if options.get("zero") != 3 and options.get("offload") != "/scratch":
            with pytest.raises(ConfigError, match=remedy):
                loop(options, tmp_path)
