from __future__ import annotations

import pytest

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
