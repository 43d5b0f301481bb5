"""Mixture-of-experts sublayer: each token is given to a few of many feed-forwards.

Shape suffixes: B batch, T sequence, D width, N = B T tokens, K experts of a token, A = N K assignments, R those that
are not dropped, sorted by expert, E experts, F hidden width of an expert.
"""

import math
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from normstream.checks import check_types
from normstream.layers.expert_linear import ExpertLinear, product_dtype
from normstream.layers.feed_forward import FUNCTIONS, Activation, is_gated
from normstream.layers.router import Gates, Router, RouterReport
from normstream.names import check_choice


@dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts instead of the feed-forward of a block; off with n_experts 0.

    Raises ValueError for numbers that do not fit each other.

    >>> MoEConfig(n_experts=4, top_k=8)
    Traceback (most recent call last):
    ValueError: moe.top_k 8 is above moe.n_experts 4; change one of them
    """

    n_experts: int = 0
    """Number of experts that tokens are routed to; 0 means an ordinary feed-forward."""
    top_k: int = 2
    """Experts that each token is given to."""
    ffn_dim: int | None = None
    """Hidden width of an expert; None means that of the model's feed-forward."""
    n_shared: int = 0
    """Experts that every token is given to besides, built as one feed-forward of n_shared times an expert's width."""
    gates: Gates = "softmax"
    """Scores of experts: softmax over all of them, or sigmoid of each (DeepSeek-V3)."""
    normalized: bool = True
    """Whether the gates of a token's experts are divided by their sum (Mixtral, DeepSeek-V3; not OLMoE)."""
    scale: float = 1.0
    """Factor on the gates (DeepSeek-V3 2.5)."""
    balance_loss: float = 0.01
    """Coefficient of the load-balance loss (Switch and OLMoE 0.01); 0 leaves it out."""
    bias_rate: float = 0.0
    """Step of the bias that balances loads without a loss (DeepSeek-V3 0.001); 0 means no bias."""
    z_loss: float = 0.0
    """Coefficient of the router's z-loss (ST-MoE and OLMoE 0.001); 0 leaves it out."""
    capacity: float | None = None
    """In training an expert takes at most this many times its even share of tokens; None means that none is dropped."""
    first_dense: int = 0
    """Number of blocks at the start that keep their feed-forward (DeepSeek-V3 3)."""

    def __post_init__(self) -> None:
        check_types(self)
        check_choice("moe.gates", self.gates, Gates)
        for name, least in (("n_experts", 0), ("top_k", 1), ("ffn_dim", 1), ("n_shared", 0), ("first_dense", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"moe.{name} must be at least {least}, got {value}")
        for name in ("balance_loss", "bias_rate", "z_loss"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"moe.{name} must be a number of at least 0, got {getattr(self, name)}")
        for name in ("scale", "capacity"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"moe.{name} must be a positive number, got {value}")
        if self.n_experts:
            self._check_choice()
        elif given := [f.name for f in fields(self) if getattr(self, f.name) != f.default]:
            raise ValueError(f"moe.{given[0]} is given, but moe.n_experts is 0, so there are no experts; give it too")

    def _check_choice(self) -> None:
        if self.top_k > self.n_experts:
            raise ValueError(f"moe.top_k {self.top_k} is above moe.n_experts {self.n_experts}; change one of them")
        if self.normalized and self.top_k == 1 < self.n_experts:
            raise ValueError(
                "with moe.top_k 1 a normalized gate is always 1, so that the router would learn nothing from the task; "
                "set moe.normalized to false or moe.top_k to 2"
            )


class Experts(nn.Module):
    """E feed-forwards, ``o = W_down,e N(h)`` with h as in ``FeedForward``, for rows that are sorted by expert.

    What the placement puts on the hidden vector, a norm N or nGPT's factors, is shared by the experts of a layer.

    Args:
        dim: width D of input and update.
        n_experts: their number.
        ffn_dim: hidden width F of one expert.
        activation: as in ``FeedForward``.
        hidden_norm, up_scale, gate_scale: as in ``FeedForward``.

    Shape: rows ``(R, D)`` and the number of rows of each expert ``(E,)`` to ``(R, D)``.

    >>> Experts(8, n_experts=2, ffn_dim=16, activation="swiglu")(torch.zeros(3, 8), torch.tensor([1, 2])).shape
    torch.Size([3, 8])
    """

    branch_outputs = ("w_down",)

    def __init__(
        self,
        dim: int,
        *,
        n_experts: int,
        ffn_dim: int,
        activation: Activation,
        hidden_norm: nn.Module | None = None,
        up_scale: nn.Module | None = None,
        gate_scale: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.w_gate = ExpertLinear(n_experts, dim, ffn_dim) if is_gated(activation) else None
        self.w_up = ExpertLinear(n_experts, dim, ffn_dim)
        self.w_down = ExpertLinear(n_experts, ffn_dim, dim)
        self.hidden_norm, self.up_scale, self.gate_scale = hidden_norm, up_scale, gate_scale

    def forward(self, x_RD: Float[Tensor, "R D"], rows_E: Int[Tensor, " E"]) -> Float[Tensor, "R D"]:
        function = FUNCTIONS[self.activation]
        up_RF = self.w_up(x_RD, rows_E)
        if self.up_scale is not None:
            up_RF = self.up_scale(up_RF)
        if self.w_gate is None:
            hidden_RF = function(up_RF)
        else:
            gate_RF = self.w_gate(x_RD, rows_E)
            hidden_RF = function(gate_RF if self.gate_scale is None else self.gate_scale(gate_RF)) * up_RF
        if self.hidden_norm is not None:
            hidden_RF = self.hidden_norm(hidden_RF)
        return self.w_down(hidden_RF, rows_E)


class MoE(nn.Module):
    """``o = sum_k g_k F_{e_k}(z) + F_shared(z)``, the experts e_k and gates g_k of each token chosen by a router.

    With a capacity c, in training, an expert takes its first ``ceil(c K N / E)`` assignments in the order of the tokens
    (sequence by sequence), and adds nothing to the others; dropping the lowest gates instead would let later tokens of
    a sequence decide about earlier ones. In evaluation nothing is dropped, so that a token's update depends on that
    token alone.

    Sums over a token's experts are in float32; every sum has one order, on every device.

    Args:
        router: chooses.
        experts: the routed experts.
        shared: a feed-forward that every token passes, or None.
        capacity: c, or None for no limit.

    Shape: ``(B, T, D)`` to the update ``(B, T, D)`` and a ``RouterReport``. Sources: see ``Router``; capacity: Switch
    Transformer, arXiv 2101.03961, which drops in evaluation too; shared experts: DeepSeekMoE, arXiv 2401.06066.

    >>> moe = MoE(
    ...     Router(8, n_experts=4, top_k=2),
    ...     Experts(8, n_experts=4, ffn_dim=16, activation="swiglu"),
    ... )
    >>> update, report = moe(torch.randn(1, 3, 8))
    >>> update.shape, report.tokens.sum().item()
    (torch.Size([1, 3, 8]), 6)
    """

    def __init__(
        self, router: Router, experts: Experts, shared: nn.Module | None = None, capacity: float | None = None
    ) -> None:
        super().__init__()
        self.router, self.experts, self.shared, self.capacity = router, experts, shared, capacity

    def forward(
        self, z_BTD: Float[Tensor, "B T D"], context: object = None
    ) -> tuple[Float[Tensor, "B T D"], RouterReport]:
        z_ND = z_BTD.flatten(0, -2)
        chosen_NK, gates_NK, report = self.router(z_ND)
        order_R, rows_E = self._sorted(chosen_NK, report.tokens)
        x_ND = z_ND.to(product_dtype(z_ND))
        x_AD = x_ND[:, None].expand(-1, chosen_NK.shape[1], -1).flatten(0, 1)
        y_RD = self.experts(x_AD.index_select(0, order_R), rows_E)
        y_AD = y_RD.new_zeros(x_AD.shape).index_copy(0, order_R, y_RD)
        update_ND = (gates_NK[..., None] * y_AD.unflatten(0, chosen_NK.shape)).sum(1).to(y_RD.dtype)
        update_BTD = update_ND.view(z_BTD.shape)
        if self.shared is not None:
            update_BTD = update_BTD + self.shared(z_BTD)
        return update_BTD, report._replace(dropped=report.tokens.sum() - rows_E.sum())

    def _sorted(self, chosen_NK: Tensor, tokens_E: Tensor) -> tuple[Tensor, Tensor]:
        """The assignments by expert, in the order of tokens within one, and how many each expert takes."""
        chosen_A = chosen_NK.flatten()
        order_A = chosen_A.argsort(stable=True)
        if self.capacity is None or not self.training:
            return order_A, tokens_E
        limit = math.ceil(self.capacity * len(chosen_A) / len(tokens_E))
        first_E = tokens_E.cumsum(0) - tokens_E
        place_A = torch.arange(len(chosen_A), device=chosen_A.device) - first_E[chosen_A[order_A]]
        return order_A[place_A < limit], tokens_E.clamp(max=limit)

    def extra_repr(self) -> str:
        return "" if self.capacity is None else f"capacity={self.capacity:g}"
