"""`hpc-train checkpoint` through its command line."""

from __future__ import annotations

import os
import re
import shutil
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file

from hpc_train.checkpoint import catalogue, inspection
from hpc_train.checkpoint.catalogue import listed
from hpc_train.checkpoint.export import export_model, write_tensors
from hpc_train.checkpoint.restore import Tensors
from hpc_train.cli.checkpoint import export, verify_checkpoints
from hpc_train.errors import CheckpointError, ConfigError
from hpc_train.training.generate import load_language_model
from tests.conftest import small_program
from tests.damages import flip_bit
from tests.programs import hpc_train, only_line, run


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text_data):
    """A program that has run: its checkpoints are those of steps 5, 10 and 12."""
    program = small_program(tmp_path_factory.mktemp("verbs"), text_data)
    assert program.train("run").returncode == 0
    return program


def checkpoint(*arguments: object, code: int = 0) -> str:
    """What the verb prints."""
    done = run(*hpc_train("checkpoint", *map(str, arguments)))
    assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return only_line(done.stderr) if code == 2 else done.stdout


def test_list_tells_the_newest_first_and_what_is_damaged(trained, tmp_path):
    shutil.copytree(trained.root / "run", tmp_path / "run")
    flip_bit(tmp_path / "run" / "checkpoints" / "step-000000010.safetensors", 100)
    lines = checkpoint("list", tmp_path / "run").splitlines()
    assert [line.split(".")[0] for line in lines] == [f"step-{n:09d}" for n in (12, 10, 5)]
    loss = trained.metrics("run")[-1]["validation_loss"]
    assert lines[0].endswith(f"complete  validation loss {loss:.5g}")
    assert lines[2].endswith("complete")
    assert "its header is" in lines[1]


def test_verify_finds_a_flipped_bit_and_names_the_tensor(trained, tmp_path):
    assert "sound" in checkpoint("verify", trained.root / "run")
    copy = shutil.copy(trained.checkpoint("run", 10), tmp_path / "step-000000010.safetensors")
    flip_bit(tmp_path / copy.name, 1 << 20)
    found = checkpoint("verify", copy, code=1)
    assert "not what was saved" in found
    assert re.search(r"saved: model\.[\w.]+, .* and \d+ more$", found, re.MULTILINE)
    assert checkpoint("verify", trained.root / "run", "--all").count("sound") == 3
    assert "is one file" in checkpoint("verify", copy, "--all", code=2)


def test_verify_all_goes_on_behind_a_file_of_somebody_else(trained, tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    shutil.copytree(trained.root / "run" / "checkpoints", folder)
    save_file({"x": torch.ones(3)}, folder / "step-000000099.safetensors")
    found = checkpoint("verify", tmp_path / "run", "--all", code=1)
    assert "it has tensors alone, and is no checkpoint of hpc_train" in found
    assert found.count("sound") == 3


def test_checkpoints_that_training_removes_meanwhile_are_left_out(
    trained, tmp_path, monkeypatch, capsys
):
    folder = tmp_path / "run" / "checkpoints"
    shutil.copytree(trained.root / "run" / "checkpoints", folder)
    monkeypatch.setattr(catalogue, "read_header", removing(catalogue.read_header, "10."))
    assert [one.path.name[5:14] for one in listed(tmp_path / "run")] == ["000000012", "000000005"]
    monkeypatch.setattr(inspection, "damaged", removing(inspection.damaged, "05."))
    assert verify_checkpoints(str(tmp_path / "run"), every=True) == 0
    assert re.findall(r"0(\d\d)\.safetensors: (sound|removed)", capsys.readouterr().out) == [
        ("12", "sound"),
        ("05", "removed"),
    ]


def removing(read, name):
    """A function that reads a file, with retention that removes it before."""

    def reads(path):
        if name in path.name:
            path.unlink()
        return read(path)

    return reads


def test_diff_of_a_checkpoint_and_itself_is_nothing(trained):
    path = trained.checkpoint("run", 5)
    assert checkpoint("diff", path, path) == ""


def test_diff_tells_tensors_and_numbers(trained):
    found = checkpoint("diff", trained.checkpoint("run", 5), trained.root / "run", "--all", code=1)
    assert "step: 5 and 12" in found
    assert any(line.startswith("model.") and "elements, by" in line for line in found.splitlines())
    few = checkpoint("diff", trained.checkpoint("run", 5), trained.root / "run", code=1)
    assert "more: --all shows them" in few


@pytest.mark.parametrize(("to", "key"), [("peft", "dtype"), ("gpt2", "include")])
def test_a_part_that_another_program_could_not_open_is_refused(to, key):
    said = checkpoint("export", "run", "--to", to, "--out", "it", f"--{key}", "float32", code=2)
    assert f"--{key} is given with --to {to}: leave out --{key}" in said


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_export_gives_the_models_tensors(trained, tmp_path, suffix):
    target = tmp_path / f"model{suffix}"
    options = ["--exclude", "*norm*", "--dtype", "float32"]
    checkpoint("export", trained.root / "run", "--out", target, *options)
    is_pt = suffix == ".pt"
    got = torch.load(target, weights_only=True) if is_pt else load_file(target)
    saved = load_file(trained.checkpoint("run", 12))
    names = {name.removeprefix("model.") for name in saved if name.startswith("model.")}
    tied = {"head.output.weight": "embedding.token.weight"} if is_pt else {}
    assert got.keys() == {name for name in names if "norm" not in name} | tied.keys()
    for name, tensor in got.items():
        assert torch.equal(tensor, saved[f"model.{tied.get(name, name)}"].float()), name


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_export_has_one_tensor_at_a_time_in_memory(trained, tmp_path, monkeypatch, suffix):
    alive = weakref.WeakSet()
    read = Tensors.__getitem__

    def counted(saved, name):
        assert not alive
        tensor = read(saved, name)
        alive.add(tensor)
        return tensor

    monkeypatch.setattr(Tensors, "__getitem__", counted)
    forms = export_model(trained.checkpoint("run", 12), tmp_path / f"model{suffix}")
    assert len(forms) > 10
    assert [path.name for path in tmp_path.iterdir()] == [f"model{suffix}"]


def test_a_failed_export_leaves_nothing(trained, tmp_path, monkeypatch):
    def damaged(saved, name):
        raise CheckpointError("it is damaged")

    monkeypatch.setattr(Tensors, "__getitem__", damaged)
    with pytest.raises(CheckpointError):
        export_model(trained.checkpoint("run", 12), tmp_path / "model.pt")
    assert not list(tmp_path.iterdir())


def test_two_exports_to_one_file_at_once_do_not_mix(tmp_path, monkeypatch):
    target, forms = tmp_path / "it.pt", {"a": (torch.float32, (2,))}

    def first():
        monkeypatch.setattr(os, "getpid", lambda: 1)  # another process
        write_tensors(forms, iter([("a", torch.ones(2))]), target)
        yield "a", torch.zeros(2)

    write_tensors(forms, first(), target)
    assert torch.equal(torch.load(target, weights_only=True)["a"], torch.zeros(2))
    assert list(tmp_path.iterdir()) == [target]


def test_export_as_gpt2_gives_the_same_logits_elsewhere(trained, tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "gpt2"
    checkpoint("export", trained.root / "run", "--to", "gpt2", "--out", folder)
    theirs = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float64).eval()
    ours, *_ = load_language_model(trained.root / "run")
    text = torch.randint(250, (3, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(text), theirs(text).logits, rtol=1e-10, atol=1e-10)
    again = checkpoint("export", trained.root / "run", "--to", "gpt2", "--out", folder, code=2)
    assert "exists" in again
    # A folder of a model in several files.
    (folder / "model.safetensors").rename(folder / "model.safetensors.index.json")
    for name in ("model.safetensors.index.json", "config.json"):
        with pytest.raises(ConfigError, match=f"{name} exists: give another --out"):
            export(str(trained.root / "run"), str(folder), [], [], None, to="gpt2")
        (folder / name).unlink()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--out", "{}/model.bin"], "end it with"),
        (["--out", "{}/there.pt"], "exists"),
        (["--out", "{}/model.pt", "--include", "nothing*"], "no tensor"),
    ],
)
def test_mistakes_in_export_are_one_line(trained, tmp_path, options, told):
    (tmp_path / "there.pt").touch()
    words = [option.format(tmp_path) for option in options]
    assert told in checkpoint("export", trained.root / "run", *words, code=2)


def test_a_folder_without_checkpoints_is_one_line(tmp_path):
    for action in ("list", "verify"):
        assert "no checkpoints" in checkpoint(action, tmp_path, code=2)


def test_the_folder_of_checkpoints_will_do_as_that_of_a_loop(trained, tmp_path):
    run, folder = trained.root / "run", trained.root / "run" / "checkpoints"
    assert "step-000000012.safetensors: sound" in checkpoint("verify", folder)
    assert checkpoint("verify", folder, "--all").count("sound") == 3
    assert checkpoint("diff", folder, run) == ""
    checkpoint("export", folder, "--out", tmp_path / "model.pt")
