"""The formulas against numbers worked out by hand or stated in the papers."""

import math

import pytest
import torch

from normstream.lab.theory.predictions import (
    ffn_growth,
    last_gradient_ratio,
    pre_norm_bounds,
    pre_norm_growth,
    siamese_cosine,
    update_bound,
)
from normstream.placements import Stack
from normstream.placements.deepnorm import alpha, beta


def test_the_feed_forward_of_the_paper_adds_a_half() -> None:
    assert ffn_growth(1) == 0.5
    assert ffn_growth(2) == pytest.approx(4 / 9)
    assert ffn_growth(4) == pytest.approx(8 / 25)


@pytest.mark.parametrize(("layer", "low", "high"), [(0, 1, 1), (1, 1.5, 2.5), (12, 7, 19), (48, 25, 73)])
def test_bounds_of_lemma_2(layer: int, low: float, high: float) -> None:
    assert pre_norm_bounds(layer, 0.5) == (low, high)


def test_one_token_grows_by_three_halves_a_block() -> None:
    assert pre_norm_growth(24, 1, 0.5) == pytest.approx([1 + 1.5 * layer for layer in range(25)])
    assert pre_norm_growth(24, 1, ffn_growth(4))[-1] == pytest.approx(1 + 1.32 * 24)


@pytest.mark.parametrize(("tokens", "slope"), [(1, 1.52), (2, 1.32), (8, 1.10), (128, 1.00)])
def test_growth_by_tokens_is_what_was_measured_at_width_512(tokens: int, slope: float) -> None:
    assert (pre_norm_growth(12, tokens, 0.5)[-1] - 1) / 12 == pytest.approx(slope, rel=0.04)


@pytest.mark.parametrize("tokens", [1, 2, 32, 1000])
def test_growth_lies_between_the_bounds(tokens: int) -> None:
    for layer, square in enumerate(pre_norm_growth(48, tokens, 0.5)):
        low, high = pre_norm_bounds(layer, 0.5)
        assert low <= square <= high + 1e-9


@pytest.mark.parametrize(("square", "ratio"), [(1.5, 1.0), (6, 0.5), (24, 0.25)])
def test_last_gradient_ratio(square: float, ratio: float) -> None:
    assert last_gradient_ratio(square, 0.5) == pytest.approx(ratio)


@pytest.mark.parametrize("n_layers", [1, 6, 100, 1000])
def test_deepnorm_constants_bound_the_update_by_one(n_layers: int) -> None:
    assert update_bound(n_layers, alpha(Stack(), n_layers), beta(Stack(), n_layers)) == pytest.approx(1, abs=1e-12)
    assert update_bound(n_layers, 1.0, 1.0) == 4 * n_layers


def test_without_a_constant_the_cosine_is_a_geometric_series() -> None:
    """x = N(x + o) halves every square: x = sum_j 2^(-j/2) o_j, newest first, against y = sum of all."""
    sublayers = 32
    weights = [2 ** (-j / 2) for j in range(1, sublayers + 1)] + [2 ** (-sublayers / 2)]
    expected = sum(weights) / math.sqrt(sublayers + 1) / math.sqrt(sum(w * w for w in weights))
    assert siamese_cosine([1.0] * sublayers) == pytest.approx(expected, abs=1e-12)
    assert expected == pytest.approx(1 / (math.sqrt(2) - 1) / math.sqrt(33), abs=1e-4)


def test_cosine_in_coordinates_is_that_of_orthogonal_vectors() -> None:
    scales = [0.9, 0.3, 0.7]
    vectors = torch.eye(4, dtype=torch.float64)
    x = y = vectors[0]
    for scale, o in zip(scales, vectors[1:], strict=True):
        x, y = x + scale * o, y + o
        x = x / x.norm()
    assert siamese_cosine(scales) == pytest.approx((x @ y / y.norm()).item(), abs=1e-12)
