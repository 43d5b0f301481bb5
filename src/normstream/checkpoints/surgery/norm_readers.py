"""Which matrices read a norm's output, and along which axis, found by the values that arrive at them."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normstream.checkpoints.rescaling.feeders import NEAR, is_matrix, near, present
from normstream.checkpoints.rescaling.stacked import reading_parameters
from normstream.inspect.hooks import Changes, Record, Recorder, Run


@dataclass(frozen=True)
class Reader:
    """A module with matrices whose input is a norm's output."""

    path: str
    matrices: tuple[tuple[str, int], ...]
    """Parameters that multiply the input, and the axis of each that the input's features are on: (name, axis)."""
    bias: str | None
    """The parameter that is added to the product; None where there is none or several products."""


def norm_parameters(recorder: Recorder, record: Record) -> tuple[str | None, str | None]:
    """The names of a norm's gain and bias: without the bias, the output changes by the same for every token.

    Raises:
        ValueError: if the norm has other parameters than one gain and one bias.
    """
    module = recorder.modules[record.call.path]
    output = present(record.output, record.call)
    gains, biases = [], []
    for name, parameter in module.named_parameters():
        with changed(parameter, torch.zeros_like(parameter)):
            without = present(recorder.replay(record).output(record.call), record.call)
        is_added = (output - without - parameter).abs().max() <= NEAR * output.abs().max()
        (biases if is_added else gains).append(name)
    if len(gains) > 1 or len(biases) > 1:
        raise ValueError(f"it has more parameters than one gain and one bias: {', '.join(gains + biases)}")
    return next(iter(gains), None), next(iter(biases), None)


def readers_of(recorder: Recorder, run: Run, norm: Record) -> dict[str, Record]:
    """The calls of modules with matrices of their own that get the norm's output, or some of its rows, by path."""
    rows = _rows(norm.output)
    found: dict[str, Record] = {}
    for record in run.records.values():
        if record.start > norm.end and _owns_matrix(recorder.modules[record.call.path]):
            given = _rows(record.input)
            if given and given <= rows:
                found.setdefault(record.call.path, record)
    return found


def make_reader(recorder: Recorder, record: Record) -> Reader:
    """How a reader multiplies its input.

    Raises:
        ValueError: if it is not linear in it.
    """
    module = recorder.modules[record.call.path]
    chosen = reading_parameters(recorder, record, module)
    names = {parameter: name for name, parameter in module.named_parameters()}
    given = present(record.input, record.call)
    features = given.shape[-1]
    scale = torch.linspace(0.5, 2.0, features, dtype=given.dtype)
    scaled = Changes(inputs={record.call: lambda given: given / scale})
    axes = [[axis for axis, size in enumerate(parameter.shape) if size == features] for parameter in chosen]
    for choice in itertools.product(*axes):
        with changed_all(chosen, [along(scale, p, axis) * p for p, axis in zip(chosen, choice, strict=True)]):
            output = recorder.replay(record, scaled).output(record.call)
        if output is not None and record.output is not None and near(output, record.output):
            matrices = tuple((names[parameter], axis) for parameter, axis in zip(chosen, choice, strict=True))
            biases = [name for name, parameter in module.named_parameters(recurse=False) if parameter.ndim == 1]
            return Reader(record.call.path, matrices, biases[0] if is_matrix(module) and biases else None)
    raise ValueError(f"{record.call.path} is not linear in it")


def unused_siblings(recorder: Recorder, run: Run, norm: str, path: str) -> Iterator[str]:
    """Experts that did not run: at the same place in other entries of a list that stands behind the norm.

    (The list of layers has the norm inside its entries, so other layers are no siblings.)
    """
    ran = {call.path for call in run.records}
    parts = path.split(".")
    for i in range(len(parts) - 1, 0, -1):
        owner = recorder.modules[".".join(parts[:i])]
        if isinstance(owner, nn.ModuleList):
            if norm.startswith(".".join([*parts[: i + 1], ""])):
                return
            others = (".".join([*parts[:i], str(j), *parts[i + 1 :]]) for j in range(len(owner)))
            yield from (other for other in others if other not in ran and other in recorder.modules)
            return


def along(vector: Tensor, parameter: Tensor, axis: int) -> Tensor:
    """A vector shaped so that it broadcasts along one axis of a parameter.

    >>> along(torch.ones(3), torch.ones(2, 3, 4), 1).shape
    torch.Size([3, 1])
    """
    return vector.reshape(-1, *[1] * (parameter.ndim - axis - 1))


@contextmanager
def changed(parameter: nn.Parameter, value: Tensor) -> Iterator[None]:
    """A parameter with other values, for the time of a block."""
    with changed_all([parameter], [value]):
        yield


@contextmanager
def changed_all(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> Iterator[None]:
    """Parameters with other values, for the time of a block."""
    kept = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
        try:
            yield
        finally:
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.copy_(value)


def _owns_matrix(module: nn.Module) -> bool:
    is_embedding = isinstance(module, nn.Embedding)
    return not is_embedding and any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))


def _rows(tensor: Tensor | None) -> set[bytes]:
    """The feature vectors of a tensor, as bytes."""
    if tensor is None or tensor.ndim == 0:
        return set()
    flat = tensor.detach().reshape(-1, tensor.shape[-1]).contiguous()
    return {row.tobytes() for row in flat.numpy()}
