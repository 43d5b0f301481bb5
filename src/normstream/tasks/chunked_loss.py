"""The output head and the loss in chunks of positions: no more than one chunk of the logits is ever there.

Forward computes for each chunk the logits, the loss and at once its gradients, so that backward has only to multiply
them by the gradient of the loss. It needs the memory of one gradient of the head's matrix while the layers' activations
are still there, and no second product with it.

torch 2.13 has ``linear_cross_entropy``, which does the same. But in bfloat16 it also sums the losses in bfloat16, where
the sum of 2048 of them was off by 4 % to 80 %, and it has neither a z-loss nor a cap.

Shape suffixes: N positions, D width, V vocabulary, C positions of a chunk.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from normstream.data import IGNORE
from normstream.models import DecoderLM
from normstream.norms import precise_dtype

LARGE_VOCABULARY = 32_768
"""From here on logits are so large that chunks pay on a GPU."""
MOST_LOGITS = 2**27
"""Logits of a chunk: 512 MiB in float32."""
FEWEST_ROWS = 256
"""Positions below which a matrix product is slow for its size."""


def head_loss(
    model: DecoderLM, hidden_BTD: Tensor, targets_BT: Tensor, z_loss: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """The cross-entropy of a model's final hidden vectors, summed over the targets that count (those not -100).

    Args:
        model: whose head, learned scale of the logits, multiplier and cap to use.
        hidden_BTD: what ``model.hidden`` returns.
        targets_BT: the next tokens.
        z_loss: coefficient of the sum of ``log^2 Z``, see ``normstream.training.evaluate.z_loss_sum``.

    Returns:
        The loss to differentiate (once), z-loss included; the cross-entropy; the z-loss without its coefficient.

    >>> from normstream.models import DecoderConfig
    >>> model = DecoderLM(DecoderConfig(dim=8, n_layers=1, n_heads=2))
    >>> loss, cross_entropy, z = head_loss(model, torch.zeros(1, 3, 8), torch.tensor([[1, 2, -100]]))
    >>> loss.item() == cross_entropy.item(), round(cross_entropy.item() / 2, 4)  # ln 257
    (True, 5.5491)
    """
    weight_VD, bias_V = model.lm_head.weight, model.lm_head.bias
    if model.logit_scale is not None:
        weight_VD = model.logit_scale(weight_VD.T).T
        bias_V = None if bias_V is None else model.logit_scale(bias_V)
    factor = model.config.logit_multiplier
    if factor != 1:
        hidden_BTD = hidden_BTD * factor
        bias_V = None if bias_V is None else bias_V * factor
    return _ChunkedLoss.apply(  # pyright: ignore[reportReturnType]
        hidden_BTD.flatten(0, 1), weight_VD, bias_V, targets_BT.flatten(), model.config.logit_cap, z_loss
    )


def chunk_rows(n_rows: int, vocab_size: int) -> int:
    """Positions of a chunk: an eighth of all, but neither so few that products are slow nor logits beyond a limit.

    >>> chunk_rows(16_384, 50_304), chunk_rows(65_536, 131_072), chunk_rows(1000, 32_768)
    (2048, 1024, 256)
    """
    return min(max(-(-n_rows // 8), FEWEST_ROWS), max(MOST_LOGITS // vocab_size, 1))


class _ChunkedLoss(torch.autograd.Function):
    """With l = cap(h W^T + b), log Z = logsumexp(l) and the target t, for every position that counts

        loss = sum(log Z - l_t + z log^2 Z)          dl = (1 + 2 z log Z) softmax(l) - 1_t

    and from dl, times 1 - (l / cap)^2 with a cap, dh = dl W, dW = dl^T h, db = sum(dl). Products are in the dtype that
    autocast says; logits, loss and gradients of the head are summed in float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        cap: float | None,
        z_loss: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        device, (n_rows, _) = hidden_ND.device.type, hidden_ND.shape
        low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_ND.dtype
        inputs = (hidden_ND, weight_VD, bias_V)
        gradients = [
            torch.zeros_like(x) if x is not None and needed else None
            for x, needed in zip(inputs, ctx.needs_input_grad, strict=False)
        ]
        sums = torch.zeros(2, dtype=precise_dtype(hidden_ND), device=hidden_ND.device)
        with torch.autocast(device, enabled=False):
            hidden, weight, bias = (None if x is None else x.to(low) for x in inputs)
            assert hidden is not None
            assert weight is not None
            rows = chunk_rows(n_rows, len(weight))
            for start in range(0, n_rows, rows):
                part = slice(start, start + rows)
                logits_CV = F.linear(hidden[part], weight, bias).to(sums.dtype)
                chunk_sums, d_logits_CV = _loss_and_gradient(logits_CV, targets_N[part], cap, z_loss)
                sums += chunk_sums
                _accumulate(gradients, part, d_logits_CV.to(low), hidden, weight)
        ctx.gradients = gradients
        cross_entropy, z = sums.unbind()
        loss = cross_entropy + z_loss * z if z_loss else cross_entropy.clone()
        ctx.mark_non_differentiable(cross_entropy, z)
        return loss, cross_entropy, z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the chunked loss keeps no gradients once backward has taken them: it can run once only")
        return *(None if gradient is None else gradient.mul_(d_loss) for gradient in gradients), None, None, None


def _loss_and_gradient(logits_CV: Tensor, targets_C: Tensor, cap: float | None, z_loss: float) -> tuple[Tensor, Tensor]:
    """The sums of cross-entropy and log^2 Z over a chunk, and the gradient of its loss by the logits before the cap."""
    if cap is not None:
        logits_CV.div_(cap).tanh_().mul_(cap)
    ignored_C, index_C1 = targets_C == IGNORE, targets_C.clamp(min=0)[:, None]
    log_p_CV = logits_CV.log_softmax(-1)
    loss_C = -log_p_CV.gather(1, index_C1)[:, 0].masked_fill(ignored_C, 0.0)
    log_z_C = logits_CV.gather(1, index_C1)[:, 0].masked_fill(ignored_C, 0.0) + loss_C
    sums = torch.stack([loss_C.sum(), log_z_C.square().sum()])

    d_logits_CV = log_p_CV.exp_().mul_((1 + 2 * z_loss * log_z_C).masked_fill(ignored_C, 0.0)[:, None])
    d_logits_CV.scatter_add_(1, index_C1, ignored_C.to(d_logits_CV.dtype)[:, None] - 1)
    if cap is not None:
        d_logits_CV.mul_(logits_CV.div_(cap).square_().neg_().add_(1))
    return sums, d_logits_CV


def _accumulate(
    gradients: list[Tensor | None], part: slice, d_logits_CV: Tensor, hidden_ND: Tensor, weight_VD: Tensor
) -> None:
    """Adds a chunk's part to the gradients of hidden vectors, matrix and bias, where they are wanted."""
    d_hidden_ND, d_weight_VD, d_bias_V = gradients
    if d_hidden_ND is not None:
        d_hidden_ND[part] = d_logits_CV @ weight_VD
    if d_weight_VD is not None and d_weight_VD.dtype == d_logits_CV.dtype:
        d_weight_VD.addmm_(d_logits_CV.mT, hidden_ND[part])
    elif d_weight_VD is not None:
        d_weight_VD += d_logits_CV.mT @ hidden_ND[part]
    if d_bias_V is not None:
        d_bias_V += d_logits_CV.sum(0, dtype=d_bias_V.dtype)
