"""Converting tensors: from one format's names to roles, and from roles to another format's names.

    stored = read_tensors_of("hf", FAMILY, settings, tensors)
    tensors = write_tensors_of("megatron-fused", stored)

Every tensor of the source is used exactly once and every tensor of the target is written exactly once; anything else is
an error that names the role. Nothing is computed but sums of zero-centred gains, and those only where it is asked for:
all else is copied bit by bit.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from torch import Tensor

from normstream.checkpoints.conversion.formats import megatron, normstream
from normstream.checkpoints.conversion.formats.family import Family
from normstream.checkpoints.conversion.formats.hf import HF
from normstream.checkpoints.conversion.formats.siamese import SIAMESE
from normstream.checkpoints.conversion.formats.table import Entry
from normstream.checkpoints.conversion.gains import check_gains, with_gain
from normstream.checkpoints.conversion.roles import Role, shape_of, sizes
from normstream.checkpoints.conversion.settings import Settings, check_ours, norm_of
from normstream.checkpoints.conversion.stored import settle
from normstream.checkpoints.fill import not_finite
from normstream.checkpoints.tensors import FLOATS
from normstream.names import check_choice, nearest
from normstream.norms import Gain, NormConfig

Format = Literal["hf", "normstream", "megatron", "megatron-fused", "siamese-lm", "siamese-deit", "siamese-dit"]
GainChoice = Literal["keep", "plain", "zero_centered"]
ALL_FAMILIES: dict[str, Family] = HF | SIAMESE
CHOOSES_GAIN: tuple[Format, ...] = ("normstream", "megatron", "megatron-fused")
"""Formats that can hold either convention of gains; the others have the one of the family's code."""


@dataclass(frozen=True)
class Stored:
    """A model's tensors by role, and all that is needed to write them in another format."""

    family: Family
    settings: Settings
    tensors: dict[Role, Tensor]
    norms: dict[Role, NormConfig]
    """Conventions of every norm that has weights: gain and eps are those of the tensors above."""
    left_out: tuple[str, ...] = ()
    """Tensors of the file that hold no weights (buffers of older files) or are equal to another (tied ones)."""


def family_of(name: str) -> Family:
    """The family with this name; raises ValueError with the nearest name for an unknown one.

    >>> family_of("gemma2").conventions
    'gemma2'
    """
    if name not in ALL_FAMILIES:
        raise ValueError(f"no role table for the family {name!r}; {nearest(name, ALL_FAMILIES)}")
    return ALL_FAMILIES[name]


def release_format(family: Family) -> Format:
    """The format in which a family's models are released.

    >>> release_format(family_of("llama"))
    'hf'
    """
    if family.name in HF:
        return "hf"
    return next(name for name in get_args(Format) if name == family.name.replace("_", "-"))


def read_tensors_of(
    source: Format,
    family: Family,
    settings: Settings,
    tensors: Mapping[str, Tensor],
    gains: Mapping[Role, Gain] | Gain | None = None,
) -> Stored:
    """A checkpoint's tensors by role.

    Args:
        source: its format.
        family: its family.
        settings: the model's sizes and conventions.
        tensors: all its tensors by name.
        gains: the convention of gains, for all norms or for each; None means the settings', which the values must not
            contradict.

    Raises:
        ValueError: naming role and tensor where one is missing, unknown, there twice or of another shape; naming the
            tensor where one is quantised, or holds NaN or infinity.
    """
    left_out: tuple[str, ...] = ()
    if source == release_format(family):
        settings, tensors, left_out = settle(family, settings, tensors)
    found = to_roles(entries_of(source, family, settings, tensors), tensors, settings)
    _check_values(tensors)
    norms = {role: norm_of(role.name, settings) for role in found if role.is_norm and role.part == "weight"}
    if gains is None:
        check_gains({role: found[role] for role in norms}, {role: norm.gain for role, norm in norms.items()})
    else:
        chosen = dict.fromkeys(norms, gains) if isinstance(gains, str) else gains
        if unknown := [str(role) for role in norms if role not in chosen]:
            raise ValueError(f"the convention of gains is not known for {', '.join(unknown[:5])}")
        norms = {role: replace(norm, gain=chosen[role]) for role, norm in norms.items()}
    return Stored(family, settings, found, norms, left_out)


def write_tensors_of(target: Format, stored: Stored) -> dict[str, Tensor]:
    """A checkpoint's tensors by the names of a format, gains as they are stored (see ``in_convention``).

    Raises:
        ValueError: naming a role that the format has no place for, or one that it needs and does not get.
    """
    return from_roles(entries_of(target, stored.family, stored.settings), stored.tensors, stored.settings)


def in_convention(stored: Stored, target: Format, gain: GainChoice = "keep") -> Stored:
    """The same model with its gains as a format stores them.

    Args:
        stored: the model.
        target: the format. That of a release has its family's convention.
        gain: for the other formats, which one. ``keep`` leaves gains alone if all norms agree, else makes all plain.

    Raises:
        ValueError: for a convention that the format's code does not have.
    """
    check_choice("gain", gain, GainChoice)
    wanted = _wanted(stored, target, gain)
    tensors, norms = dict(stored.tensors), dict(stored.norms)
    for role, norm in stored.norms.items():
        tensors[role] = with_gain(tensors[role], norm.gain, wanted)
        norms[role] = replace(norm, gain=wanted)
    settings = dict(stored.settings)
    if target in CHOOSES_GAIN and norms:
        settings["norm.gain"] = wanted
    return replace(stored, tensors=tensors, norms=norms, settings=settings)


def _wanted(stored: Stored, target: Format, gain: GainChoice) -> Gain:
    own = stored.family.gain
    if target not in CHOOSES_GAIN:
        if gain not in ("keep", own):
            raise ValueError(f"the code of {stored.family.name} takes gains as {own}, so {target} cannot have {gain}")
        return own
    if gain != "keep":
        return gain
    kinds: set[Gain] = {norm.gain for norm in stored.norms.values()}
    return kinds.pop() if len(kinds) == 1 else "plain"


def entries_of(
    name: Format, family: Family, settings: Settings, names: Collection[str] | None = None
) -> dict[str, Entry]:
    """The tensors of a format and their roles; ``names`` are those of a file, for a format that leaves a choice.

    Raises ValueError for a format that the family does not have.
    """
    check_choice("format", name, Format)
    if name == release_format(family):
        return family.entries(settings)
    if name not in CHOOSES_GAIN:
        raise ValueError(f"{name} is no format of the family {family.name}; take one of {', '.join(formats(family))}")
    roles = family.roles(settings)
    if name == "normstream":
        check_ours(settings)
        return normstream.entries(settings, roles)
    megatron.check(settings)
    if names is None:
        return megatron.entries(settings, roles, is_fused=name == "megatron-fused")
    return megatron.as_found(settings, roles, set(names))


def formats(family: Family) -> tuple[Format, ...]:
    """The formats that models of a family can have.

    >>> formats(family_of("siamese_dit"))
    ('siamese-dit', 'normstream')
    """
    own = release_format(family)
    return (own, *CHOOSES_GAIN) if own == "hf" else (own, "normstream")


def to_roles(entries: Mapping[str, Entry], tensors: Mapping[str, Tensor], settings: Settings) -> dict[Role, Tensor]:
    """Tensors by role; each is used exactly once.

    Raises ValueError for what is missing, unknown, there twice or of another shape.
    """
    problems = [
        f"{', '.join(map(str, entry.roles))}: {name} is missing"
        for name, entry in entries.items()
        if name not in tensors
    ]
    problems += [f"{name} has no role in this model" for name in tensors if name not in entries]
    problems += _twice(entries)
    if problems:
        raise ValueError(_list("the tensors do not fit the model", problems))
    lengths, found = sizes(settings), {}
    for name, entry in entries.items():
        found |= zip(entry.roles, _split(name, entry, tensors[name], settings), strict=True)
    problems = [
        f"{role}: expected shape {_shape(shape_of(role, lengths))}, got {tuple(tensor.shape)}"
        for role, tensor in found.items()
        if not _fits(tensor, shape_of(role, lengths))
    ]
    if problems:
        raise ValueError(_list("the tensors do not have the shapes that the configuration says", problems))
    return found


def from_roles(entries: Mapping[str, Entry], tensors: Mapping[Role, Tensor], settings: Settings) -> dict[str, Tensor]:
    """Tensors by name; each role is written exactly once.

    Raises ValueError for a role that has no name, or that a name needs and that is not there.
    """
    wanted = [role for entry in entries.values() for role in entry.roles]
    problems = [f"{role} is missing" for role in wanted if role not in tensors]
    problems += [f"{role} has no place in the target" for role in tensors.keys() - set(wanted)]
    problems += _twice(entries)
    if problems:
        raise ValueError(_list("the model does not fit the format", sorted(problems)))
    head_dim = _head_dim(settings)
    return {
        name: entry.layout.join([tensors[role] for role in entry.roles], head_dim).contiguous()
        for name, entry in entries.items()
    }


def _check_values(tensors: Mapping[str, Tensor]) -> None:
    if others := [name for name, tensor in tensors.items() if tensor.dtype not in FLOATS]:
        dtype = str(tensors[others[0]].dtype).removeprefix("torch.")
        raise ValueError(
            f"{others[0]} has the dtype {dtype}; expected float16, bfloat16, float32 or float64. Quantised weights are "
            "not converted: take the checkpoint they were made from"
        )
    if broken := not_finite(tensors):
        raise ValueError(_list("NaN or infinity in", broken))


def _split(name: str, entry: Entry, tensor: Tensor, settings: Settings) -> list[Tensor]:
    lengths = sizes(settings)
    rows = [shape_of(role, lengths)[0] for role in entry.roles]
    if len(rows) == 1 and not entry.layout.transposed:
        return [tensor]
    try:
        return entry.layout.split(tensor, [n or tensor.shape[-1] for n in rows], _head_dim(settings))
    except ValueError as error:
        raise ValueError(f"{name} ({', '.join(map(str, entry.roles))}): {error}") from None


def _head_dim(settings: Settings) -> int:
    return settings.get("head_dim") or settings["dim"] // settings["n_heads"]


def _twice(entries: Mapping[str, Entry]) -> list[str]:
    counts = Counter(role for entry in entries.values() for role in entry.roles)
    return [f"{role} is there {count} times" for role, count in counts.items() if count > 1]


def _fits(tensor: Tensor, shape: tuple[int | None, ...]) -> bool:
    return tensor.ndim == len(shape) and all(n in (None, size) for n, size in zip(shape, tensor.shape, strict=True))


def _shape(shape: tuple[int | None, ...]) -> str:
    return f"({', '.join('any' if n is None else str(n) for n in shape)}{',' if len(shape) == 1 else ''})"


def _list(what: str, problems: list[str]) -> str:
    more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
    return f"{what}: {'; '.join(problems[:5])}{more}"
