"""What attention layers of one forward pass take from earlier ones: scores, or keys and values of the same position.

Everything is kept under the index of its layer and never replaced, so a layer that is recomputed in the backward pass
finds what it found the first time.

Shape suffixes: B batch, T queries, S keys, H heads, G key-value heads, K head_dim.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from normstream.norms import precise_dtype


class Links:
    """The store of one forward pass; ``depth_stride`` says every how many layers depth attention keeps one.

    >>> Links(depth_stride=2).previous_scores(layer=3) is None
    True
    """

    def __init__(self, depth_stride: int) -> None:
        self.depth_stride = depth_stride
        self._scores: dict[int, Tensor] = {}
        self._sources: dict[int, tuple[Tensor, Tensor]] = {}
        self._cross: Links | None = None

    @property
    def cross(self) -> "Links":
        """The store of cross-attention, apart: RealFormer links each kind of attention to itself."""
        if self._cross is None:
            self._cross = Links(self.depth_stride)
        return self._cross

    def previous_scores(self, layer: int) -> Tensor | None:
        """Scores of the nearest earlier layer that keeps them."""
        earlier = [index for index in self._scores if index < layer]
        return self._scores[max(earlier)] if earlier else None

    def keep_scores(self, layer: int, scores_BHTS: Float[Tensor, "B H T S"]) -> None:
        """Keeps a layer's scores; without gradients nothing is recomputed, and those of earlier layers can go."""
        if not torch.is_grad_enabled():
            self._scores.clear()
        self._scores.setdefault(layer, scores_BHTS)

    def mix_depth(
        self,
        layer: int,
        q_BHTK: Float[Tensor, "B H T K"],
        k_BGTK: Float[Tensor, "B G T K"],
        v_BGTK: Float[Tensor, "B G T K"],
    ) -> Float[Tensor, "B G T K"]:
        """The values of a layer mixed with those of the sources before it; the layer may become a source itself."""
        sources = [source for index, source in sorted(self._sources.items()) if index < layer]
        mixed = mix_values(q_BHTK, k_BGTK, v_BGTK, sources)
        if layer % self.depth_stride == 0:
            self._sources.setdefault(layer, (k_BGTK, mixed))
        return mixed


def mix_values(
    q_BHTK: Float[Tensor, "B H T K"],
    k_BGTK: Float[Tensor, "B G T K"],
    v_BGTK: Float[Tensor, "B G T K"],
    sources: Sequence[tuple[Tensor, Tensor]],
) -> Float[Tensor, "B G T K"]:
    """Attention over depth: each position's query looks at the keys that earlier layers have for that position.

        w = softmax([q k_1, ..., q k_n, q k] / sqrt(K)),  v <- w_1 v_1 + ... + w_n v_n + w v

    q is the mean over the query heads that share a key-value head; keys and queries are rotated already; the v_i are
    mixed values themselves. The softmax is in float32. Sources are taken one by one: stacked, each layer would save
    copies of all of them for its backward pass.

    Source: InternLM/archspace, pull request 19: Megatron-LM/src/modeling/olmo3_siamese_depth_components.py.

    >>> one = torch.ones(1, 1, 1, 1)
    >>> mix_values(one, one, 3 * one, [(one, one)]).item()
    2.0
    """
    if not sources:
        return v_BGTK
    q_BGTK = q_BHTK.unflatten(1, (k_BGTK.shape[1], -1)).mean(2)
    scale = k_BGTK.shape[-1] ** -0.5
    scores = [(q_BGTK * key).sum(-1, keepdim=True) * scale for key in [*(key for key, _ in sources), k_BGTK]]
    weights = torch.cat(scores, dim=-1).softmax(-1, dtype=precise_dtype(v_BGTK)).to(v_BGTK.dtype).split(1, dim=-1)
    mixed = weights[-1] * v_BGTK
    for weight, (_, value) in zip(weights, sources, strict=False):
        mixed = mixed + weight * value
    return mixed
