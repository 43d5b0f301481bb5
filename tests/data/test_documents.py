"""The split rule: by key alone, the same everywhere, never empty."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normstream.data.documents import Document, hash_documents, held_out, split_documents, split_score


def test_split_score_is_the_head_of_sha256() -> None:
    # FIPS 180-4's example: SHA-256("abc") = ba7816bf 8f01cfea 414140de ...
    assert split_score("abc") == 0xBA7816BF8F01CFEA / 2**64


@given(st.sets(st.text(max_size=8), min_size=2, max_size=30), st.floats(0.01, 0.99))
def test_the_side_of_a_document_does_not_depend_on_the_others(keys: set[str], fraction: float) -> None:
    documents = [Document(key, b"x") for key in sorted(keys)]
    train, validation = split_documents(documents, fraction)
    assert {d.key for d in train} | {d.key for d in validation} == keys
    assert len(train) + len(validation) == len(keys)
    below = {key for key in keys if int(hashlib.sha256(key.encode()).hexdigest()[:16], 16) / 2**64 < fraction}
    if below:
        assert {d.key for d in validation} == below
    else:
        assert len(validation) == 1


def test_lowest_score_is_held_out_when_none_is_below_the_fraction() -> None:
    keys = [f"file{i}.txt" for i in range(10)]
    assert held_out(keys, 1e-12) == {min(keys, key=lambda key: hashlib.sha256(key.encode()).digest())}


def test_documents_of_one_key_stay_together_in_order() -> None:
    documents = [Document(key, version) for version in (b"v1", b"v2") for key in ("Acts", "Ruth", "Mark", "Luke")]
    train, validation = split_documents(documents, 0.3)
    assert not {d.key for d in train} & {d.key for d in validation}
    assert [d for d in documents if d in validation] == validation
    assert len(train) + len(validation) == 8


def test_single_document_is_cut_between_characters() -> None:
    text = "ééééé"  # 2 bytes each: 60 % of 10 bytes is a border of characters, 50 % is not
    for fraction, head in ((0.4, 6), (0.5, 4), (0.3, 6)):
        (train,), (validation,) = split_documents([Document("a", text.encode())], fraction)
        assert len(train.data) == head
        assert train.data.decode() + validation.data.decode() == text


def test_single_document_of_no_valid_utf8_is_still_cut() -> None:
    (train,), (validation,) = split_documents([Document("a", b"\x80" * 10)], 0.2)
    assert train.data + validation.data == b"\x80" * 10


@pytest.mark.parametrize(
    "other",
    [
        ([Document("a", b"xy")], [Document("b", b"")]),
        ([Document("a", b"x"), Document("b", b"y")], []),
        ([Document("ax", b"")], [Document("b", b"y")]),
        ([Document("b", b"y")], [Document("a", b"x")]),
    ],
)
def test_corpus_hash_differs_with_text_keys_and_sides(other: tuple[list[Document], list[Document]]) -> None:
    corpus = ([Document("a", b"x")], [Document("b", b"y")])
    assert hash_documents(*corpus) == hash_documents(*corpus)
    assert hash_documents(*corpus) != hash_documents(*other)


def test_hash_of_nothing_is_that_of_the_empty_message() -> None:
    assert hash_documents([], []) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
