"""One block: sublayers, each followed by its junction."""

from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from normstream.junctions import Junction, State
from normstream.layers.context import Context
from normstream.ops import RebuiltZ


class Layer(nn.Module):
    """The unit of compilation, activation checkpointing and sharding: ``(state, z, context) -> (state, z, aux)``.

        z --> attention --> after_attention --> z --> feed_forward --> after_feed_forward --> z
                 state ------^------------------------------ state -----^---------------------> state

    The last junction ends with the read of the next layer, so whatever crosses the border is ``(state, z)``. ``aux`` is
    a tuple of what sublayers report besides their updates (a router's balance, ``normstream.layers.moe``): returned, so
    that a layer which is recomputed in the backward pass reports once.

    Args:
        sublayers: modules by kind, in order; each maps ``(z, context)`` to its update, or to its update and a report.
        junctions: one a sublayer, the junction that follows it.

    >>> from normstream.junctions import Drop, PostNormRead, PreNormJoin
    >>> import torch
    >>> class Double(nn.Module):
    ...     def forward(self, z, context):
    ...         return 2 * z
    >>> layer = Layer({"feed_forward": Double()}, [Junction(PreNormJoin(Drop()), PostNormRead())])
    >>> x = torch.ones(1, 1, 1)
    >>> layer((x,), x, Context())[1].item()
    3.0
    """

    rebuild_z: bool = False
    """Whether sublayers' inputs are made again for the backward pass, not kept (``normstream.ops.rebuild``)."""

    def __init__(self, sublayers: dict[str, nn.Module], junctions: list[Junction]) -> None:
        super().__init__()
        self.kinds = tuple(sublayers)
        for (kind, sublayer), junction in zip(sublayers.items(), junctions, strict=True):
            self.add_module(kind, sublayer)
            self.add_module(f"after_{kind}", junction)

    def forward(self, state: State, z: Tensor, context: Context) -> tuple[State, Tensor, tuple[Any, ...]]:
        aux: tuple[Any, ...] = ()
        for kind in self.kinds:
            with RebuiltZ(z) if self.rebuild_z else nullcontext():
                update, reports = update_and_reports(getattr(self, kind)(z, context))
            state, z = getattr(self, f"after_{kind}")(state, update)
            aux += reports
        return state, z, aux


def update_and_reports(output: Any) -> tuple[Tensor, tuple[Any, ...]]:
    """What a sublayer returned, as its update and the tuple of its reports: none, one, or those of parallel branches.

    >>> import torch
    >>> update = torch.ones(1)
    >>> update_and_reports(update), update_and_reports((update, "report"))
    ((tensor([1.]), ()), (tensor([1.]), ('report',)))
    """
    if isinstance(output, tuple):
        update, *reports = output
        return update, tuple(reports)
    return output, ()
