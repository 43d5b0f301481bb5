"""Starting a run from existing weights, also those of a model with another placement.

Sublayers, embeddings and whatever else has the same name are copied, the biases of routers too. Where the placements
differ, the norm that reads a single stream (Pre-Norm's) becomes the norm that reads SiameseNorm's y stream, which is
the same raw sum; the norm that joins a single stream (Post-Norm's) becomes the norm of SiameseNorm's x stream. Every
gain and bias that has no counterpart keeps its start value: an effective gain of 1 (SiameseNorm's c1 also 1), a bias
of 0. A head for a new task starts anew, and that of the old one is left behind.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from normstream.optim import parameter_roles
from normstream.training.checkpoint import find_checkpoint, model_tensors, read_checkpoint

COUNTERPARTS = {".read.norm_y.": ".read.norm.", ".join.norm_x.": ".join.norm."}
"""Parts of a two-stream junction, and of the single-stream junction whose values they may take."""


@dataclass(frozen=True)
class InitReport:
    """Where the parameters of a model came from."""

    source: str
    """The checkpoint or file."""
    copied: dict[str, str]
    """Parameter of the new model: parameter of the source."""
    new: list[str]
    """Parameters that keep their start values."""
    dropped: list[str]
    """Parameters of the source that the new model has no place for."""


def init_from(model: nn.Module, path: Path) -> InitReport:
    """Copies the weights of a checkpoint, run folder or .safetensors file into an initialized model.

    Of a run that averages its weights (``TrainConfig.ema``) they are the averaged ones.

    Raises:
        ValueError: if there is nothing to read there, if a shape differs, or if a matrix or embedding is only on one
            side: models that differ in more than their placement, gains and heads (those that the model's class names
            in ``new_heads`` and ``left_heads``) do not continue one another.
    """
    source, tensors = _read(path)
    targets = model_tensors(model)
    fresh = _fresh_heads(model, targets, tensors)
    kept = [name for name in targets if _head(name) not in fresh]
    copied = {name: old for name in kept if (old := _counterpart(name, tensors)) is not None}
    report = InitReport(
        source=str(source),
        copied=copied,
        new=[name for name in targets if name not in copied],
        dropped=[name for name in tensors if name not in copied.values()],
    )
    _check(model, tensors, report, fresh)
    with torch.no_grad():
        for name, old in copied.items():
            targets[name].copy_(tensors[old])
    return report


def _read(path: Path) -> tuple[Path, dict[str, Tensor]]:
    if path.suffix != ".safetensors":
        path = find_checkpoint(path)
        return path, read_checkpoint(path).weights
    try:
        return path, load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot read weights from {path}: {error}") from error


def _counterpart(name: str, tensors: Mapping[str, Tensor]) -> str | None:
    if name in tensors:
        return name
    renamed = [name.replace(part, other) for part, other in COUNTERPARTS.items() if part in name]
    return next((old for old in renamed if old in tensors), None)


def _head(name: str) -> str:
    """The module of the model that a parameter is in."""
    return name.partition(".")[0]


def _fresh_heads(model: nn.Module, targets: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> set[str]:
    """The heads that may start anew, and that the source lacks or has in another shape."""
    heads = getattr(model, "new_heads", ())
    differ = (n for n, target in targets.items() if n not in tensors or tensors[n].shape != target.shape)
    return {_head(name) for name in differ if _head(name) in heads}


def _check(model: nn.Module, tensors: Mapping[str, Tensor], report: InitReport, fresh: set[str]) -> None:
    targets, roles = model_tensors(model), parameter_roles(model)
    shapes = [
        f"{name} is {tuple(tensors[old].shape)} there and {tuple(targets[name].shape)} here"
        for name, old in report.copied.items()
        if tensors[old].shape != targets[name].shape
    ]
    may_be_here, may_be_there = fresh, fresh | set(getattr(model, "left_heads", ()))
    missing = [n for n in report.new if roles.get(n) in ("matrix", "embedding") and _head(n) not in may_be_here]
    extra = [n for n in report.dropped if tensors[n].ndim >= 2 and _head(n) not in may_be_there]
    problems = [*shapes, *(f"{n} is only here" for n in missing), *(f"{n} is only there" for n in extra)]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"cannot start from {report.source}: {'; '.join(problems[:5])}{more}")
