"""The gradient of the last feed-forward matrix under Post-Norm and Pre-Norm, sharply: Theorem 1 of Xiong et al."""

from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

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
        kept: list[tuple[Tensor, ...]] = []
        inputs: list[Tensor] = []

        def keep(module: torch.nn.Module, entering: tuple[Tensor, ...], _: object, kept: list = kept) -> None:
            kept.append(entering[0])

        def feed(module: torch.nn.Module, entering: tuple[Tensor, ...], _: object, inputs: list = inputs) -> None:
            inputs.append(entering[0])

        with torch.no_grad(), hooked([(joins(one.model)[-1], keep), (last.feed_forward, feed)]):
            one.model.hidden(one.inputs)
        state, z = tuple(stream[:, :1] for stream in kept[0]), inputs[0][:, :1]
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
