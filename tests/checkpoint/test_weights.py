"""Starting from weights alone: whose they may be, which are taken, on which layouts."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import nn

from hpc_train.checkpoint import Checkpoints
from hpc_train.checkpoint.export import export_model
from hpc_train.checkpoint.policy import SavePolicy
from hpc_train.checkpoint.state import TrainingState
from hpc_train.checkpoint.weights import start_from
from hpc_train.collectives import connect
from hpc_train.errors import (
    CheckpointError,
    CheckpointMismatch,
    ConfigError,
    DataError,
    HpcTrainError,
)
from hpc_train.models import GPT
from hpc_train.mpi import runtime
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from tests.damages import flip_bit
from tests.parallel.test_apply import LAYOUTS, built, put_on
from tests.programs import hpc_train, run
from tests.system.test_mistakes import refused
from tests.training.test_trainer import check_equal, config, make

SIZES = {"vocab": 40, "sequence": 16, "layers": 3, "hidden": 24, "heads": 4}


def gpt(seed: int = 0, **changes) -> GPT:
    """A model in float64 whose every tensor is random."""
    torch.manual_seed(seed)
    model = GPT(**{**SIZES, **changes}).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def checkpoint_of(model: nn.Module, run: Path, about: dict | None = None) -> Path:
    optimizer = torch.optim.AdamW(model.parameters())
    made = Checkpoints(
        run / "checkpoints",
        connect(Group()),
        TrainingState(model, optimizer),
        SavePolicy(engine="posix"),
        about=about,
    )
    return made.save(1)


def start(path: Path, model: nn.Module, **patterns) -> nn.Module:
    start_from(path, model, {}, Group(), **patterns)
    return model


def assert_same(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors(model).items():
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name


def shards_of(saved: dict[str, torch.Tensor], folder: Path) -> Path:
    """The tensors in two files with an index."""
    folder.mkdir()
    homes = {name: f"model-{place % 2}.safetensors" for place, name in enumerate(saved)}
    for home in set(homes.values()):
        save_file({name: saved[name] for name in saved if homes[name] == home}, folder / home)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    return folder


@pytest.fixture(params=["checkpoint", "run", "file", "folder", "shards"])
def source(request, tmp_path):
    """Weights of `gpt(0)` in each of the forms that they may have."""
    model = gpt(0)
    if request.param in ("checkpoint", "run"):
        path = checkpoint_of(model, tmp_path / "run", {"shape": SIZES})
        return path if request.param == "checkpoint" else tmp_path / "run"
    if request.param == "shards":
        return shards_of(tensors(model), tmp_path / "weights")
    save_file(tensors(model), tmp_path / "model.safetensors")
    return tmp_path if request.param == "folder" else tmp_path / "model.safetensors"


def test_every_source_gives_its_tensors(source):
    assert_same(start(source, gpt(1)), tensors(gpt(0)))
    assert_same(start(source, gpt(1).float()), tensors(gpt(0)))


def test_floating_point_types_are_converted_and_others_have_to_be_the_same(tmp_path):
    saved = {name: tensor.bfloat16() for name, tensor in tensors(gpt(0)).items()}
    save_file(saved, tmp_path / "model.safetensors")
    assert_same(start(tmp_path, gpt(1)), saved)
    norm = nn.BatchNorm1d(3)
    save_file({**norm.state_dict(), "num_batches_tracked": torch.ones(())}, tmp_path / "norm")
    with pytest.raises(CheckpointMismatch, match=r"num_batches_tracked is F32 \[\], the .* int64"):
        start(tmp_path / "norm", norm)


def test_numbers_of_8_bits_are_not_taken_without_their_scales(tmp_path):
    saved = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in tensors(gpt(0)).items()}
    save_file(saved, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointMismatch, match="is F8_E4M3, numbers of 8 bits .* scales"):
        start(tmp_path, gpt(1))
    assert_same(start(tmp_path, gpt(1).to(torch.float8_e4m3fn)), saved)


def test_patterns_choose_and_the_rest_keeps_its_values(source, caplog):
    caplog.set_level(logging.INFO, "hpc_train")
    model = start(source, gpt(1), include=["blocks.*"], exclude=["blocks.2.*", "*.bias"])
    before, expected = tensors(gpt(1)), tensors(gpt(0))
    taken = [n for n in before if n.startswith(("blocks.0", "blocks.1")) and "bias" not in n]
    assert_same(model, before | {name: expected[name] for name in taken})
    assert f"{len(taken)} of {len(before)} tensors; initial values in embedding" in caplog.text


def test_a_deeper_model_can_take_the_layers_that_there_are(source, caplog):
    caplog.set_level(logging.INFO, "hpc_train")
    model = start(source, gpt(1, layers=4), exclude=["blocks.3.*"])
    assert_same(model, tensors(gpt(1, layers=4)) | tensors(gpt(0)))
    start(source, gpt(1, layers=2))
    assert "not of this model: blocks.2." in caplog.text


def test_a_gpt_for_shorter_texts_with_more_tokens_takes_what_there_is(source, caplog):
    model, known = start(source, gpt(1, sequence=9, vocab=48)), tensors(gpt(0))
    token = known["embedding.token.weight"]
    mean = token.mean(0, keepdim=True).expand(8, -1)
    known["embedding.token.weight"] = torch.cat([token, mean])
    known["embedding.position.weight"] = known["embedding.position.weight"][:9]
    assert_same(model, known)
    assert caplog.text.count("embedding.token.weight lacks 8 tokens of the vocabulary") == 1
    caplog.clear()
    start(source, gpt(1, vocab=48), exclude=["embedding.token.*"])
    assert "lacks" not in caplog.text


@pytest.mark.parametrize(
    ("changes", "patterns", "error", "told"),
    [
        ({"layers": 4}, {}, CheckpointMismatch, "has no blocks.3.norm_attention.weight.*exclude+"),
        ({"vocab": 30}, {}, CheckpointMismatch, r"embedding.token.weight is F64 \[40, 24\], the"),
        ({"sequence": 32}, {}, CheckpointMismatch, r"embedding.position.weight is F64 \[16, 24\]"),
        ({}, {"include": ["a.*"]}, ConfigError, r"include: the model has no tensor a\.\*; the fir"),
        ({}, {"exclude": ["*.bias", "haed"]}, ConfigError, "exclude: the model has no tensor haed"),
        ({}, {"exclude": ["*"]}, ConfigError, "leave no tensor .* embedding.token.weight"),
    ],
)
def test_what_does_not_fit_is_named(source, changes, patterns, error, told):
    with pytest.raises(error, match=told):
        start(source, gpt(1, **changes), **patterns)


def test_a_checkpoint_tells_the_number_of_heads(tmp_path):
    path = checkpoint_of(gpt(0), tmp_path, {"shape": SIZES})
    with pytest.raises(ConfigError, match=r"with model.heads 2: set --model.heads 4"):
        start(path, gpt(1, heads=2))


def test_a_plain_file_tells_what_its_tensors_do_not_show(tmp_path):
    model = gpt()
    saved = checkpoint_of(model, tmp_path / "run", {"kind": "gpt", "shape": SIZES})
    plain = tmp_path / "plain.safetensors"
    export_model(saved, plain)
    assert_same(start(plain, gpt(1)), tensors(model))
    with pytest.raises(ConfigError, match=r"model.heads 2: set --model.heads 4$"):
        start(plain, gpt(1, heads=2))
    save_file(tensors(model), plain, {"model": "a model of others"})
    assert_same(start(plain, gpt(1)), tensors(model))


def test_a_trained_output_layer_is_not_left_out(tmp_path):
    about = {"shape": SIZES | {"tie_embeddings": False}}
    path = checkpoint_of(gpt(0, tie_embeddings=False), tmp_path, about)
    with pytest.raises(ConfigError, match="_embeddings true: set --model.tie_embeddings false"):
        start(path, gpt(1))
    start(path, gpt(1), include=["blocks.*"])


def test_layers_that_a_model_leaves_out_are_told(tmp_path, caplog):
    path = checkpoint_of(gpt(0), tmp_path, {"shape": SIZES})
    assert_same(start(path, gpt(1, layers=2)), tensors(gpt(0)))
    assert "the weights have 3 layers, and this model takes the first 2 of them" in caplog.text


def test_the_folder_of_a_loops_checkpoints_has_weights(tmp_path):
    path = checkpoint_of(gpt(0), tmp_path)
    start(path.parent, model := gpt(1))
    assert all(torch.equal(one, tensors(gpt(0))[name]) for name, one in tensors(model).items())


def test_what_is_no_weights_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"none cannot be read \(No such file"):
        start(tmp_path / "none", gpt())
    with pytest.raises(DataError, match=r"has neither model.safetensors nor checkpoints"):
        start(tmp_path, gpt())
    for text in ("no weights\n" * 9, ""):
        (tmp_path / "text").write_text(text)
        with pytest.raises(DataError, match="is no sound safetensors file"):
            start(tmp_path / "text", gpt())
    whole = tmp_path / "whole"
    save_file(tensors(gpt()), whole)
    (tmp_path / "short").write_bytes(whole.read_bytes()[:-8])
    with pytest.raises(DataError, match="is no sound safetensors file"):
        start(tmp_path / "short", gpt())
    folder = shards_of(tensors(gpt()), tmp_path / "shards")
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(DataError, match=r"model-1.safetensors is no sound"):
        start(folder, gpt())
    index = folder / "model.safetensors.index.json"
    for text in ("{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}'):
        index.write_text(text)
        with pytest.raises(DataError, match=r"weight_map in .*index.json does not name files"):
            start(folder, gpt())
    index.write_text("[")
    with pytest.raises(DataError, match="index.json is no JSON object"):
        start(folder, gpt())


def test_a_run_that_was_exported_into_its_directory_stands_for_its_newest_checkpoint(tmp_path):
    save_file(tensors(gpt(1)), tmp_path / "model.safetensors")
    checkpoint_of(model := gpt(2), tmp_path)
    assert_same(start(tmp_path, gpt(3)), tensors(model))


class Twice(nn.Module):
    """With one weight under two names, or with two weights."""

    def __init__(self, *, tied: bool):
        super().__init__()
        self.token = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 4, bias=False)
        if tied:
            self.head.weight = self.token.weight


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["file", "checkpoint", "bare file"])
def test_the_name_that_a_file_has_for_a_shared_weight_does_not_matter(tmp_path, kind, tied, caplog):
    saved = Twice(tied=True)
    path = tmp_path / "tied.safetensors"
    if kind == "checkpoint":
        path = checkpoint_of(saved, tmp_path)
    else:
        save_model(saved, path)  # the first name in the alphabet
        assert [*load_file(path)] == ["head.weight"]
    if kind == "bare file":
        save_file(load_file(path), path)  # which does not tell the other name
        if not tied:
            with pytest.raises(CheckpointMismatch, match="has no token.weight"):
                start(path, Twice(tied=False))
            return
    caplog.set_level(logging.INFO)
    model = start(path, Twice(tied=tied))
    assert torch.equal(model.token.weight, saved.token.weight)
    assert torch.equal(model.head.weight, saved.token.weight)
    assert "not of this model" not in caplog.text


@pytest.mark.parametrize("place", [0, 100, -1])
def test_a_damaged_checkpoint_is_told_as_one(tmp_path, place):
    path = checkpoint_of(gpt(), tmp_path)
    flip_bit(path, place)
    with pytest.raises(CheckpointError, match="damaged"):
        start(path, gpt())


@pytest.fixture(scope="module")
def gpt2():
    """A GPT-2 of another implementation, and a folder that it writes itself to."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = transformers.GPT2Config(
        vocab_size=40,
        n_positions=16,
        n_layer=3,
        n_embd=24,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(shape).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def assert_computes_the_same(ours: GPT, theirs: nn.Module) -> None:
    text = torch.randint(40, (5, ours.sequence), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours(text), theirs(text).logits, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("how", ["one file", "shards", "no prefix", "old names"])
def test_a_hugging_face_gpt2_has_the_same_logits(gpt2, tmp_path, how, caplog):
    caplog.set_level(logging.INFO, "hpc_train")
    part = gpt2.transformer if how == "no prefix" else gpt2
    part.save_pretrained(tmp_path, max_shard_size="20KB" if how == "shards" else "1GB")
    assert (how == "shards") == (tmp_path / "model.safetensors.index.json").exists()
    if how == "old names":  # the causal mask was a tensor, the tied head a second one
        saved = load_file(tmp_path / "model.safetensors")
        saved["lm_head.weight"] = saved["transformer.wte.weight"].clone()
        saved["transformer.h.0.attn.bias"] = torch.ones(1, 1, 16, 16).tril()
        saved["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
        save_file(saved, tmp_path / "model.safetensors")
    assert_computes_the_same(start(tmp_path, gpt(1)), gpt2)
    assert "not of this model" not in caplog.text


def test_a_gpt2_for_shorter_texts_takes_the_first_positions(gpt2, tmp_path):
    gpt2.save_pretrained(tmp_path)
    assert_computes_the_same(start(tmp_path, gpt(1, sequence=9)), gpt2)


def test_tokens_that_a_gpt2_has_not_are_unlikely(gpt2, tmp_path):
    gpt2.save_pretrained(tmp_path)
    model = start(tmp_path, gpt(1, vocab=48))
    text = torch.randint(40, (5, 16))
    with torch.no_grad():
        logits = model(text)
        torch.testing.assert_close(logits[..., :40], gpt2(text).logits, rtol=1e-10, atol=1e-10)
    assert logits.softmax(-1)[..., 40:].max() <= 1 / 40


def test_a_gpt2_can_be_taken_in_part(gpt2, tmp_path):
    gpt2.save_pretrained(tmp_path)
    model = start(tmp_path, gpt(1, vocab=50, layers=2), exclude=["embedding.token.*"])
    assert_same(
        model,
        tensors(gpt(1, vocab=50))
        | tensors(start(tmp_path, gpt()))
        | {"embedding.token.weight": gpt(1, vocab=50, layers=2).embedding.token.weight},
    )
    with pytest.raises(ConfigError, match=r"model.heads 2: set --model.heads 4$"):
        start(tmp_path, gpt(1, heads=2), exclude=["embedding.token.*"])


def test_a_gpt2_that_does_not_fit_names_the_keys(gpt2, tmp_path):
    gpt2.save_pretrained(tmp_path)
    other = gpt(1, vocab=30, sequence=32, layers=2, hidden=16, heads=2, tie_embeddings=False)
    with pytest.raises(ConfigError) as error:
        start(tmp_path, other)
    assert error.value.remedy == (
        "set --model.layers 3 --model.hidden 24 --model.heads 4 --model.vocab 40 "
        "--model.sequence 16 --model.tie_embeddings true"
    )
    settings = tmp_path / "config.json"
    tree = json.loads(settings.read_text(encoding="utf-8"))
    for key, value in (("activation_function", "relu"), ("is_causal", False)):
        settings.write_text(json.dumps({**tree, key: value}), encoding="utf-8")
        with pytest.raises(ConfigError, match=f"{key} is {value}"):
            start(tmp_path, gpt(1))


def test_a_size_in_a_config_json_is_a_number_or_left_out(gpt2, tmp_path):
    gpt2.save_pretrained(tmp_path)
    settings = tmp_path / "config.json"
    tree = json.loads(settings.read_text())
    settings.write_text(json.dumps(tree | {"n_inner": None, "tie_word_embeddings": None}))
    assert_computes_the_same(start(tmp_path, gpt(1)), gpt2)
    settings.write_text(json.dumps(tree | {"n_positions": None}))
    with pytest.raises(CheckpointMismatch, match=r"embedding\.position\.weight"):
        start(tmp_path, gpt(1, sequence=32))  # as many as the smallest GPT-2 has
    settings.write_text(json.dumps(tree | {"vocab_size": "40"}))
    with pytest.raises(DataError, match="vocab_size is '40' in the config.json of checkpoint.we"):
        start(tmp_path, gpt(1))


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("kind", ["checkpoint", "file"])
@pytest.mark.parametrize("sizes", LAYOUTS, ids="dp{0[0]}-tp{0[1]}-pp{0[2]}".format)
def test_each_rank_keeps_its_part(job, together, sizes, kind):
    path = together / ("run" if kind == "checkpoint" else "file")
    if job.world.rank == 0 and kind == "file":
        save_file(tensors(gpt(0)), path)
    elif job.world.rank == 0:
        checkpoint_of(gpt(0), path)
    for grid in built(job, *sizes):
        model, patterns = gpt(1), {"exclude": ["blocks.0.*"]}
        applied = put_on(model, grid)
        start_from(path, model, applied.shards, job.world, **patterns)
    expected = tensors(gpt(0))
    expected |= {n: t for n, t in tensors(gpt(1)).items() if n.startswith("blocks.0.")}
    for name, tensor in model.named_parameters():
        shard = applied.shards[name]
        part = expected[shard.name].narrow(
            shard.spec.dim, shard.spec.start, shard.spec.stop - shard.spec.start
        )
        assert torch.equal(tensor, part), name


@pytest.mark.ranks(1, 2, 3, 4)
def test_a_mistake_is_one_on_all_ranks(group, together, small_extents):
    path, raised = together / "checkpoint", []
    if group.rank == 0:  # its header is sound, and so is the extent of what is no tensor
        checkpoint_of(gpt(0), together).rename(path)
        flip_bit(path, int.from_bytes(path.read_bytes()[:8], "little") + 8 + 5000)
    group.barrier()
    for where, changes in ((path, {}), (together / "none", {}), (path, {"layers": 4})):
        try:
            start_from(where, gpt(1, **changes), {}, group)
        except HpcTrainError as error:
            raised.append(type(error))
    assert raised == [CheckpointError, DataError, CheckpointMismatch]


OPTIONS = {
    "mpi": ["--data.micro_batch", "2"],
    "zero": ["--memory.zero", "1"],
    "compressed": ["--gradients.compression", "topk:1.0"],
    "layout": ["--parallel.pp", "2", "--data.micro_batch", "3"],
}
if runtime.horovod_built():
    OPTIONS["horovod"] = ["--gradients.engine", "horovod"]


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_training_from_weights_is_that_of_one_rank(job, together, options):
    weights = together / "weights"
    given = ["--checkpoint.weights", str(weights), "--gradients.bucket_mb", "0.001"]
    if job.world.rank == 0:
        torch.manual_seed(7)
        model = GPT(vocab=13, sequence=8, layers=1, hidden=8, heads=2).double()
        save_file(tensors(model), weights)
        make(config(together / "alone", *given), Runtime(Group(), Group())).train()
    job.world.barrier()
    make(config(together / "run", *given, *options), job).train()
    if job.world.rank == 0:
        weights.unlink()
    job.world.barrier()
    make(config(together / "run", *given, *options), job).train()  # has its own checkpoints now
    check_equal(together / "run", together / "alone")


ONE_STEP = ["--run.steps", "1", "--optimizer.lr", "0"]


def test_a_run_starts_from_another_runs_weights_on_another_layout(program):
    assert program.train("first").returncode == 0
    folder = str(program.root / "gpt2")
    export = ["checkpoint", "export", str(program.root / "first"), "--to", "gpt2", "--out", folder]
    assert run(*hpc_train(*export)).returncode == 0
    first = load_file(program.checkpoint("first", 12))
    kept = [name for name in first if name.startswith("model.")]
    assert kept
    for name in ("first", "gpt2"):
        options = ["--checkpoint.weights", str(program.root / name), *ONE_STEP]
        tensor = ["--parallel.tp", "2", "--model.dropout", "0.2", "--data.batch", "8"]
        done = program.train(f"from {name}", *options, *tensor, launcher="mpirun", ranks=2)
        assert done.returncode == 0, done.stderr
        assert "starting from the weights of" in done.stdout
        second = load_file(program.checkpoint(f"from {name}", 1))
        assert all(torch.equal(first[name], second[name]) for name in kept)


def test_mistakes_are_one_line(program, tmp_path):
    (tmp_path / "text").write_text("no weights")
    for path, told in (("none", "cannot be read"), ("text", "no sound safetensors file")):
        options = ["--checkpoint.weights", str(tmp_path / path)]
        assert told in refused(program.train("run", *options, launcher="mpirun", ranks=2))
    line = refused(program.train("run", *options, "--checkpoint.resume", str(tmp_path / "text")))
    assert "checkpoint.weights is given" in line
    assert "which is not given" in refused(program.train("run", "--checkpoint.exclude+", "*bias"))


@pytest.mark.slow("imports transformers, and starts a program")
def test_a_gpt2_folder_tells_which_keys_to_set(gpt2, program, tmp_path):
    gpt2.save_pretrained(tmp_path / "gpt2")
    options = ["--checkpoint.weights", str(tmp_path / "gpt2")]
    line = refused(program.train("run", *options))
    assert "set --model.layers 3 --model.hidden 24 --model.heads 4 --model.sequence 16" in line
