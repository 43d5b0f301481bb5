"""An exponential moving average of the weights, which evaluations then use.

After the n-th applied update, n counted from 0 and w being the weights after it,

    ema <- d ema + (1 - d) w    with d = min(decay, (1 + n) / (10 + n))

in float32, starting from ema = w before the first update. The second bound is the usual warm-up: without it the average
would stay near the random start for 1 / (1 - decay) updates. Buffers (a router's bias) are not averaged.

Source: Polyak and Juditsky 1992; the warm-up is that of TensorFlow's ExponentialMovingAverage (``num_updates``).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from normstream.training.checkpoint import check_fit


class Ema:
    """The average of a model's parameters.

    Args:
        model: whose parameters to average; the average starts as a copy of them.
        decay: the largest d.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> average = Ema(model, decay=0.9)
    >>> with torch.no_grad():
    ...     start, _ = model.weight.item(), model.weight.fill_(1.0)
    >>> average.update()
    >>> abs(average.tensors()["weight"].item() - (0.1 * start + 0.9)) < 1e-6
    True
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self.updates = decay, 0
        self.names = [name for name, _ in model.named_parameters()]
        self.parameters = list(model.parameters())
        self.average = [parameter.detach().float().clone() for parameter in self.parameters]

    @torch.no_grad()
    def update(self) -> None:
        """Takes the weights as they are after one more applied update."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for average, parameter in zip(self.average, self.parameters, strict=True):
            average.lerp_(parameter.detach().float(), 1 - decay)
        self.updates += 1

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """While entered, the model has the averaged weights; then those of before, bit for bit."""
        own = [parameter.data for parameter in self.parameters]
        try:
            for parameter, average in zip(self.parameters, self.average, strict=True):
                parameter.data = average.to(parameter.dtype)
            yield
        finally:
            for parameter, data in zip(self.parameters, own, strict=True):
                parameter.data = data

    def tensors(self) -> dict[str, Tensor]:
        """The average by the parameters' names."""
        return {name: average.contiguous() for name, average in zip(self.names, self.average, strict=True)}

    def load(self, tensors: Mapping[str, Tensor], updates: int, source: Path) -> None:
        """Takes over what ``tensors`` gave after so many updates.

        Raises:
            ValueError: naming ``source``, unless names and shapes are the model's.
        """
        check_fit(dict(zip(self.names, self.parameters, strict=True)), tensors, source)
        for name, average in zip(self.names, self.average, strict=True):
            average.copy_(tensors[name])
        self.updates = updates
