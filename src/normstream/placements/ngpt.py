"""nGPT: every vector of the model, weights included, has length 1."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn

from normstream.junctions import Join, LerpJoin, PostNormRead, Read, Start
from normstream.layers.expert_linear import ExpertLinear
from normstream.layers.inner import NOTHING_INNER, Inner
from normstream.norms import unit
from normstream.placements.placement import Build, InitScheme, Placement, Slot
from normstream.placements.registry import register


@register
@dataclass(frozen=True)
class NGPT(Placement):
    """nGPT: the stream turns towards the normed update by a learned rate for each channel and stays on the unit sphere.

        x ---+------------------- lerp by |alpha| -> unit ---> x
             |                         ^
             +---> F -----> unit ------+

    There are no norms. Queries and keys have length 1 before a learned factor; the feed-forward's two vectors and the
    logits have learned factors; after each optimizer step (and at the start) every matrix is normed along its axis of
    width D, so that the rows of the embedding, which start the stream, have length 1 too.

    Raises ValueError for a rate outside (0, 1].

    >>> row = NGPT().junctions(dim=4, n_layers=1)
    >>> row[1].join.rate().tolist()
    [0.05..., 0.05..., 0.05..., 0.05...]
    """

    name: ClassVar[str] = "ngpt"
    title: ClassVar[str] = "nGPT"
    streams: ClassVar[tuple[str, ...]] = ("x",)
    equation: ClassVar[str] = (
        "x <- unit(x + |alpha| * (unit(o) - x));  z = x;  final: x;  every matrix normed after a step"
    )
    paper: ClassVar[str] = "Loshchilov et al. 2024, arXiv 2410.01131"
    code: ClassVar[str] = "NVIDIA/ngpt:model.py; allenai/OLMo-core:src/olmo_core/nn/transformer/block.py"
    differs: ClassVar[str] = (
        "paper and NVIDIA's code have one factor for queries and keys together, here one each as in OLMo-core, which "
        "scales before the rotation and norms over all heads; NVIDIA's code also scales the up vector by sqrt(D), "
        "which unit(o) undoes, and norms x once more before the step, which changes nothing on the sphere"
    )
    inner: ClassVar[Inner] = replace(NOTHING_INNER, qk="l2", qk_gain="per_head", qk_after_rope="yes", scales="ngpt")
    init: ClassVar[InitScheme] = "ngpt"
    logit_scale: ClassVar[bool] = True

    rate: float = 0.05
    """alpha at the start."""

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ValueError(f"rate of ngpt must be in (0, 1], got {self.rate}")

    def first(self, build: Build) -> nn.Module:
        return Start()

    def read(self, slot: Slot, build: Build) -> Read:
        return PostNormRead()

    def join(self, slot: Slot, build: Build) -> Join:
        return LerpJoin(build.dim, self.rate, build.drop(slot))

    def last_read(self, build: Build) -> Read:
        return PostNormRead()

    @torch.no_grad()
    def after_step(self, model: nn.Module) -> None:
        """Norms every matrix along the axis that meets the stream: columns of those that write to it, else rows.

        Matrices that start at 0 (adaLN-zero) are left as they are: normed, they would be at full size after one step.
        """

        def named(attribute: str) -> set[nn.Module]:
            return {getattr(owner, name) for owner in model.modules() for name in getattr(owner, attribute, ())}

        writing, zero = named("branch_outputs"), named("zero_matrices")
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Embedding | ExpertLinear) and module not in zero:
                module.weight.copy_(unit(module.weight, axis=-2 if module in writing else -1))
