"""What files of released models hold besides the tensors of the role table: second copies, buffers, missing heads."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from normstream.checkpoints.conversion.formats.family import Family
from normstream.checkpoints.conversion.settings import Settings


def settle(
    family: Family, settings: Settings, tensors: Mapping[str, Tensor]
) -> tuple[Settings, dict[str, Tensor], tuple[str, ...]]:
    """The settings with what the names of the tensors add to them, the tensors of the table, and the names left out.

    A model may have been saved without its head, then its names lack a prefix; it may have some heads and lack others;
    older files hold tied matrices twice, and buffers.

    Raises ValueError if a second copy is not equal to the first.
    """
    constant = re.compile("|".join(f"({pattern})" for pattern in family.constants) or r"(?!)")
    kept = {name: tensor for name, tensor in tensors.items() if not constant.fullmatch(name)}
    no_head = bool(family.prefix) and not any(name.startswith(family.prefix) for name in kept)
    optional = tuple(
        name
        for name, rows in family.optional.items()
        if any(_stored_name(row, family, no_head) in kept for row in rows)
    )
    settings = settings | {"file.no_head": no_head, "file.optional": optional}
    for copy, original in _copies(family, settings, no_head).items():
        if copy in kept and original in kept:
            if not torch.equal(kept[copy], kept[original]):
                raise ValueError(f"{copy} must be equal to {original}, which the model shares with it, but it differs")
            del kept[copy]
    return settings, kept, tuple(name for name in tensors if name not in kept)


def _stored_name(name: str, family: Family, no_head: bool) -> str:
    return name.removeprefix(family.prefix) if no_head else name


def _copies(family: Family, settings: Settings, no_head: bool) -> dict[str, str]:
    copies = dict(family.copies)
    if settings.get("tied"):
        rows = family.rows(settings) if callable(family.rows) else family.rows
        by_role = {role: name for name, role in rows.items() if isinstance(role, str)}
        if "head" in by_role:
            copies[by_role["head"]] = by_role["token_embedding"]
    return {copy: _stored_name(original, family, no_head) for copy, original in copies.items()}
