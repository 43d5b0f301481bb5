"""The loss of a model on its own inputs: of the next token, or where every position sees all, of the token itself.

Shape suffixes: B batch, T sequence, D width, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normstream.inspect.anatomy import Anatomy
from normstream.inspect.measures.layer_borders import LayerRun, run_layers, with_gradients
from normstream.norms import precise_dtype

DECODER = "decoder_input_ids"
"""The argument with the tokens of a decoder that has an encoder, in transformers."""
NO_LOSS = "no loss (no head over the tokens that the model reads, no layer to follow, or logits that are not finite)"


@dataclass(frozen=True)
class Objective:
    """Which token the logits of each position are compared with.

    >>> Objective(torch.tensor([[3, 1]]), is_causal=True).loss(torch.zeros(1, 2, 4))
    tensor(1.3863)
    """

    tokens_BT: Tensor
    is_causal: bool
    """Whether position t predicts token t + 1; otherwise it gives back token t, which it sees."""

    def scored(self, logits_BTV: Tensor) -> Tensor:
        """The logits that have a target, (B, T or T - 1, V), in float32 or float64."""
        return (logits_BTV[:, :-1] if self.is_causal else logits_BTV).to(precise_dtype(logits_BTV))

    def loss(self, logits_BTV: Tensor) -> Tensor:
        """Mean cross-entropy in nats a token."""
        targets_BT = self.tokens_BT[:, 1:] if self.is_causal else self.tokens_BT
        return F.cross_entropy(self.scored(logits_BTV).flatten(0, 1), targets_BT.flatten())


def loss_of(model: nn.Module, inputs: dict[str, Any], anatomy: Anatomy | None) -> float | None:
    """The model's loss in nats a token, or None where it has no objective; see ``objective_of``.

    >>> from normstream.models import DecoderConfig, DecoderLM
    >>> model = DecoderLM(DecoderConfig(placement="pre", vocab_size=5, dim=8, n_layers=1, n_heads=2)).eval()
    >>> _ = torch.nn.init.zeros_(model.lm_head.weight)
    >>> round(loss_of(model, {"tokens_BT": torch.tensor([[1, 2, 3]])}, None), 4)  # ln 5
    1.6094
    """
    objective = objective_of(model, inputs, anatomy)
    if objective is None:
        return None
    with torch.no_grad():
        return objective.loss(logits_of(model, inputs)).item()


def objective_of(model: nn.Module, inputs: dict[str, Any], anatomy: Anatomy | None) -> Objective | None:
    """What the logits are compared with: the tokens of a decoder that has an encoder, otherwise the model's.

    Such a decoder predicts the next token. Any other model does if no logit but the last position's depends on the last
    token, which the gradient tells exactly: a masked attention weight is an exact zero. None where the logits are no
    finite scores of these tokens, or no layer shows what enters it.
    """
    tokens = _tokens(inputs)
    if tokens is None or tokens.shape[1] < 2:
        return None
    with with_gradients():
        run = run_layers(model, inputs, anatomy)
        logits = run.logits
        if run.last is None or logits is None or logits.ndim != 3 or logits.shape[:2] != tokens.shape:
            return None
        if int(tokens.max()) >= logits.shape[-1]:
            return None
        objective = Objective(tokens, is_causal=DECODER in inputs or not _looks_ahead(run, logits))
    return objective if objective.loss(logits).isfinite() else None


def _tokens(inputs: dict[str, Any]) -> Tensor | None:
    """What the decoder reads, or with one stack the model; by its name in transformers, else the first integers."""
    for name in (DECODER, "input_ids"):
        if name in inputs:
            return inputs[name]
    return next((x for x in inputs.values() if isinstance(x, Tensor) and x.dtype == torch.int64 and x.ndim == 2), None)


def logits_of(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """The logits of a model that has some."""
    output = model(**inputs)
    return output if isinstance(output, Tensor) else output.logits


def _looks_ahead(run: LayerRun, logits_BTV: Tensor) -> bool:
    """Whether a logit depends on a later position of what enters the stack that the head reads."""
    n_tokens = logits_BTV.shape[1]
    (stack, _) = run.last or ("", 0)
    entering = next(iter(run.layers_of(stack).values())).entering
    weights = torch.randn(logits_BTV[:, :-1].shape, generator=torch.Generator().manual_seed(0)).to(logits_BTV)
    found = torch.autograd.grad((weights * logits_BTV[:, :-1]).sum(), entering, allow_unused=True)
    return any(
        bool(gradient.select(token_axis(gradient, n_tokens), -1).any()) for gradient in found if gradient is not None
    )


def token_axis(stream: Tensor, n_tokens: int) -> int:
    """The axis of the tokens: the first as long as there are tokens, but for the last axis, which is the width.

    >>> token_axis(torch.ones(1, 5, 8), 5), token_axis(torch.ones(5, 1, 8), 5), token_axis(torch.ones(1, 7, 8), 5)
    (1, 0, -2)
    """
    axes = [axis for axis, size in enumerate(stream.shape[:-1]) if size == n_tokens]
    return axes[0] if axes else -2
