"""Starting a run from existing weights, also those of a model with another placement.

Sublayers, embeddings and whatever else has the same name are copied. Where the placements differ, the norm that reads
a single stream (Pre-Norm's) becomes the norm that reads SiameseNorm's y stream, which is the same raw sum; the norm
that joins a single stream (Post-Norm's) becomes the norm of SiameseNorm's x stream. Every gain and bias that has no
counterpart keeps its start value: an effective gain of 1 (SiameseNorm's c1 also 1), a bias of 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from normstream.models import DecoderLM
from normstream.optim import parameter_roles
from normstream.training.checkpoint import find_checkpoint, read_checkpoint

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


def init_from(model: DecoderLM, path: Path) -> InitReport:
    """Copies the weights of a checkpoint, run folder or .safetensors file into an initialized model.

    Raises:
        ValueError: if there is nothing to read there, if a shape differs, or if a matrix or embedding is only on one
            side: models that differ in more than their placement and gains do not continue one another.
    """
    source, tensors = _read(path)
    targets = dict(model.named_parameters())
    copied = {name: old for name in targets if (old := _counterpart(name, tensors)) is not None}
    report = InitReport(
        source=str(source),
        copied=copied,
        new=[name for name in targets if name not in copied],
        dropped=[name for name in tensors if name not in copied.values()],
    )
    _check(model, tensors, report)
    with torch.no_grad():
        for name, old in copied.items():
            targets[name].copy_(tensors[old])
    return report


def _read(path: Path) -> tuple[Path, dict[str, Tensor]]:
    if path.suffix != ".safetensors":
        path = find_checkpoint(path)
        return path, read_checkpoint(path).model
    try:
        return path, load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot read weights from {path}: {error}") from error


def _counterpart(name: str, tensors: Mapping[str, Tensor]) -> str | None:
    if name in tensors:
        return name
    renamed = [name.replace(part, other) for part, other in COUNTERPARTS.items() if part in name]
    return next((old for old in renamed if old in tensors), None)


def _check(model: DecoderLM, tensors: Mapping[str, Tensor], report: InitReport) -> None:
    targets, roles = dict(model.named_parameters()), parameter_roles(model)
    shapes = [
        f"{name} is {tuple(tensors[old].shape)} there and {tuple(targets[name].shape)} here"
        for name, old in report.copied.items()
        if tensors[old].shape != targets[name].shape
    ]
    missing = [f"{name} is only here" for name in report.new if roles[name] in ("matrix", "embedding")]
    extra = [f"{name} is only there" for name in report.dropped if tensors[name].ndim >= 2]
    if problems := shapes + missing + extra:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"cannot start from {report.source}: {'; '.join(problems[:5])}{more}")
