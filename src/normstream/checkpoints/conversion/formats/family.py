"""A family of released models: its role table, and what its configuration means."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from normstream.checkpoints.conversion.formats.table import Entry, Indices, Rows, write_out
from normstream.checkpoints.conversion.roles import Role
from normstream.checkpoints.conversion.settings import (
    Key,
    Settings,
    decoder_config,
    decoder_settings,
    differences,
    fields_of,
    flat,
    has_bias,
    nested,
    read_keys,
    write_keys,
)
from normstream.models import DecoderConfig
from normstream.models.families import FAMILIES, family
from normstream.norms import Gain

Config = Mapping[str, Any]
"""A configuration as its file says it."""
OUR_WORDS = ("moe.", "file.", "rope.")
"""Settings that ``DecoderConfig`` has no fields for."""
UNSTRETCHED = (".rope_theta", ".partial_rotary_factor", ".type")
"""Keys of rotary positions that are settings of their own, or an older name of rope_type."""


def nothing(_: Config) -> dict[str, Any]:
    """No further settings."""
    return {}


@dataclass(frozen=True)
class Family:
    """Models that share a role table."""

    name: str
    """As the configuration's ``model_type`` says it."""
    rows: Rows | Callable[[Config], Rows]
    """The role table, or the one that goes with some settings."""
    keys: tuple[Key, ...]
    """The configuration, key by key."""
    conventions: str | DecoderConfig | None = None
    """Name in ``normstream.models.FAMILIES``, or the conventions themselves; None for what is no decoder."""
    base: Mapping[str, Any] = field(default_factory=dict)
    """Settings that all models of the family have, beyond or instead of the conventions."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """What a configuration must say, by dotted path: other values are another function than the conventions'."""
    read_more: Callable[[Config], dict[str, Any]] = nothing
    """Settings that no single key gives."""
    write_more: Callable[[Config], dict[str, Any]] = nothing
    """The inverse of ``read_more``, from settings to nested keys of the configuration."""
    rope: tuple[str, ...] = ()
    """Where the configuration says how rotary positions are stretched, if they are."""
    prefix: str = ""
    """What the names of the model without its head lack."""
    optional: Mapping[str, Rows] = field(default_factory=dict)
    """Heads that a checkpoint may have or lack, each as a whole."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Names under which older files hold another tensor a second time."""
    constants: tuple[str, ...] = ()
    """Patterns of names of buffers in older files that hold no weights."""

    def settings(self, config: Config) -> Settings:
        """The settings that a configuration stands for.

        Raises ValueError where the family computes something that these settings cannot say.
        """
        given = flat(config)
        if missing := [key.theirs for key in self.keys if key.theirs not in given]:
            raise ValueError(
                f"the configuration of a {self.name} lacks {', '.join(missing)}; add what it was trained with"
            )
        for key, wanted in self.fixed.items():
            if key in given and given[key] != wanted:
                raise ValueError(
                    f"{key} is {given[key]!r}, but the conversion of {self.name} knows {wanted!r} only; "
                    "it would be another function"
                )
        return self.complete({**read_keys(self.keys, config), **self.read_more(config), **self._stretched(given)})

    def _stretched(self, given: Settings) -> Settings:
        """How rotary positions are stretched, key by key; nothing where they are not."""
        places = tuple(f"{place}." for place in self.rope if given.get(f"{place}.rope_type", "default") != "default")
        keys = [key for key in given if key.startswith(places) and not key.endswith(UNSTRETCHED)] if places else []
        return {f"rope.{key}": given[key] for key in keys}

    def complete(self, values: Mapping[str, Any]) -> Settings:
        """Some settings, with the family's conventions and defaults for the rest."""
        values = {**self.base, **values}
        if self.conventions is None:
            return values
        ours = {key: value for key, value in values.items() if not key.startswith(OUR_WORDS)}
        return decoder_settings(self._decoder(ours)) | {key: values[key] for key in values.keys() - ours.keys()}

    def config(self, settings: Settings) -> dict[str, Any]:
        """The configuration with these settings.

        Raises ValueError, naming the settings, if this family has no such models.
        """
        config, wrong = self._written(settings)
        if wrong:
            said = ", ".join(f"{key} {settings.get(key)!r} (there {there!r})" for key, there in wrong.items())
            raise ValueError(f"{self.name} cannot express this model: {said}")
        return config

    def mismatch(self, settings: Settings) -> dict[str, Any]:
        """The settings that this family's models have otherwise, with their values there; empty if it fits."""
        return self._written(settings)[1]

    def _written(self, settings: Settings) -> tuple[dict[str, Any], dict[str, Any]]:
        written = flat(write_keys(self.keys, settings)) | dict(self.fixed) | flat(self.write_more(settings))
        written |= {f"{place}.rope_type": "default" for place in self.rope}
        written |= {key.removeprefix("rope."): settings[key] for key in settings if key.startswith("rope.")}
        config = nested(written)
        try:
            back = self.settings(config)
        except (ValueError, KeyError) as error:  # what was written is no model of this family
            return config, {"all": str(error)}
        return config, {key: back.get(key) for key in differences(settings, back)}

    def entries(self, settings: Settings) -> dict[str, Entry]:
        """The tensors of a checkpoint and their roles."""
        rows = dict(self.rows(settings) if callable(self.rows) else self.rows)
        if settings.get("tied"):
            rows = {name: role for name, role in rows.items() if role != "head"}
        for name in settings.get("file.optional", ()):
            rows |= self.optional[name]
        if settings.get("file.no_head"):
            rows = {name.removeprefix(self.prefix): role for name, role in rows.items() if name.startswith(self.prefix)}
        return write_out(rows, indices(settings), lambda role: has_bias(role, settings))

    @property
    def gain(self) -> Gain:
        """The convention of gains that the family's code has."""
        return self.complete({})["norm.gain"]

    def roles(self, settings: Settings) -> set[Role]:
        """Every role that a model with these settings has."""
        return {role for entry in self.entries(settings).values() for role in entry.roles}

    def _decoder(self, values: Settings) -> DecoderConfig:
        """The family's decoder with other values for some settings."""
        named = self.conventions if isinstance(self.conventions, str) else ""
        start = self.conventions if isinstance(self.conventions, DecoderConfig) else FAMILIES[named]
        changed = decoder_config(fields_of(start) | values)
        fields = {name: getattr(changed, name) for name in {key.split(".")[0] for key in values}}
        return family(named, **fields) if named else changed


def indices(settings: Config) -> Indices:
    """The layers and experts of a model: ``{i}`` is any layer, ``{dense}`` one without, ``{moe}`` one with experts.

    >>> indices({"n_layers": 3, "moe.n_dense": 1, "moe.n_experts": 8}).layers["moe"]
    range(1, 3)
    """
    n_layers = settings["n_layers"]
    n_dense = settings["moe.n_dense"] if settings.get("moe.n_experts") else n_layers
    layers = {"i": range(n_layers), "dense": range(n_dense), "moe": range(n_dense, n_layers)}
    return Indices(layers, settings.get("moe.n_experts", 0))


def by_name(families: Iterable[Family]) -> dict[str, Family]:
    """Families by their names.

    >>> by_name([])
    {}
    """
    return {one.name: one for one in families}
