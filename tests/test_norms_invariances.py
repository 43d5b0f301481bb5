"""What norms do not see: table 1 of Ba et al. 2016, with the row that Zhang and Sennrich 2019 add for RMSNorm.

A layer computes a = W x for a set of cases x, and the norm acts on a. Each change of W or of the cases either leaves
the normed values alone or does not, and both are tested.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from normstream.norms import NormConfig

Norm = Callable[[Tensor], Tensor]
N_CASES, N_IN, N_UNITS = 12, 7, 5


def library(kind: str, scope: str = "token") -> Norm:
    return NormConfig(kind=kind, eps=0.0, scope=scope).build(N_UNITS).double()  # pyright: ignore[reportArgumentType]


NORMS: dict[str, Norm] = {
    "batch": nn.BatchNorm1d(N_UNITS, eps=1e-15, affine=False).double().train(),  # torch's; the library has none
    "layer": library("layer"),
    "rms": library("rms"),
    "pb_relax": library("pb_relax"),
    "pb_relax tensor": library("pb_relax", "tensor"),
    "scale": library("scale"),
    "dyt": library("dyt"),
    "derf": library("derf"),
}
CHANGES: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "weight matrix re-scaling": lambda w, x: (3.0 * w, x),
    "weight matrix re-centring": lambda w, x: (w + torch.linspace(-1, 2, N_IN).double(), x),
    "weight vector re-scaling": lambda w, x: (torch.tensor([1.0, 1, 4, 1, 1]).double()[:, None] * w, x),
    "data re-scaling": lambda w, x: (w, 3.0 * x),
    "data re-centring": lambda w, x: (w, x + torch.linspace(-2, 1, N_IN).double()),
    "single case re-scaling": lambda w, x: (w, torch.cat((5.0 * x[:1], x[1:]))),
}
LAYER = (True, True, False, True, False, True)
RMS = (True, False, False, True, False, True)
INVARIANT = {
    "batch": (True, False, True, True, True, False),
    "layer": LAYER,
    "rms": RMS,
    "pb_relax": LAYER,
    "pb_relax tensor": LAYER,
    "scale": RMS,
    "dyt": (False,) * 6,
    "derf": (False,) * 6,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("norm", NORMS)
def test_invariance(norm, change):
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(N_UNITS, N_IN, generator=generator, dtype=torch.float64)
    x = torch.randn(N_CASES, N_IN, generator=generator, dtype=torch.float64)
    changed_w, changed_x = CHANGES[change](w, x)
    difference = (NORMS[norm](x @ w.T) - NORMS[norm](changed_x @ changed_w.T)).abs().max().item()
    if INVARIANT[norm][list(CHANGES).index(change)]:
        assert difference < 1e-12
    else:
        assert difference > 0.05


@pytest.mark.parametrize("kind", ["layer", "rms", "scale", "pb_relax"])
def test_whole_inputs(kind):
    """Layer norm sees neither size nor mean of its input, RMSNorm and ScaleNorm see the mean; all are odd."""
    norm = library(kind)
    a = torch.randn(4, N_UNITS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(norm(7 * a), norm(a), rtol=0, atol=1e-12)
    torch.testing.assert_close(norm(-a), -norm(a), rtol=0, atol=1e-12)
    shift = (norm(a + 2) - norm(a)).abs().max().item()
    assert shift < 1e-12 if kind in ("layer", "pb_relax") else shift > 0.1


@pytest.mark.parametrize(("size", "figure"), [(1.0, 5e-6), (0.1, 5e-4), (0.01, 0.049), (0.001, 0.71)])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_eps_ends_the_invariance_for_small_inputs(kind, size, figure):
    """eps 1e-5 at width 1024: the answer is smaller than without eps by 1 - 1 / sqrt(1 + eps / variance)."""
    x = size * torch.randn(1024, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with_eps, without = (NormConfig(kind=kind, eps=eps).build(1024).double()(x) for eps in (1e-5, 0.0))
    lost = ((without - with_eps).norm() / without.norm()).item()
    variance = (x - x.mean() if kind == "layer" else x).pow(2).mean().item()
    assert lost == pytest.approx(1 - 1 / math.sqrt(1 + 1e-5 / variance), rel=1e-8)
    assert lost == pytest.approx(figure, rel=0.1)
