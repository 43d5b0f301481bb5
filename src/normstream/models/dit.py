"""A diffusion Transformer: patches of a noisy image in, its noise out, conditioned on timestep and class.

Shape suffixes: B batch, C channels, H height, W width, N patches, P side of a patch, D width, E outputs: C or 2 C.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Num
from torch import Tensor, nn

from normstream import placements
from normstream.layers import Activation, Context, Parallel
from normstream.layers.links import Links
from normstream.layers.modulation import Modulated, modulate
from normstream.layers.patches import PatchEmbedding, sincos_positions, unpatchify
from normstream.models.ids import check_ids
from normstream.models.image_config import ImageConfig
from normstream.models.roles import StartRole
from normstream.models.sublayers import attention, feed_forward
from normstream.models.trunk import Trunk
from normstream.names import check_choice
from normstream.norms import NormConfig, precise_dtype

INPUT_NORM = NormConfig(kind="layer", eps=1e-6, gain="none")
"""The norms right before a modulation: its shift and scale take the place of bias and gain."""
FREQUENCIES = 128
"""Of the sines and of the cosines that a timestep is given to the model as."""


@dataclass(frozen=True)
class DiTConfig(ImageConfig):
    """Dimensions and conventions of a diffusion Transformer; every value is checked when it is made.

    >>> DiTConfig(channels=3).output_channels
    6
    """

    activation: Activation = "gelu_tanh"
    """Feed-forward kind: with a gate swiglu, geglu or geglu_tanh, without gelu, gelu_tanh, relu or relu2."""
    positions: Literal["sincos", "learned"] = "sincos"
    """Positions of the patches: a fixed table of sines and cosines (DiT), or a learned one."""
    n_classes: int = 10
    """Number of classes; training sets it from the data."""
    n_timesteps: int = 1000
    """Steps of the process that turns images into noise."""
    learned_sigma: bool = True
    """Whether the model also says the variance of a step, in as many channels as the noise."""
    label_dropout: float = 0.1
    """Probability in training that a sample's label becomes the null label, which guidance needs; 0 has no such label.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_counts("n_classes", "n_timesteps")
        check_choice("positions", self.positions, Literal["sincos", "learned"])
        if not 0 <= self.label_dropout < 1:
            raise ValueError(f"label_dropout must be in [0, 1), got {self.label_dropout}")
        if self.positions == "sincos" and self.dim % 4:
            raise ValueError(f"sincos positions need a dim divisible by 4, got {self.dim}; change it or positions")

    @property
    def output_channels(self) -> int:
        """C, or with ``learned_sigma`` 2 C."""
        return self.channels * (2 if self.learned_sigma else 1)

    @property
    def n_labels(self) -> int:
        """Rows of the label table: the classes, and the null label if there is one."""
        return self.n_classes + (self.label_dropout > 0)


class TimeEmbedding(nn.Module):
    """``W_out SiLU(W_in f(t))`` with ``f(t) = [cos(t w), sin(t w)]`` and 128 frequencies ``w_j = 10000^(-j / 128)``.

    Shape: ``(B,)`` to ``(B, D)``; t may be of any number type. Angles are in float32, or float64 for float64 weights.

    Source: facebookresearch/DiT:models.py.

    >>> TimeEmbedding(8)(torch.tensor([0, 999])).shape
    torch.Size([2, 8])
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w_in = nn.Linear(2 * FREQUENCIES, dim)
        self.w_out = nn.Linear(dim, dim)

    def forward(self, timesteps_B: Num[Tensor, "B"]) -> Float[Tensor, "B D"]:  # noqa: F821
        weight = self.w_in.weight
        high = precise_dtype(weight)
        places = torch.arange(FREQUENCIES, dtype=high, device=weight.device)
        angles = timesteps_B.to(high)[:, None] * (-math.log(10_000) / FREQUENCIES * places).exp()
        features = torch.cat([angles.cos(), angles.sin()], dim=1).to(weight.dtype)
        return self.w_out(F.silu(self.w_in(features)))


class DiT(Trunk):
    """Diffusion Transformer (DiT) with any placement.

        images -> patch_embeddings + positions -> before_layers -> layers.0 -> ... -> layers.L-1 -> modulate -> output
        timesteps, labels -> time_embeddings + label_embeddings = c, the condition of every sublayer and of the output

    Every sublayer is a ``Modulated`` one, and the norms that feed one directly have no gain and no bias, nor has the
    norm of the final vector, which is modulated too. Norms that a placement puts elsewhere have both: those that an
    update goes through or that a stream is kept normed by (all of Post-Norm, which then has no norm right before a
    modulation; x and y of SiameseNorm; the outputs of Peri-LN). A norm on the update acts on the gated one: of its gate
    it keeps the direction, not the size.

    All modulations and the output matrix start at 0: every update is 0 then, and so is the output. The label table
    starts with standard deviation 1, torch's default, under every scheme (0.02 in the official code): no norm follows
    it, and a small model reads nothing from a small one for hundreds of steps.

    The rows of ``output`` are, as in the official code, pixel by pixel of a patch, and of a pixel channel by channel.

    Raises ValueError for images of another size, and on a CPU for timesteps and labels out of range.

    Source: Peebles and Xie 2022, arXiv 2212.09748; facebookresearch/DiT:models.py. With SiameseNorm:
    Qwen-Applications/SiameseNorm:dit-model-siamesenorm.py.

    >>> from normstream.init import initialize
    >>> model = DiT(DiTConfig(image_size=4, channels=3, dim=8, n_layers=2, n_heads=2))
    >>> initialize(model, seed=0)
    >>> output = model(torch.randn(1, 3, 4, 4), torch.tensor([7]), torch.tensor([1]))
    >>> output.shape, output.abs().max().item()
    (torch.Size([1, 6, 4, 4]), 0.0)
    """

    zero_matrices = ("final_modulation", "output")
    """Matrices that start at 0 under every initialization."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__(config, lambda layer: modulated_sublayers(config, layer), input_norm=INPUT_NORM)
        self.config = config
        self.patch_embeddings = PatchEmbedding(config.dim, channels=config.channels, patch_size=config.patch_size)
        learned = config.positions == "learned"
        self.pos_embeddings = nn.Embedding(config.n_patches, config.dim) if learned else None
        self.time_embeddings = TimeEmbedding(config.dim)
        self.label_embeddings = nn.Embedding(config.n_labels, config.dim)
        self.final_modulation = nn.Linear(config.dim, 2 * config.dim)
        self.output = nn.Linear(config.dim, config.patch_size**2 * config.output_channels)

    def start_roles(self) -> dict[nn.Module | None, StartRole]:
        """What the matrices outside the blocks are for, see ``normstream.init``."""
        roles: dict[nn.Module | None, StartRole] = {getattr(self, name): "zero" for name in self.zero_matrices}
        roles |= {self.pos_embeddings: "positions", self.label_embeddings: "unit"}
        return roles

    @property
    def null_label(self) -> int:
        """The label that stands for no class; ValueError if the model has none."""
        if self.config.label_dropout == 0:
            raise ValueError(
                "the model has no null label, since its label_dropout is 0; guidance needs a model that was trained "
                "with label_dropout above 0"
            )
        return self.config.n_classes

    def condition(self, timesteps_B: Num[Tensor, "B"], labels_B: Int[Tensor, "B"]) -> Float[Tensor, "B D"]:  # noqa: F821
        """c; in training mode with labels dropped at random, drawn from torch's generator."""
        if self.training and self.config.label_dropout > 0:
            dropped_B = torch.rand(len(labels_B), device=labels_B.device) < self.config.label_dropout
            labels_B = torch.where(dropped_B, self.null_label, labels_B)
        return self.time_embeddings(timesteps_B) + self.label_embeddings(labels_B)

    def output_and_aux(
        self,
        images_BCHW: Float[Tensor, "B C H W"],
        timesteps_B: Num[Tensor, "B"],  # noqa: F821
        labels_B: Int[Tensor, "B"],  # noqa: F821
    ) -> tuple[Float[Tensor, "B E H W"], tuple[Any, ...]]:
        """What ``forward`` returns, and what the sublayers report."""
        config = self.config
        config.check_images(images_BCHW)
        self._check(timesteps_B, labels_B)
        embedding_BND = self.patch_embeddings(images_BCHW) + self._positions()
        context = Context(
            causal=False, links=Links(config.resolved_depth_stride), condition=self.condition(timesteps_B, labels_B)
        )
        hidden_BND, aux = self.run(embedding_BND, lambda layer: context)
        assert context.condition is not None
        shift_B1D, scale_B1D = self.final_modulation(F.silu(context.condition)).unsqueeze(1).chunk(2, dim=-1)
        patches_BNK = self.output(modulate(hidden_BND, shift_B1D, scale_B1D))
        by_channel_BNK = patches_BNK.unflatten(-1, (-1, config.output_channels)).transpose(-1, -2).flatten(-2)
        return unpatchify(by_channel_BNK, config.patch_size, config.image_size), aux

    def forward(
        self,
        images_BCHW: Float[Tensor, "B C H W"],
        timesteps_B: Num[Tensor, "B"],  # noqa: F821
        labels_B: Int[Tensor, "B"],  # noqa: F821
    ) -> Float[Tensor, "B E H W"]:
        """The noise, and with ``learned_sigma`` behind it the variance (see ``Process.learned_log_variance``).

        Args:
            images_BCHW: noisy images.
            timesteps_B: of the process, in [0, n_timesteps).
            labels_B: classes, or the null label.
        """
        return self.output_and_aux(images_BCHW, timesteps_B, labels_B)[0]

    def _positions(self) -> Tensor:
        like = self.label_embeddings.weight
        if self.pos_embeddings is not None:
            return self.pos_embeddings(torch.arange(self.config.n_patches, device=like.device))
        return sincos_positions(self.config.dim, self.config.grid, self.config.grid, like)

    def _check(self, timesteps_B: Tensor, labels_B: Tensor) -> None:
        check_ids("timesteps", timesteps_B, self.config.n_timesteps, "n_timesteps")
        check_ids("labels", labels_B, self.config.n_labels, "n_labels")


def modulated_sublayers(config: DiTConfig, layer: int) -> dict[str, nn.Module]:
    """The sublayers of block ``layer``, each modulated; in a parallel block every branch by itself.

    >>> type(modulated_sublayers(DiTConfig(dim=8, n_heads=2), 0)["attention"]).__name__
    'Modulated'
    """
    placement = placements.get(config.placement).at(layer)
    plain = {"attention": attention(config, layer), "feed_forward": feed_forward(config, layer)}
    sublayers: dict[str, nn.Module] = {kind: Modulated(sublayer, config.dim) for kind, sublayer in plain.items()}
    if not placement.parallel:
        return sublayers
    norms = {kind: INPUT_NORM.build(config.dim) for kind in sublayers} if placement.branch_norms else None
    return {"parallel": Parallel(sublayers, norms)}
