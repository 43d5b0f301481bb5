"""How far the first step of training moves the final hidden vectors: the quantity that DeepNet bounds.

DeepNet (arXiv 2203.00555, section 4): with x <- LN(alpha x + G(x)) in each of 2N sublayers, whose two matrices are
scaled by v and w, one SGD step of rate eta moves the output by at most a constant times

    eta * sum_i (v_i^2 + w_i^2) / alpha^2 = eta * 2N (v^2 + w^2) / alpha^2,

so that 2N (v^2 + w^2) / alpha^2 = O(1) keeps the update independent of depth. alpha = (2N)^(1/4) and
v = w = beta = (8N)^(-1/4) make it 1; Post-Norm has alpha = v = w = 1 and 4N. The theorem is about the matrices; gains
and biases of norms, which every one of 2N norms has at full strength, are measured apart.
"""

import math
from typing import Any

import torch

from normstream.lab.theory.config import TheoryConfig
from normstream.lab.theory.measure import decoder, mean, simplified
from normstream.lab.theory.probe import Subject

STEPS = ("sgd", "adam", "sgd_norms")
"""sgd, adam: the first step of each, of the matrices; sgd_norms: of the gains and biases of the norms by SGD."""
RATE = {"sgd": 1e-5, "adam": 1e-7, "sgd_norms": 1e-5}
"""Learning rates so small that the update is proportional to them."""


def first_update(subject: Subject, kind: str) -> float:
    """RMS of F(theta_1) - F(theta_0) over the entries of the final hidden vectors, divided by the learning rate.

    SGD is theta_1 = theta_0 - eta g; Adam's first step is theta_0 - eta g / (|g| + 1e-12).
    """
    parameters = [p for layer in subject.model.layers for p in layer.parameters() if (p.ndim < 2) == ("norms" in kind)]
    before = subject.model.hidden(subject.inputs)
    found = torch.autograd.grad(subject.loss(before), parameters, allow_unused=True)
    steps = [
        (p, RATE[kind] * (g / (g.abs() + 1e-12) if kind == "adam" else g))
        for p, g in zip(parameters, found, strict=True)
        if g is not None
    ]
    with torch.no_grad():
        for parameter, step in steps:
            parameter.sub_(step)
        after = subject.model.hidden(subject.inputs)
        for parameter, step in steps:
            parameter.add_(step)
    return math.sqrt((after - before.detach()).square().mean().item()) / RATE[kind]


def first_updates(placement: str, n_layers: int, config: TheoryConfig) -> dict[str, Any]:
    """``first_update`` of each kind, the mean over seeds; the simplified model's attention has a W_O here.

    >>> sorted(first_updates("pre", 1, TheoryConfig(dim=8, seeds=(0,), tokens=2)))
    ['adam', 'depth', 'placement', 'sgd', 'sgd_norms']
    """
    samples = []
    for seed in config.seeds:
        if config.model == "decoder":
            one = decoder(placement, n_layers, seed, config)
        else:
            one = simplified(placement, n_layers, seed, config, tokens=config.tokens, output_matrix=True)
        samples.append({kind: first_update(one, kind) for kind in STEPS})
    return {"placement": placement, "depth": n_layers} | mean(samples)
