"""Subjects of the measurements, and their averages over seeds."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normstream import placements
from normstream.init import initialize
from normstream.lab.theory.config import TheoryConfig
from normstream.lab.theory.probe import (
    Subject,
    gradients,
    hidden_squares,
    input_jacobians,
    norm_jacobians,
    output_jacobians,
    run,
)
from normstream.lab.theory.xiong import SimplifiedModel, draw, random_numbers
from normstream.models import DecoderLM

Measured = dict[str, Any]


@functools.lru_cache(maxsize=1)
def built(placement: str, dim: int, n_layers: int, ffn_dim: int, output_matrix: bool) -> SimplifiedModel:
    """A simplified model without values; the seeds of a measurement draw theirs into the same one, in turn."""
    with torch.device("meta"):
        model = SimplifiedModel(placement, dim=dim, n_layers=n_layers, ffn_dim=ffn_dim, output_matrix=output_matrix)
    return model.double().to_empty(device="cpu")


def simplified(
    placement: str, n_layers: int, seed: int, config: TheoryConfig, *, tokens: int, output_matrix: bool = False
) -> Subject:
    """The model of Xiong et al. on one Gaussian sequence; the loss is cross-entropy at the first position."""
    model = built(placement, config.dim, n_layers, config.ffn_dim, output_matrix)
    draw(model, seed)
    generator = random_numbers("inputs", seed)
    inputs = torch.randn(1, tokens, config.dim, generator=generator, dtype=torch.float64)

    def loss(hidden: Tensor) -> Tensor:
        return F.cross_entropy(model.lm_head(hidden[0, :1]), torch.zeros(1, dtype=torch.long))

    return Subject(model.eval(), inputs, loss)


def decoder(placement: str, n_layers: int, seed: int, config: TheoryConfig) -> Subject:
    """A real decoder on random tokens; the loss is cross-entropy with random targets, the mean over positions."""
    model = DecoderLM(config.decoder(placement, n_layers)).double()
    initialize(model, seed)
    generator = random_numbers("inputs", seed)
    inputs, targets = torch.randint(model.config.vocab_size, (2, 1, config.tokens), generator=generator)

    def loss(hidden: Tensor) -> Tensor:
        return F.cross_entropy(model.lm_head(hidden)[0], targets[0])

    return Subject(model.eval(), inputs, loss)


def subject(placement: str, n_layers: int, seed: int, config: TheoryConfig) -> Subject:
    """What the configuration asks for."""
    if config.model == "decoder":
        return decoder(placement, n_layers, seed, config)
    return simplified(placement, n_layers, seed, config, tokens=config.tokens)


def measure(placement: str, n_layers: int, config: TheoryConfig) -> Measured:
    """Everything that is measured of one placement at one depth; the norms' Jacobians with the first seed alone.

    >>> found = measure("pre", 1, TheoryConfig(dim=8, seeds=(0,), tokens=2))
    >>> sorted(found["gradient"]), len(found["square"]["x"])
    (['block', 'ffn'], 3)
    """
    streams = placements.get(placement).streams
    samples = []
    for seed in config.seeds:
        one = subject(placement, n_layers, seed, config)
        generator = random_numbers("probes", seed)
        trace = run(one, lambda embedding: embedding.requires_grad_())
        samples.append(
            {
                "square": hidden_squares(trace, streams),
                "norm_input": trace.norm_inputs,
                "gradient": gradients(one, trace),
                "from_embedding": input_jacobians(one, trace, streams, generator),
                "to_output": output_jacobians(trace, streams, generator),
            }
        )
    found = mean(samples)
    for name in ("from_embedding", "to_output"):
        found[name] = {key: [math.sqrt(square) for square in squares] for key, squares in found[name].items()}
    found["last_squares"] = [sample["square"][streams[0]][-1] for sample in samples]
    norms = norm_jacobians(subject(placement, n_layers, config.seeds[0], config))
    return {"placement": placement, "depth": n_layers, "streams": list(streams)} | found | {"norms": norms}


def mean(samples: Sequence[Any]) -> Any:
    """The mean of equally nested numbers.

    >>> mean([{"a": [1.0, 2.0]}, {"a": [3.0, 4.0]}])
    {'a': [2.0, 3.0]}
    """
    first = samples[0]
    if isinstance(first, dict):
        return {key: mean([sample[key] for sample in samples]) for key in first}
    if isinstance(first, list):
        return [mean(values) for values in zip(*samples, strict=True)]
    return fmean(samples)


def all_measured(
    names: Iterable[str], config: TheoryConfig, note: Callable[[str], None] = lambda _: None
) -> list[Measured]:
    """``measure`` for every placement and depth; ``note`` is told what is done next."""
    found = []
    for name in names:
        for n_layers in config.depths:
            note(f"{name}, {n_layers} blocks")
            found.append(measure(name, n_layers, config))
    return found
