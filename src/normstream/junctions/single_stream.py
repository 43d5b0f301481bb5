"""One stream x: the equations of Pre-Norm, Post-Norm and of what lies between and around them.

join   ``PreNormJoin``          x <- x + o
       ``PostNormJoin``         x <- N(x + o)
       ``OutputNormJoin``       x <- x + N_out(o)
read   ``PreNormRead``          z = N(x)
       ``ScaledNormRead``       z = s N(x)
       ``PostNormRead``         z = x
       ``NormedStreamRead``     x <- N(x), z = x
start  ``NormedStart``          x = N(e)
"""

from torch import Tensor, nn

from normstream.junctions.junction import DepthConstant, Drop, Join, Read, State, add
from normstream.ops import JoinPart, ReadPart


class PreNormJoin(Join):
    """``x <- x + o``.

    >>> import torch
    >>> PreNormJoin(Drop())((torch.ones(1, 2),), torch.ones(1, 2))
    (tensor([[2., 2.]]),)
    """

    def contributions(self, update: Tensor) -> State:
        return (self.drop(update),)

    def forward(self, state: State, update: Tensor) -> State:
        (x,) = state
        (o,) = self.contributions(update)
        return (add(x, o),)

    def part(self) -> JoinPart:
        return JoinPart(drop=self.drop)


class PreNormRead(Read):
    """``z = N(x)``; as the last read, this is the final norm.

    >>> import torch
    >>> PreNormRead(nn.Identity())((torch.ones(2),))
    ((tensor([1., 1.]),), tensor([1., 1.]))
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, state: State) -> tuple[State, Tensor]:
        (x,) = state
        return state, self.norm(x)

    def part(self) -> ReadPart:
        return ReadPart(norm_in=self.norm)


class PostNormJoin(Join):
    """``x <- N(x + o)`` (Vaswani et al. 2017, arXiv 1706.03762).

    >>> import torch
    >>> PostNormJoin(torch.nn.Identity(), Drop())((torch.ones(1, 2),), torch.ones(1, 2))
    (tensor([[2., 2.]]),)
    """

    def __init__(self, norm: nn.Module, drop: Drop) -> None:
        super().__init__(drop)
        self.norm = norm

    def contributions(self, update: Tensor) -> State:
        return (self.drop(update),)

    def forward(self, state: State, update: Tensor) -> State:
        (x,) = state
        (o,) = self.contributions(update)
        return (self.norm(add(x, o)),)

    def part(self) -> JoinPart:
        return JoinPart(norm_x=self.norm, drop=self.drop)


class PostNormRead(Read):
    """``z = x``: the sublayer reads the stream itself.

    >>> import torch
    >>> PostNormRead()((torch.ones(2),))
    ((tensor([1., 1.]),), tensor([1., 1.]))
    """

    def forward(self, state: State) -> tuple[State, Tensor]:
        (x,) = state
        return state, x

    def part(self) -> ReadPart:
        return ReadPart(has_z=False)


class NormedStart(nn.Module):
    """``x = N(e)``: the stream starts as the normed embedding e (BERT, BLOOM, Peri-LN).

    >>> import torch
    >>> NormedStart(nn.Identity())((), torch.ones(2))
    (tensor([1., 1.]),)
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, state: State, embedding: Tensor) -> State:
        return (self.norm(embedding),)

    def part(self) -> JoinPart:
        return JoinPart(norm_x=self.norm, starts=True)


class ScaledNormRead(Read):
    """``z = s N(x)`` with a constant s (LayerNorm Scaling, arXiv 2502.05795: s = 1/sqrt(l)).

    s is no buffer, which would be lost when a model is built on the meta device.

    >>> import torch
    >>> ScaledNormRead(nn.Identity(), scale=0.5)((torch.ones(2),))[1]
    tensor([0.5000, 0.5000])
    """

    scale = DepthConstant()
    _scale: Tensor

    def __init__(self, norm: nn.Module, scale: float) -> None:
        super().__init__()
        self.norm, self.scale = norm, scale

    def forward(self, state: State) -> tuple[State, Tensor]:
        (x,) = state
        return state, self._scale * self.norm(x)

    def part(self) -> ReadPart:
        return ReadPart(norm_in=self.norm, read_scale=self._scale)

    def extra_repr(self) -> str:
        return f"scale={self.scale:.6g}"


class NormedStreamRead(Read):
    """``x <- N(x), z = x``: the normed copy becomes the stream, so that the next update is added to it.

    Source: ``apply_residual_connection_post_layernorm`` of Megatron-LM and
    huggingface/transformers:src/transformers/models/bloom/modeling_bloom.py.

    >>> import torch
    >>> NormedStreamRead(torch.nn.ReLU())((torch.tensor([-1.0, 1.0]),))
    ((tensor([0., 1.]),), tensor([0., 1.]))
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, state: State) -> tuple[State, Tensor]:
        (x,) = state
        x = self.norm(x)
        return (x,), x


class OutputNormJoin(Join):
    """``x <- x + N_out(o)``; with a ``norm`` of the stream, ``x <- N(x + N_out(o))``.

    Args:
        norm_out: norm of the raw update; dropout comes after it, since it would undo a rescaling before it.
        drop: dropout and drop-path of the normed update.
        norm: norm of the stream after the addition, or None (Swin Transformer v2 has one every few blocks).

    Source: CogView's Sandwich-LN, arXiv 2105.13290; Swin Transformer v2, arXiv 2111.09883.

    >>> import torch
    >>> OutputNormJoin(torch.nn.ReLU(), Drop())((torch.ones(1, 2),), torch.tensor([[-2.0, 3.0]]))
    (tensor([[1., 4.]]),)
    """

    def __init__(self, norm_out: nn.Module, drop: Drop, norm: nn.Module | None = None) -> None:
        super().__init__(drop)
        self.norm_out, self.norm = norm_out, norm

    def contributions(self, update: Tensor) -> State:
        return (self.drop(self.norm_out(update)),)

    def forward(self, state: State, update: Tensor) -> State:
        (x,) = state
        (o,) = self.contributions(update)
        x = add(x, o)
        return (x if self.norm is None else self.norm(x),)

    def part(self) -> JoinPart:
        return JoinPart(norm_out=self.norm_out, norm_x=self.norm, drop=self.drop)
