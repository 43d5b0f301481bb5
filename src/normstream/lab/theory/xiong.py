"""The simplified Transformer in which Xiong et al. 2020 (arXiv 2002.04745, section 3.3) prove their statements.

Attention has W_Q = W_K = 0, so it is the plain mean over the n positions of the sequence times W_V, without W_O. The
feed-forward is W_2 ReLU(W_1 z). Matrices are Gaussian Xavier, N(0, 2 / (n_in + n_out)), biases 0, norms are LayerNorms
with gain 1 and eps 0, inputs are i.i.d. N(0, 1). Norms *inside* sublayers that a recipe brings are left out.

Shape suffixes: B batch, T sequence, D width.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from normstream import placements
from normstream.layers import Context, FeedForward, Layer, Parallel
from normstream.norms import NormConfig
from normstream.placements import Placement, Stack
from normstream.placements.deepnorm import beta

Purpose = Literal["weights", "inputs", "probes", "draws"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
EXACT_LAYER_NORM = NormConfig(kind="layer", eps=0.0, bias=True)


class MeanAttention(nn.Module):
    """``o_t = W_V mean_s(z_s)``, attention with zero queries and keys; with ``w_o`` it is ``W_O W_V mean_s(z_s)``.

    >>> attention = MeanAttention(1, output_matrix=False)
    >>> _ = nn.init.ones_(attention.w_v.weight)
    >>> attention(torch.tensor([[[1.0], [3.0]]])).flatten().tolist()
    [2.0, 2.0]
    """

    def __init__(self, dim: int, *, output_matrix: bool) -> None:
        super().__init__()
        self.w_v = nn.Linear(dim, dim, bias=False)
        self.w_o = nn.Linear(dim, dim, bias=False) if output_matrix else None

    def forward(self, z_BTD: Tensor, context: object = None) -> Tensor:
        mean_B1D = self.w_v(z_BTD.mean(1, keepdim=True))
        return (mean_B1D if self.w_o is None else self.w_o(mean_B1D)).expand_as(z_BTD)


class SimplifiedModel(nn.Module):
    """The paper's sublayers between the junctions of any placement; its modules are named as a ``DecoderLM``'s.

    ``hidden`` maps inputs ``(B, T, D)`` to the final hidden vectors; the head has one class a dimension.

    Args:
        placement: name as for ``placements.get``.
        dim: width d.
        n_layers: number L of blocks.
        ffn_dim: hidden width of the feed-forward.
        output_matrix: whether attention has a W_O, as DeepNet's analysis assumes (arXiv 2203.00555).

    >>> model = SimplifiedModel("pre", dim=8, n_layers=2, ffn_dim=8)
    >>> model.hidden(torch.randn(1, 3, 8)).shape
    torch.Size([1, 3, 8])
    """

    def __init__(self, placement: str, *, dim: int, n_layers: int, ffn_dim: int, output_matrix: bool = False) -> None:
        super().__init__()
        self.placement = placements.get(placement)
        self.tok_embeddings = nn.Identity()
        self.before_layers, *rest = self.placement.junctions(dim, n_layers, norm=EXACT_LAYER_NORM)
        self.layers = nn.ModuleList()
        for layer, kinds in enumerate(self.placement.blocks(n_layers, ("attention", "feed_forward"))):
            branches: dict[str, nn.Module] = {
                "attention": MeanAttention(dim, output_matrix=output_matrix),
                "feed_forward": FeedForward(dim, ffn_dim=ffn_dim, activation="relu"),
            }
            if kinds == ("parallel",):
                has_norms = self.placement.at(layer).branch_norms
                norms = {kind: EXACT_LAYER_NORM.build(dim) for kind in branches} if has_norms else None
                branches = {"parallel": Parallel(branches, norms)}
            self.layers.append(Layer(branches, rest[: len(kinds)]))
            rest = rest[len(kinds) :]
        self.lm_head = nn.Linear(dim, dim, bias=False)

    def hidden(self, inputs_BTD: Tensor) -> Tensor:
        """The final hidden vector of each position."""
        state, z_BTD = self.before_layers((), self.tok_embeddings(inputs_BTD))
        for layer in self.layers:
            state, z_BTD, _ = layer(state, z_BTD, Context())
        return z_BTD


@torch.no_grad()
def draw(model: SimplifiedModel, seed: int) -> None:
    """Sets every parameter: sublayers alike for every placement but DeepNorm, whose matrices are beta times smaller.

    >>> model = SimplifiedModel("pre", dim=64, n_layers=1, ffn_dim=64)
    >>> draw(model, seed=0)
    >>> round(model.lm_head.weight.var().item() * 64, 1)
    1.0
    """
    generator = random_numbers("weights", seed)
    n_layers = len(model.layers)
    gains = {
        matrix: branch_gain(model.placement.at(index), n_layers)
        for index, layer in enumerate(model.layers)
        for sublayer in layer.modules()
        if isinstance(sublayer, MeanAttention | FeedForward)
        for matrix in sublayer.children()
    }
    for module in (model.lm_head, *gains):
        draw_linear(module, gains.get(module, 1.0), generator)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not model.lm_head and module not in gains:
            draw_linear(module, 1.0, generator)  # a matrix of a junction
        elif not isinstance(module, nn.Linear) and callable(reset := getattr(module, "reset_parameters", None)):
            reset()


def random_numbers(purpose: Purpose, seed: int) -> torch.Generator:
    """A generator for each purpose: a probe that repeats the numbers of the input would be no random probe.

    >>> one, other = random_numbers("weights", 0), random_numbers("inputs", 0)
    >>> one.initial_seed() == other.initial_seed()
    False
    """
    return torch.Generator().manual_seed(4 * seed + PURPOSES.index(purpose))


def branch_gain(placement: Placement, n_layers: int) -> float:
    """DeepNorm's beta for a recipe that starts so, 1 for every other.

    >>> branch_gain(placements.get("post"), 2), branch_gain(placements.get("deepnorm"), 2)
    (1.0, 0.5)
    """
    return beta(Stack(), n_layers) if placement.init == "deepnorm" else 1.0


@torch.no_grad()
def draw_linear(matrix: nn.Module, gain: float, generator: torch.Generator) -> None:
    """Gaussian Xavier, ``N(0, 2 gain^2 / (n_in + n_out))``."""
    weight = matrix.get_parameter("weight")
    values = torch.randn(weight.shape, generator=generator, dtype=torch.float32, device="cpu")
    weight.copy_(values.mul_(gain * math.sqrt(2 / sum(weight.shape))))
