"""Keel: constants, exceptions in the first block, options."""

from typing import Any

import pytest
import torch
from torch import nn

from normstream import placements
from normstream.norms import NormConfig


def rms(x: torch.Tensor) -> torch.Tensor:
    return x / x.square().mean(-1, keepdim=True).sqrt()


@pytest.mark.parametrize(
    ("options", "alphas"),
    [
        ("", [None, 1, 6, 6, 6, 6]),  # alpha is the number of sublayers; the first attention is Pre-Norm
        ("alpha=2.5", [None, 1, 2.5, 2.5, 2.5, 2.5]),
        ("first_block=none", [6] * 6),
        ("alpha=1,first_block=none", [1] * 6),
    ],
)
def test_every_stream_by_hand(options, alphas, run_row):
    row = nn.ModuleList(placements.get(f"keel({options})").junctions(dim=4, n_layers=3, norm=NormConfig(eps=0.0)))
    embedding, *updates = torch.randn(7, 2, 3, 4, dtype=torch.float64)
    states, inputs = run_row(row.double(), embedding, [lambda z, o=o: o for o in updates])
    x = embedding
    for i, ((got,), z) in enumerate(zip(states, inputs, strict=True)):
        if i > 0:
            alpha = alphas[i - 1]
            x = x + updates[i - 1] if alpha is None else rms(alpha * x + updates[i - 1])
        torch.testing.assert_close(got, x)
        torch.testing.assert_close(z, x if i == 6 else rms(x))


def test_exceptions_belong_to_the_first_block_of_the_model():
    row: Any = placements.get("post:0,keel:1-").junctions(dim=4, n_layers=3)
    assert [getattr(junction.join, "alpha", None) for junction in row] == [None, None, None, 6.0, 6.0, 6.0, 6.0]


def test_alpha_is_a_number_or_a_word():
    assert placements.get("keel(alpha=sublayers)") == placements.get("keel")
    assert placements.get("keel(alpha=24)") == placements.get("keel(alpha=24.0)")
    assert str(placements.get("keel(alpha=24)")) == "keel(alpha=24.0)"
    with pytest.raises(ValueError, match="must be a number or sublayers, got 'layers'"):
        placements.get("keel(alpha=layers)")


@pytest.mark.parametrize("alpha", ["0", "-1", "inf", "nan"])
def test_alpha_must_be_positive(alpha):
    with pytest.raises(ValueError, match="positive number"):
        placements.get(f"keel(alpha={alpha})")


def test_share_of_the_residual_tends_to_one():
    """The paper's limit: the product of alpha / sqrt(alpha^2 + 1) over K sublayers tends to 1 for alpha = K."""
    shares = []
    for n_layers in (32, 512):
        row: Any = placements.get("keel(first_block=none)").junctions(dim=1, n_layers=n_layers)
        alphas = torch.tensor([junction.join.alpha for junction in row[1:]], dtype=torch.float64)
        shares.append((alphas / (alphas**2 + 1).sqrt()).prod().item())
    assert shares == pytest.approx([(1 + 1 / 64**2) ** -32, (1 + 1 / 1024**2) ** -512])
    assert shares[1] == pytest.approx(1, abs=5e-4)
