"""GeoNorm: lengths, angles, limits, against plane geometry."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from normstream import placements
from normstream.junctions import Drop, GeoNormJoin


def length(x: torch.Tensor) -> torch.Tensor:
    return x.norm(dim=-1)


@pytest.mark.parametrize("decay", ["harmonic", "sqrt", "linear"])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_length_never_changes(decay, size, run_row):
    row = nn.ModuleList(placements.get(f"geo_norm(decay={decay},embedding_norm=false)").junctions(dim=16, n_layers=12))
    embedding = torch.randn(2, 5, 16, dtype=torch.float64)
    updates = size * torch.randn(24, 2, 5, 16, dtype=torch.float64)
    states, inputs = run_row(row, embedding, [lambda z, o=o: o for o in updates])
    for (x,), z in zip(states, inputs, strict=True):
        assert z is x
        torch.testing.assert_close(length(x), length(embedding), rtol=1e-14, atol=0)
    assert (states[-1][0] - embedding).abs().max() > 1e-4


def test_length_survives_an_update_along_x():
    """An update of 1e6 x has a part at right angles of nothing but rounding; its direction must still be tangent."""
    x = torch.randn(1, 4, 16)
    join = GeoNormJoin(1.0, math.pi / 4, Drop())
    (moved,) = join((x,), 1e6 * x + 1e-2 * torch.randn(1, 4, 16))
    torch.testing.assert_close(length(moved), length(x), rtol=1e-6, atol=0)


def test_angle_in_the_plane():
    """x = (2, 0), o = (7, 1): the part at right angles is (0, 1), so the angle is 1/2, halved by the decay."""
    x, o = torch.tensor([[2.0, 0.0]], dtype=torch.float64), torch.tensor([[7.0, 1.0]], dtype=torch.float64)
    (moved,) = GeoNormJoin(0.5, math.pi / 4, Drop())((x,), o)
    wanted = 2 * torch.tensor([[math.cos(0.25), math.sin(0.25)]], dtype=torch.float64)
    torch.testing.assert_close(moved, wanted)


def test_angle_is_bounded_before_the_decay():
    x, o = torch.tensor([[2.0, 0.0]], dtype=torch.float64), torch.tensor([[0.0, -100.0]], dtype=torch.float64)
    (moved,) = GeoNormJoin(0.5, math.pi / 4, Drop())((x,), o)
    angle = math.pi / 8
    wanted = 2 * torch.tensor([[math.cos(angle), -math.sin(angle)]], dtype=torch.float64)
    torch.testing.assert_close(moved, wanted)


def test_small_angles_are_the_projected_residual():
    """theta -> 0: x + v up to second order, v the update's part at right angles to x."""
    x, direction = torch.randn(2, 1, 8, dtype=torch.float64)
    for size in (1e-2, 1e-4):
        o = size * direction
        (moved,) = GeoNormJoin(1.0, math.pi / 4, Drop())((x,), o)
        v = o - (x * o).sum(-1, keepdim=True) / (x * x).sum(-1, keepdim=True) * x
        assert (moved - (x + v)).abs().max() < 2 * size**2


def test_special_rows_and_their_gradients():
    """Zero streams (padding) take the update itself; updates along x and zero updates leave x as it is."""
    x = torch.tensor([[0.0, 0.0], [3.0, 4.0], [3.0, 4.0]], requires_grad=True)
    o = torch.tensor([[1.0, 2.0], [0.0, 0.0], [6.0, 8.0]], requires_grad=True)
    (moved,) = GeoNormJoin(0.5, math.pi / 4, Drop())((x,), o)
    torch.testing.assert_close(moved, torch.tensor([[1.0, 2.0], [3.0, 4.0], [3.0, 4.0]]))
    moved.sum().backward()
    assert x.grad is not None
    assert o.grad is not None
    assert x.grad.isfinite().all()
    assert o.grad.isfinite().all()
    torch.testing.assert_close(o.grad[1], 0.5 * (torch.ones(2) - 7 / 25 * torch.tensor([3.0, 4.0])))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_streams_keep_their_dtype_and_length(dtype, run_row):
    row = nn.ModuleList(placements.get("geo_norm(embedding_norm=false)").junctions(dim=64, n_layers=6))
    embedding = 100 * torch.randn(1, 3, 64).to(dtype)
    states, _ = run_row(row, embedding, [lambda z: 1000 * torch.randn(1, 3, 64).to(dtype)] * 12)
    assert states[-1][0].dtype == dtype
    rounding = 12 * torch.finfo(dtype).eps
    torch.testing.assert_close(length(states[-1][0].double()), length(embedding.double()), rtol=rounding, atol=0)


@pytest.mark.parametrize(
    ("kind", "factors"), [("harmonic", [1, 1 / 2, 1 / 3, 1 / 4]), ("sqrt", [1, 2**-0.5, 3**-0.5, 0.5]),
                          ("linear", [1, 0.75, 0.5, 0.25])]
)  # fmt: skip
def test_decay_by_block(kind, factors):
    row = placements.get(f"geo_norm(decay={kind})").junctions(dim=2, n_layers=4)
    got = [getattr(junction.join, "decay", None) for junction in row[1:]]
    assert got == pytest.approx([factor for factor in factors for _ in range(2)])


def test_defaults_are_those_of_the_port():
    """Angles up to pi/4, divided by the block."""
    row: Any = placements.get("geo_norm").junctions(dim=2, n_layers=3)
    assert [(junction.join.max_angle, junction.join.decay) for junction in row[2::2]] == [
        (math.pi / 4, pytest.approx(1 / block)) for block in (1, 2, 3)
    ]


@pytest.mark.parametrize("angle", ["0", "1.6", "nan"])
def test_angle_beyond_a_right_one(angle):
    with pytest.raises(ValueError, match="max_angle"):
        placements.get(f"geo_norm(max_angle={angle})")
