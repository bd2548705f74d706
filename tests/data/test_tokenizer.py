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
