"""A learned factor for each channel: what it starts at, what it multiplies, how it is kept."""

import math

import pytest
import torch

from normstream.layers.learned_scale import LearnedScale


def test_factor_and_storage():
    """nGPT's s_v of width 16: 4 at the start, kept as 1."""
    scale, x = LearnedScale(3, start=4.0, unit=4.0).double(), torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64)
    assert scale.weight.tolist() == [1.0] * 3
    assert scale(x).tolist() == [[4.0, -8.0, 2.0]]
    scale.weight.data[1] = 0.5
    assert scale(x).tolist() == [[4.0, -4.0, 2.0]]


@pytest.mark.parametrize("unit", [1.0, math.sqrt(64)])
def test_a_step_of_the_weight_moves_the_factor_by_the_unit(unit):
    scale = LearnedScale(2, start=1.0, unit=unit).double()
    scale(torch.ones(2, dtype=torch.float64)).sum().backward()
    assert scale.weight.grad is not None
    assert scale.weight.grad.tolist() == pytest.approx([unit] * 2)
