"""SiameseNorm whose y stream is n hyper-connected streams H.

    join    x <- N_x(x + o / c)                   H_t <- H_t + b_t o
    read    u = sum_s A[s, 0] H_s                 H_t <- sum_s A[s, t] H_s      z = N_in(x + N_y(u))

The mixing is that of ``normstream.junctions.hyper_connections``, the rest that of ``normstream.junctions.siamese``.
"""

from torch import Tensor, nn

from normstream.junctions.hyper_connections import copies, weighted
from normstream.junctions.junction import Drop, Join, Read, State, add
from normstream.junctions.siamese import normed


class SiameseHyperStart(nn.Module):
    """``x = N_x(e)`` and ``H_1 = ... = H_n = e`` for the embedding e; without ``norm_x`` x starts raw.

    >>> import torch
    >>> [stream.shape for stream in SiameseHyperStart(None, n_streams=2)((), torch.ones(1, 3))]
    [torch.Size([1, 3]), torch.Size([1, 2, 3])]
    """

    def __init__(self, norm_x: nn.Module | None, n_streams: int) -> None:
        super().__init__()
        self.norm_x, self.n_streams = norm_x, n_streams

    def forward(self, state: State, embedding: Tensor) -> State:
        return normed(self.norm_x, embedding), copies(embedding, self.n_streams)


class SiameseHyperJoin(Join):
    """``x <- N_x(x + o / c)``, ``H_t <- H_t + b_t o``: the y stream of SiameseNorm as n hyper-connected streams.

    Args:
        norm_x, scale, drop: as in ``SiameseJoin``.

    >>> import torch
    >>> x, h, b, o = torch.zeros(1, 1), torch.zeros(1, 2, 1), torch.tensor([1.0, 2.0]), torch.ones(1, 1)
    >>> [s.flatten().tolist() for s in SiameseHyperJoin(nn.Identity(), scale=0.5, drop=Drop())((x, h, b), o)]
    [[0.5], [1.0, 2.0]]
    """

    def __init__(self, norm_x: nn.Module, scale: float, drop: Drop) -> None:
        super().__init__(drop)
        self.norm_x, self.scale = norm_x, scale

    def contributions(self, update: Tensor, beta: Tensor | None = None) -> State:
        """``o / c`` and ``b_t o`` for every stream, stacked; without b, the o that is to be weighted."""
        o = self.drop(update)
        return o * self.scale, weighted(o, beta)

    def forward(self, state: State, update: Tensor) -> State:
        x, h, beta = state
        o_x, o_h = self.contributions(update, beta)
        return self.norm_x(add(x, o_x)), add(h, o_h)

    def extra_repr(self) -> str:
        return f"scale={self.scale:.6g}"


class SiameseHyperRead(Read):
    """``z = N_in(x + N_y(u))`` for the u that ``mix`` takes from the streams H, which it also mixes.

    >>> import torch
    >>> from normstream.junctions import SumStreams
    >>> read = SiameseHyperRead(SumStreams(), norm_y=nn.Identity(), norm_in=None)
    >>> read((torch.ones(1, 1), torch.ones(1, 2, 1)))[1].item()
    3.0
    """

    def __init__(self, mix: nn.Module, norm_y: nn.Module, norm_in: nn.Module | None) -> None:
        super().__init__()
        self.mix, self.norm_y, self.norm_in = mix, norm_y, norm_in

    def forward(self, state: State) -> tuple[State, Tensor]:
        x, h = state
        u, h_and_beta = self.mix(h)
        return (x, *h_and_beta), normed(self.norm_in, x + self.norm_y(u))
