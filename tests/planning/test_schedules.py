"""`hpc-train plan`: its estimates against real models, and the verb."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from hpc_train.cli.plan import show_schedules
from hpc_train.config import ModelSection
from hpc_train.config.file import load
from hpc_train.errors import ConfigError
from hpc_train.models import GPT
from hpc_train.parallel.schedule import build
from hpc_train.planning.schedules import (
    gpt_activations,
    gpt_costs,
    gpt_parameters,
    memory,
    plan,
    size,
)
from tests.programs import hpc_train as command
from tests.programs import only_line, run

CONFIG = """
model: {layers: 6, hidden: 64, heads: 4, sequence: 32, vocab: 256}
data: {batch: 32, micro_batch: 2}
parallel: {pp: 4, dp: 2, schedule: zero_bubble}
precision: {dtype: float32}
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(CONFIG)
    return path


def gpt(model: ModelSection, vocab: int) -> GPT:
    return GPT(
        vocab=vocab,
        sequence=model.sequence,
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        dropout=model.dropout,
        tie_embeddings=model.tie_embeddings,
    )


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_model(tied):
    model = ModelSection(layers=3, hidden=48, heads=4, sequence=20, tie_embeddings=tied)
    real = sum(parameter.numel() for parameter in gpt(model, 101).parameters())
    assert sum(gpt_parameters(model, 101, tp=1, pp=1)) == real
    over_two = sum(gpt_parameters(model, 101, tp=1, pp=2))
    assert over_two - real == (101 * 48 if tied else 0)  # both stages have the tied matrix


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_activations_are_what_autograd_keeps(dropout):
    model = ModelSection(layers=2, hidden=64, heads=4, sequence=32, dropout=dropout)
    module = gpt(model, 300)
    module.seed_samples([1, 2])
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so addresses stay unique
        return tensor

    tokens = torch.zeros(2, 32, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(tokens, tokens)
    real = sum(nbytes for nbytes, _ in kept.values())
    estimated = 4 * 2 * sum(gpt_activations(model, 300, tp=1, sequence_parallel=False))
    assert estimated == pytest.approx(real, rel=0.03)


def test_tensor_and_sequence_parallel_divide_as_in_the_paper():
    model = ModelSection(layers=1, hidden=64, heads=4, sequence=32)
    whole, half, cut = (
        gpt_activations(model, 256, tp, cut)[1] / (64 * 32)
        for tp, cut in ((1, False), (2, False), (2, True))
    )
    assert (whole, half, cut) == (16, 4 + 12 / 2, 16 / 2)


def test_costs_count_matrix_products():
    module = gpt(ModelSection(layers=2, hidden=64, heads=4), 300)
    linear = sum(m.weight.numel() for m in module.modules() if isinstance(m, torch.nn.Linear))
    assert gpt_costs(2, 64, 300) == [0, 12 * 64**2, 12 * 64**2, 300 * 64]
    assert sum(gpt_costs(2, 64, 300)) == linear


def test_every_schedule_is_estimated_and_the_chosen_one_marked(config):
    made = plan(load(config))
    assert (made.dp, made.pp, made.micro_batch, made.micro_batches) == (2, 4, 2, 8)
    found = {entry.schedule: entry for entry in made.schedules}
    assert list(found) == ["gpipe", "1f1b", "interleaved", "zero_bubble"]
    assert [name for name, entry in found.items() if entry.chosen] == ["zero_bubble"]
    assert {name: entry.peak_live for name, entry in found.items()} == {
        "gpipe": 8,
        "1f1b": 4,
        "interleaved": 11,
        "zero_bubble": 4,
    }
    assert found["1f1b"].bubble_even == pytest.approx(3 / 11)
    assert found["1f1b"].bubble > found["1f1b"].bubble_even  # six layers on four ranks
    assert found["zero_bubble"].bubble < found["1f1b"].bubble
    assert found["1f1b"].layers == [2, 1, 2, 1]
    assert len(found["interleaved"].layers) == 8
    assert sum(found["interleaved"].layers) == 6


def test_equal_stages_wait_as_the_formula_says(config):
    # Six blocks and a head as large as two of them.
    vocab = str(24 * 64)
    for entry in plan(load(config, ["--model.vocab", vocab])).schedules:
        if entry.virtual_stages == 1:
            assert entry.layers == [2, 2, 2, 0]
            assert entry.bubble == pytest.approx(entry.bubble_even)


def test_memory_is_counted_on_every_rank():
    model = ["--model.layers=2", "--model.hidden=64", "--model.heads=4", "--model.vocab=256"]
    config = load(None, [*model, "--model.sequence=32", "--parallel.pp=2", "--data.batch=2"])
    schedule, runs = build("1f1b", 2, 2), [range(2), range(2, 4)]
    first, last = memory(config, 256, schedule, runs, micro_batch=1)
    block = 16 * 64 * 32
    assert first[0] == 4 * 2 * block  # two micro-batches live on the first rank
    assert last[0] == 4 * (block + 32 * (2 * 64 + 256))
    numbers = 12 * 64**2 + 13 * 64
    assert first[1] == 4 * 4 * (numbers + 256 * 64 + 32 * 64)
    assert last[1] == 4 * 4 * (numbers + 256 * 64 + 2 * 64)


def test_sgd_and_number_formats_count(config):
    def state(*options):
        return plan(load(config, options)).schedules[0].state_bytes

    assert state("--optimizer.name=sgd") * 4 == state() * 3
    assert state("--precision.dtype=float64") == state() * 2
    assert state("--precision.dtype=bfloat16") == state(), "the parameters stay float32"


def test_schedules_that_need_more_layers_are_left_out(config, capsys):
    made = plan(load(config, ["--model.layers=3"]))
    assert [entry.schedule for entry in made.schedules] == ["gpipe", "1f1b", "zero_bubble"]
    show_schedules(made, as_json=False)
    assert "not shown, too few layers: interleaved\n" in capsys.readouterr().out


def test_the_vocabulary_comes_from_the_data(config, text_data):
    options = ["--model.vocab=null", "--data.path"]
    assert plan(load(config, [*options, str(text_data)])).vocab == 256
    with pytest.raises(ConfigError, match=r"no prepared data .*: give model\.vocab"):
        plan(load(config, [*options, str(config.parent)]))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--data.batch=30", "data.batch 30 is not divisible by parallel.dp 2 x data.micro_batch 2"),
        ("--parallel.pp=9", "parallel.pp 9 is more than the 8 parts of the model"),
        ("--parallel.tp=3", "parallel.tp 3 does not divide model.heads 4"),
        ("--model.vocab=null", "the vocabulary is not known: give model.vocab, or data.path"),
        ("--model.layer=3", "unknown key model.layer: did you mean model.layers?"),
    ],
)
def test_mistakes_are_one_line(config, option, message):
    done = run(*command("plan", str(config), option))
    assert done.returncode == 2
    assert message in only_line(done.stderr)
    assert not done.stdout


def test_the_verb_prints_a_table_or_json(config):
    text = run(*command("plan", str(config)))
    assert text.returncode == 0, text.stderr
    for word in ("gpipe", "1f1b", "interleaved", "* zero_bubble", "MiB", "stage: 2 1 2 1"):
        assert word in text.stdout
    assert max(map(len, text.stdout.splitlines())) <= 100
    printed = run(*command("plan", str(config), "--json", "--parallel.dp", "1"))
    tree = json.loads(printed.stdout)
    assert tree["micro_batches"] == 16
    assert {entry["schedule"] for entry in tree["schedules"]} >= {"1f1b", "zero_bubble"}
    assert all(entry["activation_bytes"] > 0 for entry in tree["schedules"])


def test_help_and_no_arguments():
    assert "hpc-train plan" in run(*command("plan", "--help")).stdout
    assert run(*command("plan")).returncode == 2


def test_planning_loads_neither_torch_nor_mpi(config):
    check = (
        f"from hpc_train.cli import main; main(['plan', {str(config)!r}])\n"
        "import sys\nassert not {'torch', 'mpi4py', 'numpy', 'h5py'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_sizes():
    assert size(3 * 2**19) == "1.5 MiB"
    assert size(5 * 2**29) == "2.50 GiB"
