"""Settings: a model's sizes and conventions in the words of ``DecoderConfig``, whatever format they came from.

Settings are a flat dictionary with dotted keys, ``{"dim": 64, "norm.eps": 1e-5, ...}``, nothing left to a default. What
``DecoderConfig`` has no field for has words of its own: ``moe.`` for experts, ``rope.`` for stretched positions,
``file.`` for what a file may have or lack, and a few for encoders and images.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from normstream import placements
from normstream.checkpoints.conversion.roles import NORMS
from normstream.models import DecoderConfig
from normstream.norms import NormConfig
from normstream.training.config_file import config_from_dict, config_to_dict

Settings = dict[str, Any]
NOT_THE_FUNCTION = frozenset(
    {"init", "init_std", "dropout", "drop_path", "depth_stride", "norm.gain_init", "norm.alpha", "norm.scope"}
    | {"norm.cast", "max_seq_len"}
)
"""Settings in which two models may differ that compute the same: how training starts, and the order of casts, which is
the same function in float32."""
SAME_WIRING = {"gpt2": "pre", **dict.fromkeys(("gemma3", "glm4", "sandwich", "peri(embedding_norm=false)"), "gemma2")}
"""Placements that put the norms where another one does; what else they say is among the settings."""
QKV, FEED_FORWARD = frozenset({"q", "k", "v"}), frozenset({"gate", "up", "down"})
ALWAYS_BIASED = frozenset(
    {"pooler", "mlm_dense", "next_sentence", "classifier", "patch_embedding"}
    | {"time_in", "time_out", "modulation", "final_modulation", "output"}
)
INNER_NORMS = frozenset({"q_norm", "k_norm", "v_norm", "latent_q_norm", "latent_kv_norm"})


def same(value: Any) -> Any:
    """The value itself."""
    return value


@dataclass(frozen=True)
class Key:
    """A key of some configuration and the setting that it stands for."""

    theirs: str
    """Dotted path in their configuration."""
    ours: str
    """Key of the settings."""
    read: Any = same
    """From their value to ours."""
    write: Any = same
    """The inverse of ``read``."""


def decoder_settings(config: DecoderConfig) -> Settings:
    """The settings of a decoder, every default resolved.

    >>> settings = decoder_settings(DecoderConfig(placement="pre", dim=64, n_heads=4))
    >>> settings["head_dim"], settings["norm.eps"]
    (16, 1e-05)
    """
    settings = fields_of(config)
    inner = config.inner_of(0)
    inner = replace(inner, eps=config.norm.eps if inner.eps is None else inner.eps)
    settings |= flat({"inner": config_to_dict(inner)})
    settings |= {
        "placement": str(placements.get(config.placement)),
        "n_kv_heads": config.resolved_kv_heads,
        "head_dim": None if config.latent.kv_rank else config.resolved_head_dim,
        "ffn_dim": config.resolved_ffn_dim,
        "query_scale": _usual_scale(config) if config.query_scale is None else config.query_scale,
    }
    return settings


def fields_of(config: DecoderConfig) -> Settings:
    """The fields of a decoder by dotted name, nothing resolved; those of experts are left out, as there are none.

    Raises ValueError for a decoder with experts.

    >>> fields_of(DecoderConfig())["norm.kind"]
    'rms'
    """
    if config.moe.n_experts:
        raise ValueError("a model of normstream with experts cannot be converted yet")
    return flat({key: value for key, value in config_to_dict(config).items() if key != "moe"})


def _usual_scale(config: DecoderConfig) -> float:
    return (config.latent.query_dim if config.latent.kv_rank else config.resolved_head_dim) ** -0.5


def decoder_config(settings: Mapping[str, Any]) -> DecoderConfig:
    """The inverse of ``decoder_settings``.

    Raises ValueError as ``check_ours``.

    >>> decoder_config(decoder_settings(DecoderConfig(dim=32))).dim
    32
    """
    check_ours(settings)
    names = {field.name for field in dataclasses.fields(DecoderConfig)}
    fields = nested({key: value for key, value in settings.items() if key.split(".")[0] in names})
    config = config_from_dict(fields, DecoderConfig)
    return replace(config, query_scale=None) if config.query_scale == _usual_scale(config) else config


def check_ours(settings: Mapping[str, Any]) -> None:
    """Raises ValueError for what no model of normstream computes yet.

    >>> check_ours({"moe.n_experts": 8})
    Traceback (most recent call last):
    ValueError: experts are not converted to normstream yet; take hf or megatron
    """
    words = {"moe.": "experts", "rope.": "stretched rotary positions (rope_type)"}
    for word, what in words.items():
        if any(key.startswith(word) for key in settings):
            raise ValueError(f"{what} are not converted to normstream yet; take hf or megatron")


def differences(settings: Mapping[str, Any], others: Mapping[str, Any]) -> list[str]:
    """Keys in which two models differ as functions; the order of casts and what starts training do not count.

    >>> differences({"dim": 8, "init": "small"}, {"dim": 4, "init": "deepnorm"})
    ['dim']
    """
    keys = settings.keys() | others.keys()
    keys = {key for key in keys - NOT_THE_FUNCTION if not key.startswith("file.")}
    return sorted(key for key in keys if _meaning(key, settings) != _meaning(key, others))


def _meaning(key: str, settings: Mapping[str, Any]) -> Any:
    """What a setting says about the function; which convention a gain has travels with each norm instead."""
    value = settings.get(key)
    if key == "placement":
        return SAME_WIRING.get(str(value), value)
    return value == "none" if key == "norm.gain" else value


def has_bias(role: str, settings: Mapping[str, Any]) -> bool:
    """Whether the module of a role has a bias.

    >>> has_bias("o", {"bias": "qkv"}), has_bias("q", {"bias": "qkv"})
    (False, True)
    """
    bias = settings.get("bias", "none")
    if role in NORMS:
        return settings.get("norm.bias", False)
    if role == "head":
        return settings.get("head_bias", False)
    if role in QKV:
        return bias in ("all", "qkv")
    if role == "o":
        return bias == "all"
    if role in FEED_FORWARD:
        return bias in ("all", "feed_forward")
    return role in ALWAYS_BIASED


def norm_of(role: str, settings: Mapping[str, Any]) -> NormConfig:
    """The conventions of the norm of a role.

    >>> norm_of("q_norm", {"norm.kind": "rms", "norm.gain": "plain", "norm.eps": 1e-5, "inner.eps": 1e-6}).eps
    1e-06
    """
    eps = settings["norm.eps"]
    if role in INNER_NORMS:
        eps = settings.get("inner.eps", eps)
    cast = settings.get("norm.cast", "after_gain")
    return NormConfig(settings["norm.kind"], eps, settings["norm.gain"], cast=cast, bias=has_bias(role, settings))


def read_keys(keys: Iterable[Key], config: Mapping[str, Any]) -> Settings:
    """What a configuration says, as settings; keys that it lacks are left out.

    >>> read_keys([Key("rope.theta", "positions.theta")], {"rope": {"theta": 1e6}})
    {'positions.theta': 1000000.0}
    """
    values = flat(config)
    return {key.ours: key.read(values[key.theirs]) for key in keys if key.theirs in values}


def write_keys(keys: Iterable[Key], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of ``read_keys``.

    >>> write_keys([Key("rope.theta", "positions.theta")], {"positions.theta": 1e6})
    {'rope': {'theta': 1000000.0}}
    """
    return nested({key.theirs: key.write(settings[key.ours]) for key in keys if key.ours in settings})


def flat(values: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one with dotted keys.

    >>> flat({"a": {"b": 1}, "c": 2})
    {'a.b': 1, 'c': 2}
    """
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of ``flat``.

    >>> nested({"a.b": 1, "c": 2})
    {'a': {'b': 1}, 'c': 2}
    """
    found: dict[str, Any] = {}
    for key, value in values.items():
        *folders, name = key.split(".")
        place = found
        for folder in folders:
            place = place.setdefault(folder, {})
        place[name] = value
    return found
