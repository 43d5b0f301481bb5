"""The copy of a model that a probe works on: float32, eager, matrices drawn anew so that every part has an effect."""

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from normstream.inspect.anatomy import NormFacts
from normstream.inspect.hooks import Record, Run
from normstream.inspect.probing.norm_facts import find_norms
from normstream.inspect.probing.zero_scales import zero_scales

LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True)
class Subject:
    """The copy, and what can be said of its modules from their parameters."""

    model: nn.Module
    norms: Mapping[str, NormFacts]
    """By path."""
    matrices: frozenset[str]
    """Paths of modules with a weight matrix of their own and none further inside: linear maps, stacked experts."""
    notes: tuple[str, ...]

    def places_in_lists(self, path: str, start: int = 0) -> Iterator[tuple[str, str]]:
        """For every module list around a module, from position ``start`` of its path on: list, and path in it."""
        parts = path.split(".")
        for depth in range(1, len(parts)):
            around = ".".join(parts[:depth])
            if len(around) + 1 >= start and isinstance(self.model.get_submodule(around), nn.ModuleList | nn.ModuleDict):
                yield around, ".".join(parts[depth + 1 :])


def prepare(model: nn.Module, inputs: Mapping[str, Any], seed: int) -> Subject:
    """Copies a model and draws the copy's matrices; the model itself is left alone.

    A vector parameter outside norms and matrices is a learned scale or a bias. It keeps its value, except where all of
    it is zero: it may silence a whole branch, so it becomes one, and a note names those that would.
    """
    subject = copy.deepcopy(model).eval()
    make_eager(subject)
    norms = find_norms(subject, inputs)
    subject = subject.float()
    matrices = {path for path, module in subject.named_modules() if _owns_matrix(module) and path not in norms}
    matrices -= {path for path in matrices if isinstance(subject.get_submodule(path), nn.Embedding)}
    leaves = {path for path in matrices if not any(other.startswith(f"{path}.") for other in matrices if path)}
    silent = _draw(subject, norms, leaves, torch.Generator().manual_seed(seed))
    layers = tuple(f"{path}." for paths in layer_lists(subject, frozenset(leaves)) for path in paths)
    scales = zero_scales(subject, inputs, [name for name in silent if name.startswith(layers)])
    notes = [f"{name} is zero: what it scales would have no effect, it was probed as one" for name in scales]
    return Subject(subject, norms, frozenset(leaves), tuple(notes))


def layer_lists(model: nn.Module, matrices: frozenset[str]) -> list[list[str]]:
    """Paths of the members of the outermost module lists whose members all have matrices inside: perhaps layers."""
    modules = dict(model.named_modules())

    def members(path: str) -> list[str]:
        paths = [_join(path, name) for name, _ in modules[path].named_children()]
        nested = [isinstance(modules.get(p), nn.ModuleList | nn.ModuleDict) for p in paths]
        return [inner for p, deep in zip(paths, nested, strict=True) for inner in (members(p) if deep else [p])]

    lists: dict[str, list[str]] = {}
    for path, module in modules.items():
        if not isinstance(module, LISTS) or any(path.startswith(f"{other}.") for other in lists):
            continue
        inside = [p for p in members(path) if p in modules]
        if inside and all(any(m.startswith(f"{p}.") for m in matrices) for p in inside):
            lists[path] = inside
    return list(lists.values())


def with_callers(subject: Subject, ran: set[str]) -> Subject:
    """Also takes for matrices the modules that use the weights of a linear module inside without calling it."""
    idle = subject.matrices - ran
    callers = {next((path for path in _around(matrix) if path in ran), "") for matrix in idle}
    lone = {path for path in callers if path and not any(m.startswith(f"{path}.") for m in subject.matrices & ran)}
    return replace(subject, matrices=subject.matrices | lone)


def _around(path: str) -> list[str]:
    """Paths of the modules around a module, innermost first."""
    parts = path.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts) - 1, 0, -1)]


@contextmanager
def silenced(subject: Subject, real: Run, layers: list[list[Record]]) -> Iterator[None]:
    """Sets every matrix that runs inside a layer, or behind the last one, to zero, and the bias next to it.

    Matrices that run before the layers of a stack make its embedding, and keep their values.
    """
    last = max(record.end for stack in layers for record in stack)
    layer_paths = {record.call.path for stack in layers for record in stack}
    tables = {id(m.weight) for m in subject.model.modules() if isinstance(m, nn.Embedding)}
    started: dict[str, int] = {}
    for record in real.records.values():
        started.setdefault(record.call.path, record.start)
    silent: dict[int, Tensor] = {}
    for path, module in subject.model.named_modules():
        inside = any(path == p or path.startswith(f"{p}.") for p in layer_paths)
        if path in subject.norms or not (inside or started.get(path, 0) > last):
            continue
        for parameter in module.parameters(recurse=False):
            is_matrix = _is_matrix(parameter) or path in subject.matrices
            if is_matrix and (inside or id(parameter) not in tables):
                silent[id(parameter)] = parameter
    values = {key: parameter.detach().clone() for key, parameter in silent.items()}
    with torch.no_grad():
        for parameter in silent.values():
            parameter.zero_()
        try:
            yield
        finally:
            for key, parameter in silent.items():
                parameter.copy_(values[key])


def make_eager(model: nn.Module) -> None:
    """Attention and experts in plain torch operations, and no cache, where the model has such settings."""
    for module in model.modules():
        config = getattr(module, "config", None)
        for name, value in (
            ("_attn_implementation", "eager"),
            ("_experts_implementation", "eager"),
            ("use_cache", False),
        ):
            if getattr(config, name, None) not in (None, value):
                setattr(config, name, value)


def _draw(model: nn.Module, norms: Mapping[str, Any], matrices: set[str], generator: torch.Generator) -> list[str]:
    """Returns the names of vectors that were zero and now are one."""
    silent = []
    with torch.no_grad():
        for path, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                if not parameter.is_floating_point():
                    continue
                noise = torch.randn(parameter.shape, generator=generator)
                if path in norms:
                    parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
                elif isinstance(module, nn.Embedding):
                    parameter.copy_(noise)
                elif _is_matrix(parameter):
                    parameter.copy_(noise / _fan(parameter))
                elif path in matrices:
                    parameter.copy_(0.1 * noise)
                elif not parameter.any():
                    parameter.fill_(1.0)
                    silent.append(_join(path, name))
    return silent


def _fan(matrix: Tensor) -> float:
    """Between 1 / sqrt(fan_in) and 1 / sqrt(fan_out): which axis is the input's differs from model to model."""
    *_, a, b = matrix.shape
    return math.sqrt(math.prod(matrix.shape[1:])) if matrix.ndim == 4 else (a * b) ** 0.25


def _is_matrix(parameter: Tensor) -> bool:
    return sum(size > 1 for size in parameter.shape) > 1


def _owns_matrix(module: nn.Module) -> bool:
    return any(_is_matrix(parameter) for parameter in module.parameters(recurse=False))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
