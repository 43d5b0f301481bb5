"""The Fréchet distance against closed forms and the eigenvalues of another matrix."""

import pytest
import torch

from normstream.diffusion import frechet_distance
from normstream.diffusion.fid import frechet_of_gaussians


def float64(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_identical_sets():
    features = float64(50, 6)
    assert frechet_distance(features, features.clone()) == pytest.approx(0, abs=1e-10)
    few = float64(3, 6)  # a singular covariance
    assert frechet_distance(few, few) == pytest.approx(0, abs=1e-6)


def test_a_shift_is_its_squared_length():
    features, shift = float64(50, 3), torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    assert frechet_distance(features, features + shift) == pytest.approx(5.25, abs=1e-9)


def test_a_scale_of_centred_features():
    """S' = k^2 S: the distance is (k - 1)^2 tr S."""
    features = float64(50, 4)
    features = features - features.mean(0)
    trace = (features.square().sum() / 49).item()
    assert frechet_distance(features, 3 * features) == pytest.approx(4 * trace, rel=1e-9)


def test_diagonal_gaussians():
    """Commuting covariances: sum of (sqrt a - sqrt b)^2."""
    a, b = torch.tensor([1.0, 4.0, 0.0], dtype=torch.float64), torch.tensor([9.0, 1.0, 2.0], dtype=torch.float64)
    zero = torch.zeros(3, dtype=torch.float64)
    wanted = (a.sqrt() - b.sqrt()).square().sum().item()
    assert frechet_of_gaussians(zero, a.diag(), zero, b.diag()) == pytest.approx(wanted, abs=1e-12)


def test_any_covariances():
    """Against the eigenvalues of the product S S', which needs no root of a matrix; and it is symmetric."""
    factors = float64(2, 5, 5)
    one, other = factors[0] @ factors[0].T, factors[1] @ factors[1].T
    mean, mean_2 = float64(2, 5, seed=1)
    shared = torch.linalg.eigvals(one @ other).real.clamp(min=0).sqrt().sum()
    wanted = ((mean - mean_2).square().sum() + one.trace() + other.trace() - 2 * shared).item()
    assert frechet_of_gaussians(mean, one, mean_2, other) == pytest.approx(wanted, rel=1e-9)
    assert frechet_of_gaussians(mean_2, other, mean, one) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (torch.zeros(1, 3), torch.zeros(4, 3), "at least 2 rows"),
        (torch.full((4, 3), torch.nan), torch.zeros(4, 3), "not finite"),
    ],
)
def test_features_that_have_no_distance(one, other, message):
    with pytest.raises(ValueError, match=message):
        frechet_distance(one, other)
