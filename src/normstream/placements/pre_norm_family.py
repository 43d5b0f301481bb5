"""Pre-Norm as released models have it: GPT-2, BLOOM, LayerNorm Scaling, parallel blocks."""

import math
from dataclasses import dataclass
from typing import ClassVar

from normstream.junctions import NormedStreamRead, PostNormRead, PreNormRead, Read, ScaledNormRead
from normstream.placements.placement import Build, InitScheme, Slot
from normstream.placements.registry import register
from normstream.placements.single_stream import SingleStream


@register
@dataclass(frozen=True)
class GPT2(SingleStream):
    """GPT-2: Pre-Norm whose output matrices start smaller, by 1/sqrt(N) for N sublayers.

        x ---+--------------- + ---> x
             |                ^
             +-> N -> F ------+      F's output matrix starts at std / sqrt(N)

    >>> GPT2().init
    'gpt2'
    """

    name: ClassVar[str] = "gpt2"
    title: ClassVar[str] = "GPT-2"
    equation: ClassVar[str] = "x <- x + o;  z = N(x);  final: N(x);  output matrices start at std/sqrt(N)"
    paper: ClassVar[str] = "Radford et al. 2019, Language Models are Unsupervised Multitask Learners"
    code: ClassVar[str] = "karpathy/nanoGPT:model.py"
    differs: ClassVar[str] = (
        "openai/gpt-2:src/model.py is inference code without the 1/sqrt(N), which is in the paper only; "
        "N counts the residual layers: 2 per block"
    )
    init: ClassVar[InitScheme] = "gpt2"


@register
@dataclass(frozen=True)
class Bloom(SingleStream):
    """BLOOM: Pre-Norm on a normed embedding.

        e -> N -> x ---+--------------- + ---> x
                       |                ^
                       +-> N -> F ------+

    With ``residual_from_norm`` the update is added to the normed copy instead of to the stream:

        x -> N ---+---------- + ---> x
                  |           ^
                  +--> F -----+

    >>> Bloom(residual_from_norm=True).junctions(dim=2, n_layers=1)[0].read.__class__.__name__
    'NormedStreamRead'
    """

    name: ClassVar[str] = "bloom"
    title: ClassVar[str] = "BLOOM (embedding norm)"
    equation: ClassVar[str] = "x_0 = N(e);  x <- x + o;  z = N(x);  final: N(x)"
    paper: ClassVar[str] = "BigScience 2022, arXiv 2211.05100; embedding norm: Dettmers et al. 2021, arXiv 2110.02861"
    code: ClassVar[str] = "bigscience-workshop/Megatron-DeepSpeed:megatron/model/transformer.py"
    differs: ClassVar[str] = (
        "the code can also take the residual from the norm (apply_residual_connection_post_layernorm, off by "
        "default): bloom(residual_from_norm=true)"
    )
    init: ClassVar[InitScheme] = "gpt2"

    embedding_norm: bool = True
    residual_from_norm: bool = False
    """Whether the read stores N(x) back as the stream: x <- N(x), z = x."""

    def read(self, slot: Slot, build: Build) -> Read:
        return NormedStreamRead(build.norm()) if self.residual_from_norm else PreNormRead(build.input_norm())


@register
@dataclass(frozen=True)
class LayerNormScaling(SingleStream):
    """LayerNorm Scaling: Pre-Norm whose norm outputs shrink with depth, by 1/sqrt(l) for the l-th block.

        x ---+------------------------------- + ---> x
             |                                ^
             +-> N -> * 1/sqrt(l) -> F -------+      l = 1 ... L; the final norm is not scaled

    >>> LayerNormScaling().junctions(dim=2, n_layers=4)[6].read.scale
    0.5
    """

    name: ClassVar[str] = "layernorm_scaling"
    title: ClassVar[str] = "LayerNorm Scaling"
    equation: ClassVar[str] = "x <- x + o;  z = N(x)/sqrt(l), block l = 1 ... L;  final: N(x)"
    paper: ClassVar[str] = "Sun et al. 2025, arXiv 2502.05795"
    code: ClassVar[str] = "lmsdss/LayerNorm-Scaling:peft_pretraining/modeling_llama.py"
    differs: ClassVar[str] = (
        "as released, the option's name is lower-cased and then compared with upper-case LNS, so that no norm is "
        "applied at all: the branch it means is the paper's, and ours. Not to be combined with a 1/sqrt(2L) "
        "initialization (the repository's own warning)"
    )

    def read(self, slot: Slot, build: Build) -> Read:
        return ScaledNormRead(build.input_norm(), 1 / math.sqrt(slot.layer + 1))


@register
@dataclass(frozen=True)
class ParallelBlocks(SingleStream):
    """Parallel blocks: attention and feed-forward read one norm of the stream and add one summed update.

        x ---+-------------------------- + ---> x
             |                           ^
             +-> N --+-> attention -> + -+
                     |                ^
                     +-> feed-forward-+

    With ``norms=2`` each branch has its own norm (GPT-NeoX, Falcon-40B) and the junction hands over z = x.

    >>> ParallelBlocks().blocks(2, ("attention", "feed_forward"))
    [('parallel',), ('parallel',)]
    """

    name: ClassVar[str] = "parallel"
    title: ClassVar[str] = "parallel blocks"
    equation: ClassVar[str] = "x <- x + A(z) + M(z);  z = N(x), or with norms=2 A(N_1(x)) + M(N_2(x));  final: N(x)"
    paper: ClassVar[str] = "GPT-J, Wang and Komatsuzaki 2021; GPT-NeoX, arXiv 2204.06745"
    code: ClassVar[str] = "EleutherAI/gpt-neox:megatron/model/transformer.py"
    differs: ClassVar[str] = (
        "GPT-J, Cohere and Phi share one norm, the default; GPT-NeoX's two norms are a slip that was kept for the 20B "
        "model (comment in the code)"
    )
    parallel: ClassVar[bool] = True

    norms: int = 1
    """Norms of a block: 1, shared by both branches, or 2, one for each."""

    def __post_init__(self) -> None:
        if self.norms not in (1, 2):
            raise ValueError(f"parallel(norms=...) must be 1 (shared) or 2 (one a branch), got {self.norms}")

    @property
    def branch_norms(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the branches have norms of their own."""
        return self.norms == 2

    def read(self, slot: Slot, build: Build) -> Read:
        return PostNormRead() if self.branch_norms else PreNormRead(build.input_norm())
