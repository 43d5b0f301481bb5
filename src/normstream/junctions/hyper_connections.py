"""Hyper-Connections: n residual streams H_1 ... H_n that learned weights mix before and after every sublayer.

    read    z = N_in(sum_s A[s, 0] H_s)      H_t <- sum_s A[s, t] H_s      t = 1 ... n
    join    H_t <- H_t + b_t o

The weights A and b are the sublayer's own: constants, or functions of the streams at each position. The read computes
both; b travels in the state, behind the streams, to the join that needs it.

Shape suffixes: B batch, T sequence, N streams, D width, M = 1 + N columns of A (the sublayer's input, the streams).
Weights that do not depend on the position have no B and T. They are float32 (float64 for float64), also in autocast.
"""

import torch
from torch import Tensor, nn

from normstream.junctions.junction import Join, Read, State, add
from normstream.norms import precise_dtype


class HyperStart(nn.Module):
    """``H_1 = ... = H_n = e`` for the embedding e, in one tensor (B, T, N, D).

    >>> HyperStart(n_streams=2)((), torch.ones(1, 1, 3))[0].shape
    torch.Size([1, 1, 2, 3])
    """

    def __init__(self, n_streams: int) -> None:
        super().__init__()
        self.n_streams = n_streams

    def forward(self, state: State, embedding_BTD: Tensor) -> State:
        return (copies(embedding_BTD, self.n_streams),)


class HyperJoin(Join):
    """``H_t <- H_t + b_t o``, with the weights b that the sublayer's read left in the state.

    >>> from normstream.junctions import Drop
    >>> h, b, o = torch.zeros(1, 1, 2, 1), torch.tensor([1.0, 2.0]), torch.ones(1, 1, 1)
    >>> HyperJoin(Drop())((h, b), o)[0].flatten()
    tensor([1., 2.])
    """

    def contributions(self, update: Tensor, beta: Tensor | None = None) -> State:
        """``b_t o`` for every stream, stacked; without b, the o that is to be weighted."""
        return (weighted(self.drop(update), beta),)

    def forward(self, state: State, update: Tensor) -> State:
        h, beta = state
        (o,) = self.contributions(update, beta)
        return (add(h, o),)


class HyperRead(Read):
    """``z = N(u)`` for the u that ``mix`` takes from the streams, which it also mixes.

    The last read's ``mix`` is ``SumStreams``, and N is then the final norm.

    >>> read = HyperRead(SumStreams(), nn.Identity())
    >>> read((torch.ones(1, 1, 2, 1),))[1].item()
    2.0
    """

    def __init__(self, mix: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.mix, self.norm = mix, norm

    def forward(self, state: State) -> tuple[State, Tensor]:
        (h,) = state
        u, state = self.mix(h)
        return state, self.norm(u)


class SumStreams(nn.Module):
    """``u = H_1 + ... + H_n``; the streams stay.

    >>> SumStreams()(torch.ones(1, 1, 2, 1))[0].item()
    2.0
    """

    def forward(self, h_BTND: Tensor) -> tuple[Tensor, State]:
        return h_BTND.sum(-2), (h_BTND,)


class Mix(nn.Module):
    """Takes a sublayer's input from the streams and mixes them; a subclass says in ``weights`` what A and b are.

    Args:
        n_streams: number of streams n.
        home: the stream k, counted from 0, that the sublayer reads at the start.
    """

    def __init__(self, n_streams: int, home: int) -> None:
        super().__init__()
        self.n_streams, self.home = n_streams, home
        self.static_alpha = nn.Parameter(torch.empty(n_streams, 1 + n_streams))
        self.static_beta = nn.Parameter(torch.empty(n_streams))

    def weights(self, h_BTND: Tensor) -> tuple[Tensor, Tensor]:
        """A and b for streams ``h_BTND``, which are float32 or float64."""
        raise NotImplementedError

    def forward(self, h_BTND: Tensor) -> tuple[Tensor, State]:
        """u, and the state: the mixed streams and b."""
        high_BTND = h_BTND.to(precise_dtype(h_BTND))
        with torch.autocast(h_BTND.device.type, enabled=False):
            alpha_NM, beta_N = self.weights(high_BTND)
            equation = "nm,...nd->...md" if alpha_NM.ndim == 2 else "...nm,...nd->...md"
            mixed_BTMD = torch.einsum(equation, alpha_NM, high_BTND).to(h_BTND.dtype)
        return mixed_BTMD[..., 0, :], (mixed_BTMD[..., 1:, :], beta_N)

    def reset_static(self) -> None:
        """``A = [e_k | I]`` and ``b = 1``: the sublayer reads stream k, and every stream receives its update."""
        nn.init.ones_(self.static_beta)
        nn.init.zeros_(self.static_alpha)
        with torch.no_grad():
            self.static_alpha[self.home, 0] = 1
            self.static_alpha[:, 1:].fill_diagonal_(1)

    def extra_repr(self) -> str:
        return f"n_streams={self.n_streams}, home={self.home}"


class StaticMix(Mix):
    """Static hyper-connections: A and b are parameters, ``[e_k | I]`` and 1 at the start.

    Source: arXiv 2409.19606, section 2 and algorithm 2.

    >>> StaticMix(n_streams=2, home=1).static_alpha.tolist()
    [[0.0, 1.0, 0.0], [1.0, 0.0, 1.0]]
    """

    def __init__(self, n_streams: int, home: int) -> None:
        super().__init__(n_streams, home)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.reset_static()

    def weights(self, h_BTND: Tensor) -> tuple[Tensor, Tensor]:
        return self.static_alpha.to(h_BTND.dtype), self.static_beta.to(h_BTND.dtype)


class DynamicMix(Mix):
    """Dynamic hyper-connections: ``A_s = A0_s + a tanh(N(H_s) W)`` and ``b_s = b0_s + a' tanh(N(H_s) w')``.

    A0 and b0 start as in ``StaticMix``, W and w' at 0, the scalars a and a' at 0.01: at first nothing is dynamic.

    Args:
        dim: width D.
        n_streams, home: as in ``Mix``.
        norm: N.
        tanh: whether there is a tanh.

    Source: arXiv 2409.19606, section 2; lucidrains/hyper-connections:hyper_connections/hyper_connections.py.

    >>> u, (h, b) = DynamicMix(3, n_streams=2, home=0, norm=nn.Identity())(torch.ones(1, 1, 2, 3))
    >>> u.shape, h.shape, b.shape
    (torch.Size([1, 1, 3]), torch.Size([1, 1, 2, 3]), torch.Size([1, 1, 2]))
    """

    def __init__(self, dim: int, n_streams: int, home: int, norm: nn.Module, *, tanh: bool = True) -> None:
        super().__init__(n_streams, home)
        self.norm, self.tanh = norm, tanh
        self.dynamic_alpha = nn.Parameter(torch.empty(dim, 1 + n_streams))
        self.dynamic_beta = nn.Parameter(torch.empty(dim))
        self.scale_alpha = nn.Parameter(torch.empty(1))
        self.scale_beta = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.reset_static()
        for projection in (self.dynamic_alpha, self.dynamic_beta):
            nn.init.zeros_(projection)
        for scale in (self.scale_alpha, self.scale_beta):
            nn.init.constant_(scale, 0.01)

    def weights(self, h_BTND: Tensor) -> tuple[Tensor, Tensor]:
        normed_BTND = self.norm(h_BTND)
        alpha_BTNM = normed_BTND @ self.dynamic_alpha.to(normed_BTND.dtype)
        beta_BTN = normed_BTND @ self.dynamic_beta.to(normed_BTND.dtype)
        if self.tanh:
            alpha_BTNM, beta_BTN = alpha_BTNM.tanh(), beta_BTN.tanh()
        return self.static_alpha + self.scale_alpha * alpha_BTNM, self.static_beta + self.scale_beta * beta_BTN


def copies(stream_BTD: Tensor, n: int) -> Tensor:
    """n equal streams, (B, T, N, D)."""
    return stream_BTD.unsqueeze(-2).repeat_interleave(n, dim=-2)


def weighted(update_BTD: Tensor, beta_N: Tensor | None) -> Tensor:
    """``b_t o`` for every stream t, (B, T, N, D); without b, o with an axis of one stream."""
    o_BT1D = update_BTD.unsqueeze(-2)
    return o_BT1D if beta_N is None else beta_N.unsqueeze(-1) * o_BT1D
