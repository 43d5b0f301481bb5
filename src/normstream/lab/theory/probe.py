"""One model at initialization, looked at from outside: hooks on its embedding, its joins and its norms.

Nothing here knows a placement. A border is the point after a join: border 0 follows the first one, whose update is the
embedding, border N that of the last of N sublayers. J_b is the Jacobian of a stream at border b with respect to the
embedding, G_b that of the final hidden vectors with respect to the stream, both over all n positions at once. Their
Frobenius norms are estimated as Hutchinson does, ||J||_F^2 = E||J u||^2 = E||v^T J||^2 for Gaussian u and v. One
backward pass gives v^T G_b at every border; J_b u is a central difference, two forward passes, since not every
operation can be differentiated forwards (in float64 its error is about 1e-9).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normstream.junctions import Junction, State
from normstream.lab.theory.jacobian import closed_form, spectral_norm
from normstream.layers import FeedForward

NORMS = "normstream.norms"
STEP = 1e-5
"""Step of the central difference, relative to the RMS of the embedding."""


@dataclass(frozen=True)
class Subject:
    """A model with initial weights, an input of n positions, and the loss of its final hidden vectors."""

    model: Any
    """``hidden(inputs)``, ``tok_embeddings``, ``layers`` and ``placement``, as a ``DecoderLM`` has them."""
    inputs: Tensor
    loss: Callable[[Tensor], Tensor]


@dataclass
class Trace:
    """What one forward pass left behind."""

    embedding: Tensor
    """The embedding, before any norm on it."""
    states: list[State]
    """The state at every border."""
    hidden: Tensor
    """The final hidden vectors."""
    norm_inputs: dict[str, float]
    """Mean square of the input of every norm, by its name."""


def run(subject: Subject, enter: Callable[[Tensor], Tensor]) -> Trace:
    """Runs the model with ``enter(embedding)`` in place of its embedding, and keeps the state after every join."""
    states: list[State] = []
    embeddings: list[Tensor] = []
    norm_inputs: dict[str, float] = {}

    def look(name: str) -> Callable[..., None]:
        def measure(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
            norm_inputs[name] = inputs[0].detach().square().mean().item()

        return measure

    def embed(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        embeddings.append(enter(output.detach()))
        return embeddings[0]

    def keep(module: nn.Module, inputs: Any, output: State) -> State:
        states.append(tuple(stream.view_as(stream) for stream in output))  # tensors of this border alone
        return states[-1]

    norms = [(module, look(name)) for name, module in norms_of(subject.model)]
    with hooked([(subject.model.tok_embeddings, embed), *((join, keep) for join in joins(subject.model)), *norms]):
        hidden = subject.model.hidden(subject.inputs)
    return Trace(embeddings[0], states, hidden, norm_inputs)


def hidden_squares(trace: Trace, streams: tuple[str, ...]) -> dict[str, list[float]]:
    """E||x||^2 / d of every stream at every border, the mean over positions."""
    return {name: [state[i].square().mean().item() for state in trace.states] for i, name in enumerate(streams)}


def gradients(subject: Subject, trace: Trace) -> dict[str, list[float]]:
    """Norm of the loss's gradient for all parameters of each block, and for its last feed-forward matrix."""
    blocks = [list(layer.parameters()) for layer in subject.model.layers]
    flat = [parameter for block in blocks for parameter in block]
    found = torch.autograd.grad(subject.loss(trace.hidden), flat, retain_graph=True, allow_unused=True)
    norms = {id(p): 0.0 if g is None else g.norm().item() for p, g in zip(flat, found, strict=True)}
    return {
        "block": [sum(norms[id(p)] ** 2 for p in block) ** 0.5 for block in blocks],
        "ffn": [norms[id(last_ffn(layer).w_down.weight)] for layer in subject.model.layers],
    }


def last_ffn(layer: nn.Module) -> FeedForward:
    """The last feed-forward of a block."""
    return [module for module in layer.modules() if isinstance(module, FeedForward)][-1]


def output_jacobians(trace: Trace, streams: tuple[str, ...], generator: torch.Generator) -> dict[str, list[float]]:
    """||G_b||_F^2 / (n d) of every stream; "output" is the one number for the embedding itself."""
    v = torch.randn(trace.hidden.shape, generator=generator, dtype=trace.hidden.dtype)
    wanted = [trace.embedding, *(state[i] for i in range(len(streams)) for state in trace.states)]
    found = torch.autograd.grad(trace.hidden, wanted, v, allow_unused=True)
    embedding, *squares = [0.0 if g is None else g.square().sum().item() / v.numel() for g in found]
    borders = len(trace.states)
    return {name: squares[i * borders : (i + 1) * borders] for i, name in enumerate(streams)} | {"output": [embedding]}


@torch.no_grad()
def input_jacobians(
    subject: Subject, trace: Trace, streams: tuple[str, ...], generator: torch.Generator
) -> dict[str, list[float]]:
    """||J_b||_F^2 / (n d) of every stream; "output" is that of the final hidden vectors."""
    u = torch.randn(trace.embedding.shape, generator=generator, dtype=trace.embedding.dtype)
    step = STEP * trace.embedding.square().mean().sqrt()
    high, low = run(subject, lambda e: e + step * u), run(subject, lambda e: e - step * u)

    def square(one: Tensor, other: Tensor) -> float:
        return ((one - other) / (2 * step)).square().sum().item() / u.numel()

    found = {
        name: [square(one[i], other[i]) for one, other in zip(high.states, low.states, strict=True)]
        for i, name in enumerate(streams)
    }
    return found | {"output": [square(high.hidden, low.hidden)]}


@torch.no_grad()
def norm_jacobians(subject: Subject) -> list[dict[str, Any]]:
    """Spectral norm of the Jacobian of every norm of the model at its input at the first position.

    Each with the border that it belongs to, and with the closed form if there is one.
    """
    found: list[dict[str, Any]] = []
    border = -1

    def passed(module: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal border
        border += 1

    def look(name: str, module: nn.Module) -> Callable[..., None]:
        def measure(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
            x_D = inputs[0].reshape(-1, inputs[0].shape[-1])[0]
            with torch.enable_grad():
                value = spectral_norm(module.forward, x_D)
            place = border + ("join." in name)  # the hook of a join comes after its norms
            found.append({"name": name, "border": place, "norm": value, "exact": closed_form(module, x_D)})

        return measure

    norms = [(module, look(name, module)) for name, module in norms_of(subject.model)]
    with hooked([*((join, passed) for join in joins(subject.model)), *norms]):
        subject.model.hidden(subject.inputs)
    return found


def norms_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every module of ``normstream.norms`` in a model, with its name."""
    return [(name, module) for name, module in model.named_modules() if type(module).__module__ == NORMS]


def joins(model: nn.Module) -> list[nn.Module]:
    """The join of every junction of a model."""
    return [module.join for module in model.modules() if isinstance(module, Junction)]


@contextmanager
def hooked(functions: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Forward hooks for the time of a ``with``."""
    handles = [module.register_forward_hook(function) for module, function in functions]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
