"""Text from a model and a tokenizer that change blanks, and models that give no numbers."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch
from torch import nn

from hpc_train.checkpoint import Checkpoints
from hpc_train.checkpoint.policy import SavePolicy
from hpc_train.checkpoint.state import TrainingState
from hpc_train.cli.checkpoint import export
from hpc_train.collectives import connect
from hpc_train.data import tokenizer
from hpc_train.errors import ConfigError, UserError
from hpc_train.models.gpt.shape import GptShape
from hpc_train.mpi.group import Group
from hpc_train.training import generate as module
from hpc_train.training.generate import generate

WORDS = ["[UNK]", "[SEP]", "list", ":", "one", "##s", "don", "'", "t"]


class Scripted(nn.Module):
    """Writes given tokens, whatever stands before them."""

    def __init__(self, after, tokens):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.after, self.tokens = after, tokens

    def forward(self, context):
        written = context.shape[1] - self.after
        logits = torch.zeros(*context.shape, len(WORDS))
        logits[0, -1, self.tokens[written]] = 9.0
        return logits * self.scale


@pytest.fixture
def scripted(monkeypatch):
    """Makes `generate` use a tokenizer of words, and a model that writes given words."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    made = Tokenizer(models.WordPiece({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    joining = [decoders.Fuse(), decoders.Replace(" ' t", "'t")]
    made.decoder = decoders.Sequence([decoders.WordPiece(), *joining])
    codec = tokenizer.loads(made.to_str())
    shape = GptShape(layers=1, hidden=4, heads=1, vocab=len(WORDS), sequence=64)

    def use(after, *words):
        model = Scripted(after, [WORDS.index(word) for word in words])
        monkeypatch.setattr(module, "load_language_model", lambda checkpoint: (model, shape, codec))
        return model

    return use


def written(prompt, tokens, **how):
    return [*generate("run", prompt, tokens=tokens, temperature=0, **how)]


def test_a_tokenizer_that_changes_the_prompt_loses_no_text(scripted):
    scripted(2, "one", "##s", ":", "list")
    assert written("List   :", 4) == ["List   :", " one", "s", " :", " list"]
    scripted(1, "'", "t", "one")
    assert written("don", 3) == ["don", " '", "'t", " one"]  # "don '" has become "don't"


def test_an_empty_line_without_tokens_begins_a_text(scripted):
    scripted(1, "list", "one")
    assert "".join(written("\n", 2)) == "\n list one"
    with pytest.raises(ConfigError, match="makes no token of --prompt '  ': give other text"):
        written("  ", 2)
    with pytest.raises(ConfigError, match="--prompt is empty"):
        written("", 2)


@pytest.mark.parametrize("recorded", ["none", "bytes"])
def test_tokens_of_no_known_tokenizer_are_not_shown_as_bytes(tmp_path, recorded):
    shape = GptShape(layers=1, hidden=4, heads=1, vocab=65, sequence=8)
    about = {"kind": "gpt", "shape": asdict(shape), "dtype": "float32", "tokenizer": recorded}
    model = shape.build()
    saved = TrainingState(model, torch.optim.SGD(model.parameters()))
    policy = SavePolicy(engine="posix")
    folder = tmp_path / "checkpoints"
    identity = {"model.sequence": 8}
    Checkpoints(folder, connect(Group()), saved, policy, identity=identity, about=about).save(1)
    with pytest.raises(UserError, match="the tokenizer of the tokens is not known"):
        [*generate(tmp_path, "a", tokens=1)]
    export(str(tmp_path), str(tmp_path / "hf"), [], [], None, to="hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text(encoding="utf-8"))
    assert config["bos_token_id"] is config["eos_token_id"] is None


@pytest.mark.parametrize("temperature", [0, 1])
def test_numbers_that_are_not_finite_are_told(scripted, temperature):
    model = scripted(1, "one")
    model.scale.data.fill_(torch.nan)
    with pytest.raises(UserError, match="of run computes numbers that are not finite: give an old"):
        [*generate("run", "one", tokens=1, temperature=temperature)]
