"""Whether a rescaled model computes what the original does: logits, peaks of the stream, clamps, lost weights."""

import copy
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from normstream.checkpoints.precise import answer, difference
from normstream.checkpoints.rescaling.feeders import near
from normstream.checkpoints.rescaling.plan import READS_STREAM
from normstream.checkpoints.rescaling.report import LARGEST, DtypeRun
from normstream.checkpoints.tensors import first_line
from normstream.inspect.anatomy import Anatomy, LayerSite, StackAnatomy
from normstream.inspect.hooks import Recorder, Run

SMALLEST_NORMAL = 2.0**-14
"""fp16's smallest number with all its bits."""
CLAMPS = ("clamp", "clamp_min", "clamp_max", "hardtanh")
"""Operations that stop at a bound."""


def cast(model: nn.Module, dtype: torch.dtype, but: Collection[str] = (), *, buffers: bool = False) -> nn.Module:
    """A copy with its parameters in another dtype.

    Args:
        but: names of parameters that become float32.
        buffers: whether buffers are cast too.

    >>> cast(nn.Linear(1, 1), torch.float16, but=["bias"]).bias.dtype
    torch.float32
    """
    model = copy.deepcopy(model)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if name in but else dtype)
    for buffer in model.buffers() if buffers else ():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)
    return model


# Peaks ----------------------------------------------------------------------------------------------------------------


def stream_peaks(model: nn.Module, inputs: Mapping[str, Any], anatomy: Anatomy) -> dict[tuple[str, int], float]:
    """Largest |h| by stack and layer: at the layer's input and output, and where its norms or matrices read the stream.

    In a Post-Norm layer that is the sum before the norm too. The output of the norm that such a stack ends with is
    what the model hands out, not the stream.
    """
    with Recorder(model) as recorder:
        run = recorder.run(inputs)
    return {
        (stack.name, layer.index): max(_peak(tensor) for tensor in _stream_in(stack, layer, run))
        for stack in anatomy.stacks
        for layer in stack.layers
    }


def _stream_in(stack: StackAnatomy, layer: LayerSite, run: Run) -> list[Tensor]:
    given, output = run.input(layer.call), run.output(layer.call)
    reading = [
        *(site.call for site in stack.norms if site.place in READS_STREAM and site.layer == layer.index),
        *(call for sublayer in layer.sublayers if sublayer.pre_norm is None for call in sublayer.readers),
    ]
    ends = [site for site in stack.norms if site.place == "trunk" and site.layer == layer.index]
    is_normed = any(output is not None and torch.equal(_known(run.output(site.call)), output) for site in ends)
    found = [
        given,
        *(run.input(call) for call in reading),
        *([] if is_normed and layer is stack.layers[-1] else [output]),
    ]
    return [tensor for tensor in found if tensor is not None]


def _known(tensor: Tensor | None) -> Tensor:
    return torch.empty(0) if tensor is None else tensor


def _peak(tensor: Tensor) -> float:
    value = tensor.abs().max().item()
    return math.inf if math.isnan(value) else value


def first_unscaled(
    before: nn.Module, after: nn.Module, inputs: Mapping[str, Any], anatomy: Anatomy, k: int
) -> str | None:
    """Where the stream is not h / 2^k for the first time; None if it is everywhere."""
    runs = []
    for model in (before, after):
        with Recorder(model) as recorder:
            runs.append(recorder.run(inputs))
    for stack in anatomy.stacks:
        for layer in stack.layers:
            for side in ("input", "output"):
                old, new = (getattr(run, side)(layer.call) for run in runs)
                if old is not None and new is not None and not near(new * 2**k, old):
                    return f"{side} of {layer.call}"
    return None


# Clamps ---------------------------------------------------------------------------------------------------------------


@dataclass
class Clamp:
    """One clamp in a pass."""

    peak: float
    """Largest magnitude that it was given."""
    changed: bool


class ClampWatch(TorchDispatchMode):
    """Every clamp with a bound that is not 0, in order; a clamp at 0, as in ReLU, does not mind a scale.

    >>> with ClampWatch() as watch:
    ...     _ = torch.tensor([1.0, -3.0]).clamp(min=-2)
    >>> watch.clamps
    [Clamp(peak=3.0, changed=True)]
    """

    def __init__(self) -> None:
        super().__init__()
        self.clamps: list[Clamp] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__.rstrip("_")
        before = args[0].clone() if name in CLAMPS and args[0].is_floating_point() else None
        output = func(*args, **kwargs)
        bounds = [bound for bound in (*args[1:], *kwargs.values()) if bound is not None]
        if before is not None and any(not isinstance(bound, int | float) or bound != 0 for bound in bounds):
            self.clamps.append(Clamp(_peak(before) if before.numel() else 0.0, not torch.equal(before, output)))
        return output


def clamps_of(model: nn.Module, inputs: Mapping[str, Any]) -> list[Clamp]:
    """Every clamp in one forward pass."""
    with ClampWatch() as watch:
        answer(model, inputs)
    return watch.clamps


def refuse_clamps(before: nn.Module, after: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Raises ValueError if a clamp stands where the two models' values differ: its bound would have to change too."""
    olds, news = clamps_of(before, inputs), clamps_of(after, inputs)
    if len(olds) != len(news):
        raise ValueError(
            f"the model clamps {len(olds)} times, and {len(news)} times after rescaling: whether it does depends on "
            "the scale of its values, so the function cannot be kept"
        )
    for old, new in zip(olds, news, strict=True):
        if old.peak and not 0.7 < new.peak / old.peak < 1.4:  # a half, the least that rescaling does, is rounded
            raise ValueError(
                f"the model clamps values on the stream (one clamp is given up to {old.peak:.4g}, and {new.peak:.4g} "
                "after rescaling); a bound in the code does not move with the scale, so the function cannot be kept"
            )


# Runs ---------------------------------------------------------------------------------------------------------------


def run_in(
    model: nn.Module,
    dtype: torch.dtype,
    inputs: Mapping[str, Any],
    anatomy: Anatomy,
    reference: Tensor,
    but: Collection[str] = (),
) -> DtypeRun:
    """Runs a copy of the model in a dtype, its buffers (rotary angles) in theirs unless the model mixes the two.

    Args:
        reference: the logits to compare with, in float64.
        but: names of parameters that are run in float32.
    """
    inputs = {name: _cast_input(value, dtype) for name, value in inputs.items()}
    try:
        return _run(cast(model, dtype, but), dtype, inputs, anatomy, reference)
    except RuntimeError:
        try:
            return _run(cast(model, dtype, but, buffers=True), dtype, inputs, anatomy, reference)
        except RuntimeError as problem:
            return DtypeRun(_name(dtype), False, None, math.inf, problem=first_line(problem))


def _run(
    model: nn.Module, dtype: torch.dtype, inputs: Mapping[str, Any], anatomy: Anatomy, reference: Tensor
) -> DtypeRun:
    with ClampWatch() as watch:
        logits = answer(model, inputs)
    peak = max(stream_peaks(model, inputs, anatomy).values())
    is_finite = bool(logits.isfinite().all()) and math.isfinite(peak)
    return DtypeRun(
        dtype=_name(dtype),
        is_finite=is_finite,
        error=difference(logits, reference) if is_finite else None,
        peak=peak,
        clamps=sum(clamp.changed for clamp in watch.clamps),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _cast_input(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def subnormals(before: nn.Module, after: nn.Module) -> tuple[int, int, int]:
    """Weights in all, those that fell among fp16's subnormals, and those among them that fp16 rounds to zero.

    >>> old, new = nn.Linear(3, 1, bias=False), nn.Linear(3, 1, bias=False)
    >>> old.weight.data = torch.tensor([[1.0, 2.0**-13, 2.0**-14]])
    >>> new.weight.data = torch.tensor([[0.5, 2.0**-14, 2.0**-26]])
    >>> subnormals(old, new)
    (3, 1, 1)
    """
    olds = dict(before.named_parameters(remove_duplicate=False))
    total = fallen = flushed = 0
    for name, new in after.named_parameters():
        old, new = olds[name].detach().abs(), new.detach().abs()
        is_fallen = (old >= SMALLEST_NORMAL) & (new < SMALLEST_NORMAL)
        total += new.numel()
        fallen += int(is_fallen.sum())
        flushed += int((is_fallen & (new.half() == 0)).sum())
    return total, fallen, flushed


def power_for(peak: float, headroom: float) -> int:
    """The smallest k >= 0 so that ``peak / 2^k`` has the head-room in fp16.

    >>> power_for(2.5e5, 16), power_for(100.0, 16)
    (6, 0)
    """
    return max(0, math.ceil(math.log2(peak * headroom / LARGEST))) if peak > 0 else 0
