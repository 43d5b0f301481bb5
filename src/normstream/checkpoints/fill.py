"""A model of transformers filled with tensors, every one of which has a place in it and every place a tensor."""

import copy
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normstream.checkpoints.tensors import FLOATS, first_line
from normstream.names import shortened


def fill_model(
    classes: Sequence[Any],
    config: Any,
    tensors: Mapping[str, Tensor],
    folder: Path,
    options: Mapping[str, Any],
    notes: list[str],
) -> nn.Module:
    """The model of the first class that the tensors make complete; ``folder`` is what an error names.

    Tensors outside the layers that the model has no module for (a pooler, another head) become a note, and so do those
    that hold NaN or infinity.

    Raises:
        ValueError: if a tensor is missing, has another shape or no float dtype, or if one is left over inside the
            layers or beside a module's own tensors: the config is then not that of the weights. For a config that
            the class cannot be made from.
    """
    failures = []
    if broken := not_finite(tensors):
        notes.append(f"not finite numbers: {shortened(broken)}")
    for kind in classes:
        shape = shape_of(kind, config)
        _check_dtypes(shape, tensors, folder)
        model, problems, left_over = _fill(kind, config, shape, tensors, options)
        if model is not None and not problems:
            if left_over:
                notes.append(f"not part of {kind.__name__}: {shortened(left_over)}")
            return model
        failures.append(f"{folder} does not fit {kind.__name__}: {'; '.join(problems)}")
    raise ValueError(failures[-1])


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of the tensors of floats that hold NaN or infinity.

    >>> not_finite({"a": torch.tensor([1.0]), "b": torch.tensor([1.0, torch.nan]), "c": torch.tensor([1])})
    ['b']
    """
    return [name for name, tensor in tensors.items() if tensor.dtype in FLOATS and not tensor.isfinite().all()]


def shape_of(kind: Any, config: Any) -> Any:
    """A model without memory; ValueError if its class cannot be made from this config."""
    try:
        with torch.device("meta"):
            return kind(copy.deepcopy(config))
    except Exception as error:  # each class fails in its own way for sizes that do not fit, or another type's config
        raise ValueError(f"{kind.__name__} cannot be made from this config.json: {first_line(error)}") from error


def _fill(
    kind: Any, config: Any, shape: Any, tensors: Mapping[str, Tensor], options: Mapping[str, Any]
) -> tuple[nn.Module | None, list[str], list[str]]:
    """The model (None if transformers could not make it), what is wrong, and tensors that it has no place for."""
    try:
        model, info = kind.from_pretrained(
            None,
            config=copy.deepcopy(config),
            state_dict=dict(tensors),
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
    except RuntimeError as error:  # experts are stacked as they are read, which fails without naming what is missing
        missing = sorted(_saved_names(shape) - tensors.keys())
        return None, [f"missing {shortened(missing)}" if missing else first_line(error)], []
    unexpected = sorted(name for name in info["unexpected_keys"] if not _buffer(shape, name))
    inside = [name for name in unexpected if _belongs_inside(shape, name)]
    problems = []
    if info["missing_keys"]:
        problems.append(f"missing {shortened(sorted(info['missing_keys']))}")
    problems += [
        f"{name} is {tuple(found)} in the file and {tuple(expected)} in the model"
        for name, found, expected in sorted(info["mismatched_keys"])[:3]
    ]
    if inside:
        problems.append(f"the config's model has no place for {shortened(inside)}")
    return model, problems, unexpected


def _saved_names(shape: Any) -> set[str]:
    """The names that a model's tensors have in a file: those of single experts, where the model stacks them."""
    from transformers.core_model_loading import revert_weight_conversion

    return set(revert_weight_conversion(shape, shape.state_dict()))


def _check_dtypes(shape: Any, tensors: Mapping[str, Tensor], folder: Path) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS and not _buffer(shape, name):
            raise ValueError(
                f"{folder}: {name} has the dtype {str(tensor.dtype).removeprefix('torch.')}; expected float16, "
                "bfloat16, float32 or float64. Quantised weights are not read: take the checkpoint they were made from"
            )


def _buffer(shape: Any, name: str) -> bool:
    """Whether a name, with or without the prefix of the bare model, is a buffer such as position_ids or a mask."""
    ignored = shape._keys_to_ignore_on_load_unexpected or ()
    names = [buffer for buffer, _ in shape.named_buffers()]
    return any(_same(name, buffer) for buffer in names) or any(re.search(pattern, name) for pattern in ignored)


def _same(name: str, other: str) -> bool:
    return name == other or name.endswith(f".{other}") or other.endswith(f".{name}")


def _belongs_inside(shape: Any, name: str) -> bool:
    """Whether a left-over tensor lies in a layer, or in a module that the model has."""
    prefix = f"{shape.base_model_prefix}."
    modules = dict(shape.named_modules())
    for candidate in (name, prefix + name, name.removeprefix(prefix)):
        parents = candidate.split(".")[:-1]
        paths = [".".join(parents[: i + 1]) for i in range(len(parents))]
        if any(isinstance(modules.get(path), nn.ModuleList) for path in paths):
            return True
        if paths and any(True for _ in modules.get(paths[-1], nn.Identity()).parameters(recurse=False)):
            return True
    return False
