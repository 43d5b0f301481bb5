"""How far every layer's Jacobian is from what its skip connection alone would give, estimated with random probes."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from normstream.inspect.anatomy import Anatomy
from normstream.inspect.measures.layer_borders import Border, LayerKey, run_layers, whole_layers, with_gradients

PROBES = 4
"""Relative error of the estimate: a few percent for a matrix with hundreds of comparable singular values."""


def jacobian_distances(
    model: nn.Module, inputs: dict[str, Any], anatomy: Anatomy | None, *, probes: int = PROBES, seed: int = 0
) -> tuple[dict[LayerKey, float], tuple[str, ...]]:
    """``||J - skip I||_F / sqrt(n)`` by layer, and notes on what could not be measured.

    J is the Jacobian of what leaves the layer with respect to what enters it, over all n entries of all streams at all
    positions together. A distance of 1 is as far as leaving out the skip connection. In a ``DecoderLM`` skip is 1.

    Args:
        model, inputs, anatomy: as for ``run_layers``.
        probes: number of random vectors; with at least n of them the result is exact.
        seed: of the vectors.

    Source: Hutchinson's estimator, ``||A||_F^2 = E ||v^T A||^2`` for v with independent entries of +1 or -1.

    >>> from normstream.models import DecoderConfig, DecoderLM
    >>> model = DecoderLM(DecoderConfig(placement="pre", dim=8, n_layers=1, n_heads=2)).eval()
    >>> for matrix in (model.layers[0].attention.wo, model.layers[0].feed_forward.w_down):
    ...     _ = nn.init.zeros_(matrix.weight)
    >>> jacobian_distances(model, {"tokens_BT": torch.tensor([[1, 2, 3]])}, None)
    ({('main', 0): 0.0}, ())
    """
    skips = {} if anatomy is None else {(s.name, layer.index): layer.skip for s in anatomy.stacks for layer in s.layers}
    generator = torch.Generator().manual_seed(seed)
    with with_gradients():
        borders, notes = whole_layers(run_layers(model, inputs, anatomy), anatomy)
        distances = {
            key: border_distance(border, skips.get(key, 1.0), probes, generator) for key, border in borders.items()
        }
    return distances, notes


def border_distance(border: Border, skip: float, probes: int, generator: torch.Generator) -> float:
    """The distance of one layer, from streams that still have their graph.

    >>> x = torch.ones(1, 1, 2, requires_grad=True)
    >>> round(border_distance(Border((x,), (3 * x,)), skip=1.0, probes=2, generator=torch.Generator()), 6)
    2.0
    """
    squares = []
    for vectors in _probes(border.leaving, probes, generator):
        pulled = torch.autograd.grad(border.leaving, border.entering, vectors, retain_graph=True, allow_unused=True)
        pairs = zip(pulled, vectors, strict=True)
        squares.append(sum(_square(-skip * v if g is None else g - skip * v) for g, v in pairs))
    size = sum(stream.numel() for stream in border.leaving)
    return math.sqrt(sum(squares) / len(squares) / size)


def _probes(streams: tuple[Tensor, ...], probes: int, generator: torch.Generator) -> Iterator[tuple[Tensor, ...]]:
    """Random signs; or unit vectors of the same length, all of them, which make the mean of squares exact."""
    size = sum(stream.numel() for stream in streams)
    lengths = [stream.numel() for stream in streams]
    for index in range(min(probes, size)):
        if size <= probes:
            flat = torch.zeros(size, dtype=torch.float64)
            flat[index] = math.sqrt(size)
        else:
            flat = 2.0 * torch.randint(2, (size,), generator=generator) - 1
        parts = flat.split(lengths)
        yield tuple(part.view(stream.shape).to(stream) for part, stream in zip(parts, streams, strict=True))


def _square(x: Tensor) -> float:
    return x.double().square().sum().item()
