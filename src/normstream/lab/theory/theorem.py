"""The gradient of the last feed-forward matrix under Post-Norm and Pre-Norm, sharply: Theorem 1 of Xiong et al."""

from statistics import fmean
from typing import Any, NamedTuple

import torch

from normstream.lab.theory.config import TheoryConfig
from normstream.lab.theory.measure import simplified
from normstream.lab.theory.probe import hooked, joins
from normstream.lab.theory.xiong import draw_linear, random_numbers

DRAWS = 32


class LastGradient(NamedTuple):
    """Means over seeds and draws."""

    gradient: float
    """||dl / dW_{2,L}||_F for the loss at one position."""
    square: float
    """E||x + F(z)||^2 / d there, after the last update and before any norm: what the last norm divides by."""


def last_gradient(placement: str, n_layers: int, config: TheoryConfig) -> LastGradient:
    """``||dl / dW_{2,L}||_F`` and the square that it is divided by.

    One draw of W_1 makes the norm of the hidden vector vary by about 1 / sqrt(d), so that a mean over a few seeds is
    too coarse for a check within 3 %: the last feed-forward and the head are drawn 32 times for each seed.

    >>> found = last_gradient("post", 1, TheoryConfig(dim=32, seeds=(0,), tokens=4))
    >>> bool(1.2 < found.square < 1.8)
    True
    """
    gradients, squares = [], []
    for seed in config.seeds:
        one = simplified(placement, n_layers, seed, config, tokens=config.tokens)
        last, head = one.model.layers[-1], one.model.lm_head
        entered: dict[torch.nn.Module, Any] = {}

        def keep(module: torch.nn.Module, inputs: Any, _: object, entered: dict = entered) -> None:
            entered[module] = inputs[0]

        join = joins(one.model)[-1]
        with torch.no_grad(), hooked([(join, keep), (last.feed_forward, keep)]):
            one.model.hidden(one.inputs)
        state = tuple(stream[:, :1] for stream in entered[join])
        z = entered[last.feed_forward][:, :1]
        generator = random_numbers("draws", seed)
        for _ in range(DRAWS):
            for matrix in (last.feed_forward.w_up, last.feed_forward.w_down, head):
                draw_linear(matrix, 1.0, generator)
            update = last.feed_forward(z)
            _, hidden = last.after_feed_forward(state, update)
            (gradient,) = torch.autograd.grad(one.loss(hidden), last.feed_forward.w_down.weight)
            gradients.append(gradient.norm().item())
            squares.append((state[0] + update).detach().square().mean().item())
    return LastGradient(fmean(gradients), fmean(squares))
