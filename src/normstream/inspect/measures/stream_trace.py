"""Tracing a model's residual streams, and checking that what is said to be added really is.

    layer_out - skip layer_in - sum of the updates = 0

holds for what is really added. It fails for what the modules return wherever a norm or a multiplier follows them.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normstream.inspect.anatomy import Anatomy
from normstream.inspect.inspection import IdentityRow
from normstream.inspect.measures.anatomy_trace import trace_calls
from normstream.inspect.measures.join_trace import trace_joins
from normstream.inspect.measures.streams import LayerTrace as LayerTrace
from normstream.inspect.measures.streams import StackTrace as StackTrace
from normstream.inspect.measures.streams import Streams as Streams
from normstream.inspect.measures.streams import Stretch as Stretch
from normstream.inspect.measures.streams import SublayerTrace as SublayerTrace
from normstream.inspect.measures.streams import Trace as Trace
from normstream.inspect.measures.streams import check_evaluating
from normstream.inspect.probing.probe import anatomy_of
from normstream.models import DecoderLM

TOLERANCE = 1e-5
"""Largest relative error of the identity, beside the rounding of the streams."""


def trace(model: nn.Module, inputs: dict[str, Any], anatomy: Anatomy | None = None) -> Trace:
    """The residual streams of one forward pass: what every sublayer read, returned and really added.

    Args:
        model: any Transformer in evaluation mode; a ``DecoderLM`` needs no anatomy.
        inputs: keyword arguments of its forward pass, as ``make_inputs`` makes them.
        anatomy: its wiring; probed with the same inputs if None.

    Raises:
        ValueError: for inputs that are no dictionary; for a model in training mode, whose dropout adds what nobody can
            name; for one whose calls are not those of the anatomy.

    >>> import torch
    >>> from normstream.models import DecoderConfig, DecoderLM
    >>> model = DecoderLM(DecoderConfig(vocab_size=9, dim=8, n_layers=2, n_heads=2)).eval()
    >>> seen = trace(model, {"tokens_BT": torch.zeros(1, 3, dtype=torch.int64)})
    >>> tuple(seen.named()["layers.1.mixer.update.x"].shape)
    (1, 3, 8)
    """
    if not isinstance(inputs, dict):
        raise ValueError(f"inputs must be a dictionary of keyword arguments, got a {type(inputs).__name__}")
    check_evaluating(model)
    if isinstance(model, DecoderLM):
        return trace_joins(model, inputs)
    return trace_calls(model, inputs, anatomy or anatomy_of(model, inputs))


@dataclass(frozen=True)
class Balance:
    """A piece of a stream between norms, in float64: what the updates leave unexplained."""

    gap: Tensor
    """``end - kept - sum of the updates``"""
    updates: Tensor
    rounding: Tensor
    """At each position, what adding the updates to the stream in its dtype can cost."""


def identity(trace: Trace) -> tuple[IdentityRow, ...]:
    """Relative error of the residual identity in every layer and stream, with module outputs and with true updates.

    A layer that norms its stream is checked from norm to norm; the errors of these pieces are added in quadrature.
    Streams to which nothing is added (``Trace.notes``) have no row.
    """
    rows = []
    for stack in trace.stacks:
        for layer in stack.layers:
            for stream, stretches in layer.stretches.items():
                naive = _balances(stretches, {sublayer.name: sublayer.output for sublayer in layer.sublayers})
                true = _balances(stretches, _updates(layer, stream))
                scale = _length(balance.updates for balance in true)
                errors = [_length(balance.gap for balance in balances) for balances in (naive, true)]
                rows.append(IdentityRow(stack.name, stream, layer.index, *(_ratio(error, scale) for error in errors)))
    return tuple(rows)


def check_identity(trace: Trace, tolerance: float = TOLERANCE) -> None:
    """Raises ValueError unless the true updates explain every layer at every position.

    At each position the difference may be ``tolerance`` times the update, plus what rounding the stream costs.
    """
    for stack in trace.stacks:
        for layer in stack.layers:
            for stream, stretches in layer.stretches.items():
                name = f"layer {layer.index} of stack {stack.name!r}, stream {stream}"
                for balance in _balances(stretches, _updates(layer, stream)):
                    _check(name, balance, tolerance)


def _check(name: str, balance: Balance, tolerance: float) -> None:
    gap, updates = balance.gap.norm(dim=-1), balance.updates.norm(dim=-1)
    if not (gap + updates).isfinite().all():
        raise ValueError(f"{name}: not finite, so what is added cannot be checked; take a wider dtype, or rescale it")
    excess = gap - tolerance * updates - balance.rounding
    if excess.max() > 0:
        worst = int(excess.argmax())
        raise ValueError(
            f"{name}: what goes out is not what came in plus the updates; at position {worst} they differ by "
            f"{gap.flatten()[worst]:.3g}, the update is {updates.flatten()[worst]:.3g}. The wiring is not understood, "
            "so no numbers about updates are given"
        )


def _updates(layer: LayerTrace, stream: str) -> dict[str, Tensor]:
    return {sublayer.name: sublayer.update[stream] for sublayer in layer.sublayers}


def _balances(stretches: tuple[Stretch, ...], updates: dict[str, Tensor]) -> list[Balance]:
    """One for each run of stretches that continue one another."""
    balances: list[Balance] = []
    for stretch in stretches:
        added = [updates[name].double().reshape(stretch.end.shape) for name in stretch.members]
        total = torch.stack(added).sum(0) if added else torch.zeros_like(stretch.end, dtype=torch.float64)
        gap = stretch.end.double() - stretch.kept.double() - total
        balance = Balance(gap, total, _rounding(stretch, updates))
        if stretch.continues:
            last = balances.pop()
            balance = Balance(last.gap + balance.gap, last.updates + balance.updates, last.rounding + balance.rounding)
        balances.append(balance)
    return balances


def _rounding(stretch: Stretch, updates: dict[str, Tensor]) -> Tensor:
    terms = [stretch.kept, stretch.end, *(updates[name] for name in stretch.members)]
    eps = max(torch.finfo(term.dtype).eps for term in terms)
    return eps * torch.stack([term.double().reshape(stretch.end.shape).norm(dim=-1) for term in terms]).sum(0)


def _length(parts: Iterable[Tensor]) -> float:
    return math.hypot(*(part.norm().item() for part in parts))


def _ratio(error: float, scale: float) -> float:
    if error == 0:
        return 0.0
    return error / scale if scale else math.inf
