"""A config.json of Hugging Face: is it complete, and which class of transformers does it mean?

What transformers would fill in silently is asked for here: the model type, and the eps of the norms, whose default in
the class is often not the one that the weights were trained with.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from normstream.names import nearest
from normstream.training.files import read_json

EPS_KEY = r"(\w+_)?(eps|epsilon)"
"""Config keys such as rms_norm_eps, layer_norm_epsilon, eps."""


def check_config(
    file: Path, trust_remote_code: bool, model_type: str | None, notes: list[str]
) -> tuple[dict[str, Any], Any]:
    """The values in a config.json, and the config object of transformers made of them.

    What had to be assumed is added to ``notes``.

    Raises:
        ValueError: if the file is no config of a known model type, wants code of its own, is that of a quantised
            model, has no eps where its class takes one, or one that is no number of at least 0.
    """
    import transformers

    raw = read_json(file)
    if quantized := raw.get("quantization_config"):
        method = quantized.get("quant_method", "unknown") if isinstance(quantized, dict) else quantized
        raise ValueError(f"{file}: the weights are quantised ({method}); take the checkpoint it was made from")
    if trust_remote_code and "auto_map" in raw:
        return raw, transformers.AutoConfig.from_pretrained(file.parent, trust_remote_code=True)
    is_typed = raw.get("model_type") is not None
    raw = {**raw, "model_type": _model_type(file, raw, model_type, notes)}
    config_class = transformers.CONFIG_MAPPING[raw["model_type"]]
    _check_eps(file, raw, config_class(), notes)
    try:
        # AutoConfig sends a Mistral with layer_types to another class; it only reads files that state their type.
        read = transformers.AutoConfig.from_pretrained
        config = read(file, trust_remote_code=False) if is_typed else config_class.from_dict(raw)
    except Exception as error:  # transformers validates with many kinds of exceptions
        reason = " ".join(str(error).split())
        raise ValueError(f"{file} is no valid config of a {raw['model_type']}: {reason}") from error
    return raw, config


def model_classes(raw: Mapping[str, Any], config: Any, folder: Path | None, trust_remote_code: bool) -> list[Any]:
    """The classes of transformers that a config may mean, the likeliest first.

    The one in ``architectures`` if there is one; else those with a language-model head, and the bare model.
    """
    from transformers.dynamic_module_utils import get_class_from_dynamic_module
    from transformers.models.auto import modeling_auto

    if trust_remote_code and "auto_map" in raw:
        reference = next(value for key, value in raw["auto_map"].items() if key.startswith("AutoModel"))
        return [get_class_from_dynamic_module(reference, str(folder))]
    if (named := _architecture(raw)) is not None:
        return [named]
    mappings = [modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING, modeling_auto.MODEL_MAPPING]
    if getattr(config, "is_encoder_decoder", False):
        mappings.insert(0, modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING)
    elif not getattr(config, "is_decoder", False):
        mappings.insert(0, modeling_auto.MODEL_FOR_MASKED_LM_MAPPING)
    found = [mapping[type(config)] for mapping in mappings if type(config) in mapping]
    classes = [kind for entry in found for kind in (entry if isinstance(entry, tuple | list) else [entry])]
    if not classes:
        raise ValueError(f"transformers has no model for the config of a {config.model_type}")
    return classes


def _model_type(file: Path, raw: Mapping[str, Any], given: str | None, notes: list[str]) -> str:
    import transformers

    stated = raw.get("model_type")
    if stated is not None and given not in (None, stated):
        raise ValueError(f"{file} says model_type {stated!r}, not {given!r}; leave the type out")
    if stated is not None and not isinstance(stated, str):
        raise ValueError(f"{file}: model_type must be a name such as llama, got {stated!r}")
    named = _architecture(raw)
    found = stated or given or (named and named.config_class.model_type)
    if found is None:
        raise ValueError(f"{file} has no model_type, so the architecture is unknown: state it (--model-type bert)")
    if found in transformers.CONFIG_MAPPING:
        if not stated:
            notes.append(f"config.json has no model_type; taken as {found}")
        return found
    if "auto_map" in raw:
        raise ValueError(f"{file}: {found!r} comes with its own code; it runs only with --trust-remote-code")
    raise ValueError(f"{file}: unknown model_type {found!r}; {_nearest_type(found)}")


def _architecture(raw: Mapping[str, Any]) -> Any:
    """The model class that a config names; None if it names none, or something of transformers that is no model."""
    import transformers

    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    kind = getattr(transformers, name, None) if isinstance(name, str) else None
    return kind if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel) else None


def _nearest_type(found: str) -> str:
    import transformers

    return nearest(found, transformers.CONFIG_MAPPING.keys()).partition(" Known:")[0]


def _check_eps(file: Path, raw: Mapping[str, Any], default: Any, notes: list[str], where: str = "") -> None:
    """Compares the eps keys of a config, and of the configs in it, with those that the class takes.

    Raises ValueError if none is given, or one that is no number of at least 0; one of several that is missing becomes
    a note.
    """
    values = default.to_dict()
    taken = {key: value for key, value in values.items() if re.fullmatch(EPS_KEY, key) and isinstance(value, float)}
    aliases = {name: alias for alias, name in type(default).attribute_map.items()}
    given = {key: raw[name] for key in taken for name in (key, aliases.get(key, key)) if name in raw}
    for key, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ValueError(f"{file}: {where}{key} must be a number of at least 0, got {value!r}")
    missing = {key: value for key, value in taken.items() if key not in given}
    if missing and len(missing) == len(taken):
        expected = " or ".join(f"{where}{key}" for key in missing)
        fill = ", ".join(f"{value:g}" for value in missing.values())
        raise ValueError(
            f"{file} has no eps for its norms: expected {expected}; write down the value the model was trained with "
            f"(transformers would silently take {fill})"
        )
    notes += [f"config.json has no {where}{key}; transformers takes {value:g}" for key, value in missing.items()]
    for key in default.sub_configs:
        if isinstance(raw.get(key), dict) and getattr(default, key, None) is not None:
            _check_eps(file, raw[key], getattr(default, key), notes, f"{where}{key}.")
