"""What a checkpoint holds, and what it does not: that is told before training begins."""

from __future__ import annotations

import re
from contextlib import nullcontext

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from hpc_train.checkpoint import Checkpoints
from hpc_train.checkpoint.buffers import _changed_by
from hpc_train.checkpoint.checks import check_savable
from hpc_train.checkpoint.export import export_model
from hpc_train.checkpoint.fileformat import Entry, format_dtypes
from hpc_train.checkpoint.inspection import differences
from hpc_train.checkpoint.optimizer_state import check_slots
from hpc_train.checkpoint.parts import as_bytes
from hpc_train.checkpoint.policy import SavePolicy
from hpc_train.checkpoint.state import TrainingState
from hpc_train.collectives import connect
from hpc_train.errors import CheckpointMismatch, UserError
from hpc_train.training.loop import Loop
from tests.checkpoint.test_store import make, store, train

COMPLEX = torch.complex128  # which the format does not have


class Buffers(nn.Module):
    """A buffer of each type, and a parameter."""

    def __init__(self, seed=0):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        generator = torch.Generator().manual_seed(seed)
        for dtype in (*format_dtypes(), COMPLEX):
            shape = (6, 5, dtype.itemsize)
            bits = torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8)
            name = str(dtype).replace("torch.", "of_")
            self.register_buffer(name, bits.view(dtype)[..., 0])
            self.register_buffer(f"{name}_alone", bits[0, 0].view(dtype)[0].clone())


def bits_of(model):
    return {name: as_bytes(b.contiguous()).tolist() for name, b in model.named_buffers()}


@pytest.mark.ranks(1, 2, 3, 4)
def test_buffers_of_all_types_come_back_and_are_those_of_rank_0(group, together):
    model = Buffers(seed=group.rank)
    Checkpoints(
        together,
        connect(group),
        TrainingState(model, torch.optim.SGD(model.parameters())),
        SavePolicy(replicas="stop"),
    ).save(1)
    assert bits_of(model) == bits_of(Buffers(seed=0))
    other = Buffers(seed=9)
    Checkpoints(
        together, connect(group), TrainingState(other, torch.optim.SGD(other.parameters()))
    ).resume()
    assert bits_of(other) == bits_of(model)


def test_safetensors_reads_them(tmp_path):
    model = Buffers()
    path = store(tmp_path, model, torch.optim.SGD(model.parameters())).save(1)
    with safe_open(path, framework="pt") as file:
        for name, buffer in model.named_buffers():
            found = file.get_tensor(f"model.{name}")
            expected = torch.view_as_real(buffer) if buffer.dtype == COMPLEX else buffer
            assert found.dtype == expected.dtype
            assert torch.equal(as_bytes(found), as_bytes(expected.contiguous()))


def test_differences_are_told_for_all_types(tmp_path):
    model, other = Buffers(), Buffers(seed=1)
    paths = [
        store(tmp_path / str(number), one, torch.optim.SGD(one.parameters())).save(1)
        for number, one in enumerate((model, other))
    ]
    found = {one.name for one in differences(*paths)}
    mine, theirs = bits_of(model), bits_of(other)
    assert found == {f"model.{name}" for name in mine if mine[name] != theirs[name]}


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("one", "other", "dtype", "told"),
    [
        ([NAN, 1, 2], [NAN, 1, 4], torch.float32, "1 of 3 elements, by 2 at most (.* 2)"),
        (
            [INF, 1],
            [1, 2],
            torch.float16,
            "2 of 2 .*by 1 at .* 1); 1 of them not finite in one of the two",
        ),
        ([NAN], [0], torch.float64, "1 of 1 elements; 1 of them not finite in one of the two"),
        ([0.0], [-0.0], torch.float32, "1 of 1 elements, by 0 at most (the largest is 0)"),
        ([2**60], [2**60 + 1], torch.int64, "1 of 1 elements, by 1 at most .*"),
        ([-(2**63)], [2**63 - 1], torch.int64, "1 of 1 elements, by 1.84e.19 at most .*"),
        ([True], [False], torch.bool, "1 of 1 elements, by 1 at most .*"),
    ],
)
def test_a_difference_counts_bytes_and_measures_what_is_finite(tmp_path, one, other, dtype, told):
    paths = []
    for values in (one, other):
        model, optimizer = with_buffer(torch.tensor(values, dtype=dtype))
        paths.append(store(tmp_path / str(len(paths)), model, optimizer).save(1))
    (found,) = differences(*paths)
    assert re.fullmatch(told.replace("(", r"\(").replace(")", r"\)"), found.what), found.what


class Complex(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype
        self.weight = nn.Parameter(torch.randn(3, 4, dtype=dtype))
        self.scale = nn.Parameter(torch.randn((), dtype=dtype))

    def forward(self, x):
        return (self.scale * (self.weight @ x.to(self.dtype).T)).abs().sum(0)


def closure_of(model, optimizer, step):
    """What LBFGS calls several times."""

    def closure():
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step)).double()
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return closure


def go_on(model, optimizer, first, last):
    for step in range(first, last + 1):
        optimizer.step(closure_of(model, optimizer, step))
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.complex64, COMPLEX])
def test_complex_parameters_go_on_bit_for_bit(tmp_path, dtype):
    def made(seed):
        torch.manual_seed(seed)
        model = Complex(dtype)
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    model, optimizer = made(0)
    go_on(model, optimizer, 1, 3)
    store(tmp_path, model, optimizer).save(3)
    other, other_optimizer = made(1)
    assert store(tmp_path, other, other_optimizer).resume() == 3
    expected = go_on(model, optimizer, 4, 6)
    assert all(map(torch.equal, go_on(other, other_optimizer, 4, 6), expected))


class Tied(Complex):
    """With a further name for the weight, and a number before it that is not of 16 bytes."""

    def __init__(self):
        super().__init__(COMPLEX)
        self.alone = nn.Parameter(torch.randn((), dtype=torch.float64))
        self.again = self.weight


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_an_exported_state_dict_is_what_the_model_takes(tmp_path, dtype):
    model = Tied()
    path = store(tmp_path, model, torch.optim.SGD(model.parameters())).save(1)
    for name in ("all.pt", "all.safetensors"):
        export_model(path, tmp_path / name, dtype=dtype)
    export_model(path, tmp_path / "some.pt", exclude=["again"])
    whole = torch.load(tmp_path / "all.pt", weights_only=True)
    other = Tied()
    other.load_state_dict(whole)
    assert other.again is other.weight
    assert torch.equal(other.weight, model.weight)
    assert whole["again"].data_ptr() == whole["weight"].data_ptr()
    assert whole["alone"].dtype == (dtype or torch.float64)
    some = torch.load(tmp_path / "some.pt", weights_only=True)
    assert some.keys() == whole.keys() - {"again"}
    pairs = load_file(tmp_path / "all.safetensors")
    assert pairs.keys() == some.keys()
    assert torch.equal(torch.view_as_complex(pairs["weight"].clone()), model.weight)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_an_optimizer_that_keeps_lists_of_tensors_goes_on_bit_for_bit(tmp_path, search):
    def made(seed):
        options = {"max_iter": 3, "history_size": 4, "line_search_fn": search}
        return make(4, torch.optim.LBFGS, seed, **options)

    model, optimizer = made(0)
    go_on(model, optimizer, 1, 3)
    assert len(optimizer.state[model.a.weight]["old_dirs"]) > 1
    store(tmp_path, model, optimizer).save(3)
    other, other_optimizer = made(1)
    assert store(tmp_path, other, other_optimizer).resume() == 3
    expected = go_on(model, optimizer, 4, 6)
    assert all(map(torch.equal, go_on(other, other_optimizer, 4, 6), expected))


def with_buffer(buffer):
    model, optimizer = make()
    model.register_buffer("odd", buffer)
    return model, optimizer


def with_a_criterion():
    model, _ = make()
    criterion = nn.Linear(2, 1).double()
    return model, torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)


class Half(nn.Linear):
    def state_dict(self, *arguments, **options):
        return {n: t for n, t in super().state_dict(*arguments, **options).items() if n == "bias"}


def half():
    model = Half(2, 2)
    return model, torch.optim.SGD(model.parameters())


class Copied(nn.Linear):
    def state_dict(self, *arguments, **options):
        found = super().state_dict(*arguments, **options)
        return {**found, "version": 3}


def copied():
    model = Copied(2, 2)
    return model, torch.optim.SGD(model.parameters())


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: with_buffer(torch.eye(3).to_sparse()), "odd is a sparse_coo tensor, which"),
        (lambda: with_buffer(torch.ones(2, dtype=torch.complex64).conj()), "odd is a view that"),
        (
            lambda: with_buffer(torch.zeros(2, dtype=torch.uint8).view(torch.bits8)),
            "odd .* type bits8.*False",
        ),
        (with_a_criterion, r"parameter 7 of .* group 0, float64 \[1, 2\], is none of the model's"),
        (half, "weight is trained, but the model's state_dict has nothing of it"),
        (copied, "version of the model's state_dict is none of its parameters"),
    ],
)
def test_what_cannot_be_saved_is_told_before_training_begins(tmp_path, made, message):
    with pytest.raises(UserError, match=message) as caught:
        store(tmp_path, *made())
    assert caught.value.exit_code == 2


@pytest.mark.mpi
def test_what_one_rank_cannot_save_is_told_by_all(job, together):
    kind = torch.bits8 if job.world.rank == job.world.size - 1 else torch.int8
    model, optimizer = with_buffer(torch.zeros(2, dtype=torch.uint8).view(kind))
    message = f"rank {job.world.size - 1} .*odd is a tensor of type bits8"
    with pytest.raises(UserError, match=message if job.world.size > 1 else "bits8"):
        Checkpoints(together, connect(job.world), TrainingState(model, optimizer))


@pytest.mark.mpi
def test_a_loop_tells_it_before_anything_is_sent(job, together):
    with pytest.raises(UserError, match="odd is a sparse_coo tensor, which"):
        Loop(job, together, *with_buffer(torch.eye(3).to_sparse()))


class Keeps(nn.Linear):
    """A module that keeps something beside tensors."""

    def __init__(self, kept=None):
        super().__init__(2, 2)
        self.kept = kept

    def get_extra_state(self):
        return self.kept

    def set_extra_state(self, state):
        self.kept = state


class Loses(nn.Linear):
    def get_extra_state(self):
        return 1


def keeping(module):
    model = nn.Sequential(module)
    return model, torch.optim.SGD(model.parameters())


@pytest.mark.mpi
def test_what_modules_keep_beside_tensors_comes_back(job, together):
    kept = {"steps": 3, "names": ["a", None], "scale": 0.1}
    Checkpoints(together, connect(job.world), TrainingState(*keeping(Keeps(kept)))).save(1)
    other = Keeps()
    Checkpoints(together, connect(job.world), TrainingState(*keeping(other))).resume()
    assert other.kept == kept
    with pytest.raises(CheckpointMismatch, match="only the checkpoint has 0._extra_state"):
        Checkpoints(together, connect(job.world), TrainingState(*keeping(nn.Linear(2, 2)))).resume()


@pytest.mark.mpi(min_size=2)
def test_modules_that_keep_something_else_on_each_rank_are_told(job, together):
    made = Checkpoints(together, connect(job.world), TrainingState(*keeping(Keeps(job.world.rank))))
    with pytest.raises(UserError, match="get_extra_state.* differs"):
        made.save(1)
    assert not list(together.iterdir())


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Keeps(torch.ones(2)), "0._extra_state .* is of type Tensor"),
        (Keeps({1, 2}), "0._extra_state .* is of type set"),
        (Loses(2, 2), "0._extra_state .* could not be restored"),
    ],
)
def test_modules_that_keep_what_cannot_be_saved_are_told_before_training(tmp_path, module, message):
    with pytest.raises(UserError, match=message):
        store(tmp_path, *keeping(module))


class Odd(torch.optim.SGD):
    """An optimizer that remembers something after its first step."""

    slot, kept, key = "memory", None, None

    def step(self, closure=None):
        super().step(closure)
        first = self.param_groups[0]["params"][0] if self.key is None else self.key
        self.state[first][self.slot] = self.kept


@pytest.mark.parametrize(
    ("slot", "kept", "key", "message"),
    [
        ("memory", {1, 2}, None, "'memory' in the state of Odd is of type set"),
        ("memory", [torch.ones(2), (1, 2)], None, "'memory' .* is of type tuple"),
        ("memory", {"a": torch.ones(2)}, None, "'memory' .* is of type dict"),
        ("a.b", 1, None, "'a.b' .* name that checkpoints cannot hold"),
        ("memory", 1, "all", "Odd keeps 'all' in its state"),
        (
            "memory",
            torch.zeros(2, dtype=torch.uint8).view(torch.bits8),
            None,
            "is a tensor of type bits8",
        ),
    ],
)
def test_what_an_optimizer_cannot_save_is_told_after_its_first_step(
    tmp_path, monkeypatch, slot, kept, key, message
):
    for name, value in {"slot": slot, "kept": kept, "key": key}.items():
        monkeypatch.setattr(Odd, name, value)
    model, optimizer = make(4, Odd)
    checkpoints = store(tmp_path, model, optimizer)
    train(model, optimizer, 1)
    with pytest.raises(UserError, match=message):
        checkpoints.poll()
    with pytest.raises(UserError, match=message):
        checkpoints.save(1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rows", [0, 1])
def test_older_files_may_have_slots_of_parameters_without_elements_only(rows):
    entries = {
        name: Entry(name, "F32", (rows, 3), 0, 12 * rows) for name in ("model.a", "optim.a.exp_avg")
    }
    with pytest.raises(CheckpointMismatch, match="not have a") if rows else nullcontext():
        check_slots(entries, ["optim.a.step"], {})


def test_a_save_refuses_parameters_added_later_that_are_not_the_models(tmp_path):
    model, optimizer = make()
    checkpoints = store(tmp_path, model, optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with pytest.raises(UserError, match=r"parameter 0 of .* group 1, float32 \[3\]"):
        checkpoints.save(1)


def test_plain_values_of_an_optimizer_come_back(tmp_path, monkeypatch):
    kept = [1, 0.1, None, True, "a", {"b": [float("inf")]}]
    monkeypatch.setattr(Odd, "kept", kept)
    model, optimizer = make(4, Odd)
    train(model, optimizer, 1)
    store(tmp_path, model, optimizer).save(1)
    other, other_optimizer = make(4, Odd, seed=1)
    store(tmp_path, other, other_optimizer).resume()
    assert other_optimizer.state[other.a.weight]["memory"] == kept


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x[0, 0],
        lambda x: x.diagonal(),
        lambda x: x[::2, 0],
        lambda x: x[:1, 0].expand(5),
        lambda x: x.conj()[0],
        lambda x: x.conj().imag[1],
    ],
    ids=["whole", "one", "diagonal", "strided", "expanded", "conjugate", "negated"],
)
def test_a_buffer_of_any_layout_is_compared(view):
    buffer = view(torch.randn(4, 4, dtype=torch.complex64))
    assert _changed_by(lambda x: x.view_as(x), buffer) is False
    assert _changed_by(lambda x: x[..., :1].copy_(x[..., :1] + 1) if x.dim() else x.add_(1), buffer)


def test_a_model_without_memory_is_refused_with_what_to_do():
    model = nn.Linear(2, 2, device="meta")
    trained = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UserError, match=r"weight .* device meta.*: call model.to_empty\("):
        check_savable(trained)
