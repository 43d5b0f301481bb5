"""A vision Transformer: patches of an image as tokens, a row of sublayers and junctions, a classifier.

Shape suffixes: B batch, C channels, H height, W width, T tokens (those of ``token_embeddings``, then the patches),
D width, V classes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from normstream.layers import Context
from normstream.layers.learned_scale import LearnedScale
from normstream.layers.links import Links
from normstream.layers.patches import PatchEmbedding, sincos_positions
from normstream.models.image_config import ImageConfig
from normstream.models.roles import StartRole
from normstream.models.sublayers import block_sublayers
from normstream.models.trunk import Trunk
from normstream.names import check_choice

ImagePositions = Literal["learned", "sincos"]
Pool = Literal["class", "mean"]


@dataclass(frozen=True)
class ViTConfig(ImageConfig):
    """Dimensions and conventions of a vision Transformer; every value is checked when it is made.

    Raises ValueError for values that do not fit each other.

    >>> ViTConfig(image_size=224, patch_size=16, channels=3, distillation=True).n_tokens
    2
    """

    n_layers: int = 6
    """Number of blocks, each an attention and a feed-forward sublayer."""
    n_classes: int = 10
    """Number of classes; training sets it from the data."""
    positions: ImagePositions = "learned"
    """A learned table for all tokens, or sincos, fixed sines and cosines of a patch's row and column (MAE, DiT)."""
    pool: Pool = "class"
    """What the classifier reads: the final vector of a class token, or the mean of those of all patches."""
    distillation: bool = False
    """Add DeiT's distillation token, and a classifier that reads it."""
    pixel_mean: tuple[float, ...] = ()
    """Mean of the pixels in [0, 1] that the model takes away first, one for each channel; training sets it from the
    training split, and (0,) says that nothing is taken away. Kept here, so that a checkpoint brings it along."""
    pixel_std: tuple[float, ...] = ()
    """What the model then divides the pixels by, one for each channel; training sets it from the training split."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_counts("n_classes")
        check_choice("positions", self.positions, ImagePositions)
        check_choice("pool", self.pool, Pool)
        if self.distillation and self.pool == "mean":
            raise ValueError("a distillation token goes with a class token, but pool is mean; set pool to class")
        if self.positions == "sincos" and self.dim % 4:
            raise ValueError(f"sincos positions need a dim divisible by 4, got {self.dim}; change either")
        for name in ("pixel_mean", "pixel_std"):
            values = getattr(self, name)
            if len(values) not in (0, 1, self.channels) or not all(map(math.isfinite, values)):
                raise ValueError(f"{name} must have one number, or one a channel ({self.channels}), got {values}")
        if not all(value > 0 for value in self.pixel_std):
            raise ValueError(f"pixel_std must be above 0, got {self.pixel_std}")

    @property
    def n_tokens(self) -> int:
        """Tokens that are no patches: 2 with distillation, 1 without, 0 where the mean of the patches is read."""
        return 0 if self.pool == "mean" else 1 + self.distillation


class ViT(Trunk):
    """Vision Transformer with any placement.

        images -> patch_embeddings -> [token_embeddings | patches] + positions -> before_layers -> layers.0 -> ...
               -> layers.L-1 -> head of the first token

    In training with distillation it gives the logits of both heads, ``head`` of the class token and
    ``distillation_head`` of the second token; in evaluation their mean.

    Shape: images ``(B, C, H, W)``, floating point, to logits ``(B, V)``. Parameters' values are torch's defaults until
    ``normstream.init.initialize(model, seed)`` sets them.

    Raises ValueError for images of another size or number of channels than the configuration's, and for whole numbers.

    Source: Dosovitskiy et al. 2020, arXiv 2010.11929; DeiT, arXiv 2012.12877, facebookresearch/deit:models.py.

    >>> model = ViT(ViTConfig(placement="siamese", image_size=8, patch_size=4, dim=16, n_layers=2, n_heads=2))
    >>> model(torch.zeros(3, 1, 8, 8)).shape
    torch.Size([3, 10])
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config, lambda layer: block_sublayers(config, layer))
        self.config = config
        dim, n_tokens = config.dim, config.n_tokens
        self.patch_embeddings = PatchEmbedding(dim, channels=config.channels, patch_size=config.patch_size)
        self.token_embeddings = nn.Embedding(n_tokens, dim) if n_tokens else None
        learned = config.positions == "learned"
        self.pos_embeddings = nn.Embedding(n_tokens + config.n_patches, dim) if learned else None
        scaled = self.placement.logit_scale
        self.head = nn.Linear(dim, config.n_classes)
        self.logit_scale = LearnedScale(config.n_classes, unit=math.sqrt(dim)) if scaled else None
        self.distillation_head = nn.Linear(dim, config.n_classes) if config.distillation else None

    def start_roles(self) -> dict[nn.Module | None, StartRole]:
        """What the matrices outside the blocks are for, see ``normstream.init``."""
        return {
            self.token_embeddings: "vocabulary",
            self.pos_embeddings: "positions",
            self.head: "vocabulary",
            self.distillation_head: "vocabulary",
        }

    def embed(self, images_BCHW: Float[Tensor, "B C H W"]) -> Float[Tensor, "B T D"]:
        """What the streams start as: the tokens, then the patches row by row, with their positions added."""
        self.config.check_images(images_BCHW)
        embedding = self.patch_embeddings(self._normalized(images_BCHW))
        device = embedding.device
        if self.token_embeddings is not None:
            tokens = self.token_embeddings(torch.arange(self.config.n_tokens, device=device))
            tokens = tokens.to(embedding.dtype).expand(len(embedding), -1, -1)
            embedding = torch.cat([tokens, embedding], dim=1)
        if self.pos_embeddings is not None:
            return embedding + self.pos_embeddings(torch.arange(embedding.shape[1], device=device))
        grid = self.config.grid
        table = sincos_positions(self.config.dim, grid, grid, like=self.patch_embeddings.projection.weight)
        return embedding + nn.functional.pad(table, (0, 0, self.config.n_tokens, 0))  # tokens stand nowhere

    def hidden_and_aux(self, images_BCHW: Float[Tensor, "B C H W"]) -> tuple[Float[Tensor, "B T D"], tuple[Any, ...]]:
        """The final hidden vector of each token and patch, and what the sublayers report."""
        context = Context(causal=False, links=Links(self.config.resolved_depth_stride))
        return self.run(self.embed(images_BCHW), lambda layer: context)

    def hidden(self, images_BCHW: Float[Tensor, "B C H W"]) -> Float[Tensor, "B T D"]:
        """The final hidden vector of each token and patch."""
        return self.hidden_and_aux(images_BCHW)[0]

    def head_logits(self, hidden_BTD: Float[Tensor, "B T D"]) -> tuple[Float[Tensor, "B V"], ...]:
        """The logits of the class head and, with distillation, those of the distillation head."""
        scale: Callable[[Tensor], Tensor] = nn.Identity() if self.logit_scale is None else self.logit_scale
        read = hidden_BTD.mean(1) if self.config.pool == "mean" else hidden_BTD[:, 0]
        logits = scale(self.head(read))
        if self.distillation_head is None:
            return (logits,)
        return logits, scale(self.distillation_head(hidden_BTD[:, 1]))

    def forward(
        self, images_BCHW: Float[Tensor, "B C H W"]
    ) -> Float[Tensor, "B V"] | tuple[Float[Tensor, "B V"], Float[Tensor, "B V"]]:
        """Logits of each image; with distillation in training those of both heads."""
        logits, *distilled = self.head_logits(self.hidden(images_BCHW))
        if not distilled:
            return logits
        return (logits, distilled[0]) if self.training else (logits + distilled[0]) / 2

    def _normalized(self, images_BCHW: Tensor) -> Tensor:
        """Channel by channel, with numbers: a tensor of them would have to be copied to the device each time."""
        mean, std = self.config.pixel_mean or (0.0,), self.config.pixel_std or (1.0,)
        if (mean, std) == ((0.0,), (1.0,)):
            return images_BCHW
        if len(mean) == len(std) == 1:
            return (images_BCHW - mean[0]) / std[0]
        count = self.config.channels
        pairs = zip(images_BCHW.split(1, dim=1), *(v * (count // len(v)) for v in (mean, std)), strict=True)
        return torch.cat([(channel - shift) / scale for channel, shift, scale in pairs], dim=1)
