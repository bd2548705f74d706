"""Tensor parallelism on a user's plain module, against the whole module on one rank."""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from hpc_train.collectives import connect
from hpc_train.collectives.alone import AloneCollectives
from hpc_train.errors import ConfigError, UserError
from hpc_train.models.dropout import SampleDropout
from hpc_train.models.hooks import has_hooks
from hpc_train.models.lora import LoraAdapters
from hpc_train.mpi.group import Group
from hpc_train.parallel.linear import Deferred, ParallelLinear, compute
from hpc_train.parallel.tensor import parallelize
from hpc_train.sharding import SliceSpec

several = pytest.mark.mpi
VOCAB = TOKENS = WIDTH = 12  # 1, 2, 3 and 4 ranks divide them


class Layer(nn.Module):
    def __init__(self, bias, place):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=bias)
        self.drop_inside = SampleDropout(0.3, place)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=bias)
        self.drop = SampleDropout(0.3, place + 1)

    def forward(self, x):
        return x + self.drop(self.down(self.drop_inside(F.gelu(self.up(self.norm(x))))))


class User(nn.Module):
    """A user's language model: nothing in it knows of ranks."""

    plan: ClassVar = {
        "token": "vocab",
        "position": "sequence",
        "layers.*.up": "colwise",
        "layers.*.drop_inside": "colwise",
        "layers.*.down": "rowwise",
        "output": "vocab",
        "loss": "vocab",
    }

    def __init__(self, *, bias=True, tie=False):
        super().__init__()
        torch.manual_seed(0)
        self.token = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Layer(bias, 2 * i) for i in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCAB, bias=bias)
        self.loss = nn.CrossEntropyLoss(ignore_index=3)
        if tie:
            self.output.weight = self.token.weight
        self.double()

    def forward(self, text, targets):
        for module in self.modules():
            if isinstance(module, SampleDropout):
                module.seeds = range(len(text))
        x = self.token(text) + self.position(torch.arange(text.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.loss(self.output(self.norm(x)).flatten(0, 1), targets.flatten())


def batch():
    text = torch.randint(VOCAB, (3, TOKENS), generator=torch.Generator().manual_seed(1))
    return text, text.roll(-1, 1)


def assembled(part, spec, group):
    """The whole of which each rank has a part, from the parts. Collective."""
    if group.size == 1:
        return part
    parts = group.comm.allgather((spec.start, part.detach()))
    return torch.cat([part for _, part in sorted(parts, key=lambda p: p[0])], spec.dim)


def gradients(model, specs, group, *, cut=False):
    """The whole module's gradients, from those of the ranks' parts. Collective."""
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is not None and name in specs:
            gradient = assembled(gradient, specs[name], group)
        elif gradient is not None and cut:
            connect(group).sum_(gradient)
        found[name] = gradient
    return found


def assert_same(found, reference):
    wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        if gradient is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("tie", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_loss_and_gradients_are_those_of_the_whole_module(group, cut, tie, bias):
    model, reference = User(bias=bias, tie=tie), User(bias=bias, tie=tie)
    specs = parallelize(model, User.plan, connect(group), sequence_parallel=cut)
    loss, expected = model(*batch()), reference(*batch())
    loss.backward()
    expected.backward()
    found = gradients(model, specs, group, cut=cut)
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    assert_same(found, reference)
    assert (model.output.weight is model.token.weight) == tie


def pair():
    """A pair of layers between tensors that all ranks have whole."""
    torch.manual_seed(2)
    layers = {"up": nn.Linear(6, 12), "act": nn.Tanh(), "down": nn.Linear(12, 5)}
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    return model.double()


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("inputs", [False, True], ids=["", "of inputs too"])
@pytest.mark.parametrize("frozen", [(), ("up.weight",), ("up.bias", "down.weight"), ("down.bias",)])
def test_frozen_parameters_get_no_gradients_and_inputs_do_on_request(group, frozen, inputs):
    reference, results = pair(), []
    for name in frozen:
        reference.get_parameter(name).requires_grad_(False)
    model = deepcopy(reference)
    specs = parallelize(model, {"up": "colwise", "down": "rowwise"}, connect(group))
    for each in (model, reference):
        x = torch.ones(4, 2, 6).cumsum(0).double().requires_grad_(inputs)
        y = each(x.transpose(0, 1))
        y.square().sum().backward()
        results.append((y, x.grad))
    found = gradients(model, specs, group)
    assert_same(found, reference)
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("planned", [False, True], ids=["whole", "shared"])
@pytest.mark.parametrize("inputs", [False, True], ids=["first layer", "later layer"])
def test_deferred_weight_gradients_are_the_same_and_hooks_run_once_for_each_pass(
    group, planned, inputs
):
    reference = pair()
    reference.down.weight.requires_grad_(False)
    reference.add_module("out", nn.Linear(5, 5).double())
    model, deferred, runs = deepcopy(reference), Deferred(), []
    plan = {"up": "colwise", "down": "rowwise"} if planned else {}
    specs = parallelize(model, plan, connect(group), deferred=deferred)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: runs.append(name))
    left = []
    for each in (model, reference):
        for micro_batch in range(2):
            x = torch.full((2, 3, 6), 1.0 + micro_batch).double().requires_grad_(inputs)
            each(x).square().sum().backward()
            left.append(deferred.take())
    at_once = sorted(runs)
    for each in left:
        compute(each)
    found = gradients(model, specs, group)
    waiting = {"out.weight", "up.weight"} if inputs else {"out.weight"}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert at_once == sorted([*(trained - waiting)] * 2)
    assert sorted(runs) == sorted([*trained] * 2)
    assert_same(found, reference)


@pytest.mark.ranks(1, 2)
def test_results_may_be_changed_in_place(group):
    reference = pair()
    model = deepcopy(reference)
    plan, deferred = {"up": "colwise", "down": "rowwise"}, Deferred()
    specs = parallelize(model, plan, connect(group), deferred=deferred)
    for each in (model, reference):
        each.down(each.up(torch.ones(2, 3, 6).double()).relu_()).mul_(2).square().sum().backward()
    compute(deferred.take())
    assert_same(gradients(model, specs, group), reference)


def of_four(model, plan, rank=2, **options):
    """What `parallelize` returns on one of four ranks; it does not communicate."""
    return parallelize(model, plan, AloneCollectives(Group(rank, 4)), **options)


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_has_the_parts_that_the_specs_say(rank):
    model, whole = User(), dict(User().named_parameters())
    specs = of_four(model, User.plan, rank)
    rows = {f"layers.{i}.up.{own}": (24, 0) for i in range(2) for own in ("weight", "bias")}
    columns = {f"layers.{i}.down.weight": (24, 1) for i in range(2)}
    vocabulary = dict.fromkeys(("token.weight", "output.weight", "output.bias"), (12, 0))
    assert specs == {
        name: SliceSpec(tuple(whole[name].shape), dim, rank * size // 4, (rank + 1) * size // 4)
        for name, (size, dim) in (rows | columns | vocabulary).items()
    }
    for name, parameter in model.named_parameters():
        spec = specs.get(name, SliceSpec.whole(tuple(whole[name].shape)))
        part = whole[name].narrow(spec.dim, spec.start, spec.stop - spec.start)
        assert torch.equal(parameter, part), name


def test_only_the_layers_that_the_plan_names_are_replaced():
    model = User()
    pair = {"layers.1.up": "colwise", "layers.1.down": "rowwise"}
    of_four(model, {**pair, "position": "sequence"})
    kinds = [type(layer) for layer in (model.layers[0].up, model.layers[1].up, model.output)]
    assert kinds == [nn.Linear, ParallelLinear, nn.Linear]


class Adapted(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def old_weight_norm(layer):
    with warnings.catch_warnings(action="ignore"):  # it is deprecated, and still much used
        return nn.utils.weight_norm(layer)


def test_a_layer_whose_forward_was_put_back_is_plain():
    """As is done when a stage or a block is no longer computed in another way."""
    layer = nn.Linear(4, 4)
    layer.forward = layer.forward
    assert not has_hooks(layer)
    assert has_hooks(hooked(layer, "forward"))


def hooked(layer, where):
    if where == "layer":
        layer.register_forward_hook(lambda layer, args, output: 2 * output)
    elif where == "forward":
        layer.forward = lambda x: 2 * type(layer).forward(layer, x)
    else:
        layer.weight.register_hook(torch.zeros_like)
    return layer


@pytest.mark.parametrize(
    ("plan", "change", "says"),
    [
        ({"outptu": "vocab"}, {}, "the model has no module outptu"),
        ({"layers.up": "colwise"}, {}, "the model has no module layers.up"),
        ({"output": "columns"}, {}, "output is 'columns': use colwise, rowwise, vocab, sequence"),
        ({"norm": "colwise"}, {}, "style colwise of norm does not fit this LayerNorm"),
        ({"token": "rowwise"}, {}, "style rowwise of token does not fit this Embedding"),
        ({"layers.*": "colwise"}, {}, "style colwise of layers.0 does not fit this Layer"),
        ({"norm": "vocab"}, {}, "style vocab of norm does not fit this LayerNorm"),
        ({"output": "vocab"}, {"output": Adapted(12, 12)}, "does not fit this Adapted"),
        ({"loss": "vocab"}, {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}, "does not fit"),
        ({"loss": "vocab"}, {"loss": nn.CrossEntropyLoss(torch.ones(12))}, "does not fit"),
        ({"loss": "vocab"}, {"loss": nn.CrossEntropyLoss(reduction="sum")}, "does not fit"),
        ({"token": "vocab"}, {"token": nn.Embedding(12, 12, padding_idx=0)}, "does not fit"),
        ({"token": "vocab"}, {"token": nn.Embedding(12, 12, max_norm=1.0)}, "does not fit"),
        ({"token": "vocab"}, {"token": nn.Embedding(12, 12, sparse=True)}, "does not fit"),
        ({"output": "vocab"}, {"output": weight_norm(nn.Linear(12, 12))}, "does not fit"),
        ({"output": "vocab"}, {"output": old_weight_norm(nn.Linear(12, 12))}, "does not fit"),
        ({"output": "vocab"}, {"output": nn.MultiheadAttention(12, 2).out_proj}, "does not fit"),
        ({"output": "vocab"}, {"output": hooked(nn.Linear(12, 12), "layer")}, "without hooks"),
        ({"output": "vocab"}, {"output": hooked(nn.Linear(12, 12), "weight")}, "without hooks"),
        ({"output": "vocab"}, {"output": hooked(nn.Linear(12, 12), "forward")}, "without hooks"),
    ],
)
def test_a_plan_that_does_not_fit_is_told_in_one_line(plan, change, says):
    model = User()
    for name, layer in change.items():
        model.set_submodule(name, layer)
    with pytest.raises(UserError, match=says) as error:
        of_four(model, plan)
    assert type(error.value) is UserError
    assert "\n" not in str(error.value)


def test_sizes_that_the_ranks_do_not_divide_are_told():
    model = User()
    model.output = nn.Linear(12, 10)
    with pytest.raises(ConfigError, match=r"output: dimension 0 of \[10, 12\] .* by 4: take sizes"):
        of_four(model, User.plan)


@pytest.mark.parametrize(("style", "other"), [("colwise", "rowwise"), ("rowwise", "colwise")])
def test_half_a_pair_of_layers_is_refused(style, other):
    plan = {name: given for name, given in User.plan.items() if given != other}
    with pytest.raises(UserError, match=f"is {style}, and no layer is {other}"):
        of_four(User(), plan)


@pytest.mark.parametrize("plan", [{"token": "vocab"}, {"token": "vocab", "output": "rowwise"}])
def test_layers_that_share_a_weight_are_cut_alike_or_not_at_all(plan):
    with pytest.raises(UserError, match="token.weight and output.weight are one parameter, but"):
        of_four(User(tie=True), plan)


def test_a_part_has_the_attributes_of_the_whole_layer():
    model, whole = User(), User()
    of_four(model, User.plan)
    parallelize(whole, {}, connect(Group()), deferred=Deferred())
    for user in (model, whole):
        layers = [user.layers[0].up, user.layers[0].down, user.output]
        sizes = [(layer.in_features, layer.out_features) for layer in layers]
        assert sizes == [(WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH), (WIDTH, VOCAB)]
        assert (user.token.num_embeddings, user.token.embedding_dim) == (VOCAB, WIDTH)
        assert (user.loss.ignore_index, user.loss.reduction) == (3, "mean")


class Keywords(User):
    def forward(self, text, targets):
        x = self.token(input=text) + self.position(input=torch.arange(text.shape[1]))
        logits = self.output(input=self.norm(x)).flatten(0, 1)
        return self.loss(input=logits, target=targets.flatten())


@pytest.mark.ranks(1, 2)
def test_layers_are_called_by_keyword_as_torchs_are(group):
    model = Keywords()
    parallelize(model, User.plan, connect(group), sequence_parallel=True)
    torch.testing.assert_close(model(*batch()), Keywords()(*batch()), rtol=1e-13, atol=0)


@pytest.mark.mpi
def test_a_module_of_style_sequence_without_input_is_told(job):
    model, over = User(), connect(job.world)
    model.position.forward = lambda size=1: size
    parallelize(model, User.plan, over, sequence_parallel=True)
    with pytest.raises(UserError, match="of style sequence is called without input: give it"):
        model.position()
    over.close()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("layer", ["position", "token"])
def test_tokens_that_the_ranks_do_not_divide_are_told_by_all(group, layer):
    model, over = User(), connect(group)
    parallelize(model, User.plan, over, sequence_parallel=True)
    tokens = torch.zeros(2, 2 * group.size + 1, dtype=torch.int64)
    what = rf"cut {2 * group.size + 1} tokens .* the {group.size} ranks of parallel\.tp: give"
    with pytest.raises(UserError, match=what):
        getattr(model, layer)(tokens)
    over.close()


def test_a_layer_with_two_names_stays_one():
    model = User()
    model.layers[1] = model.layers[0]
    specs = of_four(model, User.plan)
    assert model.layers[1] is model.layers[0]
    model = User()
    model.layers[1].up = model.layers[0].up
    assert of_four(model, User.plan) == specs | of_four(User(), User.plan)
    assert model.layers[1].up is model.layers[0].up
    assert type(model.layers[0].up) is ParallelLinear


@pytest.mark.ranks(1, 2)
def test_an_encoder_layer_of_torch_is_the_same_in_eval_mode(group):
    """Torch's fast path for eval mode would read the weights as if they were whole."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(12, 2, 24, dropout=0.0, batch_first=True).double()
    x = torch.randn(3, 4, 12, dtype=torch.float64)
    expected = layer(x)
    over = connect(group)
    parallelize(layer, {"linear1": "colwise", "linear2": "rowwise"}, over)
    with torch.no_grad():
        torch.testing.assert_close(layer.eval()(x), expected)
    over.close()


def test_hooks_of_a_layer_whose_gradients_are_deferred_still_run():
    layers = nn.Sequential(hooked(nn.Linear(4, 4), "layer"), nn.Linear(4, 4))
    x = torch.randn(3, 4)
    expected = layers(x)
    parallelize(layers, {}, connect(Group()), deferred=Deferred())
    torch.testing.assert_close(layers(x), expected)


@pytest.mark.mpi
def test_tokens_that_no_layer_cuts_are_refused(job):
    over = connect(job.world)
    plan = {name: style for name, style in User.plan.items() if style in ("colwise", "rowwise")}
    with pytest.raises(UserError, match="no layer of the tensor plan cuts the tokens"):
        parallelize(User(), plan, over, sequence_parallel=True)
    over.close()


def test_a_frozen_layer_keeps_no_input_and_defers_no_gradient():
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)).double()
    LoraAdapters(rank=2, alpha=2, layers=["1"]).add_to(layers)
    layers[0].requires_grad_(requires_grad=False)
    layers[1].weight.requires_grad_(requires_grad=False)
    deferred = Deferred()
    parallelize(layers, {}, connect(Group()), deferred=deferred)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    frozen = layers[0](x)
    assert frozen.grad_fn.saved_tensors[0] is None
    layers[2](layers[1](frozen)).sum().backward()
    assert [parameter for parameter, _ in deferred.take()] == [layers[2].weight]
    assert layers[1].lora_b.grad is not None
    assert x.grad is not None
