"""Llama and its relatives, against themselves and against Hugging Face's models."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from hpc_train.checkpoint.weights import start_from
from hpc_train.config import ModelSection
from hpc_train.errors import CheckpointMismatch, ConfigError, DataError
from hpc_train.models.kinds import SHAPES
from hpc_train.models.llama.hugging_face import converted_names, llama_config, llama_weights
from hpc_train.models.llama.rotary import Rotary, rotated
from hpc_train.models.rms_norm import RmsNorm
from hpc_train.models.shape import Division
from hpc_train.mpi.group import Group
from hpc_train.planning.model import shape_of
from tests.models.kept_bytes import kept_bytes

KINDS = ["llama", "mistral", "qwen2", "qwen3"]
SIZES = {
    "layers": 2,
    "hidden": 24,
    "heads": 6,
    "kv_heads": 2,
    "head_width": 8,
    "mlp_width": 28,
    "vocab": 40,
    "sequence": 16,
    "rope_theta": 500.0,
    "norm_eps": 1e-5,
}


def shape(kind="llama", **changes):
    return SHAPES[kind](**{**SIZES, **changes})


def model(kind="llama", **changes):
    torch.manual_seed(0)
    return shape(kind, **changes).build().double()


def tokens(samples=3, length=16):
    return torch.randint(40, (samples, length), generator=torch.Generator().manual_seed(1))


def test_a_token_sees_only_those_before_it():
    ours, text = model(), tokens()
    changed = text.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 40
    before, after = ours(text), ours(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


@pytest.mark.parametrize("kind", KINDS)
def test_documents_of_one_sample_have_the_losses_that_they_have_alone(kind):
    ours, text = model(kind), tokens(1, 8)
    targets = text.roll(-1, 1)
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2]])
    losses = [
        F.cross_entropy(ours(text[:, a:b])[0], targets[0, a:b], reduction="sum")
        for a, b in ((0, 3), (3, 5), (5, 8))
    ]
    assert ours(text, targets, positions).item() == pytest.approx(sum(losses).item() / 8, rel=1e-13)
    ours.loss_over = "token"
    assert ours(text, targets, positions).item() == pytest.approx(sum(losses).item() / 8, rel=1e-13)


def test_products_of_rotated_vectors_depend_on_their_distance_alone():
    rotary, draws = Rotary(8, 100.0), torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 8, generator=draws, dtype=torch.float64)

    def product(at, other):
        places = torch.tensor([[at], [other]])
        first, second = rotary.table(places, torch.float64).split(1, dim=1)
        return (rotated(query, first) * rotated(key, second)).sum().item()

    assert product(3, 1) == pytest.approx(product(1002, 1000), rel=1e-11)
    assert product(3, 1) != pytest.approx(product(3, 2), rel=1e-3)
    assert product(5, 5) == pytest.approx((query * key).sum().item(), rel=1e-12)


def test_slower_rotations_are_the_slow_ones_only():
    plain, slow = Rotary(64, 5e5).angles(), Rotary(64, 5e5, 8.0).angles()
    ratio = slow / plain
    assert ratio[0] == 1
    assert ratio[-1] == pytest.approx(1 / 8)
    assert (ratio.diff() <= 1e-12).all()


def test_the_gated_product_has_the_gradients_of_torchs_functions():
    ours = model().blocks[0].mlp
    x = torch.randn(2, 3, 24, dtype=torch.float64, requires_grad=True)
    result = ours(x)
    gate, up = F.linear(x, ours.gate_up.weight).unflatten(-1, (2, 2, 14)).unbind(-2)
    right = F.linear((F.silu(gate) * up).flatten(-2), ours.down.weight)
    torch.testing.assert_close(result, right, rtol=1e-13, atol=1e-15)
    wrt = [x, ours.gate_up.weight, ours.down.weight]
    weights = torch.randn_like(result)
    found = torch.autograd.grad((result * weights).sum(), wrt, retain_graph=True)
    wanted = torch.autograd.grad((right * weights).sum(), wrt)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_norm_and_its_gradients_are_torchs(dtype):
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 16, generator=draws, dtype=torch.float64).to(dtype).requires_grad_()
    ours, theirs = RmsNorm(16, 1e-3).to(dtype), nn.RMSNorm(16, 1e-3).to(dtype)
    with torch.no_grad():
        for norm in (ours, theirs):
            norm.weight.copy_(torch.linspace(-1, 2, 16))
    weights = torch.randn(2, 3, 16, generator=draws, dtype=torch.float64).to(dtype)
    found, wanted = [
        [norm(x), *torch.autograd.grad((norm(x) * weights).sum(), [x, norm.weight])]
        for norm in (ours, theirs)
    ]
    near = 1e-12 if dtype is torch.float64 else 0.05
    torch.testing.assert_close(found, wanted, rtol=near, atol=near)


@pytest.mark.parametrize("kind", KINDS)
def test_initial_weights_are_small_and_smaller_at_the_ends_of_branches(kind):
    ours = shape(kind, hidden=128, head_width=32, mlp_width=256, vocab=500, layers=4).build()
    for name, parameter in ours.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            ends = name.endswith(("attention.out.weight", "mlp.down.weight"))
            expected = 0.02 / math.sqrt(8) if ends else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_and_matrices_are_those_of_the_module(kind, tied):
    its = shape(kind, tie_embeddings=tied)
    module = its.build()
    real = sum(parameter.numel() for parameter in module.parameters())
    assert sum(part.parameters for part in its.parts()) == real
    linear = [layer.weight for layer in module.modules() if isinstance(layer, nn.Linear)]
    assert sum(part.weights for part in its.parts()) == sum(weight.numel() for weight in linear)
    matrices = [layer.weight for layer in its.block().modules() if isinstance(layer, nn.Linear)]
    numbers = sum(3 * sum(matrix.shape) for matrix in matrices)
    elements = sum(matrix.numel() for matrix in matrices)
    assert its.low_rank(3) == pytest.approx(numbers / elements)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "dropout"), [("llama", 0.0), ("qwen2", 0.1), ("qwen3", 0.0)])
def test_activations_are_what_autograd_keeps(kind, dropout, dtype):
    its = shape(kind, hidden=64, head_width=16, mlp_width=192, dropout=dropout, vocab=300)
    module = its.build()
    module.seed_samples([1, 2])
    text = torch.zeros(2, 16, dtype=torch.int64)
    real = kept_bytes(module, text, text, dtype=dtype)
    costs = [part.in_bytes(dtype.itemsize, 2, 1) for part in its.parts()]
    assert sum(part.activations for part in costs) == pytest.approx(real, rel=0.03)


def test_a_narrower_shape_keeps_the_width_of_heads():
    wide = shape(hidden=4096, heads=32, kv_heads=8, head_width=128, mlp_width=14336)
    cut = wide.at_most(8, 1024)
    assert (cut.hidden, cut.heads, cut.kv_heads, cut.head_width) == (1024, 8, 8, 128)
    assert (cut.mlp_width, cut.sequence) == (3584, 8)
    assert wide.at_most(16, 640).kv_heads == 1, "5 heads do not have 8 of keys and values"


def test_tensor_parallel_ranks_divide_the_heads_of_keys_and_values():
    with pytest.raises(ConfigError, match=r"parallel.tp 3 does not divide model.kv_heads 2"):
        shape().check(Division(tp=3))
    shape().check(Division(tp=2))


def test_sizes_that_follow_from_others():
    section = ModelSection(kind="llama", hidden=512, heads=8)
    assert (section.kv_heads, section.head_width, section.mlp_width) == (8, 64, 1408)
    assert section.tie_embeddings is False
    assert shape_of(section, 50).vocab == 50
    assert ModelSection(kind="qwen3", hidden=20, heads=3, head_width=8).head_width == 8


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({"heads": 6, "kv_heads": 4}, "model.kv_heads 4 does not divide model.heads 6"),
        ({"heads": 5}, "model.heads 5 does not divide model.hidden 384"),
        ({"hidden": 30, "heads": 2}, "each head has 15 channels, an odd number"),
        ({"rope_factor": 0.5}, "model.rope_factor is 0.5"),
        ({"norm_eps": math.nan}, "model.norm_eps is nan"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(given, cause):
    with pytest.raises(ConfigError) as caught:
        ModelSection(kind="llama", **given)
    assert cause in caught.value.cause


def test_keys_of_one_kind_are_refused_by_another():
    with pytest.raises(ConfigError, match="model.kind gpt does not have it"):
        ModelSection(kind="gpt", kv_heads=2)


def theirs_of(kind, **changes):
    """A model of Hugging Face with the sizes above."""
    transformers = pytest.importorskip("transformers")
    config = llama_config(kind, asdict(shape(kind))) | {"bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    made = transformers.AutoConfig.for_model(**config | changes)
    their = transformers.AutoModelForCausalLM.from_config(made).double().eval()
    for name, parameter in their.named_parameters():
        nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    return their


def start(folder, ours, **how):
    start_from(folder, ours, {}, Group(), **how)
    return ours


def assert_computes_the_same(ours, theirs):
    # Theirs has angles and the squares of norms in 32 bits.
    with torch.no_grad():
        torch.testing.assert_close(
            ours.eval()(tokens()), theirs(tokens()).logits, rtol=1e-4, atol=1e-4
        )


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
def test_a_hugging_face_model_has_the_same_logits(kind, tied, tmp_path):
    theirs = theirs_of(kind, tie_word_embeddings=tied)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert_computes_the_same(start(tmp_path, model(kind, tie_embeddings=tied)), theirs)


def test_rotations_of_llama_3_1_are_the_same(tmp_path):
    scaling = {**LLAMA3, "original_max_position_embeddings": 8192}
    theirs = theirs_of("llama", rope_scaling=scaling, max_position_embeddings=1 << 17)
    theirs.save_pretrained(tmp_path)
    assert_computes_the_same(start(tmp_path, model(rope_factor=8.0)), theirs)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("rope_parameters", "rope_scaling", "rope_theta"):
        config.pop(key, None)
    # So transformers wrote it before version 5.
    old = config | {"rope_theta": 500.0, "rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert_computes_the_same(start(tmp_path, model(rope_factor=8.0)), theirs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_transformers_opens_what_is_exported(kind, factor, tmp_path):
    transformers = pytest.importorskip("transformers")
    ours = model(kind, tie_embeddings=factor == 1, rope_factor=factor)
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=0.3)
    convert = converted_names(ours.sizes)
    save_file(
        {
            theirs: change(parameter.detach()).contiguous()
            for name, parameter in ours.named_parameters()
            for theirs, change in convert(name)
        },
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    (tmp_path / "config.json").write_text(json.dumps(llama_config(kind, ours.sizes)))
    load = transformers.AutoModelForCausalLM.from_pretrained
    assert_computes_the_same(ours, load(tmp_path, dtype=torch.float64).eval())
    again = start(tmp_path, model(kind, tie_embeddings=factor == 1, rope_factor=factor))
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name


def test_weights_that_do_not_fit_name_the_keys(tmp_path):
    theirs_of("qwen2").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"those of a qwen2, .*: set --model.kind qwen2$"):
        start(tmp_path, model("llama"))
    other = model("qwen2", kv_heads=3, rope_theta=9.0, tie_embeddings=True)
    with pytest.raises(ConfigError) as caught:
        start(tmp_path, other)
    wanted = "set --model.tie_embeddings false --model.kv_heads 2 --model.rope_theta 500.0"
    assert caught.value.remedy == wanted


@pytest.mark.parametrize(
    ("changes", "error", "told"),
    [
        ({"hidden_act": "gelu"}, ConfigError, "hidden_act is gelu, ours has silu"),
        ({"is_causal": False}, ConfigError, "is_causal is False, ours has True"),
        ({"rope_scaling": {"rope_type": "yarn"}}, ConfigError, "rope_type is yarn"),
        (
            {"rope_scaling": {"full_attention": {"rope_type": "linear"}}},
            ConfigError,
            "full_attention has rotations of its own",
        ),
        (
            {
                "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192},
                "original_max_position_embeddings": 32,
            },
            ConfigError,
            "original_max_position_embeddings is 32",
        ),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 2.0}}, ConfigError, "low_freq_factor is 2"),
        ({"rope_scaling": LLAMA3}, ConfigError, "original_max_position_embeddings is 16"),
        ({"sliding_window": 8}, ConfigError, "set --model.sequence 8, or less"),
        ({"sliding_window": "8"}, DataError, "sliding_window is '8'"),
        ({"max_position_embeddings": "128"}, DataError, "write a whole number there"),
        ({"model_type": "gemma2"}, ConfigError, "give weights of gpt2, llama, mistral, qwen2"),
        ({"rms_norm_eps": "small"}, DataError, "rms_norm_eps is 'small'"),
        ({"num_key_value_heads": -1}, DataError, "write a whole number there"),
    ],
)
def test_weights_of_a_model_that_computes_otherwise_are_refused(tmp_path, changes, error, told):
    theirs_of("mistral").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    if "rope_scaling" in changes:
        del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(error) as caught:
        start(tmp_path, model("mistral"))
    assert told in str(caught.value)


def test_two_tables_of_rotations_that_differ_are_refused(tmp_path):
    theirs_of("llama").save_pretrained(tmp_path)
    settings = tmp_path / "config.json"
    config = json.loads(settings.read_text(encoding="utf-8"))
    assert config["rope_parameters"]["rope_type"] == "default"
    same = config | {"rope_scaling": config["rope_parameters"]}
    settings.write_text(json.dumps(same), encoding="utf-8")
    start(tmp_path, model())
    theta = config["rope_parameters"]["rope_theta"]
    alike = same | {"rope_scaling": {"type": "default"}, "rope_theta": theta}
    settings.write_text(json.dumps(alike), encoding="utf-8")
    start(tmp_path, model())
    other = {**LLAMA3, "original_max_position_embeddings": 8192}
    settings.write_text(json.dumps(same | {"rope_scaling": other}), encoding="utf-8")
    with pytest.raises(ConfigError, match="rope_scaling and rope_parameters differ in the config"):
        start(tmp_path, model())


def test_types_of_layers_are_names():
    about = llama_config("qwen3", asdict(shape("qwen3")))
    for types in ([["full_attention"]], 3):
        with pytest.raises(ConfigError, match="layer_types has .*, ours has full_attention"):
            llama_weights(
                "qwen3", asdict(shape("qwen3")), about | {"layer_types": types}, whole=True
            )


def test_a_missing_matrix_is_named(tmp_path):
    theirs_of("llama").save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    del saved["model.layers.1.self_attn.k_proj.weight"]
    save_file(saved, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointMismatch, match=r"has no model.layers.1.self_attn.k_proj.weight"):
        start(tmp_path, model())
    start(tmp_path, model(), exclude=["blocks.1.attention.qkv.weight"])
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointMismatch, match=r"give the folder with its config.json"):
        start(tmp_path, model())


def test_a_head_that_is_not_the_embedding_is_not_dropped(tmp_path):
    theirs_of("qwen2", tie_word_embeddings=True).save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    both = {"lm_head.weight": saved["model.embed_tokens.weight"].clone()}
    save_file(saved | both, tmp_path / "model.safetensors")
    start(tmp_path, model("qwen2", tie_embeddings=True))
    both["lm_head.weight"][3] += 1
    save_file(saved | both, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"set --model.tie_embeddings false"):
        start(tmp_path, model("qwen2", tie_embeddings=True))


def test_a_model_without_a_head_has_no_prefix(tmp_path):
    theirs = theirs_of("llama", tie_word_embeddings=True)
    theirs.model.save_pretrained(tmp_path)
    assert_computes_the_same(start(tmp_path, model(tie_embeddings=True)), theirs)


@pytest.mark.parametrize(
    ("kind", "changes", "fits"),
    [
        ("mistral", {}, False),
        ("mistral", {"sliding_window": None}, True),
        ("mistral", {"layer_types": ["full_attention"] * 2, "sliding_window": 8}, False),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, True),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, False),
        ("qwen3", {"layer_types": ["full_attention"] * 2, "use_sliding_window": True}, True),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, False),
    ],
)
def test_windows_are_those_that_layers_have(kind, changes, fits):
    sizes = SIZES | {"sequence": 5000}
    about = llama_config(kind, asdict(shape(kind, sequence=5000)))
    about = {key: value for key, value in about.items() if key != "sliding_window"} | changes
    given = asdict(shape(kind, **sizes))
    if fits:
        llama_weights(kind, given, about, whole=True)
    else:
        with pytest.raises(ConfigError, match=r"attend to \d+ tokens at most"):
            llama_weights(kind, given, about, whole=True)


def test_a_larger_vocabulary_and_a_part_of_the_weights(tmp_path):
    theirs = theirs_of("llama")
    theirs.save_pretrained(tmp_path)
    ours = start(tmp_path, model(vocab=48, sequence=9))
    with torch.no_grad():
        logits, right = ours(tokens(3, 9)), theirs(tokens(3, 9)).logits
    torch.testing.assert_close(logits[..., :40], right, rtol=1e-4, atol=1e-4)
    fresh = model(layers=1)
    taken = start(tmp_path, model(layers=1), exclude=["blocks.*"])
    assert torch.equal(taken.head.norm.weight, ours.head.norm.weight)
    assert torch.equal(taken.blocks[0].mlp.down.weight, fresh.blocks[0].mlp.down.weight)


def test_sizes_with_one_difference_are_another_shape():
    assert replace(shape(), rope_theta=1e4) != shape()
    assert shape().identity["model.rope_theta"] == 500.0


def test_a_rotation_has_the_gradient_of_its_formula():
    rotary, draws = Rotary(6, 100.0), torch.Generator().manual_seed(0)
    table = rotary.table(torch.arange(5).unsqueeze(0), torch.float64)
    x = torch.randn(2, 5, 3, 6, generator=draws, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda given: rotated(given, table), x)
    low = rotated(x.detach().bfloat16(), table.float())
    torch.testing.assert_close(low.double(), rotated(x, table).detach(), rtol=0.02, atol=0.02)
