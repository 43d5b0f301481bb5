"""Fréchet distance between two sets of images, in the features of a classifier.

Shape suffixes: N images, F features.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def frechet_distance(one_NF: Float[Tensor, "N F"], other_MF: Float[Tensor, "M F"]) -> float:
    """``|m - m'|^2 + tr(S + S' - 2 (S S')^(1/2))`` of the means m and the covariances S of two sets of features.

    In float64, with the unbiased covariance; the trace of the root is the sum of the roots of the eigenvalues of
    ``S^(1/2) S' S^(1/2)``.

    It is called FID where the features are those of one Inception network; with others it is another number.

    Raises:
        ValueError: for fewer than two images, other widths, or features that are not finite.

    Source: Heusel et al. 2017, arXiv 1706.08500.

    >>> frechet_distance(torch.tensor([[0.0], [2.0]]), torch.tensor([[3.0], [5.0]]))
    9.0
    """
    sets = one_NF.double(), other_MF.double()
    for features in sets:
        if len(features) < 2 or features.shape[1] != one_NF.shape[1]:
            raise ValueError(
                "the distance needs at least 2 rows of features of one width, "
                f"got {tuple(one_NF.shape)} and {tuple(other_MF.shape)}"
            )
        if not features.isfinite().all():
            raise ValueError("features that are not finite have no Fréchet distance; look at the images")
    (mean, covariance), (mean_2, covariance_2) = ((x.mean(0), torch.atleast_2d(x.T.cov())) for x in sets)
    return frechet_of_gaussians(mean, covariance, mean_2, covariance_2)


def frechet_of_gaussians(mean: Tensor, covariance: Tensor, mean_2: Tensor, covariance_2: Tensor) -> float:
    """The same for two normal distributions, given by means (F,) and covariances (F, F) in float64.

    >>> one = torch.eye(2, dtype=torch.float64)
    >>> frechet_of_gaussians(one[0], one, one[0], 4 * one)
    2.0
    """
    root = _root(covariance)
    shared = torch.linalg.eigvalsh(root @ covariance_2 @ root).clamp(min=0).sqrt().sum()
    distance = (mean - mean_2).square().sum() + covariance.trace() + covariance_2.trace() - 2 * shared
    return max(0.0, distance.item())


def _root(matrix: Tensor) -> Tensor:
    """The symmetric root of a matrix without negative eigenvalues."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.clamp(min=0).sqrt() @ vectors.T
