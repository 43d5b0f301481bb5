"""The true global norm of the gradients, and clipping by it.

A norm is measured in float32 (float64 for float64 gradients) whatever the dtype of the gradients, after unscaling
and accumulation, before clipping.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from normstream.optim.roles import ROLES, parameter_roles


def global_grad_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """``sqrt(sum of g^2)`` over all gradients, as a scalar tensor; 0 where there is no gradient.

    A parameter that is given twice counts once.

    >>> p = nn.Parameter(torch.zeros(8))
    >>> p.grad = torch.ones(8)
    >>> global_grad_norm([p, p])
    tensor(2.8284)
    """
    gradients = [p.grad for p in dict.fromkeys(parameters) if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    dtype = torch.float64 if any(g.dtype == torch.float64 for g in gradients) else torch.float32
    norms = torch._foreach_norm(gradients, 2, dtype=dtype)  # pyright: ignore[reportPrivateImportUsage]
    return torch.linalg.vector_norm(torch.stack(norms))


def grad_norms(groups: Mapping[str, Iterable[nn.Parameter]]) -> dict[str, Tensor]:
    """The gradient norm of each named group; their squares sum to the square of the global norm.

    >>> grad_norms({"none": []})
    {'none': tensor(0.)}
    """
    return {name: global_grad_norm(parameters) for name, parameters in groups.items()}


def grad_norms_by_role(model: nn.Module) -> dict[str, Tensor]:
    """The gradient norm of each role of ``normstream.optim.roles`` that the model has.

    >>> layer = nn.Linear(2, 2)
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> {role: round(norm.item(), 4) for role, norm in grad_norms_by_role(layer).items()}
    {'matrix': 2.0, 'bias': 1.4142}
    """
    roles = parameter_roles(model)
    groups = {role: [p for name, p in model.named_parameters() if roles[name] == role] for role in ROLES}
    return grad_norms({role: parameters for role, parameters in groups.items() if parameters})


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scales every gradient in place by ``min(1, max_norm / norm)``, where ``norm`` is their global norm.

    >>> p = nn.Parameter(torch.zeros(8))
    >>> p.grad = torch.ones(8)
    >>> clip_gradients([p], global_grad_norm([p]), max_norm=1.0)
    >>> p.grad[0]
    tensor(0.3536)
    """
    gradients = [p.grad for p in dict.fromkeys(parameters) if p.grad is not None]
    if gradients:
        scale = (max_norm / norm).clamp(max=1.0)
        torch._foreach_mul_(gradients, scale)  # pyright: ignore[reportPrivateImportUsage]
