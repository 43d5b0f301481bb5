"""An encoder with a head that predicts the class of a text or of a pair of texts.

Shape suffixes: B batch, T sequence, D width, C classes.
"""

from typing import Any, ClassVar

import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from normstream.models.encoder import TextEncoder
from normstream.models.encoder_config import ClassifierConfig
from normstream.models.roles import StartRole
from normstream.norms import precise_dtype


class Classifier(TextEncoder):
    """Encoder with any placement and a head that predicts one class for each sequence.

        tokens -> final hidden vectors -> pool -> tanh(pooler) -> class_head -> logits

    Pooling takes the first position or the mean over all that are not padding. The dropout of the updates also acts on
    the pooled vector. What it shares with ``Encoder`` has the same parameter names, so that it can start from one.

    Source: Devlin et al. 2018, arXiv 1810.04805; with BERT's conventions and a head bias it is the same function as
    BertForSequenceClassification in huggingface/transformers:src/transformers/models/bert/modeling_bert.py.

    >>> import torch
    >>> model = Classifier(ClassifierConfig(placement="pre", vocab_size=10, dim=8, n_layers=2, n_heads=2, n_classes=3))
    >>> model(torch.zeros(4, 5, dtype=torch.int64)).shape
    torch.Size([4, 3])
    """

    new_heads: ClassVar[tuple[str, ...]] = ("pooler", "class_head")
    """Modules that start anew where the weights that a run starts from have none of their shape."""
    left_heads: ClassVar[tuple[str, ...]] = ("head_transform", "lm_head", "logit_scale")
    """Modules of other models whose weights may be left behind."""

    config: ClassifierConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: ClassifierConfig) -> None:
        super().__init__(config)
        self.pooler = nn.Linear(config.dim, config.dim) if config.pooler else None
        self.class_head = nn.Linear(config.dim, config.n_classes, bias=config.head_bias)

    def start_roles(self) -> dict[nn.Module | None, StartRole]:
        """What the matrices outside the blocks are for, see ``normstream.init``."""
        roles = super().start_roles()
        roles[self.class_head] = "vocabulary"
        return roles

    def forward(
        self,
        tokens_BT: Int[Tensor, "B T"],
        padding_BT: Bool[Tensor, "B T"] | None = None,
        types_BT: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B C"]:
        """Logits of the classes; arguments as for ``hidden_and_aux``."""
        return self.logits_and_aux(tokens_BT, padding_BT, types_BT)[0]

    def logits_and_aux(
        self,
        tokens_BT: Int[Tensor, "B T"],
        padding_BT: Bool[Tensor, "B T"] | None = None,
        types_BT: Int[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, "B C"], tuple[Any, ...]]:
        """Logits of the classes, and what the sublayers report."""
        hidden_BTD, aux = self.hidden_and_aux(tokens_BT, padding_BT, types_BT)
        pooled_BD = hidden_BTD[:, 0] if self.config.pooling == "first" else mean_of_text(hidden_BTD, padding_BT)
        if self.pooler is not None:
            pooled_BD = self.pooler(pooled_BD).tanh()
        return self.class_head(F.dropout(pooled_BD, self.config.dropout, self.training)), aux


def mean_of_text(hidden_BTD: Float[Tensor, "B T D"], padding_BT: Bool[Tensor, "B T"] | None) -> Float[Tensor, "B D"]:
    """The mean over the positions that are not padding, in float32 or above; 0 for a row that is nothing else.

    >>> import torch
    >>> mean_of_text(torch.tensor([[[1.0], [3.0], [9.0]]]), torch.tensor([[False, False, True]]))
    tensor([[2.]])
    """
    high_BTD = hidden_BTD.to(precise_dtype(hidden_BTD))
    if padding_BT is None:
        return high_BTD.mean(1).to(hidden_BTD.dtype)
    n_tokens_B1 = (~padding_BT).sum(1, keepdim=True).clamp(min=1)
    return (high_BTD.masked_fill(padding_BT[..., None], 0.0).sum(1) / n_tokens_B1).to(hidden_BTD.dtype)
