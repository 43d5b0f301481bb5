"""Branches side by side: the sum of what each makes of one input."""

from typing import Any

import torch
from torch import Tensor, nn

from normstream.layers import Context, FeedForward, Parallel
from normstream.norms import RMSNorm


class Branch(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, z: Tensor, context: Context) -> Tensor:
        return self.factor * z.square()


def test_without_norms_both_read_z():
    z = torch.randn(2, 3, 4, dtype=torch.float64)
    got = Parallel({"attention": Branch(2.0), "feed_forward": Branch(-0.5)})(z, Context())
    torch.testing.assert_close(got, 1.5 * z.square())


def test_each_branch_has_its_norm():
    norms: Any = {kind: RMSNorm(4, eps=1e-5).double() for kind in ("attention", "feed_forward")}
    norms["attention"].weight.data.fill_(3.0)
    parallel = Parallel({"attention": Branch(1.0), "feed_forward": Branch(1.0)}, norms)
    assert [name for name, _ in parallel.named_parameters()] == ["attention_norm.weight", "feed_forward_norm.weight"]
    z = torch.randn(2, 3, 4, dtype=torch.float64)
    unit = z / torch.sqrt(z.square().mean(-1, keepdim=True) + 1e-5)
    torch.testing.assert_close(parallel(z, Context()), 10 * unit.square())


def test_branches_are_modules_under_their_kinds():
    ffn = FeedForward(4, ffn_dim=8, activation="gelu")
    assert Parallel({"attention": Branch(1.0), "feed_forward": ffn}).get_submodule("feed_forward") is ffn
