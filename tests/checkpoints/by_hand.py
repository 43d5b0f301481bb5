"""Small Transformers written out, whose norms and branches stand wherever a test wants them."""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normstream.inspect.anatomy import Anatomy
from normstream.inspect.probing.probe import anatomy_of
from normstream.norms import RMSNorm

TOKENS = {"input_ids": torch.arange(3, 16)[None]}


class Attention(nn.Module):
    """One causal head."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.o(F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), is_causal=True))


class FeedForward(nn.Module):
    """Gated."""

    def __init__(self, dim: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """h + N(F(N(h))) twice; without output norms if not ``sandwich``."""

    def __init__(self, dim: int, norm: Callable[[], nn.Module], *, sandwich: bool, clamp: float | None) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(dim), FeedForward(dim, F.silu)
        self.read = nn.ModuleList(norm() for _ in range(2))
        self.after = nn.ModuleList(norm() if sandwich else nn.Identity() for _ in range(2))
        self.clamp = clamp

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.after[0](self.attention(self.read[0](h)))
        h = h + self.after[1](self.feed_forward(self.read[1](h)))
        return h if self.clamp is None else h.clamp(-self.clamp, self.clamp)


class Toy(nn.Module):
    """A language model with embeddings of std 0.01 and randomized gains."""

    def __init__(
        self,
        *,
        sandwich: bool = False,
        clamp: float | None = None,
        unit_start: bool = False,
        dim: int = 16,
        n_layers: int = 2,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, dim)
        self.start = RMSNorm(dim, eps=eps, gain="none") if unit_start else nn.Identity()
        self.layers = nn.ModuleList(
            Layer(dim, lambda: RMSNorm(dim, eps=eps), sandwich=sandwich, clamp=clamp) for _ in range(n_layers)
        )
        self.norm = RMSNorm(dim, eps=eps)
        self.head = nn.Linear(dim, 50)
        nn.init.normal_(self.embedding.weight, std=0.01)
        for module in self.modules():
            if isinstance(module, RMSNorm) and not unit_start:
                module.weight = nn.Parameter(torch.empty(dim).uniform_(0.5, 1.5))
        self.eval()

    def forward(self, input_ids: Tensor) -> Tensor:
        h = self.start(self.embedding(input_ids))
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h))


@cache
def anatomy_of_toy(*, sandwich: bool = False, n_layers: int = 2) -> Anatomy:
    """The wiring, which is the same whatever the weights are."""
    return anatomy_of(Toy(sandwich=sandwich, n_layers=n_layers), TOKENS)
