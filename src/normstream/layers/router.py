"""Which experts a token goes to, with which weights, and how evenly.

Shape suffixes: N tokens, E experts, K experts of a token, D width.
"""

from contextlib import nullcontext
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from normstream.gain_norm import precise_dtype

Gates = Literal["softmax", "sigmoid"]
TINY = 1e-20
"""Added to sums of gates before a division, as in DeepSeek-V3: sigmoids can all be 0."""


class RouterReport(NamedTuple):
    """What a layer of experts reports of one forward pass; coefficients are left to whoever adds up losses."""

    tokens: Tensor
    """Assignments to each expert, (E,), before any is dropped; int64."""
    dropped: Tensor
    """Assignments beyond the experts' capacity, (), int64."""
    balance_loss: Tensor
    """``balance_loss``, ()."""
    z_loss: Tensor
    """``router_z_loss``, ()."""


class Routing(NamedTuple):
    """The choice of experts for each token."""

    chosen: Tensor
    """The experts of each token, the one with the largest score first, (N, K), int64."""
    gates: Tensor
    """The weights of their updates, (N, K), float32 or float64."""
    report: RouterReport
    """Loads and losses; nothing is dropped yet."""


class Router(nn.Module):
    """Token-choice routing: each token takes the K experts with the largest scores.

        l = W z            s = softmax(l) or sigmoid(l)
        chosen = the K largest of s + b
        gates  = scale * s[chosen] / sum(s[chosen])        the division only if normalized

    All of it is in float32 (float64 for float64), also under autocast: with a logit rounded to 8 bits other experts
    would be chosen. The bias b exists with a ``bias_rate`` only; it serves the choice alone, so no gradient reaches it,
    and ``balance`` moves it.

    Args:
        dim: width D of a token.
        n_experts: number of experts E.
        top_k: experts K of a token.
        gates: softmax over all experts, or sigmoid of each.
        normalized: whether the chosen gates are divided by their sum.
        scale: factor on them, after that.
        bias_rate: step of the bias; 0 means no bias.
        logit_scale: learned factors of the logits (nGPT), or None.

    Shape: ``(N, D)`` to a ``Routing``. Source: Shazeer et al. 2017, arXiv 1701.06538; Mixtral, arXiv 2401.04088
    (softmax, normalized); DeepSeek-V3, arXiv 2412.19437 (sigmoid, normalized, scale, bias).

    >>> router = Router(8, n_experts=4, top_k=2)
    >>> routing = router(torch.randn(3, 8))
    >>> routing.chosen.shape, round(routing.gates.sum().item(), 5), routing.report.tokens.sum().item()
    (torch.Size([3, 2]), 3.0, 6)
    """

    branch_outputs = ()
    value_matrices = ()
    bias: Tensor | None

    def __init__(
        self,
        dim: int,
        *,
        n_experts: int,
        top_k: int,
        gates: Gates = "softmax",
        normalized: bool = True,
        scale: float = 1.0,
        bias_rate: float = 0.0,
        logit_scale: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.top_k, self.gates, self.normalized = top_k, gates, normalized
        self.scale, self.bias_rate = scale, bias_rate
        self.scores = nn.Linear(dim, n_experts, bias=False)
        self.logit_scale = logit_scale
        self.register_buffer("bias", torch.zeros(n_experts) if bias_rate else None)

    def reset_parameters(self) -> None:
        """The bias at 0."""
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, z_ND: Float[Tensor, "N D"]) -> Routing:
        high = precise_dtype(z_ND)
        with _without_autocast(z_ND.device):
            logits_NE = F.linear(z_ND.to(high), self.scores.weight.to(high))
        if self.logit_scale is not None:
            logits_NE = self.logit_scale(logits_NE)
        scores_NE = logits_NE.softmax(-1) if self.gates == "softmax" else logits_NE.sigmoid()
        preferred_NE = scores_NE if self.bias is None else scores_NE + self.bias.to(high)
        chosen_NK = preferred_NE.topk(self.top_k).indices
        gates_NK = scores_NE.gather(-1, chosen_NK)
        if self.normalized:
            gates_NK = gates_NK / (gates_NK.sum(-1, keepdim=True) + TINY)
        tokens_E = count(chosen_NK, logits_NE.shape[-1])
        shares_NE = scores_NE if self.gates == "softmax" else scores_NE / (scores_NE.sum(-1, keepdim=True) + TINY)
        losses = balance_loss(tokens_E, shares_NE), router_z_loss(logits_NE)
        return Routing(chosen_NK, self.scale * gates_NK, RouterReport(tokens_E, tokens_E.new_zeros(()), *losses))

    @torch.no_grad()
    def balance(self, tokens_E: Int[Tensor, " E"]) -> None:
        """Moves the bias after an update that had these loads, if there is one:

            b_e <- b_e + bias_rate * sign(mean load - load of e)

        Source: Wang et al. 2024, arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437.

        >>> router = Router(8, n_experts=3, top_k=1, bias_rate=0.5)
        >>> router.balance(torch.tensor([4, 0, 2]))
        >>> router.bias
        tensor([-0.5000,  0.5000,  0.0000])
        """
        if self.bias is not None:
            load_E = tokens_E.to(torch.float64)
            self.bias += self.bias_rate * (load_E.mean() - load_E).sign().to(self.bias)


def count(chosen_NK: Int[Tensor, "N K"], n_experts: int) -> Int[Tensor, " E"]:
    """How many tokens each expert has.

    >>> count(torch.tensor([[0, 2], [2, 3]]), 4)
    tensor([1, 0, 2, 1])
    """
    chosen_A = chosen_NK.flatten()
    return chosen_A.new_zeros(n_experts).scatter_add(0, chosen_A, torch.ones_like(chosen_A))


def balance_loss(tokens_E: Int[Tensor, " E"], shares_NE: Float[Tensor, "N E"]) -> Float[Tensor, ""]:
    """``E sum_e f_e P_e``: f_e the share of all assignments that e has, P_e the mean share of e in a token's scores.

    1 where all experts have equal loads, up to E where one has all. Only P has a gradient. Source: Switch Transformer,
    Fedus et al. 2021, arXiv 2101.03961, equations 4 to 6, after GShard, arXiv 2006.16668; scores of sigmoids are first
    divided by their sum as in DeepSeek-V3, arXiv 2412.19437, which takes the loss of each sequence by itself.

    >>> balance_loss(torch.tensor([2, 0]), torch.tensor([[0.75, 0.25], [0.75, 0.25]])).item()
    1.5
    """
    f_E = tokens_E.to(shares_NE.dtype) / tokens_E.sum().clamp(min=1)
    return len(tokens_E) * (f_E * shares_NE.mean(0)).sum()


def router_z_loss(logits_NE: Float[Tensor, "N E"]) -> Float[Tensor, ""]:
    """The mean over tokens of ``log^2 sum_e exp(l_e)``; it keeps logits near 0. Source: ST-MoE, arXiv 2202.08906.

    >>> router_z_loss(torch.zeros(3, 4))  # log(4)^2
    tensor(1.9218)
    """
    return logits_NE.logsumexp(-1).square().mean()


def _without_autocast(device: torch.device) -> torch.autocast | nullcontext[None]:
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
