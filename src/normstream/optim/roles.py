"""What a parameter is *for*, decided by the type of the module that owns it and never by a name.

=========== =============================================================== ==================
role        parameters                                                      decayed by default
=========== =============================================================== ==================
matrix      weights of linear and convolution modules, other tensors of     yes
            two or more axes (expert weights)
embedding   embedding tables, also where the output head shares them        no
norm_gain   gains of norms, and what else they learn besides a bias         no
norm_bias   biases of norms                                                 no
bias        biases of linear and convolution modules                        no
vector      every other scalar or vector (LayerScale), and all that         no
            junctions own besides norms, of any shape (SiameseNorm's c1,
            the mixing weights of hyper-connections)
=========== =============================================================== ==================

A decayed plain gain is pulled to 0 and a decayed zero-centred gain (1 + w) to 1; neither is wanted by default.

Muon orthogonalizes a matrix as one map from vectors to vectors. So it takes matrices of two axes only, and not the
output heads, whose rows stand for tokens, classes or pixels as those of an embedding do: heads (``lm_head``, and what
else the model's ``start_roles`` name outside of its blocks), embeddings, convolutions and expert weights glued together
along a third axis stay with AdamW, as everything else does. Matrices that are several maps stacked on each other (a
fused QKV projection) should be split into their parts to be Muon's one by one.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import nn

from normstream.gain_norm import GainNorm
from normstream.junctions import Join, Junction, Read
from normstream.layers.head_norm import HeadNorm
from normstream.norms import ScaleNorm
from normstream.optim.config import OptimizerConfig

Role = Literal["matrix", "embedding", "norm_gain", "norm_bias", "bias", "vector"]
ROLES: tuple[Role, ...] = get_args(Role)

_NORMS = (
    *(GainNorm, ScaleNorm, HeadNorm),
    *(nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm),
)
_WEIGHTED = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd)
_TABLES = (nn.Embedding, nn.EmbeddingBag)
_JUNCTIONS = (Junction, Join, Read)


def _role(module: nn.Module, name: str, parameter: nn.Parameter, in_junction: bool) -> Role:
    is_bias = name == "bias"
    if isinstance(module, _NORMS):
        return "norm_bias" if is_bias else "norm_gain"
    if in_junction:
        return "vector"
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
    junctions = [module for module in model.modules() if isinstance(module, _JUNCTIONS)]
    in_junctions = {module for junction in junctions for module in junction.modules()}
    found: dict[int, set[Role]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            role = _role(module, name, parameter, module in in_junctions)
            found.setdefault(id(parameter), set()).add(role)

    roles: dict[str, Role] = {}
    for name, parameter in model.named_parameters():
        shared = found[id(parameter)]
        if "embedding" in shared:
            shared = shared - {"matrix"}
        if len(shared) > 1:
            raise ValueError(
                f"parameter {name!r} is shared by modules that use it as {' and as '.join(sorted(shared))}; untie it"
            )
        roles[name] = next(iter(shared))
    return roles


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """One optimizer group for each role that the model has, with its weight decay, for the trainable parameters.

    A group is ``{"role": ..., "optimizer": ..., "params": [(name, parameter), ...], "weight_decay": ...}``, as torch
    optimizers take it. With Muon, matrices are two groups: those that are Muon's and those that are AdamW's.

    >>> groups = parameter_groups(nn.Linear(2, 2), OptimizerConfig(kind="muon", weight_decay=0.1))
    >>> [(group["role"], group["optimizer"], group["weight_decay"]) for group in groups]
    [('matrix', 'muon', 0.1), ('bias', 'adamw', 0.0)]
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
    hidden = _hidden_matrices(model, roles) if config.uses_muon else set()
    kinds = ("muon", "adamw") if config.uses_muon else (config.kind,)
    members: dict[tuple[Role, str], list[Any]] = {(role, kind): [] for role in ROLES for kind in kinds}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kind = "muon" if name in hidden else kinds[-1]
            members[roles[name], kind].append((name, parameter))
    groups = [
        {
            "role": role,
            "optimizer": kind,
            "params": params,
            "weight_decay": config.weight_decay if decayed[role] else 0.0,
        }
        for (role, kind), params in members.items()
        if params
    ]
    check_groups(model, groups)
    return groups


def _hidden_matrices(model: nn.Module, roles: dict[str, Role]) -> set[str]:
    """Names of the matrices that are Muon's."""
    start_roles: Any = getattr(model, "start_roles", dict)
    heads = [getattr(model, "lm_head", None), *start_roles()]
    in_head = {parameter for head in heads if isinstance(head, nn.Module) for parameter in head.parameters()}
    return {n for n, p in model.named_parameters() if roles[n] == "matrix" and p.ndim == 2 and p not in in_head}


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
    optimizer: str
    """Which optimizer moves them."""


def group_table(model: nn.Module, config: OptimizerConfig) -> list[GroupRow]:
    """The optimizer groups as rows to print: role, weight decay, numbers of parameters and of tensors, optimizer.

    >>> group_table(nn.Linear(2, 3), OptimizerConfig())[0]
    GroupRow(group='matrix', decay=0.1, parameters=6, tensors=1, optimizer='adamw')
    """
    return [
        GroupRow(
            group["role"],
            group["weight_decay"],
            sum(p.numel() for _, p in group["params"]),
            len(group["params"]),
            group["optimizer"],
        )
        for group in parameter_groups(model, config)
    ]
