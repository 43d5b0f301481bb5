"""How far the first step of training moves the final hidden vectors: the quantity that DeepNet bounds.

DeepNet (arXiv 2203.00555, section 4): with x <- LN(alpha x + G(x)) in each of 2N sublayers, whose two matrices are
scaled by v and w, one SGD step of rate eta moves the output by at most a constant times

    eta * sum_i (v_i^2 + w_i^2) / alpha^2 = eta * 2N (v^2 + w^2) / alpha^2,

so that 2N (v^2 + w^2) / alpha^2 = O(1) keeps the update independent of depth. alpha = (2N)^(1/4) and
v = w = beta = (8N)^(-1/4) make it 1; Post-Norm has alpha = v = w = 1 and 4N. The theorem is about the matrices; gains
and biases of norms, which every one of 2N norms has at full strength, are measured apart.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from normstream.lab.theory.config import TheoryConfig
from normstream.lab.theory.measure import decoder, mean, simplified
from normstream.lab.theory.probe import Subject

RATE = {"sgd": 1e-5, "adam": 1e-7, "sgd_norms": 1e-5}
"""Steps and their rates, so small that the update is proportional to them. sgd and adam: of the matrices;
sgd_norms: of the gains and biases of the norms."""


def first_update(subject: Subject) -> dict[str, float]:
    """RMS of F(theta_1) - F(theta_0) over the entries of the final hidden vectors, divided by the learning rate.

    SGD is theta_1 = theta_0 - eta g; Adam's first step is theta_0 - eta g / (|g| + 1e-12).
    """
    parameters = [parameter for layer in subject.model.layers for parameter in layer.parameters()]
    before = subject.model.hidden(subject.inputs)
    found = torch.autograd.grad(subject.loss(before), parameters, allow_unused=True)
    pairs = [(p, g) for p, g in zip(parameters, found, strict=True) if g is not None]
    matrices, vectors = [(p, g) for p, g in pairs if p.ndim > 1], [(p, g) for p, g in pairs if p.ndim < 2]
    steps = {
        "sgd": matrices,
        "adam": [(p, g / (g.abs() + 1e-12)) for p, g in matrices],
        "sgd_norms": vectors,
    }
    return {kind: moved(subject, before.detach(), step, RATE[kind]) for kind, step in steps.items()}


@torch.no_grad()
def moved(subject: Subject, before: Tensor, step: Sequence[tuple[Tensor, Tensor]], rate: float) -> float:
    """RMS change of the final hidden vectors by a step, which is undone, divided by its rate."""
    kept = [parameter.clone() for parameter, _ in step]
    for parameter, direction in step:
        parameter.sub_(rate * direction)
    change = subject.model.hidden(subject.inputs) - before
    for (parameter, _), old in zip(step, kept, strict=True):
        parameter.copy_(old)
    return math.sqrt(change.square().mean().item()) / rate


def first_updates(placement: str, n_layers: int, config: TheoryConfig) -> dict[str, Any]:
    """``first_update``, the mean over seeds; the simplified model's attention has a W_O here.

    >>> sorted(first_updates("pre", 1, TheoryConfig(dim=8, seeds=(0,), tokens=2)))
    ['adam', 'depth', 'placement', 'sgd', 'sgd_norms']
    """
    samples = []
    for seed in config.seeds:
        if config.model == "decoder":
            one = decoder(placement, n_layers, seed, config)
        else:
            one = simplified(placement, n_layers, seed, config, tokens=config.tokens, output_matrix=True)
        samples.append(first_update(one))
    return {"placement": placement, "depth": n_layers} | mean(samples)
