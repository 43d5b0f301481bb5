"""Packing against hand-built rows and, for random documents, against plain loops over tokens."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normstream.data import IGNORE, Batch, PackedTokens
from normstream.data.packing import pack

EOT = 9
DOCUMENTS = st.lists(st.lists(st.integers(0, 8), max_size=12), min_size=1, max_size=8)


def packed_of(documents: list[list[int]], seq_len: int, **options: bool) -> PackedTokens:
    tokens = pack([np.array(document, np.int64) for document in documents], vocab_size=10, eot=EOT)
    return PackedTokens(tokens, seq_len, EOT, n_bytes=sum(map(len, documents)), **options)


def test_hand_built_sample() -> None:
    packed = packed_of([[1, 2], [3], [4, 5, 6]], 4, positions_per_document=True)
    # 1 2 . 3 . 4 5 6 .   with . for end-of-text
    first, second = packed.sample(0), packed.sample(1)
    assert first.inputs_BT.tolist() == [[1, 2, 9, 3]]
    assert first.targets_BT.tolist() == [[2, 9, IGNORE, 9]]
    assert first.documents_BT is not None
    assert first.documents_BT.tolist() == [[0, 0, 0, 1]]
    assert first.positions_BT is not None
    assert first.positions_BT.tolist() == [[0, 1, 2, 0]]
    assert second.inputs_BT.tolist() == [[9, 4, 5, 6]]
    assert second.targets_BT.tolist() == [[IGNORE, 5, 6, 9]]
    assert second.documents_BT is not None
    assert second.documents_BT.tolist() == [[0, 1, 1, 1]]
    assert second.positions_BT is not None
    assert second.positions_BT.tolist() == [[0, 0, 1, 2]]


def test_attention_across_documents_keeps_every_target() -> None:
    batch = packed_of([[1, 2], [3], [4, 5, 6]], 4, cross_document_attention=True).sample(0)
    assert batch.targets_BT.tolist() == [[2, 9, 3, 9]]
    assert batch.documents_BT is None
    assert batch.positions_BT is None


@given(DOCUMENTS, st.integers(1, 6))
def test_packing_loses_nothing(documents: list[list[int]], seq_len: int) -> None:
    packed = packed_of(documents, seq_len, cross_document_attention=True)
    stream = [token for document in documents for token in [*document, EOT]]
    assert packed.tokens.tolist() == stream
    n_samples = 0
    while (n_samples + 1) * seq_len + 1 <= len(stream):
        n_samples += 1
    assert len(packed) == n_samples
    if n_samples:
        batch = packed.batch(range(n_samples))
        assert batch.inputs_BT.flatten().tolist() == stream[: n_samples * seq_len]
        assert batch.targets_BT.flatten().tolist() == stream[1 : n_samples * seq_len + 1]


@given(DOCUMENTS, st.integers(1, 6))
def test_documents_positions_and_ignored_targets(documents: list[list[int]], seq_len: int) -> None:
    packed = packed_of(documents, seq_len, positions_per_document=True)
    owner = [number for number, document in enumerate(documents) for _ in range(len(document) + 1)]
    for index in range(len(packed)):
        batch = packed.sample(index)
        assert batch.documents_BT is not None
        assert batch.positions_BT is not None
        owners = owner[index * seq_len : (index + 1) * seq_len + 1]
        for t in range(seq_len):
            ignored = batch.targets_BT[0, t].item() == IGNORE
            assert ignored == (owners[t] != owners[t + 1])
            assert batch.documents_BT[0, t].item() == owners[t] - owners[0]
            assert batch.positions_BT[0, t].item() == owners[:t].count(owners[t])


def test_batch_is_int64_contiguous_and_leaves_the_tokens_alone() -> None:
    packed = packed_of([[1, 2, 3], [4, 5]], 3, positions_per_document=True)
    before = packed.tokens.copy()
    batch = packed.batch([1, 0])
    for tensor in (batch.inputs_BT, batch.targets_BT, batch.documents_BT, batch.positions_BT):
        assert tensor is not None
        assert tensor.dtype == torch.int64
        assert tensor.shape == (2, 3)
        assert tensor.is_contiguous()
    batch.inputs_BT.zero_()
    assert (packed.tokens == before).all()


def test_to_moves_what_is_there() -> None:
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    moved = Batch(tokens, tokens, tokens).to("meta")
    assert moved.inputs_BT.device.type == moved.targets_BT.device.type == "meta"
    assert moved.documents_BT is not None
    assert moved.documents_BT.device.type == "meta"
    assert moved.positions_BT is None


@pytest.mark.parametrize("number", [-1, 2])
def test_sample_outside_is_an_error(number: int) -> None:
    with pytest.raises(IndexError, match=r"must lie in \[0, 2\)"):
        packed_of([[1, 2, 3, 4]], 2).sample(number)


def test_bytes_per_token_counts_end_of_text_as_a_token() -> None:
    assert packed_of([[1, 2, 3], [4]], 2).bytes_per_token == 4 / 6


@pytest.mark.parametrize(("vocab_size", "dtype"), [(257, "uint16"), (65536, "uint16"), (65537, "uint32")])
def test_smallest_type_that_holds_the_vocabulary(vocab_size: int, dtype: str) -> None:
    tokens = pack([np.array([vocab_size - 1])], vocab_size, eot=0)
    assert tokens.dtype == dtype
    assert tokens.tolist() == [vocab_size - 1, 0]
