"""One model at initialization, looked at from outside: hooks on its embedding, its joins and its norms.

Nothing here knows a placement. A border is a point between two sublayers, just after a join; border 0 is the embedding,
border N follows the last of N sublayers. J_b is the Jacobian of a stream at border b with respect to the embedding, G_b
that of the final hidden vectors with respect to the stream, both over all n positions at once. Their Frobenius norms are
estimated as Hutchinson does, ||J||_F^2 = E||J u||^2 = E||v^T J||^2 for Gaussian u and v: one forward pass with a tangent
gives every J_b, one backward pass every G_b.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from normstream.junctions import Junction, State
from normstream.lab.theory.jacobian import closed_form, spectral_norm
from normstream.layers import FeedForward

NORMS = "normstream.norms"


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
    """Border 0, before any norm on it."""
    states: list[State]
    """The state at every border."""
    hidden: Tensor
    """The final hidden vectors."""


def run(subject: Subject, enter: Callable[[Tensor], Tensor]) -> Trace:
    """Runs the model with ``enter(embedding)`` in place of its embedding, and keeps the state after every join."""
    states: list[State] = []
    embeddings: list[Tensor] = []

    def embed(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        embeddings.append(enter(output.detach()))
        return embeddings[0]

    def keep(module: nn.Module, inputs: Any, output: State) -> State:
        states.append(tuple(stream.view_as(stream) for stream in output))  # tensors of this border alone
        return states[-1]

    with hooked([(subject.model.tok_embeddings, embed), *((join, keep) for join in joins(subject.model))]):
        hidden = subject.model.hidden(subject.inputs)
    return Trace(embeddings[0], states, hidden)


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
def input_jacobians(subject: Subject, streams: tuple[str, ...], generator: torch.Generator) -> dict[str, list[float]]:
    """||J_b||_F^2 / (n d) of every stream, by forward differentiation; "output" is that of the final hidden vectors."""

    def enter(embedding: Tensor) -> Tensor:
        tangent = torch.randn(embedding.shape, generator=generator, dtype=embedding.dtype)
        return forward_ad.make_dual(embedding, tangent)

    def square(value: Tensor) -> float:
        tangent = forward_ad.unpack_dual(value).tangent
        return 0.0 if tangent is None else tangent.square().sum().item() / subject_size

    with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):  # the other kernels have no forward differentiation
        trace = run(subject, enter)
        subject_size = trace.hidden.numel()
        found = {name: [square(state[i]) for state in trace.states] for i, name in enumerate(streams)}
        return found | {"output": [square(trace.hidden)]}


@torch.no_grad()
def norm_jacobians(subject: Subject) -> list[dict[str, Any]]:
    """Spectral norm of the Jacobian of every norm of the model at its input at the first position.

    Each with the border after which it stands, E||input||^2 / d over positions and the closed form, if there is one.
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
            square = inputs[0].square().mean().item()
            found.append(
                {"name": name, "border": border, "square": square, "norm": value, "exact": closed_form(module, x_D)}
            )

        return measure

    norms = [(module, look(name, module)) for name, module in subject.model.named_modules() if is_norm(module)]
    with hooked([*((join, passed) for join in joins(subject.model)), *norms]):
        subject.model.hidden(subject.inputs)
    return found


def is_norm(module: nn.Module) -> bool:
    """Whether a module is one of ``normstream.norms``."""
    return type(module).__module__ == NORMS


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
