"""Fine-tuning: what is trained, what stays as it is, and on which layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hpc_train.checkpoint.catalogue import newest
from hpc_train.cli.checkpoint import export, export_to_peft
from hpc_train.config import FinetuneSection
from hpc_train.config.file import load
from hpc_train.errors import CheckpointMismatch, ConfigError
from hpc_train.models import GPT
from hpc_train.models.lora import is_adapter
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.training.finetuning import choose_trained
from hpc_train.training.generate import load_language_model
from hpc_train.training.task import TrainingTask
from hpc_train.training.trainer import Trainer
from tests.cases import cases
from tests.programs import hpc_train, only_line, run
from tests.training.test_trainer import check_equal, config, make, records, text

SIZES = {"vocab": 13, "sequence": 8, "layers": 1, "hidden": 8, "heads": 2}
LORA = ["--finetune.lora", "2", "--finetune.alpha", "6"]


def base(path: Path) -> Path:
    """Weights of the model that `make` builds."""
    torch.manual_seed(7)
    model = GPT(**SIZES).double()
    save_file({name: p.detach().clone() for name, p in model.named_parameters()}, path)
    return path


def alone() -> Runtime:
    return Runtime(Group(), Group())


def saved(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(newest(directory))


LAYOUTS = {
    "mpi": ["--data.micro_batch", "2"],
    "zero1": ["--memory.zero", "1"],
    "zero2": ["--memory.zero", "2", "--data.micro_batch", "3"],
    "zero3": ["--memory.zero", "3", "--parallel.pp", "2", "--data.micro_batch", "3"],
    "tensor": ["--parallel.tp", "2", "--memory.recompute", "selective"],
    "sequence": ["--parallel.tp", "2", "--parallel.sequence_parallel", "true"],
    "zero_bubble": [
        *("--parallel.pp", "2", "--parallel.tp", "2", "--parallel.schedule", "zero_bubble"),
        *("--data.micro_batch", "3", "--memory.recompute", "full"),
    ],
}


def job_of(settings, started):
    """A job of `make`'s model, whose parameters only its modules read."""
    torch.manual_seed(started.world.rank)
    model = GPT(**{**SIZES, "vocab": 14}, dropout=0.2)
    task = TrainingTask(
        model, text(60, 1), lambda gpt, batch: gpt(*batch), text(11, 2), private_parameters=True
    )
    return Trainer(settings, task, started)


PARTS = {"lora": LORA, "head": ["--finetune.head", "true"]}
CASES = {
    f"{part}-{layout}": (options, chosen)
    for part, chosen in PARTS.items()
    for layout, options in LAYOUTS.items()
}
NOW = (
    *("head-mpi", "head-zero1", "head-tensor"),
    *("lora-zero2", "lora-zero3", "lora-sequence", "lora-zero_bubble"),
)


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize(("options", "chosen"), cases(CASES, later=set(CASES) - set(NOW)))
def test_fine_tuning_is_that_of_one_rank(job, together, options, chosen):
    weights = together / "weights"
    given = [*chosen, "--checkpoint.weights", str(weights), "--gradients.bucket_mb", "0.0005"]
    if job.world.rank == 0:
        torch.manual_seed(7)
        model = GPT(**{**SIZES, "vocab": 14}).double()
        save_file({name: p.detach().clone() for name, p in model.named_parameters()}, weights)
        job_of(config(together / "alone", *given), alone()).train()
    job.world.barrier()
    job_of(config(together / "run", *given, *options), job).train()
    if job.world.rank == 0:
        check_equal(together / "run", together / "alone")
        first, mine, theirs = load_file(weights), saved(together / "run"), saved(together / "alone")
        names = [n.removeprefix("model.") for n in mine if n.startswith("model.")]
        assert mine.keys() == theirs.keys()
        for name in names:
            torch.testing.assert_close(
                mine[f"model.{name}"], theirs[f"model.{name}"], rtol=1e-9, atol=1e-10
            )
        left = [n for n in names if f"optim.{n}.exp_avg" not in mine]
        assert left
        assert all(torch.equal(mine[f"model.{n}"], first[n]) for n in left)
    job.world.barrier()


def test_with_adapters_nothing_else_is_trained_or_has_an_optimizers_state(tmp_path):
    weights = base(tmp_path / "base")
    trainer = make(config(tmp_path / "run", *LORA, "--checkpoint.weights", str(weights)), alone())
    trainer.train()
    of_base, found = load_file(weights), saved(tmp_path / "run")
    model = {n.removeprefix("model."): t for n, t in found.items() if n.startswith("model.")}
    assert model.keys() - of_base.keys() == {
        f"blocks.0.{layer}.lora_{ab}"
        for layer in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
        for ab in "ab"
    }
    assert all(torch.equal(model[name], tensor) for name, tensor in of_base.items())
    assert all(model[name].abs().min() > 0 for name in model if is_adapter(name))
    slots = [name for name in found if name.startswith("optim.")]
    assert slots
    assert all("lora_" in name for name in slots)


def test_head_and_patterns_choose_what_is_trained(tmp_path):
    weights = base(tmp_path / "base")
    options = ["--finetune.head", "true", "--finetune.patterns+", "*.norm_mlp.*"]
    make(config(tmp_path / "run", *options, "--checkpoint.weights", str(weights)), alone()).train()
    of_base, found = load_file(weights), saved(tmp_path / "run")
    changed = {n for n, tensor in of_base.items() if not torch.equal(found[f"model.{n}"], tensor)}
    assert changed == {
        *("embedding.token.weight", "head.norm.weight", "head.norm.bias"),  # the first one is tied
        *("blocks.0.norm_mlp.weight", "blocks.0.norm_mlp.bias"),
    }


def test_what_is_neither_taken_from_the_weights_nor_trained_is_refused(tmp_path):
    given = ["--checkpoint.weights", str(base(tmp_path / "base")), "--run.steps", "1"]
    given += ["--checkpoint.exclude+", "blocks.0.norm_mlp.*"]
    with pytest.raises(
        ConfigError, match=r"leave out blocks.0.norm_mlp.weight, .* would keep initial values"
    ):
        make(config(tmp_path / "run", *LORA, *given), alone()).train()
    make(config(tmp_path / "run", "--finetune.patterns+", "*.norm_mlp.*", *given), alone()).train()


@pytest.mark.mpi(min_size=4)
def test_biases_that_the_weights_were_trained_without_stay_zero(job, together):
    weights = together / "weights"
    given = [*LORA, "--checkpoint.weights", str(weights), "--checkpoint.exclude+", "*bias"]
    given += ["--run.steps", "1", "--memory.zero", "1", "--parallel.tp", "2"]
    if job.world.rank == 0:
        tensors = load_file(base(weights))
        save_file({name: t for name, t in tensors.items() if not name.endswith("bias")}, weights)
    job.world.barrier()
    job_of(config(together / "run", *given), job).train()
    message = ""
    try:
        settings = config(together / "random", *given, "--checkpoint.exclude+", "*.down.weight")
        job_of(settings, job).train()
    except ConfigError as error:
        message = str(error)
    biases = [t for name, t in saved(together / "run").items() if name.endswith("bias")]
    assert biases
    assert not any(tensor.any() for tensor in biases)
    assert "leave out blocks.0.mlp.down.weight, which would keep initial values" in message


def test_a_run_goes_on_with_its_adapters_and_not_with_others(tmp_path):
    given = [*LORA, "--checkpoint.weights", str(base(tmp_path / "base"))]
    make(config(tmp_path / "whole", *given), alone()).train()
    steady = ["--run.steps", "3"]
    make(config(tmp_path / "cut", *given, *steady), alone()).train()
    make(config(tmp_path / "cut", *given), alone()).train()
    check_equal(tmp_path / "cut", tmp_path / "whole")
    whole, cut = saved(tmp_path / "whole"), saved(tmp_path / "cut")
    assert all(torch.equal(tensor, cut[n]) for n, tensor in whole.items() if n != "state")
    for other in (["--finetune.alpha", "5"], ["--finetune.head", "true"]):
        with pytest.raises(CheckpointMismatch, match=other[0].removeprefix("--")):
            make(config(tmp_path / "cut", *given, *other), alone()).train()


def test_the_adapters_of_weights_become_part_of_them(tmp_path):
    given = [*LORA, "--checkpoint.weights", str(base(tmp_path / "base"))]
    first = make(config(tmp_path / "first", *given), alone())
    first.train()
    again = [*LORA, "--checkpoint.weights", str(tmp_path / "first"), "--run.steps", "1"]
    second = make(config(tmp_path / "second", *again, "--optimizer.lr", "0"), alone())
    second.train()
    tokens, _ = text(5, 3)[:]
    with torch.no_grad():
        mine, theirs = second.model.eval()(tokens), first.model.eval()(tokens)
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)


class Tower(nn.Module):
    stages = ("first", "layers.*", "last")

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Embedding(4, 4), nn.Linear(4, 2)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"patterns": ["layer.*"]}, "finetune.patterns: the model has no parameter layer.*"),
        (
            {"lora": 2, "lora_layers": ["first"]},
            "finetune.lora_layers: the model has no linear layer first; the first ones are last,",
        ),
        ({"lora": 2, "patterns": ["layers.1.*"]}, "layers.1 gets an adapter, but its weight"),
        ({"lora": 2, "lora_layers": ["last"], "head": True}, "last gets an adapter, but its"),
    ],
)
def test_what_makes_no_sense_for_a_model_is_refused(section, told):
    with pytest.raises(ConfigError) as caught:
        choose_trained(Tower(), FinetuneSection(**section), 0)
    assert told in str(caught.value)


def test_a_model_without_linear_layers_or_head_is_refused():
    plain = nn.Sequential(nn.Embedding(4, 4))
    with pytest.raises(ConfigError, match="Sequential has no linear layer"):
        choose_trained(plain, FinetuneSection(lora=2), 0)
    with pytest.raises(ConfigError, match="does not say what its head is"):
        choose_trained(plain, FinetuneSection(head=True), 0)
    with pytest.raises(ConfigError, match="head.output shares its weight with embedding.token"):
        choose_trained(GPT(**SIZES), FinetuneSection(lora=2, lora_layers=["head.output"]), 0)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--finetune.lora", "2"], "checkpoint.weights is not given"),
        (["--finetune.alpha", "2"], "finetune.alpha is given, but finetune.lora is 0"),
        (["--finetune.lora_layers+", "x"], "finetune.lora_layers is given, but finetune.lora is"),
        (["--finetune.lora", "-1"], "finetune.lora is -1"),
        (["--finetune.lora", "2", "--finetune.alpha", "0"], "finetune.alpha is 0"),
    ],
)
def test_keys_that_exclude_each_other_are_refused(options, told):
    with pytest.raises(ConfigError) as caught:
        load(None, options)
    assert told in str(caught.value)


def test_a_model_of_a_class_gets_the_same_adapters_on_every_rank(tmp_path):
    save_file(Tower().state_dict(), tmp_path / "base")
    options = ["--finetune.lora", "1", "--checkpoint.weights", str(tmp_path / "base")]
    trained = []
    for name in ("one", "two"):
        task = TrainingTask(Tower, text(60, 1), lambda tower, _: tower.layers[0](ONES).mean())
        settings = config(tmp_path / name, *options, "--data.validation_every", "0")
        Trainer(settings, task, alone()).train()
        trained.append(saved(tmp_path / name))
    assert trained[0]["model.layers.0.lora_a"].abs().min() > 0
    assert all(torch.equal(t, trained[1][n]) for n, t in trained[0].items())


ONES = torch.ones(4, dtype=torch.float64)


@pytest.mark.slow("seven programs")
def test_a_gpt_is_fine_tuned_exported_and_writes_text(program):
    steps = ["--run.steps", "4", "--checkpoint.every", "2"]
    assert program.train("base", *steps).returncode == 0
    lora = ["--finetune.lora", "2", "--checkpoint.weights", str(program.root / "base")]
    done = program.train("tuned", *lora, *steps, "--optimizer.lr", "0.05")
    assert done.returncode == 0, done.stderr
    assert "8 adapters of rank 2" in done.stdout + done.stderr
    out = str(program.root / "tuned.safetensors")
    done = run(*hpc_train("checkpoint", "export", str(program.root / "tuned"), "--out", out))
    assert done.returncode == 0, done.stderr
    merged, first = load_file(out), saved(program.root / "base")
    assert not any(is_adapter(name) for name in merged)
    changed = [name for name in merged if not torch.equal(merged[name], first[f"model.{name}"])]
    assert len(changed) == 8
    words = ("--prompt", "def ", "--tokens", "20", "--temperature", "0")
    texts = []
    again = ["--checkpoint.weights", out, "--run.steps", "1", "--optimizer.lr", "0"]
    assert program.train("plain", *again).returncode == 0
    for name in ("tuned", "plain"):
        done = run(*hpc_train("generate", str(program.root / name), *words))
        assert done.returncode == 0, done.stderr
        texts.append(done.stdout)
    assert texts[0] == texts[1]
    for name in ("base", "tuned"):
        export(
            str(program.root / name), str(program.root / f"{name}-gpt2"), [], [], None, to="gpt2"
        )
    export_to_peft(str(program.root / "tuned"), str(program.root / "peft"))
    theirs, adapted = (
        load_file(program.root / f"{name}-gpt2" / "model.safetensors") for name in ("base", "tuned")
    )
    adapters = load_file(program.root / "peft" / "adapter_model.safetensors")
    assert len(adapters) == 16
    for name in [name for name in adapters if "lora_A" in name]:
        weight = name.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
        product = adapters[name.replace("lora_A", "lora_B")] @ adapters[name]
        torch.testing.assert_close(adapted[weight], theirs[weight] + product.T)
    (program.root / "peft" / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"adapter_config.json exists: give another --out"):
        export_to_peft(str(program.root / "tuned"), str(program.root / "peft"))
    line = only_line(program.train("nothing", "--finetune.head", "true").stderr)
    assert "give checkpoint.weights, or leave finetune out" in line


@pytest.mark.slow("five programs")
def test_peft_opens_the_adapters_beside_the_base_model(program):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    steps = ["--run.steps", "3"]
    assert program.train("base", *steps).returncode == 0
    lora = ["--finetune.lora", "2", "--finetune.alpha", "6", "--optimizer.lr", "0.05"]
    lora += ["--checkpoint.weights", str(program.root / "base")]
    assert program.train("tuned", *lora, *steps).returncode == 0
    for name, form in (("base", "gpt2"), ("tuned", "peft")):
        words = [str(program.root / name), "--to", form, "--out", str(program.root / form)]
        done = run(*hpc_train("checkpoint", "export", *words))
        assert done.returncode == 0, done.stderr
    plain = transformers.GPT2LMHeadModel.from_pretrained(program.root / "gpt2", dtype=torch.float64)
    theirs = peft.PeftModel.from_pretrained(plain, program.root / "peft").double().eval()
    ours, *_ = load_language_model(program.root / "tuned")
    tokens = torch.randint(250, (3, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-9, atol=1e-9)
    done = run(*hpc_train("checkpoint", "export", words[0].replace("tuned", "base"), *words[1:]))
    assert "has no adapters" in only_line(done.stderr)


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("kind", ["bfloat16", pytest.param("float16", marks=pytest.mark.long)])
def test_adapters_are_trained_in_16_bits(job, together, kind):
    given = [*LORA, "--checkpoint.weights", str(together / "weights")]
    if job.world.rank == 0:
        torch.manual_seed(7)
        weights = dict(GPT(**{**SIZES, "vocab": 14}).named_parameters())
        save_file({name: p.detach().clone() for name, p in weights.items()}, together / "weights")
        job_of(config(together / "alone", *given), alone()).train()
    job.world.barrier()
    options = [*LAYOUTS["zero_bubble"], "--precision.dtype", kind]
    job_of(config(together / "run", *given, *options), job).train()
    if job.world.rank == 0:
        mine, theirs = records(together / "run"), records(together / "alone")
        close = pytest.approx([one["loss"] for one in theirs], rel=0.02)
        assert [one["loss"] for one in mine] == close
        adapters = [n for n in saved(together / "run") if n.startswith("model.") and is_adapter(n)]
        assert {saved(together / "run")[name].dtype for name in adapters} == {torch.float32}
    job.world.barrier()


def test_a_resumed_run_does_not_take_the_given_weights_again(tmp_path):
    given = ["--checkpoint.weights", str(base(tmp_path / "base"))]
    given += ["--optimizer.schedule", "constant", "--run.steps"]
    for directory, steps in (("run", "2"), ("run", "4"), ("whole", "4")):
        make(config(tmp_path / directory, *given, steps), alone()).train()
    mine, whole = saved(tmp_path / "run"), saved(tmp_path / "whole")
    assert all(torch.equal(mine[name], whole[name]) for name in whole)
