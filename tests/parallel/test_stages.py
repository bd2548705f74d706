"""Stages in one process: the ranks of a pipeline are copies of the model, computed in turn."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hpc_train.errors import UserError
from hpc_train.parallel.runs import costs, runs_of, stage_names
from hpc_train.parallel.stages import Stages


class Scaled(nn.Module):
    """A layer with more arguments than the activation."""

    def __init__(self, width, out):
        super().__init__()
        self.linear = nn.Linear(width, out)

    def forward(self, x, scale, *, shift):
        return self.linear(x).tanh() * scale + shift


class User(nn.Module):
    """A user's module: work between its stages, and arguments that come from its own inputs."""

    stages = ("first", "middle.*", "last")

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 4)
        self.middle = nn.ModuleList(Scaled(4 + i, 5 + i) for i in range(4))
        self.last = nn.Linear(8, 2)
        self.double()

    def forward(self, x):
        scale = x.mean(-1, keepdim=True)
        h = self.first(x)
        for layer in self.middle:
            h = layer(h.relu(), scale, shift=x.sum())
        return self.last(h).square().mean()


def parts(model, ranks, virtual_stages=1):
    """A pipeline's ranks: the model of each, and its stages."""
    names = stage_names(model)
    copies = [deepcopy(model) for _ in range(ranks)]
    runs = runs_of(model, names, ranks, virtual_stages)
    return [(copy, Stages(copy, names, mine)) for copy, mine in zip(copies, runs, strict=True)]


def passed_on(pipeline, virtual_stages, x):
    """The loss of a batch that goes through all virtual stages."""
    activation = None
    for virtual_stage in range(virtual_stages):
        for model, stages in pipeline:
            activation = stages.compute(virtual_stage, activation, lambda model=model: model(x))
    return activation


@pytest.mark.parametrize(
    ("ranks", "virtual_stages"), [(1, 1), (2, 1), (3, 1), (6, 1), (2, 2), (2, 3)]
)
def test_stages_one_after_the_other_are_the_model(ranks, virtual_stages):
    model, x = User(), torch.randn(5, 3).double()
    pipeline = parts(model, ranks, virtual_stages)
    for _ in range(2):  # a pass leaves nothing behind
        loss, expected = passed_on(pipeline, virtual_stages, x), model(x)
        loss.backward()
        expected.backward()
        assert torch.equal(loss, expected)
    gradients = {}
    for copy, _ in pipeline:
        for name, parameter in copy.named_parameters():
            assert name not in gradients, "on two ranks"
            gradients[name] = parameter.grad
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert gradients.keys() == wanted.keys()
    assert all(torch.equal(gradients[name], wanted[name]) for name in wanted)


def hooked(model):
    """A model, or a rank's part of it, whose hooks change what its stages take and return."""
    for number, layer in enumerate(model.middle):
        layer.register_forward_pre_hook(lambda layer, args: (args[0] + 1, *args[1:]))
        layer.register_forward_hook(lambda layer, args, y, by=number: y * (by + args[0].mean()))
        layer.register_full_backward_hook(lambda layer, dx, dy: (2 * dx[0], *dx[1:]))
    return model


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_hooks_of_stages_see_what_they_would_see_in_one_process(ranks, late):
    model, x = hooked(User()), torch.randn(5, 3).double()
    pipeline = parts(User() if late else hooked(User()), ranks)
    if late:
        for copy, _ in pipeline:
            hooked(copy)
    loss, expected = passed_on(pipeline, 1, x), model(x)
    loss.backward()
    expected.backward()
    assert torch.equal(loss, expected)
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    for copy, _ in pipeline:
        for name, parameter in copy.named_parameters():
            assert torch.equal(parameter.grad, wanted[name]), name


def test_a_module_that_is_two_stages_is_refused():
    model = User()
    model.middle[3] = model.middle[1]
    with pytest.raises(UserError, match="middle.1 and middle.3 are one module"):
        stage_names(model)


def test_a_stage_that_changes_its_input_in_place_is_named():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    model.stages = ("*",)
    (first, before), (last, after) = parts(model, 2)
    x = torch.randn(5, 3)
    sent = before.compute(0, None, lambda: first(x)).detach().requires_grad_()
    with pytest.raises(UserError, match="stage 1 changes its input in place"):
        after.compute(0, sent, lambda: last(x))


def test_a_stage_is_what_costs_about_as_much_as_another():
    model = User()
    model.middle[1].linear = nn.Linear(5, 60)
    names = stage_names(model)
    assert costs(model, names) == [12, 20, 300, 42, 56, 16]
    assert runs_of(model, names, 3, 1) == [[range(2)], [range(2, 3)], [range(3, 6)]]
    layers = nn.LSTM(3, 4), nn.Conv2d(2, 5, 3), nn.MultiheadAttention(4, 2), nn.Embedding(9, 4)
    assert costs(nn.ModuleList(layers), "0123") == [16 * 3 + 16 * 4, 90, 48 + 16, 0]


class Wrong(User):
    """Its forward pass is not what its stages say."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.middle = nn.ModuleList(nn.Linear(8, 8).double() for _ in range(2))
        self.first = nn.Linear(3, 8).double()

    def forward(self, x):
        a, b = self.middle
        h = self.first(x)
        match self.how:
            case "swapped":
                h = a(b(h))
            case "skips":
                h = a(h)
            case "twice":
                h = b(a(a(h)))
            case "named":
                h = b(input=a(h))
            case "ends":
                return b(a(h))
        return self.last(h)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("swapped", "calls middle.1 before middle.0"),
        ("skips", "calls last before middle.1"),
        ("twice", "calls middle.0 before middle.1"),
        ("named", "first argument of stage middle.1 is not a tensor"),
        ("ends", "did not reach last"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_forward_pass_that_does_not_match_the_stages_is_refused(how, says, ranks):
    with pytest.raises(UserError, match=says):
        passed_on(parts(Wrong(how), ranks), 1, torch.randn(2, 3).double())


def written(how, numbers):
    """A tensor that was made before, and to which an operation has written some numbers."""
    found = torch.zeros(numbers.shape).double()
    if how == "full":
        return torch.full_like(numbers, numbers.mean())
    if how == "out":
        torch.add(numbers, 0, out=found)
    else:
        torch._foreach_add_([torch.zeros(1).double(), found], [torch.ones(1).double(), numbers])
    return found


class Skipping(User):
    """Uses the result of its first stage again, or what does not depend on its numbers."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.first = nn.Linear(3, 5).double()
        self.middle = nn.ModuleList(Scaled(5, 5) for _ in range(4)).double()
        self.last = nn.Linear(5, 2).double()

    def forward(self, x):
        scale = shift = x.sum()
        first = h = self.first(x)
        for number, layer in enumerate(self.middle):
            match self.how:
                case "sum" if number == 3:
                    h = h + first
                case "in-place" if number == 3:
                    h = h.clone()
                    h.add_(first)
                case "assignment" if number == 3:
                    same = h = h.clone()
                    h += first
                    h = same
                case "out" | "list" | "full":
                    shift = written(self.how, first.detach())
                case "argument":
                    shift = first.mean()
                case "kept":
                    joined = first.new_zeros(h.shape)
                    joined[:, :1] = first[:, :1]
                    shift = joined
                case "view":
                    joined = x.new_zeros(2, *h.shape)
                    joined[1].copy_(first)
                    shift = joined.sum(0)
                case "form":
                    shift = torch.ones_like(first) * first.size(1) + x.sum().type_as(first)
            h = layer(h, scale, shift=shift)
        loss = self.last(h).square().mean()
        return loss + first.mean() if self.how == "loss" else loss


@pytest.mark.parametrize(
    ("how", "where"),
    [
        ("sum", r"stage middle\.3"),
        ("in-place", r"stage middle\.3"),
        ("assignment", r"stage middle\.3"),
        ("argument", r"stage middle\.\d"),
        ("out", r"stage middle\.\d"),
        ("list", r"stage middle\.\d"),
        ("full", r"stage middle\.\d"),
        ("kept", r"stage middle\.\d"),
        ("view", r"stage middle\.\d"),
        ("loss", "the end of the forward pass"),
    ],
)
@pytest.mark.parametrize("ranks", [2, 6])
def test_a_result_that_skips_a_rank_is_refused(how, where, ranks):
    with pytest.raises(UserError, match=f"{where} uses a result of stages before "):
        passed_on(parts(Skipping(how), ranks), 1, torch.randn(2, 3).double())


class Viewed(nn.Linear):
    """Returns a view. If the view is changed in place, its graph goes on from its base."""

    def forward(self, x):
        return super().forward(x)[:]


class Penalised(User):
    """Adds a penalty on the parameters of its last stage, or of all of them."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.middle = nn.ModuleList(Viewed(4 + i, 5 + i) for i in range(4)).double()

    def forward(self, x):
        h = self.first(x)
        for layer in self.middle:
            h = layer(h)
        result = self.last(h.mul_(2) + 1).mean() + h.mean()
        used = self.parameters() if self.how == "all" else self.last.parameters()
        return result + sum(p.square().sum() for p in used)


def test_a_loss_that_uses_parameters_of_one_rank_is_refused():
    with pytest.raises(UserError, match=r"uses parameter middle\.\d.* optimizer\.weight_decay"):
        passed_on(parts(Penalised("all"), 2), 1, torch.randn(2, 3).double())


def test_a_loss_that_uses_the_last_stage_alone_is_taken():
    model, x = Penalised("last"), torch.randn(2, 3).double()
    assert torch.equal(passed_on(parts(model, 2), 1, x), model(x))


class Counting(User):
    """Its buffers lie in no stage: one that never changes, one for inputs, one between stages."""

    def __init__(self, kind):
        super().__init__()
        self.inputs = nn.BatchNorm1d(3, affine=False).double()
        self.between = kind().double()
        self.register_buffer("factor", torch.ones(1).double())

    def forward(self, x):
        h = self.first(self.inputs(x))
        for layer in self.middle:
            h = layer(h, self.factor, shift=x.sum())
        return self.last(self.between(h)).square().mean()


@pytest.mark.parametrize("ranks", [2, 6])
def test_buffers_that_change_between_stages_are_refused(ranks):
    x = torch.randn(5, 3).double()
    model = Counting(nn.Identity)
    pipeline = parts(model, ranks)
    assert torch.equal(passed_on(pipeline, 1, x), model(x))
    assert all(torch.equal(m.inputs.running_mean, model.inputs.running_mean) for m, _ in pipeline)
    says = r"changes buffer between\.\w+, which is in none of the model's stages.*: add its module"
    with pytest.raises(UserError, match=says):
        passed_on(parts(Counting(lambda: nn.BatchNorm1d(8, affine=False)), ranks), 1, x)


class Sharing(User):
    """Its first and its last stage have one module with a buffer."""

    def __init__(self, shared):
        super().__init__()
        layers = [nn.Linear(n, m).double() for n, m in ((3, 3), (8, 3))]
        self.first, self.last = (nn.Sequential(layer, shared) for layer in layers)
        self.middle = nn.ModuleList(Scaled(3, 8) for _ in range(1)).double()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_buffers_that_stages_of_several_ranks_share_must_not_change(ranks):
    x = torch.randn(5, 3).double()
    constant = nn.BatchNorm1d(3, affine=False).double().eval()
    model = Sharing(constant)
    assert torch.equal(passed_on(parts(model, ranks), 1, x), model(x))
    changing = nn.BatchNorm1d(3, affine=False).double()
    if ranks == 1:
        passed_on(parts(Sharing(changing), ranks), 1, x)
    else:
        with pytest.raises(
            UserError, match=r"changes buffer first\.1\.\w+, which stages of several"
        ):
            passed_on(parts(Sharing(changing), ranks), 1, x)


class Taking(Skipping):
    """Takes numbers out of the result of its first stage."""

    def forward(self, x):
        h = self.first(x)
        assert torch.isfinite(h).all()
        numbers = h.detach()
        match self.how:
            case "float":
                number = float(numbers.mean())
            case "array":
                number = numbers.numpy().mean()
            case "dlpack":
                number = torch.from_dlpack(numbers).mean()
        for layer in self.middle:
            h = layer(h, x.sum(), shift=x.sum())
        return self.last(h).square().mean() * number


@pytest.mark.parametrize(
    ("how", "call"), [("float", "__float__"), ("array", "numpy"), ("dlpack", "__dlpack__")]
)
def test_numbers_from_a_result_that_skips_a_rank_are_refused(how, call):
    model, x = Taking(how), torch.randn(2, 3).double()
    with pytest.raises(UserError, match=rf"takes numbers \({call}\) from the result of a stage"):
        passed_on(parts(model, 2), 1, x)
    assert torch.equal(passed_on(parts(model, 1), 1, x), model(x))


def test_a_stage_that_returns_two_tensors_is_refused_on_the_ranks_after_it():
    class Pair(nn.Linear):
        def forward(self, x):
            return super().forward(x), x.sum()

    class Two(nn.Module):
        stages = ("first", "last")

        def __init__(self):
            super().__init__()
            self.first, self.last = Pair(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            h, _ = self.first(x)
            return self.last(h)

    with pytest.raises(UserError, match="takes the result of a stage apart.*return one tensor"):
        passed_on(parts(Two(), 2), 1, torch.randn(2, 3))


@pytest.mark.parametrize(("how", "ranks"), [("sum", 1), ("loss", 1), ("form", 2), ("form", 6)])
def test_a_skip_in_one_rank_and_forms_of_results_are_taken(how, ranks):
    model, x = Skipping(how), torch.randn(2, 3).double()
    assert torch.equal(passed_on(parts(model, ranks), 1, x), model(x))


def test_outside_of_a_pass_own_stages_compute_and_others_are_refused():
    model, x = User(), torch.randn(2, 3).double()
    expected = model.first(x)
    (first, stages), (last, _) = parts(model, 2)
    with torch.no_grad():
        stages.compute(0, None, lambda: first(x))
    assert torch.equal(first.first(x), expected)
    with pytest.raises(UserError, match="stage first belongs to another rank"):
        last.first(x)


def test_an_attribute_of_a_stage_on_another_rank_is_told():
    class Peeking(nn.Module):
        stages = ("first", "encoder.layers.*")

        def __init__(self):
            super().__init__()
            self.first = nn.Linear(3, 4)
            layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

        def forward(self, x):
            return self.encoder(
                self.first(x)
            )  # torch's encoder reads attributes of its first layer

    pipeline = parts(Peeking(), 2)
    says = "reads `self_attn` of stage encoder.layers.0, which is on another rank"
    with pytest.raises(UserError, match=says):
        passed_on(pipeline, 1, torch.randn(2, 5, 3))
    absent = pipeline[1][0].encoder.layers[0]
    assert not hasattr(absent, "self_attn")
    assert getattr(absent, "p", None) is None
    assert list(absent.named_modules()) == [("", absent)]
    with pytest.raises(UserError, match=r"reads `weight` of stage encoder\.layers\.0"):
        _ = deepcopy(absent).weight


class Crossing(User):
    """Computes all of its stages again at once."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)


def test_recomputation_across_stages_that_would_lose_gradients_is_refused():
    x = torch.randn(2, 3).double().requires_grad_()
    with pytest.raises(UserError, match=r"is computed without its gradient: .*use_reentrant=False"):
        passed_on(parts(Crossing(), 2), 1, x)


def test_too_few_modules_are_told():
    with pytest.raises(UserError, match="has 6 stage modules, too few for 7 ranks of a pipeline"):
        parts(User(), 7)
    with pytest.raises(UserError, match=r"too few for 2 ranks x 4 virtual stages .* up to 6"):
        parts(User(), 2, 4)


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        ((), "User has no attribute `stages`"),
        (("first", "middle.*"), "parameter last.weight is in none of the model's stages"),
        (("first", "middle.0", "last"), "parameter middle.1.linear.weight is in none"),
        (("first", "middel.*", "last"), "the model has no module middel"),
        (("first", "middle", "middle.0", "last"), "middle.0 is part of middle"),
        (("first", "middle.*", "first", "last"), "first is part of first"),
    ],
)
def test_stages_that_are_not_the_models_are_told_in_one_line(stages, says):
    model = User()
    model.stages = stages
    with pytest.raises(UserError, match=says) as error:
        stage_names(model)
    assert "\n" not in str(error.value)
