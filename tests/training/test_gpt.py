"""The data folder of `hpc-train train`, as each node sees it."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import load_file

from hpc_train.cli.checkpoint import export, export_to_peft
from hpc_train.config.file import load
from hpc_train.data.manifest import read_manifest
from hpc_train.errors import DataError
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.planning.model import planned_shape
from hpc_train.training.generate import load_language_model
from hpc_train.training.gpt import train_gpt
from hpc_train.training.planned import job_of
from tests.conftest import records, small_text

SMALL = [
    *("--run.steps", "6", "--run.log_every", "1", "--run.deterministic", "true"),
    *("--model.layers", "1", "--model.hidden", "16", "--model.heads", "2"),
    *("--model.sequence", "32", "--data.batch", "16", "--precision.dtype", "float64"),
]


@pytest.mark.mpi
def test_a_damaged_copy_on_one_nodes_own_disk_is_refused_on_all(job, tmp_path, monkeypatch):
    """Each rank stands for a node: it is alone on its own, and `data` is a folder of its own."""
    monkeypatch.chdir(tmp_path)
    last = job.world.size - 1
    small_text(tmp_path / "data")
    if job.world.rank == last:
        os.truncate("data/train-00001.h5", 5000)
    settings = load(None, ["--data.path", "data", "--run.steps", "1", "--run.dir", "run"])
    with pytest.raises(DataError) as caught:
        train_gpt(settings, Runtime(job.world, Group(waiting=job.world.waiting)))
    assert f"rank {last} " in str(caught.value) or job.world.size == 1
    assert "train-00001.h5 has 5000 bytes" in str(caught.value)


@pytest.mark.mpi
def test_a_cache_changes_no_loss_and_is_gone_at_the_end(job, together):
    world = job.world
    if world.rank == 0:
        small_text(together / "data")
    world.barrier()
    losses = []
    for name, options in (("plain", []), ("cached", ["--data.cache", str(together / "cache")])):
        places = ["--data.path", str(together / "data"), "--run.dir", str(together / name)]
        train_gpt(load(None, [*SMALL, *places, *options]), job)
        world.barrier()
        losses.append([record["loss"] for record in records(together / name)])
    left = [*(together / "cache").iterdir()]
    world.barrier()
    assert losses[0] == losses[1]
    assert left == []


@pytest.mark.mpi
def test_a_cache_is_gone_after_an_error(job, together):
    world = job.world
    if world.rank == 0:
        small_text(together / "data")
        manifest = read_manifest(together / "data")
        for shard in manifest.splits["train"]:
            with (together / "data" / shard.name).open("r+b") as file:
                file.seek(shard.offset)
                file.write(b"XXXXXXXX")
    world.barrier()
    places = ["--data.path", str(together / "data"), "--data.cache", str(together / "cache")]
    with pytest.raises(DataError) as caught:
        train_gpt(load(None, [*SMALL, *places, "--run.dir", str(together / "run")]), job)
    world.barrier()
    left = [*(together / "cache").iterdir()]
    world.barrier()
    assert "is damaged" in str(caught.value)
    assert left == []


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("options", "zero"),
    [
        ([], 1),
        (["--gradients.compression", "topk:0.1"], 0),
        (["--gradients.average_every", "4"], 0),
        (["--gradients.two_level", "off"], 0),
        (["--gradients.engine", "horovod"], 0),
        (["--memory.zero", "2"], 2),
    ],
)
def test_the_memory_of_a_job_is_predicted_as_auto_will_choose(job, options, zero):
    config = load(None, ["--model.vocab", "256", *options])
    planned = job_of(config, planned_shape(config), job)
    assert planned.config.memory.zero == zero
    assert planned.needed() > 0


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("tuned", [[], ["--finetune.lora", "2"]], ids=["whole", "adapters"])
def test_published_weights_are_trained_on_any_layout_and_given_back(job, together, tuned):
    """A Qwen3 of another implementation starts the run, and opens what the run has made."""
    transformers = pytest.importorskip("transformers")
    alone = job.world.rank == 0
    if alone:
        small_text(together / "data")
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "head_dim": 6, "intermediate_size": 20}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 264}
        torch.manual_seed(0)
        given = transformers.Qwen3Config(**sizes, tie_word_embeddings=True)
        transformers.AutoModelForCausalLM.from_config(given).save_pretrained(together / "base")
    job.world.barrier()
    same = [
        *(*SMALL, "--model.kind", "qwen3", "--model.layers", "2", "--model.heads", "4"),
        *("--model.kv_heads", "2", "--model.head_width", "6", "--model.mlp_width", "20"),
        *("--model.vocab", "264", "--model.tie_embeddings", "true", "--model.rope_theta", "1e4"),
        *("--data.path", str(together / "data"), "--checkpoint.weights", str(together / "base")),
        *("--memory.zero", "0", "--optimizer.clip_norm", "0.5", *tuned),
    ]
    layouts = {"plain": [], "cube": ["--parallel.tp", "2", "--parallel.pp", "2"]}
    for name, layout in layouts.items():
        train_gpt(load(None, [*same, *layout, "--run.dir", str(together / name)]), job)
        job.world.barrier()
    found = [[one["loss"] for one in records(together / name)] for name in layouts]
    logits = []
    if alone:
        out = str(together / "out")
        export(str(together / "cube"), out, [], [], None, to="hf")
        ours, *_ = load_language_model(together / "cube")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float64)
        tokens = torch.randint(256, (3, 32), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            logits = [ours(tokens), theirs.eval()(tokens).logits]
    if alone and tuned:
        export_to_peft(str(together / "cube"), str(together / "peft"))
        adapters = load_file(together / "peft" / "adapter_model.safetensors")
        merged, base = (load_file(together / it / "model.safetensors") for it in ("out", "base"))
        for name in [name for name in adapters if "lora_A" in name]:
            weight = name.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
            product = adapters[name.replace("lora_A", "lora_B")] @ adapters[name]
            torch.testing.assert_close(merged[weight], base[weight].double() + product)
        assert {name.split(".")[-3] for name in adapters} >= {"q_proj", "k_proj", "v_proj"}
    assert found[0] == pytest.approx(found[1], rel=1e-10)
    if alone:  # theirs has angles and norms in 32 bits
        torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
