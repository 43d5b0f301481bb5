"""Checkpoints that people already have: read, convert, rescale, fold, prune, denorm.

loaded = load_source("path-or-name")
result = rescale(loaded.model)                        # result.model, result.report
convert_checkpoint(Path("llama"), Path("new"), "megatron-fused")
report = fold(loaded.model)
shorter, report = prune(loaded.model, 2)
changed, report = denorm(loaded.model, data)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from normstream.checkpoints.source import LoadedModel as LoadedModel
from normstream.checkpoints.source import load_source as load_source
from normstream.checkpoints.source import require_transformers as require_transformers

if TYPE_CHECKING:
    from normstream.checkpoints.conversion.checkpoint import convert_checkpoint as convert_checkpoint
    from normstream.checkpoints.rescaling.checkpoint import rescale_checkpoint as rescale_checkpoint
    from normstream.checkpoints.rescaling.rescale import rescale as rescale
    from normstream.checkpoints.surgery.denorm import denorm as denorm
    from normstream.checkpoints.surgery.fold import fold as fold
    from normstream.checkpoints.surgery.prune import prune as prune

_MODULES = {
    "convert_checkpoint": "conversion.checkpoint",
    "rescale": "rescaling.rescale",
    "rescale_checkpoint": "rescaling.checkpoint",
    "fold": "surgery.fold",
    "prune": "surgery.prune",
    "denorm": "surgery.denorm",
}
"""Imported at their first use: they need ``normstream.inspect``, which needs this package."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
