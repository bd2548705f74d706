"""`hpc-train plan`: its estimates against real models, and the verb."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from hpc_train.cli.plan import show_schedules
from hpc_train.config.file import load
from hpc_train.errors import ConfigError
from hpc_train.parallel.schedule import build
from hpc_train.planning.model import planned_shape
from hpc_train.planning.schedules import memory, plan
from tests.programs import hpc_train as command
from tests.programs import modules_of, only_line, run

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
    first, last = memory(config, planned_shape(config), schedule, runs, micro_batch=1)
    block = 16 * 64 * 32
    assert first[0] == 4 * 2 * block  # two micro-batches live on the first rank
    assert last[0] == 4 * (block + 32 * (2 * 64 + 256))
    numbers = 12 * 64**2 + 13 * 64
    assert first[1] == 4 * 4 * (numbers + 256 * 64 + 32 * 64)
    assert last[1] == 4 * 4 * (numbers + 256 * 64 + 2 * 64)
    short = replace(config, precision=replace(config.precision, dtype="bfloat16"))
    short_first, short_last = memory(short, planned_shape(short), schedule, runs, micro_batch=1)
    kept = 2 * block + 2 * 2 * 64 * 32 + 2 * 12 * 64**2  # inputs of norms, copies of weights
    assert short_first[0] == 2 * kept
    assert short_last[0] == kept + 32 * (6 * 64 + 4 * 256) + 2 * 256 * 64
    config = replace(config, data=replace(config.data, across_documents=False))
    masked = memory(config, planned_shape(config), schedule, runs, micro_batch=1)
    masks = [4 * 32**2 * live for live in (2, 1)]
    assert [m[0] - its[0] for m, its in zip(masked, (first, last), strict=True)] == masks


def test_a_state_on_a_disk_does_not_count(config):
    def state(*options):
        return plan(load(config, options)).schedules[0].state_bytes

    assert 2 * state("--memory.offload=/scratch") == state()


def test_a_state_on_the_host_is_shown_beside_that_on_the_gpu(config, capsys):
    made = plan(load(config, ["--memory.offload=optimizer"]))
    for entry, plain in zip(made.schedules, plan(load(config)).schedules, strict=True):
        assert entry.host_bytes == plain.state_bytes, "one replica divides nothing"
        assert plain.state_bytes / 4 < entry.state_bytes <= plain.state_bytes / 2
    show_schedules(made, as_json=False)
    assert "host" in capsys.readouterr().out.splitlines()[2]


def test_sgd_and_number_formats_count(config):
    def state(*options):
        return plan(load(config, options)).schedules[0].state_bytes

    assert state("--optimizer.name=sgd") * 4 == state() * 3
    assert state("--precision.dtype=float64") == state() * 2
    assert state("--precision.dtype=bfloat16") == state(), "the parameters stay float32"


def test_a_recomputed_block_keeps_its_input_in_32_bits(config):
    def kept(dtype, layers):
        words = ["--parallel.pp=1", "--memory.recompute=full", f"--precision.dtype={dtype}"]
        made = plan(load(config, [*words, f"--model.layers={layers}"]))
        return made.schedules[0].activation_bytes

    short, whole = (kept(dtype, 20) - kept(dtype, 10) for dtype in ("bfloat16", "float32"))
    assert short == whole


def test_schedules_that_need_more_layers_are_left_out(config, capsys):
    made = plan(load(config, ["--model.layers=3"]))
    assert [entry.schedule for entry in made.schedules] == ["gpipe", "1f1b", "zero_bubble"]
    show_schedules(made, as_json=False)
    assert "not shown, because the layers are too few: interleaved\n" in capsys.readouterr().out


def test_the_vocabulary_comes_from_the_data(config, text_data):
    options = ["--model.vocab=null", "--data.path"]
    assert plan(load(config, [*options, str(text_data)])).sizes == "vocabulary: 256"
    with pytest.raises(ConfigError, match=r"no prepared data .*: give model\.vocab"):
        plan(load(config, [*options, str(config.parent)]))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--data.batch=30", "data.batch 30 is not divisible by parallel.dp 2 x data.micro_batch 2"),
        ("--parallel.pp=9", "parallel.pp 9 is more than the 8 parts of the model"),
        (
            "--parallel.tp=3",
            "does not divide model.heads 4: nearest that it divides: model.heads 3",
        ),
        ("--model.vocab=null", "the vocabulary size is not known: give model.vocab, or data.path"),
        ("--model.layer=3", "unknown option --model.layer: did you mean --model.layers?"),
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


def test_planning_loads_neither_torch_nor_mpi(config):
    code, told, modules = modules_of("plan", config)
    assert (code, {"torch", "mpi4py", "numpy", "h5py"} & modules) == (0, set()), told
