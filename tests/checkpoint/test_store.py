from __future__ import annotations

import errno
import time

import pytest
import torch
from torch import nn

from hpc_train import files
from hpc_train.checkpoint import Checkpoints, SavePolicy, TrainingState, fileformat
from hpc_train.checkpoint import save as saving
from hpc_train.checkpoint.background import Snapshot
from hpc_train.checkpoint.catalogue import SAVE_SECONDS_FILE, name_of, newest
from hpc_train.checkpoint.claim import claimed
from hpc_train.checkpoint.weights import start_from
from hpc_train.collectives import connect
from hpc_train.errors import CheckpointError, CheckpointMismatch, ClaimError, UserError
from hpc_train.mpi.group import Group
from tests.checkpoint import states


class Model(nn.Module):
    """With a tied weight, a buffer, and a weight that is not contiguous."""

    def __init__(self, width=4):
        super().__init__()
        self.a = nn.Linear(width, width)
        self.tied = nn.Linear(width, width)
        self.tied.weight = self.a.weight
        self.norm = nn.BatchNorm1d(width)
        self.image = nn.Conv2d(1, 2, 3).to(memory_format=torch.channels_last)

    def forward(self, x):
        image = self.image(x[:, None, :, None].expand(-1, 1, -1, 3)).mean((1, 2, 3))
        return self.norm(self.tied(self.a(x))).sum(1) + image


def make(width=4, optimizer_class=torch.optim.AdamW, seed=0, **options):
    torch.manual_seed(seed)
    model = Model(width).double()
    return model, optimizer_class(model.parameters(), lr=0.01, **options)


def train(model, optimizer, steps, first=1):
    losses = []
    for step in range(first, first + steps):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step)).double()
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def store(directory, model, optimizer, identity=None, about=None, **policy):
    state = TrainingState(model, optimizer)
    own = {"identity": identity, "about": about}
    return Checkpoints(directory, connect(Group()), state, SavePolicy(**policy), **own)


OPTIMIZERS = [
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"fused": True, "amsgrad": True}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.Adagrad, {}),
    (torch.optim.RMSprop, {"centered": True}),
]


@pytest.mark.parametrize(("optimizer_class", "options"), OPTIMIZERS)
def test_training_goes_on_bit_for_bit(tmp_path, optimizer_class, options):
    model, optimizer = make(4, optimizer_class, **options)
    train(model, optimizer, 3)
    store(tmp_path, model, optimizer).save(3)
    expected = train(model, optimizer, 4, first=4)
    other, other_optimizer = make(4, optimizer_class, seed=9, **options)
    assert store(tmp_path, other, other_optimizer).resume() == 3
    assert train(other, other_optimizer, 4, first=4) == expected
    assert other.image.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_training_goes_on_if_parameters_are_not_row_major(tmp_path, kind):
    """A fused optimizer goes through the memory of a parameter and of its state at once."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.image = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
            self.turned = nn.Parameter(torch.randn(5, 4).t())

        def forward(self, x):
            x = self.image(x[:, :3, None, None].expand(-1, -1, 2, 2)).mean((2, 3))
            return (x @ self.turned).sum(1)

    def made(seed):
        torch.manual_seed(seed)
        model = Odd().double()
        more = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        return model, kind(model.parameters(), lr=0.05, fused=True, **more)

    model, optimizer = made(0)
    train(model, optimizer, 3)
    store(tmp_path, model, optimizer).save(3)
    expected = train(model, optimizer, 4, first=4)
    other, other_optimizer = made(1)
    assert store(tmp_path, other, other_optimizer).resume() == 3
    assert train(other, other_optimizer, 4, first=4) == expected


def test_a_folder_may_be_a_text(tmp_path):
    store(str(tmp_path), *make()).save(3)
    assert store(str(tmp_path), *make()).resume() == 3


def test_the_newest_is_taken_and_the_oldest_are_dropped(tmp_path):
    model, optimizer = make()
    checkpoints = store(tmp_path, model, optimizer, keep=2)
    for step in (5, 10, 15):
        checkpoints.save(step)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [
        SAVE_SECONDS_FILE,
        "LATEST",
        "step-000000010.safetensors",
        "step-000000015.safetensors",
    ]
    assert (tmp_path / "LATEST").read_text() == "step-000000015.safetensors\n"
    assert store(tmp_path, *make()).resume() == 15


def test_resume_takes_none_a_file_and_an_empty_folder(tmp_path):
    model, optimizer = make()
    path = store(tmp_path, model, optimizer).save(7)
    assert store(tmp_path / "elsewhere", *make()).resume("none") == 0
    assert store(tmp_path / "elsewhere", *make()).resume(str(path)) == 7
    assert store(tmp_path / "elsewhere", *make()).resume() == 0
    with pytest.raises(CheckpointMismatch, match="no such checkpoint: /no/file"):
        store(tmp_path / "elsewhere", *make()).resume("/no/file")


def test_what_is_resumed_from_another_run_and_saved_keeps_its_score(tmp_path):
    checkpoints = store(tmp_path / "a", *make())
    checkpoints.scores[7] = 0.5
    path = checkpoints.save(7)
    other = store(tmp_path / "b", *make())
    assert other.resume(str(path)) == 7
    assert other.save(7).read_bytes() == path.read_bytes()


def test_starting_earlier_than_the_folders_own_checkpoints_is_refused(tmp_path):
    """What it would save is older than what is there, and would be dropped as the oldest."""
    model, optimizer = make()
    old = store(tmp_path, model, optimizer).save(3)
    store(tmp_path, model, optimizer).save(7)
    for source in ("none", str(old)):
        with pytest.raises(CheckpointMismatch, match=r"beyond this start, up to step-000000007"):
            store(tmp_path, *make()).resume(source)
    other = store(tmp_path / "other", model, optimizer).save(1)
    assert store(tmp_path, *make()).resume(str(other)) == 7, "the same line goes on"


def test_retention_never_drops_what_was_just_saved(tmp_path, caplog):
    checkpoints = store(tmp_path, *make(), keep=1)
    checkpoints.save(3)
    (tmp_path / "step-000000009.safetensors").write_bytes(b"damaged")
    (tmp_path / "LATEST").write_text("step-000000009.safetensors\n")
    again = store(tmp_path, *make(), keep=1)
    assert again.resume() == 3
    assert "6 steps are lost, up to step 9" in caplog.text
    again.save(5)
    caplog.clear()
    assert store(tmp_path, *make()).resume() == 5
    assert "lost" not in caplog.text, "they were lost in the start before"


def test_a_damaged_checkpoint_of_a_later_step_takes_no_place_of_a_sound_one(tmp_path):
    checkpoints = store(tmp_path, *make(), keep=2)
    for step in (3, 4):
        checkpoints.save(step)
    (tmp_path / "step-000000009.safetensors").write_bytes(b"damaged")
    checkpoints.save(5)
    left = sorted(path.name for path in tmp_path.glob("step-*"))
    assert left == [name_of(4), name_of(5), name_of(9)]


@pytest.mark.parametrize("background", [False, True])
def test_the_longest_save_is_not_forgotten(tmp_path, monkeypatch, background):
    commit = saving._commit
    pauses = [0.2, 0.0]

    def slow(*arguments):
        time.sleep(pauses.pop(0))
        commit(*arguments)

    monkeypatch.setattr(saving, "_commit", slow)
    checkpoints = store(tmp_path, *make())
    for step in (1, 2):
        checkpoints.save(step, background=background)
    checkpoints.close()
    assert checkpoints.longest_save >= 0.2 > checkpoints.save_seconds > 0


def test_a_job_that_lost_its_directory_while_it_wrote_adds_no_checkpoint(tmp_path, monkeypatch):
    with claimed(Group(), tmp_path, 1.0) as claim:
        checkpoints = store(tmp_path, *make())
        checkpoints.claim = claim
        call = files.call

        def suspended(name, *arguments):
            found = call(name, *arguments)
            if name == "sync":  # the last one is that of the whole file
                syncs.append(name)
                if len(syncs) == 3:
                    (tmp_path / ".claim" / "000002").write_text("{}")
            return found

        syncs = []
        monkeypatch.setattr(files, "call", suspended)
        with pytest.raises(ClaimError):
            checkpoints.save(1)
    assert not [*tmp_path.glob("step-*")]


def test_old_checkpoints_give_their_room_to_the_file_that_names_the_new_one(tmp_path, monkeypatch):
    write = files.write_text

    def on_a_small_disk(path, text):
        if len(list(tmp_path.glob("step-*"))) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, text)

    monkeypatch.setattr(files, "write_text", on_a_small_disk)
    checkpoints = store(tmp_path, *make(), keep=1)
    for step in (1, 2):
        checkpoints.save(step)
    assert [path.name for path in tmp_path.glob("step-*")] == [name_of(2)]
    assert newest(tmp_path).name == (tmp_path / "LATEST").read_text().strip() == name_of(2)


def test_what_a_killed_job_left_unfinished_is_removed(tmp_path):
    store(tmp_path, *make()).save(1)
    (tmp_path / ".step-000000002.safetensors.partial").write_bytes(b"x" * 100)
    assert store(tmp_path, *make()).resume() == 1
    assert not list(tmp_path.glob(".step-*"))


def test_a_damaged_newest_checkpoint_is_passed_over_with_a_warning(tmp_path, caplog):
    model, optimizer = make()
    checkpoints = store(tmp_path, model, optimizer)
    checkpoints.save(1)
    newest = checkpoints.save(2)
    newest.write_bytes(newest.read_bytes()[:-3])
    assert store(tmp_path, *make()).resume() == 1
    assert "step-000000002.safetensors" in caplog.text
    (tmp_path / "step-000000001.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="step-000000001"):
        store(tmp_path, *make()).resume()


def test_what_a_killed_job_left_is_no_checkpoint(tmp_path):
    model, optimizer = make()
    store(tmp_path, model, optimizer).save(1)
    partial = tmp_path / ".step-000000002.safetensors.partial"
    partial.write_bytes(b"half")
    again = store(tmp_path, *make())
    assert again.resume() == 1
    again.save(2)
    assert not partial.exists()


def linear():
    model = nn.Linear(2, 2)
    return model, torch.optim.AdamW(model.parameters())


def frozen():
    model, _ = make()
    model.a.bias.requires_grad_(False)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: make(5), r"its model.a.bias is F64 \[4\], the model's is float64 \[5\]"),
        (lambda: make(4, torch.optim.SGD), "made with optimizer.name adamw, this run has sgd"),
        (linear, "only the"),
        (frozen, r"optim\.a\.bias\.exp_avg, but .* does not have a\.bias: train that .* own"),
    ],
)
def test_another_model_or_optimizer_is_refused_by_name(tmp_path, other, message):
    model, optimizer = make()
    train(model, optimizer, 1)
    store(tmp_path, model, optimizer).save(1)
    with pytest.raises(CheckpointMismatch, match=message):
        store(tmp_path, *other()).resume()


@pytest.mark.parametrize(
    ("kind", "option", "slot"),
    [
        (torch.optim.AdamW, {"amsgrad": True}, "max_exp_avg_sq"),
        (torch.optim.RMSprop, {"centered": True}, "grad_avg"),
        (torch.optim.RMSprop, {"momentum": 0.9}, "momentum_buffer"),
    ],
)
def test_an_option_that_needs_state_which_was_not_saved_is_refused(tmp_path, kind, option, slot):
    model, optimizer = make(4, kind)
    train(model, optimizer, 1)
    store(tmp_path / "without", model, optimizer).save(1)
    model, optimizer = make(4, kind, **option)
    (name,) = option
    with pytest.raises(CheckpointMismatch, match=f"option {name}, so it has no {slot}: leave"):
        store(tmp_path / "without", model, optimizer).resume()
    model, optimizer = make(4, kind, **option)
    train(model, optimizer, 1)
    store(tmp_path / "with", model, optimizer).save(1)
    model, optimizer = make(4, kind)
    store(tmp_path / "with", model, optimizer).resume()
    train(model, optimizer, 1)


def test_momentum_that_begins_later_is_not_refused(tmp_path):
    model, optimizer = make(4, torch.optim.SGD)
    train(model, optimizer, 1)
    store(tmp_path, model, optimizer).save(1)
    model, optimizer = make(4, torch.optim.SGD, momentum=0.9)
    store(tmp_path, model, optimizer).resume()
    train(model, optimizer, 1)


def test_another_number_format_is_refused(tmp_path):
    store(tmp_path, *make()).save(1)
    model, _ = make()
    model.float()
    with pytest.raises(CheckpointMismatch, match="is F64 .*the model's is float32"):
        store(tmp_path, model, torch.optim.AdamW(model.parameters())).resume()


def test_what_the_samples_depend_on_is_compared(tmp_path):
    store(tmp_path, *make(), identity={"data.batch": 8}).save(1)
    assert store(tmp_path, *make(), identity={"data.batch": 8}).resume() == 1
    with pytest.raises(CheckpointMismatch, match="made with data.batch 8, this run has 16: set"):
        store(tmp_path, *make(), identity={"data.batch": 16}).resume()


def test_a_step_that_is_saved_is_not_written_again(tmp_path):
    checkpoints = store(tmp_path, *make())
    written = checkpoints.save(3).stat().st_mtime_ns
    assert checkpoints.save(3).stat().st_mtime_ns == written


@pytest.mark.parametrize("step", [0, -1])
def test_steps_count_from_one(tmp_path, step):
    with pytest.raises(UserError, match=f"checkpoint of step {step} .*: count steps from 1"):
        store(tmp_path, *make()).save(step)


def test_a_start_names_a_checkpoint_that_a_kill_left_without_its_name(tmp_path, caplog):
    made = make()
    for step in (1, 2):
        store(tmp_path, *made, keep=0).save(step)
    (tmp_path / "LATEST").write_text("step-000000001.safetensors\n")
    assert store(tmp_path, *made).resume() == 2  # a reader that is not the job's changes nothing
    assert newest(tmp_path).name == "step-000000001.safetensors"
    assert "later files" in caplog.text
    with claimed(Group(), tmp_path, 1.0) as claim:
        checkpoints = store(tmp_path, *made)
        checkpoints.claim = claim
        assert checkpoints.resume() == 2
    assert newest(tmp_path).name == "step-000000002.safetensors"


def test_what_the_disk_refused_to_remove_is_removed_by_the_next_save(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    checkpoints = store(tmp_path, *make())
    with monkeypatch.context() as patch:
        patch.setattr(files, "rename", fail)
        patch.setattr(saving, "_give_up", lambda path: None)
        with pytest.raises(CheckpointError, match="Read-only file system"):
            checkpoints.save(1)
    others = tmp_path / ".step-000000001.safetensors.0123.partial"
    others.touch()
    assert len([*tmp_path.glob(".*.partial")]) == 2
    checkpoints.save(2)
    assert [*tmp_path.glob(".*.partial")] == [others]


def test_what_a_dead_job_has_not_completed_is_removed(tmp_path):
    partial = tmp_path / ".step-000000005.safetensors.0123.partial"
    partial.touch()
    assert store(tmp_path, *make()).resume() == 0
    assert not partial.exists()


@pytest.mark.parametrize("place", ["version", "everything"])
def test_a_damaged_header_is_not_taken_for_another_format(tmp_path, place):
    model, optimizer = make()
    for step in (1, 2):
        store(tmp_path, model, optimizer).save(step)
    newest = tmp_path / "step-000000002.safetensors"
    content = bytearray(newest.read_bytes())
    if place == "version":
        content[content.index(b'version":"1"') + 10] ^= 2
    else:
        content[8 : 1 << 20] = bytes((1 << 20) - 8)
    newest.write_bytes(content)
    assert store(tmp_path, *make()).resume() == 1


def test_a_file_of_another_version_is_not_taken_for_damaged(tmp_path, monkeypatch):
    model, optimizer = make()
    store(tmp_path, model, optimizer).save(1)
    with monkeypatch.context() as patch:
        patch.setattr(fileformat, "FORMAT_VERSION", "2")
        store(tmp_path, model, optimizer).save(2)
    with pytest.raises(CheckpointMismatch, match="version is 2, this program reads 1"):
        store(tmp_path, *make()).resume()


def test_a_run_directory_stands_for_its_newest_checkpoint(tmp_path):
    model, optimizer = make()
    for step in (1, 2):
        train(model, optimizer, 1, first=step)
        store(tmp_path / "old" / "checkpoints", model, optimizer).save(step)
    other, other_optimizer = make(seed=9)
    assert store(tmp_path / "new", other, other_optimizer).resume(str(tmp_path / "old")) == 2
    assert train(other, other_optimizer, 1, first=3) == train(model, optimizer, 1, first=3)


def test_a_run_directory_stands_for_its_last_completed_checkpoint(tmp_path, caplog):
    folder = tmp_path / "checkpoints"
    model, optimizer = make()
    for step in (1, 2):
        store(folder, model, optimizer, keep=0).save(step)
    damaged = folder / "step-000000002.safetensors"
    damaged.rename(folder / "step-000000009.safetensors")
    assert newest(tmp_path).name == "step-000000009.safetensors"  # LATEST names no file
    store(folder, model, optimizer, keep=0).save(3)
    assert newest(tmp_path).name == "step-000000003.safetensors"
    assert "step-000000009" in caplog.text
    other = Model().double()
    start_from(tmp_path, other, {}, Group())
    assert torch.equal(other.a.weight, model.a.weight)
    (folder / "LATEST").write_text("../../elsewhere\n")
    assert newest(tmp_path).name == "step-000000009.safetensors"


def test_memory_of_saves_in_the_background_is_there_before_the_first_one(tmp_path, monkeypatch):
    asked = []
    get = Snapshot._get
    monkeypatch.setattr(Snapshot, "_get", lambda made, n: (asked.append(n), get(made, n)))
    made = states.store(tmp_path, Group())
    made.state.optimizer.step()
    for _ in range(2):
        made.get_ready()
    states.save(made, 3, background=True)
    assert len(asked) == 1
    assert states.found(tmp_path, Group()) == 3


def test_memory_that_is_missing_early_is_asked_for_again(tmp_path, monkeypatch):
    def missing(made, nbytes):
        raise CheckpointError("there is no memory", "")

    made = states.store(tmp_path, Group())
    with monkeypatch.context() as early:
        early.setattr(Snapshot, "_get", missing)
        made.get_ready()
        made._snapshot._early.join()
    states.save(made, 3, background=True)
    assert states.found(tmp_path, Group()) == 3
