"""Which rows of which matrices feed a place inside a layer linearly: scaling their output scales what arrives there.

Found by value, on replays of one layer with some rows' outputs halved; halving is exact in floating point. Fused
matrices (q, k and v in one, gate and up in one, whatever their order) are searched by blocks of rows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normstream.inspect.anatomy import Call
from normstream.inspect.hooks import Changes, Record, Recorder, Run

NEAR = 1e-4
"""Relative difference far above float32's rounding, and far below what a wrong factor of two does."""
ROUNDING = 4e-6
"""Relative to a tensor: what the difference of two tensors close to it may be off by."""
SMALLEST_BLOCKS = 256
"""A matrix is searched in blocks of rows down to this share of it."""


@dataclass(frozen=True)
class Feeder:
    """Rows of the output of a matrix module."""

    call: Call
    rows: tuple[int, ...] | None
    """None: all of them."""


@dataclass(frozen=True)
class Bench:
    """One layer that can be run again with the outputs of its matrices changed."""

    recorder: Recorder
    record: Record
    """The call of the layer, with its arguments."""
    run: Run
    """The layer as it is."""
    matrices: tuple[Call, ...]
    """Matrix modules in the layer, in the order in which they ran."""

    def input_of(self, target: Call, scales: dict[Call, Tensor]) -> Tensor:
        """What arrives at a call when the outputs of some matrices are multiplied, feature by feature."""
        changes = Changes(outputs={call: _times(scale) for call, scale in scales.items()})
        return present(self.recorder.replay(self.record, changes).input(target), target)

    def before(self, target: Call) -> list[Call]:
        """The matrices that ran before a call, the last one first."""
        start = self.run.records[target].start
        return [call for call in reversed(self.matrices) if self.run.records[call].end < start]


def make_bench(recorder: Recorder, record: Record) -> Bench:
    """The bench of a layer whose call was recorded with its arguments."""
    run = recorder.replay(record)
    matrices = tuple(call for call in run.records if is_matrix(recorder.modules[call.path]))
    return Bench(recorder, record, run, matrices)


def is_matrix(module: nn.Module) -> bool:
    """Whether a module is one matrix with or without a bias, as ``nn.Linear``.

    >>> is_matrix(nn.Linear(2, 2)), is_matrix(nn.Embedding(2, 2)), is_matrix(nn.LayerNorm(2))
    (True, False, False)
    """
    parameters = list(module.parameters(recurse=False))
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    is_alone = len(matrices) == 1 and len(parameters) <= 2 and not list(module.children())
    return is_alone and not isinstance(module, nn.Embedding)


def feeders_of(bench: Bench, target: Call) -> tuple[Feeder, ...]:
    """The rows whose outputs scale, together, what arrives at ``target``; empty if nothing was found.

    First rows whose values arrive as they are (at a q or k norm, a latent norm), then rows that the target is linear
    in (values before a norm on the attention's output, the up projection of a gated feed-forward).
    """
    arriving = present(bench.run.input(target), target)
    for tokens in (slice(None), slice(1)):  # rotated before the norm, only the first token is what it was
        found = tuple(f for call in bench.before(target) if (f := _carried(bench, call, arriving, tokens)) is not None)
        if found and _is_halved(bench, target, found):
            return found
    for call in bench.before(target):
        feeder = linear_rows(bench, call, target)
        if feeder is not None:
            return (feeder,)
    return ()


def _carried(bench: Bench, call: Call, arriving: Tensor, tokens: slice) -> Feeder | None:
    """Rows whose values are, at some tokens, all among those that arrive."""
    output = present(bench.run.output(call), call)
    is_carried = torch.isin(output.reshape(-1, output.shape[-1])[tokens], arriving).all(0)
    return _feeder(call, is_carried) if is_carried.any() else None


def linear_rows(bench: Bench, source: Call, target: Call) -> Feeder | None:
    """Rows of ``source`` that ``target``'s input is linear in, if halving all of them halves it; else None."""
    n_rows = present(bench.run.output(source), source).shape[-1]
    whole = bench.input_of(target, {})

    def at(rows: Sequence[range], factor: float) -> Tensor:
        scale = torch.ones(n_rows, dtype=whole.dtype)
        for block in rows:
            scale[block.start : block.stop] = factor
        return bench.input_of(target, {source: scale})

    linear: list[range] = []
    for blocks in _levels(n_rows):
        for block in blocks:
            if not any(block.start in known for known in linear) and _is_linear(whole, lambda f, b=block: at([b], f)):
                linear.append(block)
        if linear and near(2 * at(linear, 0.5), whole):
            rows = torch.zeros(n_rows, dtype=torch.bool)
            for block in linear:
                rows[block.start : block.stop] = True
            return _feeder(source, rows)
    return None


def _is_linear(whole: Tensor, at: Callable[[float], Tensor]) -> bool:
    """Whether a block has an effect, and half of it at one half."""
    effect = whole - at(0.0)
    rest = 2 * (whole - at(0.5)) - effect
    noise = ROUNDING * _size(whole)
    return bool((effect.abs() > NEAR * _size(whole)).any()) and bool((rest.abs() <= NEAR * _size(effect) + noise).all())


def _levels(n_rows: int) -> Iterator[list[range]]:
    """Ever smaller equal blocks: split by the largest prime factors first, so that the thirds of q, k and v come soon.

    >>> [len(blocks) for blocks in _levels(12)]
    [1, 3, 6, 12]
    """
    count = 1
    yield [range(n_rows)]
    for prime in _primes(n_rows):
        count *= prime
        if count > SMALLEST_BLOCKS:
            return
        size = n_rows // count
        yield [range(i * size, (i + 1) * size) for i in range(count)]


def _primes(n: int) -> list[int]:
    """Prime factors, the largest first."""
    factors, divisor = [], 2
    while n > 1:
        while n % divisor == 0:
            factors.append(divisor)
            n //= divisor
        divisor += 1
    return factors[::-1]


def _is_halved(bench: Bench, target: Call, feeders: tuple[Feeder, ...]) -> bool:
    scales = {}
    for feeder in feeders:
        output = present(bench.run.output(feeder.call), feeder.call)
        scale = torch.ones(output.shape[-1], dtype=output.dtype)
        scale[slice(None) if feeder.rows is None else list(feeder.rows)] = 0.5
        scales[feeder.call] = scale
    return near(2 * bench.input_of(target, scales), present(bench.run.input(target), target))


def _feeder(call: Call, mask: Tensor) -> Feeder:
    return Feeder(call, None if mask.all() else tuple(mask.nonzero().flatten().tolist()))


def output_axis(module: nn.Module, given: Tensor, output: Tensor) -> int:
    """Which axis of the module's matrix its output features are on: 0 as in ``nn.Linear``, or 1 (GPT-2's matrices).

    >>> linear, x = nn.Linear(3, 3), torch.randn(2, 3)
    >>> output_axis(linear, x, linear(x))
    0
    """
    weight = next(parameter for parameter in module.parameters(recurse=False) if parameter.ndim >= 2)
    if weight.ndim != 2 or weight.shape != (given.shape[-1], output.shape[-1]):
        return 0
    if weight.shape != (output.shape[-1], given.shape[-1]):
        return 1
    bias = next((parameter for parameter in module.parameters(recurse=False) if parameter.ndim == 1), None)
    plain, transposed = F.linear(given, weight, bias), F.linear(given, weight.T, bias)
    return 0 if (plain - output).norm() <= (transposed - output).norm() else 1


def near(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors differ by rounding only, each feature (last axis) by its own measure: some are massive.

    >>> near(torch.ones(2), 1.00001 * torch.ones(2)), near(torch.tensor([1e6, 0.0]), torch.tensor([1e6, 1.0]))
    (True, False)
    """
    return a.shape == b.shape and bool(((a - b).abs() <= NEAR * _size(b)).all())


def _size(tensor: Tensor) -> Tensor:
    """Largest magnitude of each feature."""
    return tensor.abs().reshape(-1, tensor.shape[-1]).amax(0)


def _times(scale: Tensor) -> Callable[[Tensor | None, Tensor], Tensor]:
    return lambda given, output: output * scale


def present(tensor: Tensor | None, call: Call) -> Tensor:
    """The tensor; ValueError if a call has none."""
    if tensor is None:
        raise ValueError(f"{call} did not run, or takes and returns no tensor")
    return tensor
