"""Names that are shown: of a model, and paths of its modules, one for all layers, in lines of a given width."""

import re

from normstream.inspect.anatomy import NormSite, StackAnatomy

INDEX = r"(?<![^.])\d+(?![^.])"
"""A member of a list, in a path."""


def short_name(source: str) -> str:
    """The last telling part of where a model came from, as part of a file name.

    >>> short_name("org/Some-Model"), short_name("runs/train/"), short_name("minilm/model/config.json")
    ('Some-Model', 'train', 'minilm')
    """
    parts = [part for part in source.split("/") if part not in ("", "model", "config.json")]
    return re.sub(r"[^\w.-]+", "-", parts[-1] if parts else "model").strip("-.") or "model"


def pattern(path: str, layer: str) -> str:
    """A module's path with * for the index of its layer, whose path is ``layer``; "" for a module outside the layers.

    Other indices stay, they tell roles apart. Where the layer is no member of a list, its parts are: their index goes.

    >>> pattern("encoder.block.3.layer.0.norm", "encoder.block.3"), pattern("norms.0", "")
    ('encoder.block.*.layer.0.norm', 'norms.0')
    >>> pattern("model.parts.0.norm", "model")
    'model.parts.*.norm'
    """
    if not layer:
        return path
    starred = re.sub(INDEX, "*", layer)
    within = path == layer or path.startswith(f"{layer}.")
    if not within or starred == layer:
        return re.sub(INDEX, "*", path)
    return starred + path.removeprefix(layer)


def site_path(site: NormSite, stack: StackAnatomy) -> str:
    """The path of a norm with * for the index of its layer."""
    return pattern(site.call.path, "" if site.layer is None else stack.layers[site.layer].call.path)


def folded(path: str, width: int) -> str:
    """A path in lines of at most ``width`` characters, broken before dots; before underscores where that is not enough.

    >>> print(folded("encoder.layer.*.attention.output.LayerNorm", 24))
    encoder.layer.*
    .attention.output
    .LayerNorm
    >>> print(folded("layers.*.post_feedforward_layernorm", 18))
    layers.*
    .post_feedforward
    _layernorm
    """
    lines = [""]
    for part in re.findall(r"\.?[^.]+", path):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        for piece in [part] if len(part) <= width else re.findall(r"_?[^_]+|_", part):
            if lines[-1] and len(lines[-1]) + len(piece) > width:
                lines.append("")
            lines[-1] += piece
    return "\n".join(lines)
