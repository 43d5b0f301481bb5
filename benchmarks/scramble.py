"""Takes every hint that names could give out of a model: class names, attribute names, parameter names, model type."""

import random
from typing import Any

from torch import nn


def scramble(model: nn.Module, seed: int = 0) -> dict[str, str]:
    """Renames everything in place; gives back the old path of every new one, of modules and of parameters.

    Every module gets a class of its own, a subclass of the old one with a meaningless name, that looks attributes up
    under their new names, so that the old ``forward`` still runs. The numbered items of lists keep their numbers.

    >>> model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    >>> old = scramble(model)
    >>> sorted(old.values())[:3], type(model[0]).__name__ == "TransformerEncoderLayer", "0.norm1" in old
    (['', '0', '0.dropout'], False, False)
    """
    numbers = random.Random(seed)
    before = _paths(model)
    for module in list(model.modules()):
        _rename(module, numbers)
    for config in {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}.values():
        config.__class__ = type(_word(numbers), (type(config),), {"model_type": _word(numbers)})
    return dict(zip(_paths(model), before, strict=True))


def _paths(model: nn.Module) -> list[str]:
    modules = [path for path, _ in model.named_modules(remove_duplicate=False)]
    return modules + [path for path, _ in model.named_parameters(remove_duplicate=False)]


def _word(numbers: random.Random) -> str:
    return "x" + "".join(numbers.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(8))


def _rename(module: nn.Module, numbers: random.Random) -> None:
    new: dict[str, str] = {}
    if not isinstance(module, nn.ModuleDict):  # is read by its keys
        for owned in (module._modules, module._parameters):
            items = list(owned.items())
            owned.clear()
            for name, value in items:
                new[name] = name if name.isdigit() else _word(numbers)
                owned[new[name]] = value  # pyright: ignore[reportArgumentType]
    module.__class__ = _renamed_class(type(module), new, _word(numbers))  # pyright: ignore[reportAttributeAccessIssue]


def _renamed_class(old: type[nn.Module], new: dict[str, str], word: str) -> type[nn.Module]:
    def find(self: nn.Module, name: str) -> Any:
        return old.__getattr__(self, new.get(name, name))

    return type(word, (old,), {"__getattr__": find})
