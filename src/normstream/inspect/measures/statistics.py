"""What the residual streams of a trace do: sizes, head-room, growth, massive activations, influence, stream ratio.

Numbers about updates are of what is really added; where that cannot be shown, ``sublayer_rows`` raises.
"""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from normstream.inspect.inspection import Growth, MassiveActivation, StreamRatio, SublayerRow
from normstream.inspect.measures.stream_trace import check_identity
from normstream.inspect.measures.streams import LayerTrace, StackTrace, SublayerTrace, Trace

FP16_MAX = 65504.0
MASSIVE_ABS, MASSIVE_RATIO = 100.0, 1000.0
"""Above both an entry counts as massive (Sun et al. 2024, arXiv 2402.17762)."""
GOOD_FIT = 0.01
"""A law with at most this relative error is good enough, however well a richer one fits."""
Law = Literal["constant", "linear", "exponential"]


def sublayer_rows(trace: Trace) -> tuple[SublayerRow, ...]:
    """One row for every sublayer and stream.

    Raises:
        ValueError: if the residual identity fails: the updates are then not what is added.
    """
    check_identity(trace)
    return tuple(_row(sublayer, stream) for sublayer in trace.sublayers for stream in sublayer.before)


def _row(sublayer: SublayerTrace, stream: str) -> SublayerRow:
    before, after, update = (part[stream].double() for part in (sublayer.before, sublayer.after, sublayer.update))
    largest = after.abs().max().item()
    return SublayerRow(
        stack=sublayer.stack,
        stream=stream,
        name=sublayer.name,
        layer=sublayer.layer,
        kind=sublayer.kind,
        rms=rms(after),
        update_rms=rms(update),
        max_abs=largest,
        update_max_abs=update.abs().max().item(),
        headroom_fp16=FP16_MAX / largest if largest else math.inf,
        lost_in_bf16=(update.abs() < half_ulp_bf16(sublayer.kept[stream])).double().mean().item(),
        cosine=F.cosine_similarity(update, before, dim=-1).mean().item(),
        angular_distance=angular_distance(before, after),
    )


def rms(x: Tensor) -> float:
    """Root mean square of all entries.

    >>> rms(torch.tensor([1.0, 7.0]))
    5.0
    """
    return x.double().square().mean().sqrt().item()


def half_ulp_bf16(stream: Tensor) -> Tensor:
    """Half the distance from |stream|, rounded to bfloat16, to the next larger bfloat16 number, as float64.

    An update below it is lost: the nearest bfloat16 number to the sum is the stream itself. (Where the stream is a
    power of two and the update points to zero, only one below half of that is.)

    >>> half_ulp_bf16(torch.tensor([1.0, 256.0])).tolist()
    [0.00390625, 1.0]
    """
    rounded = stream.to(torch.bfloat16).double()
    exponent = torch.frexp(rounded).exponent.clamp(min=-125)  # |stream| = m 2^e, 1/2 <= m < 1; subnormals have one step
    exponent = torch.where(rounded == 0, -125, exponent)
    return torch.ldexp(torch.ones_like(rounded), exponent - 9)


def angular_distance(before: Tensor, after: Tensor) -> float:
    """Mean over tokens of ``arccos(cosine(before, after)) / pi``, 0 (same direction) to 1 (opposite).

    Source: block influence of Men et al. 2024 (arXiv 2403.03853), in the form of Gromov et al. 2024 (arXiv 2403.17887).

    >>> angular_distance(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 3.0]]))
    0.5
    """
    cosine = F.cosine_similarity(before.double(), after.double(), dim=-1)
    return (cosine.clamp(-1, 1).arccos() / math.pi).mean().item()


def influences(trace: Trace) -> dict[tuple[str, int], dict[str, float]]:
    """Angular distance of each stream before and after each layer: by stack and layer, then by stream."""
    return {(stack.name, layer.index): _turns(layer) for stack in trace.stacks for layer in stack.layers}


def _turns(layer: LayerTrace) -> dict[str, float]:
    return {stream: angular_distance(before, layer.after[stream]) for stream, before in layer.before.items()}


def growth(trace: Trace) -> tuple[Growth, ...]:
    """The law that each stream's RMS follows from the first layer's input to the last one's output."""
    return tuple(
        growth_law(stack.name, stream, [rms(h) for h in borders(stack, stream)])
        for stack in trace.stacks
        for stream in stack.streams
    )


def borders(stack: StackTrace, stream: str) -> list[Tensor]:
    """The stream as it enters the first layer and as it leaves every layer."""
    return [stack.layers[0].before[stream], *(layer.after[stream] for layer in stack.layers)]


def growth_law(stack: str, stream: str, sizes: Sequence[float]) -> Growth:
    """The simplest law whose relative error is within a tenth of the best one's, or at most ``GOOD_FIT``.

    Constant and linear are fitted by least squares of the relative error, the exponential by those of the logarithm.
    Sizes that are zero or not finite are left out; ValueError if none is finite.

    >>> growth_law("main", "x", [1.0, 2.0, 4.0, 8.0]).law
    'exponential'
    """
    pairs = [(layer, size) for layer, size in enumerate(sizes) if 0 < size < math.inf]
    if not any(map(math.isfinite, sizes)):
        raise ValueError(f"stream {stream} of {stack} has no finite size: it overflows from the start")
    if not pairs:
        return Growth(stack, stream, "constant", (0.0,), dict.fromkeys(get_args(Law), 0.0), tuple(sizes))
    layers, values = np.array(pairs).T
    fits = _fits(layers, values)
    errors = {law: float(np.sqrt(np.mean((curve / values - 1) ** 2))) for law, (_, curve) in fits.items()}
    enough = max(1.1 * min(errors.values()), GOOD_FIT)
    law = next(law for law in get_args(Law) if errors[law] <= enough)
    return Growth(stack, stream, law, tuple(map(float, fits[law][0])), errors, tuple(sizes))


def _fits(layers: np.ndarray, values: np.ndarray) -> dict[Law, tuple[np.ndarray, np.ndarray]]:
    """Coefficients and curve of each law."""
    line = np.stack((np.ones_like(layers), layers), axis=1)
    relative = line / values[:, None]
    constant = np.linalg.lstsq(relative[:, :1], np.ones_like(values), rcond=None)[0]
    linear = np.linalg.lstsq(relative, np.ones_like(values), rcond=None)[0]
    start, rate = np.linalg.lstsq(line, np.log(values), rcond=None)[0]
    return {
        "constant": (constant, line[:, :1] @ constant),
        "linear": (linear, line @ linear),
        "exponential": (np.array((np.exp(start), rate)), np.exp(start + rate * layers)),
    }


def massive_activations(trace: Trace, texts: Sequence[str] | None = None) -> tuple[MassiveActivation, ...]:
    """Entries of the stream leaving a layer that are above 100 and above 1000 times the layer's median magnitude.

    Args:
        trace: of one sequence, with or without an axis for the batch.
        texts: the tokens' texts.
    """
    found = []
    for stack in trace.stacks:
        for layer in stack.layers:
            for stream, h in layer.after.items():
                h_TD = h.double().reshape(-1, h.shape[-1])
                median = h_TD.abs().median().item()
                for token, channel in _massive(h_TD, median):
                    value = h_TD[token, channel].item()
                    text = texts[token] if texts and token < len(texts) else None
                    ratio = abs(value) / median if median else math.inf
                    found.append(MassiveActivation(stack.name, stream, layer.index, token, text, channel, value, ratio))
    return tuple(found)


def _massive(h_TD: Tensor, median: float) -> list[list[int]]:
    """(token, channel) of the massive entries, the largest first."""
    magnitude = h_TD.abs()
    places = ((magnitude > MASSIVE_ABS) & (magnitude > MASSIVE_RATIO * median)).nonzero()
    order = magnitude[places[:, 0], places[:, 1]].argsort(descending=True)
    return places[order].tolist()


def stream_ratios(trace: Trace) -> tuple[StreamRatio, ...]:
    """Models with two streams: RMS of the first over RMS of the second, leaving each layer."""
    return tuple(
        StreamRatio(stack.name, layer.index, rms(first) / size if (size := rms(second)) else math.inf)
        for stack in trace.stacks
        if len(stack.streams) == 2
        for layer in stack.layers
        for first, second in [[layer.after[name] for name in stack.streams]]
    )
