"""Tokenizers: any text survives, training is deterministic, and the bytes of every token are counted right."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models

from normstream.data import ByteTokenizer, FileTokenizer, load_tokenizer, train_bpe
from normstream.data.tokenizer import bpe_size

TEXTS = [b"the cat sat on the mat, the cat sat", "naïve café, 日本語 <|endoftext|> text".encode()] * 3
BPE = train_bpe(TEXTS, 300)


def test_bytes_are_bytes() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("aé") == [0x61, 0xC3, 0xA9]
    assert tokenizer.decode([0x61, 0xC3, 0xA9, 256]) == "aé"
    assert tokenizer.decode([0xFF]) == "\ufffd"
    assert [tokens.tolist() for tokens in tokenizer.encode_documents([b"\xff\0", b""])] == [[255, 0], []]
    assert tokenizer.byte_lengths().tolist() == [1] * 256 + [0]
    assert tokenizer.to_json() is None


@given(st.text(max_size=40))
def test_bpe_keeps_any_text(text: str) -> None:
    ids = BPE.encode(text)
    assert BPE.decode(ids) == text
    assert int(BPE.byte_lengths()[ids].sum()) == len(text.encode())
    assert BPE.eot not in ids
    assert all(0 <= token < BPE.vocab_size for token in ids)


def test_bpe_of_nothing_is_the_bytes_and_end_of_text() -> None:
    tokenizer = train_bpe([], 300)
    assert tokenizer.vocab_size == 257
    assert len(tokenizer.encode("日")) == 3


def test_first_merge_is_the_most_frequent_pair() -> None:
    tokenizer = train_bpe([b"xy xy xy xz"], 258)  # one merge: x and y meet three times, every other pair less often
    assert len(tokenizer.encode("xy")) == 1
    assert len(tokenizer.encode("xz")) == 2


def test_bpe_training_is_deterministic() -> None:
    assert train_bpe(TEXTS, 300).to_json() == BPE.to_json()
    assert json.loads(BPE.to_json())["model"]["type"] == "BPE"


def test_end_of_text_inside_a_text_is_text() -> None:
    assert BPE.eot not in BPE.encode("<|endoftext|>")
    assert BPE.decode([*BPE.encode("a"), BPE.eot]) == "a"


def test_saved_tokenizer_gives_the_same_tokens(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(BPE.to_json(), "utf-8")
    loaded = load_tokenizer(str(path))
    assert (loaded.vocab_size, loaded.eot) == (BPE.vocab_size, BPE.eot)
    for ours, theirs in zip(BPE.encode_documents(TEXTS), loaded.encode_documents(TEXTS), strict=True):
        assert np.array_equal(ours, theirs)


def test_truncation_and_padding_of_a_file_are_switched_off() -> None:
    library = tokenizers.Tokenizer.from_str(BPE.to_json())
    library.enable_truncation(3)
    library.enable_padding(length=5)
    tokenizer = FileTokenizer(library, "file")
    assert [len(tokens) for tokens in tokenizer.encode_documents([b"q", b"qjqjqjqj"])] == [1, 8]


def test_wrong_utf8_warns_once_and_is_replaced() -> None:
    with pytest.warns(UserWarning, match="2 of 3 documents are not valid UTF-8") as caught:
        tokens = BPE.encode_documents([b"a\xff", b"b", b"\xfe"])
    assert len(caught) == 1
    assert [BPE.decode(document.tolist()) for document in tokens] == ["a\ufffd", "b", "\ufffd"]


def test_a_tokenizer_without_end_of_text() -> None:
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    with pytest.raises(ValueError, match=r"tokenizer words has no end-of-text token; looked for <\|endoftext\|>"):
        FileTokenizer(library, "words")


def test_other_names_of_end_of_text_and_gaps_in_the_ids() -> None:
    tokenizer = FileTokenizer(tokenizers.Tokenizer(models.WordLevel({"a": 0, "</s>": 7}, unk_token="a")), "words")
    assert (tokenizer.eot, tokenizer.vocab_size) == (7, 8)
    assert tokenizer.byte_lengths().tolist() == [1, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(("spec", "size"), [("bpe:257", 257), ("bpe:4096", 4096), ("bytes", 0), ("a/bpe:3.json", 0)])
def test_bpe_size(spec: str, size: int) -> None:
    assert bpe_size(spec) == size


@pytest.mark.parametrize("spec", ["bpe", "bpe:", "bpe:256", "bpe:-5", "bpe:4k"])
def test_bad_bpe_size(spec: str) -> None:
    with pytest.raises(ValueError, match="expected bpe:N with N at least 257"):
        bpe_size(spec)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("byets", "unknown tokenizer 'byets'; did you mean 'bytes'?"),
        ("bpee:4096", "unknown tokenizer 'bpee:4096'; "),
        ("nowhere/tokenizer.json", "no tokenizer file nowhere/tokenizer.json"),
    ],
)
def test_unknown_tokenizer(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        load_tokenizer(spec)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b"[1, 2"])
def test_unreadable_tokenizer_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"is not a readable tokenizer.json"):
        load_tokenizer(str(path))
