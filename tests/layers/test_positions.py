"""Rotary positions as complex rotations, partial and interleaved; ALiBi's slopes; masks with windows."""

import math

import pytest
import torch

from normstream.layers import PositionConfig
from normstream.layers.masks import alibi_mask, attention_mask
from normstream.layers.positions import alibi_slopes, rope_table, rotate

CPU = torch.device("cpu")


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("rotated", [8, 4])
def test_rotation_is_a_complex_product(pairing, rotated):
    x = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    positions = torch.tensor([[4, 5, 6, 0, 9]])
    got = rotate(x, rope_table(positions, rotated, 100.0, torch.float64, pairing))
    for j in range(rotated // 2):
        a, b = (j, j + rotated // 2) if pairing == "half" else (2 * j, 2 * j + 1)
        angle = positions[0].double() * 100.0 ** (-2 * j / rotated)
        turned = torch.complex(x[..., a], x[..., b]) * torch.polar(torch.ones_like(angle), angle)
        torch.testing.assert_close(got[..., a], turned.real, rtol=0, atol=1e-12)
        torch.testing.assert_close(got[..., b], turned.imag, rtol=0, atol=1e-12)
    assert torch.equal(got[..., rotated:], x[..., rotated:])


def test_without_a_table_nothing_turns():
    x = torch.randn(1, 1, 2, 4)
    assert rotate(x, None) is x


@pytest.mark.parametrize("n_heads", [1, 2, 3, 6, 8, 12, 16, 20])
def test_slopes_are_those_of_bloom(n_heads):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    official = build_alibi_tensor(torch.ones(1, 2), n_heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(torch.tensor(alibi_slopes(n_heads)), official, rtol=1e-6, atol=0)


def test_slopes_of_the_paper():
    """Press et al.: 8 heads have 1/2, 1/4 ... 1/256; 12 heads add every second of 1/sqrt(2), 1/2, ..."""
    assert alibi_slopes(8) == [2.0**-h for h in range(1, 9)]
    assert alibi_slopes(12)[8:] == pytest.approx([2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])


def by_hand(n_queries, n_keys, allowed):
    first = n_keys - n_queries
    return [[allowed(first + t, s) for s in range(n_keys)] for t in range(n_queries)]


@pytest.mark.parametrize("window", [1, 2, 4, 7])
@pytest.mark.parametrize(("n_queries", "n_keys"), [(6, 6), (2, 6), (1, 6)])
def test_windows(window, n_queries, n_keys):
    mask = attention_mask(None, n_queries, n_keys, CPU, window=window)
    expected = by_hand(n_queries, n_keys, lambda t, s: t - window < s <= t)
    if mask is None:
        assert window == 7
        assert n_queries == n_keys
    else:
        assert mask[0, 0].tolist() == expected


def test_windows_and_documents_of_an_encoder():
    documents = torch.tensor([[0, 0, 0, 0, 1, 1]])
    mask = attention_mask(documents, 6, 6, CPU, causal=False, window=3)
    assert mask is not None
    ids = documents[0].tolist()
    assert mask[0, 0].tolist() == by_hand(6, 6, lambda t, s: abs(t - s) < 3 and ids[t] == ids[s])
    assert attention_mask(None, 6, 6, CPU, causal=False) is None


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("n_queries", [5, 2])
def test_alibi_falls_with_distance(causal, n_queries):
    mask = attention_mask(None, n_queries, 5, CPU, causal=causal)
    bias = alibi_mask(mask, 4, n_queries, 5, CPU, torch.float64, causal=causal)
    for h, slope in enumerate([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]):
        expected = by_hand(n_queries, 5, lambda t, s, k=slope: -k * abs(t - s) if s <= t or not causal else -math.inf)
        assert bias[0, h].tolist() == expected


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"theta": 0.0}, ["positions.theta", "0"]),
        ({"local_theta": -1.0}, ["positions.local_theta", "-1"]),
        ({"fraction": 0.0}, ["positions.fraction", "0"]),
        ({"fraction": 1.5}, ["positions.fraction", "1.5"]),
    ],
)
def test_wrong_positions(wrong, words):
    with pytest.raises(ValueError, match=r".+") as error:
        PositionConfig(**wrong)
    assert all(word in str(error.value) for word in words)
