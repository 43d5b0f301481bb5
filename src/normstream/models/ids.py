"""Whether numbers that stand for rows of a table lie inside it."""

import torch
from torch import Tensor


def check_ids(what: str, ids: Tensor, end: int, name: str) -> None:
    """Raises ValueError for a number outside [0, end), ``end`` being the option ``name``.

    Only on a CPU and outside of torch.compile: on another device the check would wait for it; there, CUDA's own
    assertion in the embedding fails.

    >>> check_ids("token ids", torch.tensor([[7]]), 5, "vocab_size")
    Traceback (most recent call last):
    ValueError: token ids must be at least 0 and below vocab_size 5, got 7
    """
    if ids.is_cpu and ids.numel() and not torch.compiler.is_compiling():
        lowest, highest = (bound.item() for bound in ids.aminmax())
        if not (lowest >= 0 and highest < end):
            wrong = highest if lowest >= 0 else lowest
            raise ValueError(f"{what} must be at least 0 and below {name} {end}, got {wrong}")
