"""The logit lens: what the model would predict if the stream went to the head right after a layer.

Shape suffixes: B batch, T sequence, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from normstream.inspect.anatomy import Anatomy
from normstream.inspect.inspection import LensRow
from normstream.inspect.measures.layer_borders import LayerRun, Streams, run_layers, whole_layers
from normstream.inspect.measures.loss import NO_LOSS, Objective, objective_of


@torch.no_grad()
def logit_lens(
    model: nn.Module, inputs: dict[str, Any], anatomy: Anatomy | None
) -> tuple[tuple[LensRow, ...], tuple[str, ...]]:
    """The lens of every layer of the stack that the head reads, and notes on what could not be measured.

    The stream that leaves a layer takes the place of what leaves the last one, and the model does the rest: final norm,
    head, multipliers and caps are its own. With several streams there is a row for all of them together, named ``x+y``,
    and one for each alone, the others being zeros, as the final read weighs and norms them.

    Source: nostalgebraist, "interpreting GPT: the logit lens", 2020.

    >>> from normstream.models import DecoderConfig, DecoderLM
    >>> model = DecoderLM(DecoderConfig(placement="siamese", dim=8, n_layers=2, n_heads=2)).eval()
    >>> rows, _ = logit_lens(model, {"tokens_BT": torch.tensor([[1, 2, 3]])}, None)
    >>> [(row.layer, row.stream) for row in rows][:3], rows[3].kl_to_final
    ([(0, 'x+y'), (0, 'x'), (0, 'y')], 0.0)
    """
    objective = objective_of(model, inputs, anatomy)
    if objective is None:
        return (), (f"{NO_LOSS}, hence no logit lens",)
    run = run_layers(model, inputs, anatomy)
    borders, notes = whole_layers(run, anatomy)
    if run.last not in borders:
        return (), notes
    rows = tuple(_rows(model, inputs, anatomy, run, objective))
    lost = sorted({row.stream for row in rows if row.loss != row.loss})
    if lost:
        notes += (f"no logit lens of {', '.join(lost)} alone: the norm of a stream of zeros is not a number",)
    return tuple(row for row in rows if row.stream not in lost), notes


def _rows(
    model: Any, inputs: dict[str, Any], anatomy: Anatomy | None, run: LayerRun, objective: Objective
) -> Iterator[LensRow]:
    last = run.last
    assert last is not None  # an objective is about the logits of a layer
    assert run.logits is not None
    for (stack, layer), border in run.layers_of(last[0]).items():
        parts = alone(model.streams, border.leaving) if anatomy is None else [("x", border.leaving)]
        for stream, streams in parts:
            logits = run_layers(model, inputs, anatomy, {last: lambda _, streams=streams: streams}).logits
            assert logits is not None
            kl, agreement = _compare(objective.scored(run.logits), objective.scored(logits))
            yield LensRow(stack, stream, layer, objective.loss(logits).item(), kl, agreement)


def alone(names: tuple[str, ...], streams: Streams) -> Iterator[tuple[str, Streams]]:
    """All streams together, and if there are several, each with zeros in place of the others.

    n hyper-connected streams, one tensor (B, T, n, D), are n streams, ``h_1`` ... ``h_n``.

    >>> found = dict(alone(("x", "y"), (torch.ones(1, 1, 1), 2 * torch.ones(1, 1, 1))))
    >>> [(name, [stream.item() for stream in streams]) for name, streams in found.items()]
    [('x+y', [1.0, 2.0]), ('x', [1.0, 0.0]), ('y', [0.0, 2.0])]
    """
    yield "+".join(names), streams
    if len(streams) == 1 and streams[0].ndim == 3:
        return
    zeros = tuple(torch.zeros_like(stream) for stream in streams)
    for i, (name, stream) in enumerate(zip(names, streams, strict=True)):
        for part, only in [(name, stream)] if stream.ndim == 3 else _split(name, stream):
            yield part, (*zeros[:i], only, *zeros[i + 1 :])


def _split(name: str, stream_BTND: Tensor) -> Iterator[tuple[str, Tensor]]:
    for index in range(stream_BTND.shape[-2]):
        only = torch.zeros_like(stream_BTND)
        only[..., index, :] = stream_BTND[..., index, :]
        yield f"{name}_{index + 1}", only


def _compare(final_BTV: Tensor, lens_BTV: Tensor) -> tuple[float, float]:
    """Mean over the scored positions of KL(final || lens) in nats, and of whether both rank one token first."""
    log_p, log_q = final_BTV.log_softmax(-1), lens_BTV.log_softmax(-1)
    p = log_p.exp()
    kl = torch.where(p > 0, p * (log_p - log_q), 0).sum(-1).mean()
    return kl.item(), (log_p.argmax(-1) == log_q.argmax(-1)).float().mean().item()
