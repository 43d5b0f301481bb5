"""Role tables: what a row says, and how it is written out for every layer and expert.

    ROWS = {
        "model.embed_tokens.weight": "token_embedding",
        "model.layers.{i}.input_layernorm.weight": "attention_pre_norm",
        "model.layers.{i}.mlp.gate_up_proj.weight": fused("gate", "up"),
    }

On the left stands the name of a tensor, on the right the name of its role, or the roles of the matrices that lie in
it. ``{i}`` is a layer, ``{e}`` an expert; ``{dense}`` is a layer without experts, ``{moe}`` one with them. A row for a
weight is also the row of its bias, where the role has one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter

from normstream.checkpoints.conversion.layouts import Layout
from normstream.checkpoints.conversion.roles import Part, Role


@dataclass(frozen=True)
class Row:
    """The right side of a row."""

    roles: tuple[str, ...]
    """Names of the roles whose matrices lie in the tensor, in order."""
    layout: Layout = field(default_factory=Layout)


Rows = Mapping[str, str | Row]
"""A role table."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint: the roles whose matrices lie in it, and how."""

    roles: tuple[Role, ...]
    layout: Layout


@dataclass(frozen=True)
class Indices:
    """What the names in braces stand for in one model."""

    layers: Mapping[str, Sequence[int]]
    """Layers by the name of the placeholder: ``i`` for all of them."""
    n_experts: int = 0
    """Number of values of ``{e}``."""
    more: Callable[[int], Mapping[str, str]] = lambda layer: {}
    """Further texts that depend on the layer."""


def fused(*roles: str, order: str = "blocks", transposed: bool = False) -> Row:
    """Several matrices in one tensor.

    >>> fused("gate", "up").roles
    ('gate', 'up')
    """
    return Row(roles, Layout("groups" if order == "groups" else "blocks", transposed))


def transposed(role: str) -> Row:
    """A matrix that is stored as input by output.

    >>> transposed("o").layout.transposed
    True
    """
    return Row((role,), Layout(transposed=True))


def write_out(rows: Rows, indices: Indices, has_bias: Callable[[str], bool]) -> dict[str, Entry]:
    """The rows of a table for every layer and expert, weights and biases.

    >>> entries = write_out({"h.{i}.ln.weight": "ffn_pre_norm"}, Indices({"i": range(2)}), lambda role: True)
    >>> list(entries)
    ['h.0.ln.weight', 'h.0.ln.bias', 'h.1.ln.weight', 'h.1.ln.bias']
    """
    entries: dict[str, Entry] = {}
    for pattern, right in rows.items():
        row = Row((right,)) if isinstance(right, str) else right
        parts: tuple[Part, ...] = ("weight", "bias") if has_bias(row.roles[0]) else ("weight",)
        for name, layer, expert in _names(pattern, indices):
            for part in parts:
                key = name if part == "weight" else name.removesuffix("weight") + "bias"
                entries[key] = Entry(tuple(Role(role, layer, expert, part) for role in row.roles), row.layout)
    return entries


def only(entries: Mapping[str, Entry], roles: set[Role]) -> dict[str, Entry]:
    """The entries of a table for many families that are about these roles.

    >>> entries = write_out({"fc1.weight": fused("gate", "up")}, Indices({}), lambda role: False)
    >>> only(entries, {Role("up")})["fc1.weight"].roles
    (Role(name='up', layer=None, expert=None, part='weight'),)
    """
    kept = {name: tuple(role for role in entry.roles if role in roles) for name, entry in entries.items()}
    return {name: Entry(found, entries[name].layout) for name, found in kept.items() if found}


def _names(pattern: str, indices: Indices) -> Iterator[tuple[str, int | None, int | None]]:
    """The names that a pattern stands for, with layer and expert."""
    fields = {name for _, name, _, _ in Formatter().parse(pattern) if name}
    by_layer = next((name for name in fields if name in indices.layers), "i")
    layers = indices.layers[by_layer] if fields - {"e"} else (None,)
    for layer in layers:
        texts = {} if layer is None else {by_layer: str(layer), **indices.more(layer)}
        for expert in range(indices.n_experts) if "e" in fields else (None,):
            yield pattern.format(**texts, e=expert), layer, expert
