from __future__ import annotations

import h5py
import pytest

from hpc_train.data.prepare.work import prepare_text
from hpc_train.data.tokenizer import loads


def test_a_text_is_encoded_whole_and_unpadded_whatever_the_file_says():
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "<pad>": 1}, []))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8, pad_id=1, pad_token="<pad>")
    codec = loads(tokenizer.to_str())
    assert codec.encode(b"a" * 20) == [0] * 20
    assert codec.encode(b"a") == [0]


def test_a_text_has_the_same_tokens_each_time_though_the_file_has_a_dropout():
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")], dropout=0.5)
    codec = loads(tokenizers.Tokenizer(model).to_str())
    assert codec.encode(b"ab" * 50) == [2] * 50


def test_a_template_puts_its_tokens_in_front_of_texts(tmp_path):
    """As Llama's does. Texts get them once, and prompts, too."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        special_tokens=["<|begin_of_text|>", "<|end_of_text|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator(["some words"], trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    codec = loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    assert list(codec.front) == [0]
    assert 0 not in codec.encode(b"some words")
    (tmp_path / "texts.jsonl").write_text('{"text": "some words"}\n' * 3, encoding="utf-8")
    words = [str(tmp_path / "texts.jsonl")]
    out = tmp_path / "data"
    prepare_text(words, out, tokenizer=str(tmp_path / "tokenizer.json"), validation=0)
    with h5py.File(out / "train-00000.h5") as file:
        tokens = file["tokens"][:].tolist()
    assert tokens == [0, *codec.encode(b"some words"), 1] * 3
