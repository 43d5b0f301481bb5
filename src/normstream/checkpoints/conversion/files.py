"""Checkpoint folders of every format: which format it is, what its configuration says, what it is written as.

=============== =================================================================================================
hf              config.json and the tensors
normstream      a run folder with one checkpoint; for a model that has no class of ours, normstream.json and the
                tensors under our names
megatron        megatron.json, with the family, the arguments of TransformerConfig and the configuration that the
                model came with; and the tensors of the whole model
siamese-lm      config.yaml, as OLMo writes it, or config.json; and the tensors
siamese-deit,   config.json, with the arguments of the model's constructor; and the tensors
siamese-dit
=============== =================================================================================================

Tensors are ``model.safetensors`` or shards with an index; a ``.bin`` is read. What normstream writes says in the
metadata of the tensor files which family it is and, for each norm, which convention of gain and which eps it has.
"""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import yaml
from torch import Tensor

from normstream.checkpoints.config_check import check_config
from normstream.checkpoints.conversion.convert import (
    ALL_FAMILIES,
    Format,
    Stored,
    family_of,
    read_tensors_of,
    release_format,
    write_tensors_of,
)
from normstream.checkpoints.conversion.formats import megatron
from normstream.checkpoints.conversion.formats.family import Family
from normstream.checkpoints.conversion.formats.hf import HF
from normstream.checkpoints.conversion.roles import Role
from normstream.checkpoints.conversion.settings import Settings, decoder_config, decoder_settings
from normstream.checkpoints.source import TOKENIZER_FILES, quiet_transformers, require_transformers
from normstream.checkpoints.tensors import (
    SHARD_BYTES,
    read_header,
    read_metadata,
    read_tensors,
    weight_files,
    write_tensors,
)
from normstream.data import DataConfig
from normstream.models import DecoderConfig
from normstream.norms import Gain
from normstream.training.checkpoint import find_checkpoint, list_checkpoints, read_checkpoint, save_checkpoint
from normstream.training.config import TrainConfig
from normstream.training.config_file import config_from_dict, config_to_dict
from normstream.training.files import read_json, write_json, write_text

MARK = "normstream"
"""Key of the metadata of a tensor file."""
MEGATRON_FILE, NAMES_FILE, OLMO_FILE, CONFIG_FILE = "megatron.json", "normstream.json", "config.yaml", "config.json"
COPIED = (
    *TOKENIZER_FILES,
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt", "chat_template.jinja"),
    "generation_config.json",
)
"""Files that go along unchanged."""
NAMED_BY: dict[str, Format] = {
    "decoder.layers.": "megatron",
    "transformer.blocks.0.attn_y_norm": "siamese-lm",
    "blocks.0.post_norm1": "siamese-deit",
    "blocks.0.postnorm1": "siamese-dit",
}
"""Beginnings of names that only one format has."""


@dataclass(frozen=True)
class Opened:
    """A checkpoint that was read."""

    stored: Stored
    format: Format
    folder: Path
    """Where its files are."""
    config: dict[str, Any] = field(default_factory=dict)
    """The configuration that the model was released with, as far as it is known."""


def detect_format(path: Path, family: str | None = None) -> Format:
    """The format of a checkpoint folder, from its files and the names of its tensors.

    Args:
        path: the folder.
        family: the model's family, which an old config.json does not state.

    Raises:
        ValueError: where they do not tell.
    """
    if (path / "state.json").is_file() or list_checkpoints(path / "checkpoints") or (path / NAMES_FILE).is_file():
        return "normstream"
    if (path / MEGATRON_FILE).is_file():
        return "megatron"
    config = read_json(path / CONFIG_FILE) if (path / CONFIG_FILE).is_file() else None
    if config is not None and (family in HF or {"model_type", "architectures"} & config.keys()):
        return "hf"
    names = _names(path)
    found: set[Format] = {name for start, name in NAMED_BY.items() if any(key.startswith(start) for key in names)}
    if len(found) != 1:
        raise ValueError(f"cannot tell the format of {path} from its files; say which it is with --from")
    return found.pop()


def _names(path: Path) -> set[str]:
    files = weight_files(path)
    safe = [name for file in files if file.suffix == ".safetensors" for name in read_header(file).shapes]
    return set(safe or read_tensors(path))


def open_checkpoint(
    path: Path, source: Format | None = None, family: str | None = None, stored_gain: Gain | None = None
) -> Opened:
    """Reads a checkpoint folder.

    Args:
        path: the folder.
        source: its format; None finds out.
        family: its family, where its files do not say.
        stored_gain: the convention of its gains, where its files do not say or say it wrongly.

    Raises:
        ValueError: naming the file, tensor, role or setting that is missing, unknown or contradicts another.
    """
    source = detect_format(path, family) if source is None else source
    if source == "normstream":
        return _open_ours(path, family, stored_gain)
    record = _record(path)
    if source == "hf":
        one, settings, config = _read_hf(path, family)
    elif source in ("megatron", "megatron-fused"):
        one, settings, config = _read_megatron(path, family, record, stored_gain)
    else:
        one = family_of(source.replace("-", "_"))
        config = _official_config(path)
        settings = one.settings(config)
    gains = stored_gain or _recorded_gains(record, one, source)
    return Opened(read_tensors_of(source, one, settings, read_tensors(path), gains), source, path, config)


def save_as(target: Format, stored: Stored, folder: Path, opened: Opened, max_shard_bytes: int = SHARD_BYTES) -> None:
    """Writes a model, its gains in the format's convention already, into an empty folder.

    Raises ValueError for a model that the format or its configuration cannot express.
    """
    tensors = write_tensors_of(target, stored)
    if target == "normstream" and stored.family.conventions is not None:
        _save_run(stored, tensors, folder, opened)
        return
    family, settings, record = stored.family, stored.settings, record_of(stored)
    if target == "hf":
        _save_hf_config(family, settings, tensors, folder, opened.config)
    elif target == "normstream":
        write_json(folder / NAMES_FILE, {"family": family.name, "settings": settings, "config": opened.config})
    elif target == "siamese-lm":
        write_text(folder / OLMO_FILE, yaml.safe_dump({"model": {**opened.config, **family.config(settings)}}))
    elif target in ("siamese-deit", "siamese-dit"):
        write_json(folder / CONFIG_FILE, {**opened.config, **family.config(settings)})
    else:
        zero_centered = settings["norm.gain"] == "zero_centered"
        values = {"arguments": megatron.arguments(settings, zero_centered), "config": opened.config}
        write_json(folder / MEGATRON_FILE, {"family": family.name, **values})
    write_tensors(folder, tensors, {MARK: json.dumps(record)}, max_shard_bytes)
    for name in COPIED:
        if (opened.folder / name).is_file():
            shutil.copyfile(opened.folder / name, folder / name)


def match_family(settings: Settings) -> Family:
    """The first family whose models compute what these settings say.

    Raises ValueError, with what the nearest family does otherwise.
    """
    decoders = [family for family in ALL_FAMILIES.values() if family.conventions is not None]
    wrong = {family.name: family.mismatch(settings) for family in decoders}
    nearest = min(wrong, key=lambda name: len(wrong[name]) + 100 * ("all" in wrong[name]))
    if wrong[nearest]:
        said = ", ".join(f"{key} {settings.get(key)!r} (there {there!r})" for key, there in wrong[nearest].items())
        raise ValueError(
            f"no family of transformers or of the official SiameseNorm code computes what this model does; the nearest "
            f"is {nearest}, but for {said}"
        )
    return ALL_FAMILIES[nearest]


def role_key(role: Role) -> str:
    """A role's name in metadata.

    >>> role_key(Role("ffn_pre_norm", layer=3))
    'layers.3.ffn_pre_norm'
    """
    return role.name if role.layer is None else f"layers.{role.layer}.{role.name}"


def role_of(key: str) -> Role:
    """The inverse of ``role_key``.

    >>> role_of("layers.3.ffn_pre_norm").layer
    3
    """
    *layer, name = key.split(".")
    return Role(name, int(layer[1]) if layer else None)


def record_of(stored: Stored) -> dict[str, Any]:
    """What goes into the metadata: the family, and the conventions of every norm that has weights."""
    norms = {
        role_key(role): {"kind": norm.kind, "gain": norm.gain, "eps": norm.eps} for role, norm in stored.norms.items()
    }
    return {"family": stored.family.name, "norms": norms, "file": _about_the_file(stored.settings)}


def _about_the_file(settings: Settings) -> Settings:
    """Which of a family's optional tensors there are, and whether names have their prefix."""
    return {key: value for key, value in settings.items() if key.startswith("file.")}


def _record(path: Path) -> dict[str, Any]:
    """What ``record_of`` made of a model; empty for files that normstream's conversion did not write."""
    try:
        record = json.loads(read_metadata(path).get(MARK, "{}"))
    except json.JSONDecodeError:
        return {}
    norms = record.get("norms", {}) if isinstance(record, dict) else None
    if not isinstance(norms, dict) or not all(_is_norm(key, norm) for key, norm in norms.items()):
        return {}
    return record


def _is_norm(key: str, norm: Any) -> bool:
    """Whether an entry of the metadata is one that ``record_of`` makes."""
    is_key = re.fullmatch(r"(layers\.\d+\.)?\w+", key) is not None
    return is_key and isinstance(norm, dict) and norm.get("gain") in get_args(Gain)


def _recorded_gains(record: Mapping[str, Any], family: Family, source: Format) -> dict[Role, Gain] | None:
    """The gains that a file's metadata tells; None if it tells nothing.

    Raises ValueError if they are not those that code of the family takes for granted.
    """
    if "norms" not in record:
        return None
    gains = {role_of(key): norm["gain"] for key, norm in record["norms"].items()}
    if source == release_format(family) and set(gains.values()) - {family.gain}:
        raise ValueError(
            f"the file's metadata says that gains are {', '.join(sorted(set(gains.values())))}, but the code of "
            f"{family.name} takes them as {family.gain}; say which it is with --stored-gain"
        )
    return gains


def _read_hf(path: Path, family: str | None) -> tuple[Family, Settings, dict[str, Any]]:
    require_transformers()
    with quiet_transformers():
        raw, config = check_config(path / CONFIG_FILE, trust_remote_code=False, model_type=family, notes=[])
        one = family_of(raw["model_type"])
        return one, one.settings(config.to_dict()), raw


def _read_megatron(
    path: Path, family: str | None, record: Mapping[str, Any], stored_gain: Gain | None
) -> tuple[Family, Settings, dict[str, Any]]:
    values = read_json(path / MEGATRON_FILE)
    name = family or record.get("family") or values.get("family")
    if name is None:
        raise ValueError(f"{path / MEGATRON_FILE} does not say of which family the model is; say it with --family")
    given, config = values.get("arguments", values), values.get("config", {})
    if not (isinstance(name, str) and isinstance(given, dict) and isinstance(config, dict)):
        raise ValueError(f"{path / MEGATRON_FILE}: expected a family's name, and objects for arguments and config")
    if stored_gain is None and "norms" not in record and "layernorm_zero_centered_gamma" not in given:
        raise ValueError(
            f"{path / MEGATRON_FILE} has no layernorm_zero_centered_gamma, and gains do not tell by themselves whether "
            "they are w or 1 + w; add it, or say it with --stored-gain"
        )
    one = family_of(name)
    return one, megatron.from_arguments(one, given) | record.get("file", {}), config


def _official_config(path: Path) -> dict[str, Any]:
    """The configuration of an official SiameseNorm model."""
    if (path / OLMO_FILE).is_file():
        try:
            values = yaml.safe_load((path / OLMO_FILE).read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read {path / OLMO_FILE}: {error}") from error
        model = values.get("model", values) if isinstance(values, dict) else None
        if not isinstance(model, dict):
            raise ValueError(f"{path / OLMO_FILE} has no configuration of a model: expected keys and values")
        return model
    return read_json(path / CONFIG_FILE)


def _open_ours(path: Path, family: str | None, stored_gain: Gain | None) -> Opened:
    if (path / NAMES_FILE).is_file():
        values, record = read_json(path / NAMES_FILE), _record(path)
        if not isinstance(values.get("family"), str) or not isinstance(values.get("settings"), dict):
            raise ValueError(f"{path / NAMES_FILE} has no family and settings: it is not what a conversion writes")
        one, settings = family_of(values["family"]), values["settings"]
        gains = stored_gain or _recorded_gains(record, one, "normstream")
        stored = read_tensors_of("normstream", one, settings, read_tensors(path), gains)
        return Opened(stored, "normstream", path, values.get("config", {}))
    folder = find_checkpoint(path)
    checkpoint = read_checkpoint(folder)
    converted = checkpoint.state.get("converted", {})
    settings = decoder_settings(config_from_dict(checkpoint.state["config"]["model"], DecoderConfig, "model."))
    settings |= converted.get("file", {})
    name = family or converted.get("family")
    one = match_family(settings) if name is None else family_of(name)
    gain = stored_gain or settings["norm.gain"]  # our configuration says it for all norms
    return Opened(
        read_tensors_of("normstream", one, settings, checkpoint.weights, gain),
        "normstream",
        folder,
        converted.get("config", {}),
    )


def _save_run(stored: Stored, tensors: Mapping[str, Tensor], folder: Path, opened: Opened) -> None:
    """A run folder with one checkpoint, which ``load_model``, ``normstream eval`` and ``normstream generate`` take."""
    model = decoder_config(stored.settings)
    tokenizer = opened.folder / "tokenizer.json"
    text = tokenizer.read_text(encoding="utf-8") if tokenizer.is_file() else None
    data = replace(DataConfig(), seq_len=min(DataConfig.seq_len, model.max_seq_len))
    state = {
        "config": config_to_dict(TrainConfig(model=model, data=data)),
        "corpus_hash": "",
        "metrics_bytes": 0,
        "scaler": None,
        "progress": {"step": 0},
        "converted": {**record_of(stored), "config": opened.config},
    }
    save_checkpoint(folder / "checkpoints", 0, tensors, {}, state, keep=1, tokenizer=text)


def _save_hf_config(
    family: Family, settings: Settings, tensors: Mapping[str, Tensor], folder: Path, known: Mapping[str, Any]
) -> None:
    transformers: Any = require_transformers()
    values = {**known, **family.config(settings)}
    with quiet_transformers():
        config = transformers.CONFIG_MAPPING[family.name].from_dict(values)
    if config.architectures is None:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family.name]]
    config.dtype = str(max((t for t in tensors.values()), key=Tensor.numel).dtype).removeprefix("torch.")
    config.save_pretrained(folder)
