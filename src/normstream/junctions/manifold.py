"""Manifold-constrained Hyper-Connections (mHC): what is read and written is positive, what mixes conserves.

    z = N_in(sum_s p_s H_s)      H_t <- sum_s R[s, t] H_s + b_t o
    p = sigmoid(...)             R = Sinkhorn(...), doubly stochastic             b = 2 sigmoid(...)

Shape suffixes: B batch, T sequence, N streams, D width, M = 1 + N columns of logits (p, then R).
"""

from typing import Any

import torch
from torch import Tensor, nn

from normstream.junctions.hyper_connections import Mix
from normstream.norms import RMSNorm


def sinkhorn(logits_NN: Tensor, n_iterations: int, *, last: int) -> Tensor:
    """exp(logits), scaled alternately so that rows and columns sum to 1: nearly doubly stochastic.

    Only the sums over the axis ``last`` (-1 or -2) are 1 to rounding; the others approach it with ``n_iterations``.

    Source: Sinkhorn and Knopp 1967.

    >>> sinkhorn(torch.zeros(2, 2), 1, last=-1)
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]])
    """
    # The two small axes come first: sums over them then run along whole vectors, several times as fast.
    matrix = logits_NN.movedim((-2, -1), (0, 1)).contiguous()
    first, last = (0, 1) if last == -1 else (1, 0)
    matrix = (matrix - matrix.amax(first, keepdim=True).detach()).exp()
    for _ in range(n_iterations):
        matrix = matrix / matrix.sum(first, keepdim=True)
        matrix = matrix / matrix.sum(last, keepdim=True)
    return _ContiguousGradient.apply(matrix).movedim((0, 1), (-2, -1))


class _ContiguousGradient(torch.autograd.Function):
    """The identity; its gradient comes back laid out as the forward pass is, for the same speed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient.contiguous()


class ManifoldMix(Mix):
    """``logits = static + a x W`` with x from the streams; p and b through sigmoids, R through ``sinkhorn``.

    W starts at 0 and each scalar a at 0.01. The subclasses say what x is, how the static part starts and which axis
    is scaled last.

    Args:
        n_streams, home: as in ``Mix``.
        norm: the norm that makes x.
        width: width of x.
        rows: N where one x serves all streams, 1 where each stream has its own.
        n_iterations: of ``sinkhorn``.
    """

    last: int

    def __init__(self, n_streams: int, home: int, norm: nn.Module, width: int, rows: int, n_iterations: int) -> None:
        super().__init__(n_streams, home)
        self.norm, self.n_iterations = norm, n_iterations
        self.dynamic_alpha = nn.Parameter(torch.empty(width, rows * (1 + n_streams)))
        self.dynamic_beta = nn.Parameter(torch.empty(width, rows))
        self.scale_pre = nn.Parameter(torch.empty(1))
        self.scale_res = nn.Parameter(torch.empty(1))
        self.scale_post = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.reset_static()
        for projection in (self.dynamic_alpha, self.dynamic_beta):
            nn.init.zeros_(projection)
        for scale in (self.scale_pre, self.scale_res, self.scale_post):
            nn.init.constant_(scale, 0.01)

    def features(self, h_BTND: Tensor) -> Tensor:
        """x before its norm."""
        raise NotImplementedError

    def weights(self, h_BTND: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(self.features(h_BTND))
        dynamic_BTNM = (x @ self.dynamic_alpha.to(x.dtype)).reshape(*h_BTND.shape[:-1], 1 + self.n_streams)
        dynamic_BTN = (x @ self.dynamic_beta.to(x.dtype)).reshape(h_BTND.shape[:-1])
        pre_BTN1 = torch.sigmoid(self.static_alpha[:, :1] + self.scale_pre * dynamic_BTNM[..., :1])
        res_BTNN = self.static_alpha[:, 1:] + self.scale_res * dynamic_BTNM[..., 1:]
        post_BTN = 2 * torch.sigmoid(self.static_beta + self.scale_post * dynamic_BTN)
        return torch.cat((pre_BTN1, sinkhorn(res_BTNN, self.n_iterations, last=self.last)), dim=-1), post_BTN


class PaperManifoldMix(ManifoldMix):
    """The paper's mHC: ``x = RMS(H_1 ... H_n)``, all streams side by side, width n D; every weight sees every stream.

    R's sums over the sources are scaled last, so that equal streams stay equal. Near the identity at the start: p's
    logits are 3 at stream k and -3 elsewhere, R's 3 on the diagonal and -3 off it, b's 0 (b = 1). The norm has no
    gain, which W absorbs.

    Source: arXiv 2512.24880; static values: its appendix A.6, according to PaddlePaddle/PaddleFleet#1849;
    W = 0: the library.

    >>> mix = PaperManifoldMix(8, n_streams=2, home=0, n_iterations=20, eps=1e-5)
    >>> mix.dynamic_alpha.shape, mix.static_alpha.tolist()
    (torch.Size([16, 6]), [[3.0, 3.0, -3.0], [-3.0, -3.0, 3.0]])
    """

    last = -2

    def __init__(self, dim: int, n_streams: int, home: int, n_iterations: int, eps: float) -> None:
        width = n_streams * dim
        super().__init__(n_streams, home, RMSNorm(width, eps=eps, gain="none"), width, n_streams, n_iterations)

    def reset_static(self) -> None:
        super().reset_static()
        with torch.no_grad():
            self.static_alpha.mul_(6).sub_(3)
            self.static_beta.zero_()

    def features(self, h_BTND: Tensor) -> Tensor:
        return h_BTND.flatten(-2)


class LibraryManifoldMix(ManifoldMix):
    """mHC of the library: ``x_s = RMS(H_s)``, so that the weights of stream s see stream s alone.

    R's sums over the targets are scaled last: the sum of the streams is conserved. The static part starts as in
    ``StaticMix``, here as logits, which is far from the identity: p is 0.73 at stream k and 0.5 elsewhere, b is 1.46,
    and R with four streams 0.475 on and 0.175 off the diagonal.

    Source: lucidrains/hyper-connections:hyper_connections/manifold_constrained_hyper_connections.py, whose norm
    divides by max(|x|, 1e-12): hence the eps.

    >>> LibraryManifoldMix(8, n_streams=2, home=0, n_iterations=20).dynamic_alpha.shape
    torch.Size([8, 3])
    """

    last = -1

    def __init__(self, dim: int, n_streams: int, home: int, n_iterations: int) -> None:
        super().__init__(n_streams, home, RMSNorm(dim, eps=1e-24), dim, 1, n_iterations)

    def features(self, h_BTND: Tensor) -> Tensor:
        return h_BTND
