"""Masking: which tokens are chosen and what takes their place, counted."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from normstream.data import PackedTokens
from normstream.data.masking import MaskableBatch, MaskableTokens, MaskedDataConfig, Masking, load_masked, n_chosen

EOT, MASK = 7, 30


def batch_of(tokens: Tensor, fraction: float) -> MaskableBatch:
    candidates = tokens != EOT
    counts = torch.tensor([n_chosen(int(row.sum()), fraction) for row in candidates])
    return MaskableBatch(tokens, candidates, counts)


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(MASK, (400, 64), generator=torch.Generator().manual_seed(0))


def test_shares_and_places_of_the_chosen(tokens: Tensor):
    """Over 4000 draws each share is within four standard deviations, 4 sqrt(p (1 - p) / n)."""
    fraction = 0.15
    batch = batch_of(tokens, fraction)
    masked = Masking(EOT, MASK, fraction=fraction)(batch, torch.Generator().manual_seed(1))
    chosen = masked.targets_BK >= 0
    assert torch.equal(chosen.sum(1), batch.n_chosen_B)
    n = batch.n_targets
    assert abs(n / (tokens != EOT).sum() - fraction) < 0.01
    originals = tokens.gather(1, masked.places_BK)
    seen = masked.inputs_BT.gather(1, masked.places_BK)
    assert torch.equal(masked.targets_BK[chosen], originals[chosen])
    assert not (originals[chosen] == EOT).any()
    for found, share in (((seen == MASK), 0.8), ((seen == originals), 0.1 + 0.1 / 29)):
        assert abs(found[chosen].sum() / n - share) < 4 * (share * (1 - share) / n) ** 0.5
    other = seen[chosen & (seen != MASK) & (seen != originals)]
    assert set(other.tolist()) == set(range(MASK)) - {EOT}  # random tokens: every one of them, but never end-of-text
    assert len({tuple(row) for row in masked.places_BK[:, :9].sort(1).values.tolist()}) > 390


def test_nothing_else_changes(tokens: Tensor):
    batch = batch_of(tokens, 0.3)
    masked = Masking(EOT, MASK, fraction=0.3)(batch)
    untouched = torch.ones_like(tokens, dtype=torch.bool)
    rows = torch.arange(len(tokens))[:, None].expand_as(masked.places_BK)
    chosen = masked.targets_BK >= 0
    untouched[rows[chosen], masked.places_BK[chosen]] = False
    assert torch.equal(masked.inputs_BT[untouched], tokens[untouched])
    assert int((~untouched).sum()) == batch.n_targets  # no place twice


def test_every_token_is_equally_often_chosen():
    """The first and the last position too: 2 of 5 in 4000 draws, within four standard deviations."""
    batch = batch_of(torch.arange(5).expand(4000, 5), 0.4)
    masked = Masking(EOT, MASK, fraction=0.4)(batch, torch.Generator().manual_seed(0))
    counts = torch.bincount(masked.places_BK[masked.targets_BK >= 0], minlength=5)
    assert ((counts / 4000 - 0.4).abs() < 4 * (0.4 * 0.6 / 4000) ** 0.5).all()


def test_masks_are_new_each_time_and_the_same_from_the_same_seed(tokens: Tensor):
    batch, masking = batch_of(tokens, 0.15), Masking(EOT, MASK, fraction=0.15)
    torch.manual_seed(5)
    first, second = masking(batch), masking(batch)
    torch.manual_seed(5)
    again = masking(batch)
    assert torch.equal(first.inputs_BT, again.inputs_BT)
    assert not torch.equal(first.places_BK, second.places_BK)


@pytest.mark.parametrize(
    ("shares", "is_mask", "stays"), [((1.0, 0.0), 1.0, 0.0), ((0.0, 1.0), 0.0, 1 / 29), ((0.0, 0.0), 0.0, 1.0)]
)
def test_extreme_shares(shares: tuple[float, float], is_mask: float, stays: float, tokens: Tensor):
    masked = Masking(EOT, MASK, *shares, fraction=0.15)(batch_of(tokens, 0.15))
    chosen = masked.targets_BK >= 0
    seen = masked.inputs_BT.gather(1, masked.places_BK)[chosen]
    assert (seen == MASK).double().mean() == is_mask
    assert abs((seen == masked.targets_BK[chosen]).double().mean() - stays) <= 0.01 * (0 < stays < 1)


def test_samples_without_candidates_and_with_one():
    packed = PackedTokens(np.array([EOT, EOT, EOT, EOT, 3, EOT, 1, 2, 4]), seq_len=2, eot=EOT, n_bytes=3)
    batch = MaskableTokens(packed, 0.15).batch([0, 1, 2, 3])
    assert batch.n_chosen_B.tolist() == [0, 0, 1, 1]
    assert batch.documents_BT is not None
    masked = Masking(EOT, MASK, fraction=0.15)(batch)
    assert masked.targets_BK[:2].tolist() == [[-100], [-100]]
    assert masked.targets_BK[2].tolist() == [3]
    assert sum(part.n_targets for part in batch.split(4)) == batch.n_targets == 2


def test_samples_are_those_of_language_modelling():
    packed = PackedTokens(np.arange(21) % 6, seq_len=5, eot=EOT, n_bytes=21, positions_per_document=True)
    samples = MaskableTokens(packed, 0.2)
    batch = samples.batch([3, 0])
    assert (len(samples), samples.size, samples.tokens_per_sample) == (4, 21, 5)
    assert batch.tokens_BT.tolist() == [[3, 4, 5, 0, 1], [0, 1, 2, 3, 4]]
    assert batch.positions_BT is not None
    assert batch.to("cpu").n_chosen_B.tolist() == [1, 1]


def test_the_mask_is_one_more_token(tmp_path: Path):
    (tmp_path / "a.txt").write_text("to be or not to be " * 50)
    data = load_masked(MaskedDataConfig(source=str(tmp_path / "a.txt"), tokenizer="bpe:260", seq_len=8))
    assert data.masking.mask == data.tokenizer.vocab_size == data.vocab_size - 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_fraction": 0.0}, "mask_fraction must be above 0 and at most 1, got 0.0"),
        ({"masked_share": 0.9, "random_share": 0.2}, "not above 1 together, got 0.9 and 0.2"),
        ({"random_share": -0.1}, "masked_share and random_share must be at least 0"),
        ({"seq_len": 0}, "seq_len must be at least 1"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        MaskedDataConfig(**options)
