"""A model in evaluation mode for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """While entered, the model is in evaluation mode; then as it was, whatever happened.

    >>> model = nn.Dropout()
    >>> with evaluating(model):
    ...     model.training
    False
    >>> model.training
    True
    """
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
