"""What a parameter is *for*, decided by the type of the module that owns it and never by a name.

=========== =============================================================== ==================
role        parameters                                                      decayed by default
=========== =============================================================== ==================
matrix      weights of linear and convolution modules, other tensors of     yes
            two or more axes (expert weights)
embedding   embedding tables, also where the output head shares them        no
norm_gain   gains of norms                                                  no
norm_bias   biases of norms                                                 no
bias        biases of linear and convolution modules                        no
vector      every other scalar or vector (SiameseNorm's c1, LayerScale)     no
=========== =============================================================== ==================

A decayed plain gain is pulled to 0 and a decayed zero-centred gain (1 + w) to 1; neither is wanted by default.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import nn

from normstream.norms import LayerNorm, RMSNorm
from normstream.optim.config import OptimizerConfig

Role = Literal["matrix", "embedding", "norm_gain", "norm_bias", "bias", "vector"]
ROLES: tuple[Role, ...] = get_args(Role)

_NORMS = (LayerNorm, RMSNorm, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)
_WEIGHTED = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd)
_TABLES = (nn.Embedding, nn.EmbeddingBag)


def _role(module: nn.Module, name: str, parameter: nn.Parameter) -> Role:
    is_bias = name == "bias"
    if isinstance(module, _NORMS):
        return "norm_bias" if is_bias else "norm_gain"
    if isinstance(module, _TABLES):
        return "embedding"
    if isinstance(module, _WEIGHTED):
        return "bias" if is_bias else "matrix"
    return "matrix" if parameter.ndim >= 2 else "vector"


def parameter_roles(model: nn.Module) -> dict[str, Role]:
    """The role of every parameter, under the first name that ``named_parameters`` gives it.

    A tied parameter appears once; an embedding table that is also the weight of the output head is an embedding.

    Raises:
        ValueError: where two modules share a parameter for different purposes, other than an embedding and a matrix.

    >>> from normstream.norms import RMSNorm
    >>> parameter_roles(nn.Sequential(nn.Embedding(8, 4), RMSNorm(4, eps=1e-5), nn.Linear(4, 8)))
    {'0.weight': 'embedding', '1.weight': 'norm_gain', '2.weight': 'matrix', '2.bias': 'bias'}
    """
    found: dict[int, set[Role]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            found.setdefault(id(parameter), set()).add(_role(module, name, parameter))

    roles: dict[str, Role] = {}
    for name, parameter in model.named_parameters():
        shared = found[id(parameter)]
        if "embedding" in shared:
            shared = shared - {"matrix"}
        if len(shared) > 1:
            raise ValueError(
                f"parameter {name!r} is shared by modules that use it as {' and as '.join(sorted(shared))}"
            )
        roles[name] = next(iter(shared))
    return roles


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """One optimizer group for each role that the model has, with its weight decay, for the trainable parameters.

    A group is ``{"role": ..., "params": [(name, parameter), ...], "weight_decay": ...}``, as torch optimizers take it.

    >>> groups = parameter_groups(nn.Linear(2, 2), OptimizerConfig(weight_decay=0.1))
    >>> [(group["role"], group["weight_decay"]) for group in groups]
    [('matrix', 0.1), ('bias', 0.0)]
    """
    decayed = {
        "matrix": True,
        "embedding": config.decay_embeddings,
        "norm_gain": config.decay_norm_gains,
        "norm_bias": config.decay_biases,
        "bias": config.decay_biases,
        "vector": config.decay_vectors,
    }
    roles = parameter_roles(model)
    groups = []
    for role in ROLES:
        members = [(name, p) for name, p in model.named_parameters() if roles[name] == role and p.requires_grad]
        if members:
            weight_decay = config.weight_decay if decayed[role] else 0.0
            groups.append({"role": role, "params": members, "weight_decay": weight_decay})
    check_groups(model, groups)
    return groups


def check_groups(model: nn.Module, groups: list[dict[str, Any]]) -> None:
    """Raises ValueError if a trainable parameter of the model is in no group, or in two.

    >>> check_groups(nn.Linear(2, 2), [])
    Traceback (most recent call last):
    ValueError: parameters in no optimizer group: weight, bias
    """
    counts: dict[int, int] = {}
    for group in groups:
        for member in group["params"]:
            parameter = member[1] if isinstance(member, tuple) else member
            counts[id(parameter)] = counts.get(id(parameter), 0) + 1
    trainable = {name: counts.get(id(p), 0) for name, p in model.named_parameters() if p.requires_grad}
    missing = [name for name, count in trainable.items() if count == 0]
    twice = [name for name, count in trainable.items() if count > 1]
    if missing:
        raise ValueError(f"parameters in no optimizer group: {', '.join(missing)}")
    if twice:
        raise ValueError(f"parameters in more than one optimizer group: {', '.join(twice)}")


@dataclass(frozen=True)
class GroupRow:
    """One line of the table that ``group_table`` makes."""

    group: Role
    """Role of the parameters."""
    decay: float
    """Weight decay."""
    parameters: int
    """Number of entries."""
    tensors: int
    """Number of tensors."""


def group_table(model: nn.Module, config: OptimizerConfig) -> list[GroupRow]:
    """The optimizer groups as rows to print: role, weight decay, number of parameters and of tensors.

    >>> group_table(nn.Linear(2, 3), OptimizerConfig())[0]
    GroupRow(group='matrix', decay=0.1, parameters=6, tensors=1)
    """
    return [
        GroupRow(group["role"], group["weight_decay"], sum(p.numel() for _, p in group["params"]), len(group["params"]))
        for group in parameter_groups(model, config)
    ]
